"""Segment ids and lengths, which hide keys from rows in addition to positions.

Lengths become ids, too: rows beyond them get an id of their own, and keys beyond them get another.
A step takes a mask of ids only if some pair of the block and the step may have different ids. The
least and the largest id of each block and step tell which steps a tile visits, and which of these
take no mask. That is computed outside of the kernels, which read four numbers a block. Ids may come
in any order; sorted ids skip the most steps.
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

IDS_OF_KEYS = 1  # the buffer of k's pipeline that holds the ids of keys

# The bounds of a block of 64. Its whole tile visits the steps `_BEGIN` ... `_END` − 1. The steps
# `_CLEAR` ... `_FULL` − 1 take no mask of ids.
_BEGIN, _END, _CLEAR, _FULL = range(4)


class Segments(NamedTuple):
    """Ids of rows and keys: a row sees only the keys that have its id.

    The fields are arrays outside of the kernels, and references inside.

    Attributes:
      rows, keys: ids [B, T] and [B, S], both padded to whole steps.
      bounds: int32 [4, B, blocks of 64] for the tiles of a kernel, see `by_query` and `by_key`.
    """

    rows: Ref
    keys: Ref
    bounds: Ref = None

    @classmethod
    def of(cls, extras: Extras, rows: int, keys: int) -> "Segments | None":
        """The ids of a call, or None if positions alone decide what a row sees."""
        lengths = extras.query_lengths, extras.key_lengths
        if extras.query_segments is None and lengths == (None, None):
            return None
        of_rows, of_keys = _ids(extras, rows, keys)
        return cls(*(_whole(x, max(STEPS)) for x in (of_rows, of_keys)))

    def by_query(self, tile: Tile, tiles: int) -> "Segments":
        """Returns the ids with the bounds of tiles that own rows and step over the keys."""
        owned = _whole(self.rows, tile.owned, tiles)
        return self._replace(bounds=_bounds(owned, self.keys, tile))

    def by_key(self, tile: Tile, tiles: int) -> "Segments":
        """Returns the ids with the bounds of tiles that own keys and step over the rows."""
        owned = _whole(self.keys, tile.owned, tiles)
        return self._replace(bounds=_bounds(owned, self.rows, tile))

    # These are called within a kernel:

    def visited(self, batch: Array, start: Array) -> tuple[Array, Array]:
        """(begin, end): by its ids, the tile from `start` on visits steps begin ... end − 1."""
        return self._bound(_BEGIN, batch, start), self._bound(_END, batch, start)

    def alike(self, batch: Array, start: Array) -> tuple[Array, Array]:
        """(clear, full): steps clear ... full − 1 have no other ids than the block at `start`."""
        return self._bound(_CLEAR, batch, start), self._bound(_FULL, batch, start)

    def _bound(self, which: int, batch: Array, start: Array) -> Array:
        _, elements, blocks = self.bounds.shape
        # A program's last tile may not exist, and then it may lie anywhere.
        batch = jnp.minimum(batch, elements - 1)
        block = jnp.minimum(lax.div(start, jnp.int32(ROWS)), blocks - 1)
        bound: Array = self.bounds[which, batch, block]
        return bound


def ids_of_block(ids: Ref, batch: Array, start: Array) -> Array:
    """Loads the ids [64] from `start` on, or the last 64 if these lie beyond the end."""
    inside = pl.ds(jnp.minimum(start, ids.shape[-1] - ROWS), ROWS)
    return load(ids.at[batch, inside], PER_ROW, straight=False)


def bits_of(ids: Array) -> Array:
    """Returns ids as the bits of float32 numbers, for a buffer that also holds such numbers."""
    bits: Array = lax.bitcast_convert_type(ids, jnp.float32)
    return bits


def same(of_block: Array, of_step: Ref) -> Array:
    """Which pairs [64, step] of a block's ids, and a step's ids in memory, have equal ids.

    The ids in memory may be `bits_of` ids.
    """
    ids = load(of_step, PER_COLUMN, straight=False)
    if ids.dtype != of_block.dtype:
        ids = lax.bitcast_convert_type(ids, of_block.dtype)
    shape = (ROWS, *of_step.shape)
    return along_rows(of_block, shape) == along_columns(ids, shape)


def _ids(extras: Extras, rows: int, keys: int) -> tuple[Array, Array]:
    """Returns the ids of rows and of keys; ids beyond the lengths differ from all others."""
    query, key = extras.query_segments, extras.key_segments
    lengths = extras.query_lengths, extras.key_lengths
    if query is None or key is None:
        elements = next(len(x) for x in lengths if x is not None)
        query, key = (jnp.zeros((elements, size), jnp.int32) for size in (rows, keys))
    elif lengths != (None, None):
        # Any number may be an id; between ranks there is room for others.
        query, key = _ranks(query, key)
    # Next to the id of the last row or key that exists, so that tiles span no more ids.
    return _ended(query, lengths[0], 2), _ended(key, lengths[1], 4)


def _ended(ids: Array, lengths: Array | None, by: int) -> Array:
    """Returns ids that from each length on are `by` more than the last id before it."""
    if lengths is None:
        return ids
    last = jnp.take_along_axis(ids, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    return jnp.where(span(0, ids.shape[1])[None] < lengths[:, None], ids, last + jnp.int32(by))


def _ranks(
    query: Int32[Array, "B T"], key: Int32[Array, "B S"]
) -> tuple[Int32[Array, "B T"], Int32[Array, "B S"]]:
    """Replaces ids by ranks of the same order, which are equal where ids are equal.

    Ranks are multiples of 8, or one less in rows whose id no key has. So the ids that `_ended`
    makes from ranks are equal to none of them.
    """
    ordered = jnp.sort(key, axis=1)

    def rank(ids: Array) -> Array:
        # The place of the first key with that id, and whether there is such a key.
        less = jnp.vectorize(jnp.searchsorted, signature="(s),(t)->(t)")(ordered, ids)
        found = jnp.take_along_axis(ordered, jnp.minimum(less, key.shape[1] - 1), axis=1)
        return (8 * less - (found != ids)).astype(jnp.int32)

    return rank(query), rank(key)


def _whole(ids: Array, size: int, blocks: int = 0) -> Array:
    """Pads ids to whole blocks of `size`, at least `blocks` of them, by repeating the last id."""
    blocks = max(blocks, -(-ids.shape[1] // size))
    return jnp.pad(ids, ((0, 0), (0, blocks * size - ids.shape[1])), mode="edge")


def _bounds(owned: Array, others: Array, tile: Tile) -> Array:
    """Returns the bounds of the blocks of `owned` ids, in steps of the `others`."""
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
    """(begin, end): from the first True to the last, end exclusive; (0, 0) if there is none."""
    steps = seen.shape[-1]
    first, back = (jnp.argmax(x, axis=-1) for x in (seen, seen[..., ::-1]))
    return first, jnp.where(seen.any(axis=-1), steps - back, 0)
