"""Sums of float32 numbers as pairs (high, low) of float32 numbers that stand for high + low.

A pair has about 48 bits. JAX has no float64 by default, and some sums that vanish in exact
arithmetic (a row of dS; a row of P, less 1) have terms far larger than the sum. With rounding to
nearest, the error of a float32 sum is itself a float32 number, which `two_sum` returns (Knuth,
TAOCP 2, 4.2.2).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

Pair = tuple[Array, Array]


def two_sum(a: Float32[Array, "*A"], b: Float32[Array, "*A"]) -> Pair:
    """Returns (s, e) with s = float32(a + b) and, unless it overflows, s + e = a + b exactly."""
    s = a + b
    from_b = s - a
    return s, (a - (s - from_b)) + (b - from_b)


def pair_sum(x: Float32[Array, "*A n"]) -> Pair:
    """Returns Σ x over the last axis, which is kept with length 1.

    Halves are added pairwise, so the low parts are sums of log₂ n rounding errors. The error of the
    result is at most 2⁻⁴⁸ (log₂ n)² Σ|x|. Cost: about 10 n operations.
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
