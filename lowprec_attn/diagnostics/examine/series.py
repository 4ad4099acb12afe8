"""A series of measurements of the same layers: which layer leaves its past or the other layers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from lowprec_attn.counts import many
from lowprec_attn.diagnostics import trend
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError
from lowprec_attn.diagnostics.examine.examination import Examination
from lowprec_attn.diagnostics.trend import LEAST_BEFORE, QUANTITIES, Departure, Quantity

_SHOWN = 3  # layers that a sentence is written about, for each quantity


class Series(NamedTuple):
    """The series of measurements that `trend` compares.

    Attributes:
      source: name of the run that was measured; empty for a series of files.
      places: name of each measurement, for example its step or file.
      layers: names of the layers.
      values: by the name of a signal of `QUANTITIES`, its value at every measurement and layer; NaN
        where it is not known.
    """

    source: str
    places: tuple[str, ...]
    layers: tuple[str, ...]
    values: dict[str, Float[np.ndarray, "S L"]]


def of_files(files: Sequence[tuple[str, Sequence[Examination]]]) -> Series:
    """Returns the series of the layers in several captures of one model, matched by name.

    It has the largest |score| of every layer and, where a file holds W_Q, the largest spectral norm
    of its heads.

    Args:
      files: the name and the examined layers of each file, in the order of the steps.

    Raises:
      DiagnoseError: no layer is in two of the files.
    """
    by_name = [{one.layer.name: one for one in examined} for _, examined in files]
    names = tuple(dict.fromkeys(name for layers in by_name for name in layers))
    if all(sum(name in layers for layers in by_name) < 2 for name in names):
        raise DiagnoseError(
            "--series compares layers of the same name, and no name is in two of these files"
        )
    values = {
        signal: np.array([[value(layers.get(name)) for name in names] for layers in by_name])
        for signal, value in (("score_maximum", _score), ("query_weight_norm", _norm))
    }
    known = {signal: found for signal, found in values.items() if not np.all(np.isnan(found))}
    return Series("", tuple(place for place, _ in files), names, known)


def _score(one: Examination | None) -> float:
    """Returns the largest |score| under the first arithmetic.

    It is NaN where the layer is missing or its arrays are not finite.
    """
    measured = None if one is None else next(iter(one.measured.values()), None)
    return math.nan if measured is None else float(np.max(measured["score_maximum"]))


def _norm(one: Examination | None) -> float:
    """Returns the largest spectral norm of a head's W_Q; NaN where W_Q is missing or not finite."""
    if one is None or one.layer.w_q is None:
        return math.nan
    w_q = one.layer.w_q.astype(np.float64)
    if not np.all(np.isfinite(w_q)):
        return math.nan
    return float(np.max(np.linalg.norm(w_q, ord=2, axis=(0, 2))))


def sentences(series: Series) -> Iterator[str]:
    """Yields the sentences about a series, a heading first."""
    of = f" of {series.source}" if series.source else ""
    yield (
        f"Trend over {len(series.places)} measurements{of}, {series.places[0]} to "
        f"{series.places[-1]}; this is no warning and changes no exit code."
    )
    for quantity in _known(series):
        values = series.values[quantity.signal]
        found = trend.departures(values, quantity)
        yield from (_departure(series, quantity, one) for one in found[:_SHOWN])
        if len(found) > _SHOWN:
            yield f"{quantity.label}: {many(len(found) - _SHOWN, 'layer')} more, none earlier."
        if not found:
            yield f"{quantity.label}: no layer outgrew its past or the other layers."
    if len(series.places) <= LEAST_BEFORE:
        yield f"To compare a layer with its past takes {LEAST_BEFORE} measurements and one more."
    if len(series.layers) == 1:
        yield "There are no other layers to compare with."


def _departure(series: Series, quantity: Quantity, one: Departure) -> str:
    values = series.values[quantity.signal]
    of = trend.trend_ratios(values)
    parts = [
        f"{whom} at {series.places[place]} ({values[place, one.layer]:.4g}, "
        f"{ratio[place, one.layer]:,.1f} times {median})"
        for place, ratio, whom, median in (
            (one.others, of.others, "the other layers", "their median"),
            (one.own, of.own, "its past", "its median before"),
        )
        if place is not None
    ]
    name = series.layers[one.layer] or "the layer"
    return f"{quantity.label}: {name} outgrew {' and '.join(parts)}."


def worths(series: Series) -> list[tuple[str, str]]:
    """Returns what the ratios were worth in the lab, for each quantity by which some layer left."""
    return [
        (quantity.label, f"{quantity.worth}.")
        for quantity in _known(series)
        if trend.departures(series.values[quantity.signal], quantity)
    ]


def rows(series: Series) -> list[list[str]]:
    """Returns a table of the last measurement, its heading first."""
    table = [["layer"]]
    table += [[name] for name in series.layers]
    for quantity in _known(series):
        values = series.values[quantity.signal]
        of = trend.trend_ratios(values)
        table[0] += [quantity.label, "times its past", "times the others"]
        for i, row in enumerate(table[1:]):
            last = (values[-1, i], of.own[-1, i], of.others[-1, i])
            row += ["–" if math.isnan(x) else f"{x:.3g}" for x in last]
    return table


def as_json(series: Series) -> dict[str, Any]:
    """Returns the whole series for `--json`; null where there is no number."""
    return {
        "source": series.source,
        "measurements": series.places,
        "layers": series.layers,
        "quantities": {
            quantity.signal: {
                "thresholds": {
                    name: getattr(quantity, name) for name in ("own", "others", "least")
                },
                "values": _plain(values := series.values[quantity.signal]),
                **{name: _plain(x) for name, x in trend.trend_ratios(values)._asdict().items()},
                "left": [
                    {
                        "layer": series.layers[one.layer],
                        "own": None if one.own is None else series.places[one.own],
                        "others": None if one.others is None else series.places[one.others],
                    }
                    for one in trend.departures(values, quantity)
                ],
            }
            for quantity in _known(series)
        },
    }


def _known(series: Series) -> list[Quantity]:
    return [quantity for quantity in QUANTITIES if quantity.signal in series.values]


def _plain(values: np.ndarray) -> list[list[float | None]]:
    return [[float(x) if np.isfinite(x) else None for x in row] for row in values]
