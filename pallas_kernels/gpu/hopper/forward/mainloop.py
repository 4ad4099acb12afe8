"""The mainloop of the forward kernel: 64 query rows of a consumer, over the keys that they see.

S of step t is multiplied before P̄V of step t − 1, which then runs during the softmax of step t
(FlashAttention-3, arXiv 2407.08608, Algorithm 2). Between tiles it is the same, if they overlap:
the last P̄V of a tile runs during the first softmax of the program's next.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS, ForwardTile
from pallas_kernels.gpu.hopper.forward import long_steps
from pallas_kernels.gpu.hopper.forward.epilogue import epilogue, free_last_output
from pallas_kernels.gpu.hopper.forward.operands import (
    Due,
    Outputs,
    QueryRows,
    Running,
    Softmax,
)
from pallas_kernels.gpu.hopper.forward.softmax import (
    before_first_step,
    begin_softmax_step,
    end_softmax_step,
    masked,
    no_key_yet,
    rounds_later,
    softmax_step,
    terms,
    waits_early,
)
from pallas_kernels.gpu.hopper.machine.instruction_order import (
    finish_before_waiting,
    unknown_zero,
)
from pallas_kernels.gpu.hopper.machine.layouts import TILE, along_rows, constant
from pallas_kernels.gpu.hopper.machine.types import Accumulator
from pallas_kernels.gpu.hopper.machine.wgmma import add_product, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem

# Ō, Ō′ − Ō where it is kept, and the softmax after a step.
_Carry = tuple[Array, Array | None, Softmax]
# Ō, Ō′ − Ō, and the rest.
_InOrder = tuple[Array, Array | None, Running]


def mainloop(rows: QueryRows) -> tuple[Softmax, Array, Array | None]:
    """m, l and Ō after the last step; Ō′ − Ō, where it is kept."""
    problem, tile = rows.problem, rows.tile
    acc = constant((ROWS, problem.head_size), 0, TILE)
    auxiliary = acc if problem.keeps_auxiliary else None
    # The interpreter knows no product that is under way, nor operands in registers.
    in_order = problem.rounds_products or rows.shared.probs is not None
    if (in_order or tile.owned_stages == 1) and not tile.overlap_tiles:
        free_last_output(rows)  # with one stage, q has no other place to come to
    rows.shared.q.consumer_wait(rows.tiles)
    if problem.rounds_products:
        acc, running = long_steps.mainloop(rows)
        return _after_last(running), acc, None
    run = _run_in_order if in_order else _run_overlapped
    found = run(acc, auxiliary, rows)
    if tile.overlap_tiles:  # O leaves elsewhere, so q is free before the epilogue
        rows.shared.q.consumer_release(rows.tiles)
    return found


def overlapped_mainloop(due: Due, out: Outputs, rows: QueryRows) -> tuple[Softmax, Array]:
    """m, l and Ō of all steps but the last, whose P̄V is due, as that of the tile before is."""

    def end_tile_before(due: Due) -> Softmax:
        first = rows.end * 0  # not a literal, which Mosaic GPU's conditions do not take
        acc, softmax = _advance(first, due.acc, due.softmax, before_first_step(rows), rows)
        _store_due(due, acc, out, rows)
        return _rounded(softmax, rows.problem)

    def prologue(_: Due) -> Softmax:
        return _rounded(_prologue(rows), rows.problem)

    # One turn of the ping-pong for the first S of this tile and the last P̄V of the one before: the
    # softmax of the former hides the latter. FlashAttention-3 ends a tile before the next begins.
    # It pays beside the longer softmax that counts ties (6 % at GPT-2's shape); without, it gains
    # 1 %, and nothing beside an early wait (results/hopper/tiles_16_h200.jsonl).
    rows.shared.q.consumer_wait(rows.tiles)
    softmax = lax.cond(rows.tiles == 0, prologue, end_tile_before, due)
    acc = constant((ROWS, rows.problem.head_size), 0, TILE)
    acc, _, softmax = _run_steps(acc, None, softmax, rows)
    rows.shared.q.consumer_release(rows.tiles)
    return softmax, acc


def nothing_due(problem: Problem, tile: ForwardTile, *, has_sinks: bool) -> Due:
    """Before a program's first tile."""
    m, l, max_logit = no_key_yet(problem, has_sinks=has_sinks)
    acc = constant((ROWS, problem.head_size), 0, TILE)
    probs = constant((ROWS, tile.step), 0, TILE).astype(problem.dtype)
    nowhere = jnp.int32(0)
    return Due(acc, Softmax(m, l, probs, m, max_logit), nowhere, nowhere, nowhere)


def end_last_tile(due: Due, out: Outputs, rows: QueryRows) -> None:
    """After a program's last tile; `rows.steps` are all that it has done."""
    acc = _add_last(due.acc, due.softmax, rows.steps, rows)
    _store_due(due, acc, out, rows)


def _store_due(due: Due, acc: Array, out: Outputs, rows: QueryRows) -> None:
    # What is carried through a loop has lost that it is a multiple, which copies ask for.
    rows = rows._replace(row=pl.multiple_of(due.row, ROWS))
    epilogue(out, rows, due.softmax, acc, None, due.batch, due.head)


def _run_in_order(
    acc: Array, auxiliary: Array | None, rows: QueryRows
) -> tuple[Softmax, Array, Array | None]:
    """One product after the other, P̄ from shared memory: for tests."""
    no_score = constant((ROWS, rows.tile.step), 0, TILE)
    step = partial(_step_in_order, no_score=no_score, rows=rows)
    acc, auxiliary, running = lax.fori_loop(
        0, rows.end, step, (acc, auxiliary, before_first_step(rows))
    )
    return _after_last(running), acc, auxiliary


def _after_last(running: Running) -> Softmax:
    """What an epilogue reads of a softmax after its last step."""
    m, l, max_logit = running
    return Softmax(m, l, m, m, max_logit)


def _step_in_order(t: Array, carry: _InOrder, *, no_score: Array, rows: QueryRows) -> _InOrder:
    acc, auxiliary, running = carry
    shared, interpret = rows.shared, rows.problem.sizes.interpret
    assert shared.probs is not None
    n = rows.steps + t
    shared.k.consumer_wait(n)
    q, k = shared.q.get(rows.tiles, rows.me), shared.k.get(n)
    s = add_product(no_score, q, k.T, interpret=interpret)
    if rows.ids is None:
        shared.k.consumer_release(n)
    softmax = softmax_step(masked(s, rows, t), running, rows.problem, rows.tile)
    acc = along_rows(softmax.alpha, acc.shape) * acc
    auxiliary, softmax = _add_auxiliary(auxiliary, softmax, n, rows)
    _wait_for_v(n, rows)
    operand = as_operand(softmax.probs, shared.probs.at[rows.me])
    if rows.ids is not None:
        # Threads have read them: the interpreter wants what `as_operand` commits before the next.
        shared.k.consumer_release(n)
    acc = add_product(acc, operand, shared.v.get(n), interpret=interpret)
    shared.v.consumer_release(n)
    return acc, auxiliary, softmax.running


def _run_overlapped(
    acc: Array, auxiliary: Array | None, rows: QueryRows
) -> tuple[Softmax, Array, Array | None]:
    softmax = _prologue(rows)
    if rows.tile.owned_stages > 1:  # not sooner: the wait is hidden here
        free_last_output(rows)
    auxiliary, softmax = _add_auxiliary(auxiliary, softmax, rows.steps, rows)
    acc, auxiliary, softmax = _run_steps(acc, auxiliary, softmax, rows)
    return softmax, _add_last(acc, softmax, rows.steps + rows.end, rows), auxiliary


def _prologue(rows: QueryRows) -> Softmax:
    """The first step's softmax, which has no P̄V beside it."""
    first = jnp.int32(0)
    s = _begin_scores(first, rows)
    rows.ping_pong.arrive()  # as soon as the product is started, not when it is done
    s = _finish_scores(s, first, rows, later=0)
    return softmax_step(s, before_first_step(rows), rows.problem, rows.tile)


def _run_steps(acc: Array, auxiliary: Array | None, softmax: Softmax, rows: QueryRows) -> _Carry:
    """All steps after the first, but for P̄V of the last."""

    def step(t: Array, carry: _Carry) -> _Carry:
        acc, auxiliary, softmax = carry
        acc, softmax = _advance(t, acc, softmax, softmax.running, rows)
        auxiliary, softmax = _add_auxiliary(auxiliary, softmax, rows.steps + t, rows)
        # Ō is scaled when P̄V has been added, by the new α: FlashAttention-3's rescale_o.
        return along_rows(softmax.alpha, acc.shape) * acc, auxiliary, softmax

    result: _Carry = lax.fori_loop(1, rows.end, step, (acc, auxiliary, softmax))
    return result


def _advance(
    t: Array, acc: Array, softmax: Softmax, running: Running, rows: QueryRows
) -> tuple[Array, Softmax]:
    """Ō with P̄V of the step before step t, and t's softmax beside it, from `running` on."""
    problem, tile, shared = rows.problem, rows.tile, rows.shared
    before = rows.steps + t - 1

    def products(refs: tuple[Accumulator, Softmax]) -> None:
        acc_ref, new = refs
        # S first, so that it is done when the softmax begins; P̄V then runs beside the latter.
        s = _begin_scores(t, rows)
        _wait_for_v(before, rows)
        # P̄ from registers ("RS"), as FlashAttention-3 has it: no way through shared memory.
        plgpu.wgmma(acc_ref, softmax.probs, shared.v.get(before))
        rows.ping_pong.arrive()
        s = _finish_scores(s, t, rows, later=1)
        if waits_early(problem, tile):
            result = begin_softmax_step(s, running, problem, tile)
        else:
            result = softmax_step(s, running, problem, tile)
            # The wait for P̄V stands behind; without this the assembler puts it before the softmax,
            # and nothing runs beside the product.
            finish_before_waiting(result.l)
        for ref, x in zip(*map(jax.tree.leaves, (new, result)), strict=True):
            ref[...] = x

    # P̄ that is not rounded yet is float32: the state of `run_state` needs its type.
    no_score = constant((ROWS, tile.step), 0, TILE)
    new = softmax._replace(probs=no_score) if rounds_later(problem, tile) else softmax
    # `run_state` ends with the wait for P̄V.
    acc, new = pl.run_state(products)((plgpu.ACC.init(acc), new))
    shared.v.consumer_release(before)  # sooner than the rest of an early wait's softmax
    if waits_early(problem, tile):
        new = end_softmax_step(new, acc, unknown_zero(rows.steps + t), problem, tile)
    return acc, new


def _add_last(acc: Array, softmax: Softmax, steps: Array, rows: QueryRows) -> Array:
    """Ō with P̄V of a tile's last step, the last of so many that the program has done."""
    _wait_for_v(steps - 1, rows)
    acc = add_product(acc, softmax.probs, rows.shared.v.get(steps - 1), interpret=False)
    rows.shared.v.consumer_release(steps - 1)
    return acc


def _wait_for_v(n: Array, rows: QueryRows) -> None:
    """Before P̄V of the n-th step of the program, unless `_add_auxiliary` has waited.

    A second wait would be for what fills the stage next.
    """
    if not rows.problem.keeps_auxiliary:
        rows.shared.v.consumer_wait(n)


def _add_auxiliary(
    auxiliary: Array | None, softmax: Softmax, n: Array, rows: QueryRows
) -> tuple[Array | None, Softmax]:
    """Ō′ − Ō after the n-th step of the program, and its softmax with P̄ rounded.

    P̄ is the sum of three bfloat16 numbers. The first is P̄ rounded, whose product is Ō's.
    """
    if auxiliary is None:
        return None, _rounded(softmax, rows.problem)
    rounded, *others = terms(softmax.probs, rows.problem)
    auxiliary = along_rows(softmax.alpha, auxiliary.shape) * auxiliary
    memory = None if rows.shared.probs is None else rows.shared.probs.at[rows.me]
    rows.shared.v.consumer_wait(n)
    v, interpret = rows.shared.v.get(n), rows.problem.sizes.interpret
    # Not overlapped, as P̄V is: their operands would take too many registers.
    for term in others[::-1]:  # the smallest first
        auxiliary = add_product(auxiliary, as_operand(term, memory), v, interpret=interpret)
    return auxiliary, softmax._replace(probs=rounded)


def _rounded(softmax: Softmax, problem: Problem) -> Softmax:
    """The same with P̄ rounded."""
    return softmax._replace(probs=softmax.probs.astype(problem.dtype))


def _begin_scores(t: Array, rows: QueryRows) -> Array:
    """Starts q kᵀ of step t, in this warpgroup's turn of the ping-pong."""
    # k first: who waits for it in its own turn keeps the others from the tensor cores.
    rows.shared.k.consumer_wait(rows.steps + t)
    rows.ping_pong.wait()
    q, k = rows.shared.q.get(rows.tiles, rows.me), rows.shared.k.get(rows.steps + t)
    return begin_product(q, k, interpret=rows.problem.sizes.interpret)


def _finish_scores(s: Array, t: Array, rows: QueryRows, *, later: int) -> Array:
    """Waits for them, while so many products that were started later run; takes the mask."""
    plgpu.wgmma_wait(later)  # products end in the order in which they were started
    if rows.ids is None:
        rows.shared.k.consumer_release(rows.steps + t)
        return masked(s, rows, t)
    # The mask reads the ids, which come and go with k.
    s = masked(s, rows, t)
    rows.shared.k.consumer_release(rows.steps + t)
    return s
