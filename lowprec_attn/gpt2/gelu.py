"""GELU of a matrix product, in its tanh form, computed in float32."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowprec_attn.gpt2 import kernels


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Float[Array, "*n f"], of_product: bool = True) -> Float[Array, "*n f"]:
    """h · (1 + tanh(√(2/π) (h + 0.044715 h³))) / 2 with h = x in float32, rounded to x's dtype.

    The backward pass keeps x alone. Where the computation is lowered for CUDA, the kernels of
    `pallas_kernels.gpu.gelu` compute it, or the product itself does (`_of_product`). Elsewhere the
    same formulas do, with (1 + tanh(u)) / 2 = sigmoid(2u), which takes one exponential.

    Args:
      x: activations.
      of_product: whether x is the result of a matrix product, with nothing in between.
    """
    left = of_product and _left_to_product(x)
    return kernels.kernel_or(_of_product if left else kernels.gelu, _plain)(x)


def _left_to_product(x: Array) -> bool:
    """Whether cuBLAS forms x; XLA has a kernel of its own for the product of a single row."""
    return x.dtype == jnp.bfloat16 and math.prod(x.shape[:-1]) > 1


def _of_product(x: Array) -> Array:
    """Steps that XLA's GPU compiler recognises behind a product and leaves to cuBLAS.

    None of them is carried out in bfloat16: cuBLAS applies GELU to the float32 sums that x is
    rounded from, and writes both. On one H200 the product of 65,536 × 768 by 768 × 3,072 and GELU
    then take 0.63 ms instead of 0.72. XLA of JAX 0.10, 0.11 and 0.12 does so:
    `tests/kernels/test_ptx.py` checks its program, `tests/kernels/test_gpu_trainer_kernels.py` the
    result.
    """
    return jax.nn.gelu(x, approximate=True)


def _backward(_: bool, x: Array, d_y: Array) -> tuple[Array]:
    return (kernels.kernel_or(kernels.gelu_gradient, _plain_gradient)(x, d_y),)


gelu.defvjp(lambda x, of_product: (gelu(x, of_product), x), _backward)


def _plain(x: Array) -> Array:
    return kernels.gelu_value(x.astype(jnp.float32)).astype(x.dtype)


def _plain_gradient(x: Array, d_y: Array) -> Array:
    return (d_y.astype(jnp.float32) * kernels.gelu_slope(x.astype(jnp.float32))).astype(x.dtype)
