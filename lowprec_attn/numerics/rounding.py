"""`round_to`, the one function that lowers precision, and the record of how a point rounds.

`round_to` works on the integer bits of a float32. A compiler may drop a pair of casts (XLA does so
by default inside chains of bfloat16 operations), but it cannot drop an addition and a mask. The
result stays float32, and storing it in the format's own dtype is then exact.
"""

import dataclasses
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float32, UInt32

from lowprec_attn.numerics.formats import FORMATS, Format, get_format
from lowprec_attn.numerics.scaling import Scaling, get_scaling

Mode = Literal[
    "nearest", "toward_zero", "stochastic", "error_random_sign", "error_positive", "error_negative"
]
MODES: tuple[str, ...] = get_args(Mode)

_FLOAT32_FRACTION_BITS = 23
_SIGN = 0x8000_0000
_MAGNITUDE = 0x7FFF_FFFF
_INF = 0x7F80_0000
_NAN = 0x7FC0_0000


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How one numerics point rounds: to which format and in which mode.

    Modes:
      nearest: to the nearest value of the format, ties to even.
      toward_zero: the bits that the format lacks are dropped (IEEE 754's roundTowardZero), so that
        errors have the sign of −x. Finite values stay finite.
      stochastic: up or down, with probabilities that make the result unbiased.
      error_random_sign, error_positive, error_negative: controls for experiments. The value stays
        float32 and becomes x + s·|nearest(x) − x|, where s is a random sign, +1 or −1. The error
        has the size of a rounding error, but not its relation to x.

    With a `scaling`, x · scale is rounded, and the result is divided by the scale; see
    `numerics.scaling`.
    """

    format: Format
    mode: Mode = "nearest"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _check_mode(self.mode)
        if self.scaling is not None and self.format.has_float32_exponents:
            raise ValueError(
                f"{self}: {self.format} has the exponents of float32 and needs no scale; "
                f"use {self.format}"
            )

    @property
    def is_identity(self) -> bool:
        """Whether a float32 value passes unchanged."""
        return self.format.name == "float32"

    @property
    def needs_bits(self) -> bool:
        """Whether the rounding draws random bits."""
        return not self.is_identity and self.mode in ("stochastic", "error_random_sign")

    @property
    def result_format(self) -> Format:
        """The format that holds every result; float32 for error-injection modes and scales."""
        in_float32 = self.mode.startswith("error_") or self.scaling is not None
        return FORMATS["float32"] if in_float32 else self.format

    def __str__(self) -> str:
        text = str(self.format) if self.scaling is None else f"{self.format}/{self.scaling}"
        return text if self.mode == "nearest" else f"{text}:{self.mode}"

    def __repr__(self) -> str:
        """The call `get_rounding(text)` if the format has a name, which keeps signatures short."""
        if FORMATS.get(self.format.name) == self.format:
            return f"get_rounding({str(self)!r})"
        return f"Rounding({self.format!r}, {self.mode!r}, {self.scaling!r})"


def get_rounding(spec: "str | Format | Rounding") -> Rounding:
    """Returns the rounding written as `format[/scale][:mode]`; a `Rounding` is returned as it is.

    Examples are `'bfloat16'` and `'float8_e4m3fn/tensor:stochastic'`. A `Format` rounds to nearest.

    Raises:
      ValueError: the format, scale or mode is unknown; the message lists the known ones.
    """
    if isinstance(spec, Rounding):
        return spec
    if isinstance(spec, Format):
        return Rounding(spec)
    if not isinstance(spec, str):
        raise ValueError(f"a rounding is written 'format' or 'format[/scale][:mode]', got {spec!r}")
    written, _, mode = spec.partition(":")
    name, has_scale, scale = written.partition("/")
    scaling = get_scaling(scale) if has_scale else None
    return Rounding(get_format(name), cast(Mode, mode or "nearest"), scaling)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown rounding mode {mode!r}; modes are {', '.join(MODES)}")


def round_to(
    x: Float32[Array, "..."],
    fmt: str | Format,
    mode: Mode = "nearest",
    bits: UInt32[Array, "..."] | None = None,
) -> Float32[Array, "..."]:
    """Rounds a float32 array to `fmt`; the result is a float32 array of the same shape.

    NaN stays NaN. A value beyond the largest finite number becomes infinity, as in IEEE rounding,
    or NaN in float8_e4m3fn, which has no infinity. Nothing saturates; `ml_dtypes` agrees. With
    `toward_zero`, a finite value beyond the largest finite number becomes that number, and infinity
    is treated as in the other modes.

    The derivative is that of the identity in every mode: a tangent passes unchanged
    (straight-through).

    Args:
      x: float32 array.
      fmt: target format.
      mode: see `Rounding`.
      bits: independent uniform uint32 of x's shape, for `stochastic` and `error_random_sign`.

    Raises:
      ValueError: x is not float32, bits are missing, or the format or mode is unknown.
    """
    fmt = _checked_format(x, fmt, mode, bits)
    return x if fmt.name == "float32" else _straight_through(x, fmt, mode, bits)


def round_in_kernel(
    x: Float32[Array, "..."],
    fmt: str | Format,
    mode: Mode = "nearest",
    bits: UInt32[Array, "..."] | None = None,
) -> Float32[Array, "..."]:
    """Rounds as `round_to` does, in a kernel body, which needs no rule for derivatives.

    Args:
      x, fmt, mode, bits: as in `round_to`.

    Raises:
      ValueError: as `round_to` does.
    """
    fmt = _checked_format(x, fmt, mode, bits)
    return x if fmt.name == "float32" else _rounded(x, fmt, mode, bits)


def _checked_format(x: Array, fmt: str | Format, mode: Mode, bits: Array | None) -> Format:
    fmt = get_format(fmt)
    _check_mode(mode)
    if x.dtype != jnp.float32:
        raise ValueError(f"round_to takes float32, got {x.dtype}; convert with .astype first")
    needs_bits = Rounding(fmt, mode).needs_bits
    if needs_bits and bits is None:
        raise ValueError(f"rounding mode {mode!r} needs random bits; pass a PRNG key")
    return fmt


def _rounded(x: Array, fmt: Format, mode: str, bits: Array | None) -> Array:
    if mode.startswith("error_"):
        return _inject_error(x, fmt, mode, bits)
    return _round(x, fmt, mode, bits)


# Operations on integer bits have derivative 0, so a rounding needs a derivative rule of its own.
_straight_through = jax.custom_jvp(_rounded, nondiff_argnums=(1, 2))


@_straight_through.defjvp
def _tangent_unchanged(fmt: Format, mode: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, bits = primals
    return _straight_through(x, fmt, mode, bits), tangents[0]


def _round(x: Array, fmt: Format, mode: str, bits: Array | None) -> Array:
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = pattern & jnp.uint32(_MAGNITUDE)
    if fmt.has_float32_exponents:
        drop = jnp.uint32(_FLOAT32_FRACTION_BITS - fmt.fraction_bits)
        # A carry out of the significand into the exponent, even up to infinity, is correct.
        magnitude = _round_bits(magnitude, drop, mode, bits)
    else:
        magnitude = _round_significand(magnitude, fmt, mode, bits)
    rounded = lax.bitcast_convert_type(magnitude | (pattern & jnp.uint32(_SIGN)), jnp.float32)
    # Without this guard, a carry would turn some NaN into zero.
    return jnp.where(x == x, rounded, x)


def _round_bits(n: Array, drop: Array, mode: str, bits: Array | None) -> Array:
    """Rounds the unsigned integer n to a multiple of 2 ** drop, 1 <= drop <= 31."""
    one = jnp.uint32(1)
    mask = (one << drop) - one
    if mode == "nearest":
        n = n + (mask >> one) + ((n >> drop) & one)  # just below half, plus the last kept bit
    elif mode == "stochastic":
        assert bits is not None
        n = n + (bits & mask)
    return n & ~mask


def _round_significand(magnitude: Array, fmt: Format, mode: str, bits: Array | None) -> Array:
    """Rounds to a format with fewer exponents than float32, and thus with its own subnormals."""
    width = jnp.uint32(_FLOAT32_FRACTION_BITS)
    exponent = jnp.maximum(magnitude >> width, jnp.uint32(1))  # biased by 127
    fraction = magnitude & jnp.uint32((1 << 23) - 1)
    is_normal = magnitude >> width != 0
    significand = jnp.where(is_normal, fraction | jnp.uint32(1 << 23), fraction)
    # Below the format's smallest normal the quantum stays, so more bits are dropped.
    first_normal = jnp.uint32(fmt.min_exponent + 127)
    subnormal = jnp.where(exponent < first_normal, first_normal - exponent, jnp.uint32(0))
    drop = jnp.uint32(_FLOAT32_FRACTION_BITS - fmt.fraction_bits) + subnormal
    # Past 31 dropped bits the value is under 2**-7 quanta: nearest is zero, and stochastic
    # rounding needs only the leading bits of the significand.
    excess = jnp.where(drop > 31, jnp.minimum(drop, jnp.uint32(62)) - jnp.uint32(31), jnp.uint32(0))
    rounded = _round_bits(significand >> excess, jnp.minimum(drop, jnp.uint32(31)), mode, bits)
    # The significand is a multiple of the quantum: zero, or scaled back to have its leading
    # one at or above bit 23. Adding it to exponent - 1 restores the implicit one.
    scaled = lax.bitcast_convert_type(rounded.astype(jnp.float32), jnp.uint32)
    power = exponent + excess  # weight of bit 0 is 2 ** (power - 150)
    value = scaled + ((power - jnp.uint32(150)) << width)
    value = jnp.where(rounded == 0, jnp.uint32(0), value)
    largest = jnp.uint32(_bits_of(fmt.max_finite))
    overflow = jnp.uint32(_INF if fmt.overflow == "inf" else _NAN)
    if mode == "toward_zero":
        overflow = jnp.where(magnitude < jnp.uint32(_INF), largest, overflow)
    return jnp.where(value > largest, overflow, value)


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _inject_error(x: Array, fmt: Format, mode: str, bits: Array | None) -> Array:
    """Returns x + s·|nearest(x) − x| in float32."""
    rounded = _round(x, fmt, "nearest", None)
    size = jnp.abs(rounded - x)
    if mode == "error_random_sign":
        assert bits is not None
        sign = jnp.where(bits >> jnp.uint32(31) == 1, jnp.float32(-1), jnp.float32(1))
    else:
        sign = jnp.float32(1 if mode == "error_positive" else -1)
    # Where the rounded value is not finite, there is no error size to inject.
    return jnp.where(jnp.isfinite(size), x + sign * size, rounded)


def counter_bits(seed: UInt32[Array, "2"], *counters: ArrayLike) -> UInt32[Array, "..."]:
    """Returns uniform uint32 bits, a hash of a seed and of integer counters, which broadcast.

    The bits depend only on the seed and the values of the counters, so the same (batch, head, row,
    column) draws the same bits whatever the tiles or the sharding. The hash uses plain uint32
    operations, which lower on every backend. The finaliser is `lowbias32` (Wellons, Hash
    Prospector, 2018).

    Args:
      seed: two uint32 numbers.
      *counters: integers or integer arrays, taken modulo 2³². The result has their common shape.
    """
    h = jnp.uint32(0)
    for counter in (seed[0], seed[1], *counters):
        # The odd multiplier spreads small consecutive counters over all bits. The addend keeps
        # counters that are all zero from hashing to zero.
        n = jnp.asarray(counter).astype(jnp.uint32)
        h = _mix(h ^ (n * jnp.uint32(0x9E37_79B9) + jnp.uint32(0x7F4A_7C15)))
    return h


def _mix(h: Array) -> Array:
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x7FEB_352D)
    h = (h ^ (h >> jnp.uint32(15))) * jnp.uint32(0x846C_A68B)
    return h ^ (h >> jnp.uint32(16))
