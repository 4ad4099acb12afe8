"""How registers and shared memory hold tiles, and vectors along their rows and columns."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.types import Layout, Ref, Scratch

# How a warpgroup's registers hold the result of a product, and a vector along its rows or columns.
TILE = plgpu.Layout.WGMMA


PER_ROW = TILE.reduce(1)


PER_COLUMN = TILE.reduce(0)


# Rows of a tile of matrices in shared memory, a core matrix of WGMMA.
TILE_ROWS = 8


# Columns that a thread holds next to each other, times the threads of a row.
LANES = 8


def tiles_of(shape: tuple[int, ...], dtype: DTypeLike) -> Scratch:
    """Shared memory for matrices [..., rows, columns], laid out for WGMMA and TMA."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], dtype))


def transforms(
    columns: int, dtype: DTypeLike
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The tiling and swizzle that WGMMA and TMA take for matrices with that many columns."""
    # The widest swizzle: 128 bytes if rows are that long. Without it the 8 rows of a core matrix
    # lie in the same banks of shared memory.
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((TILE_ROWS, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def vectors_of(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Scratch:
    """Shared memory for vectors [..., length]."""
    return plgpu.SMEM(shape, dtype)


def load(ref: Ref, layout: Layout, *, straight: bool = True) -> Array:
    """Loads a reference into registers; straight: without bank conflicts of shared memory."""
    return plgpu.load(ref, layout=layout, optimized=straight)  # type: ignore[call-arg]  # JAX 0.10


def rows_and_columns(shape: tuple[int, ...], row: Array, column: Array) -> tuple[Array, Array]:
    """The global row and column indices of the entries of a tile that begins at (row, column)."""
    down, across = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) for axis in (0, 1))
    return row + down, column + across


def constant(shape: tuple[int, ...], value: float, layout: Layout) -> Array:
    """An array in registers, of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts x [rows] to every column of a tile."""
    # Free: a thread has the numbers of its two rows already.
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts x [columns] to every row of a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def by_lane(combine: Callable[[Array, Array], Array], x: Array, columns: int = LANES) -> Array:
    """Combines the columns of [rows, more] that are equal modulo `columns`, to [rows, columns].

    Halves are combined with halves. That is no chain of dependent instructions, unlike Mosaic's own
    reductions, and needs no exchange between threads.
    """
    # Columns that are equal modulo 8 belong to the same thread, so no step crosses threads.
    while (width := x.shape[1]) > columns:
        x = combine(x[:, : width // 2], x[:, width // 2 :])
    return x


def extended(x: Array) -> Array:
    """Converts bfloat16 to float32 by its bits.

    With a cast instead, the compiler would round one value at a time before it, and the interpreter
    would be free to remove both casts.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)
