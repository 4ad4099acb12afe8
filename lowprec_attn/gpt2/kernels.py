"""The model's door to the GPU kernels: a norm, an activation, a loss, and who runs them."""

from pallas_kernels.gpu.device import kernel_or
from pallas_kernels.gpu.gelu import gelu, gelu_gradient
from pallas_kernels.gpu.gelu import slope as gelu_slope
from pallas_kernels.gpu.gelu import value as gelu_value
from pallas_kernels.gpu.layer_norm import (
    add_norm,
    add_norm_gradients,
    normalize,
    residual_gradient,
)
from pallas_kernels.gpu.trainer import (
    cross_entropy_rows,
    gelu_gradient_of_product,
    multiplies_with_gelu,
    product_and_gelu,
)

__all__ = [
    "add_norm",
    "add_norm_gradients",
    "cross_entropy_rows",
    "gelu",
    "gelu_gradient",
    "gelu_gradient_of_product",
    "gelu_slope",
    "gelu_value",
    "kernel_or",
    "multiplies_with_gelu",
    "normalize",
    "product_and_gelu",
    "residual_gradient",
]
