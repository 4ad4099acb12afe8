"""The small arrays of a call, in scalar memory before a kernel starts: lengths, random streams."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.rounder import Stream


class Scalars(NamedTuple):
    """The small arrays of a call, or references to them, int32; None where absent."""

    query_lengths: Any = None
    key_lengths: Any = None
    seed: Any = None
    batch: Any = None
    head: Any = None

    @classmethod
    def of(cls, extras: Extras, spec: Spec) -> "Scalars":
        """What the kernels of this call read."""
        lengths = (extras.query_lengths, extras.key_lengths)
        if not spec.numerics.needs_bits:
            return cls(*lengths)
        assert extras.stream is not None  # `attention` asks for it
        seed, batch, head = extras.stream
        return cls(*lengths, lax.bitcast_convert_type(seed, jnp.int32), batch, head)

    def stream(self, batch: Array, head: Array) -> Stream | None:
        """Random bits of one batch element and query head."""
        if self.seed is None:
            return None
        seed = tuple(self.seed[i].astype(jnp.uint32) for i in (0, 1))
        return Stream(seed, self.batch[batch], self.head[head])
