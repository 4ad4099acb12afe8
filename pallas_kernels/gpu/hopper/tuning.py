"""The tuning table `tuning.toml`: the tiles of a call, each with the record that it came from."""

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

Row = dict[str, Any]


@functools.cache
def table() -> Mapping[str, list[Row]]:
    """The rows of each kernel: `when` a row holds, its `tile`, and its timing `record`, if any."""
    text = resources.files(__package__).joinpath("tuning.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def tuned(kernel: str, call: Mapping[str, object]) -> dict[str, Any]:
    """Returns the fields of the tile in the first row that holds for a call.

    Raises:
      ValueError: no row holds.
    """
    for row in table()[kernel]:
        if all(call[name] == wanted for name, wanted in row["when"].items()):
            return dict(row["tile"])
    sizes = sorted({row["when"]["head_size"] for row in table()[kernel]})
    raise ValueError(
        f"no tiles for head size {call['head_size']} with values of {call['value_size']} "
        f"(it takes {sizes})"
    )
