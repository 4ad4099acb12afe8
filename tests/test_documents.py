"""Links of the documents resolve, and the repository stays small enough to clone."""

import collections
import re
import subprocess
from functools import cache

import pytest
from anchors import slug
from command import ROOT

MEGABYTE = 1_000_000
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*#*$", re.MULTILINE)


def tracked(*patterns):
    """The files that git tracks, and new files that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / line for line in names.splitlines())
    return [path for path in paths if path.is_file()]


@cache
def anchors(path):
    counts = collections.Counter()
    found = set()
    for heading in _HEADING.findall(_FENCED.sub("", path.read_text())):
        name = slug(heading)
        found.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


def broken(path):
    """Yields the links of a document that lead nowhere."""
    for target in _LINK.findall(_CODE.sub("", _FENCED.sub("", path.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        other = (path.parent / place).resolve() if place else path
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


@pytest.mark.parametrize("heading", ["What warns", "The product P̄V, and δ", "`lab` – [one](x.md)"])
def test_anchors_are_those_of_github(heading):
    of = {
        "What warns": "what-warns",
        "The product P̄V, and δ": "the-product-p̄v-and-δ",
        "`lab` – [one](x.md)": "lab--one",
    }
    assert slug(heading) == of[heading]


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    page = tmp_path / "page.md"
    links = "[a](page.md#one) [b](#one) [c](no.md) [d](#two) [e](https://x.y) `[f](no.md)`"
    page.write_text(f"# One\n\n{links}\n\n```\n[g](no.md)\n```\n")
    assert list(broken(page)) == ["no.md", "#two"]


def test_every_link_within_the_repository_resolves():
    pages = tracked("*.md")
    assert len(pages) > 50
    found = {str(page.relative_to(ROOT)): list(broken(page)) for page in pages}
    assert {page: links for page, links in found.items() if links} == {}


@pytest.mark.parametrize(("folder", "limit"), [("results", 15), (".", 25)])
def test_the_repository_stays_small_enough_to_clone(folder, limit):
    assert sum(path.stat().st_size for path in tracked(folder)) < limit * MEGABYTE


def test_pictures_are_small_and_a_page_shows_each():
    text = "\n".join(path.read_text() for path in tracked("*.md", "*.ipynb", "*.py"))
    pictures = tracked("docs/images")
    assert [path.name for path in pictures if path.name not in text] == []
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []


def words(path):
    """The number of words that a reader sees, without table rules, link targets and images."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)]*\)", "", path.read_text())
    return sum(1 for word in text.split() if re.search(r"\w", word))


def test_words_are_those_that_a_reader_reads(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A [link](to/some where.md)\n\n![a picture](a.png)\n\n| one | 2 |\n|---|---|\n"
    )
    assert words(page) == 4


def test_pages_are_short_enough_to_be_read():
    assert words(ROOT / "README.md") <= 900
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
    assert words(ROOT / "docs" / "failure.md") <= 1500
    assert sum(words(path) for path in tracked("docs/*.md")) <= 15_000
