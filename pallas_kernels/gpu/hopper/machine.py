"""The Hopper machine as the kernels use it: warpgroups, shared memory, barriers, layouts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.mosaic.gpu.utils import ir, llvm, memref_transpose
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

THREADS = 128  # of a warpgroup
_NEVER = 15  # a named barrier that nobody comes to

# How a warpgroup's registers hold the result of a product, and a vector along its rows or columns.
TILE = plgpu.Layout.WGMMA
PER_ROW = TILE.reduce(1)
PER_COLUMN = TILE.reduce(0)

# Registers per thread: of the warpgroup that loads, of those that multiply, by the number of the
# latter. Together at most 65,536.
_REGISTERS = {1: (24, 240), 2: (40, 232), 3: (24, 160)}

COMPILER = plgpu.CompilerParams(
    approx_math=True,
    # A warp overwrites only what it alone has read in shared memory, or waits for the others.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=512,  # of attention no reduction crosses warps
)


def set_registers(workers: int, *, loads: bool, most: bool = False) -> None:
    """Moves registers from the warpgroup that loads to the `workers` that multiply.

    most: two that multiply get all that one would.
    """
    few, many = _REGISTERS[1 if most else workers]
    if loads:
        plgpu.set_max_registers(few, action="decrease")
    else:
        plgpu.set_max_registers(many, action="increase")


def tiles_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for matrices [..., rows, columns], laid out for WGMMA and TMA."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[-1], dtype))


def _transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def vectors_of(shape: tuple[int, ...]) -> Any:
    """Shared memory for float32 vectors [..., length]."""
    return plgpu.SMEM(shape, jnp.float32)


def load(ref: Any, layout: Any, *, straight: bool = True) -> Array:
    """The values of a reference in registers; straight: without conflicts of shared memory."""
    return plgpu.load(ref, layout=layout, optimized=straight)  # type: ignore[call-arg]  # JAX 0.10


def rows_and_columns(shape: tuple[int, ...], row: Array, column: Array) -> tuple[Array, Array]:
    """Global indices of the entries of a tile that begins at (row, column)."""
    down, across = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) for axis in (0, 1))
    return row + down, column + across


def constant(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A register array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """[rows] for every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """[columns] for every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def extended(x: Array) -> Array:
    """bfloat16 as float32, by its bits.

    A cast would make the compiler round one value at a time before it, and let the interpreter take
    both casts back.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


def reciprocal(x: Array, *, interpret: bool) -> Array:
    """1 / x of a tile, by the machine's own approximation, 2**-23 off at most."""
    if interpret:
        return 1 / x

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    )
    def emit(_: Any, x: Any) -> Any:
        return x._pointwise(invert)

    def invert(register: Any) -> Any:
        result = llvm.mlir_undef(register.type)
        for place in (literal(i, ir.IntegerType.get_signless(32)) for i in range(2)):
            entry = llvm.extractelement(register, place)
            inverse: Any = llvm.inline_asm(
                ir.F32Type.get(), [entry], "rcp.approx.ftz.f32 $0, $1;", "=f,f"
            )
            result = llvm.insertelement(result, inverse, place)
        return result

    return emit(x)


def finish_before_waiting(x: Array, unknown: Array | None = None) -> None:
    """Keeps the wait for a product that follows behind all that x, ≥ 0, is computed from.

    The assembler knows no order of arithmetic and such a wait, and waits first: nothing would then
    run beside the product. It knows one of barriers and the wait, executed or not. This one is not.

    unknown: some numbers ≥ 0, where the assembler sees that x is. It must not see that of both.
    """

    @plgpu.inline_mgpu(arg_types=(TILE,) * (1 if unknown is None else 2))
    def emit(_: Any, x: Any, *unknown: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        entries = [
            llvm.extractelement(pair, literal(i, word)) for pair in x.registers.flat for i in (0, 1)
        ]
        names = [f"${i}" for i in range(len(entries))]
        lines = [f"add.f32 sum, sum, {name};" for name in names[1:]]
        least = "mov.f32 least, 0f00000000;"
        for y in unknown:
            least = f"neg.f32 least, ${len(entries)};"
            entries.append(llvm.extractelement(y.registers.flat[0], literal(0, word)))
        text = f"""{{ .reg .f32 sum, least; .reg .pred never; mov.f32 sum, $0; {" ".join(lines)}
            {least} setp.lt.f32 never, sum, least;
            @never bar.arrive {_NEVER}, {2 * THREADS}; }}"""
        constraints = ",".join("f" for _ in entries)
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, entries, text, constraints, has_side_effects=True)

    emit(x, *(() if unknown is None else (unknown,)))


def after(x: Array, done: Array, zero: Array) -> Array:
    """x [rows] again, as the assembler knows it when it knows `done`, a tile that was waited for.

    zero: an `unknown_zero`. Otherwise the assembler moves what x enters to before the wait.
    """

    @plgpu.inline_mgpu(
        arg_types=(PER_ROW, TILE, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=PER_ROW),
    )
    def emit(_: Any, x: Any, done: Any, zero: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        entry = llvm.extractelement(done.registers.flat[0], literal(0, word))

        def shifted(register: Any) -> Any:
            """Of the one entry in it: x ^ (done & 0)."""
            number = llvm.extractelement(register, literal(0, word))
            entries = [number, entry, zero.registers[()]]
            text = """{ .reg .b32 x, done; mov.b32 x, $1; mov.b32 done, $2;
                lop3.b32 x, x, done, $3, 0x78; mov.b32 $0, x; }"""
            found: Any = llvm.inline_asm(ir.F32Type.get(), entries, text, "=f,f,f,r")
            empty = llvm.mlir_undef(register.type)
            return llvm.insertelement(empty, found, literal(0, word))

        return x._pointwise(shifted)

    return emit(x, done, zero)


def mixed(some: Array, others: Array, *, every: int) -> Array:
    """`others`, but every so-manyth 8 columns, the first included, of `some`: of tiles."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(some.shape, some.dtype, layout=TILE),
    )
    def emit(_: Any, some: Any, others: Any) -> Any:
        registers = others.registers.copy()
        registers[:, ::every] = some.registers[:, ::every]
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=others.layout, _is_signed=None
        )

    return emit(some, others)


# What `at_least` gives: the bits of 1.0. Its multiples differ, modulo 2**32, up to 511.
ONE = np.int32(0x3F80_0000)


def at_least(x: Array, least: Array, *, interpret: bool) -> Array:
    """`ONE` where x ≥ least, else 0, int32: a comparison is one instruction, two sums another.

    The machine compares to 1.0 and 0.0, and adds three integers, but not three floats. The
    compiler, shown both, compares and adds under a predicate: two instructions per entry.
    """
    if interpret:
        return jnp.where(x >= least, ONE, np.int32(0))

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=TILE),
    )
    def emit(_: Any, x: Any, least: Any) -> Any:
        return x._pointwise(compare, least, output_is_signed=True)

    def compare(x: Any, least: Any) -> Any:
        """Of the two entries that a register of Mosaic GPU's holds."""
        word = ir.IntegerType.get_signless(32)
        text = "{ .reg .f32 one; set.ge.f32.f32 one, $1, $2; mov.b32 $0, one; }"
        result = llvm.mlir_undef(ir.VectorType.get((2,), word))
        for place in (literal(i, word) for i in range(2)):
            entries = [llvm.extractelement(register, place) for register in (x, least)]
            bits: Any = llvm.inline_asm(word, entries, text, "=r,f,f")
            result = llvm.insertelement(result, bits, place)
        return result

    return emit(x, least)


# Columns that a thread holds next to each other, times the threads of a row.
LANES = 8


def by_lane(combine: Callable[[Array, Array], Array], x: Array, columns: int = LANES) -> Array:
    """[rows, more] combined to [rows, columns], of columns that are equal modulo `columns`.

    Halves are combined with halves: neither a chain of dependent instructions, as Mosaic's own
    reductions are, nor an exchange between threads.
    """
    while (width := x.shape[1]) > columns:
        x = combine(x[:, : width // 2], x[:, width // 2 :])
    return x


def as_operand(x: Array, memory: Any | None) -> Any:
    """A left operand: the registers themselves, or `memory` that they are written to."""
    if memory is None:
        return x
    memory[...] = x
    plgpu.commit_smem()
    return memory


def unknown_zero(n: Array) -> Array:
    """0 of a number from 0 to 2**30 that changes within a loop.

    The compiler does not know, so what it is added to is computed anew in every step, where it
    would keep too many constants of the loop in registers.
    """
    return lax.shift_right_logical(n, jnp.int32(30))


def opaque_zero(n: Array, *, interpret: bool) -> Array:
    """The same where the compiler knows how long loops are, and so that n is below 2**30."""
    if interpret:
        return unknown_zero(n)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def emit(_: Any, n: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        zero: Any = llvm.inline_asm(word, [n.registers[()]], "shr.u32 $0, $1, 30;", "=r,r")
        return fragmented_array.FragmentedArray.splat(zero, (), is_signed=True)

    return emit(n)


def add_product(total: Array, left: Any, right: Any, *, interpret: bool) -> Array:
    """total + left right, waited for."""

    def product(out: Any) -> Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    if interpret:  # which knows no accumulator that begins with a value
        return total + pl.run_scoped(product, accumulator(*total.shape))
    return pl.run_state(lambda out: plgpu.wgmma(out, left, right))(plgpu.ACC.init(total))


_SWIZZLE = 128  # bytes of the rows of a bfloat16 operand that lie together: 64 columns
_SLICE = 16  # columns of bfloat16 operands that an instruction multiplies


def begin_product(left: Any, right: Any, *, interpret: bool) -> Array:
    """left rightᵀ [64, columns] of bfloat16 rows [64, H] and [columns, H] in shared memory.

    It is under way, and there when it has been waited for. Unlike `plgpu.wgmma` it adds to nothing,
    where that adds to zeros, which are written first: the machine's products have a flag for it.
    """
    (rows, depth), columns = left.shape, right.shape[0]
    if interpret:  # which knows no such product

        def product(out: Any) -> Array:
            plgpu.wgmma(out, left, right.T)
            return out[...]

        return pl.run_scoped(product, accumulator(rows, columns))
    matrix = plgpu.RefType(_transforms(depth, left.dtype))

    @plgpu.inline_mgpu(
        arg_types=(matrix, matrix),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=TILE),
    )
    def emit(_: Any, left: Any, right: Any) -> Any:
        together = _SWIZZLE // 2
        (a, _), (_, stride), _ = mma_utils.create_descriptor(
            left, _SWIZZLE, (rows, together), logical_k_major=False
        )
        (b, _), (_, stride_b), _ = mma_utils.create_descriptor(
            memref_transpose(right, (1, 0, 3, 2)),
            _SWIZZLE,
            (together, columns),
            logical_k_major=True,
        )
        places = [divmod(column, together) for column in range(0, depth, _SLICE)]
        offsets = [[n * s + 2 * i for s in (stride, stride_b)] for n, i in places]
        return _of_registers(_multiply_afresh(a, b, offsets, columns), (rows, columns))

    return emit(left, right)


def _multiply_afresh(a: Any, b: Any, offsets: Sequence[Sequence[int]], columns: int) -> list[Any]:
    """Starts the sum of products of slices, and gives its registers.

    Args:
      a, b: descriptors of the first slices.
      offsets: bytes from there to each slice of a and of b.
      columns: of the result.
    """
    count = columns // 2
    total = ", ".join(f"${i}" for i in range(count))
    lines = []
    for place, (of_a, of_b) in enumerate(offsets):
        for name, source, offset in (("a", count, of_a), ("b", count + 1, of_b)):
            lines.append(f"add.s64 {name}, ${source}, {mma_utils.encode_addr(offset)};")
        adds = "adds" if place else "begins"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{_SLICE}.f32.bf16.bf16 "
            f"{{{total}}}, a, b, {adds}, 1, 1, 0, 0;"
        )
    text = f"""{{ .reg .pred begins, adds; .reg .b64 a, b;
        setp.ne.b32 begins, 0, 0; setp.ne.b32 adds, 1, 0;
        wgmma.fence.sync.aligned; {" ".join(lines)} wgmma.commit_group.sync.aligned; }}"""
    register = ir.VectorType.get((1,), ir.F32Type.get())
    constraints = ",".join(["=f"] * count + ["l", "l"])
    struct = llvm.StructType.get_literal([register] * count)
    found: Any = llvm.inline_asm(struct, [a, b], text, constraints, has_side_effects=True)
    return [llvm.extractvalue(register, found, [i]) for i in range(count)]


def _of_registers(registers: Sequence[Any], shape: tuple[int, int]) -> Any:
    """A product's result, in `TILE`."""
    layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    found = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    array = fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)
    return array.to_layout(fragmented_array.WGMMA_LAYOUT)


def accumulator(rows: int, columns: int) -> Any:
    """Registers that a product adds to."""
    return plgpu.ACC((rows, columns), jnp.float32)


class Turns:
    """Warpgroups that multiply by turns, so that one does its softmax while another multiplies.

    Named barriers of the machine, one per warpgroup: `wait` for one's turn, `pass_on` gives it to
    the next. FlashAttention-3 (arXiv 2407.08608, section 3.1) calls it pingpong.

    Where they are `held`, a turn has the products that end a step and those that begin the next,
    with nobody's in between: `enter` a walk, `wait_to_end` a step, `pass_on` within the next one,
    `leave` the walk. Otherwise it has those that begin a step.
    """

    _FIRST = 8  # Mosaic GPU takes named barriers from 0 upwards

    def __init__(self, workers: int, me: Array, *, on: bool, held: bool = False) -> None:
        self._workers, self._me, self._on = workers, me, on and workers > 1
        self._held = held

    def start(self) -> None:
        """Before the first `wait`: warpgroup 0 begins."""
        if self._on:
            pl.when(self._me == self._workers - 1)(lambda: self._named("arrive", jnp.int32(0)))

    def wait(self) -> None:
        """Until it is this warpgroup's turn."""
        if self._on:
            self._named("sync", self._me)

    def pass_on(self) -> None:
        """The next warpgroup's turn."""
        if self._on:
            self._named("arrive", lax.rem(self._me + 1, jnp.int32(self._workers)))

    def enter(self) -> None:
        """Before a walk's first step."""
        if self._held:
            self.wait()

    def wait_to_begin(self) -> None:
        """Before the products that begin a step."""
        if not self._held:
            self.wait()

    def wait_to_end(self) -> None:
        """Before the products that end a step."""
        if self._held:
            self.wait()

    def leave(self) -> None:
        """After a walk's last step."""
        if self._held:
            self.pass_on()

    def end(self) -> None:
        """After the last `pass_on`: nobody waits for a turn any more."""
        if self._on:
            pl.when(self._me == 0)(lambda: self._named("sync", jnp.int32(0)))

    def _named(self, operation: str, index: Array) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
        def emit(_: Any, barrier: Any) -> None:
            void = ir.Type.parse("!llvm.void")
            text = f"bar.{operation} $0, {2 * THREADS};"
            llvm.inline_asm(void, [barrier.registers[()]], text, "r", has_side_effects=True)

        emit(index + self._FIRST)


class Ring:
    """Buffers in shared memory that one warpgroup fills and others read, over and over.

    The n-th filling goes to buffer n modulo their number; it waits until every reader has released
    what was there.

    The programs of a cluster may have rings in step, and fill all of them together: `cluster` is
    the name of its axis.
    """

    def __init__(self, refs: Any, size: int, *, cluster: str | None = None) -> None:
        self._buffers, self._filled, self._free = refs
        self._size, self._cluster = size, cluster

    @staticmethod
    def types(
        size: int, buffers: Sequence[Any], *, copies: int, readers: int, cluster: str | None = None
    ) -> Any:
        """The scratch types of a ring: buffers [size, ...], filled by `copies` at a time.

        readers: of one program; in a cluster those of all programs release a buffer.
        """
        free: Any = plgpu.Barrier(num_arrivals=readers, num_barriers=size)
        if cluster is not None:
            free = plgpu.ClusterBarrier(
                collective_axes=(cluster,), num_arrivals=readers, num_barriers=size
            )
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=size)
        return tuple(buffers), filled, free

    def _slot(self, n: Array | int) -> Array:
        return lax.rem(jnp.int32(n), jnp.int32(self._size))

    def fill(
        self,
        n: Array,
        *copies: tuple[Any, int, tuple[int, ...]],
        to_all: Sequence[tuple[Any, int, tuple[int, ...]]] = (),
    ) -> None:
        """The n-th filling, from copies (source, which buffer, where in it).

        to_all: those that all programs of the cluster name, of which each makes its part for all.
        """
        slot = self._slot(n)
        pl.when(n >= self._size)(partial(plgpu.barrier_wait, self._free.at[slot]))
        for axes, some in ((None, copies), (self._cluster, to_all)):
            for source, buffer, place in some:
                target = self._buffers[buffer].at[(slot, *place)]
                plgpu.copy_gmem_to_smem(source, target, self._filled.at[slot], collective_axes=axes)

    def drain(self, n: Array) -> None:
        """After n fillings, the last: until every reader has released them all."""
        for back in range(1, self._size + 1):
            slot = self._slot(n - back)
            pl.when(n >= back)(partial(plgpu.barrier_wait, self._free.at[slot]))

    def wait(self, n: Array | int) -> None:
        """Until the n-th filling is there."""
        plgpu.barrier_wait(self._filled.at[self._slot(n)])

    def release(self, n: Array | int) -> None:
        """This reader needs the n-th filling no more."""
        plgpu.barrier_arrive(self._free.at[self._slot(n)])

    def get(self, n: Array | int, *place: Any, buffer: int = 0) -> Any:
        """A reference to the n-th filling."""
        return self._buffers[buffer].at[(self._slot(n), *place)]


def interpreter(*, on: bool) -> dict[str, Any]:
    """Options of a kernel that runs in Pallas' interpreter, with a check for races."""
    if not on:
        return {}
    params = plgpu.InterpretGPUParams  # type: ignore[attr-defined]  # not in JAX 0.10
    return {"interpret": params(detect_races=True)}
