"""What `diagnose` found as one HTML page, which needs no other file."""

import html
from collections.abc import Sequence

from lowprec_attn import tables
from lowprec_attn.diagnose import wording
from lowprec_attn.diagnose.examination import Examination, heads
from lowprec_attn.diagnose.measurement import Arithmetic

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font: 13px/1.4 ui-monospace, monospace; }
th, td { padding: .15em .6em; border-bottom: 1px solid #ddd; white-space: nowrap; }
.found { border-left: .3em solid #c33; padding-left: .8em; }
.nothing { border-left: .3em solid #3a3; padding-left: .8em; }
"""


def page(examined: Sequence[Examination], arithmetics: Sequence[Arithmetic]) -> str:
    """The same as the command prints, with every row of the table.

    Args:
      examined: layers, worst first.
      arithmetics: that were asked for.
    """
    layers = [one.layer for one in examined]
    rows = heads(examined)
    table, align = wording.rows(rows, layers)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><title>lowprec-attn diagnose</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>lowprec-attn diagnose</h1>",
        *map(_paragraph, wording.preface(layers, arithmetics)),
        "<h2>Verdicts</h2>",
    ]
    for one, (name, sentences) in zip(examined, wording.verdicts(examined), strict=True):
        kind = "found" if one.found else "nothing"
        heading = f"<h3>{html.escape(name)}</h3>" if name else ""
        parts.append(f'<div class="{kind}">{heading}{"".join(map(_paragraph, sentences))}</div>')
    if worths := wording.worths(examined):
        parts.append("<h2>What the rules were worth in the lab</h2>")
        parts += [_paragraph(f"{kind}: {worth}") for kind, worth in worths]
    parts.append("<h2>Heads, worst first</h2>")
    if rows:
        kept = [i for i, name in enumerate(table[0]) if name != "|"]
        cells = [[row[i] for i in kept] for row in table]
        parts.append(tables.html(cells, "".join(align[i] for i in kept)))
        parts.append(_paragraph(" ".join(wording.LEGEND)))
    else:
        parts.append(_paragraph("no layer could be measured"))
    return "\n".join([*parts, "</body></html>", ""])


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
