"""Values where rounding may go wrong (codes, midpoints, neighbours), and their roundings."""

import ml_dtypes
import numpy as np
import plain

from lowprec_attn.numerics import FORMATS

HARDWARE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SHORTENED = tuple(f"bf16_m{n}" for n in range(1, 7))
NARROW = HARDWARE + SHORTENED
LONG = tuple(f"f32_m{n}" for n in range(8, 23))


def dtype_of(fmt: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, fmt, fmt))


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def codes(fmt: str) -> np.ndarray:
    """Every value of the format except NaN, ascending, as float32; ±0 counts once."""
    if fmt in SHORTENED:
        step = 1 << (7 - FORMATS[fmt].fraction_bits)
        values = np.arange(0, 1 << 16, step).astype(np.uint16).view(ml_dtypes.bfloat16)
    else:
        width = dtype_of(fmt).itemsize
        unsigned = np.dtype(f"uint{8 * width}")
        values = np.arange(1 << 8 * width).astype(unsigned).view(dtype_of(fmt))
    values = values.astype(np.float32)
    return np.unique(values[~np.isnan(values)])


def boundaries(fmt: str) -> np.ndarray:
    """All codes, midpoints of neighbours, overflow, and the float32 neighbours of each of them."""
    exact = codes(fmt)
    finite = exact[np.isfinite(exact)].astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    top = np.float64(FORMATS[fmt].max_finite)
    threshold = top + (top - finite[-2]) / 2  # from here on, rounding to nearest overflows
    edges = np.array([threshold, -threshold, 2 * threshold, -2 * threshold])
    with np.errstate(over="ignore"):  # formats with float32's exponents overflow float32
        points = np.concatenate([exact, middle, edges.astype(np.float32)])
        around = [points, *(np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf))]
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-45, 1e-39], np.float32)
    return np.concatenate([*around, special])


def sampled_boundaries(fmt: str) -> np.ndarray:
    """`boundaries` of randomly drawn codes, for a format that has too many to try all."""
    drop = 23 - FORMATS[fmt].fraction_bits
    patterns = np.random.default_rng(4).integers(0, 1 << 32, 1 << 14, np.uint32)
    largest = np.array([0x7F7F_FFFF, 0xFF7F_FFFF], np.uint32)  # these round to infinity
    code = np.concatenate([patterns, largest]) & ~np.uint32((1 << drop) - 1)
    half = np.uint32(1 << (drop - 1))
    return np.concatenate(
        [code, code + 1, code - 1, code + half - 1, code + half, code + half + 1, patterns]
    ).view(np.float32)


def expected(x: np.ndarray, fmt: str) -> np.ndarray:
    if fmt in SHORTENED + LONG:
        return plain.shorten(x, FORMATS[fmt].fraction_bits)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype_of(fmt)).astype(np.float32)
