"""Docstrings as Sphinx reads them.

The docstrings of this project are plain text with Google's sections: equations are indented, names
stand in single backticks, and `|score|` or `x*` mean what they say. reStructuredText takes an
indented block for a quotation, and bars and stars for markup. The two functions here say so.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

_SECTION = re.compile(
    r"(Args|Arguments|Attributes|Example|Examples|Fields|Raises|Returns|Yields|Note|Notes):$"
)
_LITERAL = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?=\W|$))")
_NAMES = re.compile(r"^( +)([a-z]\w*(?:, [a-z]\w*)+)(?=:)", re.MULTILINE)


def escaped(text: str) -> str:
    """Text in which names in backticks are literals and nothing else is markup."""
    parts, end = [], 0
    for found in _LITERAL.finditer(text):
        parts.append(_MARKUP.sub(r"\\\1", text[end : found.start()]))
        before = text[found.start() - 1 : found.start()]
        after = text[found.end() : found.end() + 1]
        # A literal needs a border: `Numerics`s is one in Markdown and none here.
        parts.append("\\ " * before.isalnum() + f"``{found[2]}``" + "\\ " * after.isalnum())
        end = found.end()
    parts.append(_MARKUP.sub(r"\\\1", text[end:]))
    return "".join(parts)


def as_rst(docstring: str) -> str:
    """A docstring whose indented blocks are literal blocks and whose text is escaped."""
    return "\n\n".join(_blocks(docstring))


def _blocks(docstring: str) -> Iterator[str]:
    section = False
    for block in re.split(r"\n\s*\n", docstring.rstrip()):
        first = block.split("\n", 1)[0]
        if _SECTION.match(first):
            section = True
        elif not first.startswith(" "):
            section = False
        if ">>>" in block:
            yield block
        elif not section and first.startswith("  "):
            yield _indented(block)
        else:
            yield _with_literals(block, section)


def _with_literals(block: str, section: bool) -> str:
    """A paragraph; what is indented below it stands apart."""
    lines = block.split("\n")
    start = next((i for i, line in enumerate(lines) if i and line.startswith("  ")), None)
    if section:
        # One entry for several names: Sphinx takes what stands before a space for a type.
        return _NAMES.sub(
            lambda found: found[0].replace(", ", ",\N{ZERO WIDTH SPACE}"), escaped(block)
        )
    if start is None or re.match(r"\s*[-*\d]", lines[0]):
        return escaped(block)
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith(" ")), len(lines))
    result = escaped("\n".join(lines[:start])) + "\n\n" + _indented("\n".join(lines[start:end]))
    rest = "\n".join(lines[end:])
    return f"{result}\n\n{_with_literals(rest, section)}" if rest else result


def _indented(block: str) -> str:
    """Sentences line by line, and anything else, equations and tables, as it stands."""
    lines = textwrap.dedent(block).split("\n")
    if not lines[-1].endswith("."):
        return "::\n\n" + textwrap.indent(block, "  ")
    return "\n".join(("  " if line.startswith(" ") else "| ") + escaped(line) for line in lines)


def _on_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst("\n".join(lines)).split("\n")


def _on_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str]:
    """Arrays under the name that users import."""
    return tuple(text and text.replace("jaxlib._jax.", "jax.") for text in (signature, returns))


def setup(app: Any) -> dict[str, bool]:
    """Sphinx's entry."""
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True}
