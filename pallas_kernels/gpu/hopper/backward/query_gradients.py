"""The kernel of dQ, and of δ, which that of dK and dV reads.

A warpgroup owns 64 query rows and walks over the key steps that they see. Rows have a program each
and keys another, so that every sum is taken in a fixed order: no atomics, the same bits on every
run. The arithmetic is that of `lowprec_attn.arithmetic.backward` with P and dS rounded. For
`delta='normalized'` Σ dS, Σ P and Σ P k are summed beside dQ, and the last corrects it in the end;
where a warpgroup has no registers for both, two share 64 rows: `cooperative_query_gradients`.
"""

from collections.abc import Callable
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
from pallas_kernels.gpu.hopper import producer
from pallas_kernels.gpu.hopper.backward import cooperative_query_gradients
from pallas_kernels.gpu.hopper.backward.query_operands import (
    DO,
    Inputs,
    O,
    Q,
    Shared,
    delta,
    of_rows,
    probs,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    TILE,
    along_rows,
    by_lane,
    constant,
    tiles_of,
    vectors_of,
)
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem


def query_gradients(x: Inputs, problem: Problem) -> tuple[Array, Array]:
    """dQ, and what dS adds to dP, [B, N, T], of `vector_rows`: −δ + dlse, times scale unless
    `scales_last`.

    Of a packed array, dQ is the first plane of an array like it; the others are not written.
    """
    tile = problem.sizes.query_gradients
    consumers, head = tile.warpgroups, problem.head_size
    own = tile.owned // ROWS
    rows = (tile.owned_stages, own, ROWS, head)
    loaded = [problem.dtype, problem.dtype] + ([] if problem.is_wide else [x.o.dtype])
    k, v = (
        tiles_of((stages, tile.step, head), problem.dtype)
        for stages in (tile.stages, tile.stages_of_v)
    )
    operand = None
    if problem.sizes.from_memory:
        operand = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    shared = Shared(
        Pipeline.types(
            tile.owned_stages,
            [tiles_of(rows, dtype) for dtype in loaded],
            copies=len(loaded) * own,
            consumers=consumers,
        ),
        Pipeline.types(tile.stages, [k], copies=1, consumers=consumers),
        Pipeline.types(
            tile.stages_of_v, [v], copies=1, consumers=1 if tile.cooperative else consumers
        ),
        vectors_of((own, ROWS)),
        operand,
        Exchange.types() if tile.cooperative else None,
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
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_query_gradients",
        **interpreter(on=problem.sizes.interpret),
    )
    dq, dp_offset = kernel(*x)
    return dq, dp_offset


def _kernel(*refs: Any, problem: Problem, tile: BackwardTile) -> None:
    x, (dq, dp_offset, scratch) = Inputs(*refs[: len(Inputs._fields)]), refs[len(Inputs._fields) :]
    shared = scratch._replace(
        rows=Pipeline(scratch.rows, tile.owned_stages),
        k=Pipeline(scratch.k, tile.stages),
        v=Pipeline(scratch.v, tile.stages_of_v),
    )
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    rows, pipelines = (x.q, x.do, x.o), (shared.rows, shared.k, shared.v)
    if problem.is_wide:
        rows = rows[:O]
    load = partial(producer.load_query_tiles, most=problem.is_wide)
    pl.when(me == consumers)(lambda: load(rows, x.k, x.v, pipelines, problem, tile))
    if tile.cooperative:
        shared = shared._replace(probs=Exchange(scratch.probs))
    consume = cooperative_query_gradients.consume if tile.cooperative else _consume
    pl.when(me < consumers)(lambda: consume(x, dq, dp_offset, shared, problem, tile))


def _consume(
    x: Inputs, dq: Any, dp_offset: Any, shared: Shared, problem: Problem, tile: BackwardTile
) -> None:
    set_registers(tile.warpgroups, producer=False, most=problem.is_wide)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    me = lax.axis_index("warpgroup")
    ping_pong = PingPong(
        tile.warpgroups, me, on=tile.ping_pong and not problem.sizes.from_memory, held=tile.held
    )
    ping_pong.start()

    def consume_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned
        _, last = problem.key_steps(start, tile.owned, tile.step)
        row = start + me * ROWS
        full, end = problem.key_steps(row, ROWS, tile.step)

        def differentiate() -> None:
            offset, dlse = (of_rows(vectors, work, row) for vectors in (x.offset, x.dlse))
            shared.rows.consumer_wait(tiles)
            of_dp = -delta(x.o, shared.rows, tiles, me, work, row, problem)
            if not problem.scales_last:
                of_dp, dlse = (x * np.float32(problem.spec.scale) for x in (of_dp, dlse))
            if not problem.normalizes_delta:
                of_dp = of_dp + dlse
            walk = _Walk(
                problem, tile, shared, ping_pong, me, tiles, steps, row, full, offset, of_dp
            )
            total, *others = walk.totals(end)
            if problem.normalizes_delta:
                pk, r, s = others
                # What δ₀ lacks, in the units of dS: Σ dS / Σ P, and −dlse beside it.
                lacks = row_shift(r, s) - dlse
                of_dp = of_dp - lacks
                total = total - along_rows(lacks, total.shape) * pk
            shared.delta[me] = of_dp
            producer.skip((shared.k, shared.v), ping_pong, tile, steps, end, last)
            if problem.scales_last:
                total = total * np.float32(problem.spec.scale)
            memory = shared.rows.get(tiles, me, buffer=Q)
            memory[...] = total.astype(problem.dtype)
            plgpu.commit_smem()
            offsets = dp_offset.at[work.batch, work.head, pl.ds(row, ROWS)]
            problem.store_rows(row, [(shared.delta.at[me], offsets)])
            part = problem.part(dq, work.batch, row, ROWS, work.head)
            plgpu.copy_smem_to_gmem(memory, part)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.rows.consumer_release(tiles)

        pl.when(work.is_valid)(differentiate)
        return tiles + work.is_valid.astype(jnp.int32), steps + jnp.where(work.is_valid, last, 0)

    lax.fori_loop(0, scheduler.count(program), consume_tile, (jnp.int32(0), jnp.int32(0)))
    ping_pong.end()
    plgpu.wait_smem_to_gmem(0)


class _Walk(NamedTuple):
    """64 query rows of a warpgroup, which walk over key steps.

    `tiles` and `steps` count what the program has done before; steps before `full` take no mask.
    `offset` and `of_dp` [64]: what the exponent of P and dS add.
    """

    problem: Problem
    tile: BackwardTile
    shared: Shared
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Array
    row: Array
    full: Array
    offset: Array
    of_dp: Array

    def totals(self, end: Array) -> tuple[Array, ...]:
        """Σ dS k over the steps before `end`; and what `_run` gives beside it."""
        sums = (accumulator(ROWS, self.problem.head_size),) * (1 + self.problem.normalizes_delta)
        if not self.problem.rounds_products:
            return pl.run_scoped(partial(self._run, end=end), *sums)

        problem, walk = self.problem, self.tile.step

        def product(first: Array, last: Array, dq: Any) -> Array:
            lax.fori_loop(first, last, lambda t, none: self._step(t, dq, None, none), ())
            return plgpu.wgmma_accumulator_load(dq, wait_n=None)

        def long_step(i: Array, total: Array) -> Array:
            steps = problem.parts_of_long_step(i, walk, end)
            return total + problem.rounded(pl.run_scoped(partial(product, *steps), *sums))

        self.ping_pong.enter()
        none = constant((ROWS, problem.head_size), 0, TILE)
        total = lax.fori_loop(*problem.long_steps(walk, end), long_step, none)
        self.ping_pong.leave()
        return (total,)

    def _run(self, dq: Any, pk: Any = None, *, end: Array) -> tuple[Array, ...]:
        """Σ dS k over the steps before `end`; if asked for Σ P k too, that, Σ dS and Σ P [64]."""
        if self.tile.overlap_steps:
            self._run_ahead(dq, end)
            return (plgpu.wgmma_accumulator_load(dq, wait_n=None),)
        none = () if pk is None else (constant((ROWS, LANES), 0, TILE),) * 2
        self.ping_pong.enter()
        sums = lax.fori_loop(0, end, lambda t, sums: self._step(t, dq, pk, sums), none)
        self.ping_pong.leave()
        products = (plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dq, pk) if x is not None)
        return *products, *(x.sum(axis=1) for x in sums)

    def _step(self, t: Array, dq: Any, pk: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        n, dtype = self.steps + t, self.problem.dtype
        probs, dp = self._probs_and_dp(t)
        if pk is not None:
            self._add(pk, probs.astype(dtype), n)
            if self.shared.operand is not None:
                plgpu.wgmma_wait(0)  # P is read before dS takes its place
        ds = self._ds(probs, dp)
        if pk is not None:
            r, s = sums
            sums = r + by_lane(jnp.add, ds), s + by_lane(jnp.add, probs)
        self.ping_pong.wait_to_end()
        self._add(dq, ds.astype(dtype), n)
        plgpu.wgmma_wait(0)
        self.shared.k.consumer_release(n)
        return sums

    def _run_ahead(self, dq: Any, end: Array) -> None:
        """Σ dS k, where dS k of a step starts in the same turn as S and dP of the next."""

        def step(t: Array, before: Array | None) -> Array:
            factors = self._probs_and_dp(t, None if before is None else partial(add, t - 1, before))
            return self._ds(*factors).astype(self.problem.dtype)

        def add(t: Array, ds: Array) -> None:
            self._add(dq, ds, self.steps + t)

        ds = lax.fori_loop(1, end, step, step(jnp.int32(0), None))
        add(end - 1, ds)
        plgpu.wgmma_wait(0)
        self.shared.k.consumer_release(self.steps + end - 1)

    def _add(self, total: Any, left: Array, n: Array) -> None:
        """Starts left k of the n-th step of the program."""
        memory = None if self.shared.operand is None else self.shared.operand.at[self.me]
        plgpu.wgmma(total, as_operand(left, memory), self.shared.k.get(n))

    def _ds(self, probs: Array, dp: Array) -> Array:
        """dS, not rounded."""
        if not self.problem.scales_last:
            dp = dp * np.float32(self.problem.spec.scale)
        return probs * (dp + along_rows(self.of_dp, dp.shape))

    def _probs_and_dp(
        self, t: Array, end_step: Callable[[], None] | None = None
    ) -> tuple[Array, Array]:
        """P and dP of step t, not rounded.

        end_step: starts dS k of the step before, if `overlap_steps`.
        """
        n, me, row, interpret = self.steps + t, self.me, self.row, self.problem.sizes.interpret
        if self.problem.is_wide:  # no registers are left for what a step can compute anew
            zero = opaque_zero(n, interpret=interpret)
            me, row = me + zero, row + zero
        q, do = (self.shared.rows.get(self.tiles, me, buffer=buffer) for buffer in (Q, DO))
        self.shared.k.consumer_wait(n)
        self.ping_pong.wait_to_begin()
        if end_step is not None:
            end_step()
        s = begin_product(q, self.shared.k.get(n), interpret=interpret)
        self.shared.v.consumer_wait(n)
        dp = begin_product(do, self.shared.v.get(n), interpret=interpret)
        self.ping_pong.arrive()
        plgpu.wgmma_wait(1)
        if end_step is not None:
            self.shared.k.consumer_release(n - 1)
        p = probs(s, self.offset, row, t, self.full, self.tile.step, self.problem)
        plgpu.wgmma_wait(0)
        self.shared.v.consumer_release(n)
        return p, self.problem.rounded(dp)
