"""The kernel of dK and dV.

A consumer warpgroup owns 64 keys and steps over the queries that see them, one after the other of
the heads that share the keys. Sᵀ and dPᵀ have a key per row, so that Pᵀ and dSᵀ can serve as left
operands unchanged. The arithmetic follows `lowprec_attn.arithmetic.backward` with P and dS rounded.
If a warpgroup has no registers for two sums, two warpgroups share 64 keys
(`cooperative_key_gradients`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper import producer
from pallas_kernels.gpu.hopper.backward import cooperative_key_gradients, key_operands
from pallas_kernels.gpu.hopper.backward.dq_accumulator import DqAccumulator
from pallas_kernels.gpu.hopper.backward.key_mainloop import Keys, mainloop
from pallas_kernels.gpu.hopper.backward.key_operands import OFFSET, KeyInputs, KeyMemory, Steps
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.ends import without_beyond
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.layouts import tiles_of, vectors_of
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import bits_of
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


def key_gradients(
    x: KeyInputs, problem: Problem, *, gradients: Ref | None = None, dq: Ref | None = None
) -> tuple[Array, ...]:
    """Returns dK and dV, or nothing if they are written to `gradients`.

    Args:
      x, problem: the arrays and the problem of the call.
      gradients: the gradient of a packed array, a mutable array. Its planes 1 and 2 are written.
      dq: the sums of `dq_accumulator`, a mutable array, to which dS k is added.
    """
    tile = problem.sizes.key_gradients
    if x.segments is not None:
        segments = x.segments.by_key(tile, problem.key_tiles(tile))
        x = x._replace(segments=segments._replace(rows=bits_of(segments.rows)))
    inputs, structure = jax.tree.flatten(x)
    shape = (problem.batch, problem.keys, problem.kv_heads)
    sizes = () if problem.packed else (problem.head_size, problem.value_size)
    shared: Scratch = _shared_memory(problem, tile, sums_queries=dq is not None)
    kernel = plgpu.kernel(
        partial(_kernel, structure=structure, problem=problem, tile=tile),
        out_type=[jax.ShapeDtypeStruct((*shape, size), problem.dtype) for size in sizes],
        scratch_types=[shared],
        grid=(problem.by_key(tile).grid,),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_key_gradients",
        **interpreter(on=problem.sizes.interpret),
    )
    return tuple(kernel(*inputs, *(ref for ref in (dq, gradients) if ref is not None)))


def _shared_memory(problem: Problem, tile: BackwardTile, *, sums_queries: bool) -> KeyMemory:
    """The scratch types."""
    consumers, own = tile.warpgroups, tile.owned // ROWS
    sizes = problem.head_size, problem.value_size
    # k and v are two buffers of one pipeline, because they come and go together. q and dO have a
    # pipeline each, because S needs q sooner than dP needs dO.
    keys = [tiles_of((tile.owned_stages, own, ROWS, n), problem.dtype) for n in sizes]
    q, do = (tiles_of((tile.stages, tile.step, n), problem.dtype) for n in sizes)
    offsets = vectors_of((tile.stages, tile.step))
    operand: Scratch = None
    if problem.sizes.from_memory:
        operand = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    probs: Scratch = Exchange.types() if tile.cooperative else None
    dv: Scratch = None
    if tile.cooperative and not problem.has_equal_sizes:
        dv = tiles_of((ROWS, problem.value_size), problem.dtype)
    of_q, of_do, copies = [q, offsets], [do, offsets], {"q": 2, "do": 2}
    if (vectors := len(key_operands.vectors_of_q(problem))) > 1:
        of_q[OFFSET] = vectors_of((tile.stages, vectors, tile.step))
        copies["q"] += problem.saves_inverse_l + problem.saves_log2_l + problem.has_segments
    if problem.has_segments:
        of_do.pop(OFFSET)  # the pipelines of q and dO share one buffer of vectors
    if problem.corrects_after_cast:
        of_do.append(q)
        copies["do"] += 1
    pipeline = partial(Pipeline.types, tile.stages, consumers=consumers)
    return KeyMemory(
        keys=Pipeline.types(tile.owned_stages, keys, copies=2 * own, consumers=consumers),
        q=pipeline(of_q, copies=copies["q"]),
        do=pipeline(of_do, copies=copies["do"]),
        operand=operand,
        dq=DqAccumulator.shared(problem, tile) if sums_queries else None,
        probs=probs,
        dv=dv,
    )


def _kernel(*refs: Ref, structure: Any, problem: Problem, tile: BackwardTile) -> None:
    x = jax.tree.unflatten(structure, refs[: structure.num_leaves])
    *out, scratch = refs[structure.num_leaves :]
    dq = None if scratch.dq is None else out.pop(0)
    dk, dv = out * 2 if problem.packed else out
    if x.segments is not None:
        of_do, *barriers = scratch.do
        of_do = (*of_do[:OFFSET], scratch.q[0][OFFSET], *of_do[OFFSET:])
        scratch = scratch._replace(do=(of_do, *barriers))
    shared = scratch._replace(
        keys=Pipeline(scratch.keys, tile.owned_stages),
        q=Pipeline(scratch.q, tile.stages),
        do=Pipeline(scratch.do, tile.stages),
    )
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    pl.when(me == consumers)(lambda: producer.load_key_tiles(x, shared, problem, tile))
    if tile.cooperative:
        shared = shared._replace(probs=Exchange(scratch.probs))
        consume = cooperative_key_gradients.consume
        pl.when(me < consumers)(lambda: consume(x, dk, dv, shared, problem, tile))
        return
    sums = None if dq is None else DqAccumulator(dq, scratch.dq, problem, tile, me)
    pl.when(me < consumers)(lambda: _consume(x, dk, dv, sums, shared, problem, tile))


def _consume(
    x: KeyInputs,
    dk: Ref,
    dv: Ref,
    dq: DqAccumulator | None,
    shared: KeyMemory,
    problem: Problem,
    tile: BackwardTile,
) -> None:
    """Computes one consumer's keys of all tiles of a program."""
    # dQ takes a third sum and its addresses, hence 240 registers a thread instead of 232.
    set_registers(tile.warpgroups, producer=False, most=dq is not None)
    program = lax.axis_index("program")
    me = lax.axis_index("warpgroup")
    # With operands from memory there are waits between products, and turns would only add to them.
    on = tile.ping_pong and not problem.sizes.from_memory
    ping_pong = PingPong(tile.warpgroups, me, on=on, held=tile.held)
    ping_pong.start()

    def begin(work: WorkTile, tiles: Array, start: Array, steps: Steps) -> Callable[[], None]:
        key = start + me * ROWS
        keys = Keys(problem, tile, shared, ping_pong, me, tiles, steps, key, work, dq, x.segments)
        return partial(_differentiate, x, dk, dv, keys)

    key_operands.each_tile(program, problem, tile, x.segments, begin)
    ping_pong.end()
    plgpu.wait_smem_to_gmem(0)  # shared memory is gone when the program ends


def _differentiate(x: KeyInputs, dk: Ref, dv: Ref, keys: Keys) -> None:
    """Computes one tile: its mainloop and its epilogue."""
    problem, shared, work = keys.problem, keys.shared, keys.work
    keys = keys._replace(ids=key_operands.KeyIds.of(keys.segments, work.batch, keys.key))
    end = x.end(work, problem)
    shared.keys.consumer_wait(keys.tiles)
    copies = []
    for buffer, total in enumerate(mainloop(keys)):
        if buffer == 0 and problem.scales_last:
            total = total * np.float32(problem.spec.scale)
        # dK leaves through the memory of its k, dV through that of its v.
        memory = shared.keys.get(keys.tiles, keys.me, buffer=buffer)
        memory[...] = without_beyond(total, keys.key, end).astype(problem.dtype)
        place = (work.batch, keys.key, ROWS, work.head)
        copies.append((memory, problem.part((dk, dv)[buffer], *place, plane=1 + buffer)))
    key_operands.epilogue(copies)
    shared.keys.consumer_release(keys.tiles)
