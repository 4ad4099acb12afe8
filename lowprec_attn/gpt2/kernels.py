"""Imports the GPU kernels for the models: norm, activation, loss, products, and their dispatch."""

from pallas_kernels.gpu.device import kernel_or as kernel_or
from pallas_kernels.gpu.gelu import gelu as gelu
from pallas_kernels.gpu.gelu import gelu_gradient as gelu_gradient
from pallas_kernels.gpu.gelu import is_served as gelu_is_served  # noqa: F401 (handed on)
from pallas_kernels.gpu.gelu import slope as gelu_slope  # noqa: F401 (handed on)
from pallas_kernels.gpu.gelu import value as gelu_value  # noqa: F401 (handed on)
from pallas_kernels.gpu.layer_norm import add_norm as add_norm
from pallas_kernels.gpu.layer_norm import add_norm_gradients as add_norm_gradients
from pallas_kernels.gpu.layer_norm import normalize as normalize
from pallas_kernels.gpu.layer_norm import residual_gradient as residual_gradient
from pallas_kernels.gpu.trainer import cross_entropy_rows as cross_entropy_rows
from pallas_kernels.gpu.trainer import gelu_gradient_of_product as gelu_gradient_of_product
from pallas_kernels.gpu.trainer import multiplies_with_gelu as multiplies_with_gelu
from pallas_kernels.gpu.trainer import product_and_gelu as product_and_gelu
