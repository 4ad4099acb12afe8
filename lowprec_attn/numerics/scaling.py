"""Scales of 8-bit formats: an array is multiplied by its scale, rounded, and divided by it again.

A scale is named as in 'float8_e4m3fn/tensor'. Let max be the largest number of the format, and amax
the largest |x| among the numbers that share a scale. The scales are:

  x<factor>   a constant factor, such as x448 or x256
  tensor      max / amax, one scale per array (TransformerEngine, `recipe_common.cuh`)
  head        max / amax, one scale per batch element and key head (as FlashAttention-3's callers
              pass it)
  block<n>    max / amax, one scale per n rows of a head (FlashAttention-3's paper, arXiv
              2407.08608, section 3.3)
  mx          2^(⌊log2 max⌋ − ⌊log2 amax⌋), one scale per 32 numbers along the axis over which the
              product sums; its inverse is an e8m0 number (OCP Microscaling Formats 1.0, section
              6.3)
  nvfp4       g / d, one scale per 16 numbers along that axis; g = 448 max / amax with the amax of
              the array, and d = g amax / max with the amax of the 16 numbers, rounded to e4m3
              (NVIDIA's NVFP4, here for any format)

A scaled value beyond max, even infinity, is rounded to ± max, as cvt.satfinite does. NaN stays NaN
and does not enter amax. Where amax is 0 or infinite the scale is 1. Infinities in keys that
no query sees, and in the q and dO of rows that see no key, do not enter amax either.
"""

import dataclasses
import re
from typing import Any, Literal, get_args

import numpy as np

Kind = Literal["x", "tensor", "head", "block", "mx", "nvfp4"]

# How many numbers along the axis of a product share a scale.
_ALONG_AXIS = {"mx": 32, "nvfp4": 16}
_WRITTEN = re.compile(r"(x)([0-9]+\.?[0-9]*|\.[0-9]+)|(block)([0-9]+)|(tensor|head|mx|nvfp4)")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Which numbers of an array share a scale, and how the scale is computed.

    The array is the part that one call sees: with `attention.sharded` the part on one device, and
    if heads differ in arithmetic the part of the heads that share it. Rows of k and v that no query
    sees count as well.

    Attributes:
      kind: the kind of scale, see the module.
      number: the factor of `x` or the number of rows of `block`; 0 for all other kinds.
    """

    kind: Kind
    number: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown scale {self.kind!r}; there are {_listed()}")
        if (self.number > 0) != (self.kind in ("x", "block")):
            raise ValueError(f"scale {self} must have a positive number behind x and block alone")
        if self.kind == "block" and self.number % 1:
            raise ValueError(f"scale {self} must have a whole number of rows behind block")
        # XLA takes subnormal numbers for 0.
        least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if self.kind == "x" and not least <= self.number <= most:
            raise ValueError(
                f"scale x{self.number:g} must have a factor from {least:.3g} to {most:.3g}, which "
                "float32 can hold"
            )

    @property
    def block_on_axis(self) -> int | None:
        """How many numbers along the axis of a product share a scale; None for other kinds."""
        return _ALONG_AXIS.get(self.kind)

    @property
    def needs_largest(self) -> bool:
        """Whether the scale needs the largest |x| of more numbers than one row."""
        return self.kind in ("tensor", "head", "nvfp4")

    def __str__(self) -> str:
        # All digits and no exponent, so that `get_scaling` gives the same scale again.
        number = np.format_float_positional(self.number, trim="-")
        return f"{self.kind}{number}" if self.number else self.kind


def get_scaling(name: str) -> Scaling:
    """Returns the scaling written as `name`, such as 'tensor' or 'x448'.

    Raises:
      ValueError: there is no such scale; the message lists the scales.
    """
    found = _WRITTEN.fullmatch(name)
    if found is None:
        raise ValueError(f"unknown scale {name!r}; there are {_listed()}")
    kind: Any = found[1] or found[3] or found[5]
    number = found[2] or found[4]
    return Scaling(kind, float(number) if number else 0.0)


def _listed() -> str:
    return "x<factor>, tensor, head, block<rows>, mx, nvfp4"
