"""A pipeline of blocks of 64 by 64 float32 numbers from one consumer warpgroup to another."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.machine.layouts import TILE, load, tiles_of
from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch

# Blocks on their way at once. With two, the warpgroup that produces may be a step ahead and does
# not wait for the other's longer step.
_STAGES = 2


class Exchange:
    """A pipeline between two consumer warpgroups: one produces blocks, the other takes them.

    Both count blocks from 0. The warpgroup that produces ends with `producer_tail`.
    """

    def __init__(self, refs: tuple[Ref, Ref, Ref]) -> None:
        self._blocks, self._full, self._empty = refs

    @staticmethod
    def types() -> Scratch:
        """The scratch types."""
        barriers = (plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES) for _ in range(2))
        return (tiles_of((_STAGES, ROWS, ROWS), jnp.float32), *barriers)

    def produce(self, n: Array, block: Array) -> None:
        """Writes the n-th block, after waiting until the block in its place has been consumed."""
        stage = self._stage(n)
        pl.when(n >= _STAGES)(partial(plgpu.barrier_wait, self._empty.at[stage]))
        # No `commit_smem`: the other warpgroup reads with loads, not through the copy engine or a
        # product.
        self._blocks[stage] = block
        plgpu.barrier_arrive(self._full.at[stage])

    def consume(self, n: Array) -> Array:
        """Waits for the n-th block and returns it."""
        stage = self._stage(n)
        plgpu.barrier_wait(self._full.at[stage])
        # In the layout of the writer: each thread reads what its counterpart has written.
        block = load(self._blocks.at[stage], TILE)
        plgpu.barrier_arrive(self._empty.at[stage])
        return block

    def producer_tail(self, n: Array) -> None:
        """Waits, after n blocks in all, until all of them have been consumed."""
        for back in range(1, _STAGES + 1):
            stage = self._stage(n - back)
            pl.when(n >= back)(partial(plgpu.barrier_wait, self._empty.at[stage]))

    def _stage(self, n: Array) -> Array:
        return lax.rem(n, jnp.int32(_STAGES))
