"""Draws the README's first figure: scores of layer 1 and the loss, and scores in nanoGPT.

    python -m benchmarks.front_figure docs/images/front

It writes front_light.png and front_dark.png from results/true_bfloat16, and for phones
front_narrow_light.png and front_narrow_dark.png, whose panels stand below each other.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import program
from lowprec_attn.lab.records import ArmRecord, read_all
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure

RESULTS = Path(__file__).parent.parent / "results" / "true_bfloat16"
LAYER = 1  # counted from 0; the paper's layer 2
WINDOW = 500  # differences of losses on the same batches are averaged over this many steps


class Line(NamedTuple):
    """The runs of some arms, all seeds in one colour and one dash, which survives printing."""

    arms: tuple[str, ...]
    label: str
    color: str
    dash: str = "-"


CURE = Line(("matched", "normalized_delta"), "the cure: rows of dS sum to 0", style.HOLDS, "--")
CONTROL = Line(("exact",), "float32", style.FLOAT32, ":")
COMPARED = (  # the arms that are compared with the control
    Line(("flash",), "FlashAttention's arithmetic", style.BREAKS),
    Line(("float32_output",), "with O in float32", style.BREAKS_TOO, "-."),
    CURE,
)
NANOGPT = (
    Line(("cudnn",), "cuDNN", style.BREAKS_TOO, "-."),
    Line(("flash",), "FlashAttention-2", style.BREAKS),
    Line(("float32",), "attention in float32", style.FLOAT32, ":"),
)


@program.told
def main() -> None:
    """Writes the four files."""
    parser = program.parser(__doc__)
    parser.add_argument("out", type=Path, help="the files' names up to _light.png and _dark.png")
    out = parser.parse_args().out
    for name, theme in {"light": "default", "dark": "dark_background"}.items():
        with matplotlib.style.context(theme), mpl.rc_context({"font.size": style.FRONT}):
            write_figure(out.with_name(f"{out.name}_{name}.png"), figure())
            write_figure(out.with_name(f"{out.name}_narrow_{name}.png"), figure(narrow=True))


def figure(narrow: bool = False) -> Figure:
    """Draws three panels with one line per run, side by side or, for a phone, below each other."""
    ours, nanogpt = read_all(RESULTS / "long_h200"), read_all(RESULTS / "nanogpt")
    # The cure also ran on H100s. Only its scores are drawn, because no float32 run is beside it.
    others = [run for run in read_all(RESULTS / "long") if run.arm.name in CURE.arms]
    size, grid = ((style.WIDTH, 13.2), (3, 1)) if narrow else ((10.4, 4.4), (1, 3))
    drawn = Figure(figsize=size, layout="constrained")
    score, loss, theirs = drawn.subplots(*grid)
    draw(score, (*COMPARED, CONTROL), [(run, *largest_scores(run)) for run in [*ours, *others]])
    score.set_xticks(range(0, 13_000, 4000))
    draw(
        loss,
        COMPARED,
        [
            line
            for arm in ("flash", "float32_output", "matched")
            for line in losses_above(ours, arm, "exact")
        ],
    )
    draw(theirs, NANOGPT, [(run, *largest_scores(run)) for run in nanogpt])
    loss.set_yscale("symlog", linthresh=0.02, linscale=2)
    loss.set_ylim(-0.012, 2)
    loss.set_yticks([-0.01, 0, 0.01, 0.02, 0.1, 1], ["−0.01", "0", "0.01", "0.02", "0.1", "1"])
    loss.minorticks_off()
    loss.axhline(0, color=CONTROL.color, ls=CONTROL.dash, lw=2, label=CONTROL.label)
    _legend(loss)
    score.set_title("Our trainer:\nlargest score of layer 1")
    loss.set_title("Its training loss, above that of\nthe same seed in float32")
    theirs.set_title("nanoGPT itself:\nlargest score of layer 1")
    loss.set_ylabel("nats a token; linear below 0.02")
    return drawn


def largest_scores(run: ArmRecord) -> tuple[list[int], list[float]]:
    """Returns the recorded steps, and the layer's largest |score| at each."""
    steps = sorted(run.signals)
    return steps, [run.largest("score_maximum", step, LAYER) for step in steps]


def losses_above(
    runs: Sequence[ArmRecord], arm: str, control: str
) -> list[tuple[ArmRecord, list[int], list[float]]]:
    """Returns each run of the arm with steps, and how far its loss is above the control's.

    The control is the run of the same seed. The difference is a mean over the `WINDOW` steps that
    end at the step, from step 1,000 on. Both runs read the same batches, so the losses that are due
    to a batch cancel.
    """
    controls = {run.seed: run.losses for run in runs if run.arm.name == control}
    found = []
    for run in runs:
        if run.arm.name != arm:
            continue
        other = controls[run.seed]
        steps = np.array([step for step in sorted(run.losses) if step in other])
        above = np.array([run.losses[int(step)] - other[int(step)] for step in steps])
        ends = [int(step) for step in steps if step >= 1000]
        means = [float(np.mean(above[(steps > end - WINDOW) & (steps <= end)])) for end in ends]
        found.append((run, ends, means))
    return found


def draw(
    axis: Axes,
    lines: Sequence[Line],
    runs: Sequence[tuple[ArmRecord, Sequence[int], Sequence[float]]],
) -> None:
    """Draws one line per run, in the style of the `Line` that has its arm, on a log scale."""
    for line in lines:
        label: str | None = line.label
        for run, steps, values in runs:
            if run.arm.name in line.arms:
                axis.plot(steps, values, line.dash, color=line.color, lw=2, label=label)
                label = None
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.grid(**style.GRID)
    _legend(axis)


def _legend(axis: Axes) -> None:
    # The legend stands below the panel, so that it hides no line.
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


if __name__ == "__main__":
    sys.exit(main())
