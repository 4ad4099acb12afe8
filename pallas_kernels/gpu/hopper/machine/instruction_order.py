"""What keeps the compiler and the assembler from moving instructions across a wait."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.mosaic.gpu.utils import ir, llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.layouts import PER_ROW, TILE
from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Registers
from pallas_kernels.gpu.hopper.machine.warpgroups import THREADS

_NEVER = 15  # a named barrier that nobody comes to


def finish_before_waiting(x: Array, unknown: Array | None = None) -> None:
    """Keeps the wait for a product that follows behind all that x, ≥ 0, is computed from.

    The assembler knows no order of arithmetic and such a wait, and waits first: nothing would then
    run beside the product. It knows one of barriers and the wait, executed or not. This one is not.

    unknown: some numbers ≥ 0, where the assembler sees that x is. It must not see that of both.
    """

    @plgpu.inline_mgpu(arg_types=(TILE,) * (1 if unknown is None else 2))
    def emit(_: Context, x: Registers, *unknown: Registers) -> None:
        word = ir.IntegerType.get_signless(32)
        entries = [
            llvm.extractelement(pair, literal(i, word)) for pair in x.registers.flat for i in (0, 1)
        ]
        # One sum of all entries: the barrier depends on each of them, at an addition an entry.
        names = [f"${i}" for i in range(len(entries))]
        lines = [f"add.f32 sum, sum, {name};" for name in names[1:]]
        # sum < 0 never holds, for x ≥ 0. The assembler must not know that.
        least = "mov.f32 least, 0f00000000;"
        for y in unknown:
            least = f"neg.f32 least, ${len(entries)};"
            entries.append(llvm.extractelement(y.registers.flat[0], literal(0, word)))
        # Predicated off, never taken; but an instruction, so that it keeps its place.
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
    def emit(_: Context, x: Registers, done: Registers, zero: Registers) -> Registers:
        word = ir.IntegerType.get_signless(32)
        entry = llvm.extractelement(done.registers.flat[0], literal(0, word))

        def shifted(register: MlirValue) -> MlirValue:
            """Of the one entry in it: x ^ (done & 0)."""
            number = llvm.extractelement(register, literal(0, word))
            entries: list[MlirValue] = [number, entry, zero.registers[()]]
            # x ^ (done & zero) in one instruction, 0x78 being its table: the same bits, and a
            # dependence on what the product has written that the assembler cannot remove.
            text = """{ .reg .b32 x, done; mov.b32 x, $1; mov.b32 done, $2;
                lop3.b32 x, x, done, $3, 0x78; mov.b32 $0, x; }"""
            found: MlirValue = llvm.inline_asm(ir.F32Type.get(), entries, text, "=f,f,f,r")
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
    def emit(_: Context, some: Registers, others: Registers) -> Registers:
        # No instruction: which register is taken is known when the kernel is compiled.
        registers = others.registers.copy()
        registers[:, ::every] = some.registers[:, ::every]
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=others.layout, _is_signed=None
        )

    return emit(some, others)


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
    def emit(_: Context, n: Registers) -> Registers:
        word = ir.IntegerType.get_signless(32)
        # The compiler sees through a shift where it knows the bound of n; not through PTX.
        number: MlirValue = n.registers[()]
        zero: MlirValue = llvm.inline_asm(word, [number], "shr.u32 $0, $1, 30;", "=r,r")
        return fragmented_array.FragmentedArray.splat(zero, (), is_signed=True)

    return emit(n)
