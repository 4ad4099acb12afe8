"""The backward kernels: dK and dV of a key tile, dQ of a query tile, δ where it needs a pass.

Each recomputes P = exp(S − lse) from q, k and lse. Keys and queries have a kernel each, so that
every sum is taken by one program in a fixed order: the same bits on every run. The arithmetic is
that of `lowprec_attn.steps`, point by point. A row without keys comes with lse = +inf, so P = 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.steps import Place
from pallas_kernels.rounding import format_of
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.problem import (
    Grid,
    Problem,
    Range,
    call,
    exponential,
    indices,
    lanes,
    mask_scores,
    to_columns,
    to_row,
)
from pallas_kernels.tpu.rounding import COLUMNS, ROWS, Rounder
from pallas_kernels.tpu.scalars import Scalars
from pallas_kernels.tpu.softmax import sum_slices


class Operands(NamedTuple):
    """q, dO [B, N, T, H], k, v [B, K, S, H], lse, δ, dlse [B, N, 1, T]; or references to tiles.

    lse counts in `lse_unit`, as the scores do that it is subtracted from. dlse comes with
    `delta='normalized'` alone; otherwise δ has it already.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any = None
    dlse: Any = None


class Program(NamedTuple):
    """What the tiles of one program share."""

    problem: Problem
    scalars: Scalars
    batch: Array
    round_point: Rounder


class Side(NamedTuple):
    """The factors of S and dP on one side: q and dO for rows, k and v for columns."""

    for_scores: Array
    for_dp: Array


def lse_unit(problem: Problem) -> float:
    """What lse counts in: lse = lse_unit · `Operands.lse`."""
    return problem.score_unit("scores")


def _probs_and_dp(
    program: Program, left: Side, right: Side, lse: Array, place: Place, *, masked: bool
) -> tuple[Array, Array]:
    """P, unrounded, and dP as rounded at its point; left rows by right rows."""
    p, round_point = program.problem, program.round_point
    n = p.spec.numerics
    a, b = left.for_scores, right.for_scores
    s = round_point.dot(a, b, format_of(a), format_of(b), COLUMNS)
    unit = lse_unit(p)
    if not p.scales_queries and unit == 1:
        s = s * jnp.float32(p.spec.scale)
    s = round_point(s, "scores", n.scores, place)
    if masked:
        s = mask_scores(s, p.visible(place, program.batch, program.scalars))
    probs = exponential(s - lse, unit)
    a, b = left.for_dp, right.for_dp
    dp = round_point.dot(a, b, format_of(a), format_of(b), COLUMNS)
    return probs, round_point(dp, "dp", n.dp, place)


def _rounded_ds(program: Program, ds: Array, place: Place) -> Array:
    """dS · scale as rounded at `ds`; without the factor where the sums are scaled."""
    p = program.problem
    if not _scales_last(p):
        ds = ds * jnp.float32(p.spec.scale)
    return program.round_point(ds, "ds", p.spec.numerics.ds, place)


def _scales_last(problem: Problem) -> bool:
    """Whether dQ and dK are scaled as sums, because that commutes with every rounding before."""
    n = problem.spec.numerics
    return problem.scales_queries or (n.ds.is_identity and n.tile_grads.is_identity)


class _GradientSum(NamedTuple):
    """A running sum of products, each rounded at `tile_grads` before it is added.

    Attributes:
      program: what the tiles of the program share.
      total: reference to the sum.
      part: reference to the product of a step of which a tile is a part; None: there is none.
      size, step: rows of a product that a tile has and that are rounded at once; one divides the
        other.
      which: 0, 1, 2 for dQ, dK, dV.
    """

    program: Program
    total: Any
    part: Any
    size: int
    step: int
    which: int

    def begin(self) -> None:
        """Nothing is summed yet."""
        for ref in (self.total, self.part):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    def add(self, tile: Array, product: Callable[[slice], Array], rows: Array) -> None:
        """Adds the products of a tile, given for a slice of its rows.

        Args:
          tile: its number along the sum.
          product: of the rows of a slice.
          rows: global rows of the sum, [..., 1].
        """
        if self.program.problem.spec.numerics.tile_grads.is_identity:
            self.total[...] += product(slice(None))
        elif self.part is not None:
            self.part[...] += product(slice(None))
        else:
            for start in range(0, self.size, self.step):
                x = product(slice(start, start + self.step))
                self._add_rounded(x, rows, tile * self.size + start)

    def end_of_tile(self, tile: Array, seen: Range, tiles: int, rows: Array) -> None:
        """Adds the product of a step with its last tile, of `tiles` along the sum."""
        if self.part is None:
            return
        per_step = self.step // self.size
        first = lax.div(tile, per_step) * per_step
        is_last = (tile == first + per_step - 1) | (tile == tiles - 1)

        @pl.when(is_last & (tile >= seen.begin) & (first < seen.end))
        def add() -> None:
            self._add_rounded(self.part[...], rows, first * self.size)
            self.part[...] = jnp.zeros_like(self.part)

    def _add_rounded(self, x: Array, rows: Array, first: Array) -> None:
        # `steps` tells the random bits of these roundings apart in the same way.
        place = Place(rows, indices(0, x.shape[1], 1), 3 * first + self.which)
        rounding = self.program.problem.spec.numerics.tile_grads
        self.total[...] += self.program.round_point(x, "tile_grads", rounding, place)


def _sums_parts(problem: Problem, size: int, step: int) -> bool:
    """Whether a product that `tile_grads` rounds is the sum of several tiles of `size` rows."""
    return size < step and not problem.spec.numerics.tile_grads.is_identity


def key_gradients(x: Operands, scalars: Scalars, problem: Problem) -> tuple[Array, Array]:
    """dK and dV [B, K, S, H], summed over the query heads of each group."""
    p, size = problem, problem.tile

    # A causal key tile may lie after all rows: no query tile sees it, and there is none to name.
    may_be_unseen = p.spec.is_causal and p.padded_keys - size.kv >= p.padded_rows

    def visited(j: Array, i: Array, b: Array, scalars: Scalars) -> Array:
        tile = p.query_range(j, b, scalars).clamp(i)
        return jnp.minimum(tile, p.q_tiles - 1) if may_be_unseen else tile

    rows = pl.BlockSpec(
        (None, None, size.query, p.head_size),
        lambda b, h, j, g, i, scalars: (b, h * p.group + g, visited(j, i, b, scalars), 0),
    )
    keys = pl.BlockSpec((None, None, size.kv, p.head_size), lambda b, h, j, g, i, _: (b, h, j, 0))
    statistics = pl.BlockSpec(
        (None, None, 1, size.query),
        lambda b, h, j, g, i, scalars: (b, h * p.group + g, 0, visited(j, i, b, scalars)),
    )
    grid = Grid(
        sizes=(p.batch, p.kv_heads, p.kv_tiles, p.group, p.q_tiles),
        parallel=3,
        in_specs=(Operands(rows, keys, keys, rows, statistics, statistics),),
        out_specs=(keys, keys),
        scratch=((size.kv, p.head_size),) * (4 if _sums_parts(p, size.query, p.row_step) else 2),
    )
    out = jax.ShapeDtypeStruct(x.k.shape, x.k.dtype)
    dk, dv = call(_key_gradients, p, grid, (out, out))(scalars, x)
    return dk, dv


def _key_gradients(
    scalars: Scalars,
    ref: Operands,
    dk_ref: Any,
    dv_ref: Any,
    dk_sum: Any,
    dv_sum: Any,
    *parts: Any,
    problem: Problem,
) -> None:
    p, n = problem, problem.spec.numerics
    batch, kv_head, j, g, i = (pl.program_id(axis) for axis in range(5))
    program = Program(p, scalars, batch, p.rounder(scalars, batch, kv_head * p.group + g))
    dk_part, dv_part = parts or (None, None)
    dk_total = _GradientSum(program, dk_sum, dk_part, p.tile.query, p.row_step, 1)
    dv_total = _GradientSum(program, dv_sum, dv_part, p.tile.query, p.row_step, 2)

    @pl.when((g == 0) & (i == 0))
    def initialise() -> None:
        dk_total.begin()
        dv_total.begin()

    def add_tile(*, masked: bool) -> None:
        # P and dS are formed transposed: they are then left operands as they are.
        cols = indices(j * p.tile.kv, p.tile.kv, 0)
        place = Place(indices(i * p.tile.query, p.tile.query, 1), cols)
        q, do = ref.q[...], ref.do[...]
        keys, rows = Side(ref.k[...], ref.v[...]), Side(q, do)
        probs, dp = _probs_and_dp(program, keys, rows, ref.lse[...], place, masked=masked)
        rounded = program.round_point(probs, "probs_bwd", n.probs_bwd, place)
        dot, p_format = program.round_point.dot, n.probs_bwd.result_format
        dv_total.add(i, lambda x: dot(rounded[:, x], do[x], p_format, format_of(do), ROWS), cols)
        ds = _rounded_ds(program, probs * (dp - ref.delta[...]), place)
        ds_format = n.ds.result_format
        dk_total.add(i, lambda x: dot(ds[:, x], q[x], ds_format, format_of(q), ROWS), cols)

    seen = p.query_range(j, batch, scalars)
    _visit(i, seen, (p.key_range(i, p.tile.kv, batch, scalars).full > j), p, add_tile)
    for total in (dk_total, dv_total):
        total.end_of_tile(i, seen, p.q_tiles, indices(j * p.tile.kv, p.tile.kv, 0))

    @pl.when((g == p.group - 1) & (i == p.q_tiles - 1))
    def finish() -> None:
        # A gradient summed over a group is told apart by the group's first head.
        round_point = p.rounder(scalars, batch, kv_head * p.group)
        # q comes with the scale where that is exact, and dK = dSᵀ q has it from there.
        scaled = _scales_last(p) and not p.scales_queries
        dk = dk_sum[...] * jnp.float32(p.spec.scale) if scaled else dk_sum[...]
        start = indices(j * p.tile.kv, p.tile.kv, 0)
        for which, (x, out) in enumerate(((dk, dk_ref), (dv_sum[...], dv_ref)), start=1):
            place = Place(start, indices(0, p.head_size, 1), which)
            out[...] = round_point(x, "grads", n.grads_for(p.dtype), place).astype(out.dtype)


def _visit(
    index: Array, seen: Range, full: Array, problem: Problem, body: Callable[..., None]
) -> None:
    """Runs the body on a visited tile, masked where it is not seen in full."""
    visited = (index >= seen.begin) & (index < seen.end)
    if not problem.has_masked_tiles:
        pl.when(visited)(partial(body, masked=False))
        return
    pl.when(visited & full)(partial(body, masked=False))
    pl.when(visited & jnp.logical_not(full))(partial(body, masked=True))


class QueryGradients(NamedTuple):
    """dQ [B, N, T, H]; with `delta='normalized'` the δ of dK and dV, less dlse, [B, N, 1, T]."""

    dq: Any
    delta: Any = None


class _QuerySums(NamedTuple):
    """Scratch of dQ: sums, lse and δ by row; `p_dp`, `p`, `pk` as in `steps.RowSums`."""

    dq: Any
    lse: Any
    delta: Any
    p_dp: Any = None
    p: Any = None
    pk: Any = None
    part: Any = None

    @classmethod
    def shapes(cls, problem: Problem) -> "_QuerySums":
        """What of it a problem needs."""
        p, tile = problem, problem.tile
        row, sums = (tile.query, LANES), (tile.query, p.head_size)
        result = cls(sums, row, row)
        if p.spec.numerics.delta == "normalized":
            result = result._replace(p_dp=row, p=row, pk=sums)
        return result._replace(part=sums) if _sums_parts(p, tile.kv, p.step) else result


def query_gradients(x: Operands, scalars: Scalars, problem: Problem) -> QueryGradients:
    """dQ, and what it finds of δ on the way."""
    p = problem
    block = (None, None, p.tile.query, p.head_size)
    out_spec = QueryGradients(pl.BlockSpec(block, lambda b, h, i, j, _: (b, h, i, 0)))
    out = QueryGradients(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype))
    if x.dlse is not None:
        out_spec = out_spec._replace(delta=_row_statistics(p))
        out = out._replace(delta=jax.ShapeDtypeStruct(x.lse.shape, jnp.float32))
    scratch = tuple(shape for shape in _QuerySums.shapes(p) if shape is not None)
    return QueryGradients(*_over_queries(_query_gradients, x, scalars, p, (out, out_spec, scratch)))


def _row_statistics(problem: Problem) -> pl.BlockSpec:
    """Statistics [B, N, 1, T] of the rows of a query tile."""
    return pl.BlockSpec((None, None, 1, problem.tile.query), lambda b, h, i, j, _: (b, h, 0, i))


def delta_from_probs(x: Operands, scalars: Scalars, problem: Problem) -> Array:
    """δ = rowsum(dP ∘ P), [B, N, 1, T], in a pass of its own over the keys."""
    p = problem
    statistic = (p.tile.query, LANES)
    out = jax.ShapeDtypeStruct(x.lse.shape, jnp.float32)
    return _over_queries(_delta, x, scalars, p, (out, _row_statistics(p), (statistic, statistic)))


def _over_queries(
    body: Callable[..., None], x: Operands, scalars: Scalars, problem: Problem, out: Any
) -> Any:
    """Runs a kernel with one program per query tile and head; its key tiles follow in order."""
    p, size = problem, problem.tile

    def key_tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Any, ...]:
        return b, lax.div(h, p.group), p.key_range(i, size.kv, b, scalars).clamp(j), 0

    rows = pl.BlockSpec((None, None, size.query, p.head_size), lambda b, h, i, j, _: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, size.kv, p.head_size), key_tile)
    shape, out_spec, scratch = out
    by_row = (None if row is None else _row_statistics(p) for row in (x.lse, x.delta, x.dlse))
    grid = Grid(
        sizes=(p.batch, p.heads, p.q_tiles, p.kv_tiles),
        parallel=3,
        in_specs=(Operands(rows, keys, keys, rows, *by_row),),
        out_specs=out_spec,
        scratch=scratch,
    )
    return call(body, p, grid, shape)(scalars, x)


class _Walk(NamedTuple):
    """A query tile's walk over the key tiles that it sees, at its key tile j."""

    program: Program
    ref: Operands
    lse: Any
    i: Array
    j: Array

    @classmethod
    def of(cls, scalars: Scalars, ref: Operands, lse: Any, problem: Problem) -> "_Walk":
        batch, head, i, j = (pl.program_id(axis) for axis in range(4))
        program = Program(problem, scalars, batch, problem.rounder(scalars, batch, head))
        return cls(program, ref, lse, i, j)

    @property
    def rows(self) -> Array:
        """Global rows of the tile."""
        size = self.program.problem.tile.query
        return indices(self.i * size, size, 0)

    @property
    def seen(self) -> Range:
        """The key tiles that the walk visits."""
        p, scalars, batch, _ = self.program
        return p.key_range(self.i, p.tile.kv, batch, scalars)

    def visit(self, contribution: Callable[[Array, Array, Place], None]) -> None:
        """contribution(P, dP, place) of the key tile, where it is seen at all."""
        p = self.program.problem

        def add_tile(*, masked: bool) -> None:
            place = Place(self.rows, indices(self.j * p.tile.kv, p.tile.kv, 1))
            rows, keys = (
                Side(self.ref.q[...], self.ref.do[...]),
                Side(self.ref.k[...], self.ref.v[...]),
            )
            lse = lanes(self.lse[...], p.tile.kv)
            probs, dp = _probs_and_dp(self.program, rows, keys, lse, place, masked=masked)
            contribution(probs, dp, place)

        seen = self.seen
        _visit(self.j, seen, self.j < seen.full, p, add_tile)


def _query_gradients(
    scalars: Scalars,
    ref: Operands,
    dq_ref: Any,
    delta_ref: Any,
    *scratch: Any,
    problem: Problem,
) -> None:
    p, n = problem, problem.spec.numerics
    given = iter(scratch)
    sums = _QuerySums(*(None if shape is None else next(given) for shape in _QuerySums.shapes(p)))
    walk = _Walk.of(scalars, ref, sums.lse, p)
    round_point = walk.program.round_point
    total = _GradientSum(walk.program, sums.dq, sums.part, p.tile.kv, p.step, 0)

    @pl.when(walk.j == 0)
    def initialise() -> None:
        total.begin()
        sums.lse[...] = to_columns(ref.lse[...])
        sums.delta[...] = to_columns(ref.delta[...])
        for x in (sums.p_dp, sums.p, sums.pk):
            if x is not None:
                x[...] = jnp.zeros_like(x)

    def contribution(probs: Array, dp: Array, place: Place) -> None:
        unscaled = probs * (dp - lanes(sums.delta[...], p.tile.kv))
        ds = _rounded_ds(walk.program, unscaled, place)
        k, ds_format = ref.k[...], n.ds.result_format
        rows = walk.rows
        total.add(
            walk.j,
            lambda x: round_point.dot(ds[:, x], k[x], ds_format, format_of(k), ROWS),
            rows,
        )
        if sums.pk is not None:
            rounded = round_point(probs, "probs_bwd", n.probs_bwd, place)
            p_format = n.probs_bwd.result_format
            sums.pk[...] += round_point.dot(rounded, k, p_format, format_of(k), ROWS)
            sums.p_dp[...] += sum_slices(unscaled)
            sums.p[...] += sum_slices(probs)

    walk.visit(contribution)
    total.end_of_tile(walk.j, walk.seen, p.kv_tiles, walk.rows)

    @pl.when(walk.j == p.kv_tiles - 1)
    def finish() -> None:
        scale = jnp.float32(p.spec.scale)
        dq = sums.dq[...] * scale if _scales_last(p) else sums.dq[...]
        if sums.pk is not None:
            correction = _row_shift(sums) - to_columns(ref.dlse[...])
            dq = dq - scale * lanes(correction, p.head_size) * sums.pk[...]
            delta_ref[...] = to_row(sums.delta[...] + correction)
        place = Place(walk.rows, indices(0, p.head_size, 1), 0)
        dq_ref[...] = round_point(dq, "grads", n.grads_for(p.dtype), place).astype(dq_ref.dtype)


def _row_shift(sums: _QuerySums) -> Array:
    """Σ P (dP − δ₀) / Σ P in all lanes, by which δ exceeds δ₀: 0 for a row without keys."""
    p_dp, p = (jnp.sum(x[...], axis=-1, keepdims=True) for x in (sums.p_dp, sums.p))
    empty = p == 0
    shift = jnp.where(empty, jnp.float32(0), p_dp / jnp.where(empty, jnp.float32(1), p))
    return jnp.broadcast_to(shift, (shift.shape[0], LANES))


def _delta(
    scalars: Scalars, ref: Operands, delta_ref: Any, lse: Any, total: Any, *, problem: Problem
) -> None:
    walk = _Walk.of(scalars, ref, lse, problem)

    @pl.when(walk.j == 0)
    def initialise() -> None:
        total[...] = jnp.zeros_like(total)
        lse[...] = to_columns(ref.lse[...])

    def contribution(probs: Array, dp: Array, place: Place) -> None:
        total[...] += jnp.sum(dp * probs, axis=-1, keepdims=True)

    walk.visit(contribution)

    @pl.when(walk.j == problem.kv_tiles - 1)
    def finish() -> None:
        delta_ref[...] = to_row(total[...])
