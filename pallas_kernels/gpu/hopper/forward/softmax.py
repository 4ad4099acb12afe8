"""One step of online softmax: the cap, the mask, the new maximum, the exponentials.

S and m count in units of `scale`, or of the cap; of `whole_max` m is M, in base 2, and P̄ counts as
in `powers`. Repeated maxima, which `dynamic_max` looks for, are counted in every step or where a
test says that there may be some (`ForwardTile.tests_ties`).
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.max_logit import is_tracked
from lowprec_attn.arithmetic.recurrence import subtracted_max
from lowprec_attn.numerics import MASKED, DynamicMax, RowMax, StandardMax
from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.block_sizes import ROWS, ForwardTile
from pallas_kernels.gpu.hopper.forward.operands import QueryRows, Running, Softmax
from pallas_kernels.gpu.hopper.machine.instruction_order import after, finish_before_waiting, mixed
from pallas_kernels.gpu.hopper.machine.instructions import ONE, at_least, unpacked
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
    extended,
)
from pallas_kernels.gpu.hopper.machine.maxima import masks, maxima
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import IDS_OF_KEYS, same

# Keys of a step whose exponentials come before an early wait for P̄V: as many as FlashAttention-3's
# machine code has there.
_EARLY_KEYS = 16


def before_first_step(rows: QueryRows) -> Running:
    """That of no key, or of the sink."""
    none = no_key_yet(rows.problem, has_sinks=rows.start is not None)
    return none if rows.start is None else Running(*rows.start, none.max_logit)


def no_key_yet(problem: Problem, *, has_sinks: bool) -> Running:
    """That of rows that have seen none, nor a sink."""
    m, l = constant((ROWS,), MASKED, PER_ROW), constant((ROWS, LANES), 0, TILE)
    return Running(m, l, m if is_tracked(problem.spec, has_sinks=has_sinks) else None)


def masked(s: Array, rows: QueryRows, t: Array, first: int = 0) -> Array:
    """The scores of step t, from its `first` key on; capped, MASKED where a row does not see."""
    problem, step = rows.problem, rows.tile.step
    s = problem.capped(s)
    if not problem.masks_steps(step):
        return s

    def mask() -> Array:
        # Masked scores would tie with each other: each gets a number of its own.
        apart = _tests_ties(problem, rows.tile)
        masked = masks(s.shape, interpret=problem.sizes.interpret) if apart else MASKED
        alike = None
        if rows.ids is not None:
            alike = same(rows.ids, rows.shared.k.get(rows.steps + t, buffer=IDS_OF_KEYS))
        return problem.mask_keys(s, rows.row, rows.keys.of(t) * step + first, masked, alike)

    # A branch, so that steps below the diagonal do not pay. FlashAttention-3 has a loop of its own
    # for masked steps; here that was no faster.
    return lax.cond(rows.keys.takes_mask(t), mask, lambda: s)


def softmax_step(s: Array, before: Running, problem: Problem, tile: ForwardTile) -> Softmax:
    """One step of online softmax."""
    l = before.l
    new, alpha, max_logit = _maxima(s, before, problem, tile)
    probs = exponentials(s, along_rows(offset(new, problem), s.shape), problem)
    l = along_rows(alpha, l.shape) * l + by_lane(jnp.add, _summed(probs, problem))
    # For O′ it is not rounded yet: terms would be formed from it while a product runs, and the
    # assembler would then let none run beside other instructions (its remark C7513).
    if not rounds_later(problem, tile):
        probs = probs.astype(problem.dtype)
    return Softmax(new, l, probs, alpha, max_logit)


def begin_softmax_step(s: Array, before: Running, problem: Problem, tile: ForwardTile) -> Softmax:
    """What of it comes before an early wait for P̄V; S for P̄, and l without it."""
    new, alpha, max_logit = _maxima(s, before, problem, tile)
    l = along_rows(alpha, before.l.shape) * before.l
    probs = exponentials(s, along_rows(offset(new, problem), s.shape), problem)
    # Of every so-manyth 8 columns, whose sum l takes anyway, if it adds P̄ before its rounding: the
    # compiler drops the others.
    sums = by_lane(jnp.add, probs, LANES * _one_of(tile))
    finish_before_waiting(sums[:, :LANES], l)
    return Softmax(new, l, s, alpha, max_logit)


def end_softmax_step(
    softmax: Softmax, done: Array, zero: Array, problem: Problem, tile: ForwardTile
) -> Softmax:
    """The rest of it, that is not to come before `done`; zero: see `after`."""
    sooner, s = offset(softmax.m, problem), softmax.probs
    # Without it the assembler moves these exponentials, too, to before the wait for P̄V, and keeps
    # them all in registers beside S.
    later = after(sooner, done, zero)
    offsets = (along_rows(x, s.shape) for x in (sooner, later))
    probs = exponentials(s, mixed(*offsets, every=_one_of(tile)), problem)
    l = softmax.l + by_lane(jnp.add, _summed(probs, problem))
    return softmax._replace(l=l, probs=probs)


def _summed(probs: Array, problem: Problem) -> Array:
    """The P̄ that l adds: before it is rounded, as in FlashAttention-2 and -3, or after."""
    if not problem.sums_rounded_probs:
        return probs
    # The product's operand, unpacked: the compiler rounds once.
    # A product of P̄ with ones would save 2.5 instructions an entry, but was slower on one H200:
    # 108 µs against 107 at gpt2, 793 against 772 at long64 (results/hopper/matched_sum_h200.jsonl).
    return unpacked(probs.astype(problem.dtype), interpret=problem.sizes.interpret)


def _one_of(tile: ForwardTile) -> int:
    """One of so many exponentials comes before the wait for P̄V."""
    return tile.step // _EARLY_KEYS


def waits_early(problem: Problem, tile: ForwardTile) -> bool:
    """Whether P̄V of the step before is waited for among the exponentials: `early_wait`.

    An l of rounded P̄ asks for it: see `rounds_later`.
    """
    return tile.early_wait or problem.sums_rounded_probs


def rounds_later(problem: Problem, tile: ForwardTile) -> bool:
    """Whether P̄ is rounded when P̄V of the step before has been waited for.

    If instructions write what the next product reads, the assembler lets none run beside other
    instructions (its remark C7513), unless there is a branch before, such as that for masks.
    """
    return problem.keeps_auxiliary or waits_early(problem, tile)


def _maxima(
    s: Array, running: Running, problem: Problem, tile: ForwardTile
) -> tuple[Array, Array, Array | None]:
    """The new m [64], α, and the largest score where it is kept."""
    m = running.m
    interpret = problem.sizes.interpret
    rule, unit = problem.spec.row_max, problem.unit

    def is_repeated(s: Array, tolerance: float) -> Array:
        least = along_rows(r_m, s.shape) - np.float32(tolerance)
        near = at_least(s, least, interpret=interpret)
        return by_lane(jnp.add, near).sum(axis=1) != ONE

    # A whole number is made of the rule's maximum of the step alone.
    before = constant((ROWS,), MASKED, PER_ROW) if problem.whole_max else m

    def new_by(rule: RowMax) -> Array:
        # The rule looks at S − r_m only to count ties, which S itself shows as well.
        return rule.running_max(r_m, s, before, unit=unit, is_repeated=is_repeated)

    if _tests_ties(problem, tile):
        # Where no maximum of a warp's rows is repeated, the rule is the standard one.
        r_m, repeats = maxima(s, interpret=interpret)
        new = lax.cond(repeats != 0, partial(new_by, rule), partial(new_by, StandardMax()))
    else:
        # By halves: Mosaic GPU's own reduction is a chain of dependent maxima.
        r_m = by_lane(jnp.maximum, s).max(axis=1)
        new = new_by(rule)
    max_logit = running.max_logit
    if max_logit is not None:
        max_logit = jnp.maximum(max_logit, r_m)
    if problem.whole_max:
        return *powers.whole_max(new, m, problem), max_logit
    return new, jnp.exp2((m - new) * np.float32(problem.log2_unit)), max_logit


def _tests_ties(problem: Problem, tile: ForwardTile) -> bool:
    """Whether repeated maxima are looked for, and counted only where a test says so."""
    rule = problem.spec.row_max
    # Scores that are near each other need not meet in the tree of maxima.
    return tile.tests_ties and isinstance(rule, DynamicMax) and rule.tolerance == 0


def offset(m: Array, problem: Problem) -> Array:
    """What the exponent of P̄ takes away [64]."""
    if problem.whole_max:
        return powers.offset(m)
    if problem.hides_steps:
        # Of rows that have seen no key P̄ is 0, not 1, nor NaN where the unit makes m infinite.
        m = subtracted_max(m)
    return m * np.float32(problem.log2_unit)


def exponentials(s: Array, offset: Array, problem: Problem) -> Array:
    """P̄, not rounded, of the offset of every entry."""
    if problem.whole_max:
        return powers.exponentials(s, -offset, problem)
    # One multiply-add per entry, as FlashAttention-2 and -3 have it. Its error is that of
    # m·log2(e), the same for a whole row: it cancels in Ō / l.
    return jnp.exp2(s * np.float32(problem.log2_unit) - offset)


def terms(probs: Array, problem: Problem) -> list[Array]:
    """P̄ as three bfloat16 numbers of 8 bits each, the largest first: exactly, of 24 bits."""
    found = []
    for _ in range(3):
        found.append(probs.astype(problem.dtype))
        probs = probs - extended(found[-1])
    return found
