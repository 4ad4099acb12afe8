"""The arithmetic of one online-softmax step on one head, in parts.

`softmax_step` takes a step whose scores are all at hand. The tiles of a longer step take two
passes: `Largest` finds m, then the `contribution` of each tile is summed, and `close` ends the
step. `close` also ends a step that sees no key. The arithmetic is that of
`arithmetic.softmax.softmax_step`, point by point. Row statistics are kept equal in all 128 lanes.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place, statistic
from lowprec_attn.arithmetic.products import format_of
from lowprec_attn.arithmetic.recurrence import (
    SoftmaxState,
    next_accumulator,
    next_sum,
    subtracted_max,
    summed_probs,
)
from lowprec_attn.numerics import MASKED, RowMax, StandardMax, get_format
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.problem import Problem, exponential, indices, lanes
from pallas_kernels.tpu.products import ROWS, Rounder

_FLOAT32 = get_format("float32")


class Step(NamedTuple):
    """What the arithmetic of a step, or of a tile of it, needs beside its arrays.

    Attributes:
      problem, round_point: the kernel's problem and rounder.
      place: the place of the scores.
      first: the first key of the step.
      masked: whether some row may have seen no key up to and including this step.
    """

    problem: Problem
    round_point: Rounder
    place: Place
    first: Array
    masked: bool

    @property
    def anew(self) -> Place:
        """The place of row statistics that every step rounds anew."""
        return Place(self.place.rows, self.place.cols, self.first)

    @property
    def out(self) -> Place:
        """The place of Ō and what is added to it."""
        return Place(self.place.rows, indices(0, self.problem.head_size, 1), self.first)


class Sums(NamedTuple):
    """What the keys of a step add to l and Ō, and to Ō′ where it is kept; float32."""

    l: Array
    acc: Array
    aux: Array | None


def softmax_step(state: SoftmaxState, s: Array, v: Array, step: Step) -> SoftmaxState:
    """One online-softmax step over the scores s."""
    # m_j = max(m_{j−1}, rowmax(S)), P̄ = exp(S − m_j), α = exp(m_{j−1} − m_j)
    m = round_m(running_max(step.problem.spec.row_max, s, state.m, step.problem.score_unit), step)
    subtracted = _subtracted(m, step)
    probs = _probs(s, subtracted, step)
    alpha = _alpha(state.m, subtracted, step)
    rounded = _round_probs(probs, step)
    # l_j = α l_{j−1} + rowsum(P̄); Ō_j = α Ō_{j−1} + P̄ V
    l = _next_sum(state.l, alpha, _row_sum(probs, rounded, step), step)
    pv = _product(rounded, v, step)
    factor = lanes(alpha, step.problem.head_size)
    acc = next_accumulator(state.acc, factor, pv, step.round_point, step.out)
    aux = state.aux
    if aux is not None:
        # Ō′ is Ō of the unrounded P̄, which is split into three bfloat16 terms.
        aux = factor * aux + step.round_point.dot(probs, v, _FLOAT32, format_of(v), ROWS)
    max_logit = state.max_logit
    if max_logit is not None:
        max_logit = jnp.maximum(max_logit, jnp.max(s, axis=-1, keepdims=True))
    return SoftmaxState(m, l, acc, aux, max_logit)


def contribution(s: Array, v: Array, m: Array, step: Step, *, auxiliary: bool) -> Sums:
    """What a tile with scores s adds to the sums of its step, whose maximum is m."""
    probs = _probs(s, _subtracted(m, step), step)
    rounded = _round_probs(probs, step)
    row_sum = sum_slices(summed_probs(probs, rounded, step.problem.spec.numerics))
    aux = step.round_point.dot(probs, v, _FLOAT32, format_of(v), ROWS) if auxiliary else None
    return Sums(row_sum, _product(rounded, v, step), aux)


def close(state: SoftmaxState, m: Array, sums: Sums, step: Step) -> SoftmaxState:
    """The state after a step with maximum m; `sums.l` has one partial sum per lane.

    `state.max_logit` already includes the scores of the step.
    """
    alpha = _alpha(state.m, _subtracted(m, step), step)
    row_sum = sums.l
    if not step.problem.keeps_partial_sums:
        row_sum = jnp.sum(row_sum, axis=-1, keepdims=True)
    l = _next_sum(state.l, alpha, row_sum, step)
    factor = lanes(alpha, step.problem.head_size)
    acc = next_accumulator(state.acc, factor, sums.acc, step.round_point, step.out)
    aux = state.aux
    if aux is not None and sums.aux is not None:
        aux = factor * aux + sums.aux
    return SoftmaxState(m, l, acc, aux, state.max_logit)


def step_without_keys(state: SoftmaxState, step: Step) -> SoftmaxState:
    """The state after a step whose keys are all masked: only the rule and the roundings act."""
    problem = step.problem
    m = Largest.none(state.m.shape).running_max(problem.spec.row_max, state.m, problem.score_unit)
    nothing = jnp.zeros_like(state.acc)
    sums = Sums(jnp.zeros_like(state.l), nothing, None if state.aux is None else nothing)
    return close(state, round_m(m, step), sums, step)


def round_m(m: Array, step: Step) -> Array:
    """The running maximum, rounded at `stats`."""
    return step.round_point(m, "stats", statistic(step.anew, "m"))


def _subtracted(m: Array, step: Step) -> Array:
    # Where a row has seen no key, m is MASKED. S − m would be 0 and P̄ would be 1.
    return subtracted_max(m) if step.masked else m


def _probs(s: Array, subtracted: Array, step: Step) -> Array:
    below = step.round_point.shift(s - lanes(subtracted, s.shape[1]), step.place)
    # The unit multiplies the difference: shift, then scale, with one rounding each.
    return exponential(below, step.problem.score_unit)


def _alpha(m_old: Array, subtracted: Array, step: Step) -> Array:
    below = step.round_point.shift(m_old - subtracted, statistic(step.anew, "alpha"))
    return exponential(below, step.problem.score_unit)


def _round_probs(probs: Array, step: Step) -> Array:
    return step.round_point(probs, "probs", step.place)


def _row_sum(probs: Array, rounded: Array, step: Step) -> Array:
    summed = summed_probs(probs, rounded, step.problem.spec.numerics)
    if step.problem.keeps_partial_sums:
        # One sum across lanes at the end replaces one sum per step.
        return sum_slices(summed)
    return jnp.sum(summed, axis=-1, keepdims=True)


def _next_sum(l: Array, alpha: Array, row_sum: Array, step: Step) -> Array:
    return next_sum(l, alpha, row_sum, step.problem.spec.row_max, step.round_point, step.anew)


def _product(rounded: Array, v: Array, step: Step) -> Array:
    probs = step.problem.spec.numerics.probs
    return step.round_point.dot(rounded, v, probs.result_format, format_of(v), ROWS)


class Largest(NamedTuple):
    """The largest and second largest score of the columns that share a lane, [rows, 128] each."""

    first: Array
    second: Array

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Largest":
        """The value for no key: MASKED, because a rule treats a step without keys as masked."""
        masked = jnp.full(shape, MASKED, jnp.float32)
        return cls(masked, masked)

    @classmethod
    def of(cls, s: Array) -> "Largest":
        """The value for the scores of a tile."""
        # The scores are compared lane by lane, so that only the last comparison crosses lanes.
        first, *rest = (s[:, start : start + LANES] for start in range(0, s.shape[1], LANES))
        second = jnp.full_like(first, -jnp.inf)
        for x in rest:
            second = jnp.maximum(second, jnp.minimum(first, x))
            first = jnp.maximum(first, x)
        return cls(first, second)

    def merge(self, other: "Largest") -> "Largest":
        """The value for the columns of both."""
        smaller = jnp.minimum(self.first, other.first)
        second = jnp.maximum(jnp.maximum(self.second, other.second), smaller)
        return Largest(jnp.maximum(self.first, other.first), second)

    def running_max(self, rule: RowMax, m_prev: Array, unit: float) -> Array:
        """m by the rule, which learns from the row's runner-up whether the maximum repeats."""
        r_m = jnp.max(self.first, axis=-1, keepdims=True)
        # The runner-up of the row is the second of the lane that holds the maximum, or the first of
        # another lane. It lies in another column, so if it equals the maximum, the maximum repeats.
        lane = lax.broadcasted_iota(jnp.int32, self.first.shape, 1)
        at_maximum = lane == jnp.argmax(self.first, axis=-1, keepdims=True)
        others = jnp.where(at_maximum, self.second, self.first)
        runner_up = jnp.max(others, axis=-1, keepdims=True)

        def is_repeated(below: Array, tolerance: float) -> Array:
            if tolerance == 0:
                return runner_up == r_m
            return ~(below < -jnp.float32(tolerance))  # NaN, of an infinite r_m, counts as near

        return rule.running_max(r_m, runner_up - r_m, m_prev, unit=unit, is_repeated=is_repeated)


def running_max(rule: RowMax, s: Array, m_prev: Array, unit: float) -> Array:
    """`rule(s, m_prev)`, in fewer instructions where the rule looks for repeated maxima."""
    if isinstance(rule, StandardMax):
        return rule(s, m_prev)
    return Largest.of(s).running_max(rule, m_prev, unit)


def sum_slices(x: Array) -> Array:
    """Sums the columns that share a lane, [rows, 128]."""
    slices = (x[:, start : start + LANES] for start in range(0, x.shape[1], LANES))
    return functools.reduce(jnp.add, slices)
