"""Numbers before nouns."""


def many(count: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `1,200 steps`.

    Args:
      count: of what the noun names.
      noun: in the singular.
      plural: by default the singular and an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
