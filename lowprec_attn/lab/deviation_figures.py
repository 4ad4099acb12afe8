"""Figures of measured deviations, after those of Golden et al. (arXiv 2405.02803)."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lowprec_attn.lab.deviation import ARMS, TENSORS, Grid, low_format
from lowprec_attn.runs.pages.drawing import plain

Record = Mapping[str, Any]

_NAMES = {
    "max": "largest",
    "rms": "RMS",
    "relative": "RMS / RMS of exact values",
    "coherence": "coherence",
}
_COLORS = {name: colormaps["tab10"](i) for i, name in enumerate(ARMS)}


def figures(records: Sequence[Record], drift: Sequence[Record], grid: Grid) -> dict[str, Figure]:
    """By file name without suffix, each figure of which there is something to draw.

    Args:
      records: of `deviation.measure`.
      drift: of `weight_drift.compare`; may be empty.
      grid: that the former were measured on.
    """
    formats = [f for f in grid.formats if any(r["format"] == f for r in records)]
    drawn = {}
    if formats:
        low = low_format(formats)
        drawn["formats"] = _format_figure(records, formats, grid)
        drawn["lengths"] = _length_figure(records, low, grid)
        if any(_is_at_length(r, grid, low) for r in records):
            drawn["tiles"] = _tile_figure(records, low, grid)
    if drift:
        drawn["weights"] = _weight_figure(drift)
    return drawn


def _format_figure(records: Sequence[Record], formats: Sequence[str], grid: Grid) -> Figure:
    chosen = [r for r in records if r["length"] == grid.length and _has_tile(r, grid.tile)]
    figure, axes = _panels(("max", "rms"), TENSORS, sharex="all")
    arms = _arms(chosen)
    for row, statistic in enumerate(("max", "rms")):
        for column, tensor in enumerate(TENSORS):
            for i, arm in enumerate(arms):
                of_arm = [r for r in chosen if r["arm"] == arm and r["tensor"] == tensor]
                # Side by side, for several arms lie on one another.
                shift = 0.12 * (i - (len(arms) - 1) / 2)
                place = {f: position + shift for position, f in enumerate(formats)}
                _draw(axes[row][column], of_arm, _by("format", place), statistic, arm)
            axes[row][column].set_xticks(range(len(formats)), formats)
            axes[row][column].set_yscale("log")
    _finish(figure, arms, f"deviation from float64 at length {grid.length}{_of_tiles(grid)}")
    return figure


def _length_figure(records: Sequence[Record], fmt: str, grid: Grid) -> Figure:
    chosen = [r for r in records if r["format"] == fmt and _has_tile(r, grid.tile)]
    # Exact values shrink as rows see more keys, and their errors with them.
    statistics = ("max", "relative", "coherence")
    figure, axes = _panels(statistics, TENSORS, sharex="all")
    arms, lengths = _arms(chosen), sorted({r["length"] for r in chosen})
    for row, statistic in enumerate(statistics):
        for column, tensor in enumerate(TENSORS):
            axis = axes[row][column]
            for arm in arms:
                of_arm = [r for r in chosen if r["arm"] == arm and r["tensor"] == tensor]
                _draw(axis, of_arm, _by("length"), statistic, arm, line=True)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(length) for length in lengths])
            if statistic != "coherence":
                axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("length")
    _finish(figure, arms, f"deviation from float64 in {fmt}{_of_tiles(grid)}")
    return figure


def _tile_figure(records: Sequence[Record], fmt: str, grid: Grid) -> Figure:
    """Left: square tiles by their sides; right: tiles of one area, by their sides."""
    chosen = [r for r in records if _is_at_length(r, grid, fmt)]
    tiles = sorted({tuple(r["tile"]) for r in chosen})
    squares = [tile for tile in tiles if tile[0] == tile[1]]
    areas = collections.Counter(math.prod(tile) for tile in tiles)
    area, _ = areas.most_common(1)[0]
    alike = [tile for tile in tiles if math.prod(tile) == area]
    figure, axes = _panels(("rms",) * len(TENSORS), ("", ""), sharex="col")
    arms = _arms(chosen)
    for row, tensor in enumerate(TENSORS):
        for axis, shown in zip(axes[row], (squares, alike), strict=True):
            for arm in arms:
                of_arm = [
                    r
                    for r in chosen
                    if r["arm"] == arm and r["tensor"] == tensor and tuple(r["tile"]) in shown
                ]
                place = {str(list(tile)): float(i) for i, tile in enumerate(shown)}
                _draw(axis, of_arm, _by("tile", place), "rms", arm, line=True)
            axis.set_xticks(range(len(shown)), [f"{rows}×{keys}" for rows, keys in shown])
            axis.set_xlim(-0.5, len(shown) - 0.5)
            axis.set_yscale("log")
        axes[row][0].set_ylabel(f"{tensor}: RMS")
    axes[0][0].set_title("square tiles", fontsize=10)
    axes[0][1].set_title(f"tiles of {area:,} scores", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("queries × keys of a tile")
    _finish(figure, arms, f"deviation from float64 in {fmt} at length {grid.length}")
    return figure


def _weight_figure(drift: Sequence[Record]) -> Figure:
    others = list(dict.fromkeys(r["other"] for r in drift))
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    panels = {"max": "largest difference", "wasserstein": "Wasserstein distance"}
    for axis, (statistic, name) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for i, other in enumerate(others):
            of_other = [r for r in drift if r["other"] == other]
            style = {"color": colormaps["tab10"](i), "marker": "o", "ms": 3, "lw": 1.0}
            for n, seed in enumerate(dict.fromkeys(r["seed"] for r in of_other)):
                points = sorted((r["step"], r[statistic]) for r in of_other if r["seed"] == seed)
                x, y = zip(*points, strict=True)
                axis.plot(x, y, alpha=0.8, label=None if n else plain(other), **style)
        axis.set(xlabel="step", title=name, yscale="log")
        axis.grid(alpha=0.3)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(others), fontsize=8)
    seeds = len({r["seed"] for r in drift})
    each = f", a line each of {seeds} seeds" if seeds > 1 else ""
    title = f"weights of other runs beside those of {drift[0]['base']}{each}"
    figure.suptitle(plain(title), fontsize=11)
    return figure


def _panels(
    rows: Sequence[str], columns: Sequence[str], sharex: Literal["all", "col"]
) -> tuple[Figure, list[list[Axes]]]:
    """A grid of panels: statistics downwards, tensors across; one scale a row."""
    width = 2.7 if len(columns) > 2 else 3.8
    size = (0.6 + width * len(columns), 1.3 + 2.1 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(columns), sharex=sharex, sharey="row", squeeze=False)
    for row, statistic in enumerate(rows):
        axes[row, 0].set_ylabel(_NAMES[statistic])
        for axis in axes[row]:
            axis.grid(alpha=0.3)
    for column, tensor in enumerate(columns):
        axes[0, column].set_title(tensor, fontsize=10)
    return figure, [list(row) for row in axes]


def _by(field: str, place: Mapping[str, float] | None = None) -> Callable[[Record], float]:
    """The value of a field, or its place by the text of the value."""
    return lambda record: record[field] if place is None else place[str(record[field])]


def _draw(
    axis: Axes,
    records: Iterable[Record],
    place: Callable[[Record], float],
    statistic: str,
    arm: str,
    line: bool = False,
) -> None:
    """The mean over the seeds, and a bar from the least to the largest of them."""
    values: dict[float, list[float]] = {}
    for record in records:
        value = _value(record, statistic)
        if value is not None:
            values.setdefault(place(record), []).append(value)
    if not values:
        return
    x = sorted(values)
    means = [sum(values[at]) / len(values[at]) for at in x]
    spans = [
        [mean - min(values[at]) for at, mean in zip(x, means, strict=True)],
        [max(values[at]) - mean for at, mean in zip(x, means, strict=True)],
    ]
    axis.errorbar(
        x,
        means,
        # A mean of equal values may miss them by a last digit.
        yerr=[[max(span, 0.0) for span in side] for side in spans],
        color=_COLORS[arm],
        marker="o",
        ms=4,
        lw=1.2,
        linestyle="-" if line else "none",
        capsize=2,
    )


def _value(record: Record, statistic: str) -> float | None:
    if statistic != "relative":
        return record[statistic]
    return None if record["rms"] is None else record["rms"] / record["size"]


def _finish(figure: Figure, arms: Sequence[str], title: str) -> None:
    handles = [
        Line2D([], [], color=_COLORS[arm], marker="o", ms=4, label=ARMS[arm].title) for arm in arms
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title, fontsize=11)
    for axis in figure.axes:
        low, high = axis.get_ylim()
        if axis.get_yscale() == "log" and high < 1.01 * low:  # of a single value: no scale at all
            axis.set_ylim(low / 1.1, high * 1.1)


def _of_tiles(grid: Grid) -> str:
    return ", in tiles of {} × {} where there are any".format(*grid.tile)


def _arms(records: Iterable[Record]) -> list[str]:
    found = {r["arm"] for r in records}
    return [name for name in ARMS if name in found]


def _has_tile(record: Record, tile: Sequence[int]) -> bool:
    return record["tile"] is None or tuple(record["tile"]) == tuple(tile)


def _is_at_length(record: Record, grid: Grid, fmt: str) -> bool:
    in_tiles = record["tile"] is not None
    return in_tiles and record["length"] == grid.length and record["format"] == fmt
