"""The forward kernel: O, lse and the O that δ sees.

A program owns a tile of query rows and walks over the key tiles that it may see, one online-
softmax step each (FlashAttention-2, arXiv 2307.08691, Algorithm 1). Tiles above the causal
diagonal are neither computed nor loaded; only tiles that the diagonal, a length or the end of the
keys cuts are masked. The arithmetic is that of `lowprec_attn.steps`, point by point.
"""

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
from pallas_kernels.gpu.problem import LOG2E, Problem, call, mask_scores
from pallas_kernels.gpu.rounding import Rounder, format_of
from pallas_kernels.gpu.scalars import Scalars, whole

_FLOAT32 = get_format("float32")
_BFLOAT16 = get_rounding("bfloat16")


class Outputs(NamedTuple):
    """O [B, T, N, H], lse [B, N, T], O for δ where it is another."""

    o: Any
    lse: Any
    saved: Any = None


def forward(q: Array, k: Array, v: Array, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the kernel."""
    p, head = problem, problem.padded_head
    n = p.spec.numerics
    grid = (p.q_tiles, p.heads, p.batch)
    rows = pl.BlockSpec((None, p.rows, None, head), lambda i, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, p.keys, None, head), lambda i, n, b: (b, 0, n // p.group, 0))
    out_rows = pl.BlockSpec(
        (None, p.tile.query, None, head), lambda i, n, b: (b, _tile_index(p, i), n, 0)
    )
    statistics = pl.BlockSpec((None, None, p.tile.query), lambda i, n, b: (b, n, _tile_index(p, i)))
    saved_dtype = _saved_dtype(p)
    shape = (p.batch, p.rows, p.heads, p.head_size)
    out = Outputs(
        jax.ShapeDtypeStruct(shape, n.output_dtype(p.dtype)),
        jax.ShapeDtypeStruct((p.batch, p.heads, p.rows), jnp.float32),
        None if saved_dtype is None else jax.ShapeDtypeStruct(shape, saved_dtype),
    )
    out_specs = Outputs(out_rows, statistics, None if saved_dtype is None else out_rows)
    specs = ((rows, keys, keys, jax.tree.map(whole, scalars)), out_specs)
    return Outputs(*call(_forward, p, grid, specs, out)(q, k, v, scalars))


def _saved_dtype(problem: Problem) -> np.dtype | None:
    """Dtype of the O that δ sees, None where it is O itself or not needed."""
    n = problem.spec.numerics
    if n.delta == "dp_p" or n.saved_output == "same":
        return None
    return jnp.dtype(jnp.float32 if n.saved_output == "float32" else jnp.bfloat16)


def _tile_index(problem: Problem, i: Array) -> Array:
    """The query tile of program i. Under causality the longest walks start first."""
    return problem.q_tiles - 1 - i if problem.spec.is_causal else i


def _forward(
    q_ref: Any, k_ref: Any, v_ref: Any, scalars: Scalars, *out: Any, problem: Problem
) -> None:
    p = problem
    i, head, batch = _tile_index(p, pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    start = i * p.tile.query
    q = p.load_rows(q_ref, start, p.tile.query)
    round_point = p.rounder(scalars, batch, head)

    def step(j: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
        k, v, place = p.load_keys(k_ref, j), p.load_keys(v_ref, j), p.place(i, j)
        step_place = Place(place.rows, place.cols, j * p.tile.kv)
        s = round_point.dot(q, k.T, format_of(q), format_of(k)) * _score_scale(p)
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


def _score_scale(problem: Problem) -> np.float32:
    return np.float32(problem.spec.scale * (LOG2E if problem.log2_units else 1.0))


def _masked_step_changes_nothing(problem: Problem) -> bool:
    """Whether a fully masked step leaves a row's state as it is under this rule."""
    return isinstance(problem.spec.row_max, StandardMax | DynamicMax)


def _initial_state(problem: Problem) -> SoftmaxState:
    row = jnp.zeros((problem.tile.query, 1), jnp.float32)
    acc = jnp.zeros((problem.tile.query, problem.padded_head), jnp.float32)
    aux = acc if _keeps_auxiliary(problem) else None
    return SoftmaxState(jnp.full_like(row, MASKED), row, acc, aux)


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

    m = round_point(rule(s, state.m), "stats", n.stats, m_place)
    # Where every key so far is masked, m == MASKED: subtract 0, so that exp gives 0, not 1.
    subtracted = jnp.where(m <= MASKED, jnp.float32(0), m)
    p = _exp(s - subtracted, problem)
    alpha = _exp(state.m - subtracted, problem)

    p_rounded = round_point(p, "probs", n.probs, Place(place.rows, place.cols))
    row_sum = jnp.sum(p_rounded if n.row_sum == "rounded" else p, axis=-1, keepdims=True)
    if rule.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
    l = round_point(alpha * state.l + row_sum, "stats", n.stats, l_place)

    pv = round_point.dot(p_rounded, v, n.probs.result_format, format_of(v))
    pv = round_point(pv, "pv", n.pv, out)
    rescaled = round_point(alpha * state.acc, "rescale", n.rescale, out)
    acc = round_point(rescaled + pv, "accumulator", n.accumulator, out)

    aux = state.aux
    if aux is not None:
        aux = alpha * aux + round_point.dot(p, v, _FLOAT32, format_of(v))
    return SoftmaxState(m, l, acc, aux)


def _exp(x: Array, problem: Problem) -> Array:
    """Exp in float32, as the hardware's power of two; `jnp.exp` costs four more instructions."""
    return jnp.exp2(x if problem.log2_units else x * jnp.float32(LOG2E))


def _column(index: int) -> Array:
    """A column index [1, 1] that tells the random bits of row statistics apart."""
    return jnp.full((1, 1), index, jnp.int32)


def _finish(
    state: SoftmaxState, problem: Problem, round_point: Rounder, start: Array, out: Outputs
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    p, n = problem, problem.spec.numerics
    place = p.features(start, p.tile.query)
    empty = state.m <= MASKED
    divisor = jnp.where(empty, jnp.float32(1), state.l)
    unrounded = state.acc / divisor
    o = round_point(unrounded, "output", n.output_for(p.dtype), place)
    p.store(out.o, o, start, p.rows)
    if state.aux is not None:
        p.store(out.saved, round_point.nearest(state.aux / divisor, _BFLOAT16), start, p.rows)
    elif out.saved is not None:
        p.store(out.saved, unrounded, start, p.rows)

    if p.log2_units:
        lse = (state.m + jnp.log2(divisor)) * jnp.float32(1 / LOG2E)
    else:
        lse = state.m + jnp.log(divisor)
    lse = round_point(lse, "stats", n.stats, Place(place.rows, _column(2)))
    lse = jnp.where(empty, -jnp.inf, lse)
    p.store_statistics(out.lse, lse[:, 0], start)
