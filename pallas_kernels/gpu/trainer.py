"""Chooses the trainer's kernels: on a Hopper GPU, those written for Hopper.

Importing Mosaic GPU takes a quarter of a second, so only the functions that need its kernels import
it.
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.gpu import cross_entropy
from pallas_kernels.gpu.block_sizes import is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper.attention import is_available


def _is_hopper() -> bool:
    """Whether this JAX and the GPU that is compiled for run the Hopper kernels."""
    return is_available() and is_hopper(device_kind())


def cross_entropy_rows(
    logits: Float[Array, "n V"], targets: Int[Array, "n"], dtype: Any, *, z_loss: float = 0.0
) -> tuple[Float32[Array, "n"], Float[Array, "n V"]]:
    """`pallas_kernels.gpu.cross_entropy.cross_entropy_rows`, computed by the fastest kernel."""
    if _is_hopper() and logits.dtype == jnp.dtype(dtype) == jnp.bfloat16:
        from pallas_kernels.gpu.hopper import cross_entropy as hopper

        if hopper.unsupported(logits.shape[1]) is None:
            return hopper.cross_entropy_rows(logits, targets, z_loss=z_loss)
    return cross_entropy.cross_entropy_rows(logits, targets, dtype, z_loss=z_loss)


def multiplies_with_gelu(
    x: Float[Array, "*n d"], w_in: Float[Array, "d f"], w_out: Float[Array, "f e"]
) -> bool:
    """Whether `product_and_gelu` serves x w_in and `gelu_gradient_of_product` serves dy w_outᵀ."""
    if not (_is_hopper() and x.dtype == w_in.dtype == w_out.dtype == jnp.bfloat16):
        return False
    from pallas_kernels.gpu.hopper import gelu_products

    rows = math.prod(x.shape[:-1])
    shapes = w_in.shape, w_out.shape[::-1]
    return all(gelu_products.unsupported(rows, *shape) is None for shape in shapes)


def product_and_gelu(
    x: BFloat16[Array, "n d"], w: BFloat16[Array, "d f"]
) -> tuple[BFloat16[Array, "n f"], BFloat16[Array, "n f"]]:
    """h = x w, rounded, and GELU of the rounded h."""
    from pallas_kernels.gpu.hopper import gelu_products

    return gelu_products.product_and_gelu(x, w)


def gelu_gradient_of_product(
    d_y: BFloat16[Array, "n d"], w: BFloat16[Array, "f d"], h: BFloat16[Array, "n f"]
) -> BFloat16[Array, "n f"]:
    """(d_y wᵀ, rounded) ∘ GELU′(h), rounded."""
    from pallas_kernels.gpu.hopper import gelu_products

    return gelu_products.gelu_gradient_of_product(d_y, w, h)
