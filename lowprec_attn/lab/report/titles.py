"""Chooses titles in plain words for the panels of a figure."""

import textwrap
from collections.abc import Iterable
from pathlib import Path

from lowprec_attn.lab.experiment import PANEL_WIDTH, Arm
from lowprec_attn.lab.records import RecordError, read_toml


def plain_titles(directory: Path, arms: Iterable[Arm]) -> dict[str, str]:
    """Returns the titles of arms by the arms' names.

    The titles are read from `titles.toml` beside the records, which has a line `name = "words"` per
    arm. The title of an arm without such a line is the field `name` of its overrides, or else its
    own name as words: `dynamic max` for `[arms.dynamic_max]`. Its overrides are in the tables.

    Raises:
      RecordError: the file is not TOML, or a title is no text.
    """
    words = {arm.name: arm.overrides.get("name") or arm.name.replace("_", " ") for arm in arms}
    titles = {name: textwrap.fill(text, PANEL_WIDTH) for name, text in words.items()}
    path = directory / "titles.toml"
    given = read_toml(path)
    for name, title in given.items():
        if not isinstance(title, str):
            raise RecordError(f"{path}: {name} must be a text in quotes, got {title!r}")
    return titles | given
