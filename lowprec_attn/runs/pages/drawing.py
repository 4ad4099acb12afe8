"""Writes matplotlib figures to files and into pages, and escapes text in figures."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib as mpl
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from PIL import Image

from lowprec_attn.errors import RunError
from lowprec_attn.files import write_atomically
from lowprec_attn.runs.pages.markup import element
from lowprec_attn.runs.pages.style import DPI

_FONTS = re.compile(r"'DejaVu Sans'.*?sans-serif")


def plain(text: str) -> str:
    """Escapes a user's text for a figure, because matplotlib reads text between $ signs as TeX."""
    return text.replace("$", r"\$")


def require_figure_format(path: Path) -> None:
    """Raises a RunError unless matplotlib can write a figure with this suffix."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise RunError(
            f"{path}: a figure is written as one of {', '.join(sorted(known))}; give a name that "
            "ends in .png"
        )


def write_figure(path: Path, figure: Figure) -> None:
    """Writes a figure to a file atomically, in the format of the file's suffix.

    Raises:
      RunError: there is no such format.
      OSError: see `write_atomically`.
    """
    require_figure_format(path)
    buffer = io.BytesIO()
    name = path.suffix.removeprefix(".").lower()
    figure.savefig(buffer, format=name, dpi=DPI)
    if name == "png":  # with a palette the file is half as large
        drawn = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        drawn.save(buffer, name, dpi=(DPI, DPI), optimize=True)
    write_atomically(path, buffer.getvalue())


def drawing(figure: Figure, name: str, caption: str) -> Element:
    """Returns a figure as inline SVG with a caption above it.

    Args:
      figure: the figure to draw.
      name: a name that is unique on the page. Ids inside the drawing are made from it.
      caption: plain text, which is also the label for readers that show no pictures.
    """
    buffer = io.BytesIO()
    # Text remains text instead of outlines, which is smaller and can be searched.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = _inline(ElementTree.fromstring(buffer.getvalue()))
    svg.set("role", "img")
    svg.set("aria-label", caption)
    return element("figure", element("figcaption", caption), svg)


def _inline(root: Element) -> Element:
    """Converts matplotlib's SVG for HTML: no namespaces, metadata, size or repeated ids."""
    for item in root.iter():
        item.tag = item.tag.rpartition("}")[2]
        item.text, item.tail = (text and text.strip() for text in (item.text, item.tail))
        if item.tag == "g":
            item.attrib.pop("id", None)
        for name, value in list(item.attrib.items()):
            del item.attrib[name]
            value = value.replace("#000000", "var(--ink)").replace("#b0b0b0", "var(--grid)")
            value = _FONTS.sub("sans-serif", value).replace("\n", "").strip()
            item.set(name.rpartition("}")[2], value)
    for parent in root.iter():
        for child in list(parent):
            if child.tag in ("metadata", "style"):
                parent.remove(child)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return root
