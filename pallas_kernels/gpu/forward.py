"""The forward kernel: O, lse and the O that δ sees.

A program owns a tile of query rows and walks over the key tiles that it may see, in online-softmax
steps (FlashAttention-2, arXiv 2307.08691, Algorithm 1) of one tile or of several. Tiles above the
causal diagonal are neither computed nor loaded; only tiles that the diagonal, a length or the end
of the keys cuts are masked. The arithmetic is that of `lowprec_attn.steps`, point by point.
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
from lowprec_attn.steps import LEAST_SHIFT, Place, SoftmaxState, statistic
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


class _Walk(NamedTuple):
    """One query tile, which walks over the key tiles that it sees."""

    problem: Problem
    scalars: Scalars
    batch: Array
    i: Array
    q: Array
    k_ref: Any
    v_ref: Any
    round_point: Rounder

    def keys(self, j: Array) -> Array:
        """k of key tile j."""
        return self.problem.load_keys(self.k_ref, j)

    def values(self, j: Array) -> Array:
        """v of key tile j."""
        return self.problem.load_keys(self.v_ref, j)

    def scores(self, k: Array, j: Array, *, masked: bool) -> tuple[Array, Place]:
        """S of key tile j, which holds k, in units of `score_unit`; and where it lies."""
        p, q = self.problem, self.q
        place = p.place(self.i, j)
        s = self.round_point.dot(q, k.T, format_of(q), format_of(k))
        s = s * np.float32(p.spec.scale / p.score_unit)
        s = self.round_point(s, "scores", p.spec.numerics.scores, place)
        if masked:
            s = mask_scores(s, p.visible(place, self.batch, self.scalars))
        return s, place

    def over_tiles(self, t: Array, body: Callable[..., Any], carry: Any, *, masked: bool) -> Any:
        """body(j, carry, masked=) over the key tiles of step t, all seen in full unless masked."""
        p = self.problem
        first, last = t * p.tiles_per_step, (t + 1) * p.tiles_per_step
        if not masked:
            return lax.fori_loop(first, last, partial(body, masked=False), carry)
        full, end = p.key_range(self.i, self.batch, self.scalars)
        last = jnp.minimum(last, end)
        cut = jnp.clip(full, first, last)
        carry = lax.fori_loop(first, cut, partial(body, masked=False), carry)
        return lax.fori_loop(cut, last, partial(body, masked=True), carry)

    def visits(self, t: Array) -> Array:
        """Rows for which step t exists: those it does not lie wholly beyond, by position."""
        p = self.problem
        rows = p.place(self.i, t).rows
        first = Place(rows, jnp.full((1, 1), t * p.step))
        causal = p.spec.is_causal and not p.visits_above_diagonal
        return p.visible(first, self.batch, self.scalars, causal=causal)


def _forward(
    q_ref: Any, k_ref: Any, v_ref: Any, scalars: Scalars, *out: Any, problem: Problem
) -> None:
    p = problem
    i, head, batch = p.query_tile(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    start = i * p.tile.query
    q = p.load_rows(q_ref, start, p.tile.query)
    round_point = p.rounder(scalars, batch, head)
    walk = _Walk(p, scalars, batch, i, q, k_ref, v_ref, round_point)
    take_step = _step_of_one_tile if p.tiles_per_step == 1 else _step_of_tiles

    def step(t: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
        new = take_step(state, t, walk, masked=masked)
        if not masked or _masked_step_changes_nothing(p):
            return new
        return jax.tree.map(partial(jnp.where, walk.visits(t)), new, state)

    full, end = p.key_range(i, batch, scalars, size=p.step)
    state = lax.fori_loop(0, full, partial(step, masked=False), _initial_state(p))
    if p.has_masked_tiles:
        state = lax.fori_loop(full, end, partial(step, masked=True), state)
    if p.visits_above_diagonal:
        _, every = p.key_range(i, batch, scalars, size=p.step, causal=False)
        state = lax.fori_loop(end, every, partial(_step_above_diagonal, walk=walk), state)
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


def _step_of_one_tile(state: SoftmaxState, t: Array, walk: _Walk, *, masked: bool) -> SoftmaxState:
    """One online-softmax step over the keys of one tile."""
    p, n = walk.problem, walk.problem.spec.numerics
    k, v = walk.keys(t), walk.values(t)
    s, place = walk.scores(k, t, masked=masked)
    # At least MASKED: −inf − (−inf) would be NaN.
    r_m = jnp.maximum(_over_row(jnp.max, s, p), jnp.float32(MASKED))
    below = s - _per_column(r_m, p.tile.kv)
    count = is_repeated_by_warp if p.counts_ties_by_warp else is_repeated
    step = _Step.of(state, r_m, below, partial(count, interpret=p.interpret), t, walk)
    probs, alpha = step.probs(s, below, place), step.alpha
    rounded = walk.round_point(probs, "probs", n.probs, place)
    row_sum = _row_sum(rounded if n.row_sum == "rounded" else probs, p)
    pv = walk.round_point.dot(rounded, v, n.probs.result_format, format_of(v))
    aux_pv = _auxiliary_product(probs, v, walk)
    return step.finish(alpha, row_sum, pv, aux_pv)


def _step_of_tiles(state: SoftmaxState, t: Array, walk: _Walk, *, masked: bool) -> SoftmaxState:
    """One step over the keys of several tiles: first the row maximum, then the products.

    S is formed twice. Entry by entry, the two largest of all tiles are kept: they are enough to
    find the maximum, and whether it repeats.
    """
    p, n = walk.problem, walk.problem.spec.numerics
    over_tiles = partial(walk.over_tiles, t, masked=masked)
    counts_ties = not isinstance(p.spec.row_max, StandardMax)
    lowest = jnp.full((p.tile.query, p.tile.kv if counts_ties else _LANES), -jnp.inf, jnp.float32)

    def look(j: Array, seen: tuple[Array, ...], *, masked: bool) -> tuple[Array, ...]:
        s, _ = walk.scores(walk.keys(j), j, masked=masked)
        largest, *second = seen
        if not counts_ties:
            s = jnp.max(s.reshape(s.shape[0], -1, _LANES), axis=1)
        second = [jnp.maximum(x, jnp.minimum(largest, s)) for x in second]
        return jnp.maximum(largest, s), *second

    largest, *second = over_tiles(look, (lowest,) * (1 + counts_ties))
    r_m = jnp.maximum(_over_row(jnp.max, largest, p), jnp.float32(MASKED))

    def repeats(below: Array, tolerance: float) -> Array:
        near = [_count_near(x, tolerance) for x in (below, *(x - r_m for x in second))]
        return sum(near[1:], start=near[0]) > 1

    step = _Step.of(state, r_m, largest - r_m, repeats, t, walk)
    # Where no point rounds between them, P̄V is added to the rescaled Ō tile by tile.
    alpha = step.alpha
    adds_up = n.pv.is_identity and n.rescale.is_identity and n.accumulator.is_identity
    zero = jnp.zeros_like(state.acc)

    def add(j: Array, sums: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
        row_sum, pv, aux_pv = sums
        k, v = walk.keys(j), walk.values(j)
        s, place = walk.scores(k, j, masked=masked)
        probs = step.probs(s, s - r_m, place)
        rounded = walk.round_point(probs, "probs", n.probs, place)
        row_sum = row_sum + _row_sum(rounded if n.row_sum == "rounded" else probs, p)
        pv = pv + walk.round_point.dot(rounded, v, n.probs.result_format, format_of(v))
        if aux_pv is not None:
            aux_pv = aux_pv + _auxiliary_product(probs, v, walk)
        return row_sum, pv, aux_pv

    start = (
        jnp.zeros_like(state.l),
        _per_column(alpha, p.padded_head) * state.acc if adds_up else zero,
        None if state.aux is None else zero,
    )
    row_sum, pv, aux_pv = over_tiles(add, start)
    return step.finish(alpha, row_sum, pv, aux_pv, rescaled=adds_up)


def _step_above_diagonal(t: Array, state: SoftmaxState, *, walk: _Walk) -> SoftmaxState:
    """A step whose keys are all masked: m, l and Ō as the rule and the roundings leave them."""
    p = walk.problem
    masked = jnp.full_like(state.m, MASKED)

    def repeats(below: Array, tolerance: float) -> Array:
        return jnp.full(below.shape, p.step > 1)

    step = _Step.of(state, masked, jnp.zeros_like(masked), repeats, t, walk)
    zero = jnp.zeros_like(state.acc)
    new = step.finish(
        step.alpha, jnp.zeros_like(state.l), zero, None if state.aux is None else zero
    )
    return jax.tree.map(partial(jnp.where, walk.visits(t)), new, state)


def _count_near(below: Array, tolerance: float) -> Array:
    """How many entries of a row lie within the tolerance of 0; NaN counts."""
    far = jnp.sum((below < np.float32(-tolerance)).astype(jnp.float32), axis=-1, keepdims=True)
    return np.float32(below.shape[-1]) - far


def _auxiliary_product(probs: Array, v: Array, walk: _Walk) -> Array | None:
    """P̄ v with unrounded P̄, where Ō′ is kept."""
    if not _keeps_auxiliary(walk.problem):
        return None
    return walk.round_point.dot(probs, v, _FLOAT32, format_of(v))


class _Step(NamedTuple):
    """One online-softmax step of a tile once its m is known: `steps.softmax_step` on one head."""

    state: SoftmaxState
    r_m: Array
    m: Array
    subtracted: Array
    out: Place
    walk: _Walk

    @classmethod
    def of(
        cls,
        state: SoftmaxState,
        r_m: Array,
        below: Array,
        is_repeated: Callable[[Array, float], Array],
        t: Array,
        walk: _Walk,
    ) -> "_Step":
        """Of step t with the maximum r_m; `is_repeated` is asked of `below`, its S − r_m."""
        p, round_point = walk.problem, walk.round_point
        n, rule = p.spec.numerics, p.spec.row_max
        out = Place(p.place(walk.i, t).rows, p.feature_columns, t * p.step)
        m = rule.running_max(r_m, below, state.m, unit=p.score_unit, is_repeated=is_repeated)
        m = round_point(m, "stats", n.stats, statistic(out, "m"))
        # Where every key so far is masked, m == MASKED: subtract 0, so that exp gives 0, not 1.
        subtracted = jnp.where(m <= MASKED, jnp.float32(0), m)
        return cls(state, r_m, m, subtracted, out, walk)

    @property
    def alpha(self) -> Array:
        """exp(m_old − m)."""
        p = self.walk.problem
        shift = self.state.m - self.subtracted
        shift = _round_shift(shift, statistic(self.out, "alpha"), self.walk)
        return exp2(shift * np.float32(p.score_unit * LOG2E), interpret=p.interpret)

    def probs(self, s: Array, below: Array, place: Place) -> Array:
        """P̄ = exp(S − m) of a tile's scores s, which are r_m + below."""
        p, columns = self.walk.problem, s.shape[1]
        to_log2 = np.float32(p.score_unit * LOG2E)
        if not p.spec.numerics.shift.is_identity:
            shift = _round_shift(s - _per_column(self.subtracted, columns), place, self.walk)
            return exp2(shift * to_log2, interpret=p.interpret)
        # exp(S − m) = 2^((s − r_m)·c − (m − r_m)·c): an entry at m gives exactly 1.
        offset = _per_column((self.r_m - self.subtracted) * to_log2, columns)
        log2_p = multiply_add(below, to_log2, offset, interpret=p.interpret)
        return exp2(log2_p, interpret=p.interpret)

    def finish(
        self,
        alpha: Array,
        row_sum: Array,
        pv: Array,
        aux_pv: Array | None,
        *,
        rescaled: bool = False,
    ) -> SoftmaxState:
        """The state after the step; rescaled: pv holds α Ō already."""
        p, round_point, state = self.walk.problem, self.walk.round_point, self.state
        n, rule = p.spec.numerics, p.spec.row_max
        if rule.clamp is not None:
            row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
        alpha_of_l = _per_column(alpha, _LANES) if _row_sums(p) > 1 else alpha
        l = alpha_of_l * state.l + row_sum
        l = round_point(l, "stats", n.stats, statistic(self.out, "l"))
        alpha = _per_column(alpha, p.padded_head)
        acc = pv
        if not rescaled:
            pv = round_point(pv, "pv", n.pv, self.out)
            acc = round_point(alpha * state.acc, "rescale", n.rescale, self.out)
            acc = round_point(acc + pv, "accumulator", n.accumulator, self.out)
        aux = state.aux
        if aux is not None and aux_pv is not None:
            aux = alpha * aux + aux_pv
        return SoftmaxState(self.m, l, acc, aux)


def _round_shift(x: Array, place: Place, walk: _Walk) -> Array:
    """S − m or m_old − m as rounded at `shift`."""
    rounding = walk.problem.spec.numerics.shift
    if rounding.is_identity:
        return x
    return walk.round_point(jnp.maximum(x, jnp.float32(LEAST_SHIFT)), "shift", rounding, place)


def _finish(
    state: SoftmaxState, problem: Problem, round_point: Rounder, start: Array, out: Outputs
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    p, n = problem, problem.spec.numerics
    place = p.features(start, p.tile.query)
    one = partial(jnp.max, axis=-1, keepdims=True)  # of equal copies
    m = one(state.m)
    l = jnp.sum(state.l, axis=-1, keepdims=True) if _row_sums(p) > 1 else one(state.l)
    l = round_point(l, "normalizer", n.normalizer, statistic(place, "l"))
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
    lse = round_point(lse, "lse", n.lse, statistic(place, "lse"))
    lse = jnp.where(empty, -jnp.inf, lse)
    p.store_statistics(out.lse, lse[:, 0], start)
