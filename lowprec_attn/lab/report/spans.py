"""Writes numbers and spans of numbers in the cells of tables."""

from collections.abc import Callable, Iterable

NONE = "–"
"""The text of a cell without a value."""


def number(x: float) -> str:
    """Formats a number from 10 on without decimals, and a smaller one with two digits."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def span(values: Iterable[float], text: Callable[[float], str] = number) -> str:
    """Returns the least and the largest value, as in `2 to 40`.

    Values whose texts are the same are one number, and no values are a dash.

    Args:
      values: the values, in any order.
      text: writes one value.

    Example:
      >>> span([40, 2]), span([0.12, 0.124]), span([])
      ('2 to 40', '0.12', '–')
    """
    found = list(values)
    if not found:
        return NONE
    least, most = text(min(found)), text(max(found))
    return least if least == most else f"{least} to {most}"
