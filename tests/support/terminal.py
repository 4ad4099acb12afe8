"""The output of a command, in the form that a reader takes in."""

import re


def sentences(text: str) -> str:
    """The text, with wrapped sentences joined into one line again."""
    return re.sub(r"(?<=[^\n]{24})\n  (?! )", " ", text)
