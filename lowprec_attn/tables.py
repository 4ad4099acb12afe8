"""Text tables, aligned for a terminal or in Markdown, and wrapped text."""

import functools
import textwrap
from collections.abc import Iterable, Sequence

from tabulate import DataRow, TableFormat, tabulate

_SIDES = {"<": "left", ">": "right"}

wrapped = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
"""Returns the lines of a text, as `textwrap.wrap` does, but breaks no name of a file or layer."""


def columns(rows: Iterable[Sequence[str]], align: str, between: str = "  ") -> str:
    """Lays out rows of cells in columns, each the width of its widest cell.

    Args:
      rows: the cells of each row, including a heading row if there is one. A row may be short.
      align: `<` or `>` for each column.
      between: the text between neighbouring columns.

    Returns:
      One line per row, without trailing spaces.

    Example:
      >>> print(columns([("part", "ms"), ("attention", "18.5")], "<>"))
      part         ms
      attention  18.5
    """
    row = DataRow("", between, "")
    style = TableFormat(None, None, None, None, row, row, padding=0, with_header_hide=None)
    sides = [_SIDES[side] for side in align]
    # Cells are printed unchanged. Without `disable_numparse`, tabulate would write 1.50 as 1.5.
    return tabulate(rows, tablefmt=style, disable_numparse=True, colalign=sides)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns have the width of their widest cells.

    Args:
      header: the heading of each column.
      rows: the cells of each row, which are printed unchanged.

    Example:
      >>> print(markdown(("arm", "step"), [("probe", "1,200")]), end="")
      | arm   | step   |
      |-------|--------|
      | probe | 1,200  |
    """
    return tabulate(rows, header, tablefmt="github", disable_numparse=True) + "\n"


def with_legend(legend: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table below its legend, which is wrapped at 100 columns."""
    return f"{textwrap.fill(legend, 100)}\n\n{markdown(header, rows)}"
