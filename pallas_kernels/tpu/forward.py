"""The forward kernel: O, lse and the O that δ sees.

A program owns a tile of query rows; its key tiles follow in order on the last axis of the grid,
with the running state in scratch memory (FlashAttention-2, arXiv 2307.08691, Algorithm 1). A key
tile holds one or more online-softmax steps. Those above the causal diagonal are neither computed
nor fetched; only those that the diagonal or the end of the keys cuts are masked. The arithmetic is
that of `lowprec_attn.steps`, point by point; row statistics are kept equal in all 128 lanes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax, RowMax, StandardMax, get_format
from lowprec_attn.steps import Place, SoftmaxState
from pallas_kernels.rounding import BFLOAT16, format_of
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.problem import (
    Grid,
    Problem,
    call,
    column,
    exponential,
    indices,
    lanes,
    mask_scores,
    to_row,
)
from pallas_kernels.tpu.rounding import COLUMNS, ROWS, Rounder
from pallas_kernels.tpu.scalars import Scalars

_FLOAT32 = get_format("float32")


class Outputs(NamedTuple):
    """O [B, N, T, H], lse [B, N, 1, T], O for δ where it is another."""

    o: Any
    lse: Any
    saved: Any = None


class _Step(NamedTuple):
    """What the arithmetic of one online-softmax step needs beside its arrays."""

    problem: Problem
    round_point: Rounder
    place: Place
    masked: bool


def forward(q: Array, k: Array, v: Array, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the kernel on q [B, N, T, H], k and v [B, K, S, H], padded to whole tiles."""
    p, size = problem, problem.tile

    def key_tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Any, ...]:
        visited = p.key_range(i, size.kv, b, scalars)
        return b, lax.div(h, p.group), visited.clamp(j), 0

    rows = pl.BlockSpec((None, None, size.query, p.head_size), lambda b, h, i, j, _: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, size.kv, p.head_size), key_tile)
    statistics = pl.BlockSpec((None, None, 1, size.query), lambda b, h, i, j, _: (b, h, 0, i))
    saved_dtype = _saved_dtype(p)
    shape = (p.batch, p.heads, p.padded_rows, p.head_size)
    out = Outputs(
        jax.ShapeDtypeStruct(shape, p.spec.numerics.output_dtype(p.dtype)),
        jax.ShapeDtypeStruct((p.batch, p.heads, 1, p.padded_rows), jnp.float32),
        None if saved_dtype is None else jax.ShapeDtypeStruct(shape, saved_dtype),
    )
    statistic, accumulator = (size.query, LANES), (size.query, p.head_size)
    grid = Grid(
        sizes=(p.batch, p.heads, p.q_tiles, p.kv_tiles),
        parallel=3,
        in_specs=(rows, keys, keys),
        out_specs=Outputs(rows, statistics, None if saved_dtype is None else rows),
        scratch=(statistic, statistic, accumulator) + (accumulator,) * _keeps_auxiliary(p),
    )
    return Outputs(*call(_forward, p, grid, out)(scalars, q, k, v))


def step_size(problem: Problem) -> int:
    """Keys per online-softmax step."""
    return min(problem.spec.numerics.kv_block or problem.tile.kv, problem.tile.kv)


def _saved_dtype(problem: Problem) -> np.dtype | None:
    """Dtype of the O that δ sees, None where it is O itself or not needed."""
    n = problem.spec.numerics
    if n.delta == "dp_p" or n.saved_output == "same":
        return None
    return jnp.dtype(jnp.float32 if n.saved_output == "float32" else jnp.bfloat16)


def _keeps_auxiliary(problem: Problem) -> bool:
    return _saved_dtype(problem) == jnp.bfloat16


def _forward(
    scalars: Scalars, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, problem: Problem
) -> None:
    p, out, scratch = problem, Outputs(*refs[:3]), refs[3:]
    batch, head, i, j = (pl.program_id(axis) for axis in range(4))
    round_point = p.rounder(scalars, batch, head)
    state_ref = SoftmaxState(*scratch, *(() if _keeps_auxiliary(p) else (None,)))

    @pl.when(j == 0)
    def initialise() -> None:
        state_ref.m[...] = jnp.full_like(state_ref.m, MASKED)
        for ref in state_ref[1:]:
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    unit, size = _score_unit(p), step_size(p)
    per_tile = p.tile.kv // size
    visited = p.key_range(i, size, batch, scalars)

    def rows() -> Array:
        """Of the tile; formed within each branch, where most have no use for them."""
        return indices(i * p.tile.query, p.tile.query, 0)

    def take_step(within: int, *, masked: bool) -> None:
        step = j * per_tile + within
        keys = pl.ds(within * size, size)
        k, v = k_ref[keys, :], v_ref[keys, :]
        place = Place(rows(), indices(step * size, size, 1), step * size)
        s = round_point.dot(q_ref[...], k, format_of(q_ref), format_of(k), COLUMNS)
        if not p.scales_queries and unit == 1:
            s = s * jnp.float32(p.spec.scale)
        s = round_point(s, "scores", p.spec.numerics.scores, place)
        if masked:
            s = mask_scores(s, p.visible(place, batch, scalars))
        old = _read(state_ref)
        new = _softmax_step(old, s, v, _Step(p, round_point, place, masked))
        if masked and not _masked_step_changes_nothing(p):
            # A step that lies wholly beyond what a row may see by position does not exist for it.
            first = Place(rows(), indices(step * size, 1, 1))
            seen = p.visible(first, batch, scalars)
            new = jax.tree.map(functools.partial(jnp.where, seen), new, old)
        for ref, x in zip(state_ref, new, strict=True):
            if ref is not None:
                ref[...] = x

    for within in range(per_tile):
        step = j * per_tile + within
        pl.when(step < visited.full)(functools.partial(take_step, within, masked=False))
        if p.has_masked_tiles:
            cut = (step >= visited.full) & (step < visited.end)
            pl.when(cut)(functools.partial(take_step, within, masked=True))

    @pl.when(j == p.kv_tiles - 1)
    def finish() -> None:
        state = _read(state_ref)
        limit = None if scalars.query_lengths is None else scalars.query_lengths[batch]
        _finish(state, p, round_point, rows(), limit, out)


def _read(state: SoftmaxState) -> SoftmaxState:
    """The values that references hold."""
    return SoftmaxState(*(None if ref is None else ref[...] for ref in state))  # type: ignore[arg-type]


def _masked_step_changes_nothing(problem: Problem) -> bool:
    """Whether a row's state stays as it is in a step whose keys are all masked.

    The rule must leave m, and round_rescale(Ō) must be Ō, which round_accumulator ended in.
    """
    n = problem.spec.numerics
    keeps_m = isinstance(problem.spec.row_max, StandardMax | DynamicMax)
    return keeps_m and (n.rescale.is_identity or n.rescale.format == n.accumulator.format)


def _softmax_step(state: SoftmaxState, s: Array, v: Array, step: _Step) -> SoftmaxState:
    """One online-softmax step: `steps.softmax_step` on one head."""
    p, round_point, place, masked = step
    n, rule = p.spec.numerics, p.spec.row_max
    m_place, l_place = (Place(place.rows, column(which), place.step) for which in (0, 1))
    out = Place(place.rows, indices(0, p.head_size, 1), place.step)

    unit = _score_unit(p)
    m = round_point(_running_max(rule, s, state.m, unit), "stats", n.stats, m_place)
    subtracted = m
    if masked:
        # Where every key so far is masked, m == MASKED: subtract 0, so that exp gives 0, not 1.
        subtracted = jnp.where(m <= MASKED, jnp.float32(0), m)
    probs = exponential(s - lanes(subtracted, s.shape[1]), unit)
    alpha = exponential(state.m - subtracted, unit)

    rounded = round_point(probs, "probs", n.probs, place)
    summed = rounded if n.row_sum == "rounded" else probs
    if _sums_by_lane(p):
        row_sum = _sum_slices(summed)
    else:
        row_sum = jnp.sum(summed, axis=-1, keepdims=True)
    if rule.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
    l = round_point(alpha * state.l + row_sum, "stats", n.stats, l_place)

    pv = round_point.dot(rounded, v, n.probs.result_format, format_of(v), ROWS)
    pv = round_point(pv, "pv", n.pv, out)
    factor = lanes(alpha, p.head_size)
    rescaled = round_point(factor * state.acc, "rescale", n.rescale, out)
    acc = round_point(rescaled + pv, "accumulator", n.accumulator, out)

    aux = state.aux
    if aux is not None:
        aux = factor * aux + round_point.dot(probs, v, _FLOAT32, format_of(v), ROWS)
    return SoftmaxState(m, l, acc, aux)


def _score_unit(problem: Problem) -> float:
    return problem.score_unit("scores", "stats")


def _running_max(rule: RowMax, s: Array, m_prev: Array, unit: float) -> Array:
    """`rule(s, m_prev)`, in fewer instructions where the rule asks for repeated maxima."""
    if isinstance(rule, StandardMax):
        return rule(s, m_prev)
    largest, second = _two_largest_by_lane(s)
    r_m = jnp.max(largest, axis=-1, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, largest.shape, 1)
    others = jnp.where(lane == jnp.argmax(largest, axis=-1, keepdims=True), second, largest)
    runner_up = jnp.max(others, axis=-1, keepdims=True)

    def is_repeated(below: Array, tolerance: float) -> Array:
        if tolerance == 0:
            return runner_up == r_m
        return ~(below < -jnp.float32(tolerance))  # NaN, of an infinite r_m, counts as near

    return rule.running_max(r_m, runner_up - r_m, m_prev, unit=unit, is_repeated=is_repeated)


def _two_largest_by_lane(s: Array) -> tuple[Array, Array]:
    """The largest and the second of the columns that share a lane, [rows, 128] each."""
    largest, *rest = (s[:, start : start + LANES] for start in range(0, s.shape[1], LANES))
    second = jnp.full_like(largest, -jnp.inf)
    for x in rest:
        second = jnp.maximum(second, jnp.minimum(largest, x))
        largest = jnp.maximum(largest, x)
    return largest, second


def _sums_by_lane(problem: Problem) -> bool:
    """Whether each lane keeps a part of l until the end, where nothing looks at l in between."""
    return problem.spec.numerics.stats.is_identity and problem.spec.row_max.clamp is None


def _sum_slices(x: Array) -> Array:
    """Sums the columns that share a lane, [rows, 128]."""
    slices = (x[:, start : start + LANES] for start in range(0, x.shape[1], LANES))
    return functools.reduce(jnp.add, slices)


def _finish(
    state: SoftmaxState,
    problem: Problem,
    round_point: Rounder,
    rows: Array,
    query_length: Array | None,
    out: Outputs,
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    p, n = problem, problem.spec.numerics
    place = Place(rows, indices(0, p.head_size, 1))
    empty = state.m <= MASKED
    if query_length is not None:
        empty = empty | (rows >= query_length)
    l = state.l
    if _sums_by_lane(p):
        l = jnp.broadcast_to(jnp.sum(l, axis=-1, keepdims=True), l.shape)
    divisor = jnp.where(empty, jnp.float32(1), l)

    def divided(acc: Array) -> Array:
        quotient = acc / lanes(divisor, p.head_size)
        if query_length is None:
            return quotient
        return jnp.where(rows >= query_length, jnp.float32(0), quotient)

    unrounded = divided(state.acc)
    out.o[...] = round_point(unrounded, "output", n.output_for(p.dtype), place).astype(out.o.dtype)
    if state.aux is not None:
        out.saved[...] = round_point.nearest(divided(state.aux), BFLOAT16).astype(jnp.bfloat16)
    elif out.saved is not None:
        out.saved[...] = unrounded

    lse = state.m * jnp.float32(_score_unit(p)) + jnp.log(divisor)
    lse = round_point(lse, "lse", n.lse, Place(rows, column(2)))
    out.lse[...] = to_row(jnp.where(empty, -jnp.inf, lse))
