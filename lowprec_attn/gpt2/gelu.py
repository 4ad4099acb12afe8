"""GELU in its tanh form, computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gpu import gelu as kernels
from pallas_kernels.gpu.device import kernel_or


@jax.custom_vjp
def gelu(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """h · (1 + tanh(√(2/π) (h + 0.044715 h³))) / 2, rounded to x's dtype; x alone is kept.

    (1 + tanh(u)) / 2 = sigmoid(2u) takes one exponential. Where the computation is lowered for
    CUDA, the kernels of `pallas_kernels.gpu.gelu` compute it; elsewhere the same formulas do.
    """
    return kernel_or(kernels.gelu, _plain)(x)


def _backward(x: Array, d_y: Array) -> tuple[Array]:
    return (kernel_or(kernels.gelu_gradient, _plain_gradient)(x, d_y),)


gelu.defvjp(lambda x: (gelu(x), x), _backward)


def _plain(x: Array) -> Array:
    return kernels.value(x.astype(jnp.float32)).astype(x.dtype)


def _plain_gradient(x: Array, d_y: Array) -> Array:
    return (d_y.astype(jnp.float32) * kernels.slope(x.astype(jnp.float32))).astype(x.dtype)
