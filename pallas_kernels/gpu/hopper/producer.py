"""What kernels share whose programs own query rows: what is loaded, which steps are skipped."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gpu.hopper import long_steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.problem import Problem


def load(
    rows: tuple[Any, ...],
    k: Any,
    v: Any,
    pipelines: tuple[Pipeline, Pipeline, Pipeline],
    problem: Problem,
    tile: Tile,
    *,
    most: bool = False,
    keys_twice: bool = False,
) -> None:
    """All tiles of a program and the keys they see, by the warpgroup that does nothing else.

    Args:
      rows: arrays whose rows belong to the queries, q first; one buffer of their pipeline each.
      k, v: the keys and values, or the packed array.
      pipelines: of the rows, of k and of v.
      problem, tile: of the kernel.
      most: see `set_registers`.
      keys_twice: k comes twice in each of `long_steps`.
    """
    set_registers(tile.warpgroups, producer=True, most=most)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    of_rows, of_k, of_v = pipelines

    def load_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned

        def load_rows() -> None:
            copies = []
            for w in range(tile.owned // ROWS):
                place = (work.batch, start + w * ROWS, ROWS, work.head)
                for buffer, ref in enumerate(rows):
                    copies.append((problem.part(ref, *place), buffer, (w,)))
            of_rows.producer_load(tiles, *copies)

        pl.when(work.is_valid)(load_rows)
        _, end = problem.key_steps(start, tile.owned, tile.step)
        end = jnp.where(work.is_valid, end, 0)
        kv_head = lax.div(work.head, jnp.int32(problem.group))

        def parts(t: Array) -> list[Any]:
            place = (work.batch, t * tile.step, tile.step, kv_head)
            return [problem.part(ref, *place, plane=plane) for ref, plane in ((k, 1), (v, 2))]

        def load_keys(t: Array, n: Array) -> Array:
            for pipeline, part in zip((of_k, of_v), parts(t), strict=True):
                pipeline.producer_load(n, (part, 0, ()))
            return n + 1

        if keys_twice:
            steps = long_steps.load_keys(parts, (of_k, of_v), problem, tile, end, steps)
        else:
            steps = lax.fori_loop(0, end, load_keys, steps)
        return tiles + work.is_valid.astype(jnp.int32), steps

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, scheduler.count(program), load_tile, done)
    of_rows.producer_tail(tiles)
    of_k.producer_tail(2 * steps if keys_twice else steps)
    of_v.producer_tail(steps)


def skip(
    pipelines: tuple[Pipeline, Pipeline],
    ping_pong: PingPong,
    tile: Tile,
    first: Array,
    begin: Array,
    end: Array,
) -> None:
    """Goes past the steps that only other warpgroups of the program see.

    Args:
      pipelines: of k and v.
      ping_pong, tile: of the kernel.
      first: steps that the program has done before the tile.
      begin, end: the steps of the tile that are skipped.
    """
    if tile.owned <= tile.step and tile.step % tile.owned == 0:
        return  # all warpgroups end with the same step

    def step(t: Array, _: None) -> None:
        for pipeline in pipelines:
            pipeline.consumer_wait(first + t)
            pipeline.consumer_release(first + t)
        ping_pong.wait()
        ping_pong.arrive()

    lax.fori_loop(begin, end, step, None)
