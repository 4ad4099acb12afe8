"""The forward mainloop: takes 64 query rows of a consumer over the keys that they see.

S of step t is multiplied before P̄V of step t − 1, which then runs during the softmax of step t
(FlashAttention-3, arXiv 2407.08608, Algorithm 2). If tiles overlap (`overlap_tiles`), the last P̄V
of a tile likewise runs during the first softmax of the program's next tile.
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

# Ō; Ō′ − Ō, if it is kept; the softmax after a step.
_Carry = tuple[Array, Array | None, Softmax]
# Ō; Ō′ − Ō, if it is kept; the rest of the state.
_InOrder = tuple[Array, Array | None, Running]


def mainloop(rows: QueryRows) -> tuple[Softmax, Array, Array | None]:
    """Returns the softmax and Ō after the last step, and Ō′ − Ō if it is kept."""
    problem, tile = rows.problem, rows.tile
    acc = constant((ROWS, problem.value_size), 0, TILE)
    auxiliary = acc if problem.keeps_auxiliary else None
    # The interpreter supports neither asynchronous products nor operands in registers.
    in_order = problem.rounds_products or rows.shared.probs is not None
    if (in_order or tile.owned_stages == 1) and not tile.overlap_tiles:
        free_last_output(rows)  # with one stage, the next q needs this very memory
    rows.shared.q.consumer_wait(rows.tiles)
    if problem.rounds_products:
        acc, running = long_steps.mainloop(rows)
        return _after_last(running), acc, None
    run = _run_in_order if in_order else _run_overlapped
    found = run(acc, auxiliary, rows)
    if tile.overlap_tiles:  # O has memory of its own, so q is free before the epilogue
        rows.shared.q.consumer_release(rows.tiles)
    return found


def overlapped_mainloop(due: Due, out: Outputs, rows: QueryRows) -> tuple[Softmax, Array]:
    """Returns the softmax after the last step, and Ō without the last P̄V, which is then due.

    It first ends the tile before: `due` is what that tile still owes.
    """

    def end_tile_before(due: Due) -> Softmax:
        first = rows.end * 0  # not a literal, which Mosaic GPU's conditions do not take
        acc, softmax = _advance(first, due.acc, due.softmax, before_first_step(rows), rows)
        _store_due(due, acc, out, rows)
        return _rounded(softmax, rows.problem)

    def prologue(_: Due) -> Softmax:
        return _rounded(_prologue(rows), rows.problem)

    # The first S of this tile and the last P̄V of the tile before share one turn of the ping-pong,
    # so that this tile's softmax hides that P̄V. FlashAttention-3 ends a tile before the next
    # begins. The overlap gains 6 % at GPT-2's shape where the softmax also counts ties, 1 % where
    # it does not, and nothing with an early wait (results/hopper/tiles_16_h200.jsonl.xz).
    rows.shared.q.consumer_wait(rows.tiles)
    softmax = lax.cond(rows.tiles == 0, prologue, end_tile_before, due)
    acc = constant((ROWS, rows.problem.value_size), 0, TILE)
    acc, _, softmax = _run_steps(acc, None, softmax, rows)
    rows.shared.q.consumer_release(rows.tiles)
    return softmax, acc


def nothing_due(problem: Problem, tile: ForwardTile, *, has_sinks: bool) -> Due:
    """The `Due` before a program's first tile, when nothing is due."""
    m, l, max_logit = no_key_yet(problem, has_sinks=has_sinks)
    acc = constant((ROWS, problem.value_size), 0, TILE)
    probs = constant((ROWS, tile.step), 0, TILE).astype(problem.dtype)
    nowhere = jnp.int32(0)
    return Due(acc, Softmax(m, l, probs, m, max_logit), nowhere, nowhere, nowhere)


def end_last_tile(due: Due, out: Outputs, rows: QueryRows) -> None:
    """Ends a program's last tile; `rows.steps` counts all steps that the program has done."""
    acc = _add_last(due.acc, due.softmax, rows.steps, rows)
    _store_due(due, acc, out, rows)


def _store_due(due: Due, acc: Array, out: Outputs, rows: QueryRows) -> None:
    # A loop carry does not keep the fact that the row is a multiple of 64, which copies need.
    rows = rows._replace(row=pl.multiple_of(due.row, ROWS))
    epilogue(out, rows, due.softmax, acc, None, due.batch, due.head)


def _run_in_order(
    acc: Array, auxiliary: Array | None, rows: QueryRows
) -> tuple[Softmax, Array, Array | None]:
    """Runs one product after the other with P̄ from shared memory, for tests."""
    no_score = constant((ROWS, rows.tile.step), 0, TILE)
    step = partial(_step_in_order, no_score=no_score, rows=rows)
    acc, auxiliary, running = lax.fori_loop(
        0, rows.end, step, (acc, auxiliary, before_first_step(rows))
    )
    return _after_last(running), acc, auxiliary


def _after_last(running: Running) -> Softmax:
    """The `Softmax` for an epilogue, which reads neither P̄ nor α: m stands in for both."""
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
        # Threads have read the ids. Before the next filling the interpreter wants a commit, which
        # `as_operand` makes.
        shared.k.consumer_release(n)
    acc = add_product(acc, operand, shared.v.get(n), interpret=interpret)
    shared.v.consumer_release(n)
    return acc, auxiliary, softmax.running


def _run_overlapped(
    acc: Array, auxiliary: Array | None, rows: QueryRows
) -> tuple[Softmax, Array, Array | None]:
    softmax = _prologue(rows)
    if rows.tile.owned_stages > 1:  # not sooner: the first softmax hides the wait
        free_last_output(rows)
    auxiliary, softmax = _add_auxiliary(auxiliary, softmax, rows.steps, rows)
    acc, auxiliary, softmax = _run_steps(acc, auxiliary, softmax, rows)
    return softmax, _add_last(acc, softmax, rows.steps + rows.end, rows), auxiliary


def _prologue(rows: QueryRows) -> Softmax:
    """Computes the first step's softmax, which has no P̄V beside it."""
    first = jnp.int32(0)
    s = _begin_scores(first, rows)
    rows.ping_pong.arrive()  # as soon as the product is started, not when it is done
    s = _finish_scores(s, first, rows, later=0)
    return softmax_step(s, before_first_step(rows), rows.problem, rows.tile)


def _run_steps(acc: Array, auxiliary: Array | None, softmax: Softmax, rows: QueryRows) -> _Carry:
    """Runs all steps after the first, except for P̄V of the last."""

    def step(t: Array, carry: _Carry) -> _Carry:
        acc, auxiliary, softmax = carry
        acc, softmax = _advance(t, acc, softmax, softmax.running, rows)
        auxiliary, softmax = _add_auxiliary(auxiliary, softmax, rows.steps + t, rows)
        # Ō is scaled by the new α after P̄V has been added, like FlashAttention-3's rescale_o.
        return along_rows(softmax.alpha, acc.shape) * acc, auxiliary, softmax

    result: _Carry = lax.fori_loop(1, rows.end, step, (acc, auxiliary, softmax))
    return result


def _advance(
    t: Array, acc: Array, softmax: Softmax, running: Running, rows: QueryRows
) -> tuple[Array, Softmax]:
    """Adds P̄V of step t − 1 to Ō, and meanwhile computes the softmax of step t from `running`."""
    problem, tile, shared = rows.problem, rows.tile, rows.shared
    before = rows.steps + t - 1

    def products(refs: tuple[Accumulator, Softmax]) -> None:
        acc_ref, new = refs
        # S first, so that it is done when the softmax begins. P̄V then runs beside the softmax.
        s = _begin_scores(t, rows)
        _wait_for_v(before, rows)
        # The product reads P̄ from registers ("RS"), as in FlashAttention-3, so P̄ does not go
        # through shared memory.
        plgpu.wgmma(acc_ref, softmax.probs, shared.v.get(before))
        rows.ping_pong.arrive()
        s = _finish_scores(s, t, rows, later=1)
        if waits_early(problem, tile):
            result = begin_softmax_step(s, running, problem, tile)
        else:
            result = softmax_step(s, running, problem, tile)
            # The wait for P̄V comes next. Without this call the assembler moves that wait before the
            # softmax, and nothing runs beside the product.
            finish_before_waiting(result.l)
        for ref, x in zip(*map(jax.tree.leaves, (new, result)), strict=True):
            ref[...] = x

    # A P̄ that is not rounded yet is float32, and the state of `run_state` needs that dtype.
    no_score = constant((ROWS, tile.step), 0, TILE)
    new = softmax._replace(probs=no_score) if rounds_later(problem, tile) else softmax
    # `run_state` ends with the wait for P̄V.
    acc, new = pl.run_state(products)((plgpu.ACC.init(acc), new))
    shared.v.consumer_release(before)  # after an early wait, before the rest of the softmax
    if waits_early(problem, tile):
        new = end_softmax_step(new, acc, unknown_zero(rows.steps + t), problem, tile)
    return acc, new


def _add_last(acc: Array, softmax: Softmax, steps: Array, rows: QueryRows) -> Array:
    """Adds P̄V of a tile's last step to Ō; steps: how many the program has done, this one too."""
    _wait_for_v(steps - 1, rows)
    acc = add_product(acc, softmax.probs, rows.shared.v.get(steps - 1), interpret=False)
    rows.shared.v.consumer_release(steps - 1)
    return acc


def _wait_for_v(n: Array, rows: QueryRows) -> None:
    """Waits for v of the program's n-th step, unless `_add_auxiliary` has done so.

    A second wait would wait for the stage's next filling.
    """
    if not rows.problem.keeps_auxiliary:
        rows.shared.v.consumer_wait(n)


def _add_auxiliary(
    auxiliary: Array | None, softmax: Softmax, n: Array, rows: QueryRows
) -> tuple[Array | None, Softmax]:
    """Returns Ō′ − Ō after the program's n-th step, and the step's softmax with P̄ rounded.

    P̄ is the sum of three bfloat16 numbers. The first is the rounded P̄, whose product with v
    belongs to Ō. The products of the other two are added here.
    """
    if auxiliary is None:
        return None, _rounded(softmax, rows.problem)
    rounded, *others = terms(softmax.probs, rows.problem)
    auxiliary = along_rows(softmax.alpha, auxiliary.shape) * auxiliary
    memory = None if rows.shared.probs is None else rows.shared.probs.at[rows.me]
    rows.shared.v.consumer_wait(n)
    v, interpret = rows.shared.v.get(n), rows.problem.sizes.interpret
    # Unlike P̄V these products are not overlapped: their operands would take too many registers.
    for term in others[::-1]:  # the smallest first
        auxiliary = add_product(auxiliary, as_operand(term, memory), v, interpret=interpret)
    return auxiliary, softmax._replace(probs=rounded)


def _rounded(softmax: Softmax, problem: Problem) -> Softmax:
    """Returns the softmax with P̄ rounded."""
    return softmax._replace(probs=softmax.probs.astype(problem.dtype))


def _begin_scores(t: Array, rows: QueryRows) -> Array:
    """Starts q kᵀ of step t, in this warpgroup's turn of the ping-pong."""
    # k first: a consumer that waits for it within its turn keeps the others off the tensor cores.
    rows.shared.k.consumer_wait(rows.steps + t)
    rows.ping_pong.wait()
    q, k = rows.shared.q.get(rows.tiles, rows.me), rows.shared.k.get(rows.steps + t)
    return begin_product(q, k, interpret=rows.problem.sizes.interpret)


def _finish_scores(s: Array, t: Array, rows: QueryRows, *, later: int) -> Array:
    """Waits for S of step t and masks it. `later` products, started after it, may still run."""
    plgpu.wgmma_wait(later)  # products end in the order in which they were started
    if rows.ids is None:
        rows.shared.k.consumer_release(rows.steps + t)
        return masked(s, rows, t)
    # The mask reads the ids, which are loaded and released with k.
    s = masked(s, rows, t)
    rows.shared.k.consumer_release(rows.steps + t)
    return s
