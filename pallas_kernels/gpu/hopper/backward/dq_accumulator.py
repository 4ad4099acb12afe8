"""dQ as a sum in memory, to which the kernel of dK and dV adds.

A program that owns keys has dS in hand: dS k costs it one product, where the kernel of dQ takes
three. Many programs add to the same rows of dQ, in the order in which they come to them, so that
the last bits of its float32 sums differ from run to run.

Warpgroups exchange dSᵀ in shared memory, so that each of them multiplies blocks of dQ, 64 by 64,
over the keys of both. FlashAttention-3's backward pass (arXiv 2407.08608) does so, too; here a
product is a step behind, where nobody waits for the dSᵀ of the other.
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
    """Shared memory: dSᵀ of two steps, in blocks of 64 keys by 64 queries; the sums that leave.

    Barriers of a step: all warpgroups have written its dSᵀ, all have read it.
    """

    ds: Ref
    leaving: Ref
    written: Ref
    read: Ref


class DqAccumulator(NamedTuple):
    """What the warpgroups of a program add to dQ.

    A step of two blocks of dQ has one for each warpgroup. If it has but one, they take ping_pong.
    Steps are counted from 0 in every key tile.

    Attributes:
      dq: float32 [parts, B, T, N, H], see `sums`.
      refs: of `shared`.
      problem, tile: of the kernel.
      me: the warpgroup.
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
        """Gives step t's dSᵀ of this warpgroup's keys, rounded, [64, step], to all."""
        slot = self._slot(t)
        pl.when(t >= _AHEAD)(partial(plgpu.barrier_wait, self.refs.read.at[slot]))
        for block in range(self.tile.step // ROWS):
            columns = ds[:, block * ROWS : (block + 1) * ROWS]
            self.refs.ds[slot, self.me, block] = columns
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.written.at[slot])

    def wait(self, t: Array) -> None:
        """Until all have written step t's dSᵀ."""
        plgpu.barrier_wait(self.refs.written.at[self._slot(t)])

    def is_mine(self, t: Array) -> Array:
        """Whether a block of step t is this warpgroup's."""
        blocks = self.tile.step * self.problem.head_size // ROWS**2
        if blocks == self.tile.warpgroups:
            return t >= 0
        return lax.rem(t, jnp.int32(self.tile.warpgroups)) == self.me

    def multiply(
        self, total: Accumulator, t: Array, keys: Callable[[Array], Ref], zero: Array
    ) -> None:
        """Starts the products of step t: a block of dS k, as many products as warpgroups.

        Args:
          total: registers [64, 64].
          t: the step.
          keys: k [64, H] of a warpgroup.
          zero: an `unknown_zero` in a loop.
        """
        row, column = self._block()
        for w in range(self.tile.warpgroups):
            ds = self.refs.ds.at[self._slot(t), w, row]
            # dS from dSᵀ: the descriptor transposes bfloat16 operands.
            plgpu.wgmma(total, ds.T, keys(w + zero).at[:, pl.ds(column * ROWS, ROWS)])

    def release(self, t: Array) -> None:
        """This warpgroup needs step t's dSᵀ no more."""
        plgpu.barrier_arrive(self.refs.read.at[self._slot(t)])

    def add(self, total: Array, place: tuple[Array, ...]) -> None:
        """Adds a block to dQ. place: batch element, the step's first row, query head; key tile."""
        leaving = self.refs.leaving.at[self.me]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the block before has left
        # The copy engine adds (cp.reduce.async.bulk): no thread waits for memory, as with atomics.
        # FlashAttention-3 does the same, through a warp of its own.
        leaving[...] = total
        plgpu.commit_smem()
        batch, start, head, tile = place
        row, column = self._block()
        # The interpreter has no sum in memory: there each key tile has a part of its own.
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
        """After the last of a key tile's steps: until nobody reads dSᵀ or k for them any more."""
        for back in range(1, _AHEAD + 1):
            slot = self._slot(steps - back)
            pl.when(steps >= back)(partial(plgpu.barrier_wait, self.refs.read.at[slot]))

    def _slot(self, t: Array) -> Array:
        return lax.rem(t, jnp.int32(_AHEAD))

    def _block(self) -> tuple[Array, Array]:
        """Row and column of this warpgroup's block of a step."""
        zero = self.me * 0
        if self.tile.step > ROWS:
            return self.me, zero
        return zero, self.me if self.problem.head_size > ROWS else zero


def sums(problem: Problem) -> Ref:
    """dQ to be added to, 0, as a mutable array [parts, B, T, N, H].

    There is one part, or, for the interpreter, which knows no sum in memory, one for every key
    tile.
    """
    parts = problem.by_key(problem.sizes.key_gradients).tiles if problem.sizes.interpret else 1
    shape = (parts, problem.batch, problem.rows, problem.heads, problem.head_size)
    return jax.new_ref(jnp.zeros(shape, jnp.float32))


def rounded(dq: Ref, problem: Problem) -> Array:
    """dQ [B, T, N, H] of the array that was added to."""
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
