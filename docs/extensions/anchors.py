"""The anchors of headings as GitHub makes them. The site has the same, so one link serves both."""

import re
import unicodedata

_LINKED = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: letters, marks, digits, - and _."""
    text = _LINKED.sub(r"\1", heading).replace("`", "").replace("*", "").lower()
    kept = (c for c in text if c in "- _" or unicodedata.category(c)[0] in "LM" or c.isdecimal())
    return "".join(kept).replace(" ", "-")
