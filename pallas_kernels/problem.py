"""One attention call as all kernels see it: sizes, tile, visited keys and masks."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.arithmetic.visibility import by_position
from lowprec_attn.numerics import DynamicMax, LazyMax, Point, StandardMax
from pallas_kernels.scalars import Scalars


class Side(NamedTuple):
    """The factors of S and dP on one side: q and dO for rows, k and v for columns."""

    for_scores: Array
    for_dp: Array


class Range(NamedTuple):
    """The visited blocks, begin ... end − 1; `full` separates masked blocks from unmasked ones.

    With `Problem.masks_every_tile` every visited block takes a mask.
    """

    begin: Array
    full: Array
    end: Array

    def clamp(self, index: Array) -> Array:
        """The visited block nearest to `index`, so that no block outside the range is fetched."""
        return jnp.clip(index, self.begin, jnp.maximum(self.end - 1, self.begin))


class Outputs(NamedTuple):
    """What a forward kernel writes; None stands for an output that the call does not need.

    Attributes:
      o: O, [B, T, N, V] on GPUs and [B, N, T, H] on TPUs.
      lse: lse, [B, N, T] on GPUs and [B, N, 1, T] on TPUs.
      saved: the O for δ where it differs from O, or the lower half of O; shaped as O.
      apart: m and 1 / l where P is formed from them instead of lse; each shaped as lse.
      max_logit: the largest score of each row; shaped as lse.
    """

    o: Any
    lse: Any
    saved: Any = None
    apart: tuple[Any, Any] | None = None
    max_logit: Any = None

    @classmethod
    def of(cls, o: Any, row: Any, saved: Any, spec: Spec) -> "Outputs":
        """The shapes or blocks of a call's outputs; `row` is that of a number for each row."""
        apart = (row, row) if spec.numerics.statistics == "m_and_l" else None
        return cls(o, row, saved, apart, row if spec.max_logit else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and tile of a call. Each device's subclass adds what its kernels are compiled with.

    Attributes:
      spec: the call's static part.
      batch, rows, keys, heads, kv_heads, head_size: B, T, S, N, K, H.
      dtype: the dtype of q, k and v.
      tile: the device's tile record, with `query` rows and `kv` keys.
      has_query_lengths, has_key_lengths: whether the call gives these lengths.
      has_pairs: whether segments or a dense mask hide keys from rows, see `Pairs`.
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
    has_pairs: bool

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        """Number of query tiles; the last one may be partial."""
        return -(-self.rows // self.tile.query)

    @property
    def kv_tiles(self) -> int:
        """Number of key tiles; the last one may be partial."""
        return -(-self.keys // self.tile.kv)

    @property
    def visits_above_diagonal(self) -> bool:
        """Whether rows take the steps above the diagonal, in which every key is masked."""
        return self.spec.is_causal and self.spec.row_max.visits_above_diagonal

    @property
    def masked_step_changes_nothing(self) -> bool:
        """Whether a fully masked step leaves m (by the rule) and Ō (by the roundings) unchanged."""
        n = self.spec.numerics
        keeps_accumulator = n.rescale.is_identity or n.rescale.format == n.accumulator.format
        return keeps_accumulator and isinstance(
            self.spec.row_max, StandardMax | DynamicMax | LazyMax
        )

    @property
    def keeps_auxiliary(self) -> bool:
        """Whether the forward kernel keeps Ō′."""
        n = self.spec.numerics
        return n.saved_dtype is not None and n.saved_output == "auxiliary"

    @property
    def keeps_partial_sums(self) -> bool:
        """Whether l may stay in partial sums until the end, because no step reads it whole."""
        return self.spec.numerics.stats.is_identity and self.spec.row_max.clamp is None

    @property
    def masks_every_tile(self) -> bool:
        """Whether every visited tile takes a mask, because any of them may be cut anywhere."""
        return self.spec.window is not None or self.has_pairs

    def without_padding(self, s: Array, place: Place) -> Array:
        """Masked scores, with −inf for the keys that pad the last tile where that matters.

        If all keys of a visited step are hidden from a row, the padding must not count as further
        copies of the row maximum.
        """
        if not self.has_pairs or self.keys % self.tile.kv == 0:
            return s
        return jnp.where(place.cols < self.keys, s, -jnp.inf)

    @property
    def has_masked_tiles(self) -> bool:
        """Whether rows may see only a part of some visited tile, which then takes a mask."""
        cut = self.spec.is_causal or self.keys % self.tile.kv != 0 or self.has_key_lengths
        return cut or self.masks_every_tile

    def key_range(
        self,
        i: Array,
        batch: Array,
        scalars: Scalars,
        *,
        size: int | None = None,
        causal: bool | None = None,
    ) -> Range:
        """The key tiles that query tile i visits; tiles before `full` take no mask.

        The range may include a tile that no row sees, so that `begin` always names a tile.

        Args:
          i: query tile.
          batch: batch element.
          scalars: holds the lengths.
          size: keys of a block; blocks of this size are counted instead of tiles.
          causal: whether the diagonal ends the visit; None means as in the call.
        """
        rows, size = self.tile.query, size or self.tile.kv
        begin = jnp.int32(0)
        full, end = jnp.int32(self.keys // size), jnp.int32(-(-self.keys // size))
        if self.spec.is_causal if causal is None else causal:
            full = jnp.minimum(full, lax.div(i * rows + 1, size))
            end = jnp.minimum(end, lax.div((i + 1) * rows + size - 1, size))
        if self.spec.window is not None:
            left, right = self.spec.window
            begin = jnp.minimum(lax.div(jnp.maximum(i * rows - left, 0), size), end - 1)
            end = jnp.minimum(end, lax.div((i + 1) * rows + right + size - 1, size))
        if scalars.key_lengths is not None:
            length = scalars.key_lengths[batch]
            full = jnp.minimum(full, lax.div(length, size))
            end = jnp.minimum(end, lax.div(length + size - 1, size))
        if scalars.query_lengths is not None:
            end = jnp.where(i * rows < scalars.query_lengths[batch], end, 0)
        return Range(begin, begin if self.masks_every_tile else full, end)

    def visible(
        self,
        place: Place,
        batch: Array,
        scalars: Scalars,
        *,
        causal: bool | None = None,
        last: Array | None = None,
    ) -> Array:
        """True where a row may see a column.

        causal: whether the diagonal counts; None means as in the call.
        last: see `by_position`.
        """
        causal = self.spec.is_causal if causal is None else causal
        limits = self.position_limits(batch, scalars)
        seen = by_position(place, causal=causal, window=self.spec.window, last=last, **limits)
        assert seen is not None
        return seen

    def position_limits(self, batch: Array, scalars: Scalars) -> dict[str, Any]:
        """Arguments of `by_position`: where a batch element's keys, and perhaps its rows, end."""
        raise NotImplementedError

    def rows_of_window(self, j: Array) -> tuple[Array, Array]:
        """Begin and end of the query tiles whose windows reach key tile j."""
        assert self.spec.window is not None
        rows, size, (left, right) = self.tile.query, self.tile.kv, self.spec.window
        end = jnp.int32(self.q_tiles)
        before = j * size if self.spec.is_causal else jnp.maximum(j * size - right, 0)
        begin = jnp.minimum(lax.div(before, rows), end)
        return begin, jnp.minimum(lax.div((j + 1) * size + left + rows - 1, rows), end)

    @property
    def score_unit(self) -> float:
        """The unit of the forward kernel's scores and of m: `unit` or 1.

        With `exponent='whole_max'` only the scores have this unit. Row-max rules are told the unit.
        See `counts_in_scale`.
        """
        m_is_a_score = self.spec.numerics.exponent != "whole_max"
        points = ("scores", "shift", "stats") if m_is_a_score else ("scores",)
        return self.unit if self.counts_in_scale(*points) else 1.0

    @property
    def unit(self) -> float:
        """The factor that may be multiplied last: the scale of q·k, or the cap c of tanh(S / c)."""
        return self.spec.scale if self.spec.soft_cap is None else self.spec.soft_cap

    def counts_in_scale(self, *points: Point) -> bool:
        """Whether q·k may stand for S = scale · q·k, which saves one multiplication per score.

        With a soft cap c, tanh(S / c) stands for c · tanh(S / c) instead. Either is possible where
        none of `points` rounds. These are the points of S and of everything that S is compared
        with.
        """
        n = self.spec.numerics
        # In this range MASKED stays far below every score in the unit too.
        in_range = 2.0**-64 < self.unit < 2.0**64
        return in_range and all(getattr(n, point).is_identity for point in points)
