"""dQ of 64 rows by two warpgroups, for `delta='normalized'`: one has no registers for both sums.

The first forms P and sums P k. It hands P, not rounded, to the second, which forms dP, sums dQ,
Σ dS and Σ P, and in the end takes P k as well, to correct dQ. The arithmetic and the order of every
sum are those of `query_gradients`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import row_shift
from pallas_kernels.gpu.hopper.backward.query_operands import (
    DO,
    Inputs,
    Q,
    Shared,
    delta,
    of_rows,
    probs,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.layouts import LANES, TILE, along_rows, by_lane, constant
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile

_PROBS, _DQ = range(2)  # the warpgroup that sums P k, and that which sums dQ


def consume(
    x: Inputs, dq: Any, dp_offset: Any, shared: Shared, problem: Problem, tile: BackwardTile
) -> None:
    """All tiles of a program, by both warpgroups that multiply."""
    set_registers(tile.warpgroups, producer=False, most=problem.is_wide)
    me = lax.axis_index("warpgroup")

    def sum_keys() -> None:
        given = _each_tile(shared, problem, tile, lambda walk: walk.sum_keys(x))
        shared.probs.producer_tail(given)

    def differentiate() -> None:
        _each_tile(shared, problem, tile, lambda walk: walk.differentiate(x, dq, dp_offset))

    pl.when(me == _PROBS)(sum_keys)
    pl.when(me == _DQ)(differentiate)
    plgpu.wait_smem_to_gmem(0)


def _each_tile(
    shared: Shared, problem: Problem, tile: BackwardTile, consume: Callable[["_Walk"], None]
) -> Array:
    """Does one warpgroup's work for every tile; how many blocks are handed over meanwhile."""
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)

    def consume_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        row = work.block * ROWS
        full, end = problem.key_steps(row, ROWS, tile.step)
        walk = _Walk(problem, tile, shared, tiles, steps, work, row, full, end)
        pl.when(work.is_valid)(lambda: consume(walk))
        return tiles + work.is_valid.astype(jnp.int32), steps + jnp.where(work.is_valid, end, 0)

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, scheduler.count(program), consume_tile, done)
    return steps + tiles * _pieces(problem)


def _pieces(problem: Problem) -> int:
    """Blocks of 64 columns of P k."""
    return problem.head_size // ROWS


class _Walk(NamedTuple):
    """64 query rows of a program, which walk over the key steps 0 ... end − 1.

    `tiles` and `steps` count what the program has done before; steps before `full` take no mask.
    """

    problem: Problem
    tile: BackwardTile
    shared: Shared
    tiles: Array
    steps: Array
    work: WorkTile
    row: Array
    full: Array
    end: Array

    def sum_keys(self, x: Inputs) -> None:
        """Σ P k; gives every P away, and the sum."""
        offset, rows = of_rows(x.offset, self.work, self.row), self.shared.rows
        rows.consumer_wait(self.tiles)
        pk = pl.run_scoped(partial(self._walk_for_keys, offset), self._accumulator)
        rows.consumer_release(self.tiles)
        for piece in range(_pieces(self.problem)):
            columns = pk[:, piece * ROWS : (piece + 1) * ROWS]
            self.shared.probs.produce(self._given + self.end + piece, columns)

    def _walk_for_keys(self, offset: Array, pk: Any) -> Array:
        lax.fori_loop(0, self.end, lambda t, _: self._add_keys(t, offset, pk), None)
        return plgpu.wgmma_accumulator_load(pk, wait_n=None)

    def _add_keys(self, t: Array, offset: Array, pk: Any) -> None:
        n, problem, k = self.steps + t, self.problem, self.shared.k
        k.consumer_wait(n)
        s = self._product(Q, k.get(n))
        # Otherwise the place of every entry would be kept in registers, for the mask.
        row = self.row + opaque_zero(n, interpret=problem.sizes.interpret)
        p = probs(s, offset, row, t, self.full, self.tile.step, problem)
        self.shared.probs.produce(self._given + t, p)
        plgpu.wgmma(pk, self._operand(_PROBS, p), k.get(n))
        plgpu.wgmma_wait(0)
        k.consumer_release(n)

    def differentiate(self, x: Inputs, dq: Any, dp_offset: Any) -> None:
        """dQ, and what dS adds to dP, of which the kernel of dK and dV makes use."""
        problem, shared, work, row = self.problem, self.shared, self.work, self.row
        dlse = of_rows(x.dlse, work, row)
        shared.rows.consumer_wait(self.tiles)
        of_dp = -delta(x.o, shared.rows, self.tiles, 0, work, row, problem)
        if not problem.scales_last:
            of_dp, dlse = (y * np.float32(problem.spec.scale) for y in (of_dp, dlse))
        total, r, s = pl.run_scoped(partial(self._walk_for_queries, of_dp), self._accumulator)
        # What δ₀ lacks, in the units of dS: Σ dS / Σ P, and −dlse beside it.
        lacks = row_shift(r, s) - dlse
        shared.delta[0] = of_dp - lacks
        memory = shared.rows.get(self.tiles, 0, buffer=DO)  # which this warpgroup alone has read
        for piece in range(_pieces(problem)):
            pk = shared.probs.consume(self._given + self.end + piece)
            columns = total[:, piece * ROWS : (piece + 1) * ROWS]
            columns = columns - along_rows(lacks, pk.shape) * pk
            if problem.scales_last:
                columns = columns * np.float32(problem.spec.scale)
            memory[:, pl.ds(piece * ROWS, ROWS)] = columns.astype(problem.dtype)
        plgpu.commit_smem()
        offsets = dp_offset.at[work.batch, work.head, pl.ds(row, ROWS)]
        problem.store_rows(row, [(shared.delta.at[0], offsets)])
        plgpu.copy_smem_to_gmem(memory, problem.part(dq, work.batch, row, ROWS, work.head))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.rows.consumer_release(self.tiles)

    def _walk_for_queries(self, of_dp: Array, dq: Any) -> tuple[Array, Array, Array]:
        """Σ dS k; Σ dS and Σ P [64]."""
        none = (constant((ROWS, LANES), 0, TILE),) * 2
        r, s = lax.fori_loop(0, self.end, lambda t, x: self._add_queries(t, of_dp, dq, *x), none)
        total = plgpu.wgmma_accumulator_load(dq, wait_n=None)
        return total, r.sum(axis=1), s.sum(axis=1)

    def _add_queries(
        self, t: Array, of_dp: Array, dq: Any, r: Array, s: Array
    ) -> tuple[Array, Array]:
        n, problem, k, v = self.steps + t, self.problem, self.shared.k, self.shared.v
        v.consumer_wait(n)
        dp = self._product(DO, v.get(n))
        v.consumer_release(n)
        if not problem.scales_last:
            dp = dp * np.float32(problem.spec.scale)
        p = self.shared.probs.consume(self._given + t)
        ds = p * (dp + along_rows(of_dp, dp.shape))
        r, s = r + by_lane(jnp.add, ds), s + by_lane(jnp.add, p)
        k.consumer_wait(n)
        plgpu.wgmma(dq, self._operand(_DQ, ds), k.get(n))
        plgpu.wgmma_wait(0)
        k.consumer_release(n)
        return r, s

    @property
    def _accumulator(self) -> Any:
        return accumulator(ROWS, self.problem.head_size)

    @property
    def _given(self) -> Array:
        """How many blocks have been handed over before this tile."""
        return self.steps + self.tiles * _pieces(self.problem)

    def _product(self, buffer: int, keys: Any) -> Array:
        """rows keysᵀ of a buffer of the rows, waited for."""
        rows = self.shared.rows.get(self.tiles, 0, buffer=buffer)
        found = begin_product(rows, keys, interpret=self.problem.sizes.interpret)
        plgpu.wgmma_wait(0)
        return found

    def _operand(self, me: int, x: Array) -> Any:
        """x, rounded, as a left operand."""
        operand = self.shared.operand
        return as_operand(x.astype(self.problem.dtype), None if operand is None else operand.at[me])
