"""Tables of text: in columns for a terminal, and in Markdown."""

from collections.abc import Iterable, Sequence

from tabulate import DataRow, TableFormat, tabulate

_SIDES = {"<": "left", ">": "right"}


def columns(rows: Iterable[Sequence[str]], align: str, between: str = "  ") -> str:
    """Lays rows of cells out in columns, each as wide as its widest cell.

    Args:
      rows: cells row by row, a heading among them; a row may end early.
      align: `<` or `>` for each column.
      between: text between neighbouring columns.

    Returns:
      One line a row, without spaces at its end.

    Example:
      >>> print(columns([("part", "ms"), ("attention", "18.5")], "<>"))
      part         ms
      attention  18.5
    """
    row = DataRow("", between, "")
    style = TableFormat(None, None, None, None, row, row, padding=0, with_header_hide=None)
    sides = [_SIDES[side] for side in align]
    # Cells are printed as they are: tabulate would write 1.50 as 1.5.
    return tabulate(rows, tablefmt=style, disable_numparse=True, colalign=sides)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its columns as wide as their widest cells.

    Args:
      header: one text a column.
      rows: cells row by row, which are left as they are.

    Example:
      >>> print(markdown(("arm", "step"), [("probe", "1,200")]), end="")
      | arm   | step   |
      |-------|--------|
      | probe | 1,200  |
    """
    return tabulate(rows, header, tablefmt="github", disable_numparse=True) + "\n"
