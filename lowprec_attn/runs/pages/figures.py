"""Draws the figures of a page. Long series are thinned, so that the page stays small.

A value that is not finite is drawn as a cross at the upper edge.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lowprec_attn.runs.history import History, Layer
from lowprec_attn.runs.instability.explosion import smoothed_losses
from lowprec_attn.runs.instability.health import Health
from lowprec_attn.runs.pages import style

_POINTS = 400  # most points of a series, since a figure is about 500 pixels wide
_MARKED = 40  # a line of at most this many points has a marker at each

Values = Mapping[int, float]
"""Values by step."""


def shades(count: int) -> list[str]:
    """Returns a colour per layer, dark to light; all are visible on a black or white page."""
    return [to_hex(colormaps["plasma"](0.25 + 0.57 * (i + 0.5) / count)) for i in range(count)]


def loss(history: History, health: Health) -> Figure:
    """Draws the losses in nats per token: training (range and smoothed), validation, unigram.

    Losses that rollbacks have undone are grey. Spikes are crosses at their losses. Vertical lines
    mark an explosion, a value that was not finite, the first step of each rule met, and rollbacks.
    """
    figure, axis = _axis()
    for undone in history.abandoned:
        _draw(axis, undone, style.THRESHOLD, lw=0.7)
    raw = [
        (chunk[0], min(values), max(values))
        for chunk in _chunks(sorted(history.losses))
        if (values := [v for s in chunk if math.isfinite(v := history.losses[s])])
    ]
    if raw:
        steps, low, high = zip(*raw, strict=True)
        axis.fill_between(steps, low, high, color=style.RAW, alpha=0.5, lw=0)
        if len(history.losses) <= _POINTS:  # each chunk has one step, so the range is a line
            axis.plot(steps, low, color=style.RAW, lw=0.7)
    _cross(axis, history.losses, style.RAW)
    _draw(axis, smoothed_losses(history.losses), style.SMOOTHED, lw=1.4)
    _draw(axis, history.val_losses, style.VALIDATION, marker="o", ms=3)
    if history.summary:
        axis.axhline(history.summary["unigram_loss"], color=style.THRESHOLD, ls="--", lw=1)
    spikes = [(i.step, i.loss) for i in history.incidents if i.loss and math.isfinite(i.loss)]
    if spikes:
        axis.plot(*zip(*spikes, strict=True), "x", color=style.ALARM, ms=5)
    _mark(axis, health)
    _reach(axis, history)
    noted: list[tuple[int, str]] = [(met.step, met.alarm.rule.name) for met in health.met]
    noted += [(back.to, "rollback") for back in history.rollbacks]
    left, right = axis.get_xlim()
    before, height = -math.inf, 0.98
    for step, name in sorted(noted):
        axis.axvline(step, color=style.ALARM, ls=":", lw=1.2)
        # A name takes a fortieth of the width and a fifth of the height. A name too close to the
        # previous one is placed below it.
        height = height - 0.2 if step - before < (right - left) / 40 and height > 0.3 else 0.98
        before = step
        axis.annotate(
            name,
            (step, height),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize=style.SMALL,
        )
    return figure


def by_layer(
    history: History,
    value: Callable[[Layer], np.ndarray],
    health: Health,
    threshold: float | None = None,
    log: bool = True,
) -> Figure:
    """Draws one line per layer, the largest value of its heads, and a threshold as a dashed line.

    Args:
      history: the records of the run.
      value: returns one number per head of a layer; −inf if the signal was not recorded.
      health: the health of the run, for the marks.
      threshold: the threshold of the rule that looks at this signal, or None.
      log: whether the vertical axis is logarithmic.
    """
    figure, axis = _axis()
    lines = [largest(history, value, i) for i in range(history.layers)]
    # Only short lines get markers: a marker takes five times the space of a point in the SVG.
    few = max(map(len, lines), default=0) <= _MARKED
    for line, color in zip(lines, shades(len(lines)), strict=True):
        _draw(axis, line, color, log=log, marker="o" if few else None, peaks=True)
    _name_highest(axis, lines)
    if threshold is not None:
        axis.axhline(threshold, color=style.THRESHOLD, ls="--", lw=1.2)
    _mark(axis, health)
    _reach(axis, history)
    _scale(axis, log)
    return figure


def rates(values: Values) -> Figure:
    """Draws tokens per second, on an axis from 0."""
    figure, axis = _axis()
    _draw(axis, values, style.SMOOTHED)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def largest(history: History, value: Callable[[Layer], np.ndarray], layer: int) -> dict[int, float]:
    """Returns the largest value of a layer's heads by step, NaN if one is NaN.

    Steps at which the value was not recorded are left out.
    """
    found = {}
    for step, recorded in sorted(history.signals.items()):
        if layer < len(recorded) and recorded[layer]:
            highest = float(np.max(value(recorded[layer])))
            if highest != -math.inf:
                found[step] = highest
    return found


def _axis() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 2.7))
    axis = figure.add_axes((0.115, 0.155, 0.85, 0.765))  # leaves room for a power of ten above
    axis.grid(alpha=0.6)
    axis.tick_params(which="both", labelsize=style.TEXT)
    axis.yaxis.get_offset_text().set_fontsize(style.TEXT)
    axis.set_xlabel("step", fontsize=style.TEXT, labelpad=1)
    return figure, axis


def _draw(
    axis: Axes,
    values: Values,
    color: str,
    *,
    log: bool = False,
    lw: float = 1.0,
    marker: str | None = None,
    ms: float = 2.0,
    peaks: bool = False,
) -> None:
    """Draws a line; of the steps that share a point the last, or with `peaks` the largest in size.

    With `peaks`, a value that meets a rule is thus above the threshold in the figure too.
    """
    steps = [
        max(chunk, key=lambda step: _size(values[step])) if peaks else chunk[-1]
        for chunk in _chunks(sorted(values))
    ]
    shown = np.array([values[step] for step in steps])
    drawn = np.isfinite(shown) & ((shown > 0) | (not log))
    axis.plot(
        steps, np.where(drawn, shown, np.nan), color=color, lw=lw, marker=marker, markersize=ms
    )
    _cross(axis, values, color)


def _size(value: float) -> float:
    """Returns the size of a value; less than any if it is not finite, which is no point."""
    return abs(value) if math.isfinite(value) else -1.0


def _cross(axis: Axes, values: Values, color: str) -> None:
    """Marks values that are not finite by crosses at the upper edge."""
    lost = [step for step in sorted(values) if not math.isfinite(values[step])]
    if lost:
        transform = axis.get_xaxis_transform()
        axis.plot(lost, [0.97] * len(lost), "x", color=color, ms=5, transform=transform)


def _name_highest(axis: Axes, lines: Sequence[Values]) -> None:
    """Writes the layer's number at the highest value, since neighbouring shades look alike."""
    highest = [
        (value, step, layer)
        for layer, line in enumerate(lines)
        for step, value in line.items()
        if math.isfinite(value)
    ]
    if highest:
        value, step, layer = max(highest)
        axis.annotate(
            f"layer {layer}",
            (step, value),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            fontsize=style.TEXT,
        )
        axis.margins(y=0.12)


def _chunks(steps: Sequence[int]) -> Iterable[list[int]]:
    """Returns the groups of neighbouring steps that share a point in a figure."""
    size = -(-len(steps) // _POINTS) or 1
    return (list(steps[i : i + size]) for i in range(0, len(steps), size))


def _mark(axis: Axes, health: Health) -> None:
    for step in {s for s in (health.explosion, health.not_finite) if s is not None}:
        axis.axvline(step, color=style.EXPLOSION, lw=1.2)


def _reach(axis: Axes, history: History) -> None:
    """Sets the horizontal range, which is the same in all figures of a page."""
    last = max(1, history.steps, *(max(undone, default=0) for undone in history.abandoned))
    axis.set_xlim(-0.03 * last, 1.03 * last)


def _scale(axis: Axes, log: bool) -> None:
    """Makes the axis logarithmic if it has a positive value; matplotlib warns of an empty one."""
    shown = (np.asarray(line.get_ydata(), float) for line in axis.get_lines())
    if log and any(np.any(values > 0) for values in shown):
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_formatter("{x:g}")
        if high < 10 * low:  # the range may contain no power of ten to label
            axis.yaxis.set_minor_formatter("{x:g}")
        else:
            axis.minorticks_off()
