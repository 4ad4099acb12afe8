"""The kernel of dQ, and of δ, which that of dK and dV reads.

A warpgroup owns 64 query rows and walks over the key steps that they see. Rows have a program each
and keys another, so that every sum is taken in a fixed order: no atomics, the same bits on every
run. The arithmetic is that of `lowprec_attn.arithmetic.backward` with P and dS rounded. For
`delta='normalized'` Σ dS, Σ P and Σ P k are summed beside dQ, and the last corrects it in the end.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import row_shift
from pallas_kernels.gpu.hopper import by_query
from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine import (
    COMPILER,
    LANES,
    PER_ROW,
    TILE,
    Ring,
    Turns,
    accumulator,
    along_rows,
    as_operand,
    by_lane,
    constant,
    interpreter,
    load,
    set_registers,
    tiles_of,
    vectors_of,
)
from pallas_kernels.gpu.hopper.problem import Problem


class Inputs(NamedTuple):
    """q, k, v (or one packed array each), dO and the O that δ sees; two offsets [B, N, T].

    `offset`, of `vector_rows`, is −lse·log2(e): what the exponent of P adds. `dlse` is the gradient
    of lse, which enters dS = P ∘ (dP − δ + dlse) beside δ.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    o: Any
    offset: Any
    dlse: Any


class _Shared(NamedTuple):
    """Shared memory: a ring of q, dO and O; rings of k and v; δ; dS where it is kept there."""

    rows: Any
    k: Any
    v: Any
    delta: Any
    ds: Any


_Q, _DO, _O = range(3)  # buffers of the ring of rows, in which they are loaded


def query_gradients(x: Inputs, problem: Problem) -> tuple[Array, Array]:
    """dQ, and what dS adds to dP, [B, N, T], of `vector_rows`: −δ + dlse, times scale unless
    `scales_last`.

    Of a packed array, dQ is the first plane of an array like it; the others are not written.
    """
    tile = problem.sizes.query_gradients
    workers, head = tile.warpgroups, problem.head_size
    rows = (tile.slots, workers, ROWS, head)
    steps = tiles_of((tile.stages, tile.walk, head), problem.dtype)
    ds = None
    if problem.sizes.from_memory:
        ds = tiles_of((workers, ROWS, tile.walk), problem.dtype)
    shared = _Shared(
        Ring.types(
            tile.slots,
            [tiles_of(rows, dtype) for dtype in (problem.dtype, problem.dtype, x.o.dtype)],
            copies=3 * workers,
            readers=workers,
        ),
        Ring.types(tile.stages, [steps], copies=1, readers=workers),
        Ring.types(tile.stages, [steps], copies=1, readers=workers),
        vectors_of((workers, ROWS)),
        ds,
    )
    kernel = plgpu.kernel(
        partial(_kernel, problem=problem, tile=tile),
        out_type=[
            jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
            jax.ShapeDtypeStruct(x.offset.shape, jnp.float32),
        ],
        scratch_types=[shared],
        grid=(problem.by_query(tile).grid,),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_query_gradients",
        **interpreter(on=problem.sizes.interpret),
    )
    dq, dp_offset = kernel(*x)
    return dq, dp_offset


def _kernel(*refs: Any, problem: Problem, tile: Tile) -> None:
    x, (dq, dp_offset, scratch) = Inputs(*refs[: len(Inputs._fields)]), refs[len(Inputs._fields) :]
    shared = scratch._replace(
        rows=Ring(scratch.rows, tile.slots),
        k=Ring(scratch.k, tile.stages),
        v=Ring(scratch.v, tile.stages),
    )
    me, loader = lax.axis_index("warpgroup"), tile.warpgroups
    rows, rings = (x.q, x.do, x.o), (shared.rows, shared.k, shared.v)
    pl.when(me == loader)(lambda: by_query.load(rows, x.k, x.v, rings, problem, tile))
    pl.when(me < loader)(lambda: _multiply(x, dq, dp_offset, shared, problem, tile))


def _multiply(
    x: Inputs, dq: Any, dp_offset: Any, shared: _Shared, problem: Problem, tile: Tile
) -> None:
    set_registers(tile.warpgroups, loads=False)
    program, schedule = lax.axis_index("program"), problem.by_query(tile)
    me = lax.axis_index("warpgroup")
    turns = Turns(
        tile.warpgroups, me, on=tile.turns and not problem.sizes.from_memory, held=tile.held
    )
    turns.start()

    def multiply_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        turn = schedule.turn(program, u)
        start = turn.tile * tile.own
        _, last = problem.key_steps(start, tile.own, tile.walk)
        row = start + me * ROWS
        full, end = problem.key_steps(row, ROWS, tile.walk)

        def differentiate() -> None:
            # A warpgroup beyond the last row reads the last ones instead.
            offset, dlse = (
                load(ref.at[turn.batch, turn.head, inside], PER_ROW, straight=False)
                for ref in (x.offset, x.dlse)
                for inside in [pl.ds(jnp.minimum(row, ref.shape[-1] - ROWS), ROWS)]
            )
            shared.rows.wait(tiles)
            o, do = (
                load(shared.rows.get(tiles, me, buffer=buffer), TILE).astype(jnp.float32)
                for buffer in (_O, _DO)
            )
            of_dp = -by_lane(jnp.add, o * do).sum(axis=1)  # −δ
            if not problem.scales_last:
                of_dp, dlse = (x * np.float32(problem.spec.scale) for x in (of_dp, dlse))
            if not problem.normalizes_delta:
                of_dp = of_dp + dlse
            walk = _Walk(problem, tile, shared, turns, me, tiles, steps, row, full, offset, of_dp)
            sums = (accumulator(ROWS, problem.head_size),) * (1 + problem.normalizes_delta)
            total, *of_rows = pl.run_scoped(partial(walk.run, end=end), *sums)
            if problem.normalizes_delta:
                pk, r, s = of_rows
                # What δ₀ lacks, in the units of dS: Σ dS / Σ P, and −dlse beside it.
                lacks = row_shift(r, s) - dlse
                of_dp = of_dp - lacks
                total = total - along_rows(lacks, total.shape) * pk
            shared.delta[me] = of_dp
            by_query.skip((shared.k, shared.v), turns, tile, steps, end, last)
            if problem.scales_last:
                total = total * np.float32(problem.spec.scale)
            memory = shared.rows.get(tiles, me, buffer=_Q)
            memory[...] = total.astype(problem.dtype)
            plgpu.commit_smem()
            offsets = dp_offset.at[turn.batch, turn.head, pl.ds(row, ROWS)]
            problem.store_rows(row, [(shared.delta.at[me], offsets)])
            part = problem.part(dq, turn.batch, row, ROWS, turn.head)
            plgpu.copy_smem_to_gmem(memory, part)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.rows.release(tiles)

        pl.when(turn.exists)(differentiate)
        return tiles + turn.exists.astype(jnp.int32), steps + jnp.where(turn.exists, last, 0)

    lax.fori_loop(0, schedule.turns(program), multiply_tile, (jnp.int32(0), jnp.int32(0)))
    turns.end()
    plgpu.wait_smem_to_gmem(0)


class _Walk(NamedTuple):
    """64 query rows of a warpgroup, which walk over key steps.

    `tiles` and `steps` count what the program has done before; steps before `full` take no mask.
    `offset` and `of_dp` [64]: what the exponent of P and dS add.
    """

    problem: Problem
    tile: Tile
    shared: _Shared
    turns: Turns
    me: Array
    tiles: Array
    steps: Array
    row: Array
    full: Array
    offset: Array
    of_dp: Array

    def run(self, dq: Any, pk: Any = None, *, end: Array) -> tuple[Array, ...]:
        """Σ dS k over the steps before `end`; if asked for Σ P k too, that, Σ dS and Σ P [64]."""
        none = () if pk is None else (constant((ROWS, LANES), 0, TILE),) * 2
        self.turns.enter()
        sums = lax.fori_loop(0, end, lambda t, sums: self._step(t, dq, pk, sums), none)
        self.turns.leave()
        products = (plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dq, pk) if x is not None)
        return *products, *(x.sum(axis=1) for x in sums)

    def _step(self, t: Array, dq: Any, pk: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        n, shape, dtype = self.steps + t, (ROWS, self.tile.walk), self.problem.dtype
        probs, dp = pl.run_scoped(
            partial(self._probs_and_dp, t), accumulator(*shape), accumulator(*shape)
        )
        self.shared.v.release(n)
        memory = None if self.shared.ds is None else self.shared.ds.at[self.me]
        if pk is not None:
            plgpu.wgmma(pk, as_operand(probs.astype(dtype), memory), self.shared.k.get(n))
            if memory is not None:
                plgpu.wgmma_wait(0)  # P is read before dS takes its place
        if not self.problem.scales_last:
            dp = dp * np.float32(self.problem.spec.scale)
        ds = probs * (dp + along_rows(self.of_dp, shape))
        if pk is not None:
            r, s = sums
            sums = r + by_lane(jnp.add, ds), s + by_lane(jnp.add, probs)
        self.turns.wait_to_end()
        plgpu.wgmma(dq, as_operand(ds.astype(dtype), memory), self.shared.k.get(n))
        plgpu.wgmma_wait(0)
        self.shared.k.release(n)
        return sums

    def _probs_and_dp(self, t: Array, s_sum: Any, dp_sum: Any) -> tuple[Array, Array]:
        """P and dP of step t, not rounded."""
        n, rows = self.steps + t, self.shared.rows
        self.shared.k.wait(n)
        self.turns.wait_to_begin()
        plgpu.wgmma(s_sum, rows.get(self.tiles, self.me, buffer=_Q), self.shared.k.get(n).T)
        self.shared.v.wait(n)
        plgpu.wgmma(dp_sum, rows.get(self.tiles, self.me, buffer=_DO), self.shared.v.get(n).T)
        self.turns.pass_on()
        s = plgpu.wgmma_accumulator_load(s_sum, wait_n=1)
        log2_p = s * np.float32(self.problem.log2_unit) + along_rows(self.offset, s.shape)
        if self.problem.masks_steps(self.tile.walk):
            mask = partial(self.problem.mask_keys, log2_p, self.row, t * self.tile.walk)
            log2_p = lax.cond(t >= self.full, mask, lambda: log2_p)
        probs = jnp.exp2(log2_p)
        return probs, plgpu.wgmma_accumulator_load(dp_sum, wait_n=0)
