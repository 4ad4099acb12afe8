"""The place of a tile in the arrays of a call, on which its random bits and masks depend."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a tile: global rows [T, 1] and columns [1, S] (keys, or features of an output).

    For values that every online-softmax step rounds anew, `step` is the first key of the step.
    """

    rows: Array
    cols: Array
    step: Array | int = 0


def span(start: Array | int, size: int) -> Array:
    """Returns the int32 indices start, ..., start + size − 1."""
    return jnp.asarray(start, jnp.int32) + jnp.arange(size, dtype=jnp.int32)


# Column numbers that give row statistics different random bits where one point rounds several.
_COLUMNS = {"m": 0, "l": 1, "lse": 2, "alpha": -1}


def statistic(place: Place, name: str) -> Place:
    """The place of a row statistic: `m`, `l`, `lse`, or the exponent of `alpha`."""
    return Place(place.rows, jnp.full((1, 1), _COLUMNS[name], jnp.int32), place.step)


def tile_number(first: Array, which: int) -> Array:
    """The `step` of a `Place` for a tile's contribution to dQ, dK or dV (`which` is 0, 1 or 2).

    Different numbers give the contributions different random bits. `first` is the index at which
    the tile begins on the axis over which the gradient sums.
    """
    return 3 * first + which
