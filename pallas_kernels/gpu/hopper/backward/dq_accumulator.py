"""dQ as a sum in global memory, to which the dK and dV kernel adds.

A program that owns keys already has dS, so dS k costs it one product, where the dQ kernel takes
three. Many programs add to the same rows of dQ, in the order in which they reach them, so the last
bits of the float32 sums differ from run to run.

Warpgroups exchange dSᵀ in shared memory, so that each of them multiplies blocks of dQ, 64 by 64,
over the keys of both. The backward pass of FlashAttention-3 (arXiv 2407.08608) does so, too. Here
the product comes a step later, so that no warpgroup waits for the other's dSᵀ.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.machine.layouts import tiles_of
from pallas_kernels.gpu.hopper.machine.types import Accumulator, Ref, Scratch
from pallas_kernels.gpu.hopper.problem import Problem

_AHEAD = 2  # steps whose dSᵀ is in shared memory


class _DqMemory(NamedTuple):
    """Shared memory of a `DqAccumulator`.

    Attributes:
      ds: dSᵀ of two steps, in blocks of 64 keys by 64 queries.
      leaving: the block of dQ that leaves, for every warpgroup.
      written: barriers: all warpgroups have written the dSᵀ of a step.
      read: barriers: all warpgroups have read the dSᵀ of a step.
    """

    ds: Ref
    leaving: Ref
    written: Ref
    read: Ref


class DqAccumulator(NamedTuple):
    """What a warpgroup of a program uses to add to dQ.

    If a step has two blocks of dQ, each warpgroup adds one. If it has a single block, warpgroups
    add it in turn, step by step. Steps are counted from 0 in every key tile.

    Attributes:
      dq: float32 [parts, B, T, N, H], see `sums`.
      refs: the memory that `shared` describes.
      problem, tile: the kernel's problem and tile.
      me: the index of the warpgroup.
    """

    dq: Ref
    refs: _DqMemory
    problem: Problem
    tile: BackwardTile
    me: Array

    @staticmethod
    def shared(problem: Problem, tile: BackwardTile) -> Scratch:
        """The scratch types."""
        consumers, rows = tile.warpgroups, tile.step // ROWS
        barriers = (plgpu.Barrier(num_arrivals=consumers, num_barriers=_AHEAD) for _ in range(2))
        return _DqMemory(
            tiles_of((_AHEAD, consumers, rows, ROWS, ROWS), problem.dtype),
            tiles_of((consumers, ROWS, ROWS), jnp.float32),
            *barriers,
        )

    def write(self, ds: Array, t: Array) -> None:
        """Writes step t's dSᵀ of this warpgroup's keys, rounded, [64, step], for all to read."""
        slot = self._slot(t)
        pl.when(t >= _AHEAD)(partial(plgpu.barrier_wait, self.refs.read.at[slot]))
        for block in range(self.tile.step // ROWS):
            columns = ds[:, block * ROWS : (block + 1) * ROWS]
            self.refs.ds[slot, self.me, block] = columns
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.written.at[slot])

    def wait(self, t: Array) -> None:
        """Waits until all warpgroups have written step t's dSᵀ."""
        plgpu.barrier_wait(self.refs.written.at[self._slot(t)])

    def is_mine(self, t: Array) -> Array:
        """Whether this warpgroup has a block of step t."""
        blocks = self.tile.step * self.problem.head_size // ROWS**2
        if blocks == self.tile.warpgroups:
            return t >= 0
        return lax.rem(t, jnp.int32(self.tile.warpgroups)) == self.me

    def multiply(
        self, total: Accumulator, t: Array, keys: Callable[[Array], Ref], zero: Array
    ) -> None:
        """Starts the products for a block of dS k of step t, one for the keys of each warpgroup.

        Args:
          total: the accumulator [64, 64].
          t: the step.
          keys: returns k [64, H] of a warpgroup.
          zero: 0; within a loop an `unknown_zero`.
        """
        row, column = self._block()
        for w in range(self.tile.warpgroups):
            ds = self.refs.ds.at[self._slot(t), w, row]
            # dS from dSᵀ: the descriptor transposes bfloat16 operands.
            plgpu.wgmma(total, ds.T, keys(w + zero).at[:, pl.ds(column * ROWS, ROWS)])

    def release(self, t: Array) -> None:
        """Releases step t's dSᵀ, which this warpgroup no longer needs."""
        plgpu.barrier_arrive(self.refs.read.at[self._slot(t)])

    def add(self, total: Array, place: tuple[Array, ...]) -> None:
        """Adds a block to dQ. place: batch element, the step's first row, query head, key tile."""
        leaving = self.refs.leaving.at[self.me]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the block before has left
        # The copy engine adds (cp.reduce.async.bulk), so no thread waits for memory, as it would
        # with atomics. FlashAttention-3 does the same from a separate warp.
        leaving[...] = total
        plgpu.commit_smem()
        batch, start, head, tile = place
        row, column = self._block()
        # The interpreter cannot add in memory, so each key tile has a part of its own there.
        interpret = self.problem.sizes.interpret
        target = self.dq.at[
            tile if interpret else 0,
            batch,
            pl.ds(start + row * ROWS, ROWS),
            head,
            pl.ds(column * ROWS, ROWS),
        ]
        plgpu.copy_smem_to_gmem(leaving, target, reduction_op=None if interpret else "add")

    def producer_tail(self, steps: Array) -> None:
        """Waits after a key tile's last step until nobody reads its dSᵀ, or k for dQ, any more."""
        for back in range(1, _AHEAD + 1):
            slot = self._slot(steps - back)
            pl.when(steps >= back)(partial(plgpu.barrier_wait, self.refs.read.at[slot]))

    def _slot(self, t: Array) -> Array:
        return lax.rem(t, jnp.int32(_AHEAD))

    def _block(self) -> tuple[Array, Array]:
        """The row and the column of this warpgroup's block among the blocks of a step."""
        zero = self.me * 0
        if self.tile.step > ROWS:
            return self.me, zero
        return zero, self.me if self.problem.head_size > ROWS else zero


def sums(problem: Problem) -> Ref:
    """Returns float32 zeros to which dQ is added, a mutable array [parts, B, T, N, H].

    There is one part. The interpreter, which cannot add in memory, has one for every key tile.
    """
    parts = problem.by_key(problem.sizes.key_gradients).tiles if problem.sizes.interpret else 1
    shape = (parts, problem.batch, problem.rows, problem.heads, problem.head_size)
    return jax.new_ref(jnp.zeros(shape, jnp.float32))


def rounded(dq: Ref, problem: Problem) -> Array:
    """Returns dQ [B, T, N, H], rounded, from the array of `sums` that was added to."""
    total = dq[...].sum(axis=0)
    if problem.scales_last:
        total = total * jnp.float32(problem.spec.scale)
    return total.astype(problem.dtype)


def offset_of_dp(o: Array, do: Array, dlse: Array, problem: Problem) -> Array:
    """What dS adds to dP, [B, N, `vector_rows`]: −δ + dlse, times scale unless `scales_last`."""
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    of_dp = (dlse - delta).transpose(0, 2, 1)
    if not problem.scales_last:
        of_dp = of_dp * jnp.float32(problem.spec.scale)
    beyond = problem.vector_rows - problem.rows
    return lax.pad(of_dp, jnp.float32(0), ((0, 0, 0), (0, 0, 0), (0, beyond, 0)))
