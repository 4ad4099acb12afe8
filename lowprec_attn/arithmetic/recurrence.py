"""The recurrence of online softmax: how a step changes m, l and Ō, and what ends the last one.

`softmax` computes with it on whole arrays, the kernels on the tiles of one program. A row
statistic may have any number of equal columns that broadcasts.
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
    """Running m, l [B, K, G, T, 1] and Ō [B, K, G, T, H]; Ō′ for `saved_output='auxiliary'`.

    `max_logit` is the largest score so far, like m, where it is kept beside it.
    """

    m: Array
    l: Array
    acc: Array
    aux: Array | None
    max_logit: Array | None = None


class RowStatistics(NamedTuple):
    """The row statistics that give P in the backward pass: exp(S − subtracted) · inverse_l.

    Attributes:
      subtracted: lse, −inf in rows that saw no key; or m, or M in base 2, 0 in those rows.
      inverse_l: None with lse; or 1 / l, 0 in rows that saw no key.
    """

    subtracted: Array
    inverse_l: Array | None = None


def m_and_inverse_l(m: Array, divisor: Array, empty: Array) -> tuple[Array, Array]:
    """The two that are saved apart: m, in the units in which it was subtracted, and 1 / l."""
    zero = jnp.float32(0)
    return jnp.where(empty, zero, m), jnp.where(empty, zero, 1 / divisor)


def subtracted_max(m: Array, empty: Array | None = None) -> Array:
    """What is subtracted in exponents: m, or 0 where every key so far is masked.

    empty: such rows; None: where m ≤ MASKED, as kernels keep it.
    """
    # m is as such a row's scores are: exp(S − m) would be 1, or NaN.
    return jnp.where(m <= MASKED if empty is None else empty, jnp.float32(0), m)


def summed_probs(p: Array, p_rounded: Array, numerics: Numerics) -> Array:
    """The P̄ that l sums."""
    return p_rounded if numerics.row_sum == "rounded" else p


def next_sum(
    l: Array, alpha: Array, row_sum: Array, rule: RowMax, round_point: RoundPoint, place: Place
) -> Array:
    """l = round_stats(α l + max(row_sum, clamp)), if there is a clamp; `place` has rows, step."""
    if rule.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(rule.clamp))
    return round_point(alpha * l + row_sum, "stats", statistic(place, "l"))


def next_accumulator(
    acc: Array, alpha: Array, pv: Array, round_point: RoundPoint, place: Place
) -> Array:
    """Ō = round_accumulator(round_rescale(α Ō) + round_pv(P̄ V)); `place` is that of Ō."""
    pv = round_point(pv, "pv", place)
    rescaled = round_point(alpha * acc, "rescale", place)
    return round_point(rescaled + pv, "accumulator", place)


def divisor(l: Array, empty: Array, round_point: RoundPoint, place: Place) -> Array:
    """What divides Ō: the final l as rounded at `normalizer`; 1 in rows that saw no key."""
    l = round_point(l, "normalizer", statistic(place, "l"))
    return jnp.where(empty, jnp.float32(1), l)


def divisor_of_o(l: Array, divisor: Array, empty: Array, rows: Array, n: Numerics) -> Array:
    """What divides Ō: the divisor, or in rows that `Numerics.divisor` names l as it was."""
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
    """lse = round_lse(m + log l); −inf in rows that saw no key."""
    lse = round_point(m + jnp.log(divisor), "lse", statistic(place, "lse"))
    return jnp.where(empty, -jnp.inf, lse)


def keep_unvisited(new: SoftmaxState, old: SoftmaxState, visited: Array | None) -> SoftmaxState:
    """The new state of rows that were visited, the old state of the others."""
    if visited is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, visited), new, old)
