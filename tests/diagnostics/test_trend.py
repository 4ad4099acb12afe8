"""A layer against its past and the other layers, by hand; tests/lab tests what that was worth."""

import math

import numpy as np
import pytest

from lowprec_attn import diagnostics
from lowprec_attn.diagnostics import trend
from lowprec_attn.diagnostics.trend import Departure

NAN = math.nan
SCORES = trend.QUANTITIES[0]


def test_ratios_are_to_the_median_before_and_to_that_of_the_other_layers():
    values = np.array([[1.0, 10, 4], [3, 10, 4], [2, 20, 4], [8, 10, 5], [6, 40, 0.5]])
    own, others = diagnostics.trend_ratios(values)
    assert np.isnan(own[:3]).all()  # a past takes three measurements
    np.testing.assert_allclose(own[3], [8 / 2, 10 / 10, 5 / 4])
    np.testing.assert_allclose(own[4], [6 / 2.5, 40 / 10, 0.5 / 4])
    np.testing.assert_allclose(others[0], [1 / 7, 10 / 2.5, 4 / 5.5])
    np.testing.assert_allclose(others[4], [6 / 20.25, 40 / 3.25, 0.5 / 23])


def test_the_past_is_the_last_ten_measurements():
    values = np.array([[100.0]] * 6 + [[1.0]] * 10 + [[3.0]])
    own, others = trend.trend_ratios(values)
    assert own[6, 0] == 0.01
    assert own[-1, 0] == 3  # the six before the ten do not count
    assert np.isnan(others).all()  # one layer has no others


def test_what_is_not_known_or_not_finite_is_compared_with_nothing():
    values = np.array([[NAN, 2, 0], [1, 2, 0], [1, NAN, 0], [1, 2, 0], [1, math.inf, 5]])
    own, others = trend.trend_ratios(values)
    assert own[4].tolist()[:1] == [1.0] and own[4, 1] == math.inf
    assert math.isnan(own[3, 0])  # only two measurements of its past are known
    assert math.isnan(own[4, 2])  # its median is 0
    assert math.isnan(others[0, 0])
    assert others[4, 1] == math.inf
    assert math.isnan(others[4, 0])  # the median of the others is infinite


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        # 120 is 6 times the others (20) at once. It is 4 times its past (30) too, which counts from
        # the fourth measurement on.
        ({(2, 1): 120, (3, 1): 120, (4, 1): 120}, [Departure(1, 3, 2)]),
        ({(4, 1): 120}, [Departure(1, 4, 4)]),
        ({(4, 1): 119}, []),
        ({(0, 1): 95, (4, 1): 95}, []),
        ({(4, 0): 200, (3, 2): 200}, [Departure(2, 3, 3), Departure(0, 4, 4)]),
        ({(4, 0): NAN, (4, 1): math.inf}, [Departure(1, 4, 4)]),
    ],
)
def test_layers_leave_at_the_thresholds_and_the_earliest_stands_first(changes, found):
    values = np.full((5, 4), 20.0)
    values[:, 1] = 30
    for place, value in changes.items():
        values[place] = value
    assert trend.departures(values, SCORES) == found
