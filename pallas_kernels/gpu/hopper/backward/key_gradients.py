"""The kernel of dK and dV.

A warpgroup owns 64 keys and walks over the query steps that see them, head after head of those that
share the keys. Sᵀ and dPᵀ have a key per row, so that Pᵀ and dSᵀ are left operands as they are. The
arithmetic is that of `lowprec_attn.arithmetic.backward` with P and dS rounded. Where a warpgroup
has no registers for two sums, two warpgroups share 64 keys: `cooperative_key_gradients`.
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

from pallas_kernels.gpu.hopper import producer
from pallas_kernels.gpu.hopper.backward import cooperative_key_gradients, key_operands
from pallas_kernels.gpu.hopper.backward.dq_accumulator import DqAccumulator
from pallas_kernels.gpu.hopper.backward.key_operands import Inputs, Shared, Steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.instruction_order import unknown_zero
from pallas_kernels.gpu.hopper.machine.layouts import TILE, constant, tiles_of, vectors_of
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


def key_gradients(
    x: Inputs, problem: Problem, *, gradients: Any | None = None, dq: Any | None = None
) -> Any:
    """dK and dV.

    Args:
      x, problem: the call.
      gradients: a packed array's gradient, as a mutable array, whose planes 1 and 2 are written.
      dq: the sums of `dq_accumulator`, as a mutable array, to which dS k is added.
    """
    tile = problem.sizes.key_gradients
    consumers, head = tile.warpgroups, problem.head_size
    own = tile.owned // ROWS
    keys = tiles_of((tile.owned_stages, own, ROWS, head), problem.dtype)
    queries = tiles_of((tile.stages, tile.step, head), problem.dtype)
    offsets = vectors_of((tile.stages, tile.step))
    operand = None
    if problem.sizes.from_memory:
        operand = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    shared = Shared(
        Pipeline.types(tile.owned_stages, [keys, keys], copies=2 * own, consumers=consumers),
        Pipeline.types(tile.stages, [queries, offsets], copies=2, consumers=consumers),
        Pipeline.types(tile.stages, [queries, offsets], copies=2, consumers=consumers),
        operand,
        None if dq is None else DqAccumulator.shared(problem, tile),
        Exchange.types() if tile.cooperative else None,
    )
    shape = (problem.batch, problem.keys, problem.kv_heads, head)
    kernel = plgpu.kernel(
        partial(_kernel, problem=problem, tile=tile),
        out_type=[jax.ShapeDtypeStruct(shape, problem.dtype)] * (0 if problem.packed else 2),
        scratch_types=[shared],
        grid=(problem.by_key(tile).grid,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_key_gradients",
        **interpreter(on=problem.sizes.interpret),
    )
    return kernel(*x, *(ref for ref in (dq, gradients) if ref is not None))


def _kernel(*refs: Any, problem: Problem, tile: BackwardTile) -> None:
    x, (*out, scratch) = Inputs(*refs[: len(Inputs._fields)]), refs[len(Inputs._fields) :]
    dq = None if scratch.dq is None else out.pop(0)
    dk, dv = out * 2 if problem.packed else out
    shared = scratch._replace(
        keys=Pipeline(scratch.keys, tile.owned_stages),
        q=Pipeline(scratch.q, tile.stages),
        do=Pipeline(scratch.do, tile.stages),
    )
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    pl.when(me == consumers)(lambda: producer.load_key_tiles(x, shared, problem, tile))
    if tile.cooperative:
        shared = shared._replace(probs=Exchange(scratch.probs))
        pl.when(me < consumers)(
            lambda: cooperative_key_gradients.consume(dk, dv, shared, problem, tile)
        )
        return
    sums = None if dq is None else DqAccumulator(dq, scratch.dq, problem, tile, me)
    pl.when(me < consumers)(lambda: _consume(dk, dv, sums, shared, problem, tile))


def _consume(
    dk: Any,
    dv: Any,
    sums: DqAccumulator | None,
    shared: Shared,
    problem: Problem,
    tile: BackwardTile,
) -> None:
    set_registers(tile.warpgroups, producer=False, most=sums is not None)
    program = lax.axis_index("program")
    me = lax.axis_index("warpgroup")
    ping_pong = PingPong(
        tile.warpgroups, me, on=tile.ping_pong and not problem.sizes.from_memory, held=tile.held
    )
    ping_pong.start()

    def begin(work: WorkTile, tiles: Array, start: Array, steps: Steps) -> Callable[[], None]:
        key = start + me * ROWS
        walk = _Walk(problem, tile, shared, ping_pong, me, tiles, steps, key, work, sums)
        return partial(differentiate, walk, work, tiles, key)

    def differentiate(walk: _Walk, work: WorkTile, tiles: Array, key: Array) -> None:
        shared.keys.consumer_wait(tiles)
        copies = []
        for buffer, total in enumerate(walk.totals()):
            if buffer == 0 and problem.scales_last:
                total = total * np.float32(problem.spec.scale)
            memory = shared.keys.get(tiles, me, buffer=buffer)
            memory[...] = total.astype(problem.dtype)
            place = (work.batch, key, ROWS, work.head)
            copies.append((memory, problem.part((dk, dv)[buffer], *place, plane=1 + buffer)))
        key_operands.store(copies)
        shared.keys.consumer_release(tiles)

    key_operands.each_tile(program, problem, tile, begin)
    ping_pong.end()
    plgpu.wait_smem_to_gmem(0)


class _Walk(NamedTuple):
    """64 keys of a warpgroup, which walk over query steps; `tiles`: what was done before."""

    problem: Problem
    tile: BackwardTile
    shared: Shared
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Steps
    key: Array
    work: WorkTile
    sums: DqAccumulator | None

    def totals(self) -> tuple[Array, ...]:
        """Σ dSᵀ q and Σ Pᵀ dO."""
        problem, walk, steps = self.problem, self.tile.step, self.steps
        sums = (accumulator(ROWS, problem.head_size),) * 2
        if not problem.rounds_products:
            return pl.run_scoped(self._run, *sums)
        begin, end = steps.begin, steps.begin + steps.length
        before, last = problem.long_steps(walk, end, begin)

        def product(first: Array, last: Array, dk: Any, dv: Any) -> tuple[Array, ...]:
            lax.fori_loop(first, last, lambda t, _: self._step(t, dk, dv), None)
            return tuple(plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dk, dv))

        def long_step(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            head, step = lax.div(i, last - before), lax.rem(i, last - before)
            done = head * steps.length - begin
            first, end_of_step = problem.parts_of_long_step(before + step, walk, end, begin)
            found = pl.run_scoped(partial(product, done + first, done + end_of_step), *sums)
            return tuple(x + problem.rounded(y) for x, y in zip(totals, found, strict=True))

        self.ping_pong.enter()
        none = (constant((ROWS, problem.head_size), 0, TILE),) * 2
        totals = lax.fori_loop(0, (last - before) * problem.group, long_step, none)
        self.ping_pong.leave()
        return totals

    def _run(self, dk: Any, dv: Any) -> tuple[Array, ...]:
        """The same, in one sum each."""
        end = self._end
        if self.tile.overlap_steps:
            pl.when(end > 0)(lambda: self._run_ahead(dk, dv, end))
            return tuple(plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dk, dv))
        if self.sums is not None:
            pl.when(end > 0)(lambda: self._wait_for_queries(jnp.int32(0)))
        self.ping_pong.enter()
        lax.fori_loop(0, end, lambda t, _: self._step(t, dk, dv), None)
        self.ping_pong.leave()
        if self.sums is not None:
            self._end_sums(self.sums, end)
        return tuple(plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dk, dv))

    @property
    def _end(self) -> Array:
        """How many steps there are."""
        return self.steps.length * self.problem.group

    def _wait_for_queries(self, t: Array) -> None:
        """Until q and dO of step t are there.

        With dQ, a step before they are needed, while products run: nothing but these is between the
        products that end a step and those that begin the next.
        """
        for pipeline in (self.shared.q, self.shared.do):
            pipeline.consumer_wait(self.steps.first + t)

    def _run_ahead(self, dk: Any, dv: Any, end: Array) -> None:
        """The same where the products that end a step start in the same turn as those of the
        next."""

        def step(t: Array, before: tuple[Array, Array] | None) -> tuple[Array, Array]:
            end_step = None if before is None else partial(add, t - 1, *before)
            return self._operands(*self._factors_of_ds(t, end_step))

        def add(t: Array, probs: Array, ds: Array) -> None:
            self._add(dk, dv, probs, ds, t)

        operands = lax.fori_loop(1, end, step, step(jnp.int32(0), None))
        add(end - 1, *operands)
        plgpu.wgmma_wait(0)
        self._release(end - 1)

    def _step(self, t: Array, dk: Any, dv: Any) -> None:
        if self.sums is not None:
            self.ping_pong.wait_to_begin()
        operands = self._operands(*self._factors_of_ds(t))
        multiply = partial(self._add, dk, dv, *operands, t)
        if self.sums is None:
            self.ping_pong.wait_to_end()
            multiply()
        else:
            self.sums.write(operands[1], t)
            self.ping_pong.wait_to_end()
            self._add_before(self.sums, t, multiply)
            pl.when(t + 1 < self._end)(lambda: self._wait_for_queries(t + 1))
        plgpu.wgmma_wait(0)
        self._release(t)

    def _operands(self, probs: Array, shifted_dp: Array) -> tuple[Array, Array]:
        """Pᵀ and dSᵀ, rounded."""
        dtype = self.problem.dtype
        return probs.astype(dtype), (probs * shifted_dp).astype(dtype)

    def _add(self, dk: Any, dv: Any, probs: Array, ds: Array, t: Array) -> None:
        """Starts Pᵀ dO and dSᵀ q of step t."""
        n = self.steps.first + t
        memory = None if self.shared.operand is None else self.shared.operand.at[self.me]
        plgpu.wgmma(dv, as_operand(probs, memory), self.shared.do.get(n))
        if memory is not None:
            plgpu.wgmma_wait(0)  # Pᵀ is read before dSᵀ takes its place
        plgpu.wgmma(dk, as_operand(ds, memory), self.shared.q.get(n))

    def _release(self, t: Array) -> None:
        """q and dO of step t are needed no more."""
        for pipeline in (self.shared.do, self.shared.q):
            pipeline.consumer_release(self.steps.first + t)

    def _add_before(self, sums: DqAccumulator, t: Array, multiply: Callable[[], None]) -> None:
        """Adds what step t − 1 gives to dQ while the products that `multiply` starts run."""
        before = t - 1

        def add() -> None:
            def product(total: Any) -> None:
                zero = unknown_zero(self.steps.first + t)
                sums.multiply(total, before, partial(self.shared.keys.get, self.tiles), zero)
                multiply()
                # It is done when no more products are under way than those of `multiply`.
                found = plgpu.wgmma_accumulator_load(total, wait_n=2)
                sums.release(before)
                sums.add(found, self._place(before))

            pl.run_scoped(product, accumulator(ROWS, ROWS))

        def pass_by() -> None:
            pl.when(t > 0)(lambda: sums.release(before))
            multiply()

        pl.when(t > 0)(lambda: sums.wait(before))
        lax.cond((t > 0) & sums.is_mine(before), add, pass_by)

    def _end_sums(self, sums: DqAccumulator, end: Array) -> None:
        """Adds what the last step gives to dQ; nobody reads k for it any more."""
        last = end - 1

        def add() -> None:
            def product(total: Any) -> None:
                sums.multiply(total, last, partial(self.shared.keys.get, self.tiles), last * 0)
                sums.add(plgpu.wgmma_accumulator_load(total, wait_n=0), self._place(last))

            pl.run_scoped(product, accumulator(ROWS, ROWS))

        def step() -> None:
            sums.wait(last)
            pl.when(sums.is_mine(last))(add)
            sums.release(last)

        pl.when(end > 0)(step)
        sums.drain(end)

    def _place(self, t: Array) -> tuple[Array, ...]:
        """See `DqAccumulator.add`."""
        head, step = self.steps.of(t, self.work.head, self.problem.group)
        return self.work.batch, step * self.tile.step, head, self.work.block

    def _factors_of_ds(
        self, t: Array, end_step: Callable[[], None] | None = None
    ) -> tuple[Array, Array]:
        """Pᵀ and (dP − δ)ᵀ of the t-th step, not rounded; the latter times scale, if not last.

        end_step: starts the products of the step before, if `overlap_steps`.
        """
        n, problem, q, do = self.steps.first + t, self.problem, self.shared.q, self.shared.do
        interpret = problem.sizes.interpret
        _, step = self.steps.of(t, self.work.head, problem.group)
        row = step * self.tile.step
        me, key = self.me, self.key
        if self.sums is not None:
            me, key = (x + unknown_zero(n) for x in (me, key))
        k, v = (self.shared.keys.get(self.tiles, me, buffer=b) for b in (0, 1))
        if self.sums is None:
            q.consumer_wait(n)
            if self.tile.overlap_steps:  # in a turn, nothing is to come between products
                do.consumer_wait(n)
            self.ping_pong.wait_to_begin()
        if end_step is not None:
            end_step()
        s = begin_product(k, q.get(n), interpret=interpret)
        if end_step is not None:  # dP takes the registers of what it multiplies
            plgpu.wgmma_wait(1)
            self._release(t - 1)
        if self.sums is None and not self.tile.overlap_steps:
            do.consumer_wait(n)
        dp = begin_product(v, do.get(n), interpret=interpret)
        self.ping_pong.arrive()
        plgpu.wgmma_wait(1)
        probs = key_operands.probs(s, q.get(n, buffer=1), key, row, problem)
        plgpu.wgmma_wait(0)
        # Added before P is rounded: its registers are free when those of the rounded P are needed.
        return probs, key_operands.shifted_dp(dp, do.get(n, buffer=1), problem)
