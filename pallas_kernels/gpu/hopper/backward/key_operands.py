"""What the dK and dV kernels share: arrays, shared memory, and Pᵀ and dPᵀ of 64 keys."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.block_sizes import BackwardTile
from pallas_kernels.gpu.hopper.ends import Ends
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.instructions import any_of_step, multiply_add
from pallas_kernels.gpu.hopper.machine.layouts import PER_COLUMN, along_columns
from pallas_kernels.gpu.hopper.machine.layouts import load as load_values
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import Segments, ids_of_block, same
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class KeyInputs(NamedTuple):
    """The inputs of the dK and dV kernels: arrays outside of a kernel, references inside.

    Vectors are [B, N, `vector_rows`].

    Attributes:
      q, k, v: the three arrays; each of them is the packed array, if there is one.
      do: dO.
      offset: what the exponent of P adds.
      dp_offset: what dS adds to dP.
      inverse_l: 1 / l, a factor of P, if it is saved.
      more: what the exponent of P adds besides, if log₂ l is saved.
      correction: what corrects dK, see `query_operands.Gradients`.
      segments: the ids, if ids hide keys.
      ends: the ends of what is seen, if lengths alone hide keys.
    """

    q: Ref
    k: Ref
    v: Ref
    do: Ref
    offset: Ref
    dp_offset: Ref
    inverse_l: Ref = None
    more: Ref = None
    correction: Ref = None
    segments: Segments | None = None
    ends: Ends | None = None

    def end(self, work: WorkTile, problem: Problem) -> Array | None:
        """How many keys of the tile's batch element a row sees, if lengths alone hide keys."""
        return None if self.ends is None else self.ends.of_element(work.batch, problem).keys


class KeyMemory(NamedTuple):
    """Shared memory of the dK and dV kernels.

    Attributes:
      keys: the pipeline of k and v, which are its two buffers. dK and dV leave through them, unless
        there is a `dv`.
      q, do: the pipelines of q and of dO. The second buffer of each holds vectors: `vectors_of_q`,
        or `dp_offset`. What corrects dK is a third buffer of dO's pipeline.
      operand: Pᵀ and dSᵀ of every consumer, if products take them from memory (`from_memory`).
      dq: the memory of a `DqAccumulator`, if dQ is summed here.
      probs: Pᵀ on its way from one consumer to the other, if they are `cooperative`.
      dv: dV on its way out, if consumers are `cooperative` and dK is larger than v.
    """

    keys: Pipeline
    q: Pipeline
    do: Pipeline
    operand: Ref | None
    dq: Scratch | None
    probs: Exchange
    dv: Ref | None


class Steps(NamedTuple):
    """Steps of a key tile: query steps begin ... begin + length − 1, for every head of a group.

    `first` is the number of steps that the program has done before.
    """

    first: Array
    begin: Array
    length: Array

    def of(self, t: Array, kv_head: Array, group: int) -> tuple[Array, Array]:
        """The query head and the query step of the tile's t-th step."""
        if group == 1:
            return kv_head, self.begin + t
        return kv_head * group + lax.div(t, self.length), self.begin + lax.rem(t, self.length)


class KeyIds(NamedTuple):
    """The ids of 64 keys, and the query steps clear ... full − 1, which have no other ids."""

    of_keys: Array
    clear: Array
    full: Array

    @classmethod
    def of(cls, segments: Segments | None, batch: Array, key: Array) -> "KeyIds | None":
        """The ids of the keys from `key` on, or None if no ids hide keys."""
        if segments is None:
            return None
        ids = ids_of_block(segments.keys, batch, key)
        return cls(ids, *segments.alike(batch, key))

    def hide(self, step: Array) -> Array:
        """Whether a key and a row of a step may have different ids."""
        return (step < self.clear) | (step >= self.full)


OFFSET, CORRECTION = 1, 2  # buffers of the pipelines of q and of dO beside the matrix itself


def vectors_of_q(problem: Problem) -> list[str]:
    """The names of the vectors of a step's rows in the second buffer of q's pipeline, in order.

    If there are ids, the vector of dO's pipeline is among them: every buffer begins at a multiple
    of 1,024 bytes, and head size 256 has room for two.
    """
    there = {
        "offset": True,
        "inverse_l": problem.saves_inverse_l,
        "more": problem.saves_log2_l,
        "ids": problem.has_segments,
        "dp_offset": problem.has_segments,
    }
    return [name for name, is_there in there.items() if is_there]


def place_of(name: str, problem: Problem) -> tuple[int, ...]:
    """The index of a vector in the second buffer of q or dO; () if it is the only one there."""
    names = vectors_of_q(problem)
    return (names.index(name),) if name in names and len(names) > 1 else ()


def steps_of(
    problem: Problem,
    tile: BackwardTile,
    key: Array,
    work: WorkTile,
    first: Array,
    segments: Segments | None,
) -> Steps:
    """The steps of the tile that begins at `key`; no steps if that tile does not exist."""
    begin, end = problem.query_steps(key, work.batch, tile, segments)
    return Steps(first, begin, jnp.where(work.is_valid, end - begin, 0))


def each_tile(
    program: Array,
    problem: Problem,
    tile: BackwardTile,
    segments: Segments | None,
    begin: Callable[[WorkTile, Array, Array, Steps], Callable[[], None]],
) -> Array:
    """Does what `begin` returns for every tile of a program. Returns how many steps they have.

    Args:
      program: its index in the grid. The caller asks for it before the ping-pong starts, because
        the order of such instructions changes how the assembler allots registers.
      problem, tile, segments: the kernel's problem, tile and ids.
      begin: takes the tile, how many the program has done before, its first key, and its steps.
    """
    scheduler = problem.by_key(tile)

    def consume_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, first = done
        work = scheduler.work_tile(program, u)
        key = work.block * tile.owned
        steps = steps_of(problem, tile, key, work, first, segments)
        pl.when(work.is_valid)(begin(work, tiles, key, steps))
        return tiles + work.is_valid.astype(jnp.int32), first + steps.length * problem.group

    done = (jnp.int32(0), jnp.int32(0))
    _, steps = lax.fori_loop(0, scheduler.count(program), consume_tile, done)
    return steps


def probs(
    s: Array,
    q: Pipeline,
    n: Array,
    key: Array,
    row: Array,
    problem: Problem,
    ids: KeyIds | None = None,
) -> Array:
    """Returns Pᵀ, unrounded, from scores [64, step] of the keys from `key`, the rows from `row`.

    The n-th filling of q's pipeline has what the exponent adds, 1 / l, and the ids of the rows.
    What the exponent adds besides is read only in steps with a row of large scores.
    """

    def vector(name: str) -> Ref:
        return q.get(n, *place_of(name, problem), buffer=OFFSET)

    of_rows = along_columns(load_values(vector("offset"), PER_COLUMN, straight=False), s.shape)
    # Rounded once for certain where it must be, and where a branch follows that keeps the compiler
    # of interpreted kernels from contracting, so that a call without that branch has the same bits.
    if problem.whole_max or problem.saves_log2_l or problem.adds_padding_to_dq:
        log2_p = multiply_add(s, problem.log2_unit, of_rows, interpret=problem.sizes.interpret)
    else:
        # P comes from lse rather than from a new softmax: one multiply-add and one exponential
        # (FlashAttention-2, Algorithm 2). The forward kernel has formed lse·log2(e) once.
        log2_p = problem.rounded(s) * np.float32(problem.log2_unit) + of_rows
    hides = problem.hides_from_queries(key, row, s.shape[1])
    if ids is not None:
        by_ids = ids.hide(lax.div(row, jnp.int32(s.shape[1])))
        hides = by_ids if hides is None else hides | by_ids
    is_large = is_rare = None
    if problem.saves_log2_l:
        is_large = any_of_step(vector("more"), interpret=problem.sizes.interpret)
        is_rare = (is_large if hides is None else hides.astype(jnp.int32) | is_large) != 0
    if hides is not None or is_large is not None:

        def add_more() -> Array:
            more = load_values(vector("more"), PER_COLUMN, straight=False)
            return log2_p + along_columns(more, s.shape)

        def rarely() -> Array:
            found = log2_p
            if is_large is not None:
                found = lax.cond(is_large != 0, add_more, lambda: log2_p)
            if hides is None:
                return found
            alike = None if ids is None else same(ids.of_keys, vector("ids"))
            return problem.mask_queries(found, key, row, alike)

        log2_p = lax.cond(hides if is_rare is None else is_rare, rarely, lambda: log2_p)
    found = powers.recomputed(log2_p, problem)
    if not problem.saves_inverse_l:
        return found
    inverse_l = load_values(vector("inverse_l"), PER_COLUMN, straight=False)
    return found * along_columns(inverse_l, s.shape)


def shifted_dp(dp: Array, do: Pipeline, n: Array, problem: Problem) -> Array:
    """(dP − δ)ᵀ, times scale unless `scales_last`; the n-th filling of dO's pipeline has −δ."""
    dp = problem.rounded(dp)
    # A power of two commutes with the rounding of dS. With such a scale dK is scaled once summed.
    if not problem.scales_last:
        dp = dp * np.float32(problem.spec.scale)
    offset = do.get(n, *place_of("dp_offset", problem), buffer=OFFSET)
    return dp + along_columns(load_values(offset, PER_COLUMN, straight=False), dp.shape)


def epilogue(copies: list[tuple[Ref, Ref]]) -> None:
    """Copies shared memory to parts of arrays, for every (memory, part).

    The memory may be filled anew afterwards.
    """
    # The wait is needed because the memory is next released to the producer, for k and v.
    plgpu.commit_smem()
    for memory, part in copies:
        plgpu.copy_smem_to_gmem(memory, part)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
