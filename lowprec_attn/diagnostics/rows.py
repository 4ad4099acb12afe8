"""Properties of a row of scores: size, level, spread, ties, and whether one key holds all weight.

Functions of scores [..., T, S] return one value per row, [..., T]. Entries at or below
`numerics.MASKED` are unseen keys. Each function costs O(T S) elementwise operations with one or two
exp per score. Scores are those of softmax, behind a soft cap. A sink [..., T, 1] is no key.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from lowprec_attn.numerics import MASKED, Rounding, round_scaled, round_to

# The smallest P that bfloat16 rounds to 1: 1 − 2⁻⁹ is the midpoint between the last bfloat16
# before 1 and 1, and the tie goes to the even 1.
DOMINATED = 1.0 - 2.0**-9


def sees_several(s: Float32[Array, "... T S"]) -> Bool[Array, "... T"]:
    """Rows that see at least two keys: only they can tie or leave a key without weight."""
    return jnp.sum(_seen(s).astype(jnp.float32), axis=-1) >= 2


def score_maximum(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """max |S| over the keys that a row sees; 0 for a row that sees no key."""
    return jnp.max(jnp.where(_seen(s), jnp.abs(s), jnp.float32(0)), axis=-1)


def level(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """Mean of S over the keys that a row sees, 0 where it sees none; softmax does not feel it."""
    seen = _seen(s)
    return jnp.sum(jnp.where(seen, s, jnp.float32(0)), axis=-1) / jnp.maximum(_count(seen), 1.0)


def spread(s: Float32[Array, "... T S"]) -> Float32[Array, "... T"]:
    """r_m − level(S) ≥ 0, which softmax does feel; 0 where a row sees no key."""
    sees_any = jnp.any(_seen(s), axis=-1)
    return jnp.where(sees_any, jnp.max(s, axis=-1) - level(s), jnp.float32(0))


def repeated_maxima(s: Float32[Array, "... T S"], tolerance: float = 0.0) -> Bool[Array, "... T"]:
    """Rows whose maximum r_m is attained more than once: #{S ≥ r_m − tolerance} > 1.

    Args:
      s: scores as the run rounds them: in bfloat16 ties are common, in float32 hardly any exist.
      tolerance: distance ≥ 0 within which scores count as repeated.
    """
    r_m = jnp.max(s, axis=-1, keepdims=True)
    return _count(_seen(s) & (s >= r_m - jnp.float32(tolerance))) > 1


def rounded_to_one(
    s: Float32[Array, "... T S"], probs: Rounding, sink: Float32[Array, "... #T 1"] | None = None
) -> Bool[Array, "... T"]:
    """Rows with at least two P̄ = exp(S − r_m) that round to exactly 1 in the format of `probs`.

    In these rows v enters P̄·V unweighted twice. In bfloat16 the two largest scores are then less
    than about 2⁻⁹ apart, so every exact tie counts. r_m is the row's maximum over all keys and the
    sink, whatever row-max rule the run uses, and rounding is to nearest.
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
    """Rows in which one key has nearly all weight: max P = 1 / Σ exp(S − r_m) ≥ threshold.

    The sum is over the keys and the sink, r_m the largest score of a key. The default is the
    smallest P that bfloat16 rounds to 1.
    """
    r_m = _largest(s)
    weights = jnp.where(_seen(s), jnp.exp(s - r_m), jnp.float32(0))
    # Written without a division: a row without keys has the sum 0 and is not dominated.
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
