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


class Operands(NamedTuple):
    """q, dO [B, N, T, H], k, v [B, K, S, H], lse and δ [B, N, 1, T]; or references to tiles.

    lse counts in `lse_unit`, as the scores do that it is subtracted from.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any = None


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


def _rounded_ds(program: Program, probs: Array, dp: Array, delta: Array, place: Place) -> Array:
    """dS · scale as rounded at `ds`; without the factor where the sums are scaled."""
    p = program.problem
    ds = probs * (dp - delta)
    if not _scales_last(p):
        ds = ds * jnp.float32(p.spec.scale)
    return program.round_point(ds, "ds", p.spec.numerics.ds, place)


def _scales_last(problem: Problem) -> bool:
    """Whether dQ and dK are scaled as sums, because that commutes with rounding dS · scale."""
    return problem.scales_queries or problem.spec.numerics.ds.is_identity


def key_gradients(x: Operands, scalars: Scalars, problem: Problem) -> tuple[Array, Array]:
    """dK and dV [B, K, S, H], summed over the query heads of each group."""
    p, size = problem, problem.tile

    def visited(j: Array, i: Array, b: Array, scalars: Scalars) -> Array:
        return p.query_range(j, b, scalars).clamp(i)

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
        scratch=((size.kv, p.head_size),) * 2,
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
    *,
    problem: Problem,
) -> None:
    p, n = problem, problem.spec.numerics
    batch, kv_head, j, g, i = (pl.program_id(axis) for axis in range(5))
    program = Program(p, scalars, batch, p.rounder(scalars, batch, kv_head * p.group + g))

    @pl.when((g == 0) & (i == 0))
    def initialise() -> None:
        for sums in (dk_sum, dv_sum):
            sums[...] = jnp.zeros_like(sums)

    def add_tile(*, masked: bool) -> None:
        # P and dS are formed transposed: they are then left operands as they are.
        cols = indices(j * p.tile.kv, p.tile.kv, 0)
        place = Place(indices(i * p.tile.query, p.tile.query, 1), cols)
        q, do = ref.q[...], ref.do[...]
        keys, rows = Side(ref.k[...], ref.v[...]), Side(q, do)
        probs, dp = _probs_and_dp(program, keys, rows, ref.lse[...], place, masked=masked)
        rounded = program.round_point(probs, "probs_bwd", n.probs_bwd, place)
        dv_sum[...] += program.round_point.dot(
            rounded, do, n.probs_bwd.result_format, format_of(do), ROWS
        )
        ds = _rounded_ds(program, probs, dp, ref.delta[...], place)
        dk_sum[...] += program.round_point.dot(ds, q, n.ds.result_format, format_of(q), ROWS)

    seen = p.query_range(j, batch, scalars)
    _visit(i, seen, (p.key_range(i, p.tile.kv, batch, scalars).full > j), p, add_tile)

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


def query_gradients(x: Operands, scalars: Scalars, problem: Problem) -> Array:
    """dQ [B, N, T, H]."""
    p = problem
    block = (None, None, p.tile.query, p.head_size)
    out_spec = pl.BlockSpec(block, lambda b, h, i, j, _: (b, h, i, 0))
    statistic = (p.tile.query, LANES)
    scratch = ((p.tile.query, p.head_size), statistic, statistic)
    out = jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)
    return _over_queries(_query_gradients, x, scalars, p, (out, out_spec, scratch))


def delta_from_probs(x: Operands, scalars: Scalars, problem: Problem) -> Array:
    """δ = rowsum(dP ∘ P), [B, N, 1, T], in a pass of its own over the keys."""
    p = problem
    out_spec = pl.BlockSpec((None, None, 1, p.tile.query), lambda b, h, i, j, _: (b, h, 0, i))
    statistic = (p.tile.query, LANES)
    out = jax.ShapeDtypeStruct(x.lse.shape, jnp.float32)
    return _over_queries(_delta, x, scalars, p, (out, out_spec, (statistic, statistic)))


def _over_queries(
    body: Callable[..., None], x: Operands, scalars: Scalars, problem: Problem, out: Any
) -> Array:
    """Runs a kernel with one program per query tile and head; its key tiles follow in order."""
    p, size = problem, problem.tile

    def key_tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Any, ...]:
        return b, lax.div(h, p.group), p.key_range(i, size.kv, b, scalars).clamp(j), 0

    rows = pl.BlockSpec((None, None, size.query, p.head_size), lambda b, h, i, j, _: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, size.kv, p.head_size), key_tile)
    statistics = pl.BlockSpec((None, None, 1, size.query), lambda b, h, i, j, _: (b, h, 0, i))
    shape, out_spec, scratch = out
    delta = None if x.delta is None else statistics
    grid = Grid(
        sizes=(p.batch, p.heads, p.q_tiles, p.kv_tiles),
        parallel=3,
        in_specs=(Operands(rows, keys, keys, rows, statistics, delta),),
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

    def visit(self, contribution: Callable[[Array, Array, Place], None]) -> None:
        """contribution(P, dP, place) of the key tile, where it is seen at all."""
        p, scalars, batch, _ = self.program

        def add_tile(*, masked: bool) -> None:
            place = Place(self.rows, indices(self.j * p.tile.kv, p.tile.kv, 1))
            rows, keys = (
                Side(self.ref.q[...], self.ref.do[...]),
                Side(self.ref.k[...], self.ref.v[...]),
            )
            lse = lanes(self.lse[...], p.tile.kv)
            probs, dp = _probs_and_dp(self.program, rows, keys, lse, place, masked=masked)
            contribution(probs, dp, place)

        seen = p.key_range(self.i, p.tile.kv, batch, scalars)
        _visit(self.j, seen, self.j < seen.full, p, add_tile)


def _query_gradients(
    scalars: Scalars,
    ref: Operands,
    dq_ref: Any,
    dq_sum: Any,
    lse: Any,
    delta: Any,
    *,
    problem: Problem,
) -> None:
    p, n = problem, problem.spec.numerics
    walk = _Walk.of(scalars, ref, lse, p)
    round_point = walk.program.round_point

    @pl.when(walk.j == 0)
    def initialise() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)
        lse[...] = to_columns(ref.lse[...])
        delta[...] = to_columns(ref.delta[...])

    def contribution(probs: Array, dp: Array, place: Place) -> None:
        ds = _rounded_ds(walk.program, probs, dp, lanes(delta[...], p.tile.kv), place)
        k = ref.k[...]
        dq_sum[...] += round_point.dot(ds, k, n.ds.result_format, format_of(k), ROWS)

    walk.visit(contribution)

    @pl.when(walk.j == p.kv_tiles - 1)
    def finish() -> None:
        dq = dq_sum[...] * jnp.float32(p.spec.scale) if _scales_last(p) else dq_sum[...]
        place = Place(walk.rows, indices(0, p.head_size, 1), 0)
        dq_ref[...] = round_point(dq, "grads", n.grads_for(p.dtype), place).astype(dq_ref.dtype)


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
