"""Row-max rules: which m the softmax of a row subtracts before exp.

A rule sees the scores of one online-softmax step and the running value. It is written once, in
plain `jnp`; the reference, the tiled code and the kernels call it. With r_m the maximum of a row of
the step and r_s the number of its entries with r_m − S ≤ `tolerance`:

  StandardMax    m = max(m_prev, r_m)
  PublishedMax   r_s > 1 and r_m > 0: r_m ← β·r_m;  r_s > 1 and r_m < 0: r_m ← 0;  then as above
  DynamicMax     the same with a bounded shift, and safe where the published rule is not
  LazyMax        m_prev, unless r_m exceeds it by more than `threshold` in base 2: then r_m

The softmax does not depend on m in exact arithmetic. In low precision a shifted maximum keeps
two equal entries P̄ = 1 from meeting in P̄·V (arXiv 2510.04212, section 4 and its Algorithm 2).

`rule(s, m_prev)` is the definition. A kernel calls its second half, `running_max`. A kernel has
S − r_m at hand already, counts ties in its own way, and may keep scores in other units. β is a
factor and knows no units. `tolerance`, `max_shift` and the 1 that stands in for r_m = 0 are
distances of scores, and are divided by the unit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

# A masked score: finite, so that differences of scores are, and exact in bfloat16.
MASKED = -(2.0**127)


Scores = Float32[Array, "... T S"]
Rows = Float32[Array, "... T 1"]


def is_repeated(below: Scores, tolerance: float) -> Bool[Array, "... T 1"]:
    """Whether r_s > 1: more than one entry of a row lies within `tolerance` of its maximum.

    Args:
      below: S − r_m of one step, ≤ 0; NaN (of an infinite r_m) counts as near.
      tolerance: the largest distance that counts as near, in the units of `below`.
    """
    # A float32 sum: a boolean reduction along rows does not lower in Triton.
    far = jnp.sum((below < -jnp.float32(tolerance)).astype(jnp.float32), axis=-1, keepdims=True)
    return far < below.shape[-1] - 1


IsRepeated = Callable[[Array, float], Array]


@runtime_checkable
class RowMax(Protocol):
    """The interface of a row-max rule. Rules are frozen and hashable."""

    @property
    def clamp(self) -> float | None:
        """Lower bound of each step's row sum, or None."""
        ...

    @property
    def visits_above_diagonal(self) -> bool:
        """Whether a causal row takes steps, fully masked, over keys that lie after it."""
        ...

    def __call__(self, s: Scores, m_prev: Rows) -> Rows:
        """The running m after a step with scores s; masked entries of s are <= MASKED."""
        ...

    def running_max(
        self,
        r_m: Rows,
        below: Scores,
        m_prev: Rows,
        *,
        unit: float = 1.0,
        is_repeated: IsRepeated = is_repeated,
    ) -> Rows:
        """The running m of a step with maximum r_m and scores r_m + below.

        Args:
          r_m: rowmax(S) of the step; max(rowmax(S), MASKED) will do.
          below: S − r_m.
          m_prev: the running m before the step.
          unit: scores, r_m and both m count in this many units of S, > 0.
          is_repeated: a twin of `row_max.is_repeated`, equal for every input.
        """
        ...


class _Rule:
    """A rule that looks at a step's scores only through their maximum and distances from it."""

    def __call__(self: RowMax, s: Scores, m_prev: Rows) -> Rows:
        """See `RowMax`."""
        r_m = jnp.max(s, axis=-1, keepdims=True)
        return self.running_max(r_m, s - r_m, m_prev)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardMax(_Rule):
    """The running maximum: m = max(m_prev, rowmax(S)).

    Edge cases. Fully masked step: m stays. Score +inf: the row becomes NaN (inf − inf), as in
    any softmax; −inf counts as masked. Ties, zero and negative maxima are not special.
    """

    clamp: ClassVar[None] = None
    visits_above_diagonal: ClassVar[bool] = False

    def running_max(
        self,
        r_m: Rows,
        below: Scores,
        m_prev: Rows,
        *,
        unit: float = 1.0,
        is_repeated: IsRepeated = is_repeated,
    ) -> Rows:
        """See `RowMax`."""
        return jnp.maximum(m_prev, r_m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedMax(_Rule):
    """The rule as published (arXiv 2510.04212 and its code), with its traps.

    Edge cases.
      Fully masked step: all its entries are equal and negative, so it is a "repeated negative
        maximum" and raises m to at least 0, and l by `clamp`. Steps above the causal diagonal are
        such steps: like the public code, and unlike other rules, this one takes them.
      Maximum exactly 0: unhandled, nothing shifts, two P̄ stay exactly 1.
      Underflow: a row whose tied maximum r_m exceeds −log(clamp) / (β − 1), 23 by default, has a
        row sum below the clamp: it is divided by more than it adds up to, and silently vanishes.
        Where (β − 1)·r_m exceeds about 87 every exp underflows: with `clamp=None`, 0/0 = NaN.
      Tolerance: entries within it of the maximum count as repeated, though their P̄ differ.
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
        self,
        r_m: Rows,
        below: Scores,
        m_prev: Rows,
        *,
        unit: float = 1.0,
        is_repeated: IsRepeated = is_repeated,
    ) -> Rows:
        """See `RowMax`."""
        # −inf counts as masked, whether `below` is then NaN or, above a bounded r_m, −inf.
        repeated = is_repeated(below, self.tolerance / unit) | (r_m <= MASKED)
        shifted = jnp.where(r_m > 0, jnp.float32(self.beta) * r_m, jnp.float32(0))
        # r_m = 0 shifts to 0 as well: the case that the published rule leaves unhandled.
        return jnp.maximum(m_prev, jnp.where(repeated, shifted, r_m))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicMax(_Rule):
    """The published rule without its traps: `row_max='dynamic_max'`.

    Where the maximum repeats, r_m ← β·r_m if positive and 0 if negative, but at most
    `max_shift` above r_m, so that no row can underflow: l ≥ exp(−max_shift).

    Edge cases.
      Fully masked step: m stays, the bounded shift does not move MASKED.
      Maximum exactly 0: β·r_m would not move, so it shifts by β − 1, as r_m = 1 does.
      Underflow: cannot happen, the shift is bounded.
      Tolerance: 0 by default, only exactly equal scores count.
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
        self,
        r_m: Rows,
        below: Scores,
        m_prev: Rows,
        *,
        unit: float = 1.0,
        is_repeated: IsRepeated = is_repeated,
    ) -> Rows:
        """See `RowMax`."""
        repeated = is_repeated(below, self.tolerance / unit)
        # From r_m to β·r_m if positive, to 0 if negative; for β = 2 in either case |r_m|, which the
        # compilers find behind the product, but not behind Triton's negation, a difference.
        shift = jnp.maximum(jnp.float32(self.beta - 1.0) * r_m, jnp.float32(-1.0) * r_m)
        shift = jnp.where(r_m == 0, jnp.float32((self.beta - 1.0) / unit), shift)
        shift = jnp.minimum(shift, jnp.float32(self.max_shift / unit))
        # A fully masked step is all ties, but MASKED + max_shift == MASKED in float32.
        return jnp.maximum(m_prev, jnp.where(repeated, r_m + shift, r_m))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyMax(_Rule):
    """A maximum that is raised only if it grows by more than `threshold` in base 2.

    FlashAttention-4's lazy rescale (flash_attn/cute/softmax.py, `rescale_threshold`), so that most
    steps leave Ō as it is. The largest P̄ of a row is anything from 1 to 2 to the power of
    `threshold`, so that rounding P̄ may err on the entry that counts most.

    Edge cases.
      Fully masked step: m stays. First step with a key: m = r_m.
      Overflow: P̄ ≤ 2^threshold, which `probs` must hold; a call that cannot is refused.
      Infinite scores: +inf gives NaN as in any softmax; −inf counts as masked.
      The rule compares steps, so the result depends on `kv_block` and on their order. Steps here go
        from the first key to the last, those of FlashAttention-4 from the last to the first.

    Attributes:
      threshold: growth of m · log2 e, in [0, 64], that changes nothing; 0 is `StandardMax`.

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
        self,
        r_m: Rows,
        below: Scores,
        m_prev: Rows,
        *,
        unit: float = 1.0,
        is_repeated: IsRepeated = is_repeated,
    ) -> Rows:
        """See `RowMax`."""
        growth = jnp.float32(self.threshold * math.log(2) / unit)
        # Before the first key both may be −inf: their difference is NaN, and m stays.
        return jnp.where(r_m - m_prev > growth, r_m, m_prev)


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
    """The rule called `name` with some of its options changed.

    Raises:
      ValueError: no such rule or option, or a value out of range.
    """
    if name not in ROW_MAX_RULES:
        raise ValueError(f"unknown row-max rule {name!r}; rules are {', '.join(ROW_MAX_RULES)}")
    rule = ROW_MAX_RULES[name]
    known = [f.name for f in dataclasses.fields(rule)]
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"row-max rule {name!r} has no option {option!r}; it has {listed}")
    return rule(**options)
