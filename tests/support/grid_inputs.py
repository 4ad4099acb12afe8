"""Attention inputs on a grid, in NumPy alone: S and dP are exact in any order of summation.

The recorder of the public code runs on a GPU without JAX. It draws the same arrays from here as the
tests that compare with its record.
"""

import dataclasses

import numpy as np

HEAD_SIZE = 64
STEP = 512  # keys and queries per tile of the public code


@dataclasses.dataclass(frozen=True)
class Head:
    """The scores of one head.

    `size`: about the largest |S|. `tied`: within every step of keys the second half repeats the
    first, so that most rows tie, also across tiles. `offset`: a number added to every score of the
    head.
    """

    size: int
    tied: bool
    offset: int = 0


# With integers in [-8, 8], q kᵀ reaches about 107 after the scale 1/8. Powers of two change that.
_EXPONENTS = {3: -5, 30: -2, 150: 0, 1000: 3}
HEADS = (
    *(Head(size, tied) for size in _EXPONENTS for tied in (False, True)),
    Head(3, True, offset=-16),  # every maximum is negative
    Head(3, True, offset=16),  # every maximum is positive
)


def inputs(
    length: int, heads: tuple[Head, ...] = HEADS, *, step: int = STEP, seed: int = 0
) -> dict[str, np.ndarray]:
    """q, k, v and do, float32 [1, T, N, 64]; every value is representable in bfloat16."""
    rng = np.random.default_rng(seed)
    shape = (1, length, len(heads), HEAD_SIZE)
    q, k = (rng.integers(-8, 9, shape).astype(np.float32) for _ in range(2))
    v, do = (rng.integers(-127, 128, shape).astype(np.float32) for _ in range(2))
    for n, head in enumerate(heads):
        q[:, :, n] *= np.float32(2.0 ** _EXPONENTS[head.size])
        if head.offset:
            # Feature 0 holds nothing but the offset: 16 · 8 · offset / 16 / 8.
            q[:, :, n, 0], k[:, :, n, 0] = 16.0, 8.0 * head.offset / 16.0
        if head.tied:
            for start in range(0, length, step):
                half = min(step, length - start) // 2
                k[:, start + half : start + 2 * half, n] = k[:, start : start + half, n]
            v[:, :, n] = -np.abs(v[:, :, n])  # with one sign, errors of a tie add up
    return {"q": q, "k": k, "v": v * np.float32(2**-6), "do": do * np.float32(2**-10)}


def kept_rows(length: int, count: int) -> np.ndarray:
    """The rows that a record keeps: the first and last of every step, others spread between."""
    edges = np.arange(0, length, STEP)
    edges = np.concatenate([edges, np.minimum(edges + STEP, length) - 1])
    others = np.random.default_rng(1).permutation(np.setdiff1d(np.arange(length), edges))
    return np.sort(np.concatenate([edges, others[: count - len(edges)]]))
