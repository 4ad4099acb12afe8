"""The figure of the causes has a row for every arm of the records and a dot for every run."""

import pictures
import pytest

from benchmarks import causes_figure


def test_every_arm_has_a_row_and_every_run_a_dot():
    runs = causes_figure.runs()
    rows = [row.arm for row in (*causes_figure.ROUNDED, *causes_figure.NOT_ROUNDED)]
    assert {run.arm.name for run in runs} == set(rows)
    assert len(rows) == len(set(rows))
    for axis in causes_figure.figure().axes:
        rounded, not_rounded = axis.collections
        dots = [*rounded.get_offsets(), *not_rounded.get_offsets()]
        assert len(dots) == len(runs)
        assert max(at for _, at in rounded.get_offsets()) < len(causes_figure.ROUNDED)


@pytest.mark.slow
def test_the_page_shows_it(monkeypatch, tmp_path):
    pictures.check(causes_figure, "causes.png", ["causes.png"], monkeypatch, tmp_path)
