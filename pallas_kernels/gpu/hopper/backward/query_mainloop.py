"""The dQ mainloop: takes 64 query rows of a consumer over the keys that they see."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.backward.query_operands import (
    DO,
    Large,
    Q,
    QueryMemory,
    RowSums,
    probs,
    terms_of_ds,
    terms_of_p,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.layouts import LANES, TILE, along_rows, by_lane, constant
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.types import Accumulator
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import IDS_OF_KEYS, same


class BackwardRows(NamedTuple):
    """64 query rows of a consumer warpgroup.

    Attributes:
      problem, tile, shared: the kernel's problem, tile and shared memory.
      ping_pong: the ping-pong with the other consumers.
      me: the index of the consumer.
      tiles, steps: how many the program has done before.
      row: the first row.
      keys: the key steps that the rows visit.
      offset: what the exponent of P adds [64].
      of_dp: what dS adds to dP [64].
      inverse_l: 1 / l [64], a factor of P, if it is saved.
      large: the rows of large scores, if log₂ l is saved.
      ids: the ids of the rows [64], if there are any.
      reports: whether both of `BackwardSums` are asked for.
    """

    problem: Problem
    tile: BackwardTile
    shared: QueryMemory
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Array
    row: Array
    keys: KeySteps
    offset: Array
    of_dp: Array
    inverse_l: Array | None = None
    large: Large | None = None
    ids: Array | None = None
    reports: bool = False


# The sums of `terms_of_ds` and of `terms_of_p`, in parts of a row.
_Sums = tuple[tuple[Array, ...], tuple[Array, ...]]


def mainloop(rows: BackwardRows) -> RowSums:
    """Sums over all steps."""
    problem, end = rows.problem, rows.keys.end
    if (inverse_l := rows.inverse_l) is not None and not problem.sums_rows:
        # dS = P̄ ∘ (dP / l − δ / l) has a multiply-add an entry in the place of the addition of
        # P ∘ (dP − δ), so it takes no more instructions.
        rows = rows._replace(of_dp=rows.of_dp * inverse_l)
        if not problem.scales_last:
            inverse_l = inverse_l * np.float32(problem.spec.scale)
        rows = rows._replace(inverse_l=inverse_l)
    sums = (accumulator(ROWS, problem.head_size),) * (1 + problem.sums_rows)
    if problem.rounds_products:
        return RowSums(_long_steps(end, sums, rows))
    run = _run_overlapped if rows.tile.overlap_steps and not rows.reports else _run
    return pl.run_scoped(partial(run, end=end, rows=rows), *sums)


def _run(
    dq: Accumulator, pk: Accumulator | None = None, *, end: Array, rows: BackwardRows
) -> RowSums:
    problem, zero = rows.problem, (constant((ROWS, LANES), 0, TILE),)
    of_ds = problem.sums_rows + (rows.reports and not problem.corrects_after_cast)
    none: _Sums = zero * of_ds, zero * (problem.sums_rows + rows.reports)
    rows.ping_pong.enter()
    sums = lax.fori_loop(0, end, lambda t, sums: _step(t, dq, pk, sums, rows), none)
    rows.ping_pong.leave()
    of_dq = plgpu.wgmma_accumulator_load(dq, wait_n=None)
    of_pk = None if pk is None else plgpu.wgmma_accumulator_load(pk, wait_n=None)
    ds, p = (tuple(x.sum(axis=1) for x in of) for of in sums)
    return RowSums(of_dq, of_pk, ds, p)


def _run_overlapped(dq: Accumulator, *, end: Array, rows: BackwardRows) -> RowSums:
    """Runs all steps; dS k starts in the same turn of the ping-pong as the next S and dP."""

    # Only address arithmetic comes between the products of two steps. That gives 94 % of the
    # product rate at head size 128, where a wait between them left 81 %. It is slower at head size
    # 64, where the softmax takes longer than the products (17 to 22 %), in two stages (41 %), and
    # with two sums, because the assembler then inserts waits (67 to 92 %, its remark C7514):
    # hopper/backward_15_h200.ndjson.xz.
    def step(t: Array, before: Array | None) -> Array:
        end_step = None if before is None else partial(add, t - 1, before)
        return _ds(*_probs_and_dp(t, rows, end_step), rows).astype(rows.problem.dtype)

    def add(t: Array, ds: Array) -> None:
        _begin_sum(dq, ds, rows.steps + t, rows)

    ds = lax.fori_loop(1, end, step, step(jnp.int32(0), None))
    add(end - 1, ds)
    plgpu.wgmma_wait(0)
    rows.shared.k.consumer_release(rows.steps + end - 1)
    return RowSums(plgpu.wgmma_accumulator_load(dq, wait_n=None))


def _long_steps(end: Array, sums: tuple[Accumulator, ...], rows: BackwardRows) -> Array:
    """Returns Σ dS k, where each long step has a sum of its own, which is rounded (`published`)."""
    problem, step = rows.problem, rows.tile.step

    def product(first: Array, last: Array, dq: Accumulator) -> Array:
        lax.fori_loop(first, last, lambda t, none: _step(t, dq, None, none, rows), ((), ()))
        return plgpu.wgmma_accumulator_load(dq, wait_n=None)

    def long_step(i: Array, total: Array) -> Array:
        steps = problem.parts_of_long_step(i, step, end)
        return total + problem.rounded(pl.run_scoped(partial(product, *steps), *sums))

    rows.ping_pong.enter()
    none = constant((ROWS, problem.head_size), 0, TILE)
    total: Array = lax.fori_loop(*problem.long_steps(step, end), long_step, none)
    rows.ping_pong.leave()
    return total


def _step(
    t: Array, dq: Accumulator, pk: Accumulator | None, sums: _Sums, rows: BackwardRows
) -> _Sums:
    n, problem, dtype = rows.steps + t, rows.problem, rows.problem.dtype
    probs, dp = _probs_and_dp(t, rows)
    if pk is not None:
        if rows.inverse_l is not None:
            probs = probs * along_rows(rows.inverse_l, probs.shape)
        _begin_sum(pk, probs.astype(dtype), n, rows)
        if rows.shared.operand is not None:
            plgpu.wgmma_wait(0)  # P is read before dS takes its place
    of_ds, of_p = sums
    if rows.reports:
        # Before dS is formed, because there are few registers for both: 144 bytes were spilled.
        of_p = _added(of_p, terms_of_p(probs, problem, reports=True))
    ds = _ds(probs, dp, rows)
    in_ds = terms_of_ds(ds, problem, reports=rows.reports)
    in_p = () if rows.reports else terms_of_p(probs, problem)
    of_ds = _added(of_ds, in_ds)
    if not rows.reports:
        of_p = _added(of_p, in_p)
    # A held turn goes on until S and dP of the next step are started. Otherwise this returns at
    # once.
    rows.ping_pong.wait_to_end()
    _begin_sum(dq, ds.astype(dtype), n, rows)
    plgpu.wgmma_wait(0)
    rows.shared.k.consumer_release(n)
    return of_ds, of_p


def _added(sums: tuple[Array, ...], terms: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + by_lane(jnp.add, y) for x, y in zip(sums, terms, strict=True))


def _probs_and_dp(
    t: Array, rows: BackwardRows, end_step: Callable[[], None] | None = None
) -> tuple[Array, Array]:
    """Returns P of step t, unrounded, and dP, which is rounded only if `rounds_products`.

    end_step: starts dS k of the step before, if `overlap_steps`.
    """
    problem, shared = rows.problem, rows.shared
    n, me, row, interpret = rows.steps + t, rows.me, rows.row, problem.sizes.interpret
    holds_two_sums = problem.saves_log2_l and problem.head_size > ROWS
    if problem.is_wide or problem.corrects_after_cast or holds_two_sums:
        # There are no registers left to keep what a step can recompute: keeping descriptors and the
        # indices of scores spilled 616 bytes (`saves_log2_l`: 68 instead of 8).
        zero = opaque_zero(n, interpret=interpret)
        me, row = me + zero, row + zero
    q, do = (shared.rows.get(rows.tiles, me, buffer=buffer) for buffer in (Q, DO))
    shared.k.consumer_wait(n)
    rows.ping_pong.wait_to_begin()
    if end_step is not None:
        end_step()
    s = begin_product(q, shared.k.get(n), interpret=interpret)
    shared.v.consumer_wait(n)
    dp = begin_product(do, shared.v.get(n), interpret=interpret)
    rows.ping_pong.arrive()
    # Waits for S alone, so that dP is multiplied beside the exponentials. A branch that is never
    # taken, to keep some of them before the wait for dP, made this 2 to 9 % slower.
    plgpu.wgmma_wait(1)
    if end_step is not None:
        shared.k.consumer_release(n - 1)
    same_ids = None
    if rows.ids is not None:
        same_ids = partial(same, rows.ids, shared.k.get(n, buffer=IDS_OF_KEYS))
    p = probs(s, rows.offset, row, t, rows.keys, problem, same_ids, rows.large)
    plgpu.wgmma_wait(0)
    shared.v.consumer_release(n)  # sooner than k, so that v may have fewer stages
    return p, problem.rounded(dp)


def _ds(probs: Array, dp: Array, rows: BackwardRows) -> Array:
    """Returns dS, unrounded."""
    if rows.inverse_l is not None and not rows.problem.sums_rows:
        return probs * (
            dp * along_rows(rows.inverse_l, dp.shape) + along_rows(rows.of_dp, dp.shape)
        )
    # A power of two commutes with the rounding of dS. With such a scale dQ is scaled once summed.
    if not rows.problem.scales_last:
        dp = dp * np.float32(rows.problem.spec.scale)
    return probs * (dp + along_rows(rows.of_dp, dp.shape))


def _begin_sum(total: Accumulator, left: Array, n: Array, rows: BackwardRows) -> None:
    """Starts to add the product of `left` and k of the program's n-th step to `total`."""
    memory = None if rows.shared.operand is None else rows.shared.operand.at[rows.me]
    plgpu.wgmma(total, as_operand(left, memory), rows.shared.k.get(n))
