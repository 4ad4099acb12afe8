"""dK and dV of 64 keys by two warpgroups, where one has no registers for both sums.

The first forms Pᵀ and sums dV. It hands Pᵀ, not rounded, to the second, which forms dPᵀ and sums
dK. So each has two of the four products, and nothing is computed twice. The arithmetic and the
order of every sum are those of `key_gradients`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.backward import key_operands
from pallas_kernels.gpu.hopper.backward.key_operands import Shared, Steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.instruction_order import opaque_zero
from pallas_kernels.gpu.hopper.machine.warpgroups import set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile

_VALUES, _KEYS = range(2)  # the warpgroup that sums dV, and that which sums dK


def consume(dk: Any, dv: Any, shared: Shared, problem: Problem, tile: BackwardTile) -> None:
    """All tiles of a program, by both warpgroups that multiply."""
    set_registers(tile.warpgroups, producer=False)
    me = lax.axis_index("warpgroup")

    def sum_values() -> None:
        given = _sum(_VALUES, _Walk.add_values, dv, shared, problem, tile)
        shared.probs.producer_tail(given)

    def sum_keys() -> None:
        _sum(_KEYS, _Walk.add_keys, dk, shared, problem, tile)

    pl.when(me == _VALUES)(sum_values)
    pl.when(me == _KEYS)(sum_keys)
    plgpu.wait_smem_to_gmem(0)


def _sum(
    me: int,
    add: Callable[["_Walk", Array, Any], None],
    out: Any,
    shared: Shared,
    problem: Problem,
    tile: BackwardTile,
) -> Array:
    """All tiles of one of the two, each step of which is `add`; how many steps that were."""

    def begin(work: WorkTile, tiles: Array, key: Array, steps: Steps) -> Callable[[], None]:
        walk = _Walk(problem, tile, shared, tiles, steps, key, work)
        return partial(differentiate, walk, work, tiles, key)

    def differentiate(walk: _Walk, work: WorkTile, tiles: Array, key: Array) -> None:
        shared.keys.consumer_wait(tiles)
        total = pl.run_scoped(partial(walk.run, add), accumulator(ROWS, problem.head_size))
        if me == _KEYS and problem.scales_last:
            total = total * np.float32(problem.spec.scale)
        # Through what this warpgroup alone has read, and needs no more: dV where k was, dK where v.
        memory = shared.keys.get(tiles, 0, buffer=me)
        memory[...] = total.astype(problem.dtype)
        place = (work.batch, key, ROWS, work.head)
        key_operands.store([(memory, problem.part(out, *place, plane=2 if me == _VALUES else 1))])
        shared.keys.consumer_release(tiles)

    return key_operands.each_tile(lax.axis_index("program"), problem, tile, begin)


class _Walk(NamedTuple):
    """64 keys of a program, which walk over query steps; `tiles`: what was done before."""

    problem: Problem
    tile: BackwardTile
    shared: Shared
    tiles: Array
    steps: Steps
    key: Array
    work: WorkTile

    def run(self, add: Callable[["_Walk", Array, Any], None], total: Any) -> Array:
        """The sum over all steps."""
        end = self.steps.length * self.problem.group
        lax.fori_loop(0, end, lambda t, _: add(self, t, total), None)
        return plgpu.wgmma_accumulator_load(total, wait_n=None)

    def add_values(self, t: Array, dv: Any) -> None:
        """Pᵀ dO of step t; gives Pᵀ away."""
        n, problem, q, do = self.steps.first + t, self.problem, self.shared.q, self.shared.do
        _, step = self.steps.of(t, self.work.head, problem.group)
        q.consumer_wait(n)
        s = self._product(self.shared.keys.get(self.tiles, 0, buffer=0), q.get(n))
        # Otherwise the place of every entry would be kept in registers, for the mask.
        key = self.key + opaque_zero(n, interpret=problem.sizes.interpret)
        probs = key_operands.probs(s, q.get(n, buffer=1), key, step * self.tile.step, problem)
        q.consumer_release(n)
        self.shared.probs.produce(n, probs)
        do.consumer_wait(n)
        plgpu.wgmma(dv, self._operand(_VALUES, probs), do.get(n))
        plgpu.wgmma_wait(0)
        do.consumer_release(n)

    def add_keys(self, t: Array, dk: Any) -> None:
        """dSᵀ q of step t, with the Pᵀ of the other."""
        n, q, do = self.steps.first + t, self.shared.q, self.shared.do
        do.consumer_wait(n)
        dp = self._product(self.shared.keys.get(self.tiles, 0, buffer=1), do.get(n))
        shifted = key_operands.shifted_dp(dp, do.get(n, buffer=1), self.problem)
        do.consumer_release(n)
        ds = self.shared.probs.consume(n) * shifted
        q.consumer_wait(n)
        plgpu.wgmma(dk, self._operand(_KEYS, ds), q.get(n))
        plgpu.wgmma_wait(0)
        q.consumer_release(n)

    def _product(self, keys: Any, queries: Any) -> Array:
        """keys queriesᵀ, waited for."""
        found = begin_product(keys, queries, interpret=self.problem.sizes.interpret)
        plgpu.wgmma_wait(0)
        return found

    def _operand(self, me: int, x: Array) -> Any:
        """x, rounded, as a left operand."""
        operand = self.shared.operand
        return as_operand(x.astype(self.problem.dtype), None if operand is None else operand.at[me])
