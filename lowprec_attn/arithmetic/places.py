"""Where a tile lies in the arrays of a call: random bits and masks are functions of it."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile lies: global rows [T, 1] and columns [1, S] (keys, or features of an output).

    `step` is the first key of the online-softmax step, for values that every step rounds anew.
    """

    rows: Array
    cols: Array
    step: Array | int = 0


def span(start: Array | int, size: int) -> Array:
    """The indices start, ..., start + size − 1."""
    return jnp.asarray(start, jnp.int32) + jnp.arange(size, dtype=jnp.int32)


# Columns that tell the random bits of row statistics apart, where a point rounds several.
_COLUMNS = {"m": 0, "l": 1, "lse": 2, "alpha": -1}


def statistic(place: Place, name: str) -> Place:
    """The place of a row statistic: `m`, `l`, `lse`, or the exponent of `alpha`."""
    return Place(place.rows, jnp.full((1, 1), _COLUMNS[name], jnp.int32), place.step)


def tile_number(first: Array, which: int) -> Array:
    """Tells apart the random bits of dQ, dK and dV (0, 1, 2) in the tiles along their sum."""
    return 3 * first + which
