"""Rounds a value at a point, in the format of the point and with its random bits."""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.request import Extras, RandomStream, Spec
from lowprec_attn.numerics import (
    SALTS,
    Numerics,
    Point,
    counter_bits,
    get_format,
    round_scaled,
    round_to,
)

_FLOAT32 = get_format("float32")

# exp(−128) is 0 in float32. Every format contains −128, which is not true of MASKED.
LEAST_SHIFT = -128.0


class RoundPoint(Protocol):
    """A function that rounds at the points of `POINTS`: a `Rounder`, or its twin in a kernel."""

    def __call__(self, x: Array, point: Point, place: Place) -> Array:
        """Rounds x at the point; x and the result are float32."""


class Rounder(NamedTuple):
    """Rounds at the points of `numerics`; `stream` gives the random bits that a point may need."""

    numerics: Numerics
    stream: RandomStream | None

    @classmethod
    def of(cls, spec: Spec, extras: Extras) -> "Rounder":
        """Returns the rounder of a call."""
        return cls(spec.numerics, extras.stream)

    def __call__(
        self,
        x: Array,
        point: Point,
        place: Place,
        dtype: np.dtype = _FLOAT32.dtype,
        *,
        axis: int = -1,
        amax: Array | None = None,
    ) -> Array:
        """Rounds x at a point of `POINTS` and returns it in float32.

        Args:
          x: float32 [B, K, G, rows, columns].
          point: the name of the point.
          place: the place of x, which determines its random bits.
          dtype: dtype of the inputs, whose format `output` and `grads` may follow.
          axis: the axis over which the product sums; the blocks of a scale lie along it.
          amax: the `amax` of `round_scaled`, if the point has a scale and x is a part of an array.

        Raises:
          ValueError: the point rounds stochastically and there are no random bits.
        """
        rounding = self.numerics.rounding_at(point, dtype)
        if rounding.is_identity:
            return x
        bits = self._bits(x, point, place) if rounding.needs_bits else None
        if rounding.scaling is not None:
            if point in ("probs", "probs_bwd"):
                amax = jnp.ones((1,) * x.ndim, jnp.float32)  # probabilities are at most 1
            return round_scaled(x, rounding, axis, amax, bits)
        return round_to(x, rounding.format, rounding.mode, bits)

    def shift(self, x: Array, place: Place) -> Array:
        """Rounds an exponent, S − m or m_old − m, at `shift`; below −128 it becomes −128 first."""
        if self.numerics.shift.is_identity:
            return x
        return self(jnp.maximum(x, jnp.float32(LEAST_SHIFT)), "shift", place)

    def _bits(self, x: Array, point: Point, place: Place) -> Array:
        stream = self.stream
        if stream is None:
            rounding = getattr(self.numerics, point)
            raise ValueError(
                f"{point}={rounding} draws random bits; pass rng_key=jax.random.key(...)"
            )
        b, k, g = x.shape[:3]
        bits = counter_bits(
            stream.seed,
            SALTS[point],
            stream.batch.reshape(b, 1, 1, 1, 1),
            # A gradient summed over a group (g = 1) has the bits of the group's first head.
            stream.head.reshape(1, k, -1, 1, 1)[:, :, :g],
            place.rows[None, None, None],
            place.cols[None, None, None],
            place.step,
        )
        return jnp.broadcast_to(bits, x.shape)
