"""Plain words above the panels of a figure, from `titles.toml` beside the records."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from lowprec_attn.lab.experiment import Arm, panel_titles
from lowprec_attn.lab.records import RecordError


def plain_titles(directory: Path, arms: Iterable[Arm]) -> dict[str, str]:
    """By name, what to write above the panels of arms.

    The file has a line `name = "words"` an arm. An arm without one is called by its settings.

    Raises:
      RecordError: the file is not TOML.
    """
    path = directory / "titles.toml"
    titles = panel_titles(arms)
    if path.is_file():
        try:
            titles |= tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordError(f"{path} is not TOML: {error}") from error
    return titles
