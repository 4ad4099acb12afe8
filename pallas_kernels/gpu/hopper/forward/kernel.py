"""The forward kernel: computes O, lse and, if δ sees another O, that one too.

A consumer warpgroup owns 64 query rows and steps over the keys that they see (FlashAttention-2,
arXiv 2307.08691, Algorithm 1). The arithmetic follows `lowprec_attn.arithmetic.softmax` with P̄ and
O rounded: Ō, m and l stay in float32 registers. Two overlaps of FlashAttention-3 (arXiv 2407.08608)
hide the softmax: consumers ping-pong (section 3.1), and P̄V of a step runs during the softmax of the
next (`mainloop`). Three more ideas come from the code of FlashAttention-3: S is multiplied without
first zeroing its accumulator, the wait for P̄V may come among the exponentials
(`ForwardTile.early_wait`), and the longest tiles may come first (`longest_first`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper import producer
from pallas_kernels.gpu.hopper.block_sizes import ROWS, ForwardTile
from pallas_kernels.gpu.hopper.ends import Ends
from pallas_kernels.gpu.hopper.forward.epilogue import epilogue
from pallas_kernels.gpu.hopper.forward.mainloop import (
    end_last_tile,
    mainloop,
    nothing_due,
    overlapped_mainloop,
)
from pallas_kernels.gpu.hopper.forward.operands import (
    Due,
    ForwardMemory,
    Inputs,
    Outputs,
    QueryRows,
)
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    along_rows,
    load,
    tiles_of,
    vectors_of,
)
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import Segments, ids_of_block

# The carry from tile to tile: how many tiles and steps are done, and what the last tile still owes.
_Carry = tuple[Array, Array, Due | None]


def forward(
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    segments: Segments | None = None,
    start: Array | None = None,
    ends: Ends | None = None,
) -> Outputs:
    """Runs the kernel. q, k and v may all be the packed array; see `Inputs`."""
    tile, n = problem.sizes.forward, problem.spec.numerics
    shape = (problem.batch, problem.rows, problem.heads, problem.value_size)
    vectors = (problem.batch, problem.heads, problem.vector_rows)
    statistics = jax.ShapeDtypeStruct(vectors, jnp.float32)
    out = {
        "o": jax.ShapeDtypeStruct(shape, problem.dtype),
        "lse": statistics,
        "offset": statistics,
    }
    if n.saved_dtype is not None:
        out["saved"] = jax.ShapeDtypeStruct(shape, n.saved_dtype)
    if problem.saves_inverse_l:
        out["inverse_l"] = statistics
    if problem.saves_log2_l:
        out["more"] = statistics
    if problem.spec.max_logit:
        out["max_logit"] = statistics
    if segments is not None:
        segments = segments.by_query(tile, problem.query_tiles(tile))
    given, structure = jax.tree.flatten(Inputs(q, k, v, segments, start, ends))
    shared: Scratch = _shared_memory(problem, tile)
    kernel = plgpu.kernel(
        partial(_kernel, structure=structure, names=tuple(out), problem=problem, tile=tile),
        out_type=list(out.values()),
        scratch_types=[shared],
        grid=(problem.by_query(tile).grid,),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_forward",
        **interpreter(on=problem.sizes.interpret),
    )
    return Outputs(**dict(zip(out, kernel(*given), strict=True)))


def _shared_memory(problem: Problem, tile: ForwardTile) -> ForwardMemory:
    """The scratch types."""
    consumers, saved_dtype = tile.warpgroups, problem.spec.numerics.saved_dtype
    # Each consumer owns 64 rows of q. They share one buffer, filled by one copy per consumer.
    owned = tiles_of((tile.owned_stages, consumers, ROWS, problem.head_size), problem.dtype)
    k, v = (
        tiles_of((tile.stages, tile.step, columns), problem.dtype)
        for columns in (problem.head_size, problem.value_size)
    )
    of_k = [k]
    if problem.has_segments:
        of_k.append(vectors_of((tile.stages, tile.step), jnp.int32))
    of_consumers = partial(tiles_of, (consumers, ROWS, problem.value_size))
    probs = saved = None
    if problem.sizes.from_memory:
        probs = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    if saved_dtype is not None and not problem.is_wide:
        saved = of_consumers(saved_dtype)
    return ForwardMemory(
        q=Pipeline.types(tile.owned_stages, [owned], copies=consumers, consumers=consumers),
        k=Pipeline.types(tile.stages, of_k, copies=len(of_k), consumers=consumers),
        v=Pipeline.types(tile.stages, [v], copies=1, consumers=consumers),
        # Every buffer begins at a multiple of 1,024 bytes, so ids leave no room for statistics.
        statistics=None if problem.has_segments else vectors_of((2, consumers, ROWS)),
        probs=probs,
        saved=saved,
        o=of_consumers(problem.dtype) if tile.overlap_tiles else None,
    )


def _kernel(
    *all_refs: Ref,
    structure: Any,
    names: tuple[str, ...],
    problem: Problem,
    tile: ForwardTile,
) -> None:
    x = jax.tree.unflatten(structure, all_refs[: structure.num_leaves])
    *refs_of_out, refs = all_refs[structure.num_leaves :]
    out = Outputs(**dict(zip(names, refs_of_out, strict=True)))
    shared = refs._replace(
        q=Pipeline(refs.q, tile.owned_stages),
        k=Pipeline(refs.k, tile.stages),
        v=Pipeline(refs.v, tile.stages),
    )
    # The producer comes last, so that consumers count from 0. FlashAttention-3's comes first.
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    pipelines = shared.q, shared.k, shared.v
    load = partial(producer.load_query_tiles, keys_twice=problem.rounds_products)
    keys = producer.LoadedKeys(x.k, x.v, x.segments, x.ends)
    pl.when(me == consumers)(lambda: load({"q": x.q}, keys, pipelines, problem, tile))
    pl.when(me < consumers)(lambda: _consume(x, out, shared, problem, tile))


def _consume(
    x: Inputs, out: Outputs, shared: ForwardMemory, problem: Problem, tile: ForwardTile
) -> None:
    """Computes one consumer's rows of all tiles of a program."""
    set_registers(tile.warpgroups, producer=False)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    me = lax.axis_index("warpgroup")
    ping_pong = PingPong(tile.warpgroups, me, on=tile.ping_pong and not problem.sizes.from_memory)
    ping_pong.start()

    # The P̄ that is due stays in registers. In shared memory (`from_memory`) the next P̄ would
    # overwrite it.
    overlaps = tile.overlap_tiles and not problem.sizes.from_memory

    def consume_tile(u: Array, carry: _Carry) -> _Carry:
        tiles, steps, due = carry
        work = scheduler.work_tile(program, u)
        # Steps are counted for the whole program: every consumer goes through all `last` steps,
        # although its rows may see fewer (`keys.end`).
        start = work.block * tile.owned
        visited = _, last = problem.program_steps(start, work.batch, tile, x.segments)
        row = start + me * ROWS
        keys = problem.consumer_steps(row, work.batch, tile, x.segments, visited)
        all_rows = QueryRows(problem, tile, shared, ping_pong, me, tiles, steps, row, keys)

        def attend(due: Due | None) -> Due | None:
            rows = all_rows
            if x.segments is not None:
                rows = rows._replace(ids=ids_of_block(x.segments.rows, work.batch, row))
            if x.start is not None:
                m, l = (load(x.start.at[i, work.head], PER_ROW, straight=False) for i in (0, 1))
                # l is kept in LANES parts. That is a power of two, so the division is exact.
                parts = along_rows(l * np.float32(1 / LANES), (ROWS, LANES))
                rows = rows._replace(start=(m, parts))
            if overlaps:
                assert due is not None
                softmax, acc = overlapped_mainloop(due, out, rows)
                return Due(acc, softmax, row, work.batch, work.head)
            softmax, acc, auxiliary = mainloop(rows)
            # JAX's own kernel has such a loop after its mainloop, too. With long steps all
            # consumers end together, and there is nothing to skip.
            if not problem.rounds_products:
                producer.skip((shared.k, shared.v), ping_pong, tile, steps, keys.end, last)
            epilogue(out, rows, softmax, acc, auxiliary, work.batch, work.head)
            return None

        # A program's last tile may not exist: the tiles need not divide evenly among programs.
        due = lax.cond(work.is_valid, attend, lambda due: due, due)
        tiles = tiles + work.is_valid.astype(jnp.int32)
        steps = steps + jnp.where(work.is_valid, last, 0)
        return tiles, steps, due

    zero = jnp.int32(0)
    due = nothing_due(problem, tile, has_sinks=x.start is not None) if overlaps else None
    nothing = zero, zero, due
    tiles, steps, due = lax.fori_loop(0, scheduler.count(program), consume_tile, nothing)
    ping_pong.end()
    if overlaps:
        none = KeySteps(zero, zero)
        rows = QueryRows(problem, tile, shared, ping_pong, me, tiles, steps, zero, none)
        end_last_tile(due, out, rows)
    plgpu.wait_smem_to_gmem(0)  # shared memory is gone when the program ends
    if not tile.overlap_tiles:
        shared.q.consumer_release(tiles - 1)  # the producer waits for it in its tail
