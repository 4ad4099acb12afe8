"""Means to keep the compiler and the assembler from moving instructions across a wait."""

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

_NEVER = 15  # a named barrier at which nobody arrives


def finish_before_waiting(x: Array, unknown: Array | None = None) -> None:
    """Keeps the next wait for a product after the computation of x ≥ 0.

    The assembler sees no order between arithmetic and such a wait. It would wait first, and nothing
    would run beside the product. It does keep the order of a barrier and the wait, even if the
    barrier is never executed. This function places such a barrier, which depends on all of x.

    unknown: numbers ≥ 0, if the assembler can see that x ≥ 0. It must not see that of both.
    """

    @plgpu.inline_mgpu(arg_types=(TILE,) * (1 if unknown is None else 2))
    def emit(_: Context, x: Registers, *unknown: Registers) -> None:
        word = ir.IntegerType.get_signless(32)
        entries = [
            llvm.extractelement(pair, literal(i, word)) for pair in x.registers.flat for i in (0, 1)
        ]
        # One sum of all entries makes the barrier depend on each, for one addition an entry.
        names = [f"${i}" for i in range(len(entries))]
        lines = [f"add.f32 sum, sum, {name};" for name in names[1:]]
        # sum < 0 never holds, because x ≥ 0. The assembler must not know that.
        least = "mov.f32 least, 0f00000000;"
        for y in unknown:
            least = f"neg.f32 least, ${len(entries)};"
            entries.append(llvm.extractelement(y.registers.flat[0], literal(0, word)))
        # The barrier is predicated off and never executed. As an instruction it keeps its place.
        text = f"""{{ .reg .f32 sum, least; .reg .pred never; mov.f32 sum, $0; {" ".join(lines)}
            {least} setp.lt.f32 never, sum, least;
            @never bar.arrive {_NEVER}, {2 * THREADS}; }}"""
        constraints = ",".join("f" for _ in entries)
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, entries, text, constraints, has_side_effects=True)

    emit(x, *(() if unknown is None else (unknown,)))


def after(x: Array, done: Array, zero: Array) -> Array:
    """Returns x [rows], made to depend on `done`, a tile that was waited for.

    Otherwise the assembler moves the instructions that read x before that wait. zero: an
    `unknown_zero`.
    """

    @plgpu.inline_mgpu(
        arg_types=(PER_ROW, TILE, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=PER_ROW),
    )
    def emit(_: Context, x: Registers, done: Registers, zero: Registers) -> Registers:
        word = ir.IntegerType.get_signless(32)
        entry = llvm.extractelement(done.registers.flat[0], literal(0, word))

        def shifted(register: MlirValue) -> MlirValue:
            """Returns x ^ (done & zero) of the register's only entry."""
            number = llvm.extractelement(register, literal(0, word))
            entries: list[MlirValue] = [number, entry, zero.registers[()]]
            # One instruction, whose table is 0x78. The bits of x stay the same, but they depend on
            # what the product has written, and the assembler cannot remove that dependence.
            text = """{ .reg .b32 x, done; mov.b32 x, $1; mov.b32 done, $2;
                lop3.b32 x, x, done, $3, 0x78; mov.b32 $0, x; }"""
            found: MlirValue = llvm.inline_asm(ir.F32Type.get(), entries, text, "=f,f,f,r")
            empty = llvm.mlir_undef(register.type)
            return llvm.insertelement(empty, found, literal(0, word))

        return x._pointwise(shifted)

    return emit(x, done, zero)


def mixed(some: Array, others: Array, *, every: int) -> Array:
    """The tile `others`, with the first of every `every` groups of 8 columns taken from `some`."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(some.shape, some.dtype, layout=TILE),
    )
    def emit(_: Context, some: Registers, others: Registers) -> Registers:
        # This takes no instruction: the registers are chosen when the kernel is compiled.
        registers = others.registers.copy()
        registers[:, ::every] = some.registers[:, ::every]
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=others.layout, _is_signed=None
        )

    return emit(some, others)


def unknown_zero(n: Array) -> Array:
    """Returns 0, computed from a number 0 ≤ n < 2**30 that changes within a loop.

    The compiler does not know that it is 0, so it recomputes in every step what this is added to.
    Otherwise it would keep too many constants of the loop in registers.
    """
    return lax.shift_right_logical(n, jnp.int32(30))


def opaque_zero(n: Array, *, interpret: bool) -> Array:
    """`unknown_zero` where the compiler knows the length of loops, and thereby that n < 2**30."""
    if interpret:
        return unknown_zero(n)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def emit(_: Context, n: Registers) -> Registers:
        word = ir.IntegerType.get_signless(32)
        # Where the compiler knows the bound of n it sees through a shift, but not through PTX.
        number: MlirValue = n.registers[()]
        zero: MlirValue = llvm.inline_asm(word, [number], "shr.u32 $0, $1, 30;", "=r,r")
        return fragmented_array.FragmentedArray.splat(zero, (), is_signed=True)

    return emit(n)
