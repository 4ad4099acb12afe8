"""The epilogue of the forward kernel: forms Ō / l and lse and stores them to global memory."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.powers import LN2
from lowprec_attn.numerics import MASKED
from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.forward.operands import Outputs, QueryRows, Softmax
from pallas_kernels.gpu.hopper.machine.instructions import unpacked
from pallas_kernels.gpu.hopper.machine.layouts import PER_ROW, TILE_ROWS, along_rows, constant
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.problem import LARGE, Problem


def epilogue(
    out: Outputs,
    rows: QueryRows,
    softmax: Softmax,
    acc: Array,
    auxiliary: Array | None,
    batch: Array,
    head: Array,
) -> None:
    """Divides by l, rounds O and starts the copies of O and lse.

    A row whose scores are all −inf is treated like a row that sees no key: O = 0, lse = −inf and,
    in the backward pass, P = 0.

    Args:
      out: the output arrays.
      rows, softmax: 64 rows of a tile, and their softmax after the last step.
      acc: Ō [64, V].
      auxiliary: Ō′ − Ō, if it is kept.
      batch, head: the batch element and the head of the rows.
    """
    problem, shared, me = rows.problem, rows.shared, rows.me
    empty = softmax.m <= np.float32(MASKED)
    infinity = constant((ROWS,), np.inf, PER_ROW)
    # The only reduction of l across the threads of a row: until here each thread has a part of l.
    l = problem.rounded(softmax.l.sum(axis=1))
    l = jnp.where(empty, infinity, l)  # O = Ō / ∞ = 0
    inverse_l = None
    if problem.saves_inverse_l:
        # O takes the same 1 / l as P, so that its error is the same in Σ P dP and in δ.
        inverse_l = 1 / l

    def divided(acc: Array) -> Array:
        """Returns acc / l."""
        if inverse_l is None:
            return acc / along_rows(l, acc.shape)
        return acc * along_rows(inverse_l, acc.shape)

    o = divided(acc)
    if shared.o is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # O of the tile before has long left
        memory = shared.o.at[me]
    else:
        # q is no longer read, so O takes its memory. FlashAttention-3 takes the memory of V.
        memory = shared.q.get(rows.tiles, me)
    place = (batch, rows.row, ROWS, head)
    if shared.o is not None or problem.has_equal_sizes:
        memory[...] = o.astype(problem.dtype)
        copies = [(memory, problem.part(out.o, *place))]
    else:
        copies = _within_q(memory, o.astype(problem.dtype), out, rows, batch, head)
    if out.saved is not None:
        if problem.saves_halves:
            o = o - unpacked(o.astype(problem.dtype), interpret=problem.sizes.interpret)
        elif auxiliary is not None:
            o = divided(acc + auxiliary)
        o, part = o.astype(out.saved.dtype), problem.part(out.saved, *place)
        if shared.saved is None:
            problem.store_from_registers(rows.row, o, part, end=problem.rows)
        else:
            shared.saved.at[me][...] = o
            copies.append((shared.saved.at[me], part))
    vectors = []
    is_large = None
    if problem.saves_log2_l:
        is_large = _is_large(softmax.m, l, problem)
    for i, (ref, x, factor) in enumerate(_statistics(out, softmax.m, l, is_large, problem)):
        x = jnp.where(empty, -infinity, x * np.float32(factor))
        part = ref.at[batch, head, pl.ds(rows.row, ROWS)]
        if shared.statistics is None:
            problem.store_from_registers(rows.row, x, part, end=problem.vector_rows)
            continue
        shared.statistics.at[i, me][...] = x
        vectors.append((shared.statistics.at[i, me], part))
    if inverse_l is not None:
        part = out.inverse_l.at[batch, head, pl.ds(rows.row, ROWS)]
        problem.store_from_registers(rows.row, inverse_l, part, end=problem.vector_rows)
    if is_large is not None:
        log2_l = jnp.where(empty, np.float32(0), lax.log2(l))  # type: ignore[attr-defined]  # not in JAX 0.10
        more = jnp.where(is_large, -log2_l, np.float32(0))
        part = out.more.at[batch, head, pl.ds(rows.row, ROWS)]
        problem.store_from_registers(rows.row, more, part, end=problem.vector_rows)
    if out.max_logit is not None:
        largest = softmax.m if softmax.max_logit is None else softmax.max_logit
        none = largest <= np.float32(MASKED)
        largest = jnp.where(none, -infinity, largest * np.float32(problem.unit))
        part = out.max_logit.at[batch, head, pl.ds(rows.row, ROWS)]
        problem.store_from_registers(rows.row, largest, part, end=problem.vector_rows)
    plgpu.commit_smem()  # makes the threads' stores visible to the copy engine
    for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target)
    # There is no wait here: O leaves while the next tile begins (`free_last_output`).
    problem.store_rows(rows.row, vectors)


def _within_q(
    memory: Ref, o: Array, out: Outputs, rows: QueryRows, batch: Array, head: Array
) -> list[tuple[Ref, Ref]]:
    """Writes O to the first V columns of its q's memory; returns the copies that store it.

    The copy engine reads memory without gaps. These columns have none within a tile's rows.
    """
    columns = pl.ds(0, o.shape[1])
    memory[:, columns] = o
    copies = []
    for first in range(0, ROWS, TILE_ROWS):
        part = rows.problem.part(out.o, batch, rows.row + first, TILE_ROWS, head)
        copies.append((memory.at[pl.ds(first, TILE_ROWS), columns], part))
    return copies


def _is_large(m: Array, l: Array, problem: Problem) -> Array:
    """Which rows [64] have large scores, if they see a key."""
    return jnp.abs(_lse(m, l, problem)) > np.float32(LARGE / problem.log2_unit)


def _lse(m: Array, l: Array, problem: Problem) -> Array:
    """Returns lse in the units of m, so that no sum has two products.

    The compiler may choose which of two products it rounds, so changes in other code would change
    the bits.
    """
    return m + lax.log2(l) * np.float32(1 / problem.log2_unit)  # type: ignore[attr-defined]  # not in JAX 0.10


def _statistics(
    out: Outputs, m: Array, l: Array, is_large: Array | None, problem: Problem
) -> list[tuple[Ref, Array, float]]:
    """For lse and offset: the output, its values [64] if rows see a key, and their factor.

    is_large: which rows have large scores, if log₂ l is saved.
    """
    if problem.whole_max:
        lse = m + powers.log2_of(l)
        return [(out.lse, lse, LN2), (out.offset, powers.offset(m), -1.0)]
    lse = _lse(m, l, problem)
    subtracted = m if problem.saves_inverse_l else lse
    if is_large is not None:
        subtracted = jnp.where(is_large, m, lse)
    return [(out.lse, lse, problem.unit), (out.offset, subtracted, -problem.log2_unit)]


def free_last_output(rows: QueryRows) -> None:
    """Waits until the O of the tile before has left the memory that the next q takes."""

    def release() -> None:
        # Waits until the copy has read the memory, not until O has arrived.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows.shared.q.consumer_release(rows.tiles - 1)

    pl.when(rows.tiles > 0)(release)
