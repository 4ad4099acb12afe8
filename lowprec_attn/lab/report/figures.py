"""Draws figures of a set of arms: the loss of every seed, or the largest |score| of every layer."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lowprec_attn.lab.experiment import panel_titles
from lowprec_attn.lab.records import ArmRecord, largest_scores, ran_away, tokens_read
from lowprec_attn.lab.report.outcomes import ArmOutcome
from lowprec_attn.runs.instability.explosion import smoothed_losses
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import plain

_COLUMNS = 2  # more would be too narrow on a phone for the words above them
_TICKS = 3  # most ticks of the axis of steps, beside that at 0


def loss_figure(found: Sequence[ArmOutcome], titles: Mapping[str, str] | None = None) -> Figure:
    """Draws two panels per arm with a line per seed: training loss, and largest |score|.

    The lines of the negative control are drawn behind. A red point marks an explosion. A cross
    marks the last loss of a run that ended at a value that was not finite.

    Args:
      found: the outcomes of the arms.
      titles: the titles of the panels, by the arms' names; None for the arms' settings.
    """
    rows, columns = _grid(len(found))
    figure = Figure(figsize=(style.WIDTH, 0.8 + 3.4 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, columns, sharex=True, squeeze=False)
    for kind in (0, 1):
        for axis in axes[kind::2].flat[1:]:
            axis.sharey(axes[kind, 0])
    titles = titles or panel_titles(outcome.arm for outcome in found)
    control = next((outcome for outcome in found if outcome.arm.control == "negative"), None)
    # If all runs held, only the scores distinguish the arms.
    all_held = not any(outcome.exploded or outcome.not_finite for outcome in found)
    for i, outcome in enumerate(found):
        row, column = 2 * (i // columns), i % columns
        loss, score = axes[row, column], axes[row + 1, column]
        if control is not None and control is not outcome:
            _draw_seeds(loss, score, control, style.CONTROL)
        _draw_seeds(loss, score, outcome, style.ARM)
        _mark_ends(loss, outcome)
        said = _ran_away(outcome) if all_held else _broke(outcome)
        _write_title(loss, columns, titles[outcome.arm.name], said)
        score.set_xlabel("step")
        score.locator_params(axis="x", nbins=_TICKS)
        score.set_yscale("log")
        for axis in (loss, score):
            axis.grid(**style.GRID)
            axis.tick_params(labelleft=column == 0)
        score.tick_params(labelbottom=True)
    for i in range(len(found), rows * columns):
        axes[2 * (i // columns), i % columns].remove()
        axes[2 * (i // columns) + 1, i % columns].remove()
    for row in range(rows):
        axes[2 * row, 0].set_ylabel("training loss,\nnats a token")
        axes[2 * row + 1, 0].set_ylabel("largest |score|\nof any layer")
    lines = [Line2D([], [], color=style.ARM, label="a seed")]
    if control is not None:
        name = plain(titles[control.arm.name].replace("\n", " "))
        name = _folded(f"negative control: {name}", 2)
        lines.append(Line2D([], [], color=style.CONTROL, label=name))
    if any(outcome.exploded for outcome in found):
        lines.append(Line2D([], [], **style.EXPLODED, label="explosion"))
    if any(outcome.not_finite for outcome in found):
        lines.append(Line2D([], [], **style.NOT_FINITE, label="not finite"))
    _write_tokens(figure, (record for outcome in found for record in outcome.records.values()))
    figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=style.TEXT)
    return figure


def _broke(outcome: ArmOutcome) -> str:
    said = f"{outcome.exploded} of {len(outcome.records)} exploded"
    return f"{said}, {outcome.not_finite} not finite" if outcome.not_finite else said


def _ran_away(outcome: ArmOutcome) -> str:
    """Returns how many of the judged runs ran away; without one, how large the scores became."""
    runs = outcome.records.values()
    if any(run.large_heads for run in runs):
        return f"{ran_away(runs)} ran away"
    largest = [
        max(map(max, scores.values())) for run in runs if (scores := largest_scores(run.signals))
    ]
    if not largest:
        return _broke(outcome)
    least, most = (
        f"{score:.2g}" if score < 10 else f"{score:,.0f}" for score in (min(largest), max(largest))
    )
    return f"top score {least}" if least == most else f"top scores {least} to {most}"


def _grid(panels: int) -> tuple[int, int]:
    """Returns the fewest rows for the panels, then the fewest columns, so that rows are full."""
    rows = math.ceil(panels / _COLUMNS)
    return rows, math.ceil(panels / rows)


def _write_tokens(figure: Figure, records: Iterable[ArmRecord]) -> None:
    """Writes above all panels how many tokens the runs have read, and what is good."""
    text = f"{tokens_read(records)} Low is good."
    figure.suptitle(_folded(text, 1), fontsize=style.TEXT)


def _write_title(axis: Axes, columns: int, title: str, *more: str) -> None:
    lines = (_folded(" ".join(title.split()), columns), *more)
    axis.set_title(plain("\n".join(lines)), fontsize=style.TITLE)


def _folded(text: str, columns: int) -> str:
    """Breaks a text into lines that are as wide as a column."""
    width = int(style.WIDTH * style.CHARACTERS_PER_INCH / columns) - 3
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _mark_ends(loss: Axes, outcome: ArmOutcome) -> None:
    """Marks where each run broke, at its last finite loss up to then, if it has one."""
    for record in outcome.records.values():
        smoothed = smoothed_losses(record.losses)
        until = [step for step in smoothed if record.broke is not None and step <= record.broke]
        if until:
            mark = style.NOT_FINITE if record.explosion is None else style.EXPLODED
            loss.plot([until[-1]], [smoothed[until[-1]]], **mark, zorder=3)


def _draw_seeds(loss: Axes, score: Axes, outcome: ArmOutcome, color: str) -> None:
    for record in outcome.records.values():
        smoothed = smoothed_losses(record.losses)
        loss.plot(list(smoothed), list(smoothed.values()), color=color, lw=1, alpha=0.7)
        steps = sorted(record.signals)
        layers = range(len(record.signals[steps[0]]))
        largest = [max(record.largest("score_maximum", s, i) for i in layers) for s in steps]
        score.plot(steps, largest, color=color, lw=1, alpha=0.7)


def score_figure(
    records: Sequence[ArmRecord], layer: int, titles: Mapping[str, str] | None = None
) -> Figure:
    """Draws one panel per arm with a line per layer, on the same scale in all panels.

    The lines go from dark to light, and that of `layer` is red. Values that are not finite are left
    out. A dashed line marks the step of the failure that ended a run.

    Args:
      records: one record per arm.
      layer: the layer to draw in red.
      titles: the titles of the panels, by the arms' names; None for the arms' settings.
    """
    rows, columns = _grid(len(records))
    figure = Figure(figsize=(style.WIDTH, 1.4 + 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    titles = titles or panel_titles(record.arm for record in records)
    for axis, record in zip(axes.flat, records, strict=False):
        _draw(axis, record, layer)
        axis.locator_params(axis="x", nbins=_TICKS)
        _write_title(axis, columns, titles[record.arm.name])
        axis.tick_params(labelbottom=True)
    for axis in list(axes.flat)[len(records) :]:
        axis.remove()
    for axis in axes[:, 0]:
        axis.set_ylabel("largest |score|")
    _write_tokens(figure, records)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=4, columnspacing=1, fontsize=style.SMALL
    )
    return figure


def _draw(axis: Axes, record: ArmRecord, layer: int) -> None:
    steps = sorted(record.signals)
    layers = len(record.signals[steps[0]])
    for i in range(layers):
        axis.plot(
            steps,
            [record.largest("score_maximum", step, i) for step in steps],
            color=style.CHOSEN_LAYER if i == layer else colormaps["viridis"](i / layers),
            lw=2 if i == layer else 1,
            zorder=3 if i == layer else 2,
            label=f"layer {i}",
        )
    if record.failure:
        axis.axvline(record.failure["step"], color="black", ls="--", lw=1)
    axis.set_xlabel("step")
    axis.set_yscale("log")
    axis.grid(**style.GRID)
