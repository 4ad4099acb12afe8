"""Sums of float32 numbers as pairs of them, (high, low) for high + low: about 48 bits.

JAX has no float64 by default, and the sums that vanish in exact arithmetic (of a row of dS, of a
row of P less 1) are made of terms far larger than what is left of them. Rounded to nearest, the
error of a float32 sum is a float32 number itself, which `two_sum` gives (Knuth, TAOCP 2, 4.2.2).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

Pair = tuple[Array, Array]


def two_sum(a: Float32[Array, "*A"], b: Float32[Array, "*A"]) -> Pair:
    """(s, e) with s = float32(a + b) and s + e = a + b exactly, but for overflow."""
    s = a + b
    from_b = s - a
    return s, (a - (s - from_b)) + (b - from_b)


def pair_sum(x: Float32[Array, "*A n"]) -> Pair:
    """Σ x over the last axis, which is kept with length 1.

    Halves are added to halves, so the low parts are sums of log₂ n rounding errors: the result is
    off by at most 2⁻⁴⁸ (log₂ n)² Σ|x|. Cost: about 10 n operations.
    """
    high, low = x, jnp.zeros_like(x)
    while (n := high.shape[-1]) > 1:
        if n % 2:
            high, low = (_with_zero(part) for part in (high, low))
        half = high.shape[-1] // 2
        high, error = two_sum(high[..., :half], high[..., half:])
        low = low[..., :half] + low[..., half:] + error
    return high, low


def _with_zero(x: Array) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
