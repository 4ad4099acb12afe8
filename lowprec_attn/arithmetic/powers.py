"""Powers of two relative to a whole-number maximum, for `exponent='whole_max'`.

With c = scale · log2 e, S₂ = c q kᵀ is the score in base 2, and M is its row maximum rounded up to
a whole number. A fused multiply-add forms 96 + S₂ − M. Between 64 and 128, float32 numbers lie
2^-17 apart whatever M is, so S₂ is in effect rounded to a multiple of 2^-17. A P̄ above 2^-32 is
then 2^-M times a function of q·k alone. Its significand is therefore the same for every M, such as
the M of an earlier step.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.fused import multiply_add

LN2 = float(np.log(2.0))

# For S₂ − M from −32 to 31, S₂ − M + HIGH lies in [64, 128), where float32 has one spacing.
HIGH = 96.0
_LEAST = float(np.finfo(np.float32).min)
# From this magnitude on, float32 holds no fractions.
_NO_FRACTION = 2.0**24


def whole_max(m: Array, factor: float) -> Array:
    """Returns M, which is factor · m rounded up to a whole number; −inf where m is −inf."""
    return jnp.ceil(_in_base_2(m, factor))


def power(s: Array, factor: float, m: Array) -> Array:
    """Returns P̄ = 2^(S₂ − M), where S₂ is factor · s rounded to a multiple of 2^-17.

    P̄ is 0 where s is −inf. If |M| is at least 2^24, S₂ is rounded to float32 instead, and P̄ is
    still at most 1.

    Args:
      s: scores of any magnitude.
      factor: a number known at compile time.
      m: M, which broadcasts to s; 0 in rows without keys.
    """
    exponent = distance(s, factor, m, multiply_add)
    rounded = jnp.where(s == -jnp.inf, s, _in_base_2(s, factor)) - m
    return exp2(jnp.where(jnp.abs(m) < _NO_FRACTION, exponent, rounded))


def distance(
    s: Array, factor: float, m: Array, fma: Callable[[Array, float, Array], Array]
) -> Array:
    """Returns S₂ − M with S₂ rounded to a multiple of 2^-17.

    Args:
      s, factor, m: as in `power`.
      fma: computes x · factor + y, rounded once.
    """
    return fma(s, factor, offset_of(m)) - jnp.float32(HIGH)


def offset_of(m: Array) -> Array:
    """The number HIGH − M that a multiply-add adds to S₂."""
    return jnp.float32(HIGH) - m


def exp2(x: Array) -> Array:
    """Returns 2^x, such that 2^(x + 1) is exactly twice 2^x; 0 for x below −126."""
    x = jnp.maximum(x, jnp.float32(-127))
    whole = lax.stop_gradient(jnp.floor(x))
    return jnp.exp2(x - whole) * power_of_two(whole)


def power_of_two(whole: Array) -> Array:
    """Returns 2^whole exactly, for a whole number up to 127; 0 below −126."""
    # The 2^x of XLA and of GPUs is an approximation; XLA's 2^-126 is 0.
    biased = jnp.clip(whole, -126, 127).astype(jnp.int32) + jnp.int32(127)
    result = lax.bitcast_convert_type(biased << jnp.int32(23), jnp.float32)
    return jnp.where(whole < -126, jnp.float32(0), result)


def _in_base_2(s: Array, factor: float) -> Array:
    """Returns factor · s, clipped to stay finite where s is finite.

    The lowest finite scores, which an additive mask produces, must not turn into −inf.
    """
    return jnp.where(jnp.abs(s) == jnp.inf, s, jnp.clip(s * np.float32(factor), _LEAST, -_LEAST))
