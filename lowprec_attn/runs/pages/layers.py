"""Makes a folded table of all signals of a layer, with a row per signal and a column per head."""

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

import numpy as np

from lowprec_attn.runs.history import History
from lowprec_attn.runs.pages.markup import Content, element, folded, table

# The total size of all curves of a page in characters, of which a point takes about 6. GPT-2 124M
# has 6,500 curves.
_CURVES_SIZE = 800_000
_POINT_SIZE = 6
_WIDTH, _HEIGHT = 100, 20


def details(history: History) -> list[Element]:
    """Returns one folded table per layer; none if there are no signals."""
    if not history.signals:
        return []
    steps = sorted(history.signals)
    tables = [_by_name(history, steps, layer) for layer in range(history.layers)]
    curves = sum(len(heads[0]) for found in tables for heads in found.values()) or 1
    points = min(max(_CURVES_SIZE // (_POINT_SIZE * curves), 8), _WIDTH)
    return [_folded(layer, found, steps[-1], points) for layer, found in enumerate(tables)]


def _by_name(history: History, steps: Sequence[int], layer: int) -> dict[str, np.ndarray]:
    """Returns each signal of a layer [steps, heads], NaN where it was not recorded."""
    recorded = [history.signals[step][layer : layer + 1] for step in steps]
    found = [here[0] if here else {} for here in recorded]
    widths = {name: len(values) for signals in found for name, values in signals.items()}
    return {
        name: np.array([signals.get(name, [math.nan] * width) for signals in found], float)
        for name, width in sorted(widths.items())
        if width
    }


def _folded(layer: int, found: dict[str, np.ndarray], last: int, points: int) -> Element:
    heads = max((values.shape[1] for values in found.values()), default=0)
    header = ["signal", "all heads, over the steps", *(f"head {i}" for i in range(heads))]
    rows: list[tuple[Content, ...]] = [
        (element("code", name), _curves(values, points), *(f"{v:.3g}" for v in values[-1]))
        for name, values in found.items()
    ]
    note = (
        f"Columns: the values at step {last:,}. Curves: one line a head, from the lowest to the "
        "highest value of the row; where several steps share a point it is the one of largest size."
    )
    summary = f"layer {layer}"
    if "score_maximum" in found:
        scores = found["score_maximum"][-1]
        summary += f": largest |score| {scores.max():.4g}, of head {scores.argmax()}"
    return folded(summary, element("p", note), table(header, rows))


def _curves(values: np.ndarray, points: int) -> Element:
    """Draws values [steps, heads] as one small SVG; a value that is not finite leaves a gap."""
    values = _thinned(values, points)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    span = high - low if high > low else 1.0
    across = np.round(np.linspace(0, _WIDTH, max(len(values), 2))[: len(values)]).astype(int)
    lines = []
    for head in values.T:
        words, command = [], "M"
        for x, value in zip(across, head, strict=True):
            if not math.isfinite(value):
                command = "M"
                continue
            y = _HEIGHT - round((value - low) / span * _HEIGHT) if high > low else _HEIGHT // 2
            words.append(f"{command}{x} {y}")
            command = "L"
        lines.append("".join(words))
    path = element("path", d="".join(lines))
    return element("svg", path, class_="spark", viewBox=f"0 -1 {_WIDTH} {_HEIGHT + 2}")


def _thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Reduces values [steps, heads] to at most `points` rows.

    Each entry is the one of largest magnitude among the entries that it stands for. NaN counts as
    infinite.
    """
    if len(values) <= points:
        return values
    parts = []
    for part in np.array_split(values, points):
        size = np.where(np.isnan(part), np.inf, np.abs(part))
        parts.append(np.take_along_axis(part, size.argmax(axis=0)[None], axis=0)[0])
    return np.array(parts)
