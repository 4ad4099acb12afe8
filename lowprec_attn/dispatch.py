"""Which implementation serves a call, and the calls that heads of different arithmetic need."""

import functools
import logging
from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn import dense, tiled
from lowprec_attn.numerics import Numerics
from lowprec_attn.request import Extras, Request, Spec

_log = logging.getLogger(__name__)

# Fastest first: `implementation=None` takes the first that supports the request.
IMPLEMENTATIONS: dict[str, ModuleType] = {"tiled": tiled, "dense": dense}


class Part(NamedTuple):
    """Query heads that share their arithmetic, and who computes them."""

    heads: tuple[int, ...]
    spec: Spec
    implementation: str


class Call(NamedTuple):
    """One validated call."""

    q: Array
    k: Array
    v: Array
    extras: Extras
    parts: tuple[Part, ...]


def resolve(request: Request, implementation: str | None = None) -> str:
    """The name of the implementation that serves the request; logged once per answer.

    Raises:
      ValueError: unknown name.
      NotImplementedError: the one asked for, or every one, declines.
    """
    reasons = {name: module.unsupported(request) for name, module in IMPLEMENTATIONS.items()}
    able = [name for name, reason in reasons.items() if reason is None]
    if implementation is None:
        if not able:
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise NotImplementedError(f"no implementation of attention serves this call. {listed}")
        _log_choice(able[0], request.spec.numerics)
        return able[0]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}"
        )
    if reasons[implementation] is not None:
        others = f"use {' or '.join(able)}" if able else "no other implementation does either"
        raise NotImplementedError(
            f"implementation {implementation!r} does not support "
            f"{reasons[implementation]}; {others}"
        )
    return implementation


@functools.cache
def _log_choice(name: str, numerics: Numerics) -> None:
    _log.info("attention: %s for %s", name, numerics)


def compute(call: Call) -> tuple[Array, Array]:
    """One call per part, heads put back in order."""
    if len(call.parts) == 1:  # under shard_map `heads` counts global heads, the arrays hold fewer
        (part,) = call.parts
        implementation = IMPLEMENTATIONS[part.implementation]
        return implementation.attention(call.q, call.k, call.v, call.extras, part.spec)
    results = []
    for part in call.parts:
        q, k, v, extras = _select_heads(call, part.heads)
        results.append(IMPLEMENTATIONS[part.implementation].attention(q, k, v, extras, part.spec))
    order = np.argsort([head for part in call.parts for head in part.heads])
    # Parts may hand on O in different formats; the widest one holds them all.
    dtypes = {out.dtype for out, _ in results}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    out = jnp.concatenate([out.astype(dtype) for out, _ in results], axis=2)[:, :, order]
    return out, jnp.concatenate([lse for _, lse in results], axis=2)[:, :, order]


def _select_heads(call: Call, heads: tuple[int, ...]) -> tuple[Array, Array, Array, Extras]:
    q, k, v, extras, _ = call
    group = q.shape[2] // k.shape[2]
    query_heads = np.array(heads)
    kv_heads = np.unique(query_heads // group)
    bias, mask = (
        x if x is None or x.shape[1] == 1 else x[:, query_heads] for x in (extras.bias, extras.mask)
    )
    stream = extras.stream
    if stream is not None:
        stream = stream._replace(head=stream.head[query_heads])
    extras = extras._replace(bias=bias, mask=mask, stream=stream)
    return q[:, :, query_heads], k[:, :, kv_heads], v[:, :, kv_heads], extras
