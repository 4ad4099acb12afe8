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
from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine.exchange import Handover
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
from pallas_kernels.gpu.hopper.machine.ping_pong import Turns
from pallas_kernels.gpu.hopper.machine.pipeline import Ring
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem


def query_gradients(x: Inputs, problem: Problem) -> tuple[Array, Array]:
    """dQ, and what dS adds to dP, [B, N, T], of `vector_rows`: −δ + dlse, times scale unless
    `scales_last`.

    Of a packed array, dQ is the first plane of an array like it; the others are not written.

    Raises:
      ValueError: tiles that split what has but one sum, or are ahead with two.
    """
    tile = problem.sizes.query_gradients
    if tile.ahead and problem.normalizes_delta:
        raise ValueError(f"ahead=True is of one sum, not of delta='normalized', got {tile}")
    if tile.ahead and problem.rounds_products:
        raise ValueError(f"one sum for every long step takes no ahead, got {tile}")
    if tile.split and not problem.normalizes_delta:
        raise ValueError(f"split=True is of delta='normalized' alone, got {tile}")
    workers, head = tile.warpgroups, problem.head_size
    own = tile.own // ROWS
    rows = (tile.slots, own, ROWS, head)
    loaded = [problem.dtype, problem.dtype] + ([] if problem.is_wide else [x.o.dtype])
    k, v = (
        tiles_of((stages, tile.walk, head), problem.dtype)
        for stages in (tile.stages, tile.stages_of_values)
    )
    operand = None
    if problem.sizes.from_memory:
        operand = tiles_of((workers, ROWS, tile.walk), problem.dtype)
    shared = Shared(
        Ring.types(
            tile.slots,
            [tiles_of(rows, dtype) for dtype in loaded],
            copies=len(loaded) * own,
            readers=workers,
        ),
        Ring.types(tile.stages, [k], copies=1, readers=workers),
        Ring.types(tile.stages_of_values, [v], copies=1, readers=1 if tile.split else workers),
        vectors_of((own, ROWS)),
        operand,
        Handover.types() if tile.split else None,
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
        v=Ring(scratch.v, tile.stages_of_values),
    )
    me, loader = lax.axis_index("warpgroup"), tile.warpgroups
    rows, rings = (x.q, x.do, x.o), (shared.rows, shared.k, shared.v)
    if problem.is_wide:
        rows = rows[:O]
    most = problem.is_wide
    pl.when(me == loader)(lambda: producer.load(rows, x.k, x.v, rings, problem, tile, most=most))
    if tile.split:
        shared = shared._replace(probs=Handover(scratch.probs))
    multiply = cooperative_query_gradients.multiply if tile.split else _multiply
    pl.when(me < loader)(lambda: multiply(x, dq, dp_offset, shared, problem, tile))


def _multiply(
    x: Inputs, dq: Any, dp_offset: Any, shared: Shared, problem: Problem, tile: Tile
) -> None:
    set_registers(tile.warpgroups, loads=False, most=problem.is_wide)
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
            offset, dlse = (of_rows(vectors, turn, row) for vectors in (x.offset, x.dlse))
            shared.rows.wait(tiles)
            of_dp = -delta(x.o, shared.rows, tiles, me, turn, row, problem)
            if not problem.scales_last:
                of_dp, dlse = (x * np.float32(problem.spec.scale) for x in (of_dp, dlse))
            if not problem.normalizes_delta:
                of_dp = of_dp + dlse
            walk = _Walk(problem, tile, shared, turns, me, tiles, steps, row, full, offset, of_dp)
            total, *others = walk.totals(end)
            if problem.normalizes_delta:
                pk, r, s = others
                # What δ₀ lacks, in the units of dS: Σ dS / Σ P, and −dlse beside it.
                lacks = row_shift(r, s) - dlse
                of_dp = of_dp - lacks
                total = total - along_rows(lacks, total.shape) * pk
            shared.delta[me] = of_dp
            producer.skip((shared.k, shared.v), turns, tile, steps, end, last)
            if problem.scales_last:
                total = total * np.float32(problem.spec.scale)
            memory = shared.rows.get(tiles, me, buffer=Q)
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
    shared: Shared
    turns: Turns
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

        problem, walk = self.problem, self.tile.walk

        def product(first: Array, last: Array, dq: Any) -> Array:
            lax.fori_loop(first, last, lambda t, none: self._step(t, dq, None, none), ())
            return plgpu.wgmma_accumulator_load(dq, wait_n=None)

        def long_step(i: Array, total: Array) -> Array:
            steps = problem.parts_of_long_step(i, walk, end)
            return total + problem.rounded(pl.run_scoped(partial(product, *steps), *sums))

        self.turns.enter()
        none = constant((ROWS, problem.head_size), 0, TILE)
        total = lax.fori_loop(*problem.long_steps(walk, end), long_step, none)
        self.turns.leave()
        return (total,)

    def _run(self, dq: Any, pk: Any = None, *, end: Array) -> tuple[Array, ...]:
        """Σ dS k over the steps before `end`; if asked for Σ P k too, that, Σ dS and Σ P [64]."""
        if self.tile.ahead:
            self._run_ahead(dq, end)
            return (plgpu.wgmma_accumulator_load(dq, wait_n=None),)
        none = () if pk is None else (constant((ROWS, LANES), 0, TILE),) * 2
        self.turns.enter()
        sums = lax.fori_loop(0, end, lambda t, sums: self._step(t, dq, pk, sums), none)
        self.turns.leave()
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
        self.turns.wait_to_end()
        self._add(dq, ds.astype(dtype), n)
        plgpu.wgmma_wait(0)
        self.shared.k.release(n)
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
        self.shared.k.release(self.steps + end - 1)

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
        """P and dP of step t, not rounded; end_step: starts dS k of the step before, if `ahead`."""
        n, me, row, interpret = self.steps + t, self.me, self.row, self.problem.sizes.interpret
        if self.problem.is_wide:  # no registers are left for what a step can compute anew
            zero = opaque_zero(n, interpret=interpret)
            me, row = me + zero, row + zero
        q, do = (self.shared.rows.get(self.tiles, me, buffer=buffer) for buffer in (Q, DO))
        self.shared.k.wait(n)
        self.turns.wait_to_begin()
        if end_step is not None:
            end_step()
        s = begin_product(q, self.shared.k.get(n), interpret=interpret)
        self.shared.v.wait(n)
        dp = begin_product(do, self.shared.v.get(n), interpret=interpret)
        self.turns.pass_on()
        plgpu.wgmma_wait(1)
        if end_step is not None:
            self.shared.k.release(n - 1)
        p = probs(s, self.offset, row, t, self.full, self.tile.walk, self.problem)
        plgpu.wgmma_wait(0)
        self.shared.v.release(n)
        return p, self.problem.rounded(dp)
