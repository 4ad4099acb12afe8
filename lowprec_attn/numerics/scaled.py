"""Rounding with a scale: x · scale is rounded to the format, with saturation, and scaled back."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32

from lowprec_attn.numerics.formats import Format, get_format
from lowprec_attn.numerics.rounding import Rounding, round_to
from lowprec_attn.numerics.scaling import Scaling

_E4M3 = get_format("float8_e4m3fn")
_LARGEST_POWER = 127  # the largest exponent of e8m0


def largest(x: Float32[Array, "B K G T S"], scaling: Scaling) -> Array:
    """Returns the largest |x|, the amax of `numerics.scaling`; NaN does not count.

    Args:
      x: the whole array, float32, with N = K·G query heads.
      scaling: the scaling that needs it. With the kind `head` the result has one number per batch
        element and key head, [B, K, 1, 1, 1], else one number, [1, 1, 1, 1, 1].
    """
    axes = (2, 3, 4) if scaling.kind == "head" else tuple(range(x.ndim))
    return jnp.max(_size(x), axis=axes, keepdims=True)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def round_scaled(
    x: Float32[Array, "B K G T S"],
    rounding: Rounding,
    axis: int,
    amax: Array | None = None,
    bits: UInt32[Array, "B K G T S"] | None = None,
) -> Float32[Array, "B K G T S"]:
    """Rounds a float32 array to numbers code / scale, and returns them in float32.

    A code is a number of the format, and `rounding.scaling` determines the scale. As in `round_to`,
    the derivative is that of the identity.

    Args:
      x: an array, or a tile of one.
      rounding: a rounding that has a scaling.
      axis: the axis over which the product sums, −1 or −2.
      amax: `largest` of the whole array if x is a tile of it; None if x is the whole array.
      bits: random bits, as in `round_to`.
    """
    fmt, scaling = rounding.format, rounding.scaling
    assert scaling is not None
    most = jnp.float32(fmt.max_finite)
    if amax is None and scaling.needs_largest:
        amax = largest(x, scaling)

    def codes(scaled: Array) -> Array:
        return round_to(jnp.clip(scaled, -most, most), fmt, rounding.mode, bits)

    if scaling.kind == "nvfp4":
        assert amax is not None
        of_array = _factor(jnp.float32(_E4M3.max_finite) * most, amax)
        of_block = _of_blocks(_size(x), scaling.block_on_axis, axis) * (of_array / most)
        of_block = round_to(jnp.minimum(of_block, jnp.float32(_E4M3.max_finite)), _E4M3)
        # A block whose d rounds to zero becomes zero.
        kept = jnp.where(of_block == 0, jnp.float32(1), of_block)
        value = codes(x * (of_array / kept)) * kept / of_array
        return jnp.where((of_block == 0) & (x == x), jnp.float32(0), value)
    if scaling.kind == "x":
        scale = jnp.float32(scaling.number)
    elif scaling.kind == "block":
        rows = jnp.max(_size(x), axis=-1, keepdims=True)
        scale = _factor(most, _of_blocks(rows, int(scaling.number), -2))
    elif scaling.kind == "mx":
        scale = _power_of_two(_of_blocks(_size(x), scaling.block_on_axis, axis), fmt)
    else:
        assert amax is not None
        scale = _factor(most, amax)
    return codes(x * scale) / scale


@round_scaled.defjvp
def _tangent_unchanged(
    rounding: Rounding, axis: int, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    x, *others = primals
    return round_scaled(x, rounding, axis, *others), tangents[0]


def _size(x: Array) -> Array:
    """Returns |x|, with 0 in place of NaN."""
    return jnp.where(x == x, jnp.abs(x), jnp.float32(0))


def _factor(most: Array, amax: Array) -> Array:
    """Returns most / amax, at most the largest float32; 1 where amax is 0 or infinite."""
    plain = (amax == 0) | (amax == jnp.inf)
    factor = most / jnp.where(plain, jnp.float32(1), amax)
    return jnp.where(plain, jnp.float32(1), jnp.minimum(factor, jnp.finfo(jnp.float32).max))


def _power_of_two(amax: Array, fmt: Format) -> Array:
    """Returns 2^(⌊log2 max⌋ − ⌊log2 amax⌋), limited to e8m0; 1 where amax is 0 or infinite."""
    plain = (amax == 0) | (amax == jnp.inf)
    exponent = (lax.bitcast_convert_type(amax, jnp.uint32) >> 23).astype(jnp.int32) - 127
    power = jnp.minimum(math.frexp(fmt.max_finite)[1] - 1 - exponent, _LARGEST_POWER)
    bits = lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    return jnp.where(plain, jnp.float32(1), bits)


def _of_blocks(size: Array, block: int | None, axis: int) -> Array:
    """Replaces every number by the largest of its block of `block` numbers along an axis."""
    assert block is not None
    size = jnp.moveaxis(size, axis, -1)
    length = size.shape[-1]
    blocks = -(-length // block)
    padded = jnp.pad(size, [(0, 0)] * (size.ndim - 1) + [(0, blocks * block - length)])
    of_each = jnp.max(padded.reshape(*size.shape[:-1], blocks, block), axis=-1)
    return jnp.moveaxis(jnp.repeat(of_each, block, axis=-1)[..., :length], -1, axis)
