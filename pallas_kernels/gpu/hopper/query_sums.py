"""dQ as a sum in memory, to which the kernel of dK and dV adds.

A program that owns keys has dS in hand: dS k costs it one product, where the kernel of dQ takes
three. Many programs add to the same rows of dQ, in the order in which they come to them, so that
the last bits of its float32 sums differ from run to run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS, Tile
from pallas_kernels.gpu.hopper.machine import accumulator, tiles_of
from pallas_kernels.gpu.hopper.problem import Problem


class _Shared(NamedTuple):
    """Shared memory: dSᵀ of every warpgroup, in blocks of 64 queries, and what is added next.

    Barriers, where warpgroups take each other's dSᵀ: all have written it, all have read it.
    """

    operand: Any
    added: Any
    written: Any = None
    read: Any = None


class QuerySums(NamedTuple):
    """What the warpgroups of a program add to dQ.

    Where a step of all of them has as many blocks [64, 64] of dQ as there are warpgroups, each
    takes one, of everybody's keys. Otherwise each adds what its own keys give: more goes to memory,
    and nobody waits for another.

    Attributes:
      dq: float32 [parts, B, T, N, H], see `sums`.
      refs: of `shared`.
      problem, tile: of the kernel.
      me: the warpgroup.
    """

    dq: Any
    refs: _Shared
    problem: Problem
    tile: Tile
    me: Array

    @staticmethod
    def shared(problem: Problem, tile: Tile) -> Any:
        """The scratch types.

        Raises:
          ValueError: steps that leave a warpgroup more than a block of dQ.
        """
        workers, blocks = tile.warpgroups, tile.walk // ROWS
        together = blocks * problem.head_size == ROWS * workers
        if not together and (blocks > 1 or problem.head_size > ROWS):
            walk = ROWS * ROWS * workers // problem.head_size
            raise ValueError(
                f"unordered dQ takes a step of {walk} queries at head size {problem.head_size} "
                f"with {workers} warpgroups, got walk={tile.walk}"
            )
        barriers = (plgpu.Barrier(num_arrivals=workers) for _ in range(2 * together))
        return _Shared(
            tiles_of((workers, blocks, ROWS, ROWS), problem.dtype),
            tiles_of((workers, ROWS, ROWS), jnp.float32),
            *barriers,
        )

    def add(self, ds: Array, t: Array, key: Callable[[Any], Any], place: tuple[Array, ...]) -> None:
        """Adds dS k of a key tile's t-th step.

        Args:
          ds: dSᵀ of this warpgroup's keys, rounded, [64, walk].
          t: the step.
          key: k [64, H] of a warpgroup.
          place: batch element, first row, query head; the key tile.
        """
        operand, added, written, read = self.refs
        self.wait(t)
        for block in range(self.tile.walk // ROWS):
            operand[self.me, block] = ds[:, block * ROWS : (block + 1) * ROWS]
        plgpu.commit_smem()
        if written is not None:
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)
        together, zero = written is not None, self.me * 0
        row_block = self.me if together and self.tile.walk > ROWS else zero
        column = (self.me if together and self.tile.walk == ROWS else zero) * ROWS

        def product(total: Any) -> Array:
            for w in range(self.tile.warpgroups) if together else (self.me,):
                right = key(w).at[:, pl.ds(column, ROWS)]
                plgpu.wgmma(total, operand.at[w, row_block].T, right)
            return total[...]

        total = pl.run_scoped(product, accumulator(ROWS, ROWS))
        if read is not None:
            plgpu.barrier_arrive(read)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the sum before has left
        added[self.me] = total
        plgpu.commit_smem()
        batch, row, head, tile = place
        part = tile * self.tile.warpgroups + self.me
        rows = pl.ds(row + row_block * ROWS, ROWS)
        target = self.dq.at[part if self.problem.sizes.interpret else 0, batch, rows, head]
        plgpu.copy_smem_to_gmem(
            added.at[self.me],
            target.at[:, pl.ds(column, ROWS)],
            reduction_op=None if self.problem.sizes.interpret else "add",
        )

    def wait(self, steps: Array) -> None:
        """Until nobody reads this warpgroup's dSᵀ and k for the steps of a key tile done so far."""
        if (read := self.refs.read) is not None:
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(read))


def sums(problem: Problem) -> Any:
    """dQ to be added to, 0, as a mutable array [parts, B, T, N, H].

    There is one part, or, for the interpreter, which knows no sum in memory, one for every
    warpgroup of every key tile.
    """
    tile = problem.sizes.key_gradients
    parts = problem.by_key(tile).tiles * tile.warpgroups if problem.sizes.interpret else 1
    shape = (parts, problem.batch, problem.rows, problem.heads, problem.head_size)
    return jax.new_ref(jnp.zeros(shape, jnp.float32))


def rounded(dq: Any, problem: Problem) -> Array:
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
