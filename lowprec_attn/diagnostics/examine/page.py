"""Writes what `diagnose` found as one self-contained HTML page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from lowprec_attn.diagnostics.examine import series as trends
from lowprec_attn.diagnostics.examine import wording
from lowprec_attn.diagnostics.examine.examination import Examination, heads
from lowprec_attn.diagnostics.examine.series import Series
from lowprec_attn.diagnostics.measurement import Arithmetic
from lowprec_attn.runs.pages.markup import element, table, write_page

_TITLE = "lowprec-attn diagnose"


def write(
    path: Path,
    examined: Sequence[Examination],
    arithmetics: Sequence[Arithmetic],
    series: Sequence[Series] = (),
    not_finite: Sequence[str] = (),
) -> None:
    """Writes what the command prints, with every row of the table.

    Args:
      path: the file to write.
      examined: the examined layers, worst first.
      arithmetics: the arithmetics that were asked for.
      series: the series to show trends of.
      not_finite: sentences that say where NaN and infinity stand first.

    Raises:
      DiskError: the page cannot be written.
    """
    layers = [one.layer for one in examined]
    content = [
        element("h1", _TITLE),
        element("p", wording.headline(examined)),
        *_paragraphs(wording.preface(layers, arithmetics)),
        element("h2", "Verdicts"),
        *_paragraphs(not_finite),
    ]
    shown = [one for one in examined if one.findings[0].kind != "none"]
    for one, (name, sentences) in zip(shown, wording.verdicts(examined), strict=True):
        state = "broken" if one.found else "healthy"
        heading = [element("h3", name)] if name else []
        content.append(element("div", *heading, *_paragraphs(sentences), class_=f"state {state}"))
    content += [
        element("div", element("p", sentence), class_="state healthy")
        for sentence in wording.others(examined)
    ]
    for kind, lines in wording.actions(examined):
        content += [element("h2", f"What to do about {kind}"), table(("", ""), lines, ())]
    if worths := wording.worths(examined):
        content.append(element("h2", "What the rules were worth in the lab"))
        content += _paragraphs(f"{kind}: {worth}" for kind, worth in worths)
    content += [part for one in series for part in _trend(one)]
    content.append(element("h2", "Heads, worst first"))
    write_page(path, _TITLE, [*content, *_heads(examined)])


def _trend(series: Series) -> list[Element]:
    header, *body = trends.rows(series)
    worths = (f"In the lab, {label}: {worth}" for label, worth in trends.worths(series))
    return [
        element("h2", "Trend"),
        *_paragraphs(trends.sentences(series)),
        table(header, body, range(1, len(header))),
        *_paragraphs(worths),
    ]


def _heads(examined: Sequence[Examination]) -> list[Element]:
    rows = heads(examined)
    if not rows:
        return [element("p", "no layer could be measured")]
    lines, align = wording.rows(rows, [one.layer for one in examined])
    kept = [i for i, name in enumerate(lines[0]) if name != "|"]
    header, *body = ([line[i] for i in kept] for line in lines)
    right = [place for place, i in enumerate(kept) if align[i] == ">"]
    return [table(header, body, right), element("p", " ".join(wording.LEGEND))]


def _paragraphs(texts: Iterable[str]) -> list[Element]:
    return [element("p", text) for text in texts]
