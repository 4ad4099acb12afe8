"""Draws the records: bars for the named shapes, the sweep of lengths, and memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.attention.problem import PASSES
from benchmarks.attention.records import Record, problems
from benchmarks.shapes import SHAPES, SWEEP
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure

_OWN = ("hopper ", "gpu ", "tpu ", "tiled ")
_WORDS = {"forward": "forward pass", "forward+backward": "forward and backward pass"}
_MARKERS = "os^vD<>PX*p"  # one of its own for every line, for print and beyond ten colours
_FEW_WORDS = {"forward": "forward pass", "forward+backward": "both passes"}


def save(records: Sequence[Record], prefix: Path) -> list[Path]:
    """Draws what the records hold, and returns the files `<prefix>_<figure>.png`."""
    title = next((_title(r) for r in records if r["kind"] == "environment"), "")
    paths = []
    for name, figure in _figures(records):
        figure.suptitle(title, fontsize=style.TITLE, family="monospace")
        path = prefix.with_name(f"{prefix.name}_{name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_figure(path, figure)
        paths.append(path)
    return paths


def _figures(records: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    timed = [r for r in records if r["kind"] == "time"]
    named = [r for r in timed if r["shape"] not in SWEEP]
    sweep = [r for r in timed if r["shape"] in SWEEP]
    memory = [r for r in records if r["kind"] == "memory"]
    if named:
        yield "shapes", _bars(named)
    if sweep:
        yield "sweep", _sweep(sweep)
    if memory:
        yield "memory", _memory(memory)


def _title(environment: Record) -> str:
    return f"{environment['device']}, jax {environment['versions']['jax']}, {environment['date']}"


def _bars(timed: Sequence[Record]) -> Figure:
    """Draws TFLOP/s of every candidate, with a row per shape and a column per pass.

    The candidates of a shape stand in one order, the fastest in the last pass on top.
    """
    groups = {(key["shape"], key["pass"]): group for key, group in problems(timed)}
    shapes = list(dict.fromkeys(shape for shape, _ in groups))
    names = {shape: _ranked(groups, shape) for shape in shapes}
    rows = max(map(len, names.values()))
    size = (style.WIDTH, (0.8 + 0.2 * rows) * len(shapes) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(shapes), len(PASSES), sharey="row", squeeze=False)
    for row, shape in zip(axes, shapes, strict=True):
        for axis, pass_name in zip(row, PASSES, strict=True):
            _draw_bars(axis, names[shape], groups.get((shape, pass_name), ()))
            axis.set_title(_FEW_WORDS[pass_name], fontsize=style.TITLE)
        sizes = "×".join(map(str, SHAPES[shape].qkv))
        row[0].set_ylabel(f"{shape}, B×T×N×H = {sizes}", fontsize=style.TEXT)
    return figure


def _ranked(groups: Mapping[tuple[str, str], Sequence[Record]], shape: str) -> list[str]:
    """Returns the candidates of a shape, the slowest in the last pass first."""
    speeds: dict[str, float] = {}
    for pass_name in PASSES:
        speeds |= {r["name"]: r["tflops"] for r in groups.get((shape, pass_name), ())}
    return sorted(speeds, key=speeds.__getitem__)


def _draw_bars(axis: Axes, names: Sequence[str], group: Sequence[Record]) -> None:
    speeds = {r["name"]: r["tflops"] for r in group}
    colors = [style.OURS if name.startswith(_OWN) else style.OTHERS for name in names]
    bars = axis.barh(names, [speeds.get(name, 0.0) for name in names], color=colors)
    labels = [f"{speeds[name]:.3g}" if name in speeds else "" for name in names]
    axis.bar_label(bars, labels, fontsize=style.SMALL, padding=2)
    axis.margins(x=0.35, y=0.01)
    axis.tick_params(axis="y", labelsize=style.SMALL)
    axis.locator_params(axis="x", nbins=3)
    axis.set_xlabel("TFLOP/s\n(more is better)", fontsize=style.TEXT)


def _sweep(timed: Sequence[Record]) -> Figure:
    """Draws TFLOP/s over T, with one panel per pass."""
    figure = Figure(figsize=(style.WIDTH, 8.6), layout="constrained")
    axes = figure.subplots(len(PASSES), 1, squeeze=False)[:, 0]
    for axis, pass_name in zip(axes, PASSES, strict=True):
        rows = [{**r, "length": SHAPES[r["shape"]].length} for r in timed if r["pass"] == pass_name]
        _draw_lines(axis, rows, "tflops", "TFLOP/s (more is better)")
        axis.set_title(f"Speed of the {_WORDS[pass_name]}", fontsize=style.TITLE)
    _legend(figure, axes[-1])
    return figure


def _memory(records: Sequence[Record]) -> Figure:
    """Draws MiB over T."""
    figure = Figure(figsize=(style.WIDTH, 4.4), layout="constrained")
    axis = figure.subplots()
    _draw_lines(
        axis, records, "total_mib", "MiB: arguments, outputs and\ntemporaries (less is better)"
    )
    axis.set_yscale("log", base=10)
    axis.set_title(
        "Memory of the forward and backward pass,\nbatch 1, 12 heads of size 64",
        fontsize=style.TITLE,
    )
    _legend(figure, axis)
    return figure


def _legend(figure: Figure, axis: Axes) -> None:
    lines, labels = axis.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize=style.SMALL)


def _draw_lines(axis: Axes, rows: Sequence[Record], value: str, label: str) -> None:
    names = list(dict.fromkeys(r["name"] for r in rows))
    for i, name in enumerate(names):
        points = sorted((r["length"], r[value]) for r in rows if r["name"] == name)
        line = ("-" if name.startswith(_OWN) else "--") + _MARKERS[i % len(_MARKERS)]
        axis.plot(*zip(*points, strict=True), line, label=name, color=colormaps["tab10"](i % 10))
    lengths = sorted({r["length"] for r in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [_short(length) for length in lengths])
    axis.set_xlabel("sequence length T")
    axis.set_ylabel(label)
    axis.grid(**style.GRID)


def _short(length: int) -> str:
    return str(length) if length % 1024 else f"{length // 1024}k"
