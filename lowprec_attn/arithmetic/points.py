"""Rounding at a point: in its format, with its random bits."""

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

# exp(−128) is 0 in float32, and −128 a number of every format; MASKED may not be.
LEAST_SHIFT = -128.0


class RoundPoint(Protocol):
    """x rounded at a point of `POINTS`: a `Rounder`, or that of a kernel's program."""

    def __call__(self, x: Array, point: Point, place: Place) -> Array:
        """float32 in, float32 out."""


class Rounder(NamedTuple):
    """Rounds at the points of `numerics`; `stream` gives the random bits that a point may need."""

    numerics: Numerics
    stream: RandomStream | None

    @classmethod
    def of(cls, spec: Spec, extras: Extras) -> "Rounder":
        """The roundings of a call."""
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
        """x rounded at a point of `POINTS`, float32; random bits are a function of the place.

        Args:
          x: float32 [B, K, G, rows, columns].
          point: its name.
          place: where x lies.
          dtype: of the inputs, which `output` and `grads` follow.
          axis: that which the product sums over, along which blocks of a scale lie.
          amax: as `round_scaled` takes it, where the point has a scale and x is part of an array.

        Raises:
          ValueError: a stochastic point without random bits.
        """
        rounding = self.numerics.rounding_at(point, dtype)
        if rounding.is_identity:
            return x
        bits = self._bits(x, point, place) if rounding.needs_bits else None
        if rounding.scaling is not None:
            if point in ("probs", "probs_bwd"):
                amax = jnp.ones((1,) * x.ndim, jnp.float32)  # of an array of probabilities
            return round_scaled(x, rounding, axis, amax, bits)
        return round_to(x, rounding.format, rounding.mode, bits)

    def shift(self, x: Array, place: Place) -> Array:
        """An exponent S − m or m_old − m as rounded at `shift`."""
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
            # A gradient summed over a group (g = 1) is told apart by the group's first head.
            stream.head.reshape(1, k, -1, 1, 1)[:, :, :g],
            place.rows[None, None, None],
            place.cols[None, None, None],
            place.step,
        )
        return jnp.broadcast_to(bits, x.shape)
