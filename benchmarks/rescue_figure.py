"""Draws the largest scores of GPT-2's layer 1 where runs of `flash` change their arithmetic.

    python -m benchmarks.rescue_figure docs/images/rescue.png

The records are results/true_bfloat16/why, and long_h200 for the runs that change nothing.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import program
from benchmarks.front_figure import RESULTS, Line, draw, largest_scores
from lowprec_attn.lab.records import read_all
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure

CHANGED_AT = 2000
LAST = 3000

LINES = (
    Line(("flash",), "FlashAttention's arithmetic to the end", style.BREAKS),
    Line(
        ("flash_then_normalized",), "the cure, normalized_delta, from 2,000 on", style.HOLDS, "--"
    ),
    Line(("flash_then_exact",), "float32 from 2,000 on", style.FLOAT32, ":"),
)


@program.told
def main() -> None:
    """Writes the file."""
    parser = program.parser(__doc__)
    parser.add_argument("out", type=Path, help="PNG file to write")
    write_figure(parser.parse_args().out, figure())


def figure() -> Figure:
    """Draws one panel with one line per run."""
    runs = [*read_all(RESULTS / "long_h200"), *read_all(RESULTS / "why")]
    drawn = Figure(figsize=(style.WIDTH, 4.4), layout="constrained")
    axis = drawn.subplots()
    lines = []
    for run in runs:
        steps, scores = largest_scores(run)
        kept = [i for i, step in enumerate(steps) if 500 <= step <= LAST]
        lines.append((run, [steps[i] for i in kept], [scores[i] for i in kept]))
    draw(axis, LINES, lines)
    axis.axvline(CHANGED_AT, color=style.LIMIT, lw=1)
    axis.set_title("Largest score of layer 1, three seeds. Low is good.")
    return drawn


if __name__ == "__main__":
    sys.exit(main())
