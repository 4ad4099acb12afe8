"""Says in words in which rows, keys and heads a result errs."""

import numpy as np


def words(name: str, bad: np.ndarray) -> str:
    """Returns words for the places where a result errs.

    Args:
      name: the name of the result.
      bad: whether each of its rows errs [B, rows, heads].
    """
    sequences, rows, heads = (np.flatnonzero(bad.any(axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    parts = [f"heads {_range(heads, bad.shape[2])}"]
    if name != "dsinks":
        axis = "keys" if name in ("dk", "dv") else "rows"
        parts.insert(0, f"{axis} {_range(rows, bad.shape[1])}")
    if bad.shape[0] > 1:
        parts.append(f"sequences {_range(sequences, bad.shape[0])}")
    return ", ".join(parts)


def _range(places: np.ndarray, count: int) -> str:
    if len(places) == count:
        return f"all {count}"
    first, last = int(places[0]), int(places[-1])
    if len(places) == 1:
        return f"{first} of {count}"
    if len(places) == last - first + 1:
        return f"{first} to {last} of {count}"
    return f"{len(places)} of {count}, from {first} to {last}"
