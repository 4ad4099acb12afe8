"""The first figure of the README shows what the pages of its records say."""

import sys

import numpy as np
import pytest
from command import ROOT
from PIL import Image

from benchmarks import front_figure


def ends(axis):
    """The last value of every line of a run, grouped by colour."""
    found = {}
    for line in axis.lines:
        if len(line.get_xdata()) > 2:
            found.setdefault(line.get_color(), []).append(float(line.get_ydata()[-1]))
    return list(found.values())


def test_lines_end_where_the_pages_say():
    score, loss, theirs = front_figure.figure().axes
    assert [[round(x) for x in of] for of in ends(score)] == [
        [234_600, 75_640, 153_900],
        [57_730, 40_070, 32_740],
        [86, 52, 584, 117, 28, 270],
        [401, 58, 71],
    ]
    assert [[round(x, 3) for x in of] for of in ends(loss)] == [
        [0.033, 0.012, 0.361],
        [0.003, 0.002, 0.002],
        [0, 0.003, 0.001],
    ]
    cudnn, flash, float32 = ends(theirs)
    assert min(cudnn) > max(flash) > 2600 > 300 > max(float32)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["light", "dark"])
def test_the_readme_shows_it(tmp_path, monkeypatch, style):
    monkeypatch.setattr(sys, "argv", ["front_figure", str(tmp_path / "front")])
    front_figure.main()
    shown, drawn = (
        np.asarray(Image.open(folder / f"front_{style}.png").convert("L"), np.int32)
        for folder in (ROOT / "docs" / "images", tmp_path)
    )
    assert np.mean(np.abs(shown - drawn) > 32) < 1e-3
