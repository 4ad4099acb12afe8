"""A fused multiply-add, x · factor + y rounded once, from plain float32 arithmetic.

XLA may contract a multiplication and an addition into a fused one on a CPU, and does not on a GPU.
A program cannot ask for it. The code here therefore splits the factors into parts of 12 bits, whose
products are exact with or without contraction, and rounds the sum with y once (Boldo and Melquiond,
Emulation of FMA, IEEE TC 57, 2008, figure 4).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

_UPPER = 0xFFFF_F000  # sign, exponent and 11 of 23 bits: with the leading one, 12 of 24
# Below these limits no part of a product overflows. Parts below 2^-126 are lost, but they are too
# small to change a power of two.
_LARGEST_X, _LARGEST_Y = np.float32(2.0**96), np.float32(2.0**120)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def multiply_add(x: Float32[Array, "..."], factor: float, y: Array) -> Float32[Array, "..."]:
    """Returns x · factor + y, rounded once to nearest; y broadcasts to x.

    Where |x| reaches 2^96, |y| reaches 2^120, or one of them is not finite, the product and the sum
    are rounded separately.

    Args:
      x: float32.
      factor: a number known at compile time, from 2^-64 to 2^24; it is rounded to float32.
      y: float32.
    """
    return multiply_add_in_kernel(x, factor, y)


def rounded_product(x: Float32[Array, "..."], factor: float) -> Float32[Array, "..."]:
    """Returns x · factor, rounded, in a form that no compiler contracts with a following sum.

    Args:
      x: float32.
      factor: as in `multiply_add`.
    """
    return multiply_add(x, factor, jnp.zeros_like(x))


def multiply_add_in_kernel(x: Array, factor: float, y: Array) -> Array:
    """`multiply_add` for bodies of interpreted kernels, without the rule for derivatives."""
    c = np.float32(factor)
    y = jnp.broadcast_to(y, x.shape)
    usual = (jnp.abs(x) < _LARGEST_X) & (jnp.abs(y) < _LARGEST_Y)
    zero = jnp.float32(0)
    fused = _fused(jnp.where(usual, x, zero), c, jnp.where(usual, y, zero))
    return jnp.where(usual, fused, x * c + y)


@multiply_add.defjvp
def _derivative(factor: float, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x, y), (dx, dy) = primals, tangents
    return multiply_add(x, factor, y), dx * np.float32(factor) + jnp.broadcast_to(dy, x.shape)


def _fused(x: Array, c: np.float32, y: Array) -> Array:
    x_high = _as_float(_bits(x) & jnp.uint32(_UPPER))
    x_low = x - x_high
    c_high = (c.view(np.uint32) & np.uint32(_UPPER)).view(np.float32)
    c_low = c - c_high
    # The product is largest + t + rest exactly, and then high + low, |low| ≤ ulp(high) / 2.
    largest = x_high * c_high
    t, t_error = _two_sum(x_high * c_low, x_low * c_high)
    t, rest = _two_sum(t, x_low * c_low + t_error)
    high, low = _two_sum(largest, t)
    high, low = _two_sum(high, low + rest)
    of_low, lost = _two_sum(y, low)
    total, error = _two_sum(high, of_low)
    return total + _to_odd(error, lost)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns a + b rounded, and the exact rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _to_odd(a: Array, b: Array) -> Array:
    """Returns a + b rounded to odd, so that rounding it to nearest later rounds a + b only once."""
    total, error = _two_sum(a, b)
    bits = _bits(total)
    # Step away from zero if the rounding error has the sign of the sum, else toward zero.
    step = jnp.where((_bits(error) ^ bits) >> 31 == 0, jnp.int32(1), jnp.int32(-1))
    odd = _as_float(lax.bitcast_convert_type(bits.astype(jnp.int32) + step, jnp.uint32))
    return jnp.where((error != 0) & (bits & 1 == 0), odd, total)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
