"""One step of online softmax: the cap, the mask, the new maximum, the exponentials.

S and m are in units of `scale`, or of the cap. With `whole_max`, m is M in base 2, and P̄ has the
unit of `powers`. `dynamic_max` looks for repeated maxima. They are counted in every step, or only
where a test says that there may be some (`ForwardTile.tests_ties`).
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
from pallas_kernels.gpu.hopper.machine.instructions import ONE, at_least, multiply_add, unpacked
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

# Keys of a step whose exponentials come before an early wait for P̄V, as many as in the machine code
# of FlashAttention-3.
_EARLY_KEYS = 16


def before_first_step(rows: QueryRows) -> Running:
    """The state before the first step: that of no key, or of the sink alone."""
    none = no_key_yet(rows.problem, has_sinks=rows.start is not None)
    return none if rows.start is None else Running(*rows.start, none.max_logit)


def no_key_yet(problem: Problem, *, has_sinks: bool) -> Running:
    """The state of rows that have seen neither a key nor a sink."""
    m, l = constant((ROWS,), MASKED, PER_ROW), constant((ROWS, LANES), 0, TILE)
    return Running(m, l, m if is_tracked(problem.spec, has_sinks=has_sinks) else None)


def masked(s: Array, rows: QueryRows, t: Array, first: int = 0) -> Array:
    """Caps the scores of step t, from its `first` key on, and sets hidden keys to MASKED."""
    problem, step = rows.problem, rows.tile.step
    s = problem.capped(s)
    if not problem.masks_steps(step):
        return s

    def mask() -> Array:
        # Equal masked scores would look like ties, so each gets a number of its own.
        apart = _tests_ties(problem, rows.tile)
        masked = masks(s.shape, interpret=problem.sizes.interpret) if apart else MASKED
        alike = None
        if rows.ids is not None:
            alike = same(rows.ids, rows.shared.k.get(rows.steps + t, buffer=IDS_OF_KEYS))
        return problem.mask_keys(s, rows.row, rows.keys.of(t) * step + first, masked, alike)

    # A branch, so that steps below the diagonal do not pay. FlashAttention-3 has a separate loop
    # for masked steps; here that was no faster.
    return lax.cond(rows.keys.takes_mask(t), mask, lambda: s)


def softmax_step(s: Array, before: Running, problem: Problem, tile: ForwardTile) -> Softmax:
    """Computes one step of online softmax."""
    l = before.l
    new, alpha, max_logit = _maxima(s, before, problem, tile)
    probs = exponentials(s, along_rows(offset(new, problem), s.shape), problem)
    l = along_rows(alpha, l.shape) * l + by_lane(jnp.add, _summed(probs, problem))
    # For O′, P̄ is not rounded yet: its terms would be formed while a product runs, and the
    # assembler would then serialize the products (its remark C7513).
    if not rounds_later(problem, tile):
        probs = probs.astype(problem.dtype)
    return Softmax(new, l, probs, alpha, max_logit)


def begin_softmax_step(s: Array, before: Running, problem: Problem, tile: ForwardTile) -> Softmax:
    """Computes the part of a softmax step that comes before an early wait for P̄V.

    In the result, S stands in the place of P̄, and l does not include this step's P̄.
    """
    new, alpha, max_logit = _maxima(s, before, problem, tile)
    l = along_rows(alpha, before.l.shape) * before.l
    probs = exponentials(s, along_rows(offset(new, problem), s.shape), problem)
    # Only every `_one_of(tile)`-th group of 8 columns is used: the compiler drops the others. l
    # needs the sum of that group anyway, if it sums P̄ before the rounding.
    sums = by_lane(jnp.add, probs, LANES * _one_of(tile))
    finish_before_waiting(sums[:, :LANES], l)
    return Softmax(new, l, s, alpha, max_logit)


def end_softmax_step(
    softmax: Softmax, done: Array, zero: Array, problem: Problem, tile: ForwardTile
) -> Softmax:
    """Computes the rest of a softmax step, not before the product `done`; zero: see `after`."""
    sooner, s = offset(softmax.m, problem), softmax.probs
    # Without `after` the assembler moves these exponentials, too, before the wait for P̄V, and keeps
    # them all in registers beside S.
    later = after(sooner, done, zero)
    offsets = (along_rows(x, s.shape) for x in (sooner, later))
    probs = exponentials(s, mixed(*offsets, every=_one_of(tile)), problem)
    l = softmax.l + by_lane(jnp.add, _summed(probs, problem))
    return softmax._replace(l=l, probs=probs)


def _summed(probs: Array, problem: Problem) -> Array:
    """The P̄ that l sums: unrounded, as in FlashAttention-2 and -3, or rounded."""
    if not problem.sums_rounded_probs:
        return probs
    # The product's operand, unpacked: the compiler rounds P̄ once for both.
    # A product of P̄ with ones would save 2.5 instructions an entry, but was slower on one H200:
    # 108 µs against 107 at gpt2, 793 against 772 at long64 (results/hopper/matched_sum_h200.jsonl).
    return unpacked(probs.astype(problem.dtype), interpret=problem.sizes.interpret)


def _one_of(tile: ForwardTile) -> int:
    """The ratio of all exponentials of a step to those before an early wait for P̄V."""
    return tile.step // _EARLY_KEYS


def waits_early(problem: Problem, tile: ForwardTile) -> bool:
    """Whether the wait for P̄V of the step before comes among the exponentials: `early_wait`.

    An l that sums rounded P̄ needs this, see `rounds_later`.
    """
    return tile.early_wait or problem.sums_rounded_probs


def rounds_later(problem: Problem, tile: ForwardTile) -> bool:
    """Whether P̄ is rounded only after the wait for P̄V of the step before.

    If instructions write the operand of the next product during a product, the assembler serializes
    the products (its remark C7513), unless a branch comes before, such as the branch for masks.
    """
    return problem.keeps_auxiliary or waits_early(problem, tile)


def _maxima(
    s: Array, running: Running, problem: Problem, tile: ForwardTile
) -> tuple[Array, Array, Array | None]:
    """Returns the new m [64], α [64], and the largest score [64] if it is kept."""
    m = running.m
    interpret = problem.sizes.interpret
    rule, unit = problem.spec.row_max, problem.unit

    def is_repeated(s: Array, tolerance: float) -> Array:
        least = along_rows(r_m, s.shape) - np.float32(tolerance)
        near = at_least(s, least, interpret=interpret)
        return by_lane(jnp.add, near).sum(axis=1) != ONE

    # With `whole_max`, M is made from the rule's maximum of this step alone.
    before = constant((ROWS,), MASKED, PER_ROW) if problem.whole_max else m

    def new_by(rule: RowMax) -> Array:
        # The rule looks at S − r_m only to count ties, which S itself shows as well.
        return rule.running_max(r_m, s, before, unit=unit, is_repeated=is_repeated)

    if _tests_ties(problem, tile):
        # If no row of the warp repeats its maximum, the rule agrees with the standard one.
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
    """Whether repeated maxima are counted only in steps where a test says there may be some."""
    rule = problem.spec.row_max
    # The test finds only equal scores: near ones need not meet in the tree of maxima.
    return tile.tests_ties and isinstance(rule, DynamicMax) and rule.tolerance == 0


def offset(m: Array, problem: Problem) -> Array:
    """What the exponents of P̄ subtract, [64]."""
    if problem.whole_max:
        return powers.offset(m)
    if problem.hides_steps:
        # In rows that have seen no key P̄ is then 0, rather than 1, or NaN where the unit makes m
        # infinite.
        m = subtracted_max(m)
    return m * np.float32(problem.log2_unit)


def exponentials(s: Array, offset: Array, problem: Problem) -> Array:
    """Returns P̄, unrounded, from the scores and the offset of every entry."""
    if problem.whole_max:
        return powers.exponentials(s, -offset, problem)
    if problem.saves_log2_l:
        # Rounded once for certain: the backward pass forms P̄ of rows of large scores anew.
        interpret = problem.sizes.interpret
        return jnp.exp2(multiply_add(s, problem.log2_unit, -offset, interpret=interpret))
    # One multiply-add per entry, as in FlashAttention-2 and -3. Its error is the error of
    # m·log2(e), which is the same for a whole row and cancels in Ō / l unless m moves.
    return jnp.exp2(s * np.float32(problem.log2_unit) - offset)


def terms(probs: Array, problem: Problem) -> list[Array]:
    """Splits P̄ into three bfloat16 numbers, the largest first: exactly, 24 bits into 3 × 8."""
    found = []
    for _ in range(3):
        found.append(probs.astype(problem.dtype))
        probs = probs - extended(found[-1])
    return found
