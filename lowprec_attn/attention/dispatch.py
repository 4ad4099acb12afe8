"""Chooses the implementation of a call, and splits a call whose heads differ in arithmetic."""

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

from lowprec_attn.arithmetic.hidden import lengths_alone_hide, seen_by_any
from lowprec_attn.arithmetic.max_logit import maximum
from lowprec_attn.arithmetic.operands import share_scales
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

# `implementation=None` selects the first entry that supports the request, unless the module of that
# entry names a faster one for this request (`faster_elsewhere`).
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "hopper": hopper,
    "gpu": gpu,
    "tpu": tpu,
    "tiled": tiled,
    "dense": dense,
}

# JAX's names of the lowering platforms that have their own implementations; "default" stands for
# every other platform.
_PLATFORMS = ("cuda", "tpu", "default")
# The lowering platforms for each platform of devices. JAX calls ROCm devices `gpu` as well.
_OF_DEVICES = {"gpu": ("cuda", "default"), "cuda": ("cuda",), "tpu": ("tpu",)}
_platforms: ContextVar[tuple[str, ...]] = ContextVar("platforms", default=_PLATFORMS)


class UnsupportedError(UserError, NotImplementedError):
    """No implementation, or not the named one, serves a call.

    The message gives the reasons, and names the implementations that do serve the call.
    """


class Part(NamedTuple):
    """Query heads that share their arithmetic.

    `implementations` holds pairs (platform, name of the implementation that computes these heads).
    """

    heads: tuple[int, ...]
    spec: Spec
    implementations: tuple[tuple[str, str], ...]


class Call(NamedTuple):
    """One validated call; `arrays` holds q, k and v, or one array that packs all three."""

    arrays: tuple[Array, ...]
    extras: Extras
    parts: tuple[Part, ...]


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """A context in which calls are traced for one platform only, without the kernels of others.

    Args:
      platform: JAX's name for the platform of the devices, such as `gpu` or, for NVIDIA's alone,
        `cuda`.
    """
    before = _platforms.set(_OF_DEVICES.get(platform, ("default",)))
    try:
        yield
    finally:
        _platforms.reset(before)


def resolve_by_platform(request: Request, implementation: str | None) -> dict[str, str]:
    """Returns the name of the implementation that serves the request, by platform.

    A named implementation serves every platform. If `implementation` is None, each platform gets
    its own choice, because a computation need not be lowered for the devices of this process.
    `traced_for` limits the platforms.

    Raises:
      ValueError, UnsupportedError: as `resolve` does.
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
        # Only CUDA has two kernel implementations. An unknown GPU gives no reason to report.
        if platform == "cuda" and device_kind() is not None:
            declined = declined_by(dataclasses.replace(request, platform=platform), name)
            told[platform] += f", since {'; '.join(declined)}," if declined else ""
    _log_choice(tuple(told.items()), request.spec.numerics)
    return names


def check_name(implementation: object) -> None:
    """Raises ValueError unless `implementation` is None or the name of an implementation."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}"
        )


def declined_by(request: Request, taken: str) -> list[str]:
    """Says why each implementation listed before `taken` was passed over.

    Each sentence names what the implementation does not support, or what makes it slower.
    """
    said = []
    for name in itertools.takewhile(lambda name: name != taken, IMPLEMENTATIONS):
        reason = IMPLEMENTATIONS[name].unsupported(request)
        if reason is None and (faster := _faster_elsewhere(name, request)):
            said.append(f"{name} is slower with {faster[1]}")
        else:
            said.append(f"{name} does not support {reason}")
    return said


def _faster_elsewhere(name: str, request: Request) -> tuple[str, str] | None:
    """Returns a faster implementation for a request that `name` supports, or None.

    The second element says which feature of the request makes `name` slower.
    """
    module = IMPLEMENTATIONS[name]
    if not hasattr(module, "faster_elsewhere"):
        return None
    return module.faster_elsewhere(request)


def resolve(request: Request, implementation: str | None = None) -> str:
    """Returns the name of the implementation that serves the request on its platform.

    Args:
      request: the properties of a call; `arithmetic.request.Request.of` reads them from arrays.
      implementation: the only implementation to ask; None: the fastest that serves the request.

    Raises:
      ValueError: the name is unknown.
      UnsupportedError: the named implementation declines the request, or, without a name, all do.
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
        others = f"use {' or '.join(able)}" if able else _without_block_sizes(request)
        raise UnsupportedError(
            f"implementation {implementation!r} does not support "
            f"{reasons[implementation]}; {others}"
        )
    return implementation


def _without_block_sizes(request: Request) -> str:
    """Says who serves a request whose tiles belong to the implementation that declines it."""
    asked = dataclasses.replace(request, spec=dataclasses.replace(request.spec, block_sizes=None))
    able = [name for name, module in IMPLEMENTATIONS.items() if module.unsupported(asked) is None]
    if not able:
        return "no other implementation does either"
    return f"use {' or '.join(able)}, without these block_sizes"


def keys_per_step(request: Request, implementation: str | None = None) -> int:
    """The keys per online-softmax step of the implementation that serves the request.

    Without `kv_block` each implementation chooses its own step. The step affects the results.

    Raises:
      ValueError, UnsupportedError: as `resolve` does.
    """
    return IMPLEMENTATIONS[resolve(request, implementation)].keys_per_step(request)


def exponent_of(request: Request, implementation: str | None = None) -> str:
    """Returns how the implementation that serves the request forms exponents.

    The answer is a value of `Numerics.exponent`. If that field is None, each implementation chooses
    for itself, and some choose differently in the two passes. The answer is then 'shift_first',
    'scale_first', or 'shift_first, backward scale_first'.

    Args:
      request: see `resolve`.
      implementation: see `resolve`.

    Raises:
      ValueError, UnsupportedError: as `resolve` does.
    """
    return IMPLEMENTATIONS[resolve(request, implementation)].exponent_of(request)


@functools.cache
def _log_choice(names: tuple[tuple[str, str], ...], numerics: Numerics) -> None:
    """Logs each distinct choice once, such as `attention: tiled for Numerics(...)`.

    If platforms differ, the choice reads `gpu on cuda, tiled on default`. Each name is followed by
    the way it forms exponents, such as `tiled (shift_first)`, and by the reasons why a faster
    implementation of that platform declined.
    """
    if len({name for _, name in names}) == 1:
        choice = names[0][1]
    else:
        choice = ", ".join(f"{name} on {platform}" for platform, name in names)
    _log.info("attention: %s for %s", choice, numerics)


def compute(call: Call) -> tuple[Array, ...]:
    """Returns O, lse and, if `Spec.max_logit` is set, the largest score of every head [B, N].

    Each part of the call is computed by itself, and the heads are put back in order.
    """
    return _compute(call.parts, call.arrays, call.extras)


# This `jit` lets equal calls outside of a `jit`, and their gradients, compile once. Without it JAX
# would compile the loops of each call anew.
@functools.partial(jax.jit, static_argnums=0)
def _compute(
    parts: tuple[Part, ...], arrays: tuple[Array, ...], extras: Extras
) -> tuple[Array, ...]:
    arrays, extras = vary_alike((arrays, extras))
    # One part needs no selection. Under `shard_map` its head indices are global, while the arrays
    # hold fewer heads.
    if len(parts) == 1:
        return _run(parts[0], arrays, extras)
    results = [_run(part, *_select_heads(arrays, extras, part.heads)) for part in parts]
    order = np.argsort([head for part in parts for head in part.heads])
    # Parts may return O in different dtypes; float32 holds all of their values.
    out, lse, *max_logit = zip(*results, strict=True)
    dtypes = {x.dtype for x in out}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    o = jnp.concatenate([x.astype(dtype) for x in out], axis=2)[:, :, order]
    of_heads = [jnp.concatenate(x, axis=1)[:, order] for x in max_logit]
    return o, jnp.concatenate(lse, axis=2)[:, :, order], *of_heads


def _run(part: Part, arrays: tuple[Array, ...], extras: Extras) -> tuple[Array, ...]:
    """Runs the part's implementation, chosen at lowering time where platforms differ."""
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
    if module not in (tiled, dense):  # `tiled` and `dense` drop hidden pairs themselves
        q, k, _ = planes(*arrays)
        ends_at_lengths = module is gpu and extras.sinks is None
        seen = seen_by_any(extras, spec, q, k, ends_at_lengths=ends_at_lengths)
    elif share_scales(spec.numerics):
        return _attend_in_scales(module, spec, arrays, extras)
    # `hopper` reads zeros where lengths hide rows and keys, and returns gradients of 0 there.
    is_clean = module is hopper and lengths_alone_hide(extras)
    if seen is not None:
        arrays = arrays if is_clean else seen.clean(arrays)
        if extras.sinks is not None:  # the kernel and the rows without keys add up their gradients
            extras = extras._replace(sinks=extras.sinks.astype(jnp.float32))
    o, lse, *max_logit = _results(module, spec, arrays, extras)
    if seen is None:
        return o, lse, *max_logit
    o, lse = o if is_clean else seen.without_gradient(o), seen.without_gradient(lse)
    if extras.sinks is not None:  # a row without keys passes dlse on to its sink, if it has one
        of_kernel = seen.rows | (extras.sinks == -jnp.inf)[None, None]
        lse = jnp.where(of_kernel, lse, _lse_without_keys(extras, lse))
    return o, lse, *max_logit


def _results(
    module: ModuleType, spec: Spec, arrays: tuple[Array, ...], extras: Extras
) -> tuple[Array, ...]:
    """Returns the results of an implementation, with the largest score of every head."""
    if len(arrays) == 1 and hasattr(module, "packed_attention"):
        o, lse, *of_rows = module.packed_attention(*arrays, extras, spec)
    else:
        o, lse, *of_rows = module.attention(*planes(*arrays), extras, spec)
    return o, lse, *(_over_rows(lse, x) for x in of_rows)


def _over_rows(lse: Array, of_rows: Array) -> Array:
    """The largest score of every head [B, N], from the lse and largest scores of rows [B, T, N]."""
    lse, of_rows = lax.stop_gradient((lse, of_rows))
    # A row with a NaN score has lse = NaN, even if XLA's maximum over the keys left the NaN out.
    of_rows = jnp.where(jnp.isnan(lse) & (of_rows < jnp.inf), jnp.float32(jnp.nan), of_rows)
    return maximum(of_rows, axis=1)


def _attend_in_scales(
    module: ModuleType, spec: Spec, arrays: tuple[Array, ...], extras: Extras
) -> tuple[Array, ...]:
    """Runs `tiled` or `dense` where rows share a scale, which no hidden infinity may set."""
    q, k, _ = planes(*arrays)
    seen = seen_by_any(extras, spec, q, k, ends_at_lengths=False)
    if seen is None:
        return _results(module, spec, arrays, extras)
    o, *others = _results(module, spec, seen.clean(arrays, keep_finite=True), extras)
    return jnp.where(seen.rows[..., None], o, lax.stop_gradient(o)), *others


def _lse_without_keys(extras: Extras, lse: Array) -> Array:
    """The lse [B, T, N] of rows that see no key: their sink, or −inf beyond the query lengths."""
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
