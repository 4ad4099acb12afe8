"""Cuts the arrays of one attention call into query tiles and blocks of keys."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.layout import Grouped, sum_to_shape
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.request import Extras

# The index of a tile: traced in a loop, or a Python number.
Index = Array | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Tiles of `block_q` query rows by `block_kv` keys over T rows and S keys.

    With `every_block`, blocks of keys above the causal diagonal or outside the window are visited
    too, without effect on the results. The position of a row is its index plus an offset, one per
    batch element; offsets lie from `least_offset` to `largest_offset`. Arrays are grouped as in
    `layout`, with the sequence on the axis before the last.
    """

    rows: int
    keys: int
    block_q: int
    block_kv: int
    is_causal: bool
    window: tuple[int, int] | None = None
    every_block: bool = False
    least_offset: Array | int = 0
    largest_offset: Array | int = 0

    @property
    def q_tiles(self) -> int:
        """Number of query tiles, the last one padded."""
        return -(-self.rows // self.block_q)

    @property
    def kv_blocks(self) -> int:
        """Number of key blocks, the last one padded."""
        return -(-self.keys // self.block_kv)

    @property
    def kv_padding(self) -> int:
        """Number of keys that pad the last block."""
        return self.kv_blocks * self.block_kv - self.keys

    @property
    def rows_can_miss_blocks(self) -> bool:
        """Whether a visited tile may hold a row that lies wholly above the causal diagonal."""
        aligned = isinstance(self.least_offset, int) and self.block_kv % self.block_q == 0
        return self.is_causal and (self.every_block or not aligned)

    def kv_begin(self, i: Index) -> Array | int:
        """The first key block that query tile i visits."""
        if self.window is None or self.every_block:
            return 0
        first_row = i * self.block_q + self.least_offset
        return jnp.maximum(first_row - self.window[0], 0) // self.block_kv

    def kv_end(self, i: Index) -> Array | int:
        """The end (exclusive) of the key blocks that query tile i visits."""
        if self.every_block or not (self.is_causal or self.window):
            return self.kv_blocks
        last_row = (i + 1) * self.block_q + self.largest_offset
        if not self.is_causal and self.window is not None:
            last_row = last_row + self.window[1]
        return jnp.minimum((last_row + self.block_kv - 1) // self.block_kv, self.kv_blocks)

    def place(self, i: Index, j: Index) -> Place:
        """The global rows and columns of tile (i, j)."""
        rows = span(i * self.block_q, self.block_q)[:, None]
        return Place(rows, span(j * self.block_kv, self.block_kv)[None])

    def pad(self, x: Grouped) -> Grouped:
        """Pads all arrays with zeros to whole tiles."""
        k, v = (self.pad_keys(a) for a in (x.k, x.v))
        return Grouped(self.pad_rows(x.q), k, v, self.pad_extras(x.extras))

    def pad_extras(self, extras: Extras) -> Extras:
        """Pads mask, bias and segments with zeros to whole tiles."""
        bias, mask = (p if p is None else self._pad_pairs(p) for p in (extras.bias, extras.mask))
        extras = extras._replace(bias=bias, mask=mask)
        if extras.query_segments is not None and extras.key_segments is not None:
            extras = extras._replace(
                query_segments=_pad(extras.query_segments, -1, self.q_tiles * self.block_q),
                key_segments=_pad(extras.key_segments, -1, self.kv_blocks * self.block_kv),
            )
        return extras

    def pad_rows(self, x: Array, value: float = 0.0) -> Array:
        """Pads query rows with `value` to whole tiles."""
        return _pad(x, -2, self.q_tiles * self.block_q, value)

    def pad_keys(self, x: Array) -> Array:
        """Pads keys or values with zeros to whole blocks."""
        return _pad(x, -2, self.kv_blocks * self.block_kv)

    def _pad_pairs(self, x: Array) -> Array:
        # A symbolic length cannot be ordered, but it differs from 1.
        if x.shape[-2] != 1:
            x = self.pad_rows(x)
        return _pad(x, -1, self.kv_blocks * self.block_kv) if x.shape[-1] != 1 else x

    def query_rows(self, x: Array, i: Index) -> Array:
        """Returns query tile i of padded rows."""
        return lax.dynamic_slice_in_dim(x, i * self.block_q, self.block_q, axis=x.ndim - 2)

    def key_rows(self, x: Array, j: Index) -> Array:
        """Returns block j of padded keys or values."""
        return lax.dynamic_slice_in_dim(x, j * self.block_kv, self.block_kv, axis=x.ndim - 2)

    def pairs(self, x: Array, i: Index, j: Index) -> Array:
        """Returns tile (i, j) of a padded mask or bias; axes of length 1 stay as they are."""
        starts, sizes = self._pair_window(x.shape, i, j)
        return lax.dynamic_slice(x, starts, sizes)

    def segments(self, extras: Extras, i: Index, j: Index) -> tuple[Array | None, Array | None]:
        """Returns the segments of the rows and the keys of tile (i, j), [B, T] and [B, S]."""
        queries, keys = extras.query_segments, extras.key_segments
        if queries is None or keys is None:
            return None, None
        return (
            lax.dynamic_slice_in_dim(queries, i * self.block_q, self.block_q, axis=1),
            lax.dynamic_slice_in_dim(keys, j * self.block_kv, self.block_kv, axis=1),
        )

    def _pair_window(
        self, shape: tuple[int, ...], i: Index, j: Index
    ) -> tuple[list[Array | int], list[int]]:
        starts: list[Array | int] = [0] * len(shape)
        sizes = list(shape)
        if shape[-2] != 1:
            starts[-2], sizes[-2] = i * self.block_q, self.block_q
        if shape[-1] != 1:
            starts[-1], sizes[-1] = j * self.block_kv, self.block_kv
        return [jnp.asarray(s, jnp.int32) for s in starts], sizes

    def add_keys(self, total: Array, x: Array, j: Index) -> Array:
        """Adds x to block j of a sum over keys."""
        start = j * self.block_kv
        old = self.key_rows(total, j)
        return lax.dynamic_update_slice_in_dim(total, old + x, start, axis=total.ndim - 2)

    def add_pairs(self, total: Array, ds: Array, i: Index, j: Index) -> Array:
        """Adds dS of tile (i, j) to the gradient of a bias."""
        starts, sizes = self._pair_window(total.shape, i, j)
        old = lax.dynamic_slice(total, starts, sizes)
        return lax.dynamic_update_slice(total, old + sum_to_shape(ds, tuple(sizes)), starts)

    def unpad_rows(self, tiles: Array) -> Array:
        """Joins query tiles [tiles, ..., block_q, H] to rows [..., T, H], without the padding."""
        x = jnp.moveaxis(tiles, 0, -3)
        x = x.reshape(*x.shape[:-3], self.q_tiles * self.block_q, x.shape[-1])
        return x[..., : self.rows, :]


def _pad(x: Array, axis: int, size: int, value: float = 0.0) -> Array:
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=value)
