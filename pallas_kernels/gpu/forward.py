"""The forward kernel: O, lse and the O that δ sees.

A program owns a tile of query rows and walks over the key tiles that it may see, one online-
softmax step each (FlashAttention-2, arXiv 2307.08691, Algorithm 1). Tiles above the causal
diagonal are neither computed nor loaded; only tiles that the diagonal, a length or the end of the
keys cuts are masked. The arithmetic is that of `lowprec_attn.steps`, point by point.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax, StandardMax, get_format, get_rounding
from lowprec_attn.steps import Place, SoftmaxState
from pallas_kernels.gpu.instructions import (
    exp2,
    is_repeated,
    is_repeated_by_warp,
    multiply_add,
)
from pallas_kernels.gpu.problem import LOG2E, Problem, call, mask_scores
from pallas_kernels.gpu.rounding import Rounder
from pallas_kernels.gpu.scalars import Scalars, whole
from pallas_kernels.rounding import format_of

_FLOAT32 = get_format("float32")
_BFLOAT16 = get_rounding("bfloat16")

# A tensor-core tile spreads the columns of a row over four threads, in a pattern of eight columns:
# the first thread holds columns 0 and 1 of it, the second 2 and 3 ...
_THREADS, _LANES = 4, 8


class Outputs(NamedTuple):
    """O [B, T, N, H], lse [B, N, T], O for δ where it is another."""

    o: Any
    lse: Any
    saved: Any = None


def forward(q: Array, k: Array, v: Array, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the kernel."""
    p = problem
    n = p.spec.numerics
    lse, statistics = p.tile_statistics
    saved_dtype = _saved_dtype(p)
    shape = (p.batch, p.rows, p.heads, p.head_size)
    out = Outputs(
        jax.ShapeDtypeStruct(shape, n.output_dtype(p.dtype)),
        lse,
        None if saved_dtype is None else jax.ShapeDtypeStruct(shape, saved_dtype),
    )
    out_rows = p.tile_rows()
    out_specs = Outputs(out_rows, statistics, None if saved_dtype is None else out_rows)
    specs = ((p.head_rows(0), *p.head_keys, jax.tree.map(whole, scalars)), out_specs)
    return Outputs(*call(_forward, p, p.query_grid, specs, out)(q, k, v, scalars))


def _saved_dtype(problem: Problem) -> np.dtype | None:
    """Dtype of the O that δ sees, None where it is O itself or not needed."""
    n = problem.spec.numerics
    if n.delta == "dp_p" or n.saved_output == "same":
        return None
    return jnp.dtype(jnp.float32 if n.saved_output == "float32" else jnp.bfloat16)


def _forward(
    q_ref: Any, k_ref: Any, v_ref: Any, scalars: Scalars, *out: Any, problem: Problem
) -> None:
    p = problem
    i, head, batch = p.query_tile(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    start = i * p.tile.query
    q = p.load_rows(q_ref, start, p.tile.query)
    round_point = p.rounder(scalars, batch, head)

    def step(j: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
        k, v, place = p.load_keys(k_ref, j), p.load_keys(v_ref, j), p.place(i, j)
        step_place = Place(place.rows, place.cols, j * p.tile.kv)
        s = round_point.dot(q, k.T, format_of(q), format_of(k))
        s = s * np.float32(p.spec.scale / p.score_unit)
        s = round_point(s, "scores", p.spec.numerics.scores, place)
        if not masked:
            return _softmax_step(state, s, v, p, round_point, step_place)
        s = mask_scores(s, p.visible(place, batch, scalars))
        new = _softmax_step(state, s, v, p, round_point, step_place)
        if _masked_step_changes_nothing(p):
            return new
        # A step that lies wholly beyond what a row may see by position does not exist for it.
        first = Place(place.rows, jnp.full((1, 1), step_place.step))
        visited = p.visible(first, batch, scalars)
        return jax.tree.map(partial(jnp.where, visited), new, state)

    full, end = p.key_range(i, batch, scalars)
    state = lax.fori_loop(0, full, partial(step, masked=False), _initial_state(p))
    if p.has_masked_tiles:
        state = lax.fori_loop(full, end, partial(step, masked=True), state)
    _finish(state, p, round_point, start, Outputs(*out))


def _masked_step_changes_nothing(problem: Problem) -> bool:
    """Whether a fully masked step leaves a row's state as it is: no rule moves m, no point Ō."""
    n = problem.spec.numerics
    keeps_accumulator = n.rescale.is_identity or n.rescale.format == n.accumulator.format
    return keeps_accumulator and isinstance(problem.spec.row_max, StandardMax | DynamicMax)


def _initial_state(problem: Problem) -> SoftmaxState:
    row = jnp.zeros((problem.tile.query, _copies(problem)), jnp.float32)
    acc = jnp.zeros((problem.tile.query, problem.padded_head), jnp.float32)
    aux = acc if _keeps_auxiliary(problem) else None
    l = jnp.zeros((problem.tile.query, _LANES), jnp.float32) if _row_sums(problem) > 1 else row
    return SoftmaxState(jnp.full_like(row, MASKED), l, acc, aux)


def _copies(problem: Problem) -> int:
    """Copies of m: one per thread of a row where each learns by itself whether a tie shifts it."""
    return _THREADS if problem.counts_ties_by_warp else 1


def _over_row(reduce: Callable[..., Array], x: Array, problem: Problem) -> Array:
    """A tile reduced over its columns, [query, copies]."""
    if _copies(problem) == 1:
        return reduce(x, axis=-1, keepdims=True)
    x = x.reshape(x.shape[0], -1, _THREADS, _LANES // _THREADS)
    by_thread = reduce(reduce(x, axis=3), axis=1)
    return jnp.broadcast_to(reduce(by_thread, axis=1, keepdims=True), by_thread.shape)


def _per_column(x: Array, columns: int) -> Array:
    """[query, copies] for the columns of a tile, [query, columns] or [query, 1]."""
    rows, copies = x.shape
    if copies == 1:
        return x
    shape = (rows, columns // _LANES, copies, _LANES // copies)
    return jnp.broadcast_to(x[:, None, :, None], shape).reshape(rows, columns)


def _row_sums(problem: Problem) -> int:
    """Sums that l is kept in: 8 where only their total matters, at the end, else 1.

    A thread then adds the scores that it holds itself, and no step waits for an exchange.
    """
    n, rule = problem.spec.numerics, problem.spec.row_max
    return _LANES if n.stats.is_identity and rule.clamp is None else 1


def _row_sum(p: Array, problem: Problem) -> Array:
    """What l adds up: sums of the columns that are equal modulo 8, or of all, [query, copies]."""
    if _row_sums(problem) == 1:
        return _over_row(jnp.sum, p, problem)
    return jnp.sum(p.reshape(p.shape[0], -1, _LANES), axis=1)


def _keeps_auxiliary(problem: Problem) -> bool:
    return _saved_dtype(problem) == jnp.bfloat16


def _softmax_step(
    state: SoftmaxState,
    s: Array,
    v: Array,
    problem: Problem,
    round_point: Rounder,
    place: Place,
) -> SoftmaxState:
    """One online-softmax step; `place.step` is its first key, for what every step rounds anew."""
    n, rule = problem.spec.numerics, problem.spec.row_max
    m_place, l_place = (Place(place.rows, _column(which), place.step) for which in (0, 1))
    out = Place(place.rows, problem.feature_columns, place.step)

    # At least MASKED: −inf − (−inf) would be NaN.
    r_m = jnp.maximum(_over_row(jnp.max, s, problem), jnp.float32(MASKED))
    below = s - _per_column(r_m, problem.tile.kv)
    m = rule.running_max(
        r_m,
        below,
        state.m,
        unit=problem.score_unit,
        is_repeated=partial(
            is_repeated_by_warp if problem.counts_ties_by_warp else is_repeated,
            interpret=problem.interpret,
        ),
    )
    m = round_point(m, "stats", n.stats, m_place)
    # Where every key so far is masked, m == MASKED: subtract 0, so that exp gives 0, not 1.
    subtracted = jnp.where(m <= MASKED, jnp.float32(0), m)
    # exp(S − m) = 2^((s − r_m)·c − (m − r_m)·c): s − r_m is at hand, an entry at m gives exactly 1.
    to_log2 = np.float32(problem.score_unit * LOG2E)
    offset = _per_column((r_m - subtracted) * to_log2, problem.tile.kv)
    log2_p = multiply_add(below, to_log2, offset, interpret=problem.interpret)
    p = exp2(log2_p, interpret=problem.interpret)
    alpha = exp2((state.m - subtracted) * to_log2, interpret=problem.interpret)

    p_rounded = round_point(p, "probs", n.probs, Place(place.rows, place.cols))
    row_sum = _row_sum(p_rounded if n.row_sum == "rounded" else p, problem)
    if rule.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
    alpha_of_l = _per_column(alpha, _LANES) if _row_sums(problem) > 1 else alpha
    l = round_point(alpha_of_l * state.l + row_sum, "stats", n.stats, l_place)
    alpha = _per_column(alpha, problem.padded_head)

    pv = round_point.dot(p_rounded, v, n.probs.result_format, format_of(v))
    pv = round_point(pv, "pv", n.pv, out)
    rescaled = round_point(alpha * state.acc, "rescale", n.rescale, out)
    acc = round_point(rescaled + pv, "accumulator", n.accumulator, out)

    aux = state.aux
    if aux is not None:
        aux = alpha * aux + round_point.dot(p, v, _FLOAT32, format_of(v))
    return SoftmaxState(m, l, acc, aux)


def _column(index: int) -> Array:
    """A column index [1, 1] that tells the random bits of row statistics apart."""
    return jnp.full((1, 1), index, jnp.int32)


def _finish(
    state: SoftmaxState, problem: Problem, round_point: Rounder, start: Array, out: Outputs
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    p, n = problem, problem.spec.numerics
    place = p.features(start, p.tile.query)
    one = partial(jnp.max, axis=-1, keepdims=True)  # of equal copies
    m = one(state.m)
    l = jnp.sum(state.l, axis=-1, keepdims=True) if _row_sums(p) > 1 else one(state.l)
    empty = m <= MASKED
    divisor = jnp.where(empty, jnp.float32(1), l)
    unrounded = state.acc / divisor
    o = round_point(unrounded, "output", n.output_for(p.dtype), place)
    p.store(out.o, o, start, p.rows)
    if state.aux is not None:
        p.store(out.saved, round_point.nearest(state.aux / divisor, _BFLOAT16), start, p.rows)
    elif out.saved is not None:
        p.store(out.saved, unrounded, start, p.rows)

    lse = m * np.float32(p.score_unit) + jnp.log(divisor)
    lse = round_point(lse, "lse", n.lse, Place(place.rows, _column(2)))
    lse = jnp.where(empty, -jnp.inf, lse)
    p.store_statistics(out.lse, lse[:, 0], start)
