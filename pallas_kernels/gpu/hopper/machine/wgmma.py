"""Matrix products of a warpgroup (WGMMA)."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu.utils import ir, llvm, memref_transpose
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.layouts import TILE, transforms
from pallas_kernels.gpu.hopper.machine.types import (
    Accumulator,
    Context,
    MlirValue,
    Ref,
    Registers,
    Scratch,
)

_SWIZZLE = 128  # bytes of the rows of a bfloat16 operand that lie together: 64 columns


_SLICE = 16  # columns of bfloat16 operands that an instruction multiplies


def accumulator(rows: int, columns: int) -> Scratch:
    """The scratch type of registers [rows, columns] that products are added to."""
    return plgpu.ACC((rows, columns), jnp.float32)


def as_operand(x: Array, memory: Ref | None) -> Array | Ref:
    """Returns x as a left operand: the registers themselves, or `memory` after a store of x."""
    if memory is None:
        return x
    memory[...] = x
    plgpu.commit_smem()  # products read through the async proxy, which sees no plain stores
    return memory


def add_product(total: Array, left: Array | Ref, right: Ref, *, interpret: bool) -> Array:
    """Returns total + left right, after waiting for the product."""

    def product(out: Accumulator) -> Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    if interpret:  # the interpreter has no accumulator that begins with a value
        return total + pl.run_scoped(product, accumulator(*total.shape))
    # `run_state` waits for the product before it gives the registers back.
    return pl.run_state(lambda out: plgpu.wgmma(out, left, right))(plgpu.ACC.init(total))


def begin_product(left: Array | Ref, right: Ref, *, interpret: bool) -> Array:
    """Starts left rightᵀ [64, columns], of bfloat16 [64, H] and [columns, H] in shared memory.

    The result may be read after a wait for the product. The product does not add to an accumulator:
    the machine has a flag for that. `plgpu.wgmma` would first write zeros, and add to them.
    """
    (rows, depth), columns = left.shape, right.shape[0]
    if interpret:  # the interpreter has no such product

        def product(out: Accumulator) -> Array:
            plgpu.wgmma(out, left, right.T)
            return out[...]

        return pl.run_scoped(product, accumulator(rows, columns))
    matrix = plgpu.RefType(transforms(depth, left.dtype))

    @plgpu.inline_mgpu(
        arg_types=(matrix, matrix),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=TILE),
    )
    def emit(_: Context, left: MlirValue, right: MlirValue) -> Registers:
        # Both operands lie in column blocks of 64 features, as TMA writes swizzled tiles. These are
        # the descriptors of the first 16 features. For each slice an offset is added to them.
        together = _SWIZZLE // 2
        (a, _), (_, stride), _ = mma_utils.create_descriptor(
            left, _SWIZZLE, (rows, together), logical_k_major=False
        )
        (b, _), (_, stride_b), _ = mma_utils.create_descriptor(
            memref_transpose(right, (1, 0, 3, 2)),  # keys are rows; the descriptor alone makes kᵀ
            _SWIZZLE,
            (together, columns),
            logical_k_major=True,
        )
        # Slices of 16 features lie 32 bytes apart within 64 features, and a tile apart beyond.
        places = [divmod(column, together) for column in range(0, depth, _SLICE)]
        offsets = [[n * s + 2 * i for s in (stride, stride_b)] for n, i in places]
        return _of_registers(_multiply_afresh(a, b, offsets, columns), (rows, columns))

    return emit(left, right)


def _multiply_afresh(
    a: MlirValue, b: MlirValue, offsets: Sequence[Sequence[int]], columns: int
) -> list[MlirValue]:
    """Starts the sum of the products of all slices, and returns its registers.

    Args:
      a, b: descriptors of the first slices.
      offsets: bytes from there to each slice of a and of b.
      columns: how many the result has.
    """
    count = columns // 2
    total = ", ".join(f"${i}" for i in range(count))
    lines = []
    for place, (of_a, of_b) in enumerate(offsets):
        for name, source, offset in (("a", count, of_a), ("b", count + 1, of_b)):
            lines.append(f"add.s64 {name}, ${source}, {mma_utils.encode_addr(offset)};")
        # CUTLASS's ScaleOut::Zero, `zero_init` in FlashAttention-3: a predicate, not a register of
        # zeros, says that the first slice adds to nothing.
        adds = "adds" if place else "begins"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{_SLICE}.f32.bf16.bf16 "
            f"{{{total}}}, a, b, {adds}, 1, 1, 0, 0;"
        )
    text = f"""{{ .reg .pred begins, adds; .reg .b64 a, b;
        setp.ne.b32 begins, 0, 0; setp.ne.b32 adds, 1, 0;
        wgmma.fence.sync.aligned; {" ".join(lines)} wgmma.commit_group.sync.aligned; }}"""
    # Only outputs ("=f"): as "+f" they would have to be zeroed, by an instruction each.
    register = ir.VectorType.get((1,), ir.F32Type.get())
    constraints = ",".join(["=f"] * count + ["l", "l"])
    struct = llvm.StructType.get_literal([register] * count)
    found: MlirValue = llvm.inline_asm(struct, [a, b], text, constraints, has_side_effects=True)
    return [llvm.extractvalue(register, found, [i]) for i in range(count)]


def _of_registers(registers: Sequence[MlirValue], shape: tuple[int, int]) -> Registers:
    """The result of a product, from its registers, in the layout `TILE`."""
    layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    found = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    array = fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)
    return array.to_layout(fragmented_array.WGMMA_LAYOUT)
