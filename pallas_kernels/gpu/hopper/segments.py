"""What hides keys from rows beside their positions: segment ids and lengths.

Lengths become ids too, of their own for rows and for keys beyond them. A step takes a mask of ids
only where some pair of the block and the step may differ. Which steps a tile visits, and which of
those take no mask, is found from the least and the largest id of each block and step, beside the
kernels; they read four numbers a block. Ids in any order are served: sorted ones skip the most.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.request import Extras
from pallas_kernels.gpu.hopper.block_sizes import ROWS, STEPS, Tile
from pallas_kernels.gpu.hopper.machine.layouts import (
    PER_COLUMN,
    PER_ROW,
    along_columns,
    along_rows,
    load,
)
from pallas_kernels.gpu.hopper.machine.types import Ref

IDS_OF_KEYS = 1  # the buffer of k's pipeline beside k

# Of a tile's block of 64: the steps begin ... end − 1 are visited by its whole tile, and those from
# `_CLEAR` to `_FULL` − 1 take no mask of ids.
_BEGIN, _END, _CLEAR, _FULL = range(4)


class Segments(NamedTuple):
    """A row sees the keys whose id is its own. Arrays outside of the kernels, references inside.

    Attributes:
      rows, keys: ids [B, T] and [B, S], with whole steps of both.
      bounds: int32 [4, B, blocks of 64] of a kernel's tiles, see `by_query` and `by_key`.
    """

    rows: Ref
    keys: Ref
    bounds: Ref = None

    @classmethod
    def of(cls, extras: Extras, rows: int, keys: int) -> "Segments | None":
        """Those of a call; None where positions alone decide."""
        lengths = extras.query_lengths, extras.key_lengths
        if extras.query_segments is None and lengths == (None, None):
            return None
        of_rows, of_keys = _ids(extras, rows, keys)
        return cls(*(_whole(x, max(STEPS)) for x in (of_rows, of_keys)))

    def by_query(self, tile: Tile, tiles: int) -> "Segments":
        """With the bounds of tiles that own rows and step over the keys."""
        owned = _whole(self.rows, tile.owned, tiles)
        return self._replace(bounds=_bounds(owned, self.keys, tile))

    def by_key(self, tile: Tile, tiles: int) -> "Segments":
        """With the bounds of tiles that own keys and step over the rows."""
        owned = _whole(self.keys, tile.owned, tiles)
        return self._replace(bounds=_bounds(owned, self.rows, tile))

    # Within a kernel:

    def visited(self, batch: Array, start: Array) -> tuple[Array, Array]:
        """(begin, end): the steps that the tile from `start` on visits, by ids."""
        return self._bound(_BEGIN, batch, start), self._bound(_END, batch, start)

    def alike(self, batch: Array, start: Array) -> tuple[Array, Array]:
        """(clear, full): in these steps all ids are those of the 64 from `start` on."""
        return self._bound(_CLEAR, batch, start), self._bound(_FULL, batch, start)

    def _bound(self, which: int, batch: Array, start: Array) -> Array:
        _, elements, blocks = self.bounds.shape
        # A program's last tile need not exist, and then lies anywhere.
        batch = jnp.minimum(batch, elements - 1)
        block = jnp.minimum(lax.div(start, jnp.int32(ROWS)), blocks - 1)
        bound: Array = self.bounds[which, batch, block]
        return bound


def ids_of_block(ids: Ref, batch: Array, start: Array) -> Array:
    """The ids [64] from `start` on; beyond the last those of the last ones."""
    inside = pl.ds(jnp.minimum(start, ids.shape[-1] - ROWS), ROWS)
    return load(ids.at[batch, inside], PER_ROW, straight=False)


def bits_of(ids: Array) -> Array:
    """Ids as the bits of float32 numbers, for a buffer that has such numbers too."""
    bits: Array = lax.bitcast_convert_type(ids, jnp.float32)
    return bits


def same(of_block: Array, of_step: Ref) -> Array:
    """Which pairs [64, step] have one id: those of a block, and those of a step in memory.

    The latter may be `bits_of`.
    """
    ids = load(of_step, PER_COLUMN, straight=False)
    if ids.dtype != of_block.dtype:
        ids = lax.bitcast_convert_type(ids, of_block.dtype)
    shape = (ROWS, *of_step.shape)
    return along_rows(of_block, shape) == along_columns(ids, shape)


def _ids(extras: Extras, rows: int, keys: int) -> tuple[Array, Array]:
    """Ids of rows and of keys, those beyond the lengths unlike all others."""
    query, key = extras.query_segments, extras.key_segments
    lengths = extras.query_lengths, extras.key_lengths
    if query is None or key is None:
        elements = next(len(x) for x in lengths if x is not None)
        query, key = (jnp.zeros((elements, size), jnp.int32) for size in (rows, keys))
    elif lengths != (None, None):
        # Any number may be an id; between ranks there is room for others.
        query, key = _ranks(query, key)
    # Beside that of the last row or key that exists, so that tiles span no more ids.
    return _ended(query, lengths[0], 2), _ended(key, lengths[1], 4)


def _ended(ids: Array, lengths: Array | None, by: int) -> Array:
    """Ids with another from each length on: `by` more than the last before it."""
    if lengths is None:
        return ids
    last = jnp.take_along_axis(ids, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    return jnp.where(span(0, ids.shape[1])[None] < lengths[:, None], ids, last + jnp.int32(by))


def _ranks(
    query: Int32[Array, "B T"], key: Int32[Array, "B S"]
) -> tuple[Int32[Array, "B T"], Int32[Array, "B S"]]:
    """In the order of ids, and equal where they are: multiples of 8, one less of rows that no key
    is like. What `_ended` makes of them meets none."""
    ordered = jnp.sort(key, axis=1)

    def rank(ids: Array) -> Array:
        # The first key of that id, and whether there is one.
        less = jnp.vectorize(jnp.searchsorted, signature="(s),(t)->(t)")(ordered, ids)
        found = jnp.take_along_axis(ordered, jnp.minimum(less, key.shape[1] - 1), axis=1)
        return (8 * less - (found != ids)).astype(jnp.int32)

    return rank(query), rank(key)


def _whole(ids: Array, size: int, blocks: int = 0) -> Array:
    """Ids of whole blocks, at least so many, of so many each: the last one goes on."""
    blocks = max(blocks, -(-ids.shape[1] // size))
    return jnp.pad(ids, ((0, 0), (0, blocks * size - ids.shape[1])), mode="edge")


def _bounds(owned: Array, others: Array, tile: Tile) -> Array:
    """Bounds of blocks of `owned` ids, in steps of the other side's."""
    tiles, blocks, steps = (
        _extremes(ids, size)
        for ids, size in ((owned, tile.owned), (owned, ROWS), (others, tile.step))
    )
    low, high = (x[..., None] for x in tiles)
    first, last = (x[..., None] for x in blocks)
    least, most = (x[:, None] for x in steps)
    begin, end = _interval((least <= high) & (low <= most))
    alike = (first == last) & (least == most) & (first == least)
    clear = jnp.argmax(alike, axis=-1)
    differs = ~alike & (span(0, alike.shape[-1])[None, None] > clear[..., None])
    until = jnp.where(differs.any(axis=-1), jnp.argmax(differs, axis=-1), alike.shape[-1])
    full = jnp.where(alike.any(axis=-1), until, clear)
    of_tiles = (jnp.repeat(x, tile.owned // ROWS, axis=-1) for x in (begin, end))
    return jnp.stack([*of_tiles, clear, full]).astype(jnp.int32)


def _extremes(ids: Array, size: int) -> tuple[Array, Array]:
    """The least and the largest id of every block, [B, blocks]."""
    by_block = ids.reshape(ids.shape[0], -1, size)
    return by_block.min(axis=-1), by_block.max(axis=-1)


def _interval(seen: Array) -> tuple[Array, Array]:
    """(begin, end) of the first and the last that is True; (0, 0) where there is none."""
    steps = seen.shape[-1]
    first, back = (jnp.argmax(x, axis=-1) for x in (seen, seen[..., ::-1]))
    return first, jnp.where(seen.any(axis=-1), steps - back, 0)
