"""The arrays of a call that are handed to every program whole: lengths, sources of random bits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.pairs import Pairs
from pallas_kernels.rounder import Stream


class Scalars(NamedTuple):
    """Such arrays, or references to them; None where absent. `pairs` are here on GPUs alone.

    `start`, of the GPU's forward kernel: m and l [N] of a head's rows before the first key.
    """

    query_lengths: Any = None
    key_lengths: Any = None
    seed: Any = None
    batch: Any = None
    head: Any = None
    pairs: Pairs | None = None
    start: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, extras: Extras, spec: Spec) -> "Scalars":
        """What the kernels of this call read."""
        stream = extras.stream if spec.numerics.needs_bits else None
        return cls(extras.query_lengths, extras.key_lengths, *(stream or ()))

    def stream(self, batch: Array, head: Array) -> Stream | None:
        """Random bits of one batch element and query head."""
        if self.seed is None:
            return None
        # The bits of two words, which a device may keep as int32.
        seed = (self.seed[0].astype(jnp.uint32), self.seed[1].astype(jnp.uint32))
        return Stream(seed, self.batch[batch], self.head[head])
