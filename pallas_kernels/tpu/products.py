"""Matrix products inside a TPU kernel.

Mosaic keeps the pair of casts that rounds a value and lowers it to `vpack` and `vunpack`, register
by register.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.numerics import Format
from pallas_kernels import rounder as common

# Which axes a product sums over: the columns of both operands (A Bᵀ), or B's rows (A B).
COLUMNS = (((1,), (1,)), ((), ()))
ROWS = (((1,), (0,)), ((), ()))
Axes = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Rounder(common.Rounder):
    """Rounds and multiplies tiles of one program of a TPU kernel."""

    def dot(self, a: Array, b: Array, a_format: Format, b_format: Format, axes: Axes) -> Array:
        """A B or A Bᵀ (`axes`) with float32 accumulation, on the MXU.

        A bfloat16 operand is multiplied as it is. A float32 operand is split exactly into three
        bfloat16 terms. This takes three passes if the other operand is bfloat16 and six if it is
        not. `Precision.HIGHEST` would widen both operands and always take six.
        """
        multiply = partial(
            lax.dot_general,
            dimension_numbers=axes,
            precision=lax.Precision.DEFAULT,  # bfloat16 operands are multiplied exactly
            preferred_element_type=jnp.float32,
        )
        return self.split_product(a, b, a_format, b_format, multiply)
