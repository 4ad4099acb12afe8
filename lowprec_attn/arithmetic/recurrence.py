"""The recurrence of online softmax: how a step changes m, l and Ō, and how the last step ends.

`softmax` applies it to whole arrays, the kernels to the tiles of one program. A row statistic may
have any number of equal columns that broadcasts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place, statistic
from lowprec_attn.arithmetic.points import RoundPoint
from lowprec_attn.numerics import MASKED, Numerics, RowMax


class SoftmaxState(NamedTuple):
    """The running state of online softmax.

    Attributes:
      m, l: the running statistics [B, K, G, T, 1].
      acc: Ō [B, K, G, T, H].
      aux: Ō′ with `saved_output='auxiliary'`, else None.
      max_logit: the largest score so far, of the shape and unit of m, if it is kept; else None.
    """

    m: Array
    l: Array
    acc: Array
    aux: Array | None
    max_logit: Array | None = None


class RowStatistics(NamedTuple):
    """The row statistics that form P in the backward pass, as exp(S − subtracted) · inverse_l.

    Attributes:
      subtracted: lse, which is −inf in rows that saw no key; or m (with `whole_max`, M in base 2),
        which is 0 in these rows.
      inverse_l: None if `subtracted` is lse; else 1 / l, which is 0 in rows that saw no key.
    """

    subtracted: Array
    inverse_l: Array | None = None


def m_and_inverse_l(m: Array, divisor: Array, empty: Array) -> tuple[Array, Array]:
    """The statistics saved with 'm_and_l': m, in the unit in which it was subtracted, and 1 / l."""
    zero = jnp.float32(0)
    return jnp.where(empty, zero, m), jnp.where(empty, zero, 1 / divisor)


def subtracted_max(m: Array, empty: Array | None = None) -> Array:
    """The number that exponents subtract: m, or 0 in rows whose keys so far are all masked.

    Args:
      m: the running m.
      empty: the rows whose keys are all masked; None if these are the rows with m ≤ MASKED, as in
        kernels.
    """
    # In such a row m equals the masked scores, so exp(S − m) would be 1 or NaN.
    return jnp.where(m <= MASKED if empty is None else empty, jnp.float32(0), m)


def summed_probs(p: Array, p_rounded: Array, numerics: Numerics) -> Array:
    """The P̄ that enter the sum l."""
    return p_rounded if numerics.row_sum == "rounded" else p


def next_sum(
    l: Array, alpha: Array, row_sum: Array, rule: RowMax, round_point: RoundPoint, place: Place
) -> Array:
    """Returns l = round_stats(α l + max(row_sum, clamp)); without a clamp, row_sum itself is added.

    `place` has the rows and the step.
    """
    if rule.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
    return round_point(alpha * l + row_sum, "stats", statistic(place, "l"))


def next_accumulator(
    acc: Array, alpha: Array, pv: Array, round_point: RoundPoint, place: Place
) -> Array:
    """Returns Ō = round_accumulator(round_rescale(α Ō) + round_pv(P̄ V)); `place` belongs to Ō."""
    pv = round_point(pv, "pv", place)
    rescaled = round_point(alpha * acc, "rescale", place)
    return round_point(rescaled + pv, "accumulator", place)


def divisor(l: Array, empty: Array, round_point: RoundPoint, place: Place) -> Array:
    """The final l, rounded at `normalizer`, by which Ō is divided; 1 in rows that saw no key."""
    l = round_point(l, "normalizer", statistic(place, "l"))
    return jnp.where(empty, jnp.float32(1), l)


def divisor_of_o(l: Array, divisor: Array, empty: Array, rows: Array, n: Numerics) -> Array:
    """The l that divides Ō: `divisor`, or the unrounded l in rows that `Numerics.divisor` names."""
    if n.divisor == "rounded" or n.normalizer.is_identity:
        return divisor
    first = ~empty
    if isinstance(n.kv_block, int):
        axes = tuple(range(first.ndim - rows.ndim))
        first = first & jnp.expand_dims(rows < n.kv_block, axes)
    return jnp.where(first, l, divisor)


def log_sum_exp(
    m: Array, divisor: Array, empty: Array, round_point: RoundPoint, place: Place
) -> Array:
    """Returns lse = round_lse(m + log l), with `divisor` as l; −inf in rows that saw no key."""
    lse = round_point(m + jnp.log(divisor), "lse", statistic(place, "lse"))
    return jnp.where(empty, -jnp.inf, lse)


def keep_unvisited(new: SoftmaxState, old: SoftmaxState, visited: Array | None) -> SoftmaxState:
    """Returns the new state in rows that were visited, and the old state in all other rows."""
    if visited is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, visited), new, old)
