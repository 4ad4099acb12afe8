"""Numbers and spans in the cells of tables."""

import pytest

from lowprec_attn.lab.report.spans import number, span


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([40, 2, 7], "2 to 40"),
        ([0.123, 0.31], "0.12 to 0.31"),  # not 0 to 0
        ([1234.4], "1,234"),
        ([1234.4, 1233.6], "1,234"),
        ([0], "0"),
        ([], "–"),
        (iter([3.0, 26_890.0]), "3 to 26,890"),
    ],
)
def test_a_span_is_two_numbers_one_or_a_dash(values, text):
    assert span(values) == text


def test_texts_that_are_the_same_stand_once():
    assert span([0.1, 0.1004], "{:+.3f}".format) == "+0.100"
    assert span([-0.1, 0.1], "{:+.3f}".format) == "-0.100 to +0.100"


def test_numbers_below_ten_have_two_digits():
    assert [number(x) for x in (0.0456, 9.94, 9.96, 10.4, 12345)] == [
        "0.046",
        "9.9",
        "10",
        "10",
        "12,345",
    ]
