"""Links that leave the pages, to code or records, lead to the repository."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<=\]\()([^()\s#:]+)(#[^()\s]*)?(?=\))")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def linked(text: str, page: Path, docs: Path, source: str) -> str:
    """Text whose links out of `docs` have the address of the file in the repository.

    Args:
      text: Markdown.
      page: the file that it is of.
      docs: the folder of the pages.
      source: the address of the repository, whose root `docs` stands in.
    """
    code = [found.span() for found in _CODE.finditer(text)]

    def address(found: re.Match[str]) -> str:
        if any(start <= found.start() < end for start, end in code):
            return found[0]
        target = (page.parent / found[1]).resolve()
        within = target.is_relative_to(docs) and target.suffix in (".md", ".png")
        if within or not target.exists():  # Sphinx finds the one, and reports the other
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{source}/{kind}/main/{target.relative_to(docs.parent)}{found[2] or ''}"

    return _LINK.sub(address, text)


def _on_read(app: Any, docname: str, text: list[str]) -> None:
    docs = Path(app.srcdir)
    page = Path(app.env.doc2path(docname))
    text[0] = linked(text[0], page, docs, app.config.source_address)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx's entry."""
    app.add_config_value("source_address", "", "env")
    app.connect("source-read", _on_read)
    return {"parallel_read_safe": True}
