"""Makes the elements of a page. The serialiser escapes text, so callers need not."""

from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from lowprec_attn.files import write_atomically, writing

Content = Element | str | None

# Colours are CSS variables, so that a page follows the reader's light or dark setting. `drawing`
# replaces the figures' black and grid grey by --ink and --grid.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1e23; --page: #ffffff; --soft: #f1f3f5;
  --grid: #c9ced4; --link: #0b57a4; --broken: #b3261e; --warned: #8a5a00; --unknown: #50565e;
  --healthy: #1d6b34; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --page: #15181c; --soft: #22272d;
  --grid: #454c55; --link: #7db7f5; --broken: #ff8a80; --warned: #f2c14e; --unknown: #b3bac3;
  --healthy: #7ddc97; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1120px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 1.8em; }
h3 { font-size: 1em; margin: 0; } .state p { margin: .3em 0; } a { color: var(--link); }
.state { font-size: 1.1em; border-left: 5px solid; padding: .5em .9em; background: var(--soft);
  margin: 1em 0; }
.broken { border-color: var(--broken); } .warned { border-color: var(--warned); }
.unknown { border-color: var(--unknown); } .healthy { border-color: var(--healthy); }
.figures { display: grid; gap: 1em;
  grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-size: .9em; } svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); } .scroll { overflow-x: auto; }
.key { display: inline-block; margin-right: 1em; }
.key i { display: inline-block; width: 1.1em; height: .3em; margin: 0 .3em .2em 0; }
table { border-collapse: collapse; font-size: .87em; } td, th { padding: .15em .6em;
  text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
td { font-variant-numeric: tabular-nums; } .right { text-align: right; white-space: nowrap; }
summary { cursor: pointer; margin: .3em 0; }
.spark { width: 130px; min-width: 130px; height: 26px; }
.spark path { fill: none; stroke: var(--link); stroke-width: .8; }
code, pre { font: .9em ui-monospace, monospace; } pre { white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--soft); padding: .6em; }
"""


def element(tag: str, *content: Content, **attributes: str) -> Element:
    """Returns an HTML element.

    Args:
      tag: the name of the element.
      content: texts and elements in their order. None is left out.
      attributes: the attributes by name. `class_` stands for `class`.
    """
    made = Element(tag, {name.rstrip("_"): value for name, value in attributes.items()})
    last: Element | None = None
    for part in content:
        if isinstance(part, Element):
            made.append(part)
            last = part
        elif part is not None and last is None:
            made.text = (made.text or "") + part
        elif part is not None and last is not None:
            last.tail = (last.tail or "") + part
    return made


def table(
    header: Sequence[str], rows: Iterable[Sequence[Content]], right: Container[int] = ()
) -> Element:
    """Returns a table with its own scroll bar if it is wider than the page.

    Args:
      header: the heading of each column.
      rows: the cells of each row.
      right: the indices of right-aligned columns, from 0.
    """

    def line(tag: str, cells: Sequence[Content]) -> Element:
        classes = [{"class": "right"} if i in right else {} for i in range(len(cells))]
        return element("tr", *(element(tag, c, **k) for c, k in zip(cells, classes, strict=True)))

    head = element("thead", line("th", header))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", head, body), class_="scroll")


def folded(summary: str, *content: Content) -> Element:
    """Returns content that is folded under a summary until the reader clicks on it."""
    return element("details", element("summary", summary), *content)


def keys(entries: Iterable[tuple[str, str]]) -> Element:
    """Returns a legend from pairs of a CSS colour and the text that explains it."""
    swatches = (
        element("span", element("i", style=f"background:{color}"), text, class_="key")
        for color, text in entries
    )
    return element("p", *swatches)


def write_page(path: Path, title: str, content: Iterable[Content]) -> None:
    """Writes a page atomically.

    Raises:
      DiskError: the file cannot be written.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    page = element("html", head, element("body", *content), lang="en")
    text = ElementTree.tostring(page, encoding="unicode", method="html")
    with writing(path):
        # Text from JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
        data = f"<!DOCTYPE html>\n{text}\n".encode(errors="backslashreplace")
        write_atomically(path, data)
