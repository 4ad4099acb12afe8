"""The layers of GPT-2 with a custom backward pass: embedding, LayerNorm, GELU, MLP.

Each is computed by a kernel from `kernels` where one serves, and by the plain formula elsewhere.
The results have the same bits on every run.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32, Int

from lowprec_attn.gpt2 import kernels

# The gradient of a lookup adds the rows of equal tokens. On a GPU, a plain scatter-add adds them in
# the order in which its atomic operations arrive, which changes from run to run. XLA's
# deterministic scatter-add took a sixth of a training step. Here tokens are sorted, and small
# matrix products sum equal neighbours: first within blocks, then over blocks. Each sum is written
# once.

# Rows of a block. The products cost 2·n·d·(block + n/block²) float32 operations, which do not run
# on tensor cores.
_BLOCK = 64
# Unrolled iterations of the loop over the batch. Unrolling makes the loop one kernel. For a plain
# sum, XLA's GPU compiler would choose a layout of the residual stream with the batch last.
_UNROLLED = 64


@jax.custom_vjp
def embed(
    table: Float[Array, "V d"], positions: Float[Array, "C d"] | None, ids: Int[Array, "B T"]
) -> Float[Array, "B T d"]:
    """Returns table[ids] + positions[:T], or table[ids] alone, for ids below V and T <= C.

    Gradients are float32 sums in a fixed order, so they have the same bits on every run.
    """
    rows = table[ids]
    return rows if positions is None else rows + positions[None, : ids.shape[1]]


def _embed_backward(
    residuals: tuple[Array, Array | None, Array], d_out: Array
) -> tuple[Array, Array | None, None]:
    table, positions, ids = residuals
    d_out = d_out.astype(jnp.float32)
    d_table = sum_by_id(d_out.reshape(-1, d_out.shape[-1]), ids.reshape(-1), table.shape[0])
    if positions is None:
        return d_table.astype(table.dtype), None, None
    summed, _ = lax.scan(
        lambda total, x: (total + x, None), jnp.zeros_like(d_out[0]), d_out, unroll=_UNROLLED
    )
    d_positions = jnp.pad(summed, ((0, len(positions) - len(summed)), (0, 0)))
    return d_table.astype(table.dtype), d_positions.astype(positions.dtype), None


embed.defvjp(lambda *args: (embed(*args), args), _embed_backward)


def sum_by_id(
    rows: Float[Array, "n d"], ids: Int[Array, " n"], size: int
) -> Float[Array, "size d"]:
    """Row i of the result is the float32 sum of all rows whose id is i."""
    count = len(ids)
    padding = -count % _BLOCK
    order = jnp.argsort(jnp.pad(ids, (0, padding), constant_values=size))
    sorted_ids = jnp.pad(ids, (0, padding), constant_values=size)[order]
    # The padding has an id beyond the table, so that its row is never written.
    values = rows.astype(jnp.float32)[jnp.minimum(order, count - 1)]
    blocks = sorted_ids.reshape(-1, _BLOCK)

    same = blocks[:, :, None] == blocks[:, None, :]
    sums = _exact_product("bij,bjd->bid", same, values.reshape(*blocks.shape, -1))
    # An id may run on into later blocks. Such a block begins with the id, so its first row holds
    # its sum for the id.
    first, last = blocks[:, 0], blocks[:, -1]
    index = jnp.arange(len(blocks), dtype=jnp.int32)
    runs_on = (last[:, None] == first[None]) & (index[:, None] < index[None])
    later = _exact_product("bc,cd->bd", runs_on, sums[:, 0])
    sums += jnp.where((blocks == last[:, None])[..., None], later[:, None], 0)

    position = jnp.arange(len(sorted_ids), dtype=jnp.int32)
    is_first = (position == 0) | (sorted_ids != jnp.roll(sorted_ids, 1))
    # Rows that are not written get distinct places beyond the table, so that each place is unique.
    place = jnp.where(is_first & (sorted_ids < size), sorted_ids, size + position)
    result = jnp.zeros((size, rows.shape[-1]), jnp.float32)
    flat = sums.reshape(len(sorted_ids), -1)
    return result.at[place].set(flat, mode="drop", unique_indices=True)


def _exact_product(subscripts: str, ones: Array, values: Array) -> Array:
    """Returns the product of a 0/1 array and float32 values in full float32 precision."""
    return jnp.einsum(subscripts, ones.astype(jnp.float32), values, precision=lax.Precision.HIGHEST)


class LayerNorm(nnx.Module):
    """Adds a block's output to the residual stream, and normalises the sum by LayerNorm.

    It normalises the float32 residual and rounds only its output, as PyTorch's autocast does.
    `nnx.LayerNorm` in bfloat16 rounds its input first.

    Args:
      width: d.
      dtype: dtype of the normalised output, and of the block's output.
      rngs: random streams, which every layer takes; the scale starts at 1.
      biased: whether there is a bias, which starts at 0.
    """

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, biased: bool = False) -> None:
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,), jnp.float32))
        if biased:
            self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.biased = biased
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, residual: Float32[Array, "*B d"], y: Float[Array, "*B d"] | None = None
    ) -> tuple[Float32[Array, "*B d"], Float[Array, "*B d"]]:
        """Returns r = residual + y (or residual), and the normalised r; see `add_norm`."""
        if not self.biased:
            return add_norm(residual, y, self.scale[...], self.dtype)
        # The kernels of `add_norm` have no bias. It is added in float32, so that x is rounded once.
        if y is not None:
            residual = residual + y.astype(jnp.float32)
        residual, x = add_norm(residual, None, self.scale[...], jnp.float32)
        bias = self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return residual, (x + bias).astype(self.dtype)


def add_norm(
    residual: Float32[Array, "*B d"],
    y: Float[Array, "*B d"] | None,
    scale: Float32[Array, "d"],
    dtype: Any,
) -> tuple[Float32[Array, "*B d"], Float[Array, "*B d"]]:
    """Returns r = residual + y, and x = (r − mean r) / √(var r + 1e-5) · scale over the last axis.

    Everything is float32 except y and x. When lowered for CUDA, the kernels of
    `pallas_kernels.gpu.layer_norm` compute it. On other platforms, plain JAX computes the same
    formulas.

    Args:
      residual: the residual stream, float32.
      y: array to add to the stream, in `dtype`; None to add nothing.
      scale: float32 scale.
      dtype: dtype of x.

    Raises:
      ValueError: y has another dtype.
    """
    if y is not None and y.dtype != dtype:
        raise ValueError(f"y must be {jnp.dtype(dtype).name}, got {y.dtype.name}")
    shape, rows = residual.shape, (-1, residual.shape[-1])
    y = None if y is None else y.reshape(rows)
    residual, x = _add_norm(residual.reshape(rows), y, scale, jnp.dtype(dtype))
    return residual.reshape(shape), x.reshape(shape)


class _Saved(NamedTuple):
    """Residuals of the backward pass; `added` is () if there was a y, else None."""

    residual: Array
    scale: Array
    added: tuple[()] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _add_norm(residual: Array, y: Array | None, scale: Array, dtype: Any) -> tuple[Array, Array]:
    kernel, plain = (functools.partial(f, dtype=dtype) for f in (kernels.add_norm, _plain_norm))
    return kernels.kernel_or(kernel, plain)(residual, y, scale)


def _norm_forward(
    residual: Any, y: Any, scale: Any, dtype: Any
) -> tuple[tuple[Array, Array], _Saved]:
    """The forward pass; its arguments are `CustomVJPPrimal`s, as symbolic zeros need them."""
    y = None if y is None else y.value
    residual, x = _add_norm(residual.value, y, scale.value, dtype)
    return (residual, x), _Saved(residual, scale.value, None if y is None else ())


def _norm_backward(
    dtype: Any, saved: _Saved, cotangents: tuple[Any, Any]
) -> tuple[Array, Array | None, Array]:
    d_residual, d_x = cotangents
    if isinstance(d_residual, SymbolicZero):  # after the last norm nothing reads the stream
        d_residual = None
    if isinstance(d_x, SymbolicZero):
        d_x = jnp.zeros(d_x.shape, d_x.dtype)
    adds = saved.added is not None
    kernel, plain = (
        functools.partial(f, adds=adds) for f in (kernels.add_norm_gradients, _plain_norm_gradients)
    )
    return kernels.kernel_or(kernel, plain)(saved.residual, saved.scale, d_residual, d_x)


_add_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


def _plain_norm(
    residual: Array, y: Array | None, scale: Array, *, dtype: Any
) -> tuple[Array, Array]:
    """`kernels.add_norm` in plain JAX."""
    if y is not None:
        residual = residual + y.astype(jnp.float32)
    x_hat, _ = kernels.normalize(residual, residual.shape[-1])
    return residual, (x_hat * scale[None]).astype(dtype)


def _plain_norm_gradients(
    residual: Array, scale: Array, d_residual: Array | None, d_x: Array, *, adds: bool
) -> tuple[Array, Array | None, Array]:
    """`kernels.add_norm_gradients` in plain JAX."""
    width = residual.shape[-1]
    x_hat, rho = kernels.normalize(residual, width)
    d_rounded, d_x = d_x.dtype, d_x.astype(jnp.float32)
    total = kernels.residual_gradient(x_hat, rho, d_x * scale[None], width)
    if d_residual is not None:
        total = d_residual + total
    return total, (total.astype(d_rounded) if adds else None), jnp.sum(d_x * x_hat, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Float[Array, "*n f"], of_product: bool = True) -> Float[Array, "*n f"]:
    """h · (1 + tanh(√(2/π) (h + 0.044715 h³))) / 2 with h = x in float32, rounded to x's dtype.

    The backward pass keeps only x. When lowered for CUDA, the kernels of `pallas_kernels.gpu.gelu`
    compute it, or the matrix product before it does (`_of_product`). Other platforms, and arrays of
    2^31 numbers or more, compute the same formulas, with (1 + tanh(u)) / 2 = sigmoid(2u), which
    takes one exponential.

    Args:
      x: activations.
      of_product: whether x is directly the result of a matrix product.
    """
    kernel = kernels.gelu if kernels.gelu_is_served(x) else _plain_gelu
    left = of_product and _left_to_product(x)
    return kernels.kernel_or(_of_product if left else kernel, _plain_gelu)(x)


def _left_to_product(x: Array) -> bool:
    """Whether cuBLAS computes x; for a product of a single row XLA has its own kernel."""
    return x.dtype == jnp.bfloat16 and math.prod(x.shape[:-1]) > 1


def _of_product(x: Array) -> Array:
    """Computes GELU in steps that XLA's GPU compiler recognises after a product.

    XLA leaves these steps to cuBLAS, which applies GELU to the float32 sums before x is rounded,
    and writes both x and GELU. No step runs in bfloat16. On one H200, the product of 65,536 × 768
    by 768 × 3,072 with GELU then takes 0.63 ms instead of 0.72. XLA of JAX 0.10, 0.11 and 0.12 does
    so: `tests/kernels/test_ptx.py` checks the compiled program, and
    `tests/kernels/test_gpu_trainer_kernels.py` the result.
    """
    return jax.nn.gelu(x, approximate=True)


def _gelu_backward(_: bool, x: Array, d_y: Array) -> tuple[Array]:
    kernel = kernels.gelu_gradient if kernels.gelu_is_served(x) else _plain_gelu_gradient
    return (kernels.kernel_or(kernel, _plain_gelu_gradient)(x, d_y),)


gelu.defvjp(lambda x, of_product: (gelu(x, of_product), x), _gelu_backward)


def _plain_gelu(x: Array) -> Array:
    return kernels.gelu_value(x.astype(jnp.float32)).astype(x.dtype)


def _plain_gelu_gradient(x: Array, d_y: Array) -> Array:
    return (d_y.astype(jnp.float32) * kernels.gelu_slope(x.astype(jnp.float32))).astype(x.dtype)


def mlp(
    x: Float[Array, "*n d"], layer_in: nnx.Linear, layer_out: nnx.Linear
) -> Float[Array, "*n d"]:
    """Returns GELU(x W_in + b_in) W_out + b_out.

    Without biases, in bfloat16 and on an NVIDIA Hopper GPU, the kernel of the product x W_in also
    computes GELU. In the backward pass, the kernel of the product with W_outᵀ also computes the
    gradient of GELU. GELU then takes x W_in after it is rounded, as on other platforms.
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
    return _mlp_forward(x, w_in, w_out)[0]


# Both passes are under `jit`, so that layers share one trace and one lowering of their kernels.
@jax.jit
def _mlp_forward(x: Array, w_in: Array, w_out: Array) -> tuple[Array, tuple[Array, ...]]:
    h, y = kernels.kernel_or(kernels.product_and_gelu, _plain_product)(x, w_in)
    return y @ w_out, (x, w_in, w_out, h, y)


@jax.jit
def _mlp_backward(residuals: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array]:
    x, w_in, w_out, h, y = residuals
    d_h = kernels.kernel_or(kernels.gelu_gradient_of_product, _plain_gradient_of_product)(
        d_out, w_out, h
    )
    d_w_out = _product_gradients(y, w_out, d_out)[1]
    return *_product_gradients(x, w_in, d_h), d_w_out


_products.defvjp(_mlp_forward, _mlp_backward)


def _product_gradients(x: Array, w: Array, d_product: Array) -> tuple[Array, Array]:
    """Returns JAX's gradients of x and w from the gradient of x w; unused ones cost nothing."""
    return jax.vjp(jnp.matmul, x, w)[1](d_product)


def _plain_product(x: Array, w: Array) -> tuple[Array, Array]:
    h = x @ w
    return h, gelu(h)


def _plain_gradient_of_product(d_out: Array, w_out: Array, h: Array) -> Array:
    d_y = d_out @ w_out.T
    return jax.vjp(gelu, h)[1](d_y)[0]
