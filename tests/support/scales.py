"""Rounding with a scale in NumPy, without code of the library; for `plain` and for tests.

Arrays are float32 [B, N, L, H]. Scales, and products with them, are rounded to float32.
"""

import ml_dtypes
import numpy as np

MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0}


def cast(x: np.ndarray, fmt: str) -> np.ndarray:
    """A saturating conversion: numbers that are too large become the largest, NaN stays NaN."""
    dtype = getattr(ml_dtypes, fmt, fmt)
    return np.clip(x, -MAX[fmt], MAX[fmt]).astype(dtype).astype(np.float32)


def factor(numerator: float, amax: np.ndarray) -> np.ndarray:
    """numerator / amax in float32, or 1 if amax is 0 or infinite."""
    usual = (amax > 0) & (amax < np.inf)
    with np.errstate(over="ignore"):
        of = np.float32(numerator) / np.where(usual, amax, 1).astype(np.float32)
    return np.where(usual, np.minimum(of, np.finfo(np.float32).max), np.float32(1))


def blocks(size: np.ndarray, block: int, axis: int) -> np.ndarray:
    """The maximum of each block, written to every element of the block."""
    size = size.swapaxes(axis, -1)
    result = np.empty_like(size)
    for first in range(0, size.shape[-1], block):
        part = slice(first, first + block)
        result[..., part] = size[..., part].max(-1, keepdims=True)
    return result.swapaxes(axis, -1)


def largest(x: np.ndarray, kind: str, group: int = 1) -> np.ndarray:
    """The amax of the whole array, or of each batch element and key head with its query heads."""
    size = np.nan_to_num(np.abs(x), nan=0.0, posinf=np.inf)
    if kind != "head":
        return size.max(keepdims=True)
    of_heads = size.max((2, 3), keepdims=True)
    b, n = of_heads.shape[:2]
    of_keys = of_heads.reshape(b, n // group, group, 1, 1).max(2)
    return of_keys.repeat(group, 1)


def round_scaled(
    x: np.ndarray, fmt: str, scale: str, axis: int = -1, amax: np.ndarray | float | None = None,
    group: int = 1,
) -> np.ndarray:  # fmt: skip
    """Rounds to code / scale.

    amax: the amax of the array, if it is not the amax of x. group: query heads per key head.
    """
    size = np.nan_to_num(np.abs(x), nan=0.0, posinf=np.inf)
    most = MAX[fmt]
    if scale in ("tensor", "head"):
        s = factor(most, largest(x, scale, group) if amax is None else np.asarray(amax))
    elif scale.startswith("x"):
        s = np.float32(scale[1:])
    elif scale.startswith("block"):
        s = factor(most, blocks(size.max(-1, keepdims=True), int(scale[5:]), -2))
    elif scale == "mx":
        of_block = blocks(size, 32, axis)
        usual = (of_block > 0) & (of_block < np.inf)
        floor = np.frexp(np.where(usual, of_block, 1.0))[1] - 1
        power = np.minimum(np.frexp(most)[1] - 1 - floor, 127)
        s = np.where(usual, np.exp2(power.astype(np.float64)), 1).astype(np.float32)
    else:
        assert scale == "nvfp4", scale
        of_array = factor(448 * most, largest(x, scale) if amax is None else np.asarray(amax))
        descale = cast(blocks(size, 16, axis) * (of_array / np.float32(most)), "float8_e4m3fn")
        with np.errstate(divide="ignore", invalid="ignore"):
            code = cast(x * (of_array / descale), fmt)
            return np.where((descale == 0) & ~np.isnan(x), 0, code * descale / of_array)
    with np.errstate(over="ignore"):
        return cast(x * s, fmt) / s
