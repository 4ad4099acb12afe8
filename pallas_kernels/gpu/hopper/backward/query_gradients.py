"""The kernel of dQ and δ; the dK and dV kernel reads δ.

A consumer warpgroup owns 64 query rows and steps over the keys that they see. Programs own query
rows here, and keys in the dK and dV kernel, so every sum is taken in a fixed order, without atomics
and with the same bits on every run. The arithmetic follows `lowprec_attn.arithmetic.backward` with
P and dS rounded.

With `delta='normalized'` the kernel also sums dS, P and P k over the keys, and corrects dQ by Σ P k
in the end. If a warpgroup has no registers for both dQ and Σ P k, two warpgroups share 64 rows
(`cooperative_query_gradients`). With `delta='after_cast'` the sums are of the rounded dS and P, and
the kernel also stores −λ q, whose product with Pᵀ corrects dK.
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

from lowprec_attn.arithmetic.request import BackwardSums
from pallas_kernels.gpu.hopper import producer
from pallas_kernels.gpu.hopper.backward import cooperative_query_gradients
from pallas_kernels.gpu.hopper.backward.query_mainloop import BackwardRows, mainloop
from pallas_kernels.gpu.hopper.backward.query_operands import (
    DO,
    Gradients,
    Large,
    Q,
    QueryInputs,
    QueryMemory,
    correction_of_dk,
    delta,
    lacks_of,
    of_rows,
)
from pallas_kernels.gpu.hopper.block_sizes import ROWS, BackwardTile
from pallas_kernels.gpu.hopper.ends import without_beyond
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.layouts import (
    TILE,
    along_rows,
    load,
    tiles_of,
    vectors_of,
)
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import ids_of_block
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


def query_gradients(x: QueryInputs, problem: Problem, *, reports: bool = False) -> Gradients:
    """Returns dQ and what else the kernel finds; `reports`: with `BackwardSums`.

    dS adds −δ + dlse to dP, times scale unless `scales_last`; with `delta='after_cast'` it adds −δ₀
    instead. For a packed array, dQ is plane 0 of an array like it, whose other planes are not
    written.
    """
    tile = problem.sizes.query_gradients
    if x.segments is not None:
        x = x._replace(segments=x.segments.by_query(tile, problem.query_tiles(tile)))
    given, structure = jax.tree.flatten(x)
    shared: Scratch = _shared_memory(x, problem, tile)
    vector: Ref = jax.ShapeDtypeStruct(x.offset.shape, jnp.float32)
    found = Gradients(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), vector)
    if problem.corrects_after_cast:
        found = found._replace(correction=jax.ShapeDtypeStruct(x.do.shape, x.q.dtype))
    if reports:
        found = found._replace(row_sums=BackwardSums(vector, vector))
    out, structure_of_out = jax.tree.flatten(found)
    structures = structure, structure_of_out
    kernel = plgpu.kernel(
        partial(_kernel, structures=structures, problem=problem, tile=tile),
        out_type=out,
        scratch_types=[shared],
        grid=(problem.by_query(tile).grid,),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_query_gradients",
        **interpreter(on=problem.sizes.interpret),
    )
    return jax.tree.unflatten(structure_of_out, kernel(*given))


def _shared_memory(x: QueryInputs, problem: Problem, tile: BackwardTile) -> QueryMemory:
    """The scratch types."""
    consumers, own = tile.warpgroups, tile.owned // ROWS
    # O is loaded with q and dO, for δ. FlashAttention-3 computes δ in a separate kernel before. At
    # head size 256 there is no room for O, which then goes from global memory to registers.
    features, values = problem.head_size, problem.value_size
    loaded = [(features, problem.dtype), (values, problem.dtype)]
    if not problem.is_wide:
        loaded += [(values, o.dtype) for o in (x.o, x.o_low) if o is not None]
    k = tiles_of((tile.stages, tile.step, features), problem.dtype)
    v = tiles_of((tile.stages_of_v, tile.step, values), problem.dtype)
    of_k, delta = [k], vectors_of((own, ROWS))
    if problem.has_segments:
        of_k.append(vectors_of((tile.stages, tile.step), jnp.int32))
        # Every buffer begins at a multiple of 1,024 bytes, so ids leave no room for delta.
        delta = None
    operand: Scratch = None
    if problem.sizes.from_memory:
        operand = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    probs: Scratch = Exchange.types() if tile.cooperative else None
    return QueryMemory(
        rows=Pipeline.types(
            tile.owned_stages,
            [tiles_of((tile.owned_stages, own, ROWS, n), dtype) for n, dtype in loaded],
            copies=len(loaded) * own,
            consumers=consumers,
        ),
        k=Pipeline.types(tile.stages, of_k, copies=len(of_k), consumers=consumers),
        # Only one of two cooperative consumers reads v.
        v=Pipeline.types(
            tile.stages_of_v, [v], copies=1, consumers=1 if tile.cooperative else consumers
        ),
        delta=delta,
        operand=operand,
        probs=probs,
    )


def _kernel(*refs: Ref, structures: Any, problem: Problem, tile: BackwardTile) -> None:
    structure, structure_of_out = structures
    x = jax.tree.unflatten(structure, refs[: structure.num_leaves])
    *of_out, scratch = refs[structure.num_leaves :]
    out = jax.tree.unflatten(structure_of_out, of_out)
    shared = scratch._replace(
        rows=Pipeline(scratch.rows, tile.owned_stages),
        k=Pipeline(scratch.k, tile.stages),
        v=Pipeline(scratch.v, tile.stages_of_v),
    )
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    rows = {"q": x.q, "do": x.do}
    if not problem.is_wide:
        rows["o"] = x.o
        if problem.saves_halves:
            rows["o_low"] = x.o_low
    pipelines = shared.rows, shared.k, shared.v
    keys = producer.LoadedKeys(x.k, x.v, x.segments, x.ends)
    load = partial(producer.load_query_tiles, most=problem.is_wide)
    pl.when(me == consumers)(lambda: load(rows, keys, pipelines, problem, tile))
    if tile.cooperative:
        shared = shared._replace(probs=Exchange(scratch.probs))
    consume = cooperative_query_gradients.consume if tile.cooperative else _consume
    pl.when(me < consumers)(lambda: consume(x, out, shared, problem, tile))


def _consume(
    x: QueryInputs, out: Gradients, shared: QueryMemory, problem: Problem, tile: BackwardTile
) -> None:
    """Computes one consumer's rows of all tiles of a program."""
    set_registers(tile.warpgroups, producer=False, most=problem.is_wide)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    me = lax.axis_index("warpgroup")
    on = tile.ping_pong and not problem.sizes.from_memory
    ping_pong = PingPong(tile.warpgroups, me, on=on, held=tile.held)
    ping_pong.start()

    def consume_tile(u: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, steps = done
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned
        visited = _, last = problem.program_steps(start, work.batch, tile, x.segments)
        row = start + me * ROWS
        keys = problem.consumer_steps(row, work.batch, tile, x.segments, visited)

        def differentiate() -> None:
            offset, dlse = (of_rows(vectors, work, row) for vectors in (x.offset, x.dlse))
            end = x.end(work, problem)
            shared.rows.consumer_wait(tiles)
            # Once a row, before the mainloop: in the loop it would be read anew in every step.
            of_dp = -delta(x, shared.rows, tiles, me, work, row, problem)
            if not problem.scales_last:
                of_dp, dlse = (x * np.float32(problem.spec.scale) for x in (of_dp, dlse))
            if not problem.sums_rows:
                of_dp = of_dp + dlse
            rows = BackwardRows(
                problem, tile, shared, ping_pong, me, tiles, steps, row, keys, offset, of_dp
            )
            if x.segments is not None:
                rows = rows._replace(ids=ids_of_block(x.segments.rows, work.batch, row))
            if x.inverse_l is not None:
                rows = rows._replace(inverse_l=of_rows(x.inverse_l, work, row))
            rows = rows._replace(large=Large.of(x, work, row, problem))
            rows = rows._replace(reports=out.row_sums is not None)
            sums = mainloop(rows)
            total, lacks = sums.dq, None
            if sums.pk is not None:
                lacks = lacks_of(sums.ds[0], sums.p[0], dlse, problem)
                if problem.normalizes_delta:
                    rows = rows._replace(of_dp=of_dp - lacks)
                total = total - along_rows(lacks, total.shape) * sums.pk
            # The dK and dV kernel reads it, so that kernel runs after this one.
            if shared.delta is not None:
                shared.delta[me] = rows.of_dp
            if out.row_sums is not None:
                found = sums.reported(lacks, rows.inverse_l, problem)
                for of_sum, stored in zip(found, out.row_sums, strict=True):
                    part = stored.at[work.batch, work.head, pl.ds(row, ROWS)]
                    problem.store_from_registers(row, of_sum, part, end=problem.vector_rows)
            producer.skip((shared.k, shared.v), ping_pong, tile, steps, keys.end, last)
            _epilogue(out, without_beyond(total, row, end), lacks, work, rows)

        pl.when(work.is_valid)(differentiate)
        tiles = tiles + work.is_valid.astype(jnp.int32)
        return tiles, steps + jnp.where(work.is_valid, last, 0)

    none = (jnp.int32(0), jnp.int32(0))
    lax.fori_loop(0, scheduler.count(program), consume_tile, none)
    ping_pong.end()
    plgpu.wait_smem_to_gmem(0)  # shared memory is gone when the program ends


def _epilogue(
    out: Gradients, total: Array, lacks: Array | None, work: WorkTile, rows: BackwardRows
) -> None:
    """Scales and rounds dQ, which leaves through the memory of its q; stores δ.

    lacks: λ, or what δ₀ lacks, see `lacks_of`.
    """
    problem, shared, me, row = rows.problem, rows.shared, rows.me, rows.row
    if problem.scales_last:
        total = total * np.float32(problem.spec.scale)
    memory = shared.rows.get(rows.tiles, me, buffer=Q)
    correction = None
    if problem.corrects_after_cast:
        assert lacks is not None
        # It leaves through the memory of dO, which this warpgroup no longer needs.
        correction = shared.rows.get(rows.tiles, me, buffer=DO)
        correction[...] = correction_of_dk(load(memory, TILE), lacks, problem)
    memory[...] = total.astype(problem.dtype)
    plgpu.commit_smem()
    offsets = out.dp_offset.at[work.batch, work.head, pl.ds(row, ROWS)]
    if shared.delta is None:
        problem.store_from_registers(row, rows.of_dp, offsets, end=problem.vector_rows)
    else:
        problem.store_rows(row, [(shared.delta.at[me], offsets)])
    part = problem.part(out.dq, work.batch, row, ROWS, work.head)
    plgpu.copy_smem_to_gmem(memory, part)
    if correction is not None:
        part = problem.part(out.correction, work.batch, row, ROWS, work.head)
        plgpu.copy_smem_to_gmem(correction, part)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.rows.consumer_release(rows.tiles)
