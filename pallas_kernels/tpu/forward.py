"""The forward kernel: O, lse and the O that δ sees.

A program owns a tile of query rows; its key tiles follow in order on the last axis of the grid,
with the running state in scratch memory (FlashAttention-2, arXiv 2307.08691, Algorithm 1). A key
tile holds one or more online-softmax steps; a step longer than a tile is walked over twice, first
for its row maximum, then for its products. Tiles above the causal diagonal are neither computed nor
fetched; only those that the diagonal or the end of the keys cuts are masked.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax, StandardMax
from lowprec_attn.steps import Place, SoftmaxState, statistic
from pallas_kernels.rounding import BFLOAT16, format_of
from pallas_kernels.tpu import softmax
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.problem import (
    Grid,
    Problem,
    call,
    indices,
    lanes,
    mask_scores,
    to_row,
)
from pallas_kernels.tpu.rounding import COLUMNS, Rounder
from pallas_kernels.tpu.scalars import Scalars


class Outputs(NamedTuple):
    """O [B, N, T, H], lse [B, N, 1, T], O for δ where it is another."""

    o: Any
    lse: Any
    saved: Any = None


class _Refs(NamedTuple):
    """References to the tiles of q, k and v."""

    q: Any
    k: Any
    v: Any


class _LongStep(NamedTuple):
    """Scratch of a step that takes several tiles: its largest scores, then its m and sums."""

    largest: softmax.Largest
    m: Any
    sums: softmax.Sums


class _Program(NamedTuple):
    """What the tiles of one program share; `i` is its query tile."""

    problem: Problem
    scalars: Scalars
    batch: Array
    round_point: Rounder
    i: Array

    def rows(self) -> Array:
        """Of the tile; formed within each branch, where most have no use for them."""
        size = self.problem.tile.query
        return indices(self.i * size, size, 0)

    def step(
        self, number: Array, *, start: Array | None = None, keys: int = 1, masked: bool
    ) -> softmax.Step:
        """The arithmetic of a step at so many keys from `start` on, or from its first."""
        rows, first = self.rows(), number * self.problem.step
        place = Place(rows, indices(first if start is None else start, keys, 1))
        return softmax.Step(self.problem, self.round_point, place, first, masked)

    def scores(self, q: Array, k: Array, place: Place, *, masked: bool) -> Array:
        """S as rounded at its point, in `softmax.score_unit`."""
        p = self.problem
        s = self.round_point.dot(q, k, format_of(q), format_of(k), COLUMNS)
        if not p.scales_queries and softmax.score_unit(p) == 1:
            s = s * jnp.float32(p.spec.scale)
        s = self.round_point(s, "scores", p.spec.numerics.scores, place)
        return mask_scores(s, p.visible(place, self.batch, self.scalars)) if masked else s

    def keep_unvisited(
        self, new: SoftmaxState, old: SoftmaxState, step: softmax.Step
    ) -> SoftmaxState:
        """The old state where a step lies wholly beyond what a row may see by position."""
        p = self.problem
        rows_differ = step.masked and p.spec.is_causal and not p.visits_above_diagonal
        if not rows_differ or _masked_step_changes_nothing(p):
            return new
        first = Place(self.rows(), indices(step.first, 1, 1))
        seen = p.visible(first, self.batch, self.scalars)
        return jax.tree.map(functools.partial(jnp.where, seen), new, old)


def forward(q: Array, k: Array, v: Array, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the kernel on q [B, N, T, H], k and v [B, K, S, H], padded to whole tiles."""
    p, size = problem, problem.tile
    walk = _Walk.of(p)

    def key_tile(b: Array, h: Array, i: Array, tile: Array, scalars: Scalars) -> tuple[Any, ...]:
        visited = p.key_range(i, size.kv, b, scalars)
        return b, lax.div(h, p.group), visited.clamp(tile), 0

    block = (None, None, size.kv, p.head_size)
    rows = pl.BlockSpec((None, None, size.query, p.head_size), lambda b, h, i, j, _: (b, h, i, 0))
    keys = pl.BlockSpec(block, lambda b, h, i, j, x: key_tile(b, h, i, walk.tile(j), x))
    values = pl.BlockSpec(block, lambda b, h, i, j, x: key_tile(b, h, i, walk.tile_of_v(j), x))
    statistics = pl.BlockSpec((None, None, 1, size.query), lambda b, h, i, j, _: (b, h, 0, i))
    saved_dtype = _saved_dtype(p)
    shape = (p.batch, p.heads, p.padded_rows, p.head_size)
    out = Outputs(
        jax.ShapeDtypeStruct(shape, p.spec.numerics.output_dtype(p.dtype)),
        jax.ShapeDtypeStruct((p.batch, p.heads, 1, p.padded_rows), jnp.float32),
        None if saved_dtype is None else jax.ShapeDtypeStruct(shape, saved_dtype),
    )
    per_row, accumulator = (size.query, LANES), (size.query, p.head_size)
    state = (per_row, per_row, accumulator) + (accumulator,) * _keeps_auxiliary(p)
    grid = Grid(
        sizes=(p.batch, p.heads, p.q_tiles, walk.programs),
        parallel=3,
        in_specs=(rows, keys, values),
        out_specs=Outputs(rows, statistics, None if saved_dtype is None else rows),
        scratch=state + ((per_row,) * 2 + state) * walk.is_long,
    )
    return Outputs(*call(_forward, p, grid, out)(scalars, q, k, v))


class _Walk(NamedTuple):
    """The walk of a query tile over the key tiles, on the last axis of the grid.

    Attributes:
      tiles: how many there are.
      per_step: how many a long step takes, each twice; 1: a tile holds whole steps.
    """

    tiles: int
    per_step: int

    @classmethod
    def of(cls, problem: Problem) -> "_Walk":
        return cls(problem.kv_tiles, max(problem.step // problem.tile.kv, 1))

    @property
    def is_long(self) -> bool:
        """Whether a step takes several tiles."""
        return self.per_step > 1

    @property
    def programs(self) -> int:
        """Of a query tile; with those for the tiles that the last long step lacks."""
        if not self.is_long:
            return self.tiles
        return -(-self.tiles // self.per_step) * 2 * self.per_step

    def step(self, j: Array) -> Array:
        """The long step that program j works at."""
        return lax.div(j, 2 * self.per_step)

    def tile(self, j: Array) -> Array:
        """The key tile of program j."""
        if not self.is_long:
            return j
        return self.step(j) * self.per_step + lax.rem(j, self.per_step)

    def sums(self, j: Array) -> Array:
        """Whether program j walks over its step for the second time."""
        return lax.rem(j, 2 * self.per_step) >= self.per_step

    def tile_of_v(self, j: Array) -> Array:
        """The tile of v: the first walk over a step needs none and waits at the first."""
        if not self.is_long:
            return j
        return jnp.where(self.sums(j), self.tile(j), self.step(j) * self.per_step)


def _saved_dtype(problem: Problem) -> np.dtype | None:
    """Dtype of the O that δ sees, None where it is O itself or not needed."""
    n = problem.spec.numerics
    if n.delta == "dp_p" or n.saved_output == "same":
        return None
    return jnp.dtype(jnp.float32 if n.saved_output == "float32" else jnp.bfloat16)


def _keeps_auxiliary(problem: Problem) -> bool:
    return _saved_dtype(problem) == jnp.bfloat16


def _forward(
    scalars: Scalars, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, problem: Problem
) -> None:
    p, out, scratch = problem, Outputs(*refs[:3]), refs[3:]
    batch, head, i, j = (pl.program_id(axis) for axis in range(4))
    program = _Program(p, scalars, batch, p.rounder(scalars, batch, head), i)
    walk, inputs = _Walk.of(p), _Refs(q_ref, k_ref, v_ref)
    size, missing = (4, ()) if _keeps_auxiliary(p) else (3, (None,))
    state_ref = SoftmaxState(*scratch[:size], *missing)

    @pl.when(j == 0)
    def initialise() -> None:
        state_ref.m[...] = jnp.full_like(state_ref.m, MASKED)
        for ref in state_ref[1:]:
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    if walk.is_long:
        first, second, m, *sums = scratch[size:]
        ref = _LongStep(softmax.Largest(first, second), m, softmax.Sums(*sums, *missing))
        _take_part(program, inputs, state_ref, ref, j)
    else:
        _take_steps(program, inputs, state_ref, j)

    @pl.when(j == walk.programs - 1)
    def finish() -> None:
        state = _read(state_ref)
        limit = None if scalars.query_lengths is None else scalars.query_lengths[batch]
        _finish(state, p, program.round_point, program.rows(), limit, out)


def _read(refs: Any) -> Any:
    """The values that references hold."""
    return type(refs)(*(None if ref is None else ref[...] for ref in refs))


def _write(refs: Any, values: Any) -> None:
    for ref, x in zip(refs, values, strict=True):
        if ref is not None:
            ref[...] = x


def _take_steps(program: _Program, inputs: _Refs, state_ref: SoftmaxState, j: Array) -> None:
    """The steps of key tile j."""
    p, scalars, batch, _, i = program
    size = p.step
    per_tile = p.tile.kv // size
    visited = p.key_range(i, size, batch, scalars)

    def take_step(within: int, *, masked: bool) -> None:
        number = j * per_tile + within
        keys = pl.ds(within * size, size)
        k, v = inputs.k[keys, :], inputs.v[keys, :]
        step = program.step(number, keys=size, masked=masked)
        s = program.scores(inputs.q[...], k, step.place, masked=masked)
        old = _read(state_ref)
        new = softmax.softmax_step(old, s, v, step)
        _write(state_ref, program.keep_unvisited(new, old, step))

    def take_step_above(within: int) -> None:
        step = program.step(j * per_tile + within, masked=False)
        _write(state_ref, softmax.step_without_keys(_read(state_ref), step))

    for within in range(per_tile):
        step = j * per_tile + within
        pl.when(step < visited.full)(functools.partial(take_step, within, masked=False))
        if p.has_masked_tiles:
            cut = (step >= visited.full) & (step < visited.end)
            pl.when(cut)(functools.partial(take_step, within, masked=True))
        if p.visits_above_diagonal:
            above = (step >= visited.end) & (step < p.steps_end(i, batch, scalars))
            pl.when(above)(functools.partial(take_step_above, within))


def _take_part(
    program: _Program, inputs: _Refs, state_ref: SoftmaxState, ref: _LongStep, j: Array
) -> None:
    """One of the two walks over the tiles of a long step, at program j."""
    p, scalars, batch, _, i = program
    walk, size = _Walk.of(p), p.tile.kv
    tile, number = walk.tile(j), walk.step(j)
    visited = p.key_range(i, size, batch, scalars)
    within = lax.rem(j, 2 * walk.per_step)
    if p.visits_above_diagonal:
        taken = number < p.steps_end(i, batch, scalars)
    else:
        taken = number * walk.per_step < visited.end

    @pl.when(taken & (within == 0))
    def begin() -> None:
        _write(ref.largest, softmax.Largest.none(ref.m.shape))

    @pl.when(taken & (within == walk.per_step))
    def find_m() -> None:
        m = _read(ref.largest).running_max(p.spec.row_max, state_ref.m[...], softmax.score_unit(p))
        ref.m[...] = softmax.round_m(m, program.step(number, masked=False))
        _write(ref.sums, (None if x is None else jnp.zeros_like(x) for x in ref.sums))

    def visit(*, masked: bool) -> None:
        step = program.step(number, start=tile * size, keys=size, masked=masked)
        s = program.scores(inputs.q[...], inputs.k[...], step.place, masked=masked)

        @pl.when(~walk.sums(j))
        def compare() -> None:
            _write(ref.largest, _read(ref.largest).merge(softmax.Largest.of(s)))

        @pl.when(walk.sums(j))
        def add() -> None:
            auxiliary = ref.sums.aux is not None
            new = softmax.contribution(s, inputs.v[...], ref.m[...], step, auxiliary=auxiliary)
            _write(ref.sums, jax.tree.map(jnp.add, _read(ref.sums), new))

    pl.when(tile < visited.full)(functools.partial(visit, masked=False))
    if p.has_masked_tiles:
        cut = (tile >= visited.full) & (tile < visited.end)
        pl.when(cut)(functools.partial(visit, masked=True))

    @pl.when(taken & (within == 2 * walk.per_step - 1))
    def end() -> None:
        step = program.step(number, masked=p.has_masked_tiles)
        old = _read(state_ref)
        new = softmax.close(old, ref.m[...], _read(ref.sums), step)
        _write(state_ref, program.keep_unvisited(new, old, step))


def _masked_step_changes_nothing(problem: Problem) -> bool:
    """Whether a row's state stays as it is in a step whose keys are all masked.

    The rule must leave m, and round_rescale(Ō) must be Ō, which round_accumulator ended in.
    """
    n = problem.spec.numerics
    keeps_m = isinstance(problem.spec.row_max, StandardMax | DynamicMax)
    return keeps_m and (n.rescale.is_identity or n.rescale.format == n.accumulator.format)


def _finish(
    state: SoftmaxState,
    problem: Problem,
    round_point: Rounder,
    rows: Array,
    query_length: Array | None,
    out: Outputs,
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    p, n = problem, problem.spec.numerics
    place = Place(rows, indices(0, p.head_size, 1))
    empty = state.m <= MASKED
    if query_length is not None:
        empty = empty | (rows >= query_length)
    l = state.l
    if softmax.sums_by_lane(p):
        l = jnp.broadcast_to(jnp.sum(l, axis=-1, keepdims=True), l.shape)
    l = round_point(l, "normalizer", n.normalizer, statistic(place, "l"))
    divisor = jnp.where(empty, jnp.float32(1), l)

    def divided(acc: Array) -> Array:
        quotient = acc / lanes(divisor, p.head_size)
        if query_length is None:
            return quotient
        return jnp.where(rows >= query_length, jnp.float32(0), quotient)

    unrounded = divided(state.acc)
    out.o[...] = round_point(unrounded, "output", n.output_for(p.dtype), place).astype(out.o.dtype)
    if state.aux is not None:
        out.saved[...] = round_point.nearest(divided(state.aux), BFLOAT16).astype(jnp.bfloat16)
    elif out.saved is not None:
        out.saved[...] = unrounded

    lse = state.m * jnp.float32(softmax.score_unit(p)) + jnp.log(divisor)
    lse = round_point(lse, "lse", n.lse, statistic(place, "lse"))
    out.lse[...] = to_row(jnp.where(empty, -jnp.inf, lse))
