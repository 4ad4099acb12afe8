"""Which implementation serves a call, and the calls that heads of different arithmetic need."""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.hidden import seen_by_any
from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.request import Extras, Request, Spec, planes
from lowprec_attn.arithmetic.transforms import vary_alike
from lowprec_attn.attention import dense, tiled
from lowprec_attn.errors import UserError
from lowprec_attn.numerics import Numerics
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.tpu import attention as tpu

_log = logging.getLogger(__name__)

# `implementation=None` takes the first that supports the request, unless that says that another is
# faster with it.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "hopper": hopper,
    "gpu": gpu,
    "tpu": tpu,
    "tiled": tiled,
    "dense": dense,
}

# Platforms, as JAX names what a computation is lowered for, that have implementations of their
# own; "default" is any other.
_PLATFORMS = ("cuda", "tpu", "default")
# What a call is lowered for on devices of a platform; those of ROCm are called `gpu` as well.
_OF_DEVICES = {"gpu": ("cuda", "default"), "tpu": ("tpu",)}
_platforms: ContextVar[tuple[str, ...]] = ContextVar("platforms", default=_PLATFORMS)


class UnsupportedError(UserError, NotImplementedError):
    """No implementation, or not the named one, serves a call; the message says why and which do."""


class Part(NamedTuple):
    """Query heads that share their arithmetic, and who computes them, by platform."""

    heads: tuple[int, ...]
    spec: Spec
    implementations: tuple[tuple[str, str], ...]


class Call(NamedTuple):
    """One validated call; `arrays` are q, k and v, or one packed array of them."""

    arrays: tuple[Array, ...]
    extras: Extras
    parts: tuple[Part, ...]


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """A context whose calls are lowered for these devices alone: no other kernels are traced.

    Args:
      platform: of the devices, as JAX names it, such as `gpu`.
    """
    before = _platforms.set(_OF_DEVICES.get(platform, ("default",)))
    try:
        yield
    finally:
        _platforms.reset(before)


def resolve_by_platform(request: Request, implementation: str | None) -> dict[str, str]:
    """The implementation of a request for every platform; raises as `resolve`.

    Without a choice the platform that the computation is lowered for decides, which need not be
    that of this process's devices (see `traced_for`). A chosen implementation serves all of them.
    """
    if implementation is not None:
        return dict.fromkeys(_platforms.get(), resolve(request, implementation))
    names = {
        platform: resolve(dataclasses.replace(request, platform=platform))
        for platform in _platforms.get()
    }
    told = {}
    for platform, name in names.items():
        told[platform] = f"{name} ({IMPLEMENTATIONS[name].exponent_of(request)})"
        # The platform with two implementations of its own; of an unknown GPU there is no reason.
        if platform == "cuda" and device_kind() is not None:
            declined = declined_by(dataclasses.replace(request, platform=platform), name)
            told[platform] += f", since {'; '.join(declined)}," if declined else ""
    _log_choice(tuple(told.items()), request.spec.numerics)
    return names


def check_name(implementation: object) -> None:
    """Raises ValueError unless it is None or the name of an implementation."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}"
        )


def declined_by(request: Request, taken: str) -> list[str]:
    """What the implementations that go before `taken` do not support or are slower with."""
    said = []
    for name in itertools.takewhile(lambda name: name != taken, IMPLEMENTATIONS):
        reason = IMPLEMENTATIONS[name].unsupported(request)
        if reason is None and (faster := _faster_elsewhere(name, request)):
            said.append(f"{name} is slower with {faster[1]}")
        else:
            said.append(f"{name} does not support {reason}")
    return said


def _faster_elsewhere(name: str, request: Request) -> tuple[str, str] | None:
    """Of a request that the implementation supports: another that is faster, and with what."""
    module = IMPLEMENTATIONS[name]
    if not hasattr(module, "faster_elsewhere"):
        return None
    found: tuple[str, str] | None = module.faster_elsewhere(request)
    return found


def resolve(request: Request, implementation: str | None = None) -> str:
    """The name of the implementation that serves the request on its platform.

    Raises:
      ValueError: unknown name.
      UnsupportedError: the one asked for, or every one, declines.
    """
    reasons = {name: module.unsupported(request) for name, module in IMPLEMENTATIONS.items()}
    able = [name for name, reason in reasons.items() if reason is None]
    if implementation is None:
        if able:
            faster = _faster_elsewhere(able[0], request)
            return faster[0] if faster and faster[0] in able else able[0]
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no implementation of attention serves this call. {listed}")
    check_name(implementation)
    if reasons[implementation] is not None:
        others = f"use {' or '.join(able)}" if able else "no other implementation does either"
        raise UnsupportedError(
            f"implementation {implementation!r} does not support "
            f"{reasons[implementation]}; {others}"
        )
    return implementation


def keys_per_step(request: Request, implementation: str | None = None) -> int:
    """Keys of one online-softmax step of what serves the request on its platform.

    Without `kv_block` every implementation has a step of its own, and the step is arithmetic.

    Raises:
      ValueError, UnsupportedError: as `resolve`.
    """
    return IMPLEMENTATIONS[resolve(request, implementation)].keys_per_step(request)


def exponent_of(request: Request, implementation: str | None = None) -> str:
    """How the implementation that serves the request forms exponents: `Numerics.exponent`.

    Without it every implementation has a way of its own, some another in each pass: 'shift_first',
    'scale_first', or 'shift_first, backward scale_first'.

    Raises:
      ValueError, UnsupportedError: as `resolve`.
    """
    return IMPLEMENTATIONS[resolve(request, implementation)].exponent_of(request)


@functools.cache
def _log_choice(names: tuple[tuple[str, str], ...], numerics: Numerics) -> None:
    """Once per answer: `attention: tiled for Numerics(...)`, or `gpu on cuda, tiled on default`.

    Behind each name stands how it forms exponents, such as `tiled (shift_first)`, and what a faster
    implementation of that platform declined.
    """
    if len({name for _, name in names}) == 1:
        choice = names[0][1]
    else:
        choice = ", ".join(f"{name} on {platform}" for platform, name in names)
    _log.info("attention: %s for %s", choice, numerics)


def compute(call: Call) -> tuple[Array, ...]:
    """O, lse and, where `Spec.max_logit` asks for it, the largest score of every head [B, N].

    One call per part, heads put back in order.
    """
    return _compute(call.parts, call.arrays, call.extras)


# Equal calls outside of a `jit`, and their gradients, are compiled once: without this one JAX would
# compile the loops of each call anew.
@functools.partial(jax.jit, static_argnums=0)
def _compute(
    parts: tuple[Part, ...], arrays: tuple[Array, ...], extras: Extras
) -> tuple[Array, ...]:
    arrays, extras = vary_alike((arrays, extras))
    if len(parts) == 1:  # under shard_map `heads` counts global heads, the arrays hold fewer
        return _run(parts[0], arrays, extras)
    results = [_run(part, *_select_heads(arrays, extras, part.heads)) for part in parts]
    order = np.argsort([head for part in parts for head in part.heads])
    # Parts may hand on O in different formats; the widest one holds them all.
    out, lse, *max_logit = zip(*results, strict=True)
    dtypes = {x.dtype for x in out}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    o = jnp.concatenate([x.astype(dtype) for x in out], axis=2)[:, :, order]
    of_heads = [jnp.concatenate(x, axis=1)[:, order] for x in max_logit]
    return o, jnp.concatenate(lse, axis=2)[:, :, order], *of_heads


def _run(part: Part, arrays: tuple[Array, ...], extras: Extras) -> tuple[Array, ...]:
    """The part's implementation; where platforms differ, chosen when the call is lowered."""
    by_platform = {
        platform: functools.partial(_attend, IMPLEMENTATIONS[name], part.spec)
        for platform, name in part.implementations
    }
    if len({name for _, name in part.implementations}) == 1:
        return next(iter(by_platform.values()))(arrays, extras)
    return lax.platform_dependent(arrays, extras, **by_platform)


def _attend(
    module: ModuleType, spec: Spec, arrays: tuple[Array, ...], extras: Extras
) -> tuple[Array, ...]:
    seen = None
    if module not in (tiled, dense):  # these drop every hidden pair by themselves
        q, k, _ = planes(*arrays)
        ends_at_lengths = module is gpu and extras.sinks is None
        seen = seen_by_any(extras, spec, q, k, ends_at_lengths=ends_at_lengths)
    if seen is not None:
        arrays = seen.clean(arrays)
    if len(arrays) == 1 and hasattr(module, "packed_attention"):
        o, lse, *of_rows = module.packed_attention(*arrays, extras, spec)
    else:
        o, lse, *of_rows = module.attention(*planes(*arrays), extras, spec)
    max_logit = [jnp.max(lax.stop_gradient(x), axis=1) for x in of_rows]
    if seen is None:
        return o, lse, *max_logit
    o, lse = seen.without_gradients(o, lse)
    if extras.sinks is not None:  # the one gradient that a row without keys passes on
        lse = jnp.where(seen.rows, lse, _lse_without_keys(extras, lse))
    return o, lse, *max_logit


def _lse_without_keys(extras: Extras, lse: Array) -> Array:
    """The sinks, but −inf in rows beyond the lengths, [B, T, N]."""
    assert extras.sinks is not None
    of_rows = jnp.broadcast_to(extras.sinks.astype(jnp.float32), lse.shape)
    if extras.query_lengths is None:
        return of_rows
    exists = span(0, lse.shape[1])[None] < extras.query_lengths[:, None]
    return jnp.where(exists[..., None], of_rows, -jnp.inf)


def _select_heads(
    arrays: tuple[Array, ...], extras: Extras, heads: tuple[int, ...]
) -> tuple[tuple[Array, ...], Extras]:
    q, k, v = planes(*arrays)
    group = q.shape[2] // k.shape[2]
    query_heads = np.array(heads)
    kv_heads = np.unique(query_heads // group)
    bias, mask = (
        x if x is None or x.shape[1] == 1 else x[:, query_heads] for x in (extras.bias, extras.mask)
    )
    stream = extras.stream
    if stream is not None:
        stream = stream._replace(head=stream.head[query_heads])
    sinks = None if extras.sinks is None else extras.sinks[query_heads]
    row_sums = jax.tree.map(lambda x: x[:, :, query_heads], extras.backward_sums)
    extras = extras._replace(
        bias=bias, mask=mask, stream=stream, sinks=sinks, backward_sums=row_sums
    )
    return (q[:, :, query_heads], k[:, :, kv_heads], v[:, :, kv_heads]), extras
