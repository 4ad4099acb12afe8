"""Draws which rounding starts the runaway: largest error and score of each arm, one dot per run.

    python -m benchmarks.causes_figure docs/images/causes.png

It reads results/true_bfloat16/arithmetic and results/true_bfloat16/causes.
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import program
from benchmarks.front_figure import LAYER, RESULTS
from lowprec_attn.lab.records import ArmRecord, read_all
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure

FIRST_STEP = 1000  # no head of layer 1 has saturated before this step
# The least gradient of a head's W_Q that counts. Most gradients are about 3e-3. A head whose rows
# all attend to one key has none.
LEAST_GRADIENT = 1e-5

# Colours near those of Okabe and Ito, as in the front figure. They show whether a rounding lies
# between δ and Σ P dP.
_ROUNDED, _NOT_ROUNDED = style.BREAKS, style.HOLDS


class Row(NamedTuple):
    """The name of an arm, and its label in the figure."""

    arm: str
    label: str


ROUNDED = (
    Row("flash", "flash: FlashAttention's arithmetic"),
    Row("flash_ds_float32", "flash, dS not cast"),
    Row("flash_m_and_l", "flash, m and l apart"),
    Row("flash_scale_first", "flash, scaled before shifted"),
    Row("flash_dynamic_max", "flash, dynamic maximum"),
    Row("flash_mean_key_subtracted", "flash, mean key subtracted"),
    Row("stochastic_output", "flash, O rounded stochastically"),
    Row("flash_rounded_row_sum", "flash, l of the rounded P̄"),
    Row("auxiliary_output", "flash, a second O for δ"),
    Row("float32_output", "flash, O in float32 for δ"),
    Row("halves_output", "flash, O in two halves for δ"),
    Row("exact_output", "float32, O in bfloat16 for δ"),
    Row("published", "the paper's public code"),
    Row("published_dynamic_max", "the paper's code, dynamic maximum"),
)
NOT_ROUNDED = (
    Row("normalized_delta", "flash, rows of dS sum to 0 before the cast"),
    Row("corrected_after_cast", "flash, rows of dS sum to 0 after the cast"),
    Row("matched", "flash, rows of dS sum to 0 in one pass"),
    Row("delta_dp_p", "flash, δ = rowsum(dP ∘ P)"),
    Row("exact_ds", "float32, but dS cast"),
    Row("exact_lse", "float32, lse one number"),
    Row("exact_scale_first", "float32, scaled before shifted"),
    Row("exact", "float32"),
)
_LABEL_WIDTH = 26  # characters


@program.told
def main() -> None:
    """Writes the picture."""
    parser = program.parser(__doc__)
    parser.add_argument("out", type=Path, help="the picture")
    write_figure(parser.parse_args().out, figure())


def runs() -> list[ArmRecord]:
    """Returns the runs that reached step 1,500."""
    both = [*read_all(RESULTS / "arithmetic"), *read_all(RESULTS / "causes")]
    return [run for run in both if max(run.signals) >= 1500]


def largest_error(run: ArmRecord, steps: Iterable[int] | None = None) -> float:
    """Returns the largest relative error of W_Q's gradient over heads and steps.

    A head is left out while its true gradient is below `LEAST_GRADIENT`.

    Args:
      steps: recorded steps; None for all from `FIRST_STEP` on.
    """

    def found() -> Iterator[float]:
        for step in steps or (step for step in run.signals if step >= FIRST_STEP):
            of = run.signals[step][LAYER]
            true = of["query_weight_gradient_exact"]
            errors = of["query_weight_gradient_error_from_total"]
            yield from (e for e, g in zip(errors, true, strict=True) if g > LEAST_GRADIENT)

    return max(found())


def last_score(run: ArmRecord) -> float:
    """Returns the largest |score| of the layer at the last record."""
    return run.largest("score_maximum", max(run.signals), LAYER)


def figure() -> Figure:
    """Draws two panels with one row per arm."""
    drawn = Figure(figsize=(style.WIDTH, 8.6), layout="constrained")
    error, score = drawn.subplots(1, 2, sharey=True)
    rows = [*ROUNDED, *NOT_ROUNDED]
    of_all = runs()
    for axis, value in ((error, largest_error), (score, last_score)):
        _draw(axis, [[value(run) for run in of_all if run.arm.name == row.arm] for row in rows])
    labels = [textwrap.fill(row.label, _LABEL_WIDTH) for row in rows]
    error.set_yticks(range(len(rows)), labels, fontsize=style.SMALL)
    error.set_xticks([1e-5, 1e-2, 10])
    error.axvline(0.5, color=style.LIMIT, lw=1)
    score.axvline(512, color=style.LIMIT, lw=1)
    for axis in (error, score):
        axis.minorticks_off()
        axis.set_ylim(len(rows) - 0.5, -0.5)
    error.set_title("Largest error\nover the true\ngradient of W_Q", fontsize=style.TITLE)
    score.set_title("Largest score\nat the last\nrecord", fontsize=style.TITLE)
    error.set_xlabel("line: one half")
    score.set_xlabel("line: 512")
    drawn.suptitle("GPT-2 124M, layer 1, a dot a seed. Low is good.", fontsize=style.TEXT)
    drawn.legend(*score.get_legend_handles_labels(), loc="outside lower center", frameon=False)
    return drawn


def _draw(axis: Axes, values: Sequence[Sequence[float]]) -> None:
    for color, marker, label, indices in (
        (_ROUNDED, "o", "a rounding lies between δ and Σ P dP", range(len(ROUNDED))),
        (_NOT_ROUNDED, "D", "none does", range(len(ROUNDED), len(values))),
    ):
        dots = [(value, at) for at in indices for value in values[at]]
        x, y = zip(*dots, strict=True)
        axis.scatter(x, y, color=color, marker=marker, alpha=0.75, label=label)
    axis.axhline(len(ROUNDED) - 0.5, color=style.LIMIT, lw=0.5)
    axis.set_xscale("log")
    axis.grid(**style.GRID)


if __name__ == "__main__":
    sys.exit(main())
