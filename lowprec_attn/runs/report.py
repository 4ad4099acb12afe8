"""The report of a run: one PNG page drawn from its run directory."""

import functools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_attn.files import read_record
from lowprec_attn.runs import metrics, rollbacks
from lowprec_attn.runs.history import load_config
from lowprec_attn.runs.incidents import Incident, incidents
from lowprec_attn.runs.pages.drawing import plain, write_figure
from lowprec_attn.runs.run_dir import RunDir


def write_report(run_dir: RunDir) -> Path:
    """Draws `report.png` from the metrics written so far; returns its path.

    Raises:
      RunError, OSError: a record of the run cannot be read, or the page cannot be written.
    """
    write_figure(run_dir.report, draw(run_dir))
    return run_dir.report


def outcome(val_loss: float, unigram_loss: float) -> str:
    """The losses at the end of a run in words; both in nats per token."""
    side = "below" if val_loss <= unigram_loss else "above"
    return (
        f"validation loss {val_loss:.3f} nats per token, "
        f"{abs(unigram_loss - val_loss):.3f} {side} the unigram model's {unigram_loss:.3f}"
    )


def _largest(x: np.ndarray) -> float:
    """The entry of largest size, with its sign."""
    return float(x[np.argmax(np.abs(x))])


class _Signal(NamedTuple):
    """A signal per layer: its title, how heads are reduced, and the scale of the axis."""

    title: str
    over_heads: Callable[[np.ndarray], Any]
    scale: str = "linear"


_SIGNALS = {
    "score_maximum": _Signal("largest |score| (log)", np.max, "log"),
    "repeated_maxima": _Signal("share of rows with a repeated maximum", np.mean),
    "output_error_coherence": _Signal("output error: coherence (1: random)", np.max),
    "delta_error_coherence": _Signal("δ error: coherence (1: random)", np.max),
    "output_error_mean": _Signal("output error: signed mean", _largest),
    "query_weight_norm": _Signal("largest spectral norm of a head's W_Q", np.max),
}
_INCIDENTS_SHOWN = 4
_TITLE_COLUMNS = 110
PANELS: tuple[str, ...] = ("loss", "grad_norm", *_SIGNALS)


def draw(run_dir: RunDir, panels: Sequence[str] = PANELS) -> Figure:
    """The metrics written so far, also of a run that is writing them, as panels in two columns.

    `loss` has the unigram model's as a line, `grad_norm` is that before clipping; the others are
    signals of `diagnostics.attention_signals`, one line per layer, over the steps. Warnings are
    dotted lines in every panel, and so are rollbacks; spikes are crosses in that of the loss, where
    what rollbacks have undone is grey. The title names the first of them.

    Args:
      run_dir: a run directory.
      panels: which of `PANELS`, row by row, an even number.

    Raises:
      RunError, OSError: a record of the run cannot be read. (Where there are no metrics yet, the
        panels stay empty.)
    """
    records = metrics.read(run_dir.metrics) if run_dir.metrics.exists() else []
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 3.5 * rows), layout="constrained")
    happened = incidents(records, run_dir.data_order, rollbacks.read(run_dir.rollbacks))
    figure.suptitle(plain(_title(run_dir, happened)), fontsize=11, family="monospace")
    axes = dict(zip(panels, figure.subplots(rows, 2, squeeze=False).flat, strict=False))
    for name, axis in axes.items():
        _draw_panel(axis, name, records, run_dir)
        _draw_incidents(axis, name, happened)
        if axis.get_yscale() == "log":
            axis.yaxis.set_major_formatter("{x:g}")
            low, high = axis.get_ylim()  # within a decade there may be no power of ten to label
            axis.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(which="both", labelsize=8)
        axis.grid(alpha=0.3)
    _draw_legend(figure, [axis for name, axis in axes.items() if name in _SIGNALS])
    return figure


def _draw_panel(axis: Axes, name: str, records: list[dict[str, Any]], run_dir: RunDir) -> None:
    if name == "loss":
        for path in run_dir.abandoned.glob("*.jsonl"):
            steps, losses = _series(metrics.read(path), "loss")
            axis.plot(steps, losses, lw=1, color="lightgray", label="abandoned")
        _draw_loss(axis, records, _load_summary(run_dir))
    elif name == "grad_norm":
        _draw_series(axis, records, name, "gradient norm before clipping (log)")
        axis.set_yscale("log")
    else:
        signal = _SIGNALS[name]
        with_signals = [record for record in records if "signals" in record]
        # A run of another version may lack some.
        measured = [r for r in with_signals if all(name in s for s in r["signals"].values())]
        missing = "not measured in this run" if with_signals else "no signals: diagnostics_every=0"
        _draw_layers(axis, measured, name, signal.over_heads, missing)
        axis.set_title(signal.title, fontsize=10)
        axis.set_yscale(signal.scale)


def _draw_incidents(axis: Axes, panel: str, happened: Sequence[Incident]) -> None:
    spikes = [incident for incident in happened if incident.loss is not None]
    for step in sorted({incident.step for incident in happened if incident.loss is None}):
        axis.axvline(step, ls=":", lw=1, color="C3")
    if panel == "loss" and spikes:
        steps, losses = zip(*((spike.step, spike.loss) for spike in spikes), strict=True)
        axis.plot(steps, losses, "x", color="C3", label="spike")
        axis.legend(fontsize=8)


def _title(run_dir: RunDir, happened: Sequence[Incident]) -> str:
    config, summary = load_config(run_dir.config), _load_summary(run_dir)
    failure = _load(run_dir.failure, step=int, message=str)
    attention = config.get("attention", {})
    lines = [
        f"{config.get('name')}:{config.get('variant')}   numerics {attention.get('numerics')}   "
        f"row max {attention.get('row_max')}   seed {config.get('seed')}"
    ]
    lines += [str(incident) for incident in happened[:_INCIDENTS_SHOWN]]
    if len(happened) > _INCIDENTS_SHOWN:
        lines.append(f"and {len(happened) - _INCIDENTS_SHOWN} more in {run_dir.metrics.name}")
    if summary:
        lines.append(outcome(summary["val_loss"], summary["unigram_loss"]))
    if failure:
        # The step of an explosion is in its message; the run was stopped later.
        exploded = "explosion" in failure
        word = "EXPLODED" if exploded else f"NOT FINITE at step {failure['step']}"
        lines.append(f"{word}: {failure['message']}")
    wrap = functools.partial(textwrap.wrap, width=_TITLE_COLUMNS, subsequent_indent="  ")
    return "\n".join(part for line in lines for part in wrap(line))


def _draw_loss(axis: Axes, records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    _draw_series(axis, records, "loss", "loss (nats per token)", label="training")
    steps, losses = _series(records, "val_loss")
    axis.plot(steps, losses, "o-", color="C1", label="validation")
    if summary:
        axis.axhline(summary["unigram_loss"], ls="--", color="gray", label="unigram model")
    axis.legend(fontsize=8)


def _draw_series(
    axis: Axes, records: list[dict[str, Any]], name: str, title: str, label: str | None = None
) -> None:
    axis.plot(*_series(records, name), lw=1, label=label)
    axis.set_title(title, fontsize=10)


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def _draw_layers(
    axis: Axes, signals: list[dict[str, Any]], name: str, over_heads: Any, missing: str
) -> None:
    """One line per layer, from dark to light; heads reduced by `over_heads`.

    `missing` is written where there are no signals.
    """
    if not signals:
        middle = axis.annotate(missing, (0.5, 0.5), xycoords=axis.transAxes)
        middle.set(ha="center", va="center")
        return
    steps = [record["step"] for record in signals]
    # By number: the records' keys are sorted as text, layer_10 before layer_2.
    layers = [f"layer_{i}" for i in range(len(signals[0]["signals"]))]
    for i, layer in enumerate(layers):
        values = [over_heads(np.asarray(record["signals"][layer][name])) for record in signals]
        shade = (i + 0.5) / len(layers)
        axis.plot(
            steps, values, "o-", ms=3, lw=1, color=colormaps["viridis"](shade), label=f"layer {i}"
        )


def _draw_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for the colours of the layers, below all panels."""
    handles, labels = axes[0].get_legend_handles_labels() if axes else ([], [])
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=12, fontsize=8)


def _load(path: Path, **fields: type) -> dict[str, Any]:
    return read_record(path, **fields) if path.exists() else {}


def _load_summary(run_dir: RunDir) -> dict[str, Any]:
    return _load(run_dir.summary, val_loss=float, unigram_loss=float)
