"""Single instructions that Mosaic GPU has no operation for."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.utils import arith, ir, llvm, nvvm, vector
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.fused import multiply_add_in_kernel
from pallas_kernels.gpu.hopper.machine.layouts import PER_COLUMN, PER_ROW, TILE, extended, load
from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Ref, Registers

LOG2E = math.log2(math.e)

# The bits of 1.0, which `at_least` returns. Its multiples by 0 to 511 differ modulo 2**32.
ONE = np.int32(0x3F80_0000)


def at_least(x: Array, least: Array, *, interpret: bool) -> Array:
    """`ONE` where x ≥ least, otherwise 0, as int32, for counting in 1.5 instructions per entry.

    The machine has one instruction that compares to 1.0 or 0.0, and one that adds three integers,
    but none that adds three floats. For a plain comparison and sum the compiler emits a comparison
    and an addition under a predicate: two instructions per entry.
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
        """Compares the two entries that a register of Mosaic GPU holds."""
        word = ir.IntegerType.get_signless(32)
        # A register that holds a float is taken as an integer, so the move costs no instruction.
        text = "{ .reg .f32 one; set.ge.f32.f32 one, $1, $2; mov.b32 $0, one; }"
        result = llvm.mlir_undef(ir.VectorType.get((2,), word))
        for place in (literal(i, word) for i in range(2)):
            entries = [llvm.extractelement(register, place) for register in (x, least)]
            bits: MlirValue = llvm.inline_asm(word, entries, text, "=r,f,f")
            result = llvm.insertelement(result, bits, place)
        return result

    return emit(x, least)


def any_of_rows(x: Array, *, interpret: bool) -> Array:
    """Returns 1 if a number of x [64] is not 0 in one of the warp's rows, otherwise 0.

    It may differ from warp to warp.
    """
    if interpret:
        return (x != 0).any().astype(jnp.int32)

    @plgpu.inline_mgpu(arg_types=(PER_ROW,), return_type=_FLAG)
    def emit(_: Context, x: Registers) -> Registers:
        word = ir.IntegerType.get_signless(32)
        return _vote([llvm.extractelement(y, literal(0, word)) for y in x.registers.flat])

    return emit(x)


def any_of_step(x: Ref, *, interpret: bool) -> Array:
    """Returns 1 if a number of x [64 or 128] in shared memory is not 0, otherwise 0."""
    if interpret:
        return (load(x, PER_COLUMN, straight=False) != 0).any().astype(jnp.int32)
    each = x.shape[0] // _WARP

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_FLAG)
    def emit(_: Context, memory: MlirValue) -> Registers:
        # Each thread of a warp reads other numbers, so a warp reads all of them at once.
        word, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        lane = nvvm.read_ptx_sreg_laneid()
        first = arith.muli(arith.index_cast(index, lane), literal(each, index))
        numbers = vector.load(ir.VectorType.get((each,), ir.F32Type.get()), memory, [first])
        return _vote([llvm.extractelement(numbers, literal(i, word)) for i in range(each)])

    return emit(x)


_WARP = 32  # threads
_FLAG = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)


def _vote(numbers: Sequence[MlirValue]) -> Registers:
    """Returns 1 if any thread of the warp has a number other than +0, otherwise 0."""
    word = ir.IntegerType.get_signless(32)
    # By their bits, so that the numbers of a thread need one comparison.
    bits = literal(0, word)
    for number in numbers:
        bits = arith.ori(bits, llvm.bitcast(word, number))
    is_other = arith.cmpi(arith.CmpIPredicate.ne, bits, literal(0, word))
    found = nvvm.vote_sync(literal(-1, word), is_other, nvvm.VoteSyncKind.any)
    return fragmented_array.FragmentedArray.splat(arith.extui(word, found), (), is_signed=True)


def reciprocal(x: Array, *, interpret: bool) -> Array:
    """Returns 1 / x of a tile by the machine's own approximation, off by at most 2**-23."""
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


def tanh(x: Array, factor: float, *, interpret: bool) -> Array:
    """Returns tanh(factor · x) of a tile, within a relative 2**-20.9, by two polynomials.

    It is their quotient. The machine's own tanh is off by 2**-11, which a cap of 50 turns into 0.02
    of a score. 1 − 2 / (exp 2x + 1) is off by 2**-22 however small tanh is, and takes one more slow
    instruction, the exponential.
    """
    z = jnp.clip(x * np.float32(factor), np.float32(-_TANH_IS_1), np.float32(_TANH_IS_1))
    square = z * z
    above, below = (_polynomial(square, c, interpret=interpret) for c in (_ABOVE, _BELOW))
    return z * above * reciprocal(below, interpret=interpret)


# tanh z = z · P(z²) / Q(z²) for |z| ≤ 9; from there on tanh is 1 in float32. P and Q have degree 4
# and nearly the least relative error, 2e-8 (a weighted least-squares fit in float64).
_TANH_IS_1 = 9.0
_ABOVE = (1.0, 0.13381025, 3.4955870e-3, 2.0609063e-5, 1.3354637e-8)
_BELOW = (1.0, 0.46714342, 2.5876978e-2, 3.2856330e-4, 7.7765480e-7)


def _polynomial(x: Array, coefficients: Sequence[float], *, interpret: bool) -> Array:
    """Returns Σ coefficients[i] · xⁱ of a tile, by multiply-adds (Horner)."""
    *rest, last = (float(np.float32(c)) for c in coefficients)
    if interpret:
        found = jnp.full(x.shape, last, jnp.float32)
        for c in reversed(rest):
            found = found * x + np.float32(c)
        return found

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    )
    def emit(_: Context, x: Registers) -> Registers:
        return x._pointwise(evaluate)

    def evaluate(register: MlirValue) -> MlirValue:
        def constant(c: float) -> MlirValue:
            return vector.broadcast(register.type, literal(c, ir.F32Type.get()))

        found = constant(last)
        for c in reversed(rest):
            found = llvm.intr_fma(found, register, constant(c))
        return found

    return emit(x)


def multiply_add(x: Array, factor: float, y: Array, *, interpret: bool) -> Array:
    """Returns x · factor + y of tiles, rounded once, whatever the compiler contracts."""
    if interpret:
        return multiply_add_in_kernel(x, factor, y)

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
    )
    def emit(_: Context, x: Registers, y: Registers) -> Registers:
        return x._pointwise(fuse, y)

    def fuse(x: MlirValue, y: MlirValue) -> MlirValue:
        c = literal(float(np.float32(factor)), ir.F32Type.get())
        fused: MlirValue = llvm.intr_fma(x, vector.broadcast(x.type, c), y)
        return fused

    return emit(x, y)


def unpacked(x: Array, *, interpret: bool) -> Array:
    """Converts a tile of bfloat16 to float32: one instruction an entry, from words of two."""
    if interpret:
        return extended(x)

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    )
    def emit(_: Context, x: Registers) -> Registers:
        return x._pointwise(unpack)

    def unpack(register: MlirValue) -> MlirValue:
        word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair: MlirValue = llvm.bitcast(word, register)
        # The compiler's own way of taking words apart needs two instructions for one of the halves.
        entries = [arith.shli(pair, literal(16, word)), arith.andi(pair, literal(-(2**16), word))]
        result = llvm.mlir_undef(ir.VectorType.get((2,), number))
        for place, entry in enumerate(entries):
            result = llvm.insertelement(result, llvm.bitcast(number, entry), literal(place, word))
        return result

    return emit(x)


def round_to_bfloat16(x: Array, *, interpret: bool) -> Array:
    """Rounds every entry of a tile to bfloat16, to nearest even, and returns float32.

    This takes one instruction an entry. To pack a pair takes one, and to unpack it again two. It is
    for numbers that no product reads.
    """
    if interpret:
        return extended(x.astype(jnp.bfloat16))

    @plgpu.inline_mgpu(
        arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    )
    def emit(_: Context, x: Registers) -> Registers:
        return x._pointwise(round_entries)

    def round_entries(register: MlirValue) -> MlirValue:
        # The lower half of the pair is 0, so the word is the upper half as float32.
        text = "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $1, 0f00000000; mov.b32 $0, pair; }"
        result = llvm.mlir_undef(register.type)
        for place in (literal(i, ir.IntegerType.get_signless(32)) for i in range(2)):
            entry = llvm.extractelement(register, place)
            rounded: MlirValue = llvm.inline_asm(ir.F32Type.get(), [entry], text, "=f,f")
            result = llvm.insertelement(result, rounded, place)
        return result

    return emit(x)
