"""The producer warpgroup of every attention kernel: it loads, and does nothing else.

It goes through the tiles of its program in the order of the consumers. By the copy engine (TMA) it
fills the pipelines as far ahead as they have stages.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gpu.hopper.backward.key_operands import (
    CORRECTION,
    OFFSET,
    KeyInputs,
    KeyMemory,
    place_of,
    steps_of,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile, Tile
from pallas_kernels.gpu.hopper.ends import Ends, EndsOfElement
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Copy, Pipeline, Source
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import IDS_OF_KEYS, Segments
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class LoadedKeys(NamedTuple):
    """k and v, or the packed array in the place of each.

    `segments` are there if ids hide keys, `ends` if lengths alone do.
    """

    k: Ref
    v: Ref
    segments: Segments | None
    ends: Ends | None


class _Element(NamedTuple):
    """The batch element of a tile; `ends` are there if lengths alone hide keys."""

    problem: Problem
    batch: Array
    ends: EndsOfElement | None

    @classmethod
    def of(cls, work: WorkTile, ends: Ends | None, problem: Problem) -> "_Element":
        """The batch element of a tile."""
        own = None if ends is None else ends.of_element(work.batch, problem)
        return cls(problem, work.batch, own)

    def part(self, name: str, ref: Ref, start: Array, size: int, head: Array) -> Source:
        """`size` rows from `start` on of one head of the array of that name."""
        plane = {"k": 1, "v": 2}.get(name, 0)
        own = self.problem.part(ref, self.batch, start, size, head, plane=plane)
        return own if self.ends is None else self.ends.part(name, own, start, size, head)


def load_query_tiles(
    rows: dict[str, Ref],
    keys: LoadedKeys,
    pipelines: tuple[Pipeline, Pipeline, Pipeline],
    problem: Problem,
    tile: Tile,
    *,
    most: bool = False,
    keys_twice: bool = False,
) -> None:
    """Loads all tiles of a program that owns queries, and the keys that they see.

    Args:
      rows: arrays with a row for every query, by name, q first. Each has one buffer of their
        pipeline.
      keys: k, v, and the ids of keys, which come with k.
      pipelines: the pipelines of the rows, of k and of v.
      problem, tile: the kernel's problem and tile.
      most: see `set_registers`.
      keys_twice: whether k comes twice in each long step, see `forward.long_steps`.
    """
    set_registers(tile.warpgroups, producer=True, most=most)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    of_rows, of_k, of_v = pipelines

    # These loops wait for the consumers only in `producer_load`, when all stages are full.
    def load_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned
        element = _Element.of(work, keys.ends, problem)

        def load_rows() -> None:
            copies = []
            for w in range(tile.owned // ROWS):
                place = (start + w * ROWS, ROWS, work.head)
                for buffer, (name, ref) in enumerate(rows.items()):
                    copies.append((element.part(name, ref, *place), buffer, (w,)))
            of_rows.producer_load(tiles, *copies)

        # If q has a second stage, the next tile's q is loaded while the consumers still multiply
        # the steps of this tile.
        pl.when(work.is_valid)(load_rows)
        # Keys are loaded up to the last step that any consumer's rows see.
        begin, end = problem.program_steps(start, work.batch, tile, keys.segments)
        end = jnp.where(work.is_valid, end, 0)
        kv_head = lax.div(work.head, jnp.int32(problem.group))

        def parts(t: Array) -> list[Source]:
            step = t if begin is None else begin + t
            place = (step * tile.step, tile.step, kv_head)
            return [element.part(name, getattr(keys, name), *place) for name in ("k", "v")]

        def load_keys(t: Array, n: Array) -> Array:
            with_k: list[Copy] = []
            if keys.segments is not None:
                first = (t if begin is None else begin + t) * tile.step
                ids = keys.segments.keys.at[work.batch, pl.ds(first, tile.step)]
                with_k.append((ids, IDS_OF_KEYS, ()))
            for pipeline, part, others in zip((of_k, of_v), parts(t), (with_k, ()), strict=True):
                pipeline.producer_load(n, (part, 0, ()), *others)
            return n + 1

        def load_long_step(i: Array, _: None) -> None:
            """Loads k of all parts, for their maximum, and then k and v of all parts."""
            first, last = problem.parts_of_long_step(i, tile.step, end)
            n = 2 * (steps + first)

            def load_k(t: Array, _: None) -> None:
                of_k.producer_load(n + t - first, (parts(t)[0], 0, ()))

            def load_both(t: Array, _: None) -> None:
                k, v = parts(t)
                of_k.producer_load(n + (last - first) + t - first, (k, 0, ()))
                of_v.producer_load(steps + t, (v, 0, ()))

            lax.fori_loop(first, last, load_k, None)
            lax.fori_loop(first, last, load_both, None)

        if keys_twice:
            lax.fori_loop(*problem.long_steps(tile.step, end), load_long_step, None)
            steps = steps + end
        else:
            steps = lax.fori_loop(0, end, load_keys, steps)
        return tiles + work.is_valid.astype(jnp.int32), steps

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, scheduler.count(program), load_tile, done)
    of_rows.producer_tail(tiles)
    of_k.producer_tail(2 * steps if keys_twice else steps)
    of_v.producer_tail(steps)


def load_key_tiles(x: KeyInputs, shared: KeyMemory, problem: Problem, tile: BackwardTile) -> None:
    """Loads all tiles of a program that owns keys, and the queries that see them."""
    set_registers(tile.warpgroups, producer=True, most=shared.dq is not None)
    program, scheduler = lax.axis_index("program"), problem.by_key(tile)

    def load_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, first = done
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned
        steps = steps_of(problem, tile, start, work, first, x.segments)
        element = _Element.of(work, x.ends, problem)
        pl.when(work.is_valid)(partial(load_keys, tiles, start, work.head, element))

        def load_queries(t: Array, n: Array) -> Array:
            head, step = steps.of(t, work.head, problem.group)
            row = step * tile.step

            def rows_of(buffer: int, name: str) -> Copy:
                return element.part(name, getattr(x, name), row, tile.step, head), buffer, ()

            def vector_of(ref: Ref) -> Ref:
                return ref.at[work.batch, head, pl.ds(row, tile.step)]

            vectors = {"offset": vector_of(x.offset)}
            if x.inverse_l is not None:
                vectors["inverse_l"] = vector_of(x.inverse_l)
            if x.more is not None:
                vectors["more"] = vector_of(x.more)
            if x.segments is not None:
                vectors["ids"] = x.segments.rows.at[work.batch, pl.ds(row, tile.step)]
            of_q = [rows_of(0, "q")]
            of_q += [(ref, OFFSET, place_of(name, problem)) for name, ref in vectors.items()]
            shared.q.producer_load(n, *of_q)
            of_do = [
                rows_of(0, "do"),
                (vector_of(x.dp_offset), OFFSET, place_of("dp_offset", problem)),
            ]
            if x.correction is not None:
                of_do.append(rows_of(CORRECTION, "correction"))
            shared.do.producer_load(n, *of_do)
            return n + 1

        # The heads that share the keys come one after the other, and dK and dV are summed over
        # them. FlashAttention-3 sums float32 gradients of all heads in memory.
        first = lax.fori_loop(0, steps.length * problem.group, load_queries, first)
        return tiles + work.is_valid.astype(jnp.int32), first

    def load_keys(tiles: Array, start: Array, head: Array, element: _Element) -> None:
        copies = []
        for w in range(tile.owned // ROWS):
            place = (start + w * ROWS, ROWS, head)
            for buffer, name in enumerate(("k", "v")):
                part = element.part(name, getattr(x, name), *place)
                copies.append((part, buffer, (w,)))
        shared.keys.producer_load(tiles, *copies)

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, scheduler.count(program), load_tile, done)
    shared.keys.producer_tail(tiles)
    shared.q.producer_tail(steps)
    shared.do.producer_tail(steps)


def skip(
    pipelines: tuple[Pipeline, Pipeline],
    ping_pong: PingPong,
    tile: Tile,
    first: Array,
    begin: Array,
    end: Array,
) -> None:
    """Takes a consumer past the steps that only other consumers of its program see.

    Args:
      pipelines: the pipelines of k and v.
      ping_pong, tile: the kernel's ping-pong and tile.
      first: how many steps the program has done before the tile.
      begin, end: the steps begin ... end − 1 of the tile are skipped.
    """
    if tile.owned <= tile.step and tile.step % tile.owned == 0:
        return  # all warpgroups end with the same step

    def step(t: Array, _: None) -> None:
        # Without the release the producer would wait; without the turn the other consumers would.
        for pipeline in pipelines:
            pipeline.consumer_wait(first + t)
            pipeline.consumer_release(first + t)
        ping_pong.wait()
        ping_pong.arrive()

    lax.fori_loop(begin, end, step, None)
