"""Whether a layer leaves its own past, or the other layers: what a series of measurements says.

A number of every layer is followed over measurements in their order: `score_maximum` or
`query_weight_norm` of `attention_signals`, the largest of a layer's heads. Of each measurement

  own     is the value over the median of the layer's last 10 measurements before it; there must be
          3 of them.
  others  is the value over the median of the other layers at the same measurement.

This is information and no rule (`diagnostics.rules`). Thresholds were chosen on a part of the lab's
records. On the others no ratio hit more explosions than |score| ≥ 512 without more false alarms;
`Quantity.worth` has the counts, results/failure more of them. What it adds is which layer it is,
and since when: where rounding breaks training one layer leaves the others, at a rate too high all
of them grow together.
"""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

BEFORE = 10
"""Measurements whose median is a layer's past."""
LEAST_BEFORE = 3


class TrendRatios(NamedTuple):
    """Ratios of every measurement and layer; NaN without anything to compare with."""

    own: Float[np.ndarray, "S L"]
    others: Float[np.ndarray, "S L"]


class Quantity(NamedTuple):
    """A number of a layer that is followed.

    Attributes:
      signal: of `attention_signals`.
      label: in words.
      own, others: ratios from which on a layer has left its past, or the others.
      least: a smaller value has left nothing: scores grow by orders of magnitude as training
        starts.
      worth: what the ratios were worth.
    """

    signal: str
    label: str
    own: float
    others: float
    least: float
    worth: str


QUANTITIES = (
    Quantity(
        "score_maximum",
        "largest |score|",
        own=4.0,
        others=6.0,
        least=96.0,
        worth="left its past: before 296 of 312 explosions, by a median of 512 steps, and in 99 of "
        "476 runs that held; left the others: before 258, by 484 steps, and in 42",
    ),
    Quantity(
        "query_weight_norm",
        "largest spectral norm of a head's W_Q",
        own=4.0,
        others=2.25,
        least=0.0,
        worth="left its past: before 285 of 312 explosions, by a median of 344 steps, and in 66 of "
        "476 runs that held; left the others: before 237, by 435 steps, and in 18",
    ),
)


class Departure(NamedTuple):
    """Where a layer first leaves its past, or the others; None where it does not.

    Attributes:
      layer: its place in the array.
      own: place of the measurement at which it has left its past.
      others: likewise the other layers.
    """

    layer: int
    own: int | None
    others: int | None

    @property
    def first(self) -> int:
        """Place of the earlier one."""
        return min(place for place in (self.own, self.others) if place is not None)


def trend_ratios(values: Float[np.ndarray, "S L"]) -> TrendRatios:
    """v / median of the layer's past, and v / median of the other layers.

    Args:
      values: of S measurements in their order, of L layers; NaN where there is none.

    Example:
      >>> import numpy as np
      >>> scores = np.array([[20.0, 22, 25], [21, 21, 26], [20, 23, 24], [20, 180, 25]])
      >>> found = trend_ratios(scores)
      >>> found.own[3].round(1).tolist(), found.others[3].round(1).tolist()
      ([1.0, 8.2, 1.0], [0.2, 8.0, 0.2])
    """
    values = np.asarray(values, np.float64)
    own, others = np.full_like(values, np.nan), np.full_like(values, np.nan)
    for step in range(len(values)):
        past = values[max(step - BEFORE, 0) : step]
        enough = np.sum(~np.isnan(past), axis=0) >= LEAST_BEFORE
        own[step] = np.where(enough, _over_median(values[step], past, axis=0), np.nan)
    for layer in range(values.shape[1]):
        rest = np.delete(values, layer, axis=1)
        others[:, layer] = _over_median(values[:, layer], rest, axis=1)
    return TrendRatios(own, others)


def departures(values: Float[np.ndarray, "S L"], quantity: Quantity) -> list[Departure]:
    """The layers that leave their past or the others, the earliest first.

    Args:
      values: as `trend_ratios` takes them.
      quantity: what they are.
    """
    values = np.asarray(values, np.float64)
    of, large = trend_ratios(values), values >= quantity.least
    own = large & (of.own >= quantity.own)
    others = large & (of.others >= quantity.others)
    found = [Departure(i, _first(own[:, i]), _first(others[:, i])) for i in range(values.shape[1])]
    left = [one for one in found if one[1:] != (None, None)]
    return sorted(left, key=lambda one: one.first)


def _over_median(value: np.ndarray, of: np.ndarray, axis: int) -> np.ndarray:
    """NaN where no entry is known, or their median is 0 or infinite."""
    if of.shape[axis] == 0:
        return np.full_like(value, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a slice that is all NaN
        median = np.nanmedian(of, axis=axis)
    known = np.isfinite(median) & (median > 0)
    return np.where(known, value / np.where(known, median, 1.0), np.nan)


def _first(met: np.ndarray) -> int | None:
    return int(np.argmax(met)) if np.any(met) else None
