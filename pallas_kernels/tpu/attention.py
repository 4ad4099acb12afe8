"""Attention on TPUs: forward and backward kernels under one `custom_vjp`.

Serves float32 and bfloat16 at every numerics point, rounded to nearest or stochastically, and
every row-max rule. Attention may be causal or not, in a local window, with grouped heads, with
lengths, segments and dense masks, of any sequence length. `unsupported` names what it declines;
`tiled` serves that.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.backward import SUMS_ROWS, delta_from_saved_output, rounded_delta
from lowprec_attn.arithmetic.layout import Grouped, Residuals, group, ungroup
from lowprec_attn.arithmetic.operands import read
from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.recurrence import RowStatistics
from lowprec_attn.arithmetic.request import (
    Extras,
    Request,
    Spec,
    unsupported_by_kernels,
    unsupported_in_tiles,
    unsupported_variants,
)
from lowprec_attn.arithmetic.transforms import first_order_only, named
from pallas_kernels.pairs import Pairs
from pallas_kernels.rounder import unsupported_rounding
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu.backward import Operands, lse_unit
from pallas_kernels.tpu.block_sizes import LANES, BlockSizes, Steps, Tile, block_sizes_of, too_large
from pallas_kernels.tpu.forward import forward
from pallas_kernels.tpu.key_gradients import key_gradients
from pallas_kernels.tpu.mainloop import Inputs
from pallas_kernels.tpu.problem import Problem
from pallas_kernels.tpu.query_gradients import delta_from_probs, query_gradients

FORMATS = ("float32", "bfloat16")
MODES = ("nearest", "stochastic")


def unsupported(request: Request) -> str | None:
    """What the kernels cannot serve of the request, or None."""
    if reason := unsupported_in_tiles(request, BlockSizes):
        return reason
    sizes = request.spec.block_sizes
    assert sizes is None or isinstance(sizes, BlockSizes)
    interpreted = sizes is not None and sizes.interpret is not None
    if not interpreted and (request.platform or jax.default_backend()) != "tpu":
        return "this platform (it needs a TPU, or BlockSizes(interpret=...))"
    if reason := unsupported_by_kernels(request):
        return reason
    if reason := unsupported_variants(request):
        return reason
    if request.dtype.name not in FORMATS:
        return f"{request.dtype.name} q, k and v (it takes {' and '.join(FORMATS)})"
    if reason := _unsupported_numerics(request):
        return reason
    has_mask = request.mask_shape is not None
    sizes = _sizes_for(request)
    return too_large(sizes, request.q_shape[-1], request.dtype.itemsize, has_mask=has_mask)


def keys_per_step(request: Request) -> int:
    """Keys of one online-softmax step: `kv_block`, or the keys of the forward kernel's tile."""
    return request.spec.numerics.step_of(request.kv_shape[1], _sizes_for(request).forward.kv)


def exponent_of(request: Request) -> str:
    """How both passes form exponents, see `Numerics.exponent`."""
    return "shift_first"


def _sizes_for(request: Request) -> BlockSizes:
    (_, rows, _, head_size), keys = request.q_shape, request.kv_shape[1]
    given = request.spec.block_sizes
    assert given is None or isinstance(given, BlockSizes)  # `unsupported` declines any other
    numerics, itemsize = request.spec.numerics, request.dtype.itemsize
    has_mask = request.mask_shape is not None
    return block_sizes_of(given, numerics, rows, keys, head_size, itemsize, has_mask=has_mask)


def _unsupported_numerics(request: Request) -> str | None:
    numerics = request.spec.numerics
    step = numerics.kv_block
    if isinstance(step, int) and step % LANES:
        if step < request.kv_shape[1]:
            return f"kv_block={step} (its steps have multiples of {LANES} keys, or all)"
        if step < request.q_shape[1] and not numerics.tile_grads.is_identity:
            return (
                f"kv_block={step} with tile_grads (tiles of multiples of {LANES} queries, or all)"
            )
    if numerics.mean_key != "kept":
        return f"mean_key={numerics.mean_key} (it takes kept)"
    if numerics.exponent not in (None, "shift_first"):
        return f"exponent={numerics.exponent} (it takes shift_first)"
    if numerics.recomputed_probs != "unrounded":
        return f"recomputed_probs={numerics.recomputed_probs} (it takes unrounded)"
    return unsupported_rounding(numerics, FORMATS, MODES)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """O = softmax(q kᵀ · scale) v [B, T, N, H] and lse [B, T, N], float32.

    `spec.numerics` says what is rounded. With `spec.max_logit` there is a third array, the largest
    score of each row [B, T, N].

    Raises:
      ValueError: a stochastic point without random bits.
    """
    if spec.numerics.needs_bits and extras.stream is None:
        raise ValueError("stochastic rounding draws random bits; pass rng_key=jax.random.key(...)")
    return ungroup(*_attend(*group(q, k, v, extras), spec))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, extras: Extras, spec: Spec) -> tuple[Array, ...]:
    return _forward(q, k, v, extras, spec)[0]


def _forward(
    q: Array, k: Array, v: Array, extras: Extras, spec: Spec
) -> tuple[tuple[Array, ...], Residuals]:
    q, k, v = first_order_only((q, k, v), "tpu")
    inputs = Grouped(q, k, v, extras)
    problem = _problem(inputs, spec, _sizes_of(inputs, spec).forward)
    qs, ks, vs = _padded_inputs(inputs, problem)
    pairs = _padded_pairs(extras, problem)
    out = named(forward(Inputs(qs, ks, vs, pairs), _scalars(extras, spec), problem))
    rows = q.shape[-2]
    o = _by_group(out.o, problem)[..., :rows, :]
    of_rows = [_by_row(x, problem) for x in (out.lse, out.max_logit) if x is not None]
    statistics, result = RowStatistics(of_rows[0]), (o, *of_rows)
    if out.apart is not None:
        statistics = RowStatistics(*(_by_row(x, problem) for x in out.apart))
    saved = None if out.saved is None else _by_group(out.saved, problem)[..., :rows, :]
    if spec.numerics.delta == "dp_p":
        return result, Residuals(inputs, None, statistics)
    if spec.numerics.saved_output == "halves":
        return result, Residuals(inputs, o, statistics, saved)
    return result, Residuals(inputs, o if saved is None else saved, statistics)


def _backward(
    spec: Spec, res: Residuals, cotangents: tuple[Array, ...]
) -> tuple[Array, Array, Array, Extras]:
    inputs, (do, dlse) = res.inputs, first_order_only(cotangents[:2], "tpu")
    sizes, scalars = _sizes_of(inputs, spec), _scalars(inputs.extras, spec)
    by_query, by_key = (
        _problem(inputs, spec, tile) for tile in (sizes.query_gradients, sizes.key_gradients)
    )
    # P = exp(S − lse) must be 0 in a row without keys, whose lse is −inf, and in a padded row.
    lse, inverse_l = res.statistics
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)

    def operands(problem: Problem, **rows: Array) -> Operands:
        q, k, v = _padded_inputs(inputs, problem)
        unit = 1.0 if inverse_l is not None else lse_unit(problem)  # m has this unit already
        scores_lse = _statistics(lse / jnp.float32(unit), problem, jnp.inf)
        if inverse_l is not None:
            rows = {**rows, "inverse_l": inverse_l}
        statistics = {name: _statistics(x, problem, 0.0) for name, x in rows.items()}
        pairs = _padded_pairs(inputs.extras, problem)
        do_rows = _padded_rows(do, problem)
        return Operands(q, k, v, do_rows, scores_lse, pairs=pairs, **statistics)

    n, rows, dtype = spec.numerics, span(0, do.shape[-2])[:, None], inputs.q.dtype
    if res.o_saved is None:
        delta = _by_row(delta_from_probs(operands(by_query), scalars, by_query), by_query)
        delta = rounded_delta(delta[..., None], rows, spec, inputs.extras)[..., 0]
    else:
        o = res.o_saved
        if res.o_low is not None:
            o = o.astype(jnp.float32) + res.o_low.astype(jnp.float32)
        o = read(o, "output_bwd", spec, inputs.extras)
        delta = delta_from_saved_output(do, o, rows, spec, inputs.extras, dtype)[..., 0]
    # d lse / dS = P, so a gradient of lse enters dS = P ∘ (dP − δ + dlse) beside δ.
    of_rows = {"delta": delta}
    if n.delta in SUMS_ROWS:  # dQ comes first, because its kernel finds the δ of dK, or λ
        of_queries = operands(by_query, delta=delta, dlse=dlse)
        dq, found = query_gradients(of_queries, scalars, by_query)
        of_rows["after" if n.delta == "after_cast" else "delta"] = _by_row(found, by_query)
    else:
        of_rows["delta"] = delta - dlse
        dq, _ = query_gradients(operands(by_query, **of_rows), scalars, by_query)
    dk, dv = key_gradients(operands(by_key, **of_rows), scalars, by_key)
    dq = _by_group(dq, by_query)[..., : do.shape[-2], :]
    keys = inputs.k.shape[-2]
    return dq, dk[..., :keys, :], dv[..., :keys, :], Extras()


_attend.defvjp(_forward, _backward)


def _problem(inputs: Grouped, spec: Spec, tile: Tile) -> Problem:
    batch, kv_heads, group, rows, head_size = inputs.q.shape
    keys = inputs.k.shape[-2]
    sizes = _sizes_of(inputs, spec)
    return Problem(
        spec=spec,
        batch=batch,
        rows=rows,
        keys=keys,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=inputs.q.dtype,
        tile=tile,
        steps=Steps.of(spec.numerics, sizes.forward, rows, keys),
        interpret=sizes.interpret,
        has_query_lengths=inputs.extras.query_lengths is not None,
        has_key_lengths=inputs.extras.key_lengths is not None,
        has_pairs=inputs.extras.query_segments is not None or inputs.extras.mask is not None,
    )


def _sizes_of(inputs: Grouped, spec: Spec) -> BlockSizes:
    (*_, rows, head_size), keys = inputs.q.shape, inputs.k.shape[-2]
    given = spec.block_sizes
    assert given is None or isinstance(given, BlockSizes)  # `unsupported` declines any other
    itemsize, has_mask = inputs.q.dtype.itemsize, inputs.extras.mask is not None
    return block_sizes_of(given, spec.numerics, rows, keys, head_size, itemsize, has_mask=has_mask)


def _scalars(extras: Extras, spec: Spec) -> Scalars:
    scalars = Scalars.of(extras, spec)
    if scalars.seed is None:
        return scalars
    # Scalar memory holds int32.
    return scalars._replace(seed=lax.bitcast_convert_type(scalars.seed, jnp.int32))


def _padded_inputs(inputs: Grouped, problem: Problem) -> tuple[Array, Array, Array]:
    """q (times the scale where that is exact), k and v, padded to whole tiles."""
    q, k, v, _ = inputs
    if problem.scales_queries:
        q = q * jnp.asarray(problem.spec.scale, q.dtype)
    k, v = (_pad(x, problem.padded_keys) for x in (k, v))
    return _padded_rows(q, problem), k, v


def _padded_pairs(extras: Extras, problem: Problem) -> Pairs | None:
    """Segments as [B, 1, T] and [B, 1, S], and the mask, padded to whole tiles."""
    mask = extras.mask
    if mask is not None:  # [B|1, K|1, G|1, T, S]
        extras = extras._replace(mask=mask.reshape(len(mask), -1, *mask.shape[3:]))
    pairs = Pairs.of(extras, problem.rows, problem.keys)
    if pairs is None:
        return None
    more_rows, more_keys = problem.padded_rows - problem.rows, problem.padded_keys - problem.keys

    def padded(segments: Array | None, more: int) -> Array | None:
        return None if segments is None else jnp.pad(segments, ((0, 0), (0, more)))[:, None]

    mask = pairs.mask
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, more_rows), (0, more_keys)))
    return Pairs(
        padded(pairs.query_segments, more_rows), padded(pairs.key_segments, more_keys), mask
    )


def _padded_rows(x: Array, problem: Problem) -> Array:
    """Reshapes [B, K, G, T, H] to [B, N, T, H] and pads T to whole tiles."""
    return _pad(x.reshape(problem.batch, problem.heads, *x.shape[3:]), problem.padded_rows)


def _pad(x: Array, size: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)))


def _statistics(x: Array, problem: Problem, fill: float) -> Array:
    """Reshapes [B, K, G, T] to [B, N, 1, T] and pads T to whole tiles with `fill`."""
    x = x.reshape(problem.batch, problem.heads, 1, problem.rows)
    padding = ((0, 0), (0, 0), (0, 0), (0, problem.padded_rows - problem.rows))
    return jnp.pad(x, padding, constant_values=fill)


def _by_group(x: Array, problem: Problem) -> Array:
    """Reshapes [B, N, ...] to [B, K, G, ...]."""
    return x.reshape(problem.batch, problem.kv_heads, problem.group, *x.shape[2:])


def _by_row(statistics: Array, problem: Problem) -> Array:
    """Reshapes [B, N, 1, T], with T padded to whole tiles, to [B, K, G, T] without padding."""
    return _by_group(statistics, problem)[..., 0, : problem.rows]
