"""Sizes of one attention call and the tile of one kernel: what the kernels of all devices share."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import DynamicMax, StandardMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and tile; a device adds what its kernels are compiled with.

    Attributes:
      spec: the call's static part.
      batch, rows, keys, heads, kv_heads, head_size: B, T, S, N, K, H.
      dtype: of q, k, v.
      tile: the device's tile record, with `query` rows and `kv` keys.
      has_query_lengths, has_key_lengths: whether the call has them.
    """

    spec: Spec
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: np.dtype
    tile: Any
    has_query_lengths: bool
    has_key_lengths: bool

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        """Number of query tiles, the last one maybe partial."""
        return -(-self.rows // self.tile.query)

    @property
    def kv_tiles(self) -> int:
        """Number of key tiles, the last one maybe partial."""
        return -(-self.keys // self.tile.kv)

    @property
    def visits_above_diagonal(self) -> bool:
        """Whether rows take, fully masked, the steps that lie above the diagonal."""
        return self.spec.is_causal and self.spec.row_max.visits_above_diagonal

    @property
    def masked_step_changes_nothing(self) -> bool:
        """Whether a fully masked step leaves the state as it is: no rule moves m, no point Ō."""
        n = self.spec.numerics
        keeps_accumulator = n.rescale.is_identity or n.rescale.format == n.accumulator.format
        return keeps_accumulator and isinstance(self.spec.row_max, StandardMax | DynamicMax)

    @property
    def keeps_auxiliary(self) -> bool:
        """Whether the forward kernel keeps Ō′."""
        return self.spec.numerics.saved_dtype == jnp.bfloat16

    def counts_in_scale(self, *points: str) -> bool:
        """Whether products q·k may stand for S = scale · q·k, one multiplication per score fewer.

        They may where none of the points rounds S or what it is compared with, and where MASKED
        stays far below every score in that unit too.
        """
        n = self.spec.numerics
        in_range = 2.0**-64 < self.spec.scale < 2.0**64
        return in_range and all(getattr(n, point).is_identity for point in points)
