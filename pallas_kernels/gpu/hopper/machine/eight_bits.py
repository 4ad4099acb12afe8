"""P̄ in FP8 as the left operand of a product, without an exchange between threads.

A thread holds the result of a product in pairs: of 16 columns, the thread c of four has 2c, 2c + 1,
2c + 8 and 2c + 9. As a left operand in 8 bits it has to hold 4c to 4c + 3. FlashAttention-3
permutes registers and V. Here the keys of every 16 are permuted before the first product, so that
column 2c belongs to key 4c, and so on. The numbers that a thread holds are then those that it
needs, in their order, and V keeps its own order.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.mosaic.gpu.utils import ir, llvm, vector
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.layouts import TILE
from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Registers

# Keys that are permuted among themselves.
_TOGETHER = 16


def key_of_column(column: Array) -> Array:
    """The index of the key whose scores stand in a column, both counted from the first key on."""
    # Of the four bits, the highest comes after the two in the middle.
    half, pair = column & jnp.int32(8), column & jnp.int32(6)
    others = column & jnp.int32(~14)
    return others | (pair << jnp.int32(1)) | (half >> jnp.int32(2))


def in_columns(k: Array) -> Array:
    """Returns k [B, S, K, H] with its keys in the order of `key_of_column`."""
    batch, keys, *rest = k.shape
    # Key 4c + 2h + e goes to column 8h + 2c + e.
    by_bits = k.reshape(batch, keys // _TOGETHER, 4, 2, 2, *rest)
    return by_bits.swapaxes(2, 3).reshape(k.shape)


def as_codes(x: Array) -> Array:
    """Rounds a tile to e4m3, as the left operand of a product whose keys are `in_columns`.

    Numbers beyond 448 become 448.
    """

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct(
            x.shape, jnp.float8_e4m3fn, layout=plgpu.Layout.WGMMA_8BIT
        ),
    )
    def emit(_: Context, x: Registers) -> Registers:
        layout = fragmented_array.WGMMA_LAYOUT_8BIT
        codes = np.empty(layout.registers_shape(x.shape), dtype=object)
        for place in np.ndindex(codes.shape):
            row, column, *rest = place
            pairs = (x.registers[(row, 2 * column + i, *rest)] for i in (0, 1))
            codes[place] = _packed(*pairs)
        return fragmented_array.FragmentedArray(_registers=codes, _layout=layout, _is_signed=None)

    return emit(x)


def _packed(*pairs: MlirValue) -> MlirValue:
    """Rounds two registers of two numbers each to one register of four codes."""
    word = ir.IntegerType.get_signless(32)
    numbers = [llvm.extractelement(pair, literal(i, word)) for pair in pairs for i in (0, 1)]
    # The machine converts two numbers at once; the first of its operands becomes the upper code.
    text = """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }"""
    packed: MlirValue = llvm.inline_asm(word, numbers, text, "=r,f,f,f,f")
    of_words = vector.broadcast(ir.VectorType.get((1,), word), packed)
    return vector.bitcast(ir.VectorType.get((4,), ir.Float8E4M3FNType.get()), of_words)
