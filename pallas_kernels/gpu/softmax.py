"""The arithmetic of one online-softmax step of a query tile: `arithmetic.softmax.softmax_step`.

A step takes one tile of keys or several. With several tiles, it first finds the row maximum over
all of them and then forms the products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic import powers
from lowprec_attn.arithmetic.max_logit import is_tracked
from lowprec_attn.arithmetic.places import Place, statistic
from lowprec_attn.arithmetic.powers import power_of_two
from lowprec_attn.arithmetic.products import format_of
from lowprec_attn.arithmetic.recurrence import (
    SoftmaxState,
    keep_unvisited,
    next_accumulator,
    next_sum,
    subtracted_max,
    summed_probs,
)
from lowprec_attn.numerics import MASKED, LazyMax, StandardMax, get_format
from pallas_kernels.gpu.instructions import (
    exp2,
    fused_multiply_add,
    is_repeated,
    is_repeated_by_warp,
    multiply_add,
    whole_exp2,
)
from pallas_kernels.gpu.problem import LANES, LOG2E, THREADS, Problem, by_lane
from pallas_kernels.gpu.query_rows import QueryRows

_FLOAT32 = get_format("float32")


def initial_state(problem: Problem, start: tuple[Array, Array] | None = None) -> SoftmaxState:
    """The state before the first key; start: m and l of a sink."""
    row = jnp.zeros((problem.tile.query, _copies(problem)), jnp.float32)
    acc = jnp.zeros((problem.tile.query, problem.padded_value), jnp.float32)
    aux = acc if problem.keeps_auxiliary else None
    l = jnp.zeros((problem.tile.query, LANES), jnp.float32) if problem.keeps_partial_sums else row
    tracked = is_tracked(problem.spec, has_sinks=start is not None)
    max_logit = jnp.full_like(row, MASKED) if tracked else None
    if start is None:
        return SoftmaxState(jnp.full_like(row, MASKED), l, acc, aux, max_logit)
    m, of_l = start
    if problem.keeps_partial_sums:
        of_l = of_l * np.float32(1 / LANES)  # a power of two: the parts add up to l exactly
    m = jnp.maximum(m, jnp.float32(MASKED))
    m, of_l = jnp.broadcast_to(m, row.shape), jnp.broadcast_to(of_l, l.shape)
    return SoftmaxState(m, of_l, acc, aux, max_logit)


def step_of_one_tile(
    state: SoftmaxState, t: Array, queries: QueryRows, *, masked: bool
) -> SoftmaxState:
    """One online-softmax step over the keys of one tile."""
    problem, n = queries.problem, queries.problem.spec.numerics
    k, v = queries.keys(t), queries.values(t)
    s, place = queries.scores(k, t, masked=masked)
    # r_m is at least MASKED, because −inf − (−inf) would be NaN.
    r_m = jnp.maximum(_over_row(jnp.max, s, problem), jnp.float32(MASKED))
    below = s - _per_column(r_m, problem.tile.kv)
    count = is_repeated_by_warp if problem.counts_ties_by_warp else is_repeated
    step = _Step.of(state, r_m, below, partial(count, interpret=problem.interpret), t, queries)
    probs, alpha = step.probs(s, below, place), step.alpha
    rounded = queries.round_point(probs, "probs", place)
    row_sum = _row_sum(summed_probs(probs, rounded, n), problem)
    pv = queries.round_point.dot(rounded, v, n.probs.result_format, format_of(v))  # P̄ V
    aux_pv = _auxiliary_product(probs, v, queries)
    return step.finish(alpha, row_sum, pv, aux_pv)


def step_of_tiles(
    state: SoftmaxState, t: Array, queries: QueryRows, *, masked: bool
) -> SoftmaxState:
    """One step over the keys of several tiles: first the row maximum, then the products.

    S is formed twice. For each entry of a tile, the first pass keeps the two largest scores over
    all tiles. They are enough to find the row maximum and whether it repeats. If the rule does not
    count ties, the largest is enough.
    """
    problem, n = queries.problem, queries.problem.spec.numerics
    over_tiles = partial(queries.over_tiles, t, masked=masked)
    counts_ties = not isinstance(problem.spec.row_max, StandardMax | LazyMax)
    lowest = jnp.full(
        (problem.tile.query, problem.tile.kv if counts_ties else LANES), -jnp.inf, jnp.float32
    )

    def look(j: Array, seen: tuple[Array, ...], *, masked: bool) -> tuple[Array, ...]:
        s, _ = queries.scores(queries.keys(j), j, masked=masked)
        largest, *second = seen
        if not counts_ties:
            s = by_lane(jnp.max, s)
        second = [jnp.maximum(x, jnp.minimum(largest, s)) for x in second]
        return jnp.maximum(largest, s), *second

    # This pass goes from the last tile to the first, because the products start with the first. The
    # addresses of the first tile would otherwise stay in registers meanwhile.
    largest, *second = over_tiles(look, (lowest,) * (1 + counts_ties), backwards=True)
    r_m = jnp.maximum(_over_row(jnp.max, largest, problem), jnp.float32(MASKED))

    def repeats(below: Array, tolerance: float) -> Array:
        near = [_count_near(x, tolerance) for x in (below, *(x - r_m for x in second))]
        return sum(near[1:], start=near[0]) > 1

    step = _Step.of(state, r_m, largest - r_m, repeats, t, queries)
    # Where no point rounds in between, P̄V is added to the rescaled Ō tile by tile.
    alpha = step.alpha
    adds_up = n.pv.is_identity and n.rescale.is_identity and n.accumulator.is_identity
    zero = jnp.zeros_like(state.acc)

    def add(j: Array, sums: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
        row_sum, pv, aux_pv = sums
        k, v = queries.keys(j), queries.values(j)
        s, place = queries.scores(k, j, masked=masked)
        probs = step.probs(s, s - r_m, place)
        rounded = queries.round_point(probs, "probs", place)
        row_sum = row_sum + _row_sum(summed_probs(probs, rounded, n), problem)
        pv = pv + queries.round_point.dot(rounded, v, n.probs.result_format, format_of(v))
        if aux_pv is not None:
            aux_pv = aux_pv + _auxiliary_product(probs, v, queries)
        return row_sum, pv, aux_pv

    start = (
        jnp.zeros_like(state.l),
        _per_column(alpha, problem.padded_value) * state.acc if adds_up else zero,
        None if state.aux is None else zero,
    )
    row_sum, pv, aux_pv = over_tiles(add, start)
    return step.finish(alpha, row_sum, pv, aux_pv, rescaled=adds_up)


def step_above_diagonal(t: Array, state: SoftmaxState, *, queries: QueryRows) -> SoftmaxState:
    """A step whose keys are all masked: only the rule and the roundings act on m, l and Ō."""
    problem = queries.problem
    masked = jnp.full_like(state.m, MASKED)

    def repeats(below: Array, tolerance: float) -> Array:
        return jnp.full(below.shape, problem.step > 1)

    step = _Step.of(state, masked, jnp.zeros_like(masked), repeats, t, queries)
    zero = jnp.zeros_like(state.acc)
    new = step.finish(
        step.alpha, jnp.zeros_like(state.l), zero, None if state.aux is None else zero
    )
    return keep_unvisited(new, state, queries.visits(t))


def _count_near(below: Array, tolerance: float) -> Array:
    """How many entries of a row lie within the tolerance of 0; NaN counts."""
    far = jnp.sum((below < np.float32(-tolerance)).astype(jnp.float32), axis=-1, keepdims=True)
    return np.float32(below.shape[-1]) - far


def _auxiliary_product(probs: Array, v: Array, queries: QueryRows) -> Array | None:
    """P̄ v with the unrounded P̄, or None where Ō′ is not kept."""
    if not queries.problem.keeps_auxiliary:
        return None
    return queries.round_point.dot(probs, v, _FLOAT32, format_of(v))


class _Step(NamedTuple):
    """One online-softmax step (`softmax_step`) on one head, once its m is known."""

    state: SoftmaxState
    r_m: Array
    m: Array
    subtracted: Array
    out: Place
    queries: QueryRows

    @classmethod
    def of(
        cls,
        state: SoftmaxState,
        r_m: Array,
        below: Array,
        is_repeated: Callable[[Array, float], Array],
        t: Array,
        queries: QueryRows,
    ) -> "_Step":
        """Step t, whose row maximum is r_m. The rule asks `is_repeated` about `below`, S − r_m."""
        problem, round_point = queries.problem, queries.round_point
        rule = problem.spec.row_max
        out = Place(problem.place(queries.i, t).rows, problem.value_columns, t * problem.step)
        m_old = jnp.full_like(state.m, MASKED) if problem.whole_max else state.m
        m = rule.running_max(r_m, below, m_old, unit=problem.score_unit, is_repeated=is_repeated)
        if problem.whole_max:
            # M, in units of log 2, is a whole number, so multiplying by α, a power of two, is
            # exact.
            whole = jnp.ceil(m * np.float32(problem.score_unit * LOG2E))
            m = jnp.maximum(state.m, jnp.where(m <= MASKED, m, whole))
        m = round_point(m, "stats", statistic(out, "m"))
        return cls(state, r_m, m, subtracted_max(m), out, queries)

    @property
    def alpha(self) -> Array:
        """exp(m_old − m)."""
        problem = self.queries.problem
        shift = self.state.m - self.subtracted
        if problem.whole_max:
            return power_of_two(shift)
        shift = self.queries.round_point.shift(shift, statistic(self.out, "alpha"))
        return exp2(shift * np.float32(problem.score_unit * LOG2E), interpret=problem.interpret)

    def probs(self, s: Array, below: Array, place: Place) -> Array:
        """P̄ = exp(S − m) of a tile's scores s = r_m + below."""
        problem, columns = self.queries.problem, s.shape[1]
        to_log2 = np.float32(problem.score_unit * LOG2E)
        fma = partial(fused_multiply_add, interpret=problem.interpret)
        if not problem.spec.numerics.shift.is_identity:
            shift = s - _per_column(self.subtracted, columns)
            log2_p = self.queries.round_point.shift(shift, place) * to_log2
        elif problem.whole_max:
            offset = _per_column(powers.offset_of(self.subtracted), columns)
            log2_p = fma(s, to_log2, offset) - np.float32(powers.HIGH)
            return whole_exp2(log2_p, interpret=problem.interpret)
        elif problem.scales_first:
            # 2^(S·c − m·c) with one rounding, as FlashAttention-2 and -3 form it.
            log2_p = fma(s, to_log2, _per_column(self.subtracted * -to_log2, columns))
        else:
            # exp(S − m) = 2^((s − r_m)·c − (m − r_m)·c): an entry at m gives exactly 1.
            offset = _per_column((self.r_m - self.subtracted) * to_log2, columns)
            log2_p = multiply_add(below, to_log2, offset, interpret=problem.interpret)
        return exp2(log2_p, interpret=problem.interpret)

    def finish(
        self,
        alpha: Array,
        row_sum: Array,
        pv: Array,
        aux_pv: Array | None,
        *,
        rescaled: bool = False,
    ) -> SoftmaxState:
        """The state after the step; rescaled: whether pv already includes α Ō."""
        problem, round_point, state = self.queries.problem, self.queries.round_point, self.state
        alpha_of_l = _per_column(alpha, LANES) if problem.keeps_partial_sums else alpha
        rule = problem.spec.row_max
        # l = α l + rowsum(P̄), Ō = α Ō + P̄V
        l = next_sum(state.l, alpha_of_l, row_sum, rule, round_point, self.out)
        alpha = _per_column(alpha, problem.padded_value)
        acc = pv if rescaled else next_accumulator(state.acc, alpha, pv, round_point, self.out)
        aux = state.aux
        if aux is not None and aux_pv is not None:
            aux = alpha * aux + aux_pv
        max_logit = state.max_logit
        if max_logit is not None:
            max_logit = jnp.maximum(max_logit, self.r_m)
        return SoftmaxState(self.m, l, acc, aux, max_logit)


def _copies(problem: Problem) -> int:
    """Copies of m per row: one per thread where each thread finds by itself if a tie shifts m."""
    return THREADS if problem.counts_ties_by_warp else 1


def _over_row(reduce: Callable[..., Array], x: Array, problem: Problem) -> Array:
    """Reduces a tile over its columns, to [query, copies]."""
    if _copies(problem) == 1:
        return reduce(x, axis=-1, keepdims=True)
    x = x.reshape(x.shape[0], -1, THREADS, LANES // THREADS)
    by_thread = reduce(reduce(x, axis=3), axis=1)
    return jnp.broadcast_to(reduce(by_thread, axis=1, keepdims=True), by_thread.shape)


def _per_column(x: Array, columns: int) -> Array:
    """Expands [query, copies] to a tile's [query, columns]; one copy stays [query, 1]."""
    rows, copies = x.shape
    if copies == 1:
        return x
    shape = (rows, columns // LANES, copies, LANES // copies)
    return jnp.broadcast_to(x[:, None, :, None], shape).reshape(rows, columns)


def _row_sum(p: Array, problem: Problem) -> Array:
    """The sums that l adds: over columns equal modulo 8, [query, 8], or all, [query, copies]."""
    if not problem.keeps_partial_sums:
        return _over_row(jnp.sum, p, problem)
    # Each thread adds the entries that it holds, so that no step waits for an exchange.
    return by_lane(jnp.sum, p)
