"""dK and dV of 64 keys by two consumers, if one lacks registers for both sums.

The first consumer forms Pᵀ and sums dV. It hands the unrounded Pᵀ to the second, which forms dPᵀ
and sums dK. Each has two of the four products, and nothing is computed twice. The arithmetic and
the order of every sum are those of `key_gradients`. CUTLASS, too, calls two warpgroups that share a
tile cooperative; there each has half of the rows, here each has one of the sums.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.backward import key_operands
from pallas_kernels.gpu.hopper.backward.key_operands import KeyIds, KeyInputs, KeyMemory, Steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.ends import without_beyond
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.types import Accumulator, Ref
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import (
    accumulator,
    as_operand,
    begin_product,
)
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import Segments
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile

_VALUES, _KEYS = range(2)  # the consumer that sums dV, and the one that sums dK


class _SharedKeys(NamedTuple):
    """64 keys of a program.

    `tiles` says how many the program has done before. `ids` are there once the tile has begun.
    """

    problem: Problem
    tile: BackwardTile
    shared: KeyMemory
    tiles: Array
    steps: Steps
    key: Array
    work: WorkTile
    segments: Segments | None
    ids: KeyIds | None = None


# Does the t-th step of one consumer: adds the step's product to the sum.
_Step = Callable[[Array, Accumulator, _SharedKeys], None]


def consume(
    x: KeyInputs, dk: Ref, dv: Ref, shared: KeyMemory, problem: Problem, tile: BackwardTile
) -> None:
    """Computes one consumer's part of all tiles of a program."""
    # A sum of 64 rows and 256 features takes 128 registers a thread: two do not fit into 232.
    set_registers(tile.warpgroups, producer=False)
    me = lax.axis_index("warpgroup")

    def sum_values() -> None:
        steps = _consume(_VALUES, _add_to_dv, x, dv, shared, problem, tile)
        shared.probs.producer_tail(steps)

    def sum_keys() -> None:
        _consume(_KEYS, _add_to_dk, x, dk, shared, problem, tile)

    pl.when(me == _VALUES)(sum_values)
    pl.when(me == _KEYS)(sum_keys)
    plgpu.wait_smem_to_gmem(0)


def _consume(
    me: int,
    add: _Step,
    x: KeyInputs,
    out: Ref,
    shared: KeyMemory,
    problem: Problem,
    tile: BackwardTile,
) -> Array:
    """Runs all tiles of one consumer, with `add` for each step. Returns the number of steps."""

    def begin(work: WorkTile, tiles: Array, key: Array, steps: Steps) -> Callable[[], None]:
        keys = _SharedKeys(problem, tile, shared, tiles, steps, key, work, x.segments)
        return partial(_differentiate, me, add, x, out, keys)

    return key_operands.each_tile(lax.axis_index("program"), problem, tile, x.segments, begin)


def _differentiate(me: int, add: _Step, x: KeyInputs, out: Ref, keys: _SharedKeys) -> None:
    """Computes one tile: its mainloop and its epilogue."""
    problem, shared, work = keys.problem, keys.shared, keys.work
    if me == _VALUES:
        keys = keys._replace(ids=KeyIds.of(keys.segments, work.batch, keys.key))
    end = x.end(work, problem)
    shared.keys.consumer_wait(keys.tiles)
    features = problem.value_size if me == _VALUES else problem.head_size
    total = pl.run_scoped(partial(_mainloop, add, keys), accumulator(ROWS, features))
    if me == _KEYS and problem.scales_last:
        total = total * np.float32(problem.spec.scale)
    if shared.dv is None:
        # The sum leaves through memory that only this warpgroup has read and no longer needs: dV
        # through the memory of k, dK through the memory of v.
        memory = shared.keys.get(keys.tiles, 0, buffer=me)
    elif me == _VALUES:
        memory = shared.dv
    else:
        # The other consumer last read k before it handed over the last Pᵀ.
        memory = shared.keys.get(keys.tiles, 0, buffer=0)
    memory[...] = without_beyond(total, keys.key, end).astype(problem.dtype)
    place = (work.batch, keys.key, ROWS, work.head)
    plane = 2 if me == _VALUES else 1
    key_operands.epilogue([(memory, problem.part(out, *place, plane=plane))])
    shared.keys.consumer_release(keys.tiles)


def _mainloop(add: _Step, keys: _SharedKeys, total: Accumulator) -> Array:
    """Returns the sum over all steps."""
    end = keys.steps.length * keys.problem.group
    lax.fori_loop(0, end, lambda t, _: add(t, total, keys), None)
    return plgpu.wgmma_accumulator_load(total, wait_n=None)


def _add_to_dv(t: Array, dv: Accumulator, keys: _SharedKeys) -> None:
    """Adds Pᵀ dO of step t, and hands Pᵀ to the other consumer."""
    n, problem, shared = keys.steps.first + t, keys.problem, keys.shared
    q, do = shared.q, shared.do
    _, step = keys.steps.of(t, keys.work.head, problem.group)
    q.consumer_wait(n)
    s = _product(shared.keys.get(keys.tiles, 0, buffer=0), q.get(n), problem)
    # Otherwise the indices of all entries would be kept in registers, for the mask.
    key = keys.key + opaque_zero(n, interpret=problem.sizes.interpret)
    probs = key_operands.probs(s, q, n, key, step * keys.tile.step, problem, keys.ids)
    q.consumer_release(n)
    # Pᵀ is handed over before dV is multiplied, because the other consumer waits for it.
    shared.probs.produce(n, probs)
    do.consumer_wait(n)
    plgpu.wgmma(dv, _operand(_VALUES, probs, keys), do.get(n))
    plgpu.wgmma_wait(0)
    do.consumer_release(n)


def _add_to_dk(t: Array, dk: Accumulator, keys: _SharedKeys) -> None:
    """Adds dSᵀ q of step t, from the other consumer's Pᵀ."""
    n, problem, shared = keys.steps.first + t, keys.problem, keys.shared
    q, do = shared.q, shared.do
    do.consumer_wait(n)
    # dP first: it needs nothing from the other consumer, whose P comes meanwhile.
    dp = _product(shared.keys.get(keys.tiles, 0, buffer=1), do.get(n), problem)
    shifted = key_operands.shifted_dp(dp, do, n, problem)
    if not problem.corrects_after_cast:
        do.consumer_release(n)
    probs = shared.probs.consume(n)
    if problem.corrects_after_cast:
        correction = do.get(n, buffer=key_operands.CORRECTION)
        plgpu.wgmma(dk, _operand(_KEYS, probs, keys), correction)
        plgpu.wgmma_wait(0)
        do.consumer_release(n)
    ds = probs * shifted
    q.consumer_wait(n)
    plgpu.wgmma(dk, _operand(_KEYS, ds, keys), q.get(n))
    plgpu.wgmma_wait(0)
    q.consumer_release(n)


def _product(keys: Ref, queries: Ref, problem: Problem) -> Array:
    """Multiplies keys by queriesᵀ, and waits for the product."""
    found = begin_product(keys, queries, interpret=problem.sizes.interpret)
    plgpu.wgmma_wait(0)
    return found


def _operand(me: int, x: Array, keys: _SharedKeys) -> Ref:
    """Returns x, rounded, as a left operand."""
    operand = keys.shared.operand
    memory = None if operand is None else operand.at[me]
    return as_operand(x.astype(keys.problem.dtype), memory)
