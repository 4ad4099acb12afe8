"""What the public code of arXiv 2510.04212 computes: a reading of its source in NumPy, twice.

`EAGER` takes every operation by itself, as PyTorch's dispatcher runs it under bfloat16 autocast:
products, and in-place additions to a bfloat16 array, round; exp, log and sums are float32.
`COMPILED` leaves out the roundings that the compiler removes from the program of the trainer.
docs/who_rounds_what.md compares both with what the code computed on a GPU. Nothing here comes from
the library. The mask is causal, with one query head per key head. Arrays are [N, T, H], in float32
with bfloat16 values.
"""

import dataclasses
from typing import Literal

import ml_dtypes
import numpy as np

STEP = 512  # keys and queries of a tile
LOWEST = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
EPSILON = np.float32(1e-10)

Rule = Literal["standard", "published", "bounded"]


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounds to bfloat16, to nearest even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Result:
    """O, gradients, and lse [N, T]; O and gradients are bfloat16 values.

    `sizes` holds what `out`, `dq`, `dk` and `dv` would each be if nothing cancelled: every term of
    every sum, and of dP − δ, counts with its absolute value. An entry that is far smaller than its
    size is a remainder of float32 sums, and depends on their order.
    """

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    sizes: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Roundings:
    """Which operations of the source round to bfloat16; False if the compiler removes the rounding.

    Roundings that always happen have no field: q kᵀ, P̄ and P as operands, P̄V, the final l where
    lse is formed from it, O, dP, dS · scale, the products of each tile for dQ, dK, dV, and dQ, dK,
    dV.
    """

    scaled_scores: bool  # q kᵀ · scale; exact where the scale is a power of two

    shift: bool  # S − m and m_old − m_new, before exp
    tie_threshold: bool  # the maximum minus 1e-3; an entry at or above it repeats the maximum
    accumulator: bool  # α Ō and α Ō + P̄V, both in place
    running_stats: bool  # m and l, as the next step reads them
    divisor: bool  # the final l, as the divisor of Ō
    products_of_delta: bool  # dO ∘ O
    gradient_sums: bool  # dQ, dK, dV after every tile, in place


EAGER = Roundings(
    scaled_scores=True,
    shift=True,
    tie_threshold=True,
    accumulator=True,
    running_stats=True,
    divisor=True,
    products_of_delta=True,
    gradient_sums=True,
)
# `divisor` holds for all rows except those of the first tile, where it depends on how the compiler
# happens to fuse. Without the dynamic maximum these rows are divided by the l before its rounding.
COMPILED = Roundings(
    scaled_scores=False,
    shift=False,
    tie_threshold=False,
    accumulator=False,
    running_stats=False,
    divisor=True,
    products_of_delta=False,
    gradient_sums=False,
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Both passes over tiles of `step` queries by `step` keys.

    Attributes:
      rounds: `EAGER` or `COMPILED`.
      rule: the rule of the row maximum. `standard` and `published` (`STABLE=1`) are those of the
        public code, which also computes the tiles above the diagonal and clamps the sum of a step
        from below. `bounded` is not: it moves the maximum by at most 20, clamps nothing, and skips
        the tiles above the diagonal.
      step: queries and keys of a tile.
    """

    rounds: Roundings
    rule: Rule = "standard"
    step: int = STEP

    def attend(self, arrays: dict[str, np.ndarray]) -> Result:
        """O, lse and the gradients of q, k and v for the cotangent dO."""
        q, do = arrays["q"], arrays["do"]
        out, size, lse = np.zeros_like(q), np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
        for rows in self._tiles(q):
            out[:, rows], size[:, rows], lse[:, rows] = self._forward(arrays, rows)
        products = self._maybe(do * out, self.rounds.products_of_delta)
        grads, sizes = self._backward(arrays, lse[..., None], products)
        return Result(out=out, lse=lse, **grads, sizes={"out": size, **sizes})

    def _forward(self, arrays: dict[str, np.ndarray], rows: slice) -> tuple[np.ndarray, ...]:
        """O, the size of its terms, and lse, for one tile of queries."""
        rounds, maybe, q = self.rounds, self._maybe, arrays["q"][:, rows]
        m = np.full((*q.shape[:2], 1), LOWEST, np.float32)
        l, acc, size = np.zeros_like(m), np.zeros_like(q), np.zeros_like(q)
        for cols in self._tiles(arrays["k"]):
            if self.rule == "bounded" and cols.start >= rows.stop:
                continue
            s = self._scores(arrays, rows, cols, float(LOWEST))
            m_new = maybe(np.maximum(self._step_maximum(s), m), rounds.running_stats)
            with np.errstate(over="ignore"):
                p = np.exp(maybe(s - m_new, rounds.shift))
                alpha = np.exp(maybe(m - m_new, rounds.shift))
            row_sum = p.sum(-1, keepdims=True, dtype=np.float32)
            if self.rule != "bounded":
                row_sum = np.maximum(row_sum, EPSILON)
            l = maybe(alpha * l + row_sum, rounds.running_stats)
            acc = maybe(alpha * acc, rounds.accumulator)
            v = arrays["v"][:, cols]
            acc = maybe(acc + bf16(bf16(p) @ v), rounds.accumulator)
            size = alpha * size + p @ np.abs(v)
            m = m_new
        divisor = maybe(l, rounds.divisor)
        return bf16(acc / divisor), size / divisor, (np.log(bf16(l)) + m)[..., 0]

    def _backward(
        self, arrays: dict[str, np.ndarray], lse: np.ndarray, products: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The gradients and the sizes of their terms; the entries of `products` sum to δ."""
        q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
        scale = np.float32(q.shape[-1] ** -0.5)
        grads = {f"d{name}": np.zeros_like(arrays[name]) for name in ("q", "k", "v")}
        sizes = {name: np.zeros_like(x) for name, x in grads.items()}

        delta, delta_size = (
            x.sum(-1, keepdims=True, dtype=np.float32) for x in (products, np.abs(products))
        )

        def add(name: str, tile: slice, a: np.ndarray, b: np.ndarray, size: np.ndarray) -> None:
            total = grads[name][:, tile] + bf16(a @ b)
            grads[name][:, tile] = self._maybe(total, self.rounds.gradient_sums)
            sizes[name][:, tile] += size @ np.abs(b)

        for rows in self._tiles(q):
            for cols in self._tiles(k):
                if cols.start >= rows.stop:
                    continue  # P is 0, so there is nothing to add
                p = np.exp(self._scores(arrays, rows, cols, -np.inf) - lse[:, rows])
                dp = bf16(do[:, rows] @ v[:, cols].swapaxes(1, 2))
                ds = bf16(p * scale * (dp - delta[:, rows]))
                size = p * scale * (np.abs(dp) + delta_size[:, rows])
                p_t, ds_t, size_t = (x.swapaxes(1, 2) for x in (bf16(p), ds, size))
                add("dv", cols, p_t, do[:, rows], p_t)
                add("dq", rows, ds, k[:, cols], size)
                add("dk", cols, ds_t, q[:, rows], size_t)
        return {name: bf16(x) for name, x in grads.items()}, sizes

    def _scores(
        self, arrays: dict[str, np.ndarray], rows: slice, cols: slice, fill: float
    ) -> np.ndarray:
        """S of a tile, with `fill` above the diagonal."""
        q, k = arrays["q"][:, rows], arrays["k"][:, cols]
        s = bf16(q @ k.swapaxes(1, 2)) * np.float32(q.shape[-1] ** -0.5)
        s = self._maybe(s, self.rounds.scaled_scores)
        positions = np.arange(arrays["k"].shape[1])
        return np.where(positions[rows][:, None] < positions[cols], np.float32(fill), s)

    def _step_maximum(self, s: np.ndarray) -> np.ndarray:
        """The row maximum of a step; moved by the rule where it repeats."""
        m = s.max(-1, keepdims=True)
        if self.rule == "standard":
            return m
        with np.errstate(over="ignore"):  # twice the lowest number, where all is masked
            if self.rule == "published":
                threshold = self._maybe(m - np.float32(1e-3), self.rounds.tie_threshold)
                moved = np.where(m > 0, np.float32(2) * m, np.minimum(m, 0) * 0)
            else:
                threshold = m
                distance = np.where(m == 0, np.float32(1), np.minimum(np.abs(m), 20))
                moved = np.where(m <= LOWEST, m, m + distance)
        return np.where((s >= threshold).sum(-1, keepdims=True) > 1, moved, m)

    def _tiles(self, x: np.ndarray) -> list[slice]:
        length = x.shape[1]
        return [slice(i, min(i + self.step, length)) for i in range(0, length, self.step)]

    @staticmethod
    def _maybe(x: np.ndarray, rounded: bool) -> np.ndarray:
        return bf16(x) if rounded else x
