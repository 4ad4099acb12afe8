"""The layers of Llama: RMSNorm, rotary position embedding, SwiGLU.

Each layer is computed in float32 and rounded once, to the format of the activations.
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
    """Adds a block's output to the residual stream, and normalises the sum by RMSNorm.

    Args:
      width: d.
      epsilon: ε.
      dtype: dtype of the normalised output, and of the block's output.
      rngs: random streams, which every layer takes; g starts at 1.
    """

    def __init__(self, width: int, epsilon: float, dtype: Any, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, residual: Float32[Array, "*B d"], y: Float[Array, "*B d"] | None = None
    ) -> tuple[Float32[Array, "*B d"], Float[Array, "*B d"]]:
        """Returns r = residual + y (or residual), and the normalised r."""
        if y is not None:
            residual = residual + y.astype(jnp.float32)
        return residual, rms_normalize(residual, self.scale[...], self.epsilon).astype(self.dtype)


def rotation(
    length: int, head_size: int, theta: float
) -> tuple[Float32[Array, "T h"], Float32[Array, "T h"]]:
    """Returns cos and sin of t · θ^(−2i/H) for t < T and i < H/2 (Su et al., arXiv 2104.09864)."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = jnp.asarray(1 / np.float32(theta) ** exponents)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float32[Array, "B T N H"], cos: Float32[Array, "T h"], sin: Float32[Array, "T h"]
) -> Float32[Array, "B T N H"]:
    """Rotates the channels i and i + H/2 of token t by the angle t · θ^(−2i/H).

    Hugging Face pairs channels in this way, and its weights have this order. The paper and Meta's
    own files pair the channels 2i and 2i + 1.
    """
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = (table[None, :, None] for table in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def normalize_and_rotate(
    rotation: tuple[Float32[Array, "T h"], Float32[Array, "T h"]],
    norm: tuple[Float32[Array, " H"], Float32[Array, ""]] | None,
    x: Float[Array, "B T N H"],
) -> Float32[Array, "B T N H"]:
    """Returns q from X W_Q, or k from X W_K.

    Args:
      rotation: cos and sin; see the function `rotation`.
      norm: scale and ε of an RMSNorm before the rotation, None for no norm.
      x: the projection X W_Q or X W_K.
    """
    x = x.astype(jnp.float32)
    return rotate(x if norm is None else rms_normalize(x, *norm), *rotation)


@jax.custom_vjp
def swiglu(gate: Float[Array, "*n f"], up: Float[Array, "*n f"]) -> Float[Array, "*n f"]:
    """silu(gate) · up, rounded to their dtype (Shazeer, arXiv 2002.05202).

    The backward pass keeps only gate and up.
    """
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_backward(residuals: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    gate, up, d = (x.astype(jnp.float32) for x in (*residuals, d_y))
    sigmoid = jax.nn.sigmoid(gate)
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.astype(d_y.dtype), (d * gate * sigmoid).astype(d_y.dtype)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)
