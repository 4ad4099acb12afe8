"""Properties of a row of scores: size, level, spread, ties, and whether one key holds all weight.

The functions take scores [..., T, S] as softmax sees them, after a soft cap, and return one value
per row, [..., T]. Entries at or below `numerics.MASKED` are unseen keys. A sink [..., T, 1] does
not count as a key. Each function costs O(T S) elementwise operations with at most two exp per
score.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from lowprec_attn.arithmetic.max_logit import maximum
from lowprec_attn.numerics import MASKED, Rounding, round_scaled, round_to

# The smallest P that bfloat16 rounds to 1. 1 − 2⁻⁹ is the midpoint between 1 and the largest
# bfloat16 number below it, and a tie goes to the even one, which is 1.
DOMINATED = 1.0 - 2.0**-9


def sees_several(s: Float32[Array, "... T S"]) -> Bool[Array, "... T"]:
    """Whether a row sees at least two keys: only then can it tie or leave a key without weight."""
    return jnp.sum(_seen(s).astype(jnp.float32), axis=-1) >= 2


def score_maximum(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """Returns max |S| over the keys that a row sees, or 0 for a row that sees no key.

    A row with a NaN score has NaN.

    Args:
      s: scores after a soft cap. A score at or below `numerics.MASKED` is a key that is not seen.
    """
    return maximum(jnp.where(s <= MASKED, jnp.float32(0), jnp.abs(s)), axis=-1)


def level(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """Mean of S over the keys that a row sees, 0 where it sees none; no effect on softmax."""
    seen = _seen(s)
    return jnp.sum(jnp.where(seen, s, jnp.float32(0)), axis=-1) / jnp.maximum(_count(seen), 1.0)


def spread(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """r_m − level(S) ≥ 0 for the row maximum r_m, which does affect softmax; 0 without a key."""
    sees_any = jnp.any(_seen(s), axis=-1)
    return jnp.where(sees_any, jnp.max(s, axis=-1) - level(s), jnp.float32(0))


def repeated_maxima(s: Float32[Array, "... T S"]) -> Bool[Array, "... T"]:
    """Whether a row attains its maximum r_m more than once: #{S = r_m} > 1.

    The dynamic maximum of arXiv 2510.04212 (Algorithm 2) acts on such rows.

    Args:
      s: scores as the run rounds them, as in `score_maximum`. Ties are common in bfloat16 and very
        rare in float32.
    """
    r_m = jnp.max(s, axis=-1, keepdims=True)
    return _count(_seen(s) & (s == r_m)) > 1


def rounded_to_one(
    s: Float32[Array, "... T S"], probs: Rounding, sink: Float32[Array, "... #T 1"] | None = None
) -> Bool[Array, "... T"]:
    """Whether at least two P̄ = exp(S − r_m) of a row round to exactly 1 in the format of `probs`.

    Two rows of V then enter P̄·V with full weight. In bfloat16 this takes two scores within about
    2⁻⁹ of r_m, so every exact tie of the maximum counts. r_m is the maximum of the row over all
    keys and the sink, whatever row-max rule the run uses. Rounding is to nearest.

    Args:
      s: scores, as in `score_maximum`.
      probs: the rounding of P̄, `Numerics.probs`.
      sink: the sink's score of each row; None without sinks. A sink is no key.
    """
    r_m = _largest(s) if sink is None else jnp.maximum(_largest(s), sink)
    p_bar = jnp.exp(s - r_m)
    if probs.scaling is None:
        p_bar = round_to(p_bar, probs.format)
    else:
        nearest = Rounding(probs.format, scaling=probs.scaling)
        p_bar = round_scaled(p_bar, nearest, -1, jnp.ones((1,) * p_bar.ndim, jnp.float32))
    return _count(_seen(s) & (p_bar == 1)) > 1


def dominated_rows(
    s: Float32[Array, "... T S"],
    threshold: float = DOMINATED,
    sink: Float32[Array, "... #T 1"] | None = None,
) -> Bool[Array, "... T"]:
    """Whether one key of a row has nearly all weight: max P = 1 / Σ exp(S − r_m) ≥ threshold.

    The sum is over the keys and the sink; r_m is the largest score of a key. It is False for a row
    that sees no key.

    Args:
      s: scores, as in `score_maximum`.
      threshold: a weight in (0, 1]. The default is the smallest P that bfloat16 rounds to 1.
      sink: the sink's score of each row; None without sinks.
    """
    r_m = _largest(s)
    weights = jnp.where(_seen(s), jnp.exp(s - r_m), jnp.float32(0))
    # There is no division, because a row without keys has the sum 0; it is not dominated.
    total = jnp.sum(weights, axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - r_m)[..., 0]
    return (total > 0) & (total * jnp.float32(threshold) <= 1)


def _seen(s: Array) -> Array:
    return s > MASKED


def _largest(s: Array) -> Array:
    return jnp.max(s, axis=-1, keepdims=True)


def _count(flags: Array) -> Array:
    return jnp.sum(flags.astype(jnp.float32), axis=-1)
