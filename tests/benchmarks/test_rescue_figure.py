"""The figure of runs that change their arithmetic shows every seed before and after."""

import numpy as np
import pictures
import pytest

from benchmarks import rescue_figure


def test_each_arm_has_three_lines_and_those_that_change_begin_where_flash_is():
    (axis,) = rescue_figure.figure().axes
    by_color = {}
    for line in axis.get_lines()[:-1]:  # the last one marks the step of the change
        by_color.setdefault(line.get_color(), []).append(line.get_xydata())
    colors = [line.color for line in rescue_figure.LINES]
    assert {color: len(lines) for color, lines in by_color.items()} == dict.fromkeys(colors, 3)
    flash, *changed = (by_color[color] for color in colors)
    for lines in changed:
        for old, new in zip(flash, lines, strict=True):
            (at,) = (y for x, y in old if x == rescue_figure.CHANGED_AT)
            np.testing.assert_array_equal(new[0], [rescue_figure.CHANGED_AT, at])
            assert new[-1][1] < at < old[-1][1] / 5


@pytest.mark.slow
def test_the_page_shows_it(monkeypatch, tmp_path):
    pictures.check(rescue_figure, "rescue.png", ["rescue.png"], monkeypatch, tmp_path)
