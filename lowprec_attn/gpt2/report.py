"""The report of a run: one PNG page drawn from its run directory."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_attn.gpt2 import metrics
from lowprec_attn.gpt2.run_dir import RunDir, write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lowprec-attn report`."""
    parser.add_argument("run_dir", type=Path, help="a run directory, finished or not")


def run(args: argparse.Namespace) -> None:
    """Redraws `report.png` of a run directory."""
    run_dir = RunDir(args.run_dir)
    if not run_dir.metrics.exists():
        raise ValueError(f"{args.run_dir} is not a run directory: it has no metrics.jsonl")
    print(write_report(run_dir))


def write_report(run_dir: RunDir) -> Path:
    """Draws `report.png` from the metrics written so far; returns its path.

    Loss (with the unigram model's as a line), gradient norm, and per layer: the largest |score|,
    the share of rows with repeated maxima, the coherence of the output error and of the δ error,
    and the spectral norm of W_Q, each over the steps.

    Raises:
      MetricsError, OSError: the run directory has no readable metrics.
    """
    records = metrics.read(run_dir.metrics)
    figure = Figure(figsize=(11, 14), layout="constrained")
    axes = figure.subplots(4, 2)
    figure.suptitle(_title(run_dir), fontsize=11, family="monospace")
    _draw_loss(axes[0, 0], records, _load(run_dir.summary))
    _draw_series(axes[0, 1], records, "grad_norm", "gradient norm before clipping (log)")
    axes[0, 1].set_yscale("log")
    signals = [record for record in records if "signals" in record]
    panels = [
        (axes[1, 0], "score_maximum", np.max, "largest |score| (log)", "log"),
        (axes[1, 1], "repeated_maxima", np.mean, "share of rows with a repeated maximum", "linear"),
        (
            axes[2, 0],
            "output_error_coherence",
            np.max,
            "output error: coherence (1: random)",
            "linear",
        ),
        (axes[2, 1], "delta_error_coherence", np.max, "δ error: coherence (1: random)", "linear"),
        (axes[3, 0], "output_error_mean", _largest, "output error: signed mean", "linear"),
        (
            axes[3, 1],
            "query_weight_norm",
            np.max,
            "largest spectral norm of a head's W_Q",
            "linear",
        ),
    ]
    for axis, name, over_heads, title, scale in panels:
        _draw_layers(axis, signals, name, over_heads)
        axis.set_title(title, fontsize=10)
        axis.set_yscale(scale)
    _draw_legend(figure, axes[1, 0])
    for axis in axes.flat:
        if axis.get_yscale() == "log":
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    _save(figure, run_dir.report)
    return run_dir.report


def _title(run_dir: RunDir) -> str:
    config, summary, failure = (
        _load(path) for path in (run_dir.config, run_dir.summary, run_dir.failure)
    )
    attention = config.get("attention", {})
    lines = [
        f"{config.get('name')}:{config.get('variant')}   numerics {attention.get('numerics')}   "
        f"row max {attention.get('row_max')}   seed {config.get('seed')}"
    ]
    if summary:
        loss, unigram = summary["val_loss"], summary["unigram_loss"]
        lines.append(
            f"validation loss {loss:.3f} nats per token, "
            f"{unigram - loss:.3f} below the unigram model's {unigram:.3f}"
        )
    if failure:
        lines.append(f"NOT FINITE at step {failure['step']}: {failure['message']}")
    return "\n".join(lines)


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


def _draw_layers(axis: Axes, signals: list[dict[str, Any]], name: str, over_heads: Any) -> None:
    """One line per layer, from dark to light; heads reduced by `over_heads`."""
    if not signals:
        axis.text(0.5, 0.5, "no signals: diagnostics_every=0", ha="center", va="center")
        return
    steps = [record["step"] for record in signals]
    layers = list(signals[0]["signals"])
    for i, layer in enumerate(layers):
        values = [over_heads(np.asarray(record["signals"][layer][name])) for record in signals]
        shade = (i + 0.5) / len(layers)
        axis.plot(
            steps, values, "o-", ms=3, lw=1, color=colormaps["viridis"](shade), label=f"layer {i}"
        )


def _draw_legend(figure: Figure, axis: Axes) -> None:
    """One legend for the colours of the layers, below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=12, fontsize=8)


def _largest(x: np.ndarray) -> float:
    """The entry of largest size, with its sign."""
    return float(x[np.argmax(np.abs(x))])


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomically(path, buffer.getvalue())
