"""Formats a count with its noun."""


def many(count: int, noun: str, plural: str | None = None) -> str:
    """Returns a count and its noun, such as `1 step` or `1,200 steps`.

    Args:
      count: the number of things that the noun names.
      noun: the noun in the singular.
      plural: the noun in the plural; None appends an s to `noun`.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
