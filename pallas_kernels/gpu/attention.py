"""Attention on NVIDIA GPUs: forward and backward kernels under one `custom_vjp`.

Serves float32, bfloat16, float16 and shortened significands at every numerics point, in every
rounding mode, and every row-max rule. Attention may be causal or not, in a local window, with
grouped heads, with sinks, lengths, segments and dense masks, of any sequence length. `unsupported`
names what it declines; `tiled` serves that.

The floor of causal attention at 16 × 1024 × 12 × 64 in bfloat16 (25 MB per array) on one H200, at
4.3 TB/s and 790 TFLOP/s:

  forward       moves 101 MB (q, k, v, O): 23 µs    multiplies  26 GFLOP:  33 µs
  both passes   move  302 MB:              70 µs    multiply   116 GFLOP: 147 µs

The backward pass takes seven products instead of five, because both of its kernels form S and dP.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowprec_attn.arithmetic import sinks
from lowprec_attn.arithmetic.backward import SUMS_ROWS, without_mean
from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.recurrence import RowStatistics
from lowprec_attn.arithmetic.request import (
    BackwardSums,
    Extras,
    Request,
    Spec,
    unsupported_by_kernels,
    unsupported_in_tiles,
    unsupported_symbolic_batch,
)
from lowprec_attn.arithmetic.transforms import first_order_only, named
from lowprec_attn.numerics import FORMATS, MODES, KvBlock, Numerics
from pallas_kernels.gpu.backward import (
    Found,
    Operands,
    delta_from_probs,
    dp_offset,
    exponent_offset,
    key_gradients,
    query_gradients,
)
from pallas_kernels.gpu.block_sizes import BlockSizes, Tile, default_block_sizes, is_hopper
from pallas_kernels.gpu.device import device_kind, too_old, without_triton
from pallas_kernels.gpu.forward import forward
from pallas_kernels.gpu.problem import Problem, hides_exponent_noise
from pallas_kernels.pairs import Pairs
from pallas_kernels.rounder import unsupported_rounding
from pallas_kernels.scalars import Scalars

# float16, and every format with float32's exponents: bfloat16 and the shortened significands.
_SERVED = ("float16", *(name for name, fmt in FORMATS.items() if fmt.has_float32_exponents))
KV_TILE = 16  # a step has a multiple of this many keys, or all
_ONE_TILE = (16, 32, 64, 128)  # sizes of blocks that one tile may hold whole


def unsupported(request: Request) -> str | None:
    """What the kernels cannot serve of the request, or None."""
    if reason := unsupported_in_tiles(request, BlockSizes):
        return reason
    sizes = request.spec.block_sizes
    assert sizes is None or isinstance(sizes, BlockSizes)
    if version := without_triton():
        return f"JAX {version} (it needs one with Pallas' Triton lowering)"
    interpret = sizes is not None and sizes.interpret
    if not interpret and (request.platform or jax.default_backend()) not in ("cuda", "gpu"):
        return "this platform (it needs a CUDA GPU, or BlockSizes(interpret=True))"
    if not interpret and (capability := too_old()):
        return f"compute capability {capability} (it needs 8.0, Ampere)"
    if reason := unsupported_by_kernels(request):
        return reason
    if not interpret and (reason := unsupported_symbolic_batch(request)):
        return reason
    if reason := _unsupported_mask(request):
        return reason
    if request.has_sinks and request.spec.scale == 0:
        return "sinks with scale=0 (their gradient is found in units of the scale)"
    return _unsupported_numerics(request)


def _unsupported_mask(request: Request) -> str | None:
    if request.mask_shape is None:
        return None
    entries = math.prod((*request.mask_shape[:2], request.q_shape[1], request.kv_shape[1]))
    if entries < 2**31:
        return None
    return f"a dense mask of {entries} entries (it takes fewer than 2^31)"


def _unsupported_numerics(request: Request) -> str | None:
    numerics, rows, keys = request.spec.numerics, request.q_shape[1], request.kv_shape[1]
    step = numerics.step_of(keys, KV_TILE)
    if step % KV_TILE and step < keys:
        return f"kv_block={numerics.kv_block} (its steps have multiples of {KV_TILE} keys, or all)"
    queries = numerics.step_of(rows, KV_TILE)
    if not numerics.tile_grads.is_identity and queries % KV_TILE and queries < rows:
        return (
            f"tile_grads={numerics.tile_grads} with kv_block={numerics.kv_block} "
            f"(its tiles have multiples of {KV_TILE} queries, or all)"
        )
    if numerics.exponent == "unfused":  # a compiler may fuse the two again
        return "exponent=unfused (it takes shift_first, scale_first or whole_max)"
    return unsupported_rounding(numerics, _SERVED, MODES)


def keys_per_step(request: Request) -> int:
    """Keys of one online-softmax step: `kv_block`, or the keys of the forward kernel's tile."""
    q = jax.ShapeDtypeStruct(request.q_shape, request.dtype)
    numerics, keys = request.spec.numerics, request.kv_shape[1]
    sizes = block_sizes(q, request.spec, request.value_size)
    return numerics.step_of(keys, sizes.forward.kv)


def exponent_of(request: Request) -> str:
    """How exponents are formed. The backward kernels differ where roundings hide their error."""
    numerics = request.spec.numerics
    own = "shift_first, backward scale_first" if hides_exponent_noise(numerics) else "shift_first"
    return numerics.exponent or own


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """O = softmax(q kᵀ · scale) v [B, T, N, V] and lse [B, T, N], float32.

    `spec.numerics` says what is rounded. With `spec.max_logit` there is a third array, the largest
    score of each row [B, T, N].

    Raises:
      ValueError: a stochastic point without random bits.
    """
    return _attend((q, k, v), extras, spec)


def packed_attention(
    qkv: Float[Array, "B T 3 N H"], extras: Extras, spec: Spec
) -> tuple[Array, ...]:
    """`attention` of q, k and v in one array, which the kernels read without copying its planes.

    The kernels also write its gradient into one array.

    Raises:
      ValueError: as `attention`.
    """
    return _attend((qkv,), extras, spec)


# q, k and v, or one packed array of them.
_Arrays = tuple[Array, ...]


class _Residuals(NamedTuple):
    arrays: _Arrays
    extras: Extras
    o_saved: Array | None
    o_low: Array | None
    statistics: RowStatistics


def _separate(arrays: _Arrays) -> _Arrays:
    """q, k and v; each of them is the packed array if there is one."""
    return arrays * 3 if len(arrays) == 1 else arrays


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(arrays: _Arrays, extras: Extras, spec: Spec) -> tuple[Array, ...]:
    return _forward(arrays, extras, spec)[0]


def _forward(arrays: _Arrays, extras: Extras, spec: Spec) -> tuple[tuple[Array, ...], _Residuals]:
    if spec.numerics.needs_bits and extras.stream is None:
        raise ValueError("stochastic rounding draws random bits; pass rng_key=jax.random.key(...)")
    arrays = first_order_only(arrays, "gpu")
    q, k, v = _separate(arrays)
    tile = block_sizes(q, spec, v.shape[-1]).forward
    tile = _dividing(tile, "kv", spec.numerics.kv_block, k.shape[1])
    problem = _problem((q, k, v), extras, spec, tile)
    scalars = _scalars(extras, spec, q.shape[1], k.shape[1])
    if extras.sinks is not None:
        of_heads = first_order_only(extras.sinks, "gpu")
        extras = extras._replace(sinks=of_heads)
        start = sinks.start_of_rows(of_heads, problem.score_unit, spec)
        scalars = scalars._replace(start=start)
    out = named(forward(q, k, v, scalars, problem))
    saved, low = None, None
    if spec.numerics.delta != "dp_p":
        halves = spec.numerics.saved_output == "halves"
        saved = out.o if halves or out.saved is None else out.saved
        low = out.saved if halves else None
    statistics = RowStatistics(*((out.lse,) if out.apart is None else out.apart))
    residuals = _Residuals(arrays, extras, saved, low, statistics)
    of_rows = (out.lse,) if out.max_logit is None else (out.lse, out.max_logit)
    return (out.o, *(x.transpose(0, 2, 1) for x in of_rows)), residuals


def _backward(spec: Spec, res: _Residuals, cotangents: tuple[Array, ...]) -> tuple[_Arrays, Extras]:
    do, dlse = first_order_only(cotangents[:2], "gpu")
    arrays, extras, o_saved, o_low, statistics = res
    q, k, v = _separate(arrays)
    sizes = block_sizes(q, spec, v.shape[-1])
    scalars = _scalars(extras, spec, q.shape[1], k.shape[1])
    of_queries, of_keys = sizes.query_gradients, sizes.key_gradients
    if not spec.numerics.tile_grads.is_identity:
        # The kernel of dQ rounds after every kv_block keys, the kernel of dK and dV after every
        # kv_block queries.
        kv_block = spec.numerics.kv_block or sizes.forward.kv
        spec = dataclasses.replace(spec, numerics=spec.numerics.replace(kv_block=kv_block))
        of_queries = _dividing(of_queries, "kv", kv_block, k.shape[1])
        of_keys = _dividing(of_keys, "query", kv_block, q.shape[1])
    by_query = _problem((q, k, v), extras, spec, of_queries)
    by_key = _problem((q, k, v), extras, spec, of_keys)
    offset = exponent_offset(statistics.subtracted, by_query)
    operands = Operands(q, k, v, do, offset, inverse_l=statistics.inverse_l)
    dlse = dlse.transpose(0, 2, 1)
    sink = None
    if extras.sinks is not None:
        sink = _sink_probabilities(extras.sinks, statistics, extras, by_query)
        if spec.numerics.delta in SUMS_ROWS:
            operands = operands._replace(sink=sink)
    if o_saved is None:
        delta = delta_from_probs(operands, scalars, by_query) - dlse
        operands = operands._replace(dp_offset=dp_offset(delta, by_query))
    else:
        operands = operands._replace(o=o_saved, o_low=o_low, dlse=dlse)
    operands_of_q = operands
    if spec.numerics.mean_key == "subtracted":
        keys = k[:, :, 1] if by_query.packed else k
        of_q, mean = (x.swapaxes(1, 2) for x in without_mean(keys.swapaxes(1, 2)))
        operands_of_q = operands._replace(k_of_q=of_q, mean=mean, given=dlse)
    asked = extras.backward_sums is not None
    dq, found, row_sums = query_gradients(operands_of_q, scalars, by_query, row_sums=asked)
    operands = operands._replace(**found._asdict(), o=None, o_low=None, dlse=None, sink=None)
    of_extras = Extras()
    if asked:
        of_extras = Extras(backward_sums=BackwardSums(*(x.transpose(0, 2, 1) for x in row_sums)))
    if sink is not None and extras.sinks is not None:
        dsinks = _sink_gradient(sink, found, by_query).astype(extras.sinks.dtype)
        of_extras = of_extras._replace(sinks=dsinks)
    if by_key.packed:
        operands = operands._replace(gradients=dq)
        return key_gradients(operands, scalars, by_key), of_extras
    return (dq, *key_gradients(operands, scalars, by_key)), of_extras


_attend.defvjp(_forward, _backward)


def _sink_probabilities(
    given: Array, statistics: RowStatistics, extras: Extras, problem: Problem
) -> Array:
    """P_sink [B, N, T] of the given sinks [N]; 0 in rows beyond the lengths."""
    of_rows = given[None, :, None]
    p = sinks.probabilities(of_rows, statistics, problem.score_unit, problem.spec)
    if extras.query_lengths is None:
        return p
    exists = span(0, problem.rows)[None] < extras.query_lengths[:, None]
    return jnp.where(exists[:, None], p, jnp.float32(0))


def _sink_gradient(sink: Array, found: Found, problem: Problem) -> Array:
    """The gradient of the sinks, Σ P_sink (dlse − δ) [N].

    `found` holds dlse − δ, which dQ's kernel adds to dP, in the units of dS in that kernel.
    """
    added = found.dp_offset if found.after is None else found.dp_offset - found.after
    total = jnp.sum(sink * added, axis=(0, 2))
    return total if problem.scales_last else total / jnp.float32(problem.spec.scale)


def _scalars(extras: Extras, spec: Spec, rows: int, keys: int) -> Scalars:
    return Scalars.of(extras, spec)._replace(pairs=Pairs.of(extras, rows, keys))


def _dividing(tile: Tile, side: str, block: KvBlock | None, length: int) -> Tile:
    """The tile with its `side` changed to divide `block`; one block of all rows takes any size."""
    size = getattr(tile, side)
    if block is None:
        return tile
    if isinstance(block, int) and block in _ONE_TILE:
        size = block
    elif block == "all" or block >= length:
        whole = max(1 << (length - 1).bit_length(), KV_TILE)  # in one tile, if it fits
        size = whole if whole in _ONE_TILE else size
    else:
        size = math.gcd(block, size)  # a power of two, as `size` is
    return dataclasses.replace(tile, **{side: size})


def _problem(qkv: _Arrays, extras: Extras, spec: Spec, tile: Tile) -> Problem:
    q, k, v = qkv
    interpret = isinstance(spec.block_sizes, BlockSizes) and spec.block_sizes.interpret
    device = {"interpret": interpret, "hopper": is_hopper(device_kind())}
    return Problem.of(q, k, extras, spec, tile, **device, value_size=v.shape[-1])


def block_sizes(
    q: Array | jax.ShapeDtypeStruct, spec: Spec, value_size: int | None = None
) -> BlockSizes:
    """The tiles that a call names, or the tiles of the table for the larger head size."""
    if spec.block_sizes is None:
        return default_block_sizes(
            max(q.shape[-1], value_size or 0),
            length=q.shape[1],
            splits=_splits(spec.numerics, q.dtype),
            sums_keys=spec.numerics.delta in SUMS_ROWS,
            device_kind=device_kind(),
        )
    assert isinstance(spec.block_sizes, BlockSizes)  # `unsupported` declines any other
    return spec.block_sizes


def _splits(numerics: Numerics, dtype: np.dtype) -> bool:
    """Whether some product has an operand in float32 or in another format than the inputs."""
    name = jnp.dtype(dtype).name
    operands = [numerics.probs, numerics.probs_bwd, numerics.ds]
    if not numerics.value.is_identity:
        operands.append(numerics.value)
    return name == "float32" or any(x.result_format.storage != name for x in operands)
