"""Rounding and matrix products inside a GPU kernel.

A compiled kernel rounds to nearest with a pair of casts, which the Triton compiler keeps
(`cvt.rn.bf16x2.f32`, `cvt.rn.f16.f32`), or with that instruction as inline PTX.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.numerics import Format, Point, Rounding
from pallas_kernels import rounder as common
from pallas_kernels.gpu.instructions import as_bfloat16, round_to_bfloat16

# Points whose values are only multiplied or stored, in 16 bits. There the compiler drops the second
# cast of a pair. At other points the values are needed in float32, and PTX rounds two at once.
_OPERANDS = ("probs", "probs_bwd", "ds", "output", "grads")


@dataclasses.dataclass(frozen=True)
class Rounder(common.Rounder):
    """Rounds and multiplies tiles of one program of a GPU kernel."""

    def nearest_at(self, x: Array, point: Point, rounding: Rounding) -> Array:
        """See `common.Rounder`."""
        if rounding.format.name != "bfloat16" or self.interpret:
            return self.nearest(x, rounding)
        if point == "probs" and self._adds_rounded_probs:
            # The values are needed both as an operand and in float32. From a pair of casts the
            # compiler would round them one by one.
            return as_bfloat16(x).astype(jnp.float32)
        return self.nearest(x, rounding) if point in _OPERANDS else round_to_bfloat16(x)

    @property
    def _adds_rounded_probs(self) -> bool:
        n = self.numerics
        return n.row_sum == "rounded" or n.recomputed_probs == "rounded"

    def as_bfloat16(self, x: Array) -> Array:
        """See `common.Rounder`."""
        return super().as_bfloat16(x) if self.interpret else as_bfloat16(x)

    def dot(self, a: Array, b: Array, a_format: Format, b_format: Format) -> Array:
        """A B with float32 accumulation, on the tensor cores.

        Two operands of the same 16-bit format are multiplied as they are. Other operands are split
        exactly into bfloat16 terms: a float32 into three, a float16 into two. Float32 operands are
        never rounded to TF32 or bfloat16.
        """
        if a_format.storage == b_format.storage != "float32":
            return _dot(a.astype(a_format.dtype), b.astype(b_format.dtype))
        return self.split_product(a, b, a_format, b_format, _dot)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
