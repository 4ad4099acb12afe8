"""A problem to time: causal attention of one shape, the forward pass or both passes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.shapes import Shape

PASSES = ("forward", "forward+backward")

# A sample should last about this long on any accelerator that is worth timing. The start of a
# program and the host's clock, together about 50 µs, then do not matter.
_SAMPLE_SECONDS = 20e-3
_EXPECTED_FLOPS_PER_SECOND = 200e12


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of the benchmark.

    Attributes:
      name: the shape's name in `benchmarks.shapes`.
      shape: causal self-attention of q, k [B, T, N, H] and v [B, T, N, V].
      dtype: the dtype of q, k, v and dO.
      backward: whether dQ, dK and dV are computed as well.
    """

    name: str
    shape: Shape
    dtype: str
    backward: bool

    @property
    def pass_name(self) -> str:
        """`forward` or `forward+backward`."""
        return PASSES[self.backward]

    @property
    def flops(self) -> float:
        """The operations of one call; see `Shape.flops`."""
        return self.shape.flops(backward=self.backward)

    @property
    def scale(self) -> float:
        """The factor of q kᵀ."""
        return self.shape.head_size**-0.5

    def calls(self, platform: str) -> int:
        """Returns the calls in one sample: 1 on the CPU, elsewhere 2 to 128, for about 20 ms."""
        if platform == "cpu":
            return 1
        calls = math.ceil(_SAMPLE_SECONDS * _EXPECTED_FLOPS_PER_SECOND / self.flops)
        return min(max(calls, 2), 128)

    def abstract_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes and dtypes of q, k, v and dO."""
        return tuple(jax.ShapeDtypeStruct(x, jnp.dtype(self.dtype)) for x in self._shapes)

    def inputs(self, seed: int = 0) -> tuple[Float[Array, "B T N _"], ...]:
        """Draws standard normal q, k, v and dO."""
        keys = jax.random.split(jax.random.key(seed), 4)
        return tuple(
            jax.random.normal(key, shape, self.dtype)
            for key, shape in zip(keys, self._shapes, strict=True)
        )

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape.qkv,) * 2 + (self.shape.values,) * 2
