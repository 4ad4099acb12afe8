"""The README's first figure: what the scores of layer 1 do, in our trainer and in nanoGPT, and why.

    python -m benchmarks.front_figure docs/images/front

writes front_light.png and front_dark.png from results/true_bfloat16.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_attn.lab.records import ArmRecord, read_all
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure

RESULTS = Path(__file__).parent.parent / "results" / "true_bfloat16"
LAYER = 1  # from 0; the paper's layer 2


class Line(NamedTuple):
    """The runs of an arm: all its seeds in one colour and dash, which survive printing."""

    arm: str
    label: str
    color: str
    dash: str = "-"


OURS = (
    Line("flash", "FlashAttention's arithmetic", style.BREAKS),
    Line("normalized_delta", "with rows of dS that sum to 0", style.HOLDS, "--"),
    Line("exact", "float32", style.FLOAT32, ":"),
)
NANOGPT = (
    Line("cudnn", "cuDNN", style.BREAKS_TOO),
    Line("flash", "FlashAttention-2", style.BREAKS),
    Line("float32", "attention in float32", style.FLOAT32, ":"),
)


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the files' names up to _light.png and _dark.png")
    out = parser.parse_args().out
    for name, theme in {"light": "default", "dark": "dark_background"}.items():
        with matplotlib.style.context(theme), mpl.rc_context({"font.size": style.FRONT}):
            write_figure(out.with_name(f"{out.name}_{name}.png"), figure())


def figure() -> Figure:
    """Three panels, one line a run."""
    ours, nanogpt = read_all(RESULTS / "arithmetic"), read_all(RESULTS / "nanogpt")
    drawn = Figure(figsize=(10.4, 4.4), layout="constrained")
    score, theirs, error = drawn.subplots(1, 3)
    theirs.sharey(score)
    _draw(score, OURS, [(run, *largest_scores(run)) for run in ours])
    _draw(theirs, NANOGPT, [(run, *largest_scores(run)) for run in nanogpt])
    _draw(error, OURS, [(run, *gradient_errors(run)) for run in ours])
    error.axhline(1, color=style.LIMIT, lw=1)
    score.set_title("Our trainer:\nlargest attention score")
    theirs.set_title("nanoGPT itself:\nlargest attention score")
    error.set_title("Our trainer: rounding error\nover true gradient of W_Q")
    score.set_ylabel("layer 1")
    return drawn


def largest_scores(run: ArmRecord) -> tuple[list[int], list[float]]:
    """Steps, and the largest |score| of the layer."""
    steps = sorted(run.signals)
    return steps, [run.largest("score_maximum", step, LAYER) for step in steps]


def gradient_errors(run: ArmRecord) -> tuple[list[int], list[float]]:
    """Steps, and the error that all roundings of the backward pass make, over W_Q's gradient.

    Of the head that has the largest score at that step.
    """

    def found() -> Iterator[tuple[int, float]]:
        for step, layers in sorted(run.signals.items()):
            of = layers[LAYER]
            head = int(np.argmax(of["score_maximum"]))
            yield step, of["query_weight_gradient_error_from_total"][head]

    steps, errors = zip(*found(), strict=True)
    return [*steps], [*errors]


def _draw(
    axis: Axes,
    lines: Sequence[Line],
    runs: Sequence[tuple[ArmRecord, Sequence[int], Sequence[float]]],
) -> None:
    for line in lines:
        label: str | None = line.label
        for run, steps, values in runs:
            if run.arm.name == line.arm:
                axis.plot(steps, values, line.dash, color=line.color, lw=2, label=label)
                label = None
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.grid(**style.GRID)
    # Below, where it hides no line.
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


if __name__ == "__main__":
    main()
