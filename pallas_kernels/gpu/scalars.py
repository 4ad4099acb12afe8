"""The small arrays of a call, handed to every program whole: lengths, sources of random bits."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.rounder import Stream


class Scalars(NamedTuple):
    """The small arrays of a call, or references to them; None where absent."""

    query_lengths: Any = None
    key_lengths: Any = None
    seed: Any = None
    batch: Any = None
    head: Any = None

    @classmethod
    def of(cls, extras: Extras, spec: Spec) -> "Scalars":
        """What the kernels of this call read."""
        stream = extras.stream if spec.numerics.needs_bits else None
        return cls(extras.query_lengths, extras.key_lengths, *(stream or ()))

    def stream(self, batch: Array, head: Array) -> Stream | None:
        """Random bits of one batch element and query head."""
        if self.seed is None:
            return None
        return Stream((self.seed[0], self.seed[1]), self.batch[batch], self.head[head])


def whole(x: Array) -> pl.BlockSpec:
    """A small array, handed to every program as it is."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
