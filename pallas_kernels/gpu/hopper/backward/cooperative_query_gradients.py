"""dQ of 64 rows by two consumers, if rows are summed and one lacks registers for both sums.

The first consumer forms P and sums P k. It hands the unrounded P to the second, which forms dP and
sums dQ, dS and P. In the end the second also takes Σ P k, to correct dQ. The arithmetic and the
order of every sum are those of `query_gradients`.
"""

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
    Gradients,
    Large,
    Q,
    QueryInputs,
    QueryMemory,
    correction_of_dk,
    delta,
    lacks_of,
    of_rows,
    probs,
    summed,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.ends import without_beyond
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    TILE,
    along_rows,
    by_lane,
    constant,
    load,
)
from pallas_kernels.gpu.hopper.machine.types import Accumulator, Ref
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import IDS_OF_KEYS, ids_of_block, same
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile

_PROBS, _DQ = range(2)  # the consumer that sums P k, and the one that sums dQ


class _SharedRows(NamedTuple):
    """64 query rows of a program, and the key steps that they visit.

    `tiles` and `steps` say how many the program has done before.
    """

    problem: Problem
    tile: BackwardTile
    shared: QueryMemory
    tiles: Array
    steps: Array
    work: WorkTile
    row: Array
    keys: KeySteps

    @property
    def end(self) -> Array:
        """How many steps there are."""
        return self.keys.end

    @property
    def exchanged(self) -> Array:
        """How many blocks have been exchanged before this tile."""
        return self.steps + self.tiles * _pieces(self.problem)


def consume(
    x: QueryInputs, out: Gradients, shared: QueryMemory, problem: Problem, tile: BackwardTile
) -> None:
    """Computes one consumer's part of all tiles of a program."""
    set_registers(tile.warpgroups, producer=False, most=problem.is_wide)
    me = lax.axis_index("warpgroup")

    def sum_keys() -> None:
        exchanged = _each_tile(x, shared, problem, tile, partial(_sum_keys, x))
        shared.probs.producer_tail(exchanged)

    def differentiate() -> None:
        _each_tile(x, shared, problem, tile, partial(_differentiate, x, out))

    pl.when(me == _PROBS)(sum_keys)
    pl.when(me == _DQ)(differentiate)
    plgpu.wait_smem_to_gmem(0)


def _each_tile(
    x: QueryInputs,
    shared: QueryMemory,
    problem: Problem,
    tile: BackwardTile,
    consume: Callable[[_SharedRows], None],
) -> Array:
    """Does one consumer's work for every tile. Returns how many blocks were exchanged."""
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)

    def consume_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        row = work.block * ROWS
        keys = problem.consumer_steps(row, work.batch, tile, x.segments)
        rows = _SharedRows(problem, tile, shared, tiles, steps, work, row, keys)
        pl.when(work.is_valid)(lambda: consume(rows))
        return tiles + work.is_valid.astype(jnp.int32), steps + jnp.where(
            work.is_valid, keys.end, 0
        )

    done = (jnp.int32(0), jnp.int32(0))
    tiles, steps = lax.fori_loop(0, scheduler.count(program), consume_tile, done)
    return steps + tiles * _pieces(problem)


def _pieces(problem: Problem) -> int:
    """How many blocks of 64 columns P k has."""
    return problem.head_size // ROWS


def _sum_keys(x: QueryInputs, rows: _SharedRows) -> None:
    """Sums P k over a tile's steps. Hands every P, and then the sum, to the other consumer."""
    problem, shared = rows.problem, rows.shared
    offset = of_rows(x.offset, rows.work, rows.row)
    inverse_l = None
    if x.inverse_l is not None:
        inverse_l = of_rows(x.inverse_l, rows.work, rows.row)
    large = Large.of(x, rows.work, rows.row, problem)
    ids = None
    if x.segments is not None:
        ids = ids_of_block(x.segments.rows, rows.work.batch, rows.row)
    shared.rows.consumer_wait(rows.tiles)

    def mainloop(pk: Accumulator) -> Array:
        def add(t: Array, _: None) -> None:
            _add_to_pk(t, pk, offset, inverse_l, large, ids, rows)

        lax.fori_loop(0, rows.end, add, None)
        return plgpu.wgmma_accumulator_load(pk, wait_n=None)

    pk = pl.run_scoped(mainloop, accumulator(ROWS, problem.head_size))
    shared.rows.consumer_release(rows.tiles)
    # The sum goes through the same two blocks as P, 64 columns at a time, because there is no
    # memory for all of it.
    for piece in range(_pieces(problem)):
        columns = pk[:, piece * ROWS : (piece + 1) * ROWS]
        shared.probs.produce(rows.exchanged + rows.end + piece, columns)


def _add_to_pk(
    t: Array,
    pk: Accumulator,
    offset: Array,
    inverse_l: Array | None,
    large: Large | None,
    ids: Array | None,
    rows: _SharedRows,
) -> None:
    """Adds P k of step t, and hands P to the other consumer."""
    n, problem, shared = rows.steps + t, rows.problem, rows.shared
    shared.k.consumer_wait(n)
    s = _product(Q, shared.k.get(n), rows)
    # Otherwise the indices of all entries would be kept in registers, for the mask.
    row = rows.row + opaque_zero(n, interpret=problem.sizes.interpret)
    same_ids = None
    if ids is not None:
        same_ids = partial(same, ids, shared.k.get(n, buffer=IDS_OF_KEYS))
    p = probs(s, offset, row, t, rows.keys, problem, same_ids, large)
    if inverse_l is not None:
        p = p * along_rows(inverse_l, p.shape)
    # P is handed over before P k is multiplied, because the other consumer waits for it.
    shared.probs.produce(rows.exchanged + t, p)
    plgpu.wgmma(pk, _operand(_PROBS, p, rows), shared.k.get(n))
    plgpu.wgmma_wait(0)
    shared.k.consumer_release(n)


def _differentiate(x: QueryInputs, out: Gradients, rows: _SharedRows) -> None:
    """Computes and stores dQ, and what dS adds to dP, which the dK and dV kernel reads."""
    problem, shared, work, row = rows.problem, rows.shared, rows.work, rows.row
    dlse, end = of_rows(x.dlse, work, row), x.end(work, problem)
    shared.rows.consumer_wait(rows.tiles)
    of_dp = -delta(x, shared.rows, rows.tiles, 0, work, row, problem)
    if not problem.scales_last:
        of_dp, dlse = (y * np.float32(problem.spec.scale) for y in (of_dp, dlse))
    mainloop = partial(_sum_queries, of_dp=of_dp, rows=rows)
    total, r, s = pl.run_scoped(mainloop, accumulator(ROWS, problem.head_size))
    lacks = lacks_of(r, s, dlse, problem)
    if problem.normalizes_delta:
        of_dp = of_dp - lacks
    if shared.delta is not None:
        shared.delta[0] = of_dp
    # Only this warpgroup has read dO. If dQ is larger, it takes the memory of q, which the other
    # consumer last read before it handed over the first block of P k.
    buffer = DO if problem.has_equal_sizes else Q
    memory = shared.rows.get(rows.tiles, 0, buffer=buffer)
    for piece in range(_pieces(problem)):
        pk = shared.probs.consume(rows.exchanged + rows.end + piece)
        columns = total[:, piece * ROWS : (piece + 1) * ROWS]
        columns = columns - along_rows(lacks, pk.shape) * pk
        if problem.scales_last:
            columns = columns * np.float32(problem.spec.scale)
        columns = without_beyond(columns, row, end)
        memory[:, pl.ds(piece * ROWS, ROWS)] = columns.astype(problem.dtype)
    correction = None
    if problem.corrects_after_cast:
        # In place: the other consumer last read q before it handed over the last block of P k.
        correction = shared.rows.get(rows.tiles, 0, buffer=Q)
        for piece in range(_pieces(problem)):
            part = correction.at[:, pl.ds(piece * ROWS, ROWS)]
            part[...] = correction_of_dk(load(part, TILE), lacks, problem)
    plgpu.commit_smem()
    offsets = out.dp_offset.at[work.batch, work.head, pl.ds(row, ROWS)]
    if shared.delta is None:
        problem.store_from_registers(row, of_dp, offsets, end=problem.vector_rows)
    else:
        problem.store_rows(row, [(shared.delta.at[0], offsets)])
    plgpu.copy_smem_to_gmem(memory, problem.part(out.dq, work.batch, row, ROWS, work.head))
    if correction is not None:
        part = problem.part(out.correction, work.batch, row, ROWS, work.head)
        plgpu.copy_smem_to_gmem(correction, part)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.rows.consumer_release(rows.tiles)


def _sum_queries(dq: Accumulator, *, of_dp: Array, rows: _SharedRows) -> tuple[Array, Array, Array]:
    """Returns Σ dS k [64, H] of a tile, and Σ dS and Σ P [64]."""
    none = (constant((ROWS, LANES), 0, TILE),) * 2

    def step(t: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        return _add_to_dq(t, dq, sums, of_dp, rows)

    r, s = lax.fori_loop(0, rows.end, step, none)
    total = plgpu.wgmma_accumulator_load(dq, wait_n=None)
    return total, r.sum(axis=1), s.sum(axis=1)


def _add_to_dq(
    t: Array, dq: Accumulator, sums: tuple[Array, Array], of_dp: Array, rows: _SharedRows
) -> tuple[Array, Array]:
    """Adds dS k of step t, from the other consumer's P. Returns Σ dS and Σ P with step t added."""
    n, problem, shared = rows.steps + t, rows.problem, rows.shared
    shared.v.consumer_wait(n)
    # dP first: it needs nothing from the other consumer, whose P comes meanwhile.
    dp = _product(DO, shared.v.get(n), rows)
    shared.v.consumer_release(n)
    if not problem.scales_last:
        dp = dp * np.float32(problem.spec.scale)
    p = shared.probs.consume(rows.exchanged + t)
    ds = p * (dp + along_rows(of_dp, dp.shape))
    r, s = sums
    of_ds, of_p = (summed(x, problem) for x in (ds, p))
    r, s = r + by_lane(jnp.add, of_ds), s + by_lane(jnp.add, of_p)
    shared.k.consumer_wait(n)
    plgpu.wgmma(dq, _operand(_DQ, ds, rows), shared.k.get(n))
    plgpu.wgmma_wait(0)
    shared.k.consumer_release(n)
    return r, s


def _product(buffer: int, keys: Ref, rows: _SharedRows) -> Array:
    """Multiplies a buffer of the rows by keysᵀ, and waits for the product."""
    left = rows.shared.rows.get(rows.tiles, 0, buffer=buffer)
    found = begin_product(left, keys, interpret=rows.problem.sizes.interpret)
    plgpu.wgmma_wait(0)
    return found


def _operand(me: int, x: Array, rows: _SharedRows) -> Ref:
    """Returns x, rounded, as a left operand."""
    operand = rows.shared.operand
    memory = None if operand is None else operand.at[me]
    return as_operand(x.astype(rows.problem.dtype), memory)
