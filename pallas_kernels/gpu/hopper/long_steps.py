"""Steps of more keys than a warpgroup has registers for: the 512 of `published`.

There a step is what rounds: S, dP, P̄V of a step, the last l, and what a tile of as many queries by
as many keys adds to a gradient. Kernels walk over a long step in parts, the steps of their `Tile`.

Forward, the maximum of a row has to be known before the first P̄, and S of 64 rows by 512 keys has
256 registers in a thread. So it is multiplied twice, part by part: for the maximum, and for P̄. That
is three products for two, and k is loaded twice, the second time from the L2 cache.
"""

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
from pallas_kernels.gpu.hopper.machine import (
    LANES,
    ONE,
    PER_ROW,
    TILE,
    Ring,
    accumulator,
    along_rows,
    as_operand,
    at_least,
    begin_product,
    by_lane,
    constant,
)
from pallas_kernels.gpu.hopper.problem import Problem


def load_keys(
    parts: Any, rings: tuple[Ring, Ring], problem: Problem, tile: Tile, end: Array, done: Array
) -> Array:
    """Of one tile of queries, k twice and v once; the steps of the walk that are done then.

    Args:
      parts: gives the parts of k and v of a step of the walk.
      rings: of k and v.
      problem, tile: of the forward kernel.
      end: steps that the tile has.
      done: steps that the program has done before.
    """
    of_k, of_v = rings

    def load_long_step(i: Array, _: None) -> None:
        first, last = problem.parts_of_long_step(i, tile.walk, end)
        n = 2 * (done + first)

        def load_k(t: Array, _: None) -> None:
            of_k.fill(n + t - first, (parts(t)[0], 0, ()))

        def load_both(t: Array, _: None) -> None:
            k, v = parts(t)
            of_k.fill(n + (last - first) + t - first, (k, 0, ()))
            of_v.fill(done + t, (v, 0, ()))

        lax.fori_loop(first, last, load_k, None)
        lax.fori_loop(first, last, load_both, None)

    lax.fori_loop(*problem.long_steps(tile.walk, end), load_long_step, None)
    return done + end


def attend(walk: Any) -> tuple[Array, Array, Array]:
    """Ō, m [64] and l [64, LANES] of a `forward._Walk` after its last step."""
    problem, tile, shared = walk.problem, walk.tile, walk.shared
    memory = None if shared.probs is None else shared.probs.at[walk.me]

    def scores(t: Array, n: Array) -> Array:
        """S of a part, rounded, from the n-th filling of k's ring."""
        shared.k.wait(n)
        q, k = shared.q.get(walk.tiles, walk.me), shared.k.get(n)
        s = begin_product(q, k, interpret=problem.sizes.interpret)
        plgpu.wgmma_wait(0)
        shared.k.release(n)
        return walk.masked(problem.rounded(s), t)

    def long_step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, m, l = carry
        first, last = problem.parts_of_long_step(i, tile.walk, walk.end)
        n = 2 * (walk.steps + first) - first

        def largest(t: Array, r: Array) -> Array:
            return jnp.maximum(r, by_lane(jnp.maximum, scores(t, n + t)))

        def largest_and_ties(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            r, ties = carry
            s = scores(t, n + t)
            of_part = by_lane(jnp.maximum, s).max(axis=1)
            new = jnp.maximum(r, of_part)
            near = at_least(s, along_rows(new, s.shape), interpret=problem.sizes.interpret)
            ties = jnp.where(of_part > r, np.int32(0), ties)
            return new, ties + by_lane(jnp.add, near).sum(axis=1)

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
            s = scores(t, n + (last - first) + t)
            probs = walk.exponentials(s, along_rows(walk.offset(new), s.shape))
            of_v = walk.steps + t
            shared.v.wait(of_v)
            plgpu.wgmma(pv, as_operand(probs.astype(problem.dtype), memory), shared.v.get(of_v))
            l = l + by_lane(jnp.add, probs)  # meanwhile
            plgpu.wgmma_wait(0)
            shared.v.release(of_v)
            return l

        def values(pv: Any) -> tuple[Array, Array]:
            total = along_rows(alpha, l.shape) * l
            total = lax.fori_loop(first, last, partial(add_part, pv), total)
            return total, plgpu.wgmma_accumulator_load(pv, wait_n=None)

        l, pv = pl.run_scoped(values, accumulator(ROWS, problem.head_size))
        return along_rows(alpha, acc.shape) * acc + problem.rounded(pv), new, l

    begin, end = problem.long_steps(tile.walk, walk.end)
    none = constant((ROWS, problem.head_size), 0, TILE), *walk.no_key_yet()
    acc, m, l = lax.fori_loop(begin, end, long_step, none)
    return acc, m, l
