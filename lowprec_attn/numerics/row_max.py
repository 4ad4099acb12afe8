"""Row-max rules, which choose the m that the softmax of a row subtracts before exp.

A rule reads the scores of one online-softmax step and the running m. It is written once, in plain
`jnp`, and called by the plain implementations and the kernels. Let r_m be the maximum of a row in
the step, and r_s the number of its entries with r_m − S ≤ `tolerance`:

  StandardMax    m = max(m_prev, r_m)
  PublishedMax   if r_s > 1, r_m ← β·r_m where r_m > 0, and r_m ← 0 where r_m < 0; then as above
  DynamicMax     as PublishedMax, but with a bounded shift, and safe where PublishedMax is not
  LazyMax        m = r_m if r_m exceeds m_prev by more than `threshold` in base 2, else m = m_prev

The softmax does not depend on m in exact arithmetic. In low precision a shifted maximum keeps
two equal entries P̄ = 1 from meeting in P̄·V (arXiv 2510.04212, section 4 and its Algorithm 2).

`rule(s, m_prev)` defines the rule. A kernel calls only its second half, `running_max`, because it
has already computed S − r_m, counts ties in its own way, and may keep scores in other units. β is a
factor and has no unit. `tolerance`, `max_shift` and the 1 that replaces r_m = 0 are differences of
scores, so they are divided by the unit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from lowprec_attn.numerics.formats import did_you_mean

# The score of a masked pair. It is finite, so that differences of scores are finite too, and exact
# in bfloat16.
MASKED = -(2.0**127)


Scores = Float32[Array, "... T S"]
Rows = Float32[Array, "... T 1"]


def is_repeated(below: Scores, tolerance: float) -> Bool[Array, "... T 1"]:
    """Whether r_s > 1: more than one entry of a row lies within `tolerance` of the row maximum.

    Args:
      below: S − r_m of one step, ≤ 0. NaN, which an infinite r_m produces, counts as near.
      tolerance: the largest distance that counts as near, in the units of `below`.
    """
    # The sum is in float32 because a boolean reduction along rows does not lower in Triton.
    far = jnp.sum((below < -jnp.float32(tolerance)).astype(jnp.float32), axis=-1, keepdims=True)
    return far < below.shape[-1] - 1


IsRepeated = Callable[[Array, float], Array]


@runtime_checkable
class RowMax(Protocol):
    """The interface of a row-max rule. Rules are frozen and hashable."""

    @property
    def clamp(self) -> float | None:
        """A lower bound on the row sum of each step, or None."""
        ...

    @property
    def visits_above_diagonal(self) -> bool:
        """Whether a causal row also takes the fully masked steps over keys that lie after it."""
        ...

    def __call__(self, s: Scores, m_prev: Rows) -> Rows:
        """Returns the running m after a step with scores s; masked entries of s are <= MASKED."""
        ...

    def running_max(
        self, r_m: Rows, below: Scores, m_prev: Rows, *, unit: float, is_repeated: IsRepeated
    ) -> Rows:
        """Returns the running m after a step with row maximum r_m and scores r_m + below.

        Args:
          r_m: rowmax(S) of the step; max(rowmax(S), MASKED) is also allowed.
          below: S − r_m.
          m_prev: the running m before the step.
          unit: the unit of scores, r_m and m, > 0; S is `unit` times the score.
          is_repeated: a function with the same results as `row_max.is_repeated`.
        """
        ...


class _Rule:
    """A rule that uses only the maximum of a step's scores and their distances from it."""

    def __call__(self: RowMax, s: Scores, m_prev: Rows) -> Rows:
        """See `RowMax`."""
        r_m = jnp.max(s, axis=-1, keepdims=True)
        return self.running_max(r_m, s - r_m, m_prev, unit=1.0, is_repeated=is_repeated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardMax(_Rule):
    """The running maximum: m = max(m_prev, rowmax(S)).

    Edge cases: A fully masked step leaves m as it is. A score of +inf turns the row into NaN
    (inf − inf), as in any softmax; −inf counts as masked. Ties, zero and negative maxima are not
    special.
    """

    clamp: ClassVar[None] = None
    visits_above_diagonal: ClassVar[bool] = False

    def running_max(
        self, r_m: Rows, below: Scores, m_prev: Rows, *, unit: float, is_repeated: IsRepeated
    ) -> Rows:
        """See `RowMax`."""
        return jnp.maximum(m_prev, r_m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedMax(_Rule):
    """The rule as published (arXiv 2510.04212 and its code), with its traps.

    Edge cases:
      Fully masked step: all its entries are equal and negative, so it counts as a repeated negative
        maximum and raises m to at least 0, and l by `clamp`. Steps above the causal diagonal are
        fully masked. Like the public code, and unlike the other rules, this rule takes them.
      Maximum exactly 0: the rule does not handle it, so m does not shift and two P̄ stay exactly 1.
      Underflow: a row whose tied maximum r_m exceeds −log(clamp) / (β − 1), 23 by default, has a
        row sum below the clamp. It is divided by more than its sum, and silently vanishes. Where
        (β − 1)·r_m exceeds about 87, every exp underflows, and `clamp=None` gives 0/0 = NaN.
      Tolerance: entries within `tolerance` of the maximum count as repeated although their P̄
        differ.
      Infinite scores: +inf gives NaN as in any softmax; −inf counts as masked.
      The rule acts on one step, so the result depends on `kv_block`.

    Attributes:
      beta: factor β > 1; the paper uses values in [2, 8].
      tolerance: distance ≥ 0 within which scores count as repeated.
      clamp: lower bound of every step's row sum, > 0, or None for none.

    Raises:
      ValueError: a value out of range.
    """

    beta: float = 2.0
    tolerance: float = 1e-3
    clamp: float | None = 1e-10
    visits_above_diagonal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_beta_and_tolerance(self.beta, self.tolerance)
        if self.clamp is not None and not 0 < self.clamp < math.inf:
            raise ValueError(f"clamp must be a positive number or None, got {self.clamp!r}")

    def running_max(
        self, r_m: Rows, below: Scores, m_prev: Rows, *, unit: float, is_repeated: IsRepeated
    ) -> Rows:
        """See `RowMax`."""
        # −inf counts as masked, whether `below` is NaN or, if the kernel bounds r_m, −inf.
        repeated = is_repeated(below, self.tolerance / unit) | (r_m <= MASKED)
        shifted = jnp.where(r_m > 0, jnp.float32(self.beta) * r_m, jnp.float32(0))
        # r_m = 0 shifts to 0, that is, not at all. The published rule does not handle this case.
        return jnp.maximum(m_prev, jnp.where(repeated, shifted, r_m))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicMax(_Rule):
    """The published rule without its traps: `row_max='dynamic_max'`.

    Where the maximum repeats, r_m becomes β·r_m if positive and 0 if negative, but it rises by at
    most `max_shift`. No row can therefore underflow: l ≥ exp(−max_shift).

    Edge cases:
      Fully masked step: m stays, because the bounded shift does not change MASKED in float32.
      Maximum exactly 0: β·r_m would not move, so m shifts by β − 1, as it does for r_m = 1.
      Underflow: it cannot happen, because the shift is bounded.
      Tolerance: it is 0 by default, so only exactly equal scores count as repeated.
      Infinite scores: +inf gives NaN as in any softmax; −inf counts as masked.
      The rule acts on one step, so the result depends on `kv_block`.

    Attributes:
      beta: factor β > 1; the paper uses values in [2, 8].
      tolerance: distance ≥ 0 within which scores count as repeated.
      max_shift: bound on the shift, in (0, 80]: exp(−max_shift) must stay a normal float32.

    Raises:
      ValueError: a value out of range.
    """

    beta: float = 2.0
    tolerance: float = 0.0
    max_shift: float = 20.0
    clamp: ClassVar[None] = None
    visits_above_diagonal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_beta_and_tolerance(self.beta, self.tolerance)
        if not 0 < self.max_shift <= 80:
            raise ValueError(f"max_shift must lie in (0, 80], got {self.max_shift!r}")

    def running_max(
        self, r_m: Rows, below: Scores, m_prev: Rows, *, unit: float, is_repeated: IsRepeated
    ) -> Rows:
        """See `RowMax`."""
        repeated = is_repeated(below, self.tolerance / unit)
        # The shift leads to β·r_m if r_m is positive, and to 0 if it is negative. For β = 2 it is
        # |r_m| in both cases. Compilers recognise this from the product with −1, but not from a
        # negation, which Triton writes as a difference.
        shift = jnp.maximum(jnp.float32(self.beta - 1.0) * r_m, jnp.float32(-1.0) * r_m)
        shift = jnp.where(r_m == 0, jnp.float32((self.beta - 1.0) / unit), shift)
        shift = jnp.minimum(shift, jnp.float32(self.max_shift / unit))
        # All entries of a fully masked step are ties, but MASKED + max_shift == MASKED in float32.
        return jnp.maximum(m_prev, jnp.where(repeated, r_m + shift, r_m))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyMax(_Rule):
    """A maximum that is raised only if it grows by more than `threshold` in base 2.

    This is FlashAttention-4's lazy rescale (flash_attn/cute/softmax.py, `rescale_threshold`), with
    which most steps leave Ō as it is. The largest P̄ of a row can be any number from 1 to
    2^threshold, so rounding P̄ may change the entry that counts most.

    Edge cases:
      Fully masked step: m stays. First step with a key: m = r_m.
      Overflow: P̄ ≤ 2^threshold, so the format of `probs` must hold 2^threshold; other calls are
        refused.
      Infinite scores: +inf gives NaN as in any softmax; −inf counts as masked.
      The rule compares steps, so the result depends on `kv_block` and on the order of the steps.
        Steps go from the first key to the last here, and from the last to the first in
        FlashAttention-4.

    Attributes:
      threshold: the largest growth of m · log2 e, in [0, 64], that leaves m as it is; 0 gives
        `StandardMax`.

    Raises:
      ValueError: a value out of range.
    """

    threshold: float = 8.0
    clamp: ClassVar[None] = None
    visits_above_diagonal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 64:
            raise ValueError(f"threshold must lie in [0, 64], got {self.threshold!r}")

    def running_max(
        self, r_m: Rows, below: Scores, m_prev: Rows, *, unit: float, is_repeated: IsRepeated
    ) -> Rows:
        """See `RowMax`."""
        growth = jnp.float32(self.threshold * math.log(2) / unit)
        # If r_m is NaN, m is too. Before the first key both may be −inf, whose difference is NaN.
        return jnp.where(r_m - m_prev <= growth, m_prev, r_m)


def _check_beta_and_tolerance(beta: float, tolerance: float) -> None:
    if not 1 < beta < math.inf:
        raise ValueError(f"beta must be greater than 1 and finite, got {beta!r}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be 0 or positive and finite, got {tolerance!r}")


ROW_MAX_RULES: dict[str, type] = {
    "standard": StandardMax,
    "published": PublishedMax,
    "dynamic_max": DynamicMax,
    "lazy_max": LazyMax,
}


def get_row_max(name: str, **options: float | None) -> RowMax:
    """Returns the rule called `name`, with the given options in place of its defaults.

    Args:
      name: a key of `ROW_MAX_RULES`, such as 'dynamic_max'.
      **options: attributes of that rule, such as `beta=4.0`.

    Raises:
      ValueError: there is no such rule or option, or a value is out of range.
    """
    if name not in ROW_MAX_RULES:
        meant = did_you_mean(name, ROW_MAX_RULES)
        raise ValueError(
            f"unknown row-max rule {name!r}{meant}; rules are {', '.join(ROW_MAX_RULES)}"
        )
    rule = ROW_MAX_RULES[name]
    known = [f.name for f in dataclasses.fields(rule)]
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"row-max rule {name!r} has no option {option!r}; it has {listed}")
    return rule(**options)
