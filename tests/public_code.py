"""What the public code of arXiv 2510.04212 computes, in NumPy: a reading of its source, twice.

`eager` takes every operation by itself, as PyTorch's dispatcher runs it under bfloat16 autocast:
products, and whatever adds in place to a bfloat16 array, round; exp, log and sums are float32.
`compiled` leaves out the roundings that the compiler leaves out of what its trainer runs. Nothing
here comes from the library. Causal, one query head per key head; arrays [N, T, H], float32 holding
bfloat16 values.
"""

import dataclasses

import ml_dtypes
import numpy as np

STEP = 512  # keys and queries of a tile
LOWEST = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
EPSILON = np.float32(1e-10)


def bf16(x: np.ndarray) -> np.ndarray:
    """Nearest-even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Result:
    """O, lse [N, T] and gradients; O and gradients are bfloat16 values."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@dataclasses.dataclass(frozen=True)
class Roundings:
    """Where an operation of the source rounds to bfloat16; False: the compiler leaves it out.

    What rounds in either way has no field: S twice (the product, and its multiple by the scale),
    P̄ and P as operands, P̄V, O, dP, dS · scale, each tile's product of dQ, dK, dV, and dQ, dK, dV.
    """

    shift: bool  # S − m and m_old − m_new, before exp
    accumulator: bool  # α Ō and α Ō + P̄V, in place
    running_sum: bool  # l, where the next step reads it
    divisor: bool  # l, where O is divided by it
    products_of_delta: bool  # dO ∘ O


EAGER = Roundings(
    shift=True, accumulator=True, running_sum=True, divisor=True, products_of_delta=True
)
COMPILED = Roundings(
    shift=False, accumulator=False, running_sum=False, divisor=False, products_of_delta=False
)


def published_max(s: np.ndarray) -> np.ndarray:
    """A step's row maximum, doubled where it repeats and is positive, 0 where it is negative."""
    m = s.max(-1, keepdims=True)
    # `block_row_maxes - 1e-3` is a bfloat16.
    repeated = (s >= bf16(m - np.float32(1e-3))).sum(-1, keepdims=True) > 1
    m = np.where(repeated & (m > 0), np.float32(2) * m, m)
    return np.where(repeated & (m < 0), np.float32(0), m)


def attend(
    arrays: dict[str, np.ndarray], rounds: Roundings, *, dynamic: bool, step: int = STEP
) -> Result:
    """Both passes over tiles of `step` queries by `step` keys, above the diagonal too.

    Args:
      arrays: q k v do.
      rounds: `EAGER` or `COMPILED`.
      dynamic: with the dynamic maximum (`STABLE=1`).
      step: queries and keys of a tile.
    """
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    scale = np.float32(q.shape[-1] ** -0.5)
    length = q.shape[-2]

    def maybe(x: np.ndarray, rounded: bool) -> np.ndarray:
        return bf16(x) if rounded else x

    def scores(rows: slice, cols: slice, fill: float) -> np.ndarray:
        s = bf16(bf16(q[:, rows] @ k[:, cols].swapaxes(1, 2)) * scale)
        above = np.arange(length)[rows][:, None] < np.arange(length)[cols]
        return np.where(above, np.float32(fill), s)

    tiles = [slice(i, min(i + step, length)) for i in range(0, length, step)]
    out, lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
    for rows in tiles:
        m = np.full((q.shape[0], rows.stop - rows.start, 1), LOWEST, np.float32)
        l, acc = np.zeros_like(m), np.zeros_like(q[:, rows])
        for cols in tiles:
            s = scores(rows, cols, float(LOWEST))
            r_m = published_max(s) if dynamic else s.max(-1, keepdims=True)
            m_new = np.maximum(r_m, m)
            with np.errstate(over="ignore"):
                p = np.exp(maybe(s - m_new, rounds.shift))
                alpha = np.exp(maybe(m - m_new, rounds.shift))
            row_sum = np.maximum(p.sum(-1, keepdims=True, dtype=np.float32), EPSILON)
            l = maybe(alpha * l + row_sum, rounds.running_sum)
            acc = maybe(acc * alpha, rounds.accumulator)
            acc = maybe(acc + bf16(bf16(p) @ v[:, cols]), rounds.accumulator)
            m = m_new
        out[:, rows] = bf16(acc / maybe(l, rounds.divisor))
        lse[:, rows] = (np.log(bf16(l)) + m)[..., 0]

    products = maybe(do * out, rounds.products_of_delta)
    delta = products.sum(-1, keepdims=True, dtype=np.float32)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for rows in tiles:
        for cols in tiles:
            p = np.exp(scores(rows, cols, -np.inf) - lse[:, rows, None])
            dp = bf16(do[:, rows] @ v[:, cols].swapaxes(1, 2))
            ds = bf16(p * scale * (dp - delta[:, rows]))
            # Each product is a bfloat16; up to two of them add up to the same bits in float32.
            dv[:, cols] += bf16(bf16(p).swapaxes(1, 2) @ do[:, rows])
            dk[:, cols] += bf16(ds.swapaxes(1, 2) @ q[:, rows])
            dq[:, rows] += bf16(ds @ k[:, cols])
    return Result(out, lse, bf16(dq), bf16(dk), bf16(dv))
