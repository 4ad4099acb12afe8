"""One attention call as the GPU kernels see it: sizes, tiles, visited keys and rows, masks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import DynamicMax, Numerics, PublishedMax
from pallas_kernels import problem as common
from pallas_kernels.gpu.block_sizes import Tile
from pallas_kernels.gpu.products import Rounder
from pallas_kernels.gpu.triton import plt
from pallas_kernels.pairs import Pairs
from pallas_kernels.scalars import Scalars

LOG2E = math.log2(math.e)

# A tensor-core tile spreads the columns of a row over four threads, in a pattern that repeats every
# eight columns: the first thread holds columns 0 and 1, the second 2 and 3, and so on.
THREADS, LANES = 4, 8


class TileIndex(NamedTuple):
    """Batch element, query head, query tile, key tile."""

    batch: Array
    head: Array
    i: Array
    j: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(common.Problem):
    """Sizes, tile and machine of one kernel.

    Attributes:
      value_size: V, the head size of v and O; `head_size` is H, the head size of q and k.
      packed: whether q, k and v are planes of one array [B, T, 3, N, H]; their gradients are too.
      tile: query rows and keys of a tile, warps, stages.
      interpret: whether to run in the interpreter.
      hopper: whether the kernel is compiled for a Hopper GPU.
    """

    value_size: int
    packed: bool
    tile: Tile
    interpret: bool
    hopper: bool

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        extras: Extras,
        spec: Spec,
        tile: Tile,
        *,
        interpret: bool,
        hopper: bool,
        value_size: int | None = None,
    ) -> "Problem":
        """The problem of a call with these arrays; q and k may both be the packed array.

        value_size: V; None if it equals H.
        """
        return cls(
            spec=spec,
            batch=q.shape[0],
            rows=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_size=q.shape[-1],
            value_size=value_size or q.shape[-1],
            packed=q.ndim == 5,
            dtype=np.dtype(q.dtype),
            tile=tile,
            interpret=interpret,
            hopper=hopper,
            has_query_lengths=extras.query_lengths is not None,
            has_key_lengths=extras.key_lengths is not None,
            has_pairs=extras.query_segments is not None or extras.mask is not None,
        )

    @property
    def padded_head(self) -> int:
        """H rounded up to a power of two, as the compiler requires of tiles."""
        return _padded(self.head_size)

    @property
    def padded_value(self) -> int:
        """V rounded up to a power of two, as the compiler requires of tiles."""
        return _padded(self.value_size)

    def query_tile(self, program: Array) -> Array:
        """The query tile of a program. With a causal mask the longest mainloops start first."""
        return self.q_tiles - 1 - program if self.spec.is_causal else program

    @property
    def step(self) -> int:
        """Keys of an online-softmax step; S in whole tiles where one step takes all keys."""
        step = self.spec.numerics.step_of(self.keys, self.tile.kv)
        return step if step < self.keys else self.kv_tiles * self.tile.kv

    @property
    def tiles_per_step(self) -> int:
        """Key tiles of a step, or 1 where a tile has more keys than a step."""
        return -(-self.step // self.tile.kv)

    @property
    def tiles_per_rounded_product(self) -> tuple[int | None, int | None]:
        """How many query tiles, and key tiles, make a product that `tile_grads` rounds; or None."""
        n = self.spec.numerics
        if n.tile_grads.is_identity:
            return None, None
        queries = n.step_of(self.rows, self.rows)
        return -(-queries // self.tile.query), self.tiles_per_step

    @property
    def hides_exponent_noise(self) -> bool:
        """Whether the roundings of P̄, P and dS hide the error of the backward kernels' shortcut.

        The shortcut multiplies a score and lse by log2(e) separately. The exponent then errs by
        about an ulp of the score, not of the difference. Numerics that save m and l instead of lse
        are meant to keep the accuracy of the difference, so they take no shortcut.
        """
        return hides_exponent_noise(self.spec.numerics)

    @property
    def scales_first(self) -> bool:
        """Whether exponents are fma(s, c, −c m), rounded once, in both passes."""
        return self.spec.numerics.exponent == "scale_first"

    @property
    def whole_max(self) -> bool:
        """Whether P̄ is formed against a whole number in base 2, see `arithmetic.powers`."""
        return self.spec.numerics.exponent == "whole_max"

    def capped(self, products: Array) -> Array:
        """tanh(scale · q·k / c) of products q·k, or the products themselves without a soft cap."""
        if self.spec.soft_cap is None:
            return products
        return jnp.tanh(products * np.float32(self.spec.scale / self.spec.soft_cap))

    @property
    def counts_ties_by_warp(self) -> bool:
        """Whether the row-max rule counts ties and each warp holds whole rows of S.

        A warp holds whole rows where Hopper's own instructions multiply, 64 rows by four warps:
        threads 4i … 4i + 3 hold rows i and i + 8 of sixteen. Elsewhere the compiler also divides
        the columns among warps. A rule that may do more with S − r_m than count ties gets one
        answer per row, not per thread.
        """
        counts = isinstance(self.spec.row_max, DynamicMax | PublishedMax)
        rows, warps = self.tile.query, self.tile.warps
        counts = counts and self.tiles_per_step == 1
        return counts and self.hopper and warps % 4 == 0 and rows % (16 * warps) == 0

    @property
    def scales_last(self) -> bool:
        """Whether dQ and dK are scaled instead of dS, because scaling commutes with rounding."""
        points = (self.spec.numerics.ds, self.spec.numerics.tile_grads)
        rounded = [x.format.name for x in points if not x.is_identity]
        return self.spec.scale_is_power_of_two and set(rounded) == {"bfloat16"} if rounded else True

    def block(
        self,
        size: int,
        index: Callable[..., tuple[Any, Any, Any]],
        *,
        plane: int | None = None,
        heads: int | None = None,
        values: bool = False,
    ) -> pl.BlockSpec:
        """The block of `size` rows of one head, or of `heads` heads, of an array [B, T, N, H].

        Args:
          size: rows of a block.
          index: maps a program to batch element, block of rows, and head or block of heads.
          plane: 0, 1 or 2 for q, k or v, or for its gradient; these arrays may be packed.
          heads: number of heads; None for one head, which then has no axis.
          values: whether the array is v, O or dO.
        """
        planes = (plane,) if self.packed and plane is not None else ()

        def place(*program: Array) -> tuple[Any, ...]:
            batch, rows, head = index(*program)
            return batch, rows, *planes, head, 0

        features = self.padded_value if values else self.padded_head
        return pl.BlockSpec((None, size, *(None for _ in planes), heads, features), place)

    # The layout of kernels with one program per query tile, query head and batch element:

    @property
    def query_grid(self) -> tuple[int, int, int]:
        """The number of programs on each axis."""
        return self.q_tiles, self.heads, self.batch

    def head_rows(self, plane: int | None = None, *, values: bool = False) -> pl.BlockSpec:
        """All rows of the program's head; plane, values: see `block`."""
        return self.block(self.rows, lambda i, n, b: (b, 0, n), plane=plane, values=values)

    @property
    def head_keys(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        """All rows of k, and all rows of v, for the program's query head."""

        def index(i: Array, n: Array, b: Array) -> tuple[Any, Any, Any]:
            return b, 0, n // self.group

        k = self.block(self.keys, index, plane=1)
        return k, self.block(self.keys, index, plane=2, values=True)

    def of_key_head(self, size: int) -> pl.BlockSpec:
        """All rows of an array [B, size, K, H] for the program's query head."""
        return self.block(size, lambda i, n, b: (b, 0, n // self.group))

    def tile_rows(self, plane: int | None = None) -> pl.BlockSpec:
        """The rows of the program's query tile; plane: see `block`."""
        return self.block(self.tile.query, lambda i, n, b: (b, self.query_tile(i), n), plane=plane)

    @property
    def tile_statistics(self) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """A float32 array [B, N, T], and its block for the rows of the program's query tile."""
        return (
            jax.ShapeDtypeStruct((self.batch, self.heads, self.rows), jnp.float32),
            pl.BlockSpec((None, None, self.tile.query), lambda i, n, b: (b, n, self.query_tile(i))),
        )

    def rounder(self, scalars: Scalars, batch: Array, head: Array) -> Rounder:
        """The rounder of a program with this batch element and query head."""
        stream = scalars.stream(batch, head)
        return Rounder(self.spec.numerics, self.dtype, stream, self.interpret)

    def place(self, i: Array, j: Array, *, keys_first: bool = False) -> Place:
        """Global rows [query, 1] and columns [1, kv] of tile (i, j), or of its transpose."""
        rows = span(i * self.tile.query, self.tile.query)
        cols = span(j * self.tile.kv, self.tile.kv)
        if keys_first:
            return Place(rows[None], cols[:, None])
        return Place(rows[:, None], cols[None])

    def features(
        self, start: Array, size: int, step: Array | int = 0, *, values: bool = False
    ) -> Place:
        """The place of rows start ... start + size − 1 of a gradient and its features [1, H].

        values: whether the features are those of O, v or dV, [1, V].
        """
        rows = span(start, size)[:, None]
        return Place(rows, self.value_columns if values else span(0, self.padded_head)[None], step)

    @property
    def value_columns(self) -> Array:
        """The features of a head of O, [1, V]."""
        return span(0, self.padded_value)[None]

    def key_range(
        self,
        i: Array,
        batch: Array,
        scalars: Scalars,
        *,
        size: int | None = None,
        causal: bool | None = None,
    ) -> common.Range:
        """As in `common.Problem`; if rows lie beyond the lengths, all key tiles take a mask."""
        seen = super().key_range(i, batch, scalars, size=size, causal=causal)
        if scalars.query_lengths is None or self.masks_every_tile:
            return seen
        all_rows = (i + 1) * self.tile.query <= scalars.query_lengths[batch]
        return seen._replace(full=jnp.where(all_rows, seen.full, 0))

    def query_range(self, j: Array, batch: Array, scalars: Scalars) -> common.Range:
        """The query tiles that see key tile j; tiles from `full` on take no mask."""
        begin, full, end = (jnp.int32(x) for x in (0, 0, self.q_tiles))
        if self.spec.is_causal:
            first, last = j * self.tile.kv, (j + 1) * self.tile.kv - 1
            begin = jnp.minimum(lax.div(first, self.tile.query), end)
            full = jnp.minimum(lax.div(last + self.tile.query - 1, self.tile.query), end)
        if self.spec.window is not None:
            begin, end = self.rows_of_window(j)
        if scalars.query_lengths is not None:
            length = scalars.query_lengths[batch]
            end = jnp.minimum(lax.div(length + self.tile.query - 1, self.tile.query), end)
            full = end  # a length may cut any tile, so mask them all
        if scalars.key_lengths is not None:
            length = scalars.key_lengths[batch]
            full = jnp.where((j + 1) * self.tile.kv <= length, full, end)
            begin = jnp.where(j * self.tile.kv < length, begin, end)
        if self.masks_every_tile:
            full = end
        return common.Range(begin, jnp.maximum(full, begin), end)

    @property
    def has_masked_tiles(self) -> bool:
        """As in `common.Problem`; rows beyond the lengths are masked too."""
        return super().has_masked_tiles or self.has_query_lengths

    def position_limits(self, batch: Array, scalars: Scalars) -> dict[str, Any]:
        """As in `common.Problem`; rows beyond T may see columns, as they are never stored."""
        lengths = {"keys": scalars.key_lengths, "queries": scalars.query_lengths}
        of_element = {name: None if x is None else x[batch] for name, x in lengths.items()}
        return {"limit": self.keys, **of_element}

    def unhidden(self, tile: TileIndex, pairs: Pairs, *, keys_first: bool = False) -> Array:
        """True in a tile, or its transpose, where neither segments nor the mask hide a column."""
        batch, _, i, j = tile
        query, kv = self.tile.query, self.tile.kv
        parts = []
        if pairs.query_segments is not None:
            rows = self._load_segments(pairs.query_segments, batch, i * query, query, self.rows)
            cols = self._load_segments(pairs.key_segments, batch, j * kv, kv, self.keys)
            same = rows[None] == cols[:, None] if keys_first else rows[:, None] == cols[None]
            parts.append(same)
        if pairs.mask is not None:
            mask = self._load_mask(pairs.mask, tile)
            parts.append((mask.T if keys_first else mask) != 0)
        return functools.reduce(jnp.logical_and, parts)

    def _load_mask(self, ref: Any, tile: TileIndex) -> Array:
        """A tile of the dense mask, int8 [query, kv]; zeros outside the array."""
        batch, head, i, j = tile
        query, kv = self.tile.query, self.tile.kv
        batches, heads = ref.shape[:2]
        batch = batch if batches > 1 else jnp.int32(0)
        head = head if heads > 1 else jnp.int32(0)
        window = ref.at[batch, head, pl.ds(i * query, query), pl.ds(j * kv, kv)]
        if self.rows % query == 0 and self.keys % kv == 0:
            return window[...]
        place = self.place(i, j)
        inside = (place.rows < self.rows) & (place.cols < self.keys)
        return plt.load(window, mask=inside, other=0)

    def _load_segments(self, ref: Any, batch: Array, start: Array, size: int, limit: int) -> Array:
        window = ref.at[batch, pl.ds(start, size)]
        if limit % size == 0:
            return window[...]
        return plt.load(window, mask=span(start, size) < limit, other=0)

    def valid_rows(self, batch: Array, scalars: Scalars) -> Array | int:
        """How many rows of a batch element may see a key."""
        return self.rows if scalars.query_lengths is None else scalars.query_lengths[batch]

    def exists(self, start: Array, batch: Array, scalars: Scalars) -> Array | None:
        """True for rows of a query tile that lie within the lengths, [query, 1]; None if all do."""
        if scalars.query_lengths is None:
            return None
        return span(start, self.tile.query)[:, None] < scalars.query_lengths[batch]

    def valid_keys(self, batch: Array, scalars: Scalars) -> Array | int:
        """How many keys of a batch element some row may see by position.

        Whatever an array holds beyond the lengths must not enter a product: 0 · NaN is NaN.
        """
        if not (self.has_query_lengths or self.has_key_lengths):
            return self.keys
        keys = jnp.int32(self.keys)
        if scalars.key_lengths is not None:
            keys = scalars.key_lengths[batch]
        return jnp.minimum(keys, self.valid_rows(batch, scalars)) if self.spec.is_causal else keys

    def load_rows(
        self, ref: Any, start: Array, *index: Any, valid: Array | int, values: bool = False
    ) -> Array:
        """The query tile of a [rows, H] reference that begins at row `start`; zeros outside.

        index: the head, if the reference has an axis of heads.
        """
        return self._load(ref, start, self.tile.query, valid, *index, values=values)

    def load_row_parts(
        self, ref: Any, start: Array | int, columns: int, *, valid: Array | int
    ) -> Iterator[Array]:
        """Yields a query tile of O or dO in parts of at most `columns` (a power of two) columns."""
        columns = min(columns, self.padded_value)
        for first in range(0, self.padded_value, columns):
            part = (first, columns)
            yield self._load(ref, start, self.tile.query, valid, columns=part, values=True)

    def load_keys(self, ref: Any, j: Array | int, *, valid: Array | int) -> Array:
        """Tile j of a [keys, H] reference; zeros outside."""
        return self._load(ref, j * self.tile.kv, self.tile.kv, valid)

    def load_one(self, ref: Any) -> Array:
        """The row [1, H] of a reference to one row; zeros outside."""
        return self._load(ref, 0, 1, 1)

    def load_values(
        self, ref: Any, j: Array, scalars: Scalars, batch: Array, head: Array, *, valid: Array | int
    ) -> Array:
        """Tile j of the V that a query head reads, rounded at `value`; zeros outside."""
        kv = self.tile.kv
        v = self._load(ref, j * kv, kv, valid, values=True)
        if self.spec.numerics.value.is_identity:
            return v
        # The random bits are those of the group's first head.
        round_point = self.rounder(scalars, batch, lax.div(head, self.group) * self.group)
        place = self.features(j * kv, kv, values=True)
        v = round_point(v.astype(jnp.float32), "value", place)
        return v.astype(self.spec.numerics.operand_dtype("value", self.dtype))

    def _load(
        self,
        ref: Any,
        start: Array | int,
        size: int,
        limit: Array | int,
        *index: Any,
        columns: tuple[int, int] | None = None,
        values: bool = False,
    ) -> Array:
        columns = columns or (0, self.padded_value if values else self.padded_head)
        window = ref.at[(pl.ds(start, size), *index, pl.ds(*columns))]
        mask = self._inside(start, size, limit, columns, values=values)
        return window[...] if mask is None else plt.load(window, mask=mask, other=0)

    def store(
        self, ref: Any, x: Array, start: Array | int, limit: int, *, values: bool = False
    ) -> None:
        """Stores the rows start ... of a tile [size, H], or [size, V] of values, below `limit`."""
        mask = self._inside(start, x.shape[0], limit, (0, x.shape[1]), values=values)
        plt.store(ref, x.astype(ref.dtype), mask=mask)

    def store_rows(self, ref: Any, x: Array, start: Array) -> None:
        """Stores a query tile [size, V] of O at rows start ... of a [rows, V] reference."""
        window = ref.at[(pl.ds(start, x.shape[0]), pl.ds(0, self.padded_value))]
        self.store(window, x, start, self.rows, values=True)

    def _inside(
        self,
        start: Array | int,
        size: int,
        limit: Array | int,
        columns: tuple[int, int],
        *,
        values: bool,
    ) -> Array | None:
        """True where rows start ... and columns (first, count) lie inside; None if all do."""
        mask = None
        if not isinstance(limit, int) or limit % size != 0:
            mask = span(start, size)[:, None] < limit
        features = self.value_size if values else self.head_size
        if _padded(features) != features:
            inside = span(*columns)[None] < features
            mask = inside if mask is None else mask & inside
        return None if mask is None else jnp.broadcast_to(mask, (size, columns[1]))

    def load_statistics(
        self, ref: Any, start: Array | int, *index: Any, valid: Array | int
    ) -> Array:
        """A row statistic [query] of a [..., rows] reference; zeros outside."""
        size = self.tile.query
        window = ref.at[(*index, pl.ds(start, size))]
        if isinstance(valid, int) and valid % size == 0:
            return window[...]
        return plt.load(window, mask=span(start, size) < valid, other=0)

    def store_statistics(self, ref: Any, x: Array, start: Array | int) -> None:
        """Stores a row statistic [query] of the rows from `start` on."""
        mask = None
        if self.rows % self.tile.query != 0:
            mask = span(start, self.tile.query) < self.rows
        plt.store(ref, x, mask=mask)


def hides_exponent_noise(n: Numerics) -> bool:
    """See `Problem.hides_exponent_noise`."""
    rounds_all = not (n.probs.is_identity or n.probs_bwd.is_identity or n.ds.is_identity)
    return n.exponent is None and n.statistics == "lse" and rounds_all


def _padded(head_size: int) -> int:
    return 1 << (head_size - 1).bit_length()


def whole(x: Array) -> pl.BlockSpec:
    """The block of a small array that every program gets whole."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def by_lane(reduce: Callable[..., Array], x: Array) -> Array:
    """Reduces rows over columns equal modulo 8, so that threads reduce only what they hold."""
    return reduce(x.reshape(x.shape[0], -1, LANES), axis=1)


def call(
    body: Callable[..., None],
    problem: Problem,
    grid: tuple[int, ...],
    specs: Any,
    out: Any,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` with the problem's schedule.

    Args:
      body: the kernel, a function of references to inputs and outputs and of `problem`; the call
        is named after it.
      problem: gives warps, stages and whether to interpret.
      grid: number of programs on each axis.
      specs: block specifications of (inputs, outputs).
      out: shapes and dtypes of the outputs.
      aliases: maps an input leaf, by number, to the output that is written into it.
    """
    in_specs, out_specs = specs
    return pl.pallas_call(
        partial(body, problem=problem),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(
            num_warps=problem.tile.warps, num_stages=problem.tile.stages
        ),
        interpret=problem.interpret,
        name=f"attention{body.__name__}",
    )
