"""The mainloop of dK and dV: takes 64 keys of a consumer over the queries that see them.

A step has four products, or five with a part of dQ. `BackwardTile.held` and `overlap_steps` decide
which of them share a turn of the ping-pong, and when each of them is started. The backward pass of
FlashAttention-3 has the same products in one kernel, dQ included (`dq_accumulator`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.products import cap_slope
from pallas_kernels.gpu.hopper.backward import key_operands
from pallas_kernels.gpu.hopper.backward.dq_accumulator import DqAccumulator
from pallas_kernels.gpu.hopper.backward.key_operands import KeyIds, KeyMemory, Steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.instruction_order import unknown_zero
from pallas_kernels.gpu.hopper.machine.layouts import TILE, constant
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.types import Accumulator
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import Segments
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class Keys(NamedTuple):
    """64 keys of a consumer warpgroup.

    Attributes:
      problem, tile, shared: the kernel's problem, tile and shared memory.
      ping_pong: the ping-pong with the other consumers.
      me: the index of the consumer.
      tiles: how many the program has done before.
      steps: the query steps.
      key: the first key.
      work: the program's tile.
      dq: the accumulator of dQ, if dQ is summed here.
      segments: the kernel's ids, if ids hide keys.
      ids: the ids of the keys, once the tile has begun.
    """

    problem: Problem
    tile: BackwardTile
    shared: KeyMemory
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Steps
    key: Array
    work: WorkTile
    dq: DqAccumulator | None
    segments: Segments | None
    ids: KeyIds | None = None

    @property
    def end(self) -> Array:
        """How many steps there are, of all heads."""
        return self.steps.length * self.problem.group


def mainloop(keys: Keys) -> tuple[Array, ...]:
    """Returns Σ dSᵀ q and Σ Pᵀ dO over all steps."""
    problem = keys.problem
    sums = tuple(accumulator(ROWS, n) for n in (problem.head_size, problem.value_size))
    if problem.rounds_products:
        return _long_steps(sums, keys)
    if keys.tile.overlap_steps:
        return pl.run_scoped(partial(_run_overlapped, keys=keys), *sums)
    return pl.run_scoped(partial(_run, keys=keys), *sums)


def _run(dk: Accumulator, dv: Accumulator, *, keys: Keys) -> tuple[Array, ...]:
    end = keys.end
    if keys.dq is not None:
        pl.when(end > 0)(lambda: _wait_for_queries(jnp.int32(0), keys))
    # A held turn begins before the first step. Its holder starts the products that end a step and
    # those that begin the next, with no other consumer's products in between.
    keys.ping_pong.enter()
    lax.fori_loop(0, end, lambda t, _: _step(t, dk, dv, keys), None)
    keys.ping_pong.leave()
    if keys.dq is not None:
        _add_last_to_dq(keys.dq, end, keys)
    return _loaded(dk, dv)


def _run_overlapped(dk: Accumulator, dv: Accumulator, *, keys: Keys) -> tuple[Array, ...]:
    """Runs all steps. Products that end a step start in the same turn as those of the next."""
    end = keys.end

    def step(t: Array, before: tuple[Array, Array] | None) -> tuple[Array, Array]:
        end_step = None if before is None else partial(add, t - 1, *before)
        return _rounded(*_factors_of_ds(t, keys, end_step), keys.problem)

    def add(t: Array, probs: Array, ds: Array) -> None:
        _begin_sums(dk, dv, probs, ds, t, keys)

    # Pᵀ and dSᵀ are carried to the next step after rounding, in half the registers of float32.
    def run() -> None:
        operands = lax.fori_loop(1, end, step, step(jnp.int32(0), None))
        add(end - 1, *operands)
        plgpu.wgmma_wait(0)
        _release(end - 1, keys)

    pl.when(end > 0)(run)
    return _loaded(dk, dv)


def _loaded(dk: Accumulator, dv: Accumulator) -> tuple[Array, ...]:
    return tuple(plgpu.wgmma_accumulator_load(x, wait_n=None) for x in (dk, dv))


def _long_steps(sums: tuple[Accumulator, ...], keys: Keys) -> tuple[Array, ...]:
    """Returns Σ dSᵀ q and Σ Pᵀ dO, where each long step has its own, rounded sum (`published`)."""
    problem, step, steps = keys.problem, keys.tile.step, keys.steps
    begin, end = steps.begin, steps.begin + steps.length
    before, last = problem.long_steps(step, end, begin)

    # Parts of long steps are counted head by head.
    def product(first: Array, last: Array, dk: Accumulator, dv: Accumulator) -> tuple[Array, ...]:
        lax.fori_loop(first, last, lambda t, _: _step(t, dk, dv, keys), None)
        return _loaded(dk, dv)

    def long_step(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        head, of_head = lax.div(i, last - before), lax.rem(i, last - before)
        done = head * steps.length - begin
        first, end_of_step = problem.parts_of_long_step(before + of_head, step, end, begin)
        found = pl.run_scoped(partial(product, done + first, done + end_of_step), *sums)
        return tuple(x + problem.rounded(y) for x, y in zip(totals, found, strict=True))

    keys.ping_pong.enter()
    none = (constant((ROWS, problem.head_size), 0, TILE),) * 2
    totals = lax.fori_loop(0, (last - before) * problem.group, long_step, none)
    keys.ping_pong.leave()
    return totals


def _step(t: Array, dk: Accumulator, dv: Accumulator, keys: Keys) -> None:
    dq, ping_pong = keys.dq, keys.ping_pong
    if dq is not None:
        ping_pong.wait_to_begin()
    probs, ds = _rounded(*_factors_of_ds(t, keys), keys.problem)
    begin_sums = partial(_begin_sums, dk, dv, probs, ds, t, keys)
    if dq is None:
        ping_pong.wait_to_end()
        begin_sums()
    else:
        # dSᵀ goes through shared memory, because the other consumer needs it for its block of dQ.
        dq.write(ds, t)
        ping_pong.wait_to_end()
        _add_to_dq(dq, t, begin_sums, keys)
        pl.when(t + 1 < keys.end)(lambda: _wait_for_queries(t + 1, keys))
    plgpu.wgmma_wait(0)
    _release(t, keys)


def _factors_of_ds(
    t: Array, keys: Keys, end_step: Callable[[], None] | None = None
) -> tuple[Array, Array, Array]:
    """Returns Pᵀ of the t-th step, and the two factors of dSᵀ: Pᵀ and (dP − δ)ᵀ.

    With a soft cap the first Pᵀ is already rounded, and the second is multiplied by the derivative
    of the cap. Otherwise neither is rounded. (dP − δ)ᵀ is multiplied by scale unless `scales_last`.

    end_step: starts the products of the step before, if `overlap_steps`.
    """
    problem, tile, ping_pong = keys.problem, keys.tile, keys.ping_pong
    n, q, do = keys.steps.first + t, keys.shared.q, keys.shared.do
    interpret = problem.sizes.interpret
    _, step = keys.steps.of(t, keys.work.head, problem.group)
    row = step * tile.step
    me, key = keys.me, keys.key
    if keys.dq is not None or problem.saves_inverse_l or problem.computes_places:
        # Otherwise descriptors and indices of scores are kept in registers, and others are spilled.
        me, key = (x + unknown_zero(n) for x in (me, key))
    k, v = (keys.shared.keys.get(keys.tiles, me, buffer=b) for b in (0, 1))
    if keys.dq is None:
        q.consumer_wait(n)
        if tile.overlap_steps:  # within a turn nothing may come between products
            do.consumer_wait(n)
        ping_pong.wait_to_begin()
    if end_step is not None:  # before S, because registers do not suffice after it (76 % slower)
        end_step()
    s = begin_product(k, q.get(n), interpret=interpret)
    if end_step is not None:  # dP takes the registers of the operands of `end_step`
        plgpu.wgmma_wait(1)
        _release(t - 1, keys)
    if keys.dq is None and not tile.overlap_steps:
        do.consumer_wait(n)
    begin_dp = partial(begin_product, v, do.get(n), interpret=interpret)
    caps = problem.spec.soft_cap is not None
    # At head size 128 there are no registers for P, the derivative of the cap and dP at once.
    is_later = caps and problem.head_size > ROWS
    dp = None if is_later else begin_dp()
    # The turn passes on when the products are started. In the forward pass it was slower to pass it
    # on when they were done.
    ping_pong.arrive()
    plgpu.wgmma_wait(0 if is_later else 1)  # for S alone: dP is multiplied beside the exponentials
    s = problem.capped(s)
    probs = factor = key_operands.probs(s, q, n, key, row, problem, keys.ids)
    if caps:
        factor, probs = probs * cap_slope(s), probs.astype(problem.dtype)
    dp = begin_dp() if dp is None else dp
    plgpu.wgmma_wait(0)
    # Added before P is rounded: its registers are free when those of the rounded P are needed.
    return (
        probs,
        factor,
        key_operands.shifted_dp(dp, do, n, problem),
    )


def _rounded(
    probs: Array, factor: Array, shifted_dp: Array, problem: Problem
) -> tuple[Array, Array]:
    """Returns Pᵀ and dSᵀ, rounded."""
    return probs.astype(problem.dtype), (factor * shifted_dp).astype(problem.dtype)


def _begin_sums(
    dk: Accumulator, dv: Accumulator, probs: Array, ds: Array, t: Array, keys: Keys
) -> None:
    """Starts Pᵀ dO and dSᵀ q of step t, and with `delta='after_cast'` Pᵀ (−λ q), a part of dK."""
    n, shared = keys.steps.first + t, keys.shared
    memory = None if shared.operand is None else shared.operand.at[keys.me]
    # Pᵀ and dSᵀ, formed from Sᵀ and dPᵀ in registers, serve as left operands unchanged. One product
    # reads q and dO as they are and another reads them transposed; descriptors do that for free.
    # It was 1 to 5 % slower to start dV before the wait for dP: 80 bytes of registers were spilled.
    left = as_operand(probs, memory)
    plgpu.wgmma(dv, left, shared.do.get(n))
    if keys.problem.corrects_after_cast:
        plgpu.wgmma(dk, left, shared.do.get(n, buffer=key_operands.CORRECTION))
    if memory is not None:
        plgpu.wgmma_wait(0)  # Pᵀ is read before dSᵀ takes its place
    plgpu.wgmma(dk, as_operand(ds, memory), shared.q.get(n))


def _release(t: Array, keys: Keys) -> None:
    """Releases q and dO of step t."""
    for pipeline in (keys.shared.do, keys.shared.q):
        pipeline.consumer_release(keys.steps.first + t)


def _wait_for_queries(t: Array, keys: Keys) -> None:
    """Waits until q and dO of step t are there.

    With dQ this happens a step early, while the products that end a step run, so that the products
    that begin the next step can start right after them.
    """
    for pipeline in (keys.shared.q, keys.shared.do):
        pipeline.consumer_wait(keys.steps.first + t)


def _add_to_dq(dq: DqAccumulator, t: Array, begin_sums: Callable[[], None], keys: Keys) -> None:
    """Adds the part of step t − 1 to dQ while the products that `begin_sums` starts run.

    A step late, no consumer has to wait for the other's dSᵀ, which has long been written.
    FlashAttention-3 multiplies dQ in the step itself, between two barriers.
    """
    before = t - 1

    def add() -> None:
        def product(total: Accumulator) -> None:
            zero = unknown_zero(keys.steps.first + t)
            dq.multiply(total, before, partial(keys.shared.keys.get, keys.tiles), zero)
            begin_sums()
            # The product is done when only the two products of `begin_sums` are under way.
            found = plgpu.wgmma_accumulator_load(total, wait_n=2)
            dq.release(before)
            dq.add(found, _place_in_dq(before, keys))

        pl.run_scoped(product, accumulator(ROWS, ROWS))

    def pass_by() -> None:
        pl.when(t > 0)(lambda: dq.release(before))
        begin_sums()

    pl.when(t > 0)(lambda: dq.wait(before))
    lax.cond((t > 0) & dq.is_mine(before), add, pass_by)


def _add_last_to_dq(dq: DqAccumulator, end: Array, keys: Keys) -> None:
    """Adds the last step's part to dQ, and waits until nobody reads k for dQ any more."""
    last = end - 1

    def add() -> None:
        def product(total: Accumulator) -> None:
            dq.multiply(total, last, partial(keys.shared.keys.get, keys.tiles), last * 0)
            found = plgpu.wgmma_accumulator_load(total, wait_n=0)
            dq.add(found, _place_in_dq(last, keys))

        pl.run_scoped(product, accumulator(ROWS, ROWS))

    def step() -> None:
        dq.wait(last)
        pl.when(dq.is_mine(last))(add)
        dq.release(last)

    pl.when(end > 0)(step)
    dq.producer_tail(end)


def _place_in_dq(t: Array, keys: Keys) -> tuple[Array, ...]:
    """The `place` of step t for `DqAccumulator.add`."""
    head, step = keys.steps.of(t, keys.work.head, keys.problem.group)
    return keys.work.batch, step * keys.tile.step, head, keys.work.block
