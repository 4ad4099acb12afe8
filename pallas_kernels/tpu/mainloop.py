"""The mainloop of the forward kernel: the online-softmax steps of a query tile over its key tiles.

A key tile holds one or more steps. A step longer than a tile takes two passes over its tiles:
first for its row maximum, then for its products, so that it is rounded once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.products import format_of
from lowprec_attn.arithmetic.recurrence import SoftmaxState, keep_unvisited
from lowprec_attn.arithmetic.visibility import mask_scores
from pallas_kernels.pairs import Pairs
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu import softmax
from pallas_kernels.tpu.problem import Problem, indices, unhidden
from pallas_kernels.tpu.products import COLUMNS, Rounder


class KeyTiles(NamedTuple):
    """The order in which a query tile takes its key tiles, on the last axis of the grid.

    Attributes:
      tiles: how many key tiles there are.
      per_step: how many tiles a long step takes, each of them twice; 1 if a tile holds whole steps.
    """

    tiles: int
    per_step: int

    @classmethod
    def of(cls, problem: Problem) -> "KeyTiles":
        """The order in the forward kernel of this problem."""
        return cls(problem.kv_tiles, max(problem.step // problem.tile.kv, 1))

    @property
    def is_long(self) -> bool:
        """Whether a step takes several tiles."""
        return self.per_step > 1

    @property
    def programs(self) -> int:
        """Programs of a query tile, including those for tiles that the last long step lacks."""
        if not self.is_long:
            return self.tiles
        return -(-self.tiles // self.per_step) * 2 * self.per_step

    def step(self, j: Array) -> Array:
        """The long step that program j works on."""
        return lax.div(j, 2 * self.per_step)

    def tile(self, j: Array) -> Array:
        """The key tile of program j."""
        if not self.is_long:
            return j
        return self.step(j) * self.per_step + lax.rem(j, self.per_step)

    def sums(self, j: Array) -> Array:
        """Whether program j belongs to the second pass over its step, which forms the sums."""
        return lax.rem(j, 2 * self.per_step) >= self.per_step

    def tile_of_v(self, j: Array) -> Array:
        """The tile of v. The first pass over a step needs none and stays at the step's first."""
        if not self.is_long:
            return j
        return jnp.where(self.sums(j), self.tile(j), self.step(j) * self.per_step)


class Inputs(NamedTuple):
    """q, k, v, and the segments and mask that hide pairs of them; or references to tiles."""

    q: Any
    k: Any
    v: Any
    pairs: Pairs | None = None


class LongStep(NamedTuple):
    """Scratch of a step that takes several tiles: its largest scores, then its m and sums."""

    largest: softmax.Largest
    m: Any
    sums: softmax.Sums


class Program(NamedTuple):
    """What the tiles of one program share; `head` is its query head, `i` its query tile."""

    problem: Problem
    scalars: Scalars
    batch: Array
    round_point: Rounder
    i: Array
    head: Array

    def rows(self) -> Array:
        """Global rows of the tile. Branches that need them form them, because most do not."""
        size = self.problem.tile.query
        return indices(self.i * size, size, 0)

    def values(self, v: Array, start: Array) -> Array:
        """V of the keys from `start` on, rounded at `value`."""
        return self.problem.values(v, start, self.scalars, self.batch, self.head)

    def step(
        self, number: Array, *, start: Array | None = None, keys: int = 1, masked: bool
    ) -> softmax.Step:
        """The arithmetic of step `number` on `keys` keys from `start` on, or from its first key."""
        rows, first = self.rows(), number * self.problem.step
        place = Place(rows, indices(first if start is None else start, keys, 1))
        return softmax.Step(self.problem, self.round_point, place, first, masked)

    def scores(
        self, inputs: Inputs, k: Array, place: Place, *, keys: Any = slice(None), masked: bool
    ) -> Array:
        """S of k as rounded at `scores`, in units of `score_unit`; keys: where k is in the tile."""
        problem, q = self.problem, inputs.q[...]
        # S = q kᵀ · scale. A scale that is a power of two is in q already. Any other joins log₂ e
        # in the exponent (`score_unit`), if S is not rounded in between.
        s = self.round_point.dot(q, k, format_of(q), format_of(k), COLUMNS)
        if not problem.scales_queries and problem.score_unit == 1:
            s = s * jnp.float32(problem.spec.scale)
        s = self.round_point(s, "scores", place)
        if not masked:
            return s
        seen = problem.visible(place, self.batch, self.scalars)
        if inputs.pairs is not None:
            seen = seen & unhidden(inputs.pairs, keys=keys)
        return problem.without_padding(mask_scores(s, seen), place)

    def keep_unvisited(
        self, new: SoftmaxState, old: SoftmaxState, step: softmax.Step
    ) -> SoftmaxState:
        """The new state, or the old one in rows that by position see no key of the step."""
        problem = self.problem
        causal = problem.spec.is_causal and not problem.visits_above_diagonal
        rows_differ = step.masked and (causal or problem.spec.window is not None)
        if not rows_differ or problem.masked_step_changes_nothing:
            return new
        first = Place(self.rows(), indices(step.first, 1, 1))
        last = None if problem.spec.window is None else step.first + problem.step - 1
        seen = problem.visible(first, self.batch, self.scalars, causal=causal, last=last)
        return keep_unvisited(new, old, seen)


def read(refs: Any) -> Any:
    """The values that references hold."""
    return type(refs)(*(None if ref is None else ref[...] for ref in refs))


def _write(refs: Any, values: Any) -> None:
    for ref, x in zip(refs, values, strict=True):
        if ref is not None:
            ref[...] = x


def take_steps(program: Program, inputs: Inputs, state_ref: SoftmaxState, j: Array) -> None:
    """Takes the steps of key tile j."""
    problem, scalars, batch, _, i, _ = program
    size = problem.step
    per_tile = problem.tile.kv // size
    visited = problem.key_range(i, batch, scalars, size=size)

    def take_step(within: int, *, masked: bool) -> None:
        number = j * per_tile + within
        keys = pl.ds(within * size, size)
        k, v = inputs.k[keys, :], inputs.v[keys, :]
        step = program.step(number, keys=size, masked=masked)
        s = program.scores(inputs, k, step.place, keys=keys, masked=masked)
        old = read(state_ref)
        v = program.values(v, number * size)
        new = softmax.softmax_step(old, s, v, step)
        _write(state_ref, program.keep_unvisited(new, old, step))

    def take_step_above(within: int) -> None:
        step = program.step(j * per_tile + within, masked=problem.masks_every_tile)
        old = read(state_ref)
        new = softmax.step_without_keys(old, step)
        _write(state_ref, program.keep_unvisited(new, old, step))

    # One of three bodies runs: one without masks; one with masks, where the diagonal, a window or
    # the end cuts the step; or one without scores, for a rule that visits steps above the diagonal.
    for within in range(per_tile):
        step = j * per_tile + within
        if not problem.masks_every_tile:
            pl.when(step < visited.full)(functools.partial(take_step, within, masked=False))
        if problem.has_masked_tiles:
            cut = (step >= visited.full) & (step < visited.end)
            pl.when(cut)(functools.partial(take_step, within, masked=True))
        if problem.visits_above_diagonal:
            every = problem.key_range(i, batch, scalars, size=size, causal=False).end
            above = (step >= visited.end) & (step < every)
            pl.when(above)(functools.partial(take_step_above, within))


def take_part(
    program: Program, inputs: Inputs, state_ref: SoftmaxState, ref: LongStep, j: Array
) -> None:
    """Takes the tile of program j in one of the two passes over a long step."""
    problem, scalars, batch, _, i, _ = program
    order, size = KeyTiles.of(problem), problem.tile.kv
    tile, number = order.tile(j), order.step(j)
    visited = problem.key_range(i, batch, scalars, size=size)
    within = lax.rem(j, 2 * order.per_step)
    if problem.visits_above_diagonal:
        every = problem.key_range(i, batch, scalars, size=problem.step, causal=False).end
        taken = number < every
    else:
        taken = number * order.per_step < visited.end
    if problem.spec.window is not None:
        taken = taken & ((number + 1) * order.per_step > visited.begin)

    @pl.when(taken & (within == 0))
    def begin() -> None:
        _write(ref.largest, softmax.Largest.none(ref.m.shape))

    @pl.when(taken & (within == order.per_step))
    def find_m() -> None:
        largest = read(ref.largest)
        m = largest.running_max(problem.spec.row_max, state_ref.m[...], problem.score_unit)
        if state_ref.max_logit is not None:
            r_m = jnp.max(largest.first, axis=-1, keepdims=True)
            state_ref.max_logit[...] = jnp.maximum(state_ref.max_logit[...], r_m)
        ref.m[...] = softmax.round_m(m, program.step(number, masked=False))
        # The sums over the tiles are float32 and rounded once, after the last tile, as in a step
        # that takes all keys at once.
        _write(ref.sums, (None if x is None else jnp.zeros_like(x) for x in ref.sums))

    def visit(*, masked: bool) -> None:
        step = program.step(number, start=tile * size, keys=size, masked=masked)
        s = program.scores(inputs, inputs.k[...], step.place, masked=masked)

        # Pass 1 finds m. Pass 2 forms S again, because P̄ needs the m of the whole step.
        @pl.when(~order.sums(j))
        def compare() -> None:
            _write(ref.largest, read(ref.largest).merge(softmax.Largest.of(s)))

        @pl.when(order.sums(j))
        def add() -> None:
            auxiliary = ref.sums.aux is not None
            v = program.values(inputs.v[...], tile * size)
            new = softmax.contribution(s, v, ref.m[...], step, auxiliary=auxiliary)
            _write(ref.sums, jax.tree.map(jnp.add, read(ref.sums), new))

    if not problem.masks_every_tile:
        pl.when(tile < visited.full)(functools.partial(visit, masked=False))
    if problem.has_masked_tiles:
        cut = (tile >= visited.full) & (tile < visited.end)
        pl.when(cut)(functools.partial(visit, masked=True))

    @pl.when(taken & (within == 2 * order.per_step - 1))
    def end() -> None:
        step = program.step(number, masked=problem.has_masked_tiles)
        old = read(state_ref)
        new = softmax.close(old, ref.m[...], read(ref.sums), step)
        _write(state_ref, program.keep_unvisited(new, old, step))
