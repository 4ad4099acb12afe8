"""Number formats as data: what `round_to` needs to know about each format."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format that float32 contains.

    Attributes:
      name: the name, as written in configs.
      fraction_bits: stored bits of the significand, without the implicit leading one.
      min_exponent: exponent of the smallest normal number; subnormals are multiples of
        2 ** (min_exponent - fraction_bits).
      max_finite: largest finite value.
      overflow: the result of rounding a value beyond it: `inf` (IEEE) or `nan` (float8_e4m3fn).
      storage: name of the narrowest array dtype that holds every value of the format.
    """

    name: str
    fraction_bits: int
    min_exponent: int
    max_finite: float
    overflow: Literal["inf", "nan"]
    storage: str

    @property
    def dtype(self) -> np.dtype:
        """The narrowest array dtype that holds every value of the format."""
        return jnp.dtype(self.storage)

    @property
    def has_float32_exponents(self) -> bool:
        """Whether rounding only shortens float32's significand (float32, bfloat16, *_m<n>)."""
        return self.min_exponent == -126

    def is_exact_in(self, dtype: np.dtype) -> bool:
        """Whether every value of the format is representable in `dtype`."""
        other = FORMATS.get(jnp.dtype(dtype).name)
        if other is None:
            return False
        quantum = self.min_exponent - self.fraction_bits
        other_quantum = other.min_exponent - other.fraction_bits
        return (
            self.fraction_bits <= other.fraction_bits
            and quantum >= other_quantum
            and self.max_finite <= other.max_finite
        )

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """The call `get_format(name)` for a named format, to keep signatures and errors short."""
        if FORMATS.get(self.name) == self:
            return f"get_format({self.name!r})"
        fields = dataclasses.fields(self)
        return f"Format({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"


def _shortened(name: str, fraction_bits: int, storage: str) -> Format:
    """A format with float32's exponents and `fraction_bits` of its 23 stored significand bits."""
    max_finite = (2.0 - 2.0**-fraction_bits) * 2.0**127
    return Format(name, fraction_bits, -126, max_finite, "inf", storage)


# bf16_m<n> keeps n of bfloat16's 7 stored significand bits, which is coarser than any hardware
# format. f32_m<n> keeps n of float32's 23 bits, between bfloat16 and float32 (f32_m10 is TF32).
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _shortened("float32", 23, "float32"),
        *(_shortened(f"f32_m{n}", n, "float32") for n in range(22, 7, -1)),
        _shortened("bfloat16", 7, "bfloat16"),
        *(_shortened(f"bf16_m{n}", n, "bfloat16") for n in range(6, 0, -1)),
        Format("float16", 10, -14, 65504.0, "inf", "float16"),
        Format("float8_e4m3fn", 3, -6, 448.0, "nan", "float8_e4m3fn"),
        Format("float8_e5m2", 2, -14, 57344.0, "inf", "float8_e5m2"),
    )
}


def get_format(name: str | Format) -> Format:
    """Returns the format called `name`; a `Format` is returned as it is.

    Raises:
      ValueError: there is no such format; the message lists the formats.
    """
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns " (did you mean NAME?)" with the known name that is nearest, or "" if none is near.

    Args:
      name: the unknown name.
      known: the valid names.
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
