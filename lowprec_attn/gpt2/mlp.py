"""The MLP of a block: GELU between two products."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lowprec_attn.gpt2 import kernels
from lowprec_attn.gpt2.gelu import gelu


def mlp(
    x: Float[Array, "*n d"], layer_in: nnx.Linear, layer_out: nnx.Linear
) -> Float[Array, "*n d"]:
    """GELU(x W_in + b_in) W_out + b_out.

    Without biases, in bfloat16 and where a Hopper GPU is compiled for, GELU is part of the kernel
    of the product before it, and its gradient part of that of the product before that. GELU is then
    of x W_in as it is rounded, as on other platforms.
    """
    layers = layer_in, layer_out
    if all(layer.bias is None and layer.dtype == x.dtype for layer in layers):
        w_in, w_out = (layer.kernel[...].astype(x.dtype) for layer in layers)
        if kernels.multiplies_with_gelu(x, w_in, w_out):
            rows = x.reshape(-1, x.shape[-1])
            return _products(rows, w_in, w_out).reshape(*x.shape[:-1], w_out.shape[1])
    return layer_out(gelu(layer_in(x), layer_in.bias is None))


@jax.custom_vjp
def _products(
    x: Float[Array, "n d"], w_in: Float[Array, "d f"], w_out: Float[Array, "f d"]
) -> Float[Array, "n d"]:
    return _forward(x, w_in, w_out)[0]


# Each under `jit`: layers share one trace and one lowering of their kernels.
@jax.jit
def _forward(x: Array, w_in: Array, w_out: Array) -> tuple[Array, tuple[Array, ...]]:
    h, y = kernels.kernel_or(kernels.product_and_gelu, _plain)(x, w_in)
    return y @ w_out, (x, w_in, w_out, h, y)


@jax.jit
def _backward(residuals: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array]:
    x, w_in, w_out, h, y = residuals
    d_h = kernels.kernel_or(kernels.gelu_gradient_of_product, _plain_gradient)(d_out, w_out, h)
    d_w_out = _gradients(y, w_out, d_out)[1]
    return *_gradients(x, w_in, d_h), d_w_out


_products.defvjp(_forward, _backward)


def _gradients(x: Array, w: Array, d_product: Array) -> tuple[Array, Array]:
    """Of x and w from that of x w, as JAX forms them; what nobody reads is not computed."""
    return jax.vjp(jnp.matmul, x, w)[1](d_product)


def _plain(x: Array, w: Array) -> tuple[Array, Array]:
    h = x @ w
    return h, gelu(h)


def _plain_gradient(d_out: Array, w_out: Array, h: Array) -> Array:
    d_y = d_out @ w_out.T
    return jax.vjp(gelu, h)[1](d_y)[0]
