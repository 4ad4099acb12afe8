"""Scales of 8-bit formats: what an array is multiplied with before it is rounded, and divided by.

By name, as in 'float8_e4m3fn/tensor'. With max the largest number of the format and amax the
largest finite |x| of those that share a scale:

  x<factor>   a constant, such as x448 or x256
  tensor      max / amax of the whole array (TransformerEngine, `recipe_common.cuh`)
  head        the same of a batch element and key head (what FlashAttention-3's callers pass)
  block<n>    the same of n rows of a head (FlashAttention-3's paper, arXiv 2407.08608, section 3.3)
  mx          2^(⌊log2 max⌋ − ⌊log2 amax⌋) of 32 numbers along the axis that the product sums over,
              its inverse an e8m0 number (OCP Microscaling Formats 1.0, section 6.3)
  nvfp4       g / d of 16 numbers likewise, g = 448 max / amax of the array, d = g amax / max of the
              16 as rounded to e4m3 (NVIDIA's NVFP4, here of any format)

A value beyond max after that is rounded to ± max, infinities too, as cvt.satfinite does. NaN stays
NaN and counts in no amax. Where amax is 0 or infinite the scale is 1.
"""

import dataclasses
import re
from typing import Any, Literal, get_args

Kind = Literal["x", "tensor", "head", "block", "mx", "nvfp4"]

# Numbers that share a scale along the axis of a product.
_ALONG_AXIS = {"mx": 32, "nvfp4": 16}
_WRITTEN = re.compile(r"(x)([0-9.]+)|(block)([0-9]+)|(tensor|head|mx|nvfp4)")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Which numbers of an array share a scale, and what it is.

    An array is that of one call: with `attention.sharded` that of a device, and where heads differ
    in their arithmetic that of the heads that share it. Rows that no query sees count as well.

    Attributes:
      kind: see the module.
      number: the factor of `x`, the rows of `block`; 0 for the others.
    """

    kind: Kind
    number: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown scale {self.kind!r}; there are {_listed()}")
        if (self.number > 0) != (self.kind in ("x", "block")):
            raise ValueError(f"scale {self} must have a positive number behind x and block alone")

    @property
    def block_on_axis(self) -> int | None:
        """How many numbers along the axis of a product share a scale, None where none do."""
        return _ALONG_AXIS.get(self.kind)

    @property
    def needs_largest(self) -> bool:
        """Whether the largest |x| of more than a row has to be known first."""
        return self.kind in ("tensor", "head", "nvfp4")

    def __str__(self) -> str:
        return f"{self.kind}{self.number:g}" if self.number else self.kind


def get_scaling(name: str) -> Scaling:
    """The scaling written `name`.

    Raises:
      ValueError: there is no such; the message lists them.
    """
    found = _WRITTEN.fullmatch(name)
    if found is None or (found[2] or "").count(".") > 1:
        raise ValueError(f"unknown scale {name!r}; there are {_listed()}")
    kind: Any = found[1] or found[3] or found[5]
    number = found[2] or found[4]
    return Scaling(kind, float(number) if number else 0.0)


def _listed() -> str:
    return "x<factor>, tensor, head, block<rows>, mx, nvfp4"
