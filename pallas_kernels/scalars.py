"""The arrays of a call that every program gets whole: lengths and sources of random bits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.pairs import Pairs
from pallas_kernels.rounder import Stream


class Scalars(NamedTuple):
    """Lengths and sources of random bits, or references to them; None where absent.

    Only GPU kernels get `pairs`. Only the GPU's forward kernel gets `start`: m and l [N], which the
    rows of a head have before the first key.
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
        """The lengths and sources of random bits that the kernels of this call read."""
        stream = extras.stream if spec.numerics.needs_bits else None
        return cls(extras.query_lengths, extras.key_lengths, *(stream or ()))

    def stream(self, batch: Array, head: Array) -> Stream | None:
        """The random stream of one batch element and query head, or None without random bits."""
        if self.seed is None:
            return None
        # A device may keep the two words as int32. Only their bits matter.
        seed = (self.seed[0].astype(jnp.uint32), self.seed[1].astype(jnp.uint32))
        return Stream(seed, self.batch[batch], self.head[head])
