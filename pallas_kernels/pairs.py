"""Segment ids and a dense mask: they hide keys from rows whatever the positions are."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras


class Pairs(NamedTuple):
    """Segment ids and a dense mask: arrays, or references to (parts of) them; None where absent.

    Attributes:
      query_segments, key_segments: segment ids [B, T] and [B, S].
      mask: int8 [B|1, N|1, T, S], 0 where a row may not see a key.
    """

    query_segments: Any = None
    key_segments: Any = None
    mask: Any = None

    @classmethod
    def of(cls, extras: Extras, rows: int, keys: int) -> "Pairs | None":
        """The segment ids and mask of a call, or None where positions alone hide keys."""
        if extras.query_segments is None and extras.mask is None:
            return None
        mask: Array | None = extras.mask
        if mask is not None:
            # int8, because kernels cannot load single bits. Broadcast to all rows and keys, so that
            # every tile exists in memory.
            mask = jnp.broadcast_to(mask, (*mask.shape[:2], rows, keys)).astype(jnp.int8)
        return cls(extras.query_segments, extras.key_segments, mask)
