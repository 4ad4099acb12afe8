"""The layers of Llama: RMSNorm, rotary position embedding, SwiGLU.

All is computed in float32 and rounded once, to the format of the activations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32


def rms_normalize(
    x: Float32[Array, "*B d"], scale: Float32[Array, " d"], epsilon: Float32[Array, ""] | float
) -> Float32[Array, "*B d"]:
    """x / √(mean x² + ε) · g over the last axis (Zhang & Sennrich, arXiv 1910.07467)."""
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + jnp.float32(epsilon)) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """RMSNorm of a residual stream, after adding a block's output to it.

    Args:
      width: d.
      epsilon: ε.
      dtype: of the normalised output, and of what is added.
      rngs: as every layer takes it; g starts at 1.
    """

    def __init__(self, width: int, epsilon: float, dtype: Any, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, residual: Float32[Array, "*B d"], y: Float[Array, "*B d"] | None = None
    ) -> tuple[Float32[Array, "*B d"], Float[Array, "*B d"]]:
        """residual + y (or residual), and that normalised."""
        if y is not None:
            residual = residual + y.astype(jnp.float32)
        return residual, rms_normalize(residual, self.scale[...], self.epsilon).astype(self.dtype)


def rotation(
    length: int, head_size: int, theta: float
) -> tuple[Float32[Array, "T h"], Float32[Array, "T h"]]:
    """cos and sin of t · θ^(−2i/H) for t < T and i < H/2 (Su et al., arXiv 2104.09864)."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = jnp.asarray(1 / np.float32(theta) ** exponents)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float32[Array, "B T N H"], cos: Float32[Array, "T h"], sin: Float32[Array, "T h"]
) -> Float32[Array, "B T N H"]:
    """Channels i and i + H/2 of token t, turned by its angle.

    The pairs are those of Hugging Face, whose weights stand in this order. Those of the paper and
    of Meta's own files are 2i and 2i + 1.
    """
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = (table[None, :, None] for table in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def normalize_and_rotate(
    rotation: tuple[Float32[Array, "T h"], Float32[Array, "T h"]],
    norm: tuple[Float32[Array, " H"], Float32[Array, ""]] | None,
    x: Float[Array, "B T N H"],
) -> Float32[Array, "B T N H"]:
    """q of X W_Q, or k of X W_K.

    Args:
      rotation: cos and sin.
      norm: scale and ε of an RMSNorm before that, None for none.
      x: the projection.
    """
    x = x.astype(jnp.float32)
    return rotate(x if norm is None else rms_normalize(x, *norm), *rotation)


@jax.custom_vjp
def swiglu(gate: Float[Array, "*n f"], up: Float[Array, "*n f"]) -> Float[Array, "*n f"]:
    """silu(gate) · up, rounded to their dtype (Shazeer, arXiv 2002.05202).

    The backward pass keeps gate and up alone.
    """
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_backward(residuals: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    gate, up, d = (x.astype(jnp.float32) for x in (*residuals, d_y))
    sigmoid = jax.nn.sigmoid(gate)
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.astype(d_y.dtype), (d * gate * sigmoid).astype(d_y.dtype)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)
