"""Steps of more keys than a warpgroup has registers for: the 512 of `published`.

There a step is what rounds: S, dP, P̄V of a step, the last l, and what a tile of as many queries by
as many keys adds to a gradient. Kernels take a long step in parts, the mainloop steps of their
tiles.

Forward, the maximum of a row has to be known before the first P̄, and S of 64 rows by 512 keys has
256 registers in a thread. So it is multiplied twice, part by part: for the maximum, and for P̄. That
is three products for two, and k is loaded twice, the second time from the L2 cache.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax
from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine.instruction_order import finish_before_waiting
from pallas_kernels.gpu.hopper.machine.instructions import ONE, at_least
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
)
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem


def load_keys(
    parts: Any,
    pipelines: tuple[Pipeline, Pipeline],
    problem: Problem,
    tile: Tile,
    end: Array,
    done: Array,
) -> Array:
    """Of one tile of queries, k twice and v once; the steps of the walk that are done then.

    Args:
      parts: gives the parts of k and v of a step of the walk.
      pipelines: of k and v.
      problem, tile: of the forward kernel.
      end: steps that the tile has.
      done: steps that the program has done before.
    """
    of_k, of_v = pipelines

    def load_long_step(i: Array, _: None) -> None:
        first, last = problem.parts_of_long_step(i, tile.step, end)
        n = 2 * (done + first)

        def load_k(t: Array, _: None) -> None:
            of_k.producer_load(n + t - first, (parts(t)[0], 0, ()))

        def load_both(t: Array, _: None) -> None:
            k, v = parts(t)
            of_k.producer_load(n + (last - first) + t - first, (k, 0, ()))
            of_v.producer_load(done + t, (v, 0, ()))

        lax.fori_loop(first, last, load_k, None)
        lax.fori_loop(first, last, load_both, None)

    lax.fori_loop(*problem.long_steps(tile.step, end), load_long_step, None)
    return done + end


def attend(walk: Any) -> tuple[Array, Array, Array]:
    """Ō, m [64] and l [64, LANES] of a `forward._Walk` after its last step."""
    problem, tile, shared = walk.problem, walk.tile, walk.shared
    memory = None if shared.probs is None else shared.probs.at[walk.me]
    pieces = 2 if tile.halved else 1
    keys = tile.step // pieces
    interpret = problem.sizes.interpret

    def rows_of(ref: Any, i: int) -> Any:
        """The i-th piece of a part of k or v."""
        return ref.at[pl.ds(i * keys, keys)] if tile.halved else ref

    def scores(t: Array, n: Array) -> Iterator[Array]:
        """S of a part, rounded, piece by piece, from the n-th filling of k's pipeline.

        All of them are begun at first: a piece is multiplied while the one before is looked at.
        """
        shared.k.consumer_wait(n)
        q, k = shared.q.get(walk.tiles, walk.me), shared.k.get(n)
        begun = [begin_product(q, rows_of(k, i), interpret=interpret) for i in range(pieces)]
        for i, s in enumerate(begun):
            plgpu.wgmma_wait(pieces - 1 - i)
            if i == pieces - 1:
                shared.k.consumer_release(n)
            yield walk.masked(problem.rounded(s), t, i * keys)

    def before_next_piece(i: int, x: Array) -> None:
        """x ≥ 0, of the i-th piece, is computed before the next one is waited for."""
        if i < pieces - 1 and not interpret:
            finish_before_waiting(x)

    def long_step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, m, l = carry
        first, last = problem.parts_of_long_step(i, tile.step, walk.end)
        n = 2 * (walk.steps + first) - first

        def largest(t: Array, r: Array) -> Array:
            for i, s in enumerate(scores(t, n + t)):
                r = jnp.maximum(r, by_lane(jnp.maximum, s))
                before_next_piece(i, jnp.abs(r))
            return r

        def largest_and_ties(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            r, ties = carry
            for s in scores(t, n + t):
                of_piece = by_lane(jnp.maximum, s).max(axis=1)
                new = jnp.maximum(r, of_piece)
                near = at_least(s, along_rows(new, s.shape), interpret=interpret)
                ties = jnp.where(of_piece > r, np.int32(0), ties)
                r, ties = new, ties + by_lane(jnp.add, near).sum(axis=1)
            return r, ties

        if isinstance(problem.spec.row_max, DynamicMax):
            none = constant((ROWS,), MASKED, PER_ROW)
            none_yet = none, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.int32), PER_ROW)
            r_m, ties = lax.fori_loop(first, last, largest_and_ties, none_yet)
        else:
            none = constant((ROWS, LANES), MASKED, TILE)
            r_m, ties = lax.fori_loop(first, last, largest, none).max(axis=1), None
        new = problem.spec.row_max.running_max(
            r_m, r_m, m, unit=problem.spec.scale, is_repeated=lambda *_: ties != ONE
        )
        alpha = jnp.exp2((m - new) * np.float32(problem.log2_unit))

        def add_part(pv: Any, t: Array, l: Array) -> Array:
            found = []
            for i, s in enumerate(scores(t, n + (last - first) + t)):
                found.append(walk.exponentials(s, along_rows(walk.offset(new), s.shape)))
                if i < pieces - 1:
                    l = l + by_lane(jnp.add, found[-1])
                before_next_piece(i, l)
            of_v = walk.steps + t
            shared.v.consumer_wait(of_v)
            for i, probs in enumerate(found):
                place = None if memory is None else memory.at[:, pl.ds(i * keys, keys)]
                values = rows_of(shared.v.get(of_v), i)
                plgpu.wgmma(pv, as_operand(probs.astype(problem.dtype), place), values)
            l = l + by_lane(jnp.add, found[-1])  # meanwhile
            plgpu.wgmma_wait(0)
            shared.v.consumer_release(of_v)
            return l

        def values(pv: Any) -> tuple[Array, Array]:
            total = along_rows(alpha, l.shape) * l
            total = lax.fori_loop(first, last, partial(add_part, pv), total)
            return total, plgpu.wgmma_accumulator_load(pv, wait_n=None)

        l, pv = pl.run_scoped(values, accumulator(ROWS, problem.head_size))
        return along_rows(alpha, acc.shape) * acc + problem.rounded(pv), new, l

    begin, end = problem.long_steps(tile.step, walk.end)
    none = constant((ROWS, problem.head_size), 0, TILE), *walk.no_key_yet()
    acc, m, l = lax.fori_loop(begin, end, long_step, none)
    return acc, m, l
