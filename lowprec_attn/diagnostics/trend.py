"""Tells from a series of measurements whether a layer leaves its own past or the other layers.

One number per layer is followed through the measurements in their order: `score_maximum` or
`query_weight_norm` of `attention_signals`, the largest over the heads of the layer. Each
measurement has two ratios:

  own     the value over the median of the layer's last 10 measurements before it, of which at
          least 3 must be known.
  others  the value over the median of the other layers at the same measurement.

This is information, not one of the rules (`diagnostics.rules`). Thresholds were chosen on a part of
the lab's records. On the rest of the records no ratio hit more explosions than |score| ≥ 512
without more false alarms; `Quantity.worth` has the counts, and results/failure has more of them.
The ratios add which layer it is and since when. Where rounding breaks training one layer leaves the
others; where the learning rate is too high all layers grow together.
"""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

BEFORE = 10
"""The number of earlier measurements whose median is a layer's past."""
LEAST_BEFORE = 3


class TrendRatios(NamedTuple):
    """Ratios of every measurement and layer; NaN where there is nothing to compare with.

    Attributes:
      own: the value over the median of the layer's last 10 measurements before it, of which at
        least 3 must be known.
      others: the value over the median of the other layers at the same measurement.
    """

    own: Float[np.ndarray, "S L"]
    others: Float[np.ndarray, "S L"]


class Quantity(NamedTuple):
    """A number of every layer that is followed.

    Attributes:
      signal: its name in `attention_signals`.
      label: its name for the user.
      own: the ratio from which on a layer has left its past.
      others: the ratio from which on a layer has left the other layers.
      least: a smaller value never counts as a departure, because scores grow by orders of magnitude
        as training starts.
      worth: what the ratios were worth in the lab.
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
        worth="a layer outgrew its past before 296 of 312 explosions, by a median of 512 steps, "
        "and in 99 of 476 runs that held; a layer outgrew the others before 258 explosions, by 484 "
        "steps, and in 42 of these runs",
    ),
    Quantity(
        "query_weight_norm",
        "largest spectral norm of a head's W_Q",
        own=4.0,
        others=2.25,
        least=0.0,
        worth="a layer outgrew its past before 285 of 312 explosions, by a median of 344 steps, "
        "and in 66 of 476 runs that held; a layer outgrew the others before 237 explosions, by 435 "
        "steps, and in 18 of these runs",
    ),
)


class Departure(NamedTuple):
    """Where a layer first leaves its past and where it first leaves the other layers.

    Attributes:
      layer: index of the layer in the array.
      own: index of the first measurement at which it has left its past; None if it never does.
      others: index of the first measurement at which it has left the other layers; None if it never
        does.
    """

    layer: int
    own: int | None
    others: int | None

    @property
    def first(self) -> int:
        """Index of the earlier of the two measurements."""
        return min(place for place in (self.own, self.others) if place is not None)


def trend_ratios(values: Float[np.ndarray, "S L"]) -> TrendRatios:
    """Returns each value over the median of its layer's past, and over the other layers' median.

    Args:
      values: one number > 0 for each of S measurements, in their order, and L layers, such as the
        largest |score| of a layer; NaN where it is not known.

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
    """Returns the layers that leave their past or the other layers, the earliest first.

    Args:
      values: values [S, L] as `trend_ratios` takes them.
      quantity: what the values are.
    """
    values = np.asarray(values, np.float64)
    of, large = trend_ratios(values), values >= quantity.least
    own = large & (of.own >= quantity.own)
    others = large & (of.others >= quantity.others)
    found = [Departure(i, _first(own[:, i]), _first(others[:, i])) for i in range(values.shape[1])]
    left = [one for one in found if one[1:] != (None, None)]
    return sorted(left, key=lambda one: one.first)


def _over_median(value: np.ndarray, of: np.ndarray, axis: int) -> np.ndarray:
    """Returns `value` over the median of the known entries of `of` along `axis`.

    The ratio is NaN where no entry is known, or where the median is 0 or infinite.
    """
    if of.shape[axis] == 0:
        return np.full_like(value, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised for a slice that is all NaN
        median = np.nanmedian(of, axis=axis)
    known = np.isfinite(median) & (median > 0)
    return np.where(known, value / np.where(known, median, 1.0), np.nan)


def _first(met: np.ndarray) -> int | None:
    return int(np.argmax(met)) if np.any(met) else None
