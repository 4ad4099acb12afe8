"""How the site converts pages and docstrings before Sphinx reads them."""

import pytest
from command import ROOT
from docstrings import as_rst
from source_links import linked

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("link", "address"),
    [
        ("../pyproject.toml", "S/blob/main/pyproject.toml"),
        ("../results/laptop#readme", "S/tree/main/results/laptop#readme"),
        ("examples/capture_nnx.py", "S/blob/main/docs/examples/capture_nnx.py"),
        ("failure.md#why", "failure.md#why"),
        ("no_such_file.py", "no_such_file.py"),
        ("https://x.y/../pyproject.toml", "https://x.y/../pyproject.toml"),
    ],
)
def test_a_link_out_of_the_pages_leads_to_the_source(link, address):
    text = f"[a]({link})\n`[a]({link})`\n\n```\n[a]({link})\n```\n"
    expected = f"[a]({address})\n`[a]({link})`\n\n```\n[a]({link})\n```\n"
    assert linked(text, DOCS / "page.md", DOCS, "S") == expected


@pytest.mark.parametrize(
    ("docstring", "rst"),
    [
        ("An |S| and 2 * x_ of `a_b`.", r"An \|S\| and 2 \* x\_ of ``a_b``."),
        ("`Format`s", "``Format``\\ s"),
        ("With\n\n    P = |x|\n\nthen", "With\n\n::\n\n      P = |x|\n\nthen"),
        ("Modes:\n  up: as |x|.\n    More.", "Modes:\n\n| up: as \\|x\\|.\n    More."),
        ("Args:\n  x: of |x|.", "Args:\n  x: of \\|x\\|."),
        (
            "Attributes:\n  q, k: arrays.",
            "Attributes:\n  q,\N{ZERO WIDTH SPACE}k: arrays.",
        ),
    ],
)
def test_a_docstring_keeps_its_equations_and_its_signs(docstring, rst):
    assert as_rst(docstring) == rst
