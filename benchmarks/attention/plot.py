"""Draws the records: bars for the named shapes, the sweep of lengths, and memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.attention.problem import PASSES
from benchmarks.attention.records import Record, problems
from benchmarks.shapes import SHAPES, SWEEP
from lowprec_attn.runs.pages import style

_OWN = ("hopper ", "gpu ", "tpu ", "tiled ")
_WORDS = {"forward": "forward pass", "forward+backward": "forward and backward pass"}


def save(records: Sequence[Record], prefix: Path) -> list[Path]:
    """Draws what the records hold, and returns the files `<prefix>_<figure>.png`."""
    title = next((_title(r) for r in records if r["kind"] == "environment"), "")
    paths = []
    for name, figure in _figures(records):
        figure.suptitle(title, fontsize=style.TITLE, family="monospace")
        path = prefix.with_name(f"{prefix.name}_{name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=style.DPI, metadata={"Software": None})
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
    """Draws TFLOP/s of every candidate, with a panel per shape and pass and the fastest on top."""
    groups = list(problems(timed))
    shapes = list(dict.fromkeys(key["shape"] for key, _ in groups))
    rows = max(len(group) for _, group in groups)
    size = (6.5 * len(PASSES), (0.6 + 0.2 * rows) * len(shapes) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(shapes), len(PASSES), squeeze=False)
    for key, group in groups:
        _draw_bars(axes[shapes.index(key["shape"]), PASSES.index(key["pass"])], key, group)
    return figure


def _draw_bars(axis: Axes, key: Record, group: Sequence[Record]) -> None:
    ranked = sorted(group, key=lambda record: record["tflops"])
    names = [r["name"] for r in ranked]
    colors = [style.OURS if name.startswith(_OWN) else style.OTHERS for name in names]
    bars = axis.barh(names, [r["tflops"] for r in ranked], color=colors)
    axis.bar_label(bars, fmt="{:.3g}", fontsize=style.SMALL, padding=2)
    axis.margins(x=0.12)
    axis.tick_params(axis="y", labelsize=style.SMALL)
    shape = SHAPES[key["shape"]]
    sizes = "B×T×N×H = " + "×".join(map(str, shape.qkv))
    title = f"{key['shape']}: {sizes}, {_WORDS[key['pass']]}"
    axis.set_title(title, fontsize=style.TITLE)
    axis.set_xlabel("TFLOP/s", fontsize=style.TEXT)


def _sweep(timed: Sequence[Record]) -> Figure:
    """Draws TFLOP/s over T, with one panel per pass."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    axes = figure.subplots(1, len(PASSES), squeeze=False)[0]
    for axis, pass_name in zip(axes, PASSES, strict=True):
        rows = [{**r, "length": SHAPES[r["shape"]].length} for r in timed if r["pass"] == pass_name]
        _draw_lines(axis, rows, "tflops", "TFLOP/s")
        axis.set_title(f"Speed of the {_WORDS[pass_name]}")
    axes[-1].legend(fontsize=style.SMALL, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _memory(records: Sequence[Record]) -> Figure:
    """Draws MiB over T."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    _draw_lines(axis, records, "total_mib", "MiB: arguments, outputs and temporaries")
    axis.set_yscale("log", base=10)
    axis.set_title("Memory of the forward and backward pass, batch 1, 12 heads of size 64")
    axis.legend(fontsize=style.TEXT)
    return figure


def _draw_lines(axis: Axes, rows: Sequence[Record], value: str, label: str) -> None:
    names = list(dict.fromkeys(r["name"] for r in rows))
    for i, name in enumerate(names):
        points = sorted((r["length"], r[value]) for r in rows if r["name"] == name)
        line = "-o" if name.startswith(_OWN) else "--s"
        axis.plot(*zip(*points, strict=True), line, label=name, color=colormaps["tab20"](i % 20))
    lengths = sorted({r["length"] for r in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlabel("sequence length T")
    axis.set_ylabel(label)
    axis.grid(**style.GRID)
