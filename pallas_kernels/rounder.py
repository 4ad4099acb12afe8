"""Rounding and split products inside a kernel: the part that all devices share.

In the interpreter, XLA:CPU would drop a pair of casts, so `round_in_kernel` rounds the bits there.
A compiled kernel uses the device's own conversions. Both give the same bits for every float32
except NaN, which stays NaN. Shortened significands (bf16_m*, f32_m*) and modes other than `nearest`
use `round_in_kernel` everywhere.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.points import LEAST_SHIFT
from lowprec_attn.numerics import (
    PLAIN_POINTS,
    POINTS,
    SALTS,
    Format,
    Numerics,
    Point,
    Rounding,
    counter_bits,
    get_rounding,
    round_in_kernel,
)

BFLOAT16 = get_rounding("bfloat16")

# How many bfloat16 terms, of 8 significant bits each, hold 8, 11 and 24 significant bits exactly.
_TERMS = {"bfloat16": 1, "float16": 2, "float32": 3}


def unsupported_rounding(
    numerics: Numerics, formats: Collection[str], modes: Collection[str]
) -> str | None:
    """Names the first point that kernels with these formats and modes cannot round, or None."""
    for point in POINTS:
        rounding = getattr(numerics, point)
        if rounding is None:
            continue
        if rounding.scaling is not None:
            return f"{point}={rounding} (its kernels have no scales)"
        if point in PLAIN_POINTS and not rounding.is_identity:
            return f"{point}={rounding} (its kernels read q, k and dO as they are)"
        if rounding.format.name not in formats or rounding.mode not in modes:
            return f"{point}={rounding}"
    return None


class Stream(NamedTuple):
    """The scalars that determine a program's random bits: seed words, batch and head index."""

    seed: tuple[Array, Array]
    batch: Array
    head: Array


@dataclasses.dataclass(frozen=True)
class Rounder:
    """Rounds tiles [rows, columns] of one program. Each device's subclass adds a product, `dot`.

    Attributes:
      numerics: what is rounded to which format.
      dtype: the dtype of q, k and v.
      stream: the source of random bits, or None where no point draws any.
      interpret: whether the kernel runs in the interpreter.
    """

    numerics: Numerics
    dtype: np.dtype
    stream: Stream | None
    interpret: bool

    def __call__(self, x: Array, point: Point, place: Place) -> Array:
        """x rounded at a point of `POINTS`; float32 in, float32 out."""
        rounding = self.numerics.rounding_at(point, self.dtype)
        if rounding.is_identity:
            return x
        if rounding.mode == "nearest":
            return self.nearest_at(x, point, rounding)
        if not rounding.needs_bits:
            return round_in_kernel(x, rounding.format, rounding.mode)
        assert self.stream is not None  # `attention` requires it
        bits = counter_bits(
            self.stream.seed,  # type: ignore[arg-type]  # two scalars index as an array of two
            SALTS[point],
            self.stream.batch,
            self.stream.head,
            place.rows,
            place.cols,
            place.step,
        )
        return round_in_kernel(x, rounding.format, rounding.mode, jnp.broadcast_to(bits, x.shape))

    def shift(self, x: Array, place: Place) -> Array:
        """The exponent S − m or m_old − m, rounded at `shift`."""
        if self.numerics.shift.is_identity:
            return x
        return self(jnp.maximum(x, jnp.float32(LEAST_SHIFT)), "shift", place)

    def nearest_at(self, x: Array, point: Point, rounding: Rounding) -> Array:
        """x rounded to nearest, with the instructions that suit the point."""
        return self.nearest(x, rounding)

    def nearest(self, x: Array, rounding: Rounding) -> Array:
        """x rounded to nearest, ties to even."""
        if self.interpret or rounding.format.name not in _TERMS:
            return round_in_kernel(x, rounding.format)
        return x.astype(rounding.format.dtype).astype(jnp.float32)

    def as_bfloat16(self, x: Array) -> Array:
        """x rounded to the nearest bfloat16."""
        if self.interpret:
            # The bits are rounded first, because XLA:CPU may drop a cast that is undone later.
            return self.nearest(x, BFLOAT16).astype(jnp.bfloat16)
        return x.astype(jnp.bfloat16)

    def split(self, x: Array, fmt: Format) -> list[Array]:
        """bfloat16 terms, largest first, that sum exactly to x, which holds values of `fmt`."""
        terms = []
        rest = x.astype(jnp.float32)
        for _ in range(_TERMS[fmt.storage]):
            term = self.as_bfloat16(rest)
            terms.append(term)
            rest = rest - term.astype(jnp.float32)
        return terms

    def split_product(
        self,
        a: Array,
        b: Array,
        a_format: Format,
        b_format: Format,
        multiply: Callable[[Array, Array], Array],
    ) -> Array:
        """The product of a and b, summed from the products of their bfloat16 terms.

        The split is exact. The smallest products are added first. Products below 2⁻²⁴ of the
        largest are left out.
        """
        a_terms, b_terms = self.split(a, a_format), self.split(b, b_format)
        pairs = [(i, j) for i in range(len(a_terms)) for j in range(len(b_terms)) if i + j <= 2]
        in_order = sorted(pairs, key=sum, reverse=True)
        return reduce(operator.add, (multiply(a_terms[i], b_terms[j]) for i, j in in_order))
