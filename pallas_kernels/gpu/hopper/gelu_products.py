"""The products on both sides of an MLP's activation, fused with GELU or with its gradient.

`product_and_gelu` computes x w and its GELU. `gelu_gradient_of_product` computes the gradient of
x w from the gradient of its GELU, which is itself a product. A separate pass over memory, for GELU
or for its gradient, would add about half the time of such a product. Here two warpgroups of a
program multiply, 64 rows each. They leave the rounded sums of a tile in shared memory and go on
with the next tile. Meanwhile two epilogue warpgroups do the arithmetic and store. The fifth
warpgroup, the producer, loads.

Two programs of a cluster own neighbouring rows and the same columns. Each loads half of their part
of w, and the copy engine hands it to both.

The lower bounds on one H200, at 65,536 rows of 768 and 3,072 columns, are 0.39 ms for 309 GFLOP at
790 TFLOP/s, and 0.21 ms for 0.91 GB at 4.3 TB/s. Programs fetch 2.4 GB, nearly all from the L2
cache. The first kernel takes 0.55 ms and the second 0.64 ms. XLA's product alone takes 0.45 ms, and
a product with a pass for GELU's gradient takes 0.74 ms (run 4 of
results/training_speed/trainer_kernels_h200.jsonl, which had a fetch of x that was later removed
because it gained nothing).

Slower in the same record: arithmetic by the warpgroups that multiply, whose registers then spill
(0.65 to 0.75 ms); all columns of a program's rows one after the other, because stores drive x out
of the L2 cache (0.71 to 0.79 ms); 128 columns a program (5 to 7 %); no clusters (0.58 and 0.65 ms).
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels.gpu.gelu import slope, value
from pallas_kernels.gpu.hopper.machine.instructions import reciprocal
from pallas_kernels.gpu.hopper.machine.layouts import TILE, extended, load, tiles_of
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Accumulator, Ref, Scratch
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator

ROWS = 64  # of a warpgroup
DEPTH = 64  # of a step
COLUMNS = 256  # of a program
PIECE = 64  # columns of h that are loaded at a time, or of a result that leave at a time
PIECES = COLUMNS // PIECE
# Columns of one instruction. For 256 the assembler wants more registers than warpgroups begin with.
PRODUCT = 128
CONSUMERS = 2  # warpgroups that multiply; each has an epilogue warpgroup for its sums
# Registers per thread of a consumer, an epilogue and the producer warpgroup. All begin with 96. A
# warpgroup that wants more waits until others have given registers back: together at most 5 × 96.
CONSUMER_REGISTERS, EPILOGUE_REGISTERS, PRODUCER_REGISTERS = 160, 64, 24
_PAIR = "pair"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile of a kernel, which changes speed alone.

    Attributes:
      stages: steps of x and w in shared memory at once.
      together: programs that share their part of w, 1 or 2.
      programs: how many run at once, each on its multiprocessor.
    """

    stages: int = 3
    together: int = 2
    programs: int = 132

    @property
    def rows(self) -> int:
        """The rows of all programs of a cluster."""
        return self.together * CONSUMERS * ROWS


def unsupported(rows: int, depth: int, columns: int) -> str | None:
    """Names what of a product [rows, depth] [depth, columns] is not served, or returns None."""
    if not rows or rows % 8:
        return f"{rows} rows (multiples of 8)"
    if columns % COLUMNS:
        return f"{columns} columns (multiples of {COLUMNS})"
    if depth % DEPTH:
        return f"a depth of {depth} (multiples of {DEPTH})"
    return None


def product_and_gelu(
    x: BFloat16[Array, "n d"],
    w: BFloat16[Array, "d f"],
    *,
    tile: Tile = Tile(),
    interpret: bool = False,
) -> tuple[BFloat16[Array, "n f"], BFloat16[Array, "n f"]]:
    """Returns h = x w, rounded, and GELU of the rounded h.

    Raises:
      ValueError: `unsupported` names something.
    """
    out = (jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),) * 2
    h, y = _call(x, w, None, out, tile, name="product_and_gelu", interpret=interpret)
    return h, y


def gelu_gradient_of_product(
    d_y: BFloat16[Array, "n d"],
    w: BFloat16[Array, "f d"],
    h: BFloat16[Array, "n f"],
    *,
    tile: Tile = Tile(),
    interpret: bool = False,
) -> BFloat16[Array, "n f"]:
    """Returns (d_y wᵀ, rounded) ∘ GELU′(h), rounded.

    Raises:
      ValueError: `unsupported` names something.
    """
    out = (jax.ShapeDtypeStruct(h.shape, h.dtype),)
    return _call(d_y, w, h, out, tile, name="gelu_gradient_of_product", interpret=interpret)[0]


class _Memory(NamedTuple):
    """Shared memory.

    Attributes:
      steps: the pipeline of x and w.
      sums: the rounded sums of the tile that was multiplied last, by warpgroup and piece.
      there: a barrier for each warpgroup: its sums are there.
      taken: a barrier for each warpgroup: its sums are no longer needed.
      of_h: a piece of h for each warpgroup, and a barrier for each: the piece is there. None if h
        is not given.
    """

    steps: Pipeline
    sums: Ref
    there: Ref
    taken: Ref
    of_h: tuple[Ref, Ref] | None


def _call(
    x: Array,
    w: Array,
    h: Array | None,
    out: tuple[jax.ShapeDtypeStruct, ...],
    tile: Tile,
    *,
    name: str,
    interpret: bool,
) -> list[Array]:
    depth, columns = x.shape[1], out[0].shape[1]
    if reason := unsupported(x.shape[0], depth, columns):
        raise ValueError(f"{name} does not support {reason}")
    of_w = (DEPTH, COLUMNS) if h is None else (COLUMNS, DEPTH)
    of_h = None
    if h is not None:
        of_h = tiles_of((CONSUMERS, ROWS, PIECE), h.dtype), plgpu.Barrier(num_barriers=CONSUMERS)
    shared: Scratch = _Memory(
        steps=Pipeline.types(
            tile.stages,
            [
                tiles_of((tile.stages, CONSUMERS, ROWS, DEPTH), x.dtype),
                tiles_of((tile.stages, *of_w), w.dtype),
            ],
            copies=CONSUMERS + 1,
            consumers=CONSUMERS,
            cluster=_PAIR,
        ),
        sums=tiles_of((CONSUMERS, PIECES, ROWS, PIECE), x.dtype),
        there=plgpu.Barrier(num_barriers=CONSUMERS),
        taken=plgpu.Barrier(num_barriers=CONSUMERS),
        of_h=of_h,
    )
    tiles = -(-x.shape[0] // tile.rows) * (columns // COLUMNS)
    clusters = min(tile.programs // tile.together, tiles)
    kernel = plgpu.kernel(
        partial(_kernel, len(out), tile=tile, tiles=tiles, clusters=clusters, interpret=interpret),
        out_type=list(out),
        scratch_types=[shared],
        grid=(clusters,),
        grid_names=("program",),
        cluster=(tile.together,),
        cluster_names=(_PAIR,),
        num_threads=2 * CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name=name,
        **interpreter(on=interpret),
    )
    return kernel(x, w, *(() if h is None else (h,)))


def _kernel(
    results: int, *refs: Ref, tile: Tile, tiles: int, clusters: int, interpret: bool
) -> None:
    (x, w, *given), out, scratch = refs[: -results - 1], refs[-results - 1 : -1], refs[-1]
    h = given[0] if given else None
    shared = scratch._replace(steps=Pipeline(scratch.steps, tile.stages, cluster=_PAIR))
    program = _Program(x, w, h, out, shared, tile, tiles, clusters, interpret)
    me = lax.axis_index("warpgroup")
    pl.when(me < CONSUMERS)(lambda: program.consume(me))
    pl.when((me >= CONSUMERS) & (me < 2 * CONSUMERS))(lambda: program.epilogue(me - CONSUMERS))
    pl.when(me == 2 * CONSUMERS)(program.produce)


@dataclasses.dataclass(frozen=True)
class _Program:
    """What a program does in each of its roles. `h` is given if its gradient is asked for."""

    x: Ref
    w: Ref
    h: Ref | None
    out: tuple[Ref, ...]
    shared: _Memory
    tile: Tile
    tiles: int
    clusters: int
    interpret: bool

    @property
    def _steps(self) -> int:
        return self.x.shape[1] // DEPTH

    def _own_tiles(self) -> Array:
        """How many tiles this program has."""
        left = self.tiles - lax.axis_index("program") + (self.clusters - 1)
        return lax.div(left, jnp.int32(self.clusters))

    def _place(self, u: Array) -> tuple[Array, Array]:
        """The first row and column of the u-th tile.

        All columns of some rows are multiplied at the same time, by several programs. If one
        program took them in turn, their x would leave the cache in between.
        """
        index = lax.axis_index("program") + u * self.clusters
        across = jnp.int32(self.out[0].shape[1] // COLUMNS)
        row = lax.div(index, across) * self.tile.rows + lax.axis_index(_PAIR) * (CONSUMERS * ROWS)
        return row, lax.rem(index, across) * COLUMNS

    def _part(self, ref: Ref, u: Array, worker: Array | int, piece: Array | int) -> Ref:
        """A piece of the u-th tile of h or of a result."""
        row, column = self._place(u)
        return ref.at[pl.ds(row + worker * ROWS, ROWS), pl.ds(column + piece * PIECE, PIECE)]

    def produce(self) -> None:
        """Loads x and w of every step. Fetches h to the L2 cache, since it is read a tile later."""
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        tiles, steps, pipeline = self._own_tiles(), self._steps, self.shared.steps

        def load_tile(u: Array, _: None) -> None:
            row, column = self._place(u)
            columns = pl.ds(column, COLUMNS)
            if self.h is not None:
                for i in range(CONSUMERS):
                    plgpu.async_prefetch(self.h.at[pl.ds(row + i * ROWS, ROWS), columns])

            def load_step(k: Array, _: None) -> None:
                depth = pl.ds(k * DEPTH, DEPTH)
                of_x = [
                    (self.x.at[pl.ds(row + i * ROWS, ROWS), depth], 0, (i,))
                    for i in range(CONSUMERS)
                ]
                of_w = self.w.at[depth, columns] if self.h is None else self.w.at[columns, depth]
                pipeline.producer_load(u * steps + k, *of_x, to_all=[(of_w, 1, ())])

            lax.fori_loop(0, steps, load_step, None)

        lax.fori_loop(0, tiles, load_tile, None)
        pipeline.producer_tail(tiles * steps)

    def consume(self, me: Array) -> None:
        """Computes the sums of 64 rows of every tile."""
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def consume_tile(u: Array, _: None) -> None:
            totals = (accumulator(ROWS, PRODUCT),) * (COLUMNS // PRODUCT)
            # Meanwhile the epilogue of the tile before runs; the wait for its memory comes below.
            rounded = pl.run_scoped(partial(self._sums, u, me), *totals)
            pl.when(u > 0)(lambda: plgpu.barrier_wait(self.shared.taken.at[me]))
            for piece in range(PIECES):
                part, first = divmod(piece * PIECE, PRODUCT)
                self.shared.sums[me, piece] = rounded[part][:, first : first + PIECE]
            # The copy engine stores h as it lies here, so it has to see what threads have written.
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.shared.there.at[me])

        lax.fori_loop(0, self._own_tiles(), consume_tile, None)
        plgpu.barrier_wait(self.shared.taken.at[me])

    def _sums(self, u: Array, me: Array, *totals: Accumulator) -> list[Array]:
        """Returns the sums of the u-th tile, rounded."""
        steps = self.shared.steps

        def multiply_step(k: Array, _: None) -> None:
            n = u * self._steps + k
            steps.consumer_wait(n)
            x, w = steps.get(n, me, buffer=0), steps.get(n, buffer=1)
            for i, total in enumerate(totals):
                some = pl.ds(i * PRODUCT, PRODUCT)
                plgpu.wgmma(total, x, w.at[:, some] if self.h is None else w.at[some].T)
            plgpu.wgmma_wait(0)  # meanwhile the other warpgroup multiplies
            steps.consumer_release(n)

        lax.fori_loop(0, self._steps, multiply_step, None)
        sums = (plgpu.wgmma_accumulator_load(total, wait_n=None) for total in totals)
        return [x.astype(self.x.dtype) for x in sums]

    def epilogue(self, me: Array) -> None:
        """Does the arithmetic on the sums of the me-th consumer, and stores the results."""
        plgpu.set_max_registers(EPILOGUE_REGISTERS, action="decrease")
        of_piece = self._value if self.h is None else self._gradient
        tiles = self._own_tiles()
        if self.h is not None:
            self._load_h(jnp.int32(0), me, 0)

        def epilogue_of_tile(u: Array, _: None) -> None:
            plgpu.barrier_wait(self.shared.there.at[me])
            for piece in range(PIECES):
                of_piece(u, me, piece)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.shared.taken.at[me])

        lax.fori_loop(0, tiles, epilogue_of_tile, None)
        plgpu.wait_smem_to_gmem(0)

    def _value(self, u: Array, me: Array, piece: int) -> None:
        h, y = self.out
        memory = self.shared.sums.at[me, piece]
        plgpu.copy_smem_to_gmem(memory, self._part(h, u, me, piece))
        sums = load(memory, TILE)
        result = value(extended(sums), one_over=self._one_over).astype(sums.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # h has left
        memory[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory, self._part(y, u, me, piece))

    def _load_h(self, u: Array, me: Array, piece: int) -> None:
        assert self.shared.of_h is not None
        memory, there = self.shared.of_h
        plgpu.copy_gmem_to_smem(self._part(self.h, u, me, piece), memory.at[me], there.at[me])

    def _gradient(self, u: Array, me: Array, piece: int) -> None:
        assert self.shared.of_h is not None
        memory, (of_h, there) = self.shared.sums.at[me, piece], self.shared.of_h
        plgpu.barrier_wait(there.at[me])
        d_y, h = load(memory, TILE), load(of_h.at[me], TILE)
        plgpu.commit_smem()  # h is read: the next piece takes its place
        if piece + 1 < PIECES:
            self._load_h(u, me, piece + 1)
        else:
            pl.when(u + 1 < self._own_tiles())(lambda: self._load_h(u + 1, me, 0))
        d_h = extended(d_y) * slope(extended(h), one_over=self._one_over)
        memory[...] = d_h.astype(self.x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory, self._part(self.out[0], u, me, piece))

    def _one_over(self, x: Array) -> Array:
        return reciprocal(x, interpret=self.interpret)
