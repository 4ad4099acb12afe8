"""Rounding and matrix products inside a kernel.

A compiled kernel rounds to nearest with a pair of casts, which the Triton compiler keeps
(`cvt.rn.bf16x2.f32`, `cvt.rn.f16.f32`), or with the instruction itself. In the interpreter
XLA:CPU would drop such a pair, so there the integer `round_to` serves. All give the same bits for
every float32 but NaN, which stays NaN. Stochastic rounding is `round_to` everywhere.
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
from pallas_kernels.gpu.instructions import as_bfloat16, round_to_bfloat16

_BFLOAT16 = get_rounding("bfloat16")

# Points whose values are only multiplied or stored, in 16 bits: the compiler drops the second cast
# of a pair. Elsewhere the values are needed in float32, and pairs of them are rounded at once.
_OPERANDS = ("probs", "probs_bwd", "ds", "output", "grads")

# Terms of 8 significant bits that hold 8, 11 and 24 bits exactly.
_TERMS = {"bfloat16": 1, "float16": 2, "float32": 3}


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
            if point in _OPERANDS or rounding.format.name != "bfloat16" or self.interpret:
                return self.nearest(x, rounding)
            return round_to_bfloat16(x)
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
            term = self._as_bfloat16(rest)
            terms.append(term)
            rest = rest - term.astype(jnp.float32)
        return terms

    def _as_bfloat16(self, x: Array) -> Array:
        if self.interpret:
            # Rounded on its bits first: XLA:CPU may leave out a cast that is taken back.
            return self.nearest(x, _BFLOAT16).astype(jnp.bfloat16)
        return as_bfloat16(x)

    def dot(self, a: Array, b: Array, a_format: Format, b_format: Format) -> Array:
        """A B with float32 accumulation, on the tensor cores.

        Operands of one 16-bit format go in as such. Any others are split into bfloat16 terms (a
        float32 into three, a float16 into two, exactly) and multiplied term by term, smallest
        products first; those below 2⁻²⁴ of the largest are left out. Float32 operands are
        never rounded to TF32 or bfloat16.
        """
        if a_format == b_format and a_format.name != "float32":
            return _dot(a.astype(a_format.dtype), b.astype(b_format.dtype))
        a_terms, b_terms = self.split(a, a_format), self.split(b, b_format)
        pairs = [(i, j) for i in range(len(a_terms)) for j in range(len(b_terms)) if i + j <= 2]
        total = None
        for i, j in sorted(pairs, key=sum, reverse=True):
            product = _dot(a_terms[i], b_terms[j])
            total = product if total is None else total + product
        assert total is not None
        return total


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def format_of(x: Array) -> Format:
    """The format of an array's dtype."""
    return get_format(x.dtype.name)
