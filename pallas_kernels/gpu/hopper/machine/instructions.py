"""Single instructions that Mosaic GPU has no operation for."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.mosaic.gpu.utils import ir, llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.layouts import TILE
from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Registers

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
    def emit(_: Context, x: Registers, least: Registers) -> Registers:
        return x._pointwise(compare, least, output_is_signed=True)

    def compare(x: MlirValue, least: MlirValue) -> MlirValue:
        """Of the two entries that a register of Mosaic GPU's holds."""
        word = ir.IntegerType.get_signless(32)
        # A register that holds a float is taken for an integer: the move is no instruction.
        text = "{ .reg .f32 one; set.ge.f32.f32 one, $1, $2; mov.b32 $0, one; }"
        result = llvm.mlir_undef(ir.VectorType.get((2,), word))
        for place in (literal(i, word) for i in range(2)):
            entries = [llvm.extractelement(register, place) for register in (x, least)]
            bits: MlirValue = llvm.inline_asm(word, entries, text, "=r,f,f")
            result = llvm.insertelement(result, bits, place)
        return result

    return emit(x, least)


def reciprocal(x: Array, *, interpret: bool) -> Array:
    """1 / x of a tile, by the machine's own approximation, 2**-23 off at most."""
    if interpret:
        return 1 / x

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    )
    def emit(_: Context, x: Registers) -> Registers:
        return x._pointwise(invert)

    def invert(register: MlirValue) -> MlirValue:
        result = llvm.mlir_undef(register.type)
        for place in (literal(i, ir.IntegerType.get_signless(32)) for i in range(2)):
            # Not `1 / x`, which is a division even with `approx_math`: several instructions.
            entry = llvm.extractelement(register, place)
            inverse: MlirValue = llvm.inline_asm(
                ir.F32Type.get(), [entry], "rcp.approx.ftz.f32 $0, $1;", "=f,f"
            )
            result = llvm.insertelement(result, inverse, place)
        return result

    return emit(x)
