"""One attention call as the TPU kernels see it: sizes, tiles, visited keys and rows, masks."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.numerics import Point
from pallas_kernels import problem as common
from pallas_kernels.pairs import Pairs
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu.block_sizes import LANES, VMEM_LIMIT, Steps, Tile
from pallas_kernels.tpu.products import Rounder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(common.Problem):
    """Sizes, tile and steps of one kernel. Sizes exclude the padding of arrays to whole tiles.

    Attributes:
      tile: query rows and keys of a tile.
      steps: keys of an online-softmax step; keys and rows whose products `tile_grads` rounds.
      interpret: parameters of the interpreter, or None to compile.
    """

    tile: Tile
    steps: Steps
    interpret: pltpu.InterpretParams | None

    @property
    def padded_rows(self) -> int:
        """T rounded up to whole tiles."""
        return self.q_tiles * self.tile.query

    @property
    def padded_keys(self) -> int:
        """S rounded up to whole tiles."""
        return self.kv_tiles * self.tile.kv

    @property
    def step(self) -> int:
        """Keys of an online-softmax step; S in whole tiles where one step takes all keys."""
        return self.padded_keys if self.steps.keys >= self.keys else self.steps.keys

    @property
    def row_step(self) -> int:
        """Rows whose products `tile_grads` rounds; T in whole tiles where it rounds all as one."""
        return self.padded_rows if self.steps.rows >= self.rows else self.steps.rows

    @property
    def scales_queries(self) -> bool:
        """Whether the kernels get q · scale instead of q, which is exact for a power of two.

        S then needs no factor. Neither does dS, because rounding commutes with the scale and
        dK = dSᵀ (q · scale).
        """
        return self.spec.scale_is_power_of_two

    def counts_in_scale(self, *points: Point) -> bool:
        """As in `common.Problem`, but False where q already contains the scale."""
        return not self.scales_queries and super().counts_in_scale(*points)

    def position_limits(self, batch: Array, scalars: Scalars) -> dict[str, Any]:
        """As in `common.Problem`; rows beyond the lengths see columns, as no result is kept."""
        lengths = scalars.key_lengths
        return {"limit": self.keys if lengths is None else jnp.minimum(lengths[batch], self.keys)}

    def rounder(self, scalars: Scalars, batch: Array, head: Array) -> Rounder:
        """The rounder of a program with this batch element and query head."""
        stream = scalars.stream(batch, head)
        return Rounder(self.spec.numerics, self.dtype, stream, self.interpret is not None)

    def values(self, v: Array, start: Array, scalars: Scalars, batch: Array, head: Array) -> Array:
        """The V that a query head reads, of keys from `start` on, rounded at `value`."""
        if self.spec.numerics.value.is_identity:
            return v
        # The random bits are those of the group's first head.
        round_point = self.rounder(scalars, batch, lax.div(head, self.group) * self.group)
        place = Place(indices(start, v.shape[0], 0), indices(0, v.shape[1], 1))
        v = round_point(v.astype(jnp.float32), "value", place)
        # Cast to the dtype of the format, so that a product takes it as one term.
        return v.astype(self.spec.numerics.value.result_format.dtype)

    def query_range(self, j: Array, batch: Array, scalars: Scalars) -> common.Range:
        """The query tiles that see key tile j. `full` is not known here and equals `begin`."""
        rows, size = self.tile.query, self.tile.kv
        begin, end = jnp.int32(0), jnp.int32(self.q_tiles)
        if self.spec.is_causal:
            begin = jnp.minimum(lax.div(j * size, rows), end)
        if self.spec.window is not None:
            begin, end = self.rows_of_window(j)
        if scalars.query_lengths is not None:
            length = scalars.query_lengths[batch]
            end = jnp.minimum(end, lax.div(length + rows - 1, rows))
        if scalars.key_lengths is not None:
            end = jnp.where(j * size < scalars.key_lengths[batch], end, 0)
        return common.Range(begin, begin, end)


def row_specs(problem: Problem) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """The blocks of a query tile [query, H], and of a number for each of its rows [1, query].

    They are for kernels with one program per batch element, query head, query tile and key tile.
    """
    query, head_size = problem.tile.query, problem.head_size
    rows = pl.BlockSpec((None, None, query, head_size), lambda b, h, i, j, _: (b, h, i, 0))
    return rows, pl.BlockSpec((None, None, 1, query), lambda b, h, i, j, _: (b, h, 0, i))


def pair_specs(pairs: Pairs | None, problem: Problem, index: Callable[..., Any]) -> Pairs | None:
    """Block specifications of `Pairs` whose segments are rows [B, 1, T] and [B, 1, S].

    index: maps a program and the scalars to batch element, query head, query tile and key tile.
    """
    if pairs is None:
        return None
    query, kv = problem.tile.query, problem.tile.kv
    specs = Pairs()
    if pairs.query_segments is not None:

        def rows(*program: Any) -> tuple[Any, ...]:
            batch, _, i, _ = index(*program)
            return batch, 0, i

        def keys(*program: Any) -> tuple[Any, ...]:
            batch, _, _, j = index(*program)
            return batch, 0, j

        specs = Pairs(pl.BlockSpec((None, 1, query), rows), pl.BlockSpec((None, 1, kv), keys))
    if pairs.mask is None:
        return specs
    batches, heads = pairs.mask.shape[:2]

    def tile(*program: Any) -> tuple[Any, ...]:
        batch, head, i, j = index(*program)
        return batch if batches > 1 else 0, head if heads > 1 else 0, i, j

    return specs._replace(mask=pl.BlockSpec((None, None, query, kv), tile))


def unhidden(pairs: Pairs, *, keys: Any = slice(None), keys_first: bool = False) -> Array:
    """True in a tile, or its transpose, where neither segments nor the mask hide a column.

    keys: the part of the tile's keys to take.
    """
    parts = []
    if pairs.query_segments is not None:
        rows, cols = pairs.query_segments[...], pairs.key_segments[:, keys]
        left, right = (cols, rows) if keys_first else (rows, cols)
        parts.append(lanes(to_columns(left), right.shape[1]) == right)
    if pairs.mask is not None:
        mask = pairs.mask[:, keys].astype(jnp.int32)  # wide enough to be transposed
        parts.append((mask.T if keys_first else mask) != 0)
    return functools.reduce(jnp.logical_and, parts)


def indices(start: Array | int, size: int, axis: int) -> Array:
    """The indices start ... start + size − 1, [size, 1] (axis 0) or [1, size]."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis) + jnp.asarray(start, jnp.int32)


def exponential(x: Array, unit: float) -> Array:
    """exp(unit · x)."""
    # The hardware computes 2^x (`vpow2`), so a factor beside log₂ e costs nothing.
    return jnp.exp(x) if unit == 1 else jnp.exp2(x * np.float32(unit * math.log2(math.e)))


def lanes(x: Array, size: int) -> Array:
    """Resizes a row statistic [rows, 128], equal in all lanes, to [rows, size]."""
    if size > LANES:
        x = jnp.tile(x, (1, -(-size // LANES)))
    return x[:, :size]


def to_columns(row: Array) -> Array:
    """Statistics [1, rows] as [rows, 128], equal in all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def to_row(columns: Array) -> Array:
    """Statistics [rows, 128] as [1, rows]."""
    return columns.T[:1]


class Grid(NamedTuple):
    """How a kernel is laid out.

    Attributes:
      sizes: programs per axis.
      parallel: how many leading axes are independent; the others run in order and share scratch.
      in_specs, out_specs: block specifications.
      scratch: shapes of float32 scratch.
    """

    sizes: tuple[int, ...]
    parallel: int
    in_specs: Any
    out_specs: Any
    scratch: tuple[tuple[int, ...], ...]


def call(body: Callable[..., None], problem: Problem, grid: Grid, out: Any) -> Callable[..., Any]:
    """`pl.pallas_call` of the body, as a function of (scalars, inputs).

    Args:
      body: the kernel, a function of references to scalars, inputs, outputs and scratch, and of
        `problem`; the call is named after it.
      problem: tells whether to interpret.
      grid: the layout.
      out: shapes and dtypes of the outputs.
    """
    sequential = len(grid.sizes) - grid.parallel
    return pl.pallas_call(
        functools.partial(body, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.sizes,
            in_specs=grid.in_specs,
            out_specs=grid.out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in grid.scratch],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL,) * grid.parallel + (pltpu.ARBITRARY,) * sequential,
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=problem.interpret or False,
        name=f"attention{body.__name__}",
    )
