"""What the public code computed on a GPU (`results/public_code`), and when two results differ.

An element differs if the difference is larger than a change of order makes in float32 sums of its
terms. A value within some 2^-22 of a tie of bfloat16, about one in 10,000, may round the other way.
That moves an element by at most a unit of its size without cancellation (`Result.sizes`). Several
roundings of one value in a row may add up. One dS that rounds the other way affects all 64 elements
of a row of dQ and of a row of dK.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import grid_inputs
import ml_dtypes
import numpy as np

from public_code.reading import COMPILED, EAGER, Reading, Result, Rule

RECORD = Path(__file__).resolve().parents[3] / "results" / "public_code" / "h200.npz"
KEPT = {1024: 56, 1536: 24}  # rows that the record keeps, by T
ARRAYS = ("out", "dq", "dk", "dv")
ROUNDINGS = {"compiled": COMPILED, "eager": EAGER}
ALL = slice(None)

SHARE = 0.005  # the share of elements that may differ, fixed before the first comparison

# The effect of another order of float32 sums: some ulps of the sum of sizes.
NOISE = 2.0**-22
# XLA flushes subnormal P̄ to 0 and NumPy does not. Divided by a clamped l of 1e-10, they reach
# 2^-93.
UNDERFLOW = 2.0**-80


def unit(x: np.ndarray) -> np.ndarray:
    """The spacing of bfloat16 numbers at x."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), UNDERFLOW))) - 7)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Which elements differ, [N, T, H], and the largest difference, in units."""

    elements: np.ndarray
    most: float

    @property
    def share(self) -> float:
        return float(self.elements.mean())


def difference(x: np.ndarray, name: str, want: Result, rows: Any = slice(None)) -> Difference:
    """How x, all rows or some `rows` of an array, differs from that array of the reading."""
    size = want.sizes[name][:, rows]
    apart = np.abs(x - getattr(want, name)[:, rows])
    differs = apart > NOISE * size + UNDERFLOW
    # A sum of sizes may round to just below a power of two, so it is enlarged by some float32 ulps.
    units = np.where(differs, apart, 0) / unit(size * np.float32(1 + 1e-6))
    return Difference(differs, float(units.max()))


def by_head(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts [1, T, N, H] to the [N, T, H] of the reading."""
    return {name: np.ascontiguousarray(x[0].swapaxes(0, 1)) for name, x in arrays.items()}


@functools.cache
def record() -> dict[str, np.ndarray]:
    with np.load(RECORD) as file:
        return dict(file)


@dataclasses.dataclass(frozen=True)
class Run:
    """One of the recorded runs: T, compiled or eager, and the rule of the row maximum."""

    length: int
    way: str
    rule: Rule

    def recorded(self, name: str) -> np.ndarray:
        """The recorded array, [N, kept rows, H]."""
        bits = record()[f"{self.length}/{self.rule}/{self.way}/{name}"]
        return bits.view(ml_dtypes.bfloat16).astype(np.float32).swapaxes(0, 1)

    @property
    def kept_rows(self) -> np.ndarray:
        return grid_inputs.kept_rows(self.length, KEPT[self.length])

    def differences(
        self, changes: tuple[str, ...] = (), tile: int | None = None, heads: slice = ALL
    ) -> dict[str, Difference]:
        """Differences of the record from a reading without the roundings `changes`."""
        rows = self.kept_rows
        chosen = np.full(rows.shape, True) if tile is None else rows // grid_inputs.STEP == tile
        want = reading(self, changes, heads.stop)
        return {
            name: difference(self.recorded(name)[heads, chosen], name, want, rows[chosen])
            for name in ARRAYS
        }


@functools.cache
def reading(run: Run, changes: tuple[str, ...] = (), heads: int | None = None) -> Result:
    rounds = dataclasses.replace(ROUNDINGS[run.way], **dict.fromkeys(changes, False))
    arrays = by_head(grid_inputs.inputs(run.length))
    return Reading(rounds, run.rule).attend({name: x[:heads] for name, x in arrays.items()})
