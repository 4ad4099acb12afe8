"""What one warpgroup hands to another, a block of 64 by 64 float32 numbers at a time."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.machine.layouts import TILE, load, tiles_of

_AHEAD = 2  # blocks that the giver may be ahead of the taker


class Handover:
    """Blocks in shared memory, which one warpgroup gives and another takes, in order.

    Both count from 0; the giver drains when it has given the last.
    """

    def __init__(self, refs: Any) -> None:
        self._blocks, self._given, self._taken = refs

    @staticmethod
    def types() -> Any:
        """The scratch types."""
        barriers = (plgpu.Barrier(num_arrivals=1, num_barriers=_AHEAD) for _ in range(2))
        return (tiles_of((_AHEAD, ROWS, ROWS), jnp.float32), *barriers)

    def give(self, n: Array, block: Array) -> None:
        """The n-th block. Waits until the one in its place has been taken."""
        slot = self._slot(n)
        pl.when(n >= _AHEAD)(partial(plgpu.barrier_wait, self._taken.at[slot]))
        self._blocks[slot] = block
        plgpu.barrier_arrive(self._given.at[slot])

    def take(self, n: Array) -> Array:
        """The n-th block, when it is there."""
        slot = self._slot(n)
        plgpu.barrier_wait(self._given.at[slot])
        block = load(self._blocks.at[slot], TILE)
        plgpu.barrier_arrive(self._taken.at[slot])
        return block

    def drain(self, n: Array) -> None:
        """After n blocks, the last: until all have been taken."""
        for back in range(1, _AHEAD + 1):
            slot = self._slot(n - back)
            pl.when(n >= back)(partial(plgpu.barrier_wait, self._taken.at[slot]))

    def _slot(self, n: Array) -> Array:
        return lax.rem(n, jnp.int32(_AHEAD))
