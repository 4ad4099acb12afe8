"""Rounding and matrix products inside a kernel.

A compiled kernel rounds to nearest with a pair of casts, which Mosaic keeps and turns into one
`vpack` or `vcvt` per register. In the interpreter XLA:CPU would drop such a pair, so there the
integer `round_to` serves. Both give the same bits for every float32 but NaN, which stays NaN.
Stochastic rounding is `round_to` everywhere.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.numerics import (
    POINTS,
    Format,
    Rounding,
    counter_bits,
    get_format,
    get_rounding,
    round_to,
)
from lowprec_attn.steps import Place

BFLOAT16 = get_rounding("bfloat16")

# Terms of 8 significant bits that hold 8 and 24 bits exactly.
_TERMS = {"bfloat16": 1, "float32": 3}

# Which axes a product sums over: the columns of both operands (A Bᵀ), or B's rows (A B).
COLUMNS = (((1,), (1,)), ((), ()))
ROWS = (((1,), (0,)), ((), ()))
Axes = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class Stream(NamedTuple):
    """Scalars that random bits of this program depend on: seed words, batch, head indices."""

    seed: tuple[Array, Array]
    batch: Array
    head: Array


@dataclasses.dataclass(frozen=True)
class Rounder:
    """Rounds tiles [rows, columns] of one program.

    Attributes:
      stream: random bits; None where no point draws any.
      interpret: whether the kernel runs in the interpreter.
    """

    stream: Stream | None
    interpret: bool

    def __call__(self, x: Array, point: str, rounding: Rounding, place: Place) -> Array:
        """x rounded at a numerics point; float32 in, float32 out."""
        if rounding.is_identity:
            return x
        if not rounding.needs_bits:
            return self.nearest(x, rounding)
        assert self.stream is not None  # `attention` asks for it
        bits = counter_bits(
            self.stream.seed,  # type: ignore[arg-type]  # two scalars index as an array of two
            POINTS.index(point),
            self.stream.batch,
            self.stream.head,
            place.rows,
            place.cols,
            place.step,
        )
        return round_to(x, rounding.format, rounding.mode, jnp.broadcast_to(bits, x.shape))

    def nearest(self, x: Array, rounding: Rounding) -> Array:
        """x rounded to nearest, ties to even."""
        if self.interpret:
            return round_to(x, rounding.format)
        return x.astype(rounding.format.dtype).astype(jnp.float32)

    def split(self, x: Array, fmt: Format) -> list[Array]:
        """bfloat16 terms, largest first, whose sum is x (of values of `fmt`)."""
        terms = []
        rest = x.astype(jnp.float32)
        for _ in range(_TERMS[fmt.name]):
            term = self.nearest(rest, BFLOAT16)
            terms.append(term.astype(jnp.bfloat16))
            rest = rest - term
        return terms

    def dot(self, a: Array, b: Array, a_format: Format, b_format: Format, axes: Axes) -> Array:
        """A B or A Bᵀ (`axes`) with float32 accumulation, on the MXU.

        A bfloat16 operand goes in as such. A float32 operand is split into three bfloat16 terms,
        exactly, and multiplied term by term, smallest products first; those below 2⁻²⁴ of the
        largest are left out. That is three passes where the other operand is bfloat16 and six
        where it is not; `Precision.HIGHEST` would widen both operands and always take six.
        """
        a_terms, b_terms = self.split(a, a_format), self.split(b, b_format)
        pairs = [(i, j) for i in range(len(a_terms)) for j in range(len(b_terms)) if i + j <= 2]
        total = None
        for i, j in sorted(pairs, key=sum, reverse=True):
            product = lax.dot_general(
                a_terms[i],
                b_terms[j],
                axes,
                precision=lax.Precision.DEFAULT,  # bfloat16 operands are multiplied exactly
                preferred_element_type=jnp.float32,
            )
            total = product if total is None else total + product
        assert total is not None
        return total


def format_of(x: Array) -> Format:
    """The format of an array's dtype."""
    return get_format(x.dtype.name)
