"""Text tables in columns and in Markdown."""

from lowprec_attn.tables import columns, markdown


def test_columns_are_as_wide_as_their_widest_cell_and_cells_stay_as_they_are():
    rows = [("part", "ms", ""), ("the norm", "1.50", "1e-5"), ("δ", "1,024", "")]
    assert columns(rows, "<><").splitlines() == [
        "part         ms",
        "the norm   1.50  1e-5",
        "δ         1,024",
    ]
    assert columns(rows, "><>", " | ").splitlines() == [
        "    part | ms    |",
        "the norm | 1.50  | 1e-5",
        "       δ | 1,024 |",
    ]


def test_rows_may_end_early_or_be_missing():
    assert columns([("a",), ("b", "c", "d")], "<>").splitlines() == ["a", "b  c  d"]
    assert columns([], "<>") == ""


def test_markdown_leaves_cells_as_they_are():
    rows = [("probe", "1.50", "–"), ("x", "0010", "1,024")]
    assert markdown(("arm", "loss", "step"), rows).splitlines() == [
        "| arm   | loss   | step   |",
        "|-------|--------|--------|",
        "| probe | 1.50   | –      |",
        "| x     | 0010   | 1,024  |",
    ]
    assert markdown(("a",), []).endswith("|\n")
