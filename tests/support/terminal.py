"""What a command prints, as a reader takes it."""

import re


def sentences(text: str) -> str:
    """With wrapped sentences in one line again."""
    return re.sub(r"(?<=[^\n]{24})\n  (?! )", " ", text)
