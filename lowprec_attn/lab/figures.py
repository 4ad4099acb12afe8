"""The figure of a set of arms: largest |score| per layer over the steps, one panel an arm."""

import math
import textwrap
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_attn.lab.records import ArmRecord

_COLUMNS = 4
_TITLE_WIDTH = 30


def score_figure(records: Sequence[ArmRecord], layer: int) -> Figure:
    """One line a layer, from dark to light, `layer` in red; one scale for all panels.

    Values that are not finite are left out; a dashed line stands where the loss was not finite.
    """
    columns = min(len(records), _COLUMNS)
    rows = math.ceil(len(records) / columns)
    figure = Figure(figsize=(max(2.8 * columns, 5.0), 0.7 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, record in zip(axes.flat, records, strict=False):
        _draw(axis, record, layer)
    for axis in list(axes.flat)[len(records) :]:
        axis.remove()
    for axis in axes[:, 0]:
        axis.set_ylabel("largest |score|")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=12,
        fontsize=7,
    )
    return figure


def _draw(axis: Axes, record: ArmRecord, layer: int) -> None:
    steps = sorted(record.signals)
    layers = len(record.signals[steps[0]])
    for i in range(layers):
        axis.plot(
            steps,
            [record.largest("score_maximum", step, i) for step in steps],
            color="red" if i == layer else colormaps["viridis"](i / layers),
            lw=2 if i == layer else 1,
            zorder=3 if i == layer else 2,
            label=f"layer {i}",
        )
    if record.failure:
        axis.axvline(record.failure["step"], color="black", ls="--", lw=1)
    axis.set_title(textwrap.fill(record.arm.title, _TITLE_WIDTH), fontsize=9)
    axis.set_xlabel("step")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
