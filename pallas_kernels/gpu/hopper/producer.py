"""What kernels share whose programs own query rows: what is loaded, which steps are skipped."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gpu.hopper import long_steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine.ping_pong import Turns
from pallas_kernels.gpu.hopper.machine.pipeline import Ring
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.problem import Problem


def load(
    rows: tuple[Any, ...],
    k: Any,
    v: Any,
    rings: tuple[Ring, Ring, Ring],
    problem: Problem,
    tile: Tile,
    *,
    most: bool = False,
    keys_twice: bool = False,
) -> None:
    """All tiles of a program and the keys they see, by the warpgroup that does nothing else.

    Args:
      rows: arrays whose rows belong to the queries, q first; one buffer of their ring each.
      k, v: the keys and values, or the packed array.
      rings: of the rows, of k and of v.
      problem, tile: of the kernel.
      most: see `set_registers`.
      keys_twice: k comes twice in each of `long_steps`.
    """
    set_registers(tile.warpgroups, loads=True, most=most)
    program, schedule = lax.axis_index("program"), problem.by_query(tile)
    of_rows, of_k, of_v = rings

    def load_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        turn = schedule.turn(program, u)
        start = turn.tile * tile.own

        def load_rows() -> None:
            copies = []
            for w in range(tile.own // ROWS):
                place = (turn.batch, start + w * ROWS, ROWS, turn.head)
                for buffer, ref in enumerate(rows):
                    copies.append((problem.part(ref, *place), buffer, (w,)))
            of_rows.fill(tiles, *copies)

        pl.when(turn.exists)(load_rows)
        _, end = problem.key_steps(start, tile.own, tile.walk)
        end = jnp.where(turn.exists, end, 0)
        kv_head = lax.div(turn.head, jnp.int32(problem.group))

        def parts(t: Array) -> list[Any]:
            place = (turn.batch, t * tile.walk, tile.walk, kv_head)
            return [problem.part(ref, *place, plane=plane) for ref, plane in ((k, 1), (v, 2))]

        def load_keys(t: Array, n: Array) -> Array:
            for ring, part in zip((of_k, of_v), parts(t), strict=True):
                ring.fill(n, (part, 0, ()))
            return n + 1

        if keys_twice:
            steps = long_steps.load_keys(parts, (of_k, of_v), problem, tile, end, steps)
        else:
            steps = lax.fori_loop(0, end, load_keys, steps)
        return tiles + turn.exists.astype(jnp.int32), steps

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, schedule.turns(program), load_tile, done)
    of_rows.drain(tiles)
    of_k.drain(2 * steps if keys_twice else steps)
    of_v.drain(steps)


def skip(
    rings: tuple[Ring, Ring], turns: Turns, tile: Tile, first: Array, begin: Array, end: Array
) -> None:
    """Goes past the steps that only other warpgroups of the program see.

    Args:
      rings: of k and v.
      turns, tile: of the kernel.
      first: steps that the program has done before the tile.
      begin, end: the steps of the tile that are skipped.
    """
    if tile.own <= tile.walk and tile.walk % tile.own == 0:
        return  # all warpgroups end with the same step

    def step(t: Array, _: None) -> None:
        for ring in rings:
            ring.wait(first + t)
            ring.release(first + t)
        turns.wait()
        turns.pass_on()

    lax.fori_loop(begin, end, step, None)
