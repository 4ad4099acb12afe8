"""The first figure of the README shows what the pages of its records say."""

import pictures
import pytest

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
def test_the_readme_shows_it(tmp_path, monkeypatch):
    names = [
        f"front{width}_{style}.png" for width in ("", "_narrow") for style in ("light", "dark")
    ]
    pictures.check(front_figure, "front", names, monkeypatch, tmp_path)
