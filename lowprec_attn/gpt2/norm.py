"""The residual stream's addition and LayerNorm, as one operation."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32

from lowprec_attn.gpt2 import kernels


class LayerNorm(nnx.Module):
    """LayerNorm of a residual stream, after adding a block's output to it.

    It normalises the float32 residual and rounds its output alone, as PyTorch's autocast does.
    `nnx.LayerNorm` in bfloat16 rounds its input first.

    Args:
      width: d.
      dtype: of the normalised output, and of what is added.
      rngs: as every layer takes it; the scale starts at 1.
      biased: whether it has a bias, which starts at 0.
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
        """residual + y (or residual), and that normalised; see `add_norm`."""
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
    """r = residual + y, and x = (r − mean r) / √(var r + 1e-5) · scale over the last axis.

    All is float32 except y and x. Where the computation is lowered for CUDA, the kernels of
    `pallas_kernels.gpu.layer_norm` compute it; elsewhere the same formulas in plain JAX do.

    Args:
      residual: the stream, float32.
      y: what is added to it, in `dtype`; None: nothing.
      scale: float32.
      dtype: of x.

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
    """Residuals of the backward pass; `added` is () where there was a y, else None."""

    residual: Array
    scale: Array
    added: tuple[()] | None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _add_norm(residual: Array, y: Array | None, scale: Array, dtype: Any) -> tuple[Array, Array]:
    kernel, plain = (partial(f, dtype=dtype) for f in (kernels.add_norm, _plain))
    return kernels.kernel_or(kernel, plain)(residual, y, scale)


def _forward(residual: Any, y: Any, scale: Any, dtype: Any) -> tuple[tuple[Array, Array], _Saved]:
    """The forward pass; its arguments are `CustomVJPPrimal`s, as symbolic zeros need them."""
    y = None if y is None else y.value
    residual, x = _add_norm(residual.value, y, scale.value, dtype)
    return (residual, x), _Saved(residual, scale.value, None if y is None else ())


def _backward(
    dtype: Any, saved: _Saved, cotangents: tuple[Any, Any]
) -> tuple[Array, Array | None, Array]:
    d_residual, d_x = cotangents
    if isinstance(d_residual, SymbolicZero):  # after the last norm nothing reads the stream
        d_residual = None
    if isinstance(d_x, SymbolicZero):
        d_x = jnp.zeros(d_x.shape, d_x.dtype)
    adds = saved.added is not None
    kernel, plain = (partial(f, adds=adds) for f in (kernels.add_norm_gradients, _plain_gradients))
    return kernels.kernel_or(kernel, plain)(saved.residual, saved.scale, d_residual, d_x)


_add_norm.defvjp(_forward, _backward, symbolic_zeros=True)


def _plain(residual: Array, y: Array | None, scale: Array, *, dtype: Any) -> tuple[Array, Array]:
    """`kernels.add_norm` in plain JAX."""
    if y is not None:
        residual = residual + y.astype(jnp.float32)
    x_hat, _ = kernels.normalize(residual, residual.shape[-1])
    return residual, (x_hat * scale[None]).astype(dtype)


def _plain_gradients(
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
