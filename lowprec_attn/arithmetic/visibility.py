"""Which keys a row sees, and which online-softmax steps exist for it."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import MASKED


def visible(extras: Extras, spec: Spec, place: Place, mask: Array | None) -> Array | None:
    """True where a row may see a column, broadcastable to the scores; None where all may.

    Args:
      extras: for the lengths.
      spec: for causality.
      place: the tile.
      mask: the dense mask of this tile, [B|1, K|1, G|1, T|1, S|1].
    """
    positions = _positions_visible(extras, place, causal=spec.is_causal)
    if mask is None or positions is None:
        return positions if mask is None else mask
    return mask & positions


def visited(extras: Extras, place: Place, *, causal: bool) -> Array | None:
    """True for rows [B|1, 1, 1, T, 1] that may see a key of this step by position alone.

    A step that lies wholly above the diagonal or beyond the lengths does not exist for a row:
    whether a tile happens to contain it must not matter. A dense mask has no such structure;
    a step that it masks wholly is taken. None where every row may see some key.

    Args:
      extras: for the lengths.
      place: the tile.
      causal: whether the diagonal counts, see `RowMax.visits_above_diagonal`.
    """
    return _positions_visible(extras, Place(place.rows, place.cols[:, :1]), causal=causal)


def _positions_visible(extras: Extras, place: Place, *, causal: bool) -> Array | None:
    rows, cols = (x[None, None, None] for x in (place.rows, place.cols))
    parts = []
    if causal:
        parts.append(cols <= rows)
    if extras.key_lengths is not None:
        parts.append(cols < extras.key_lengths.reshape(-1, 1, 1, 1, 1))
    if extras.query_lengths is not None:
        parts.append(rows < extras.query_lengths.reshape(-1, 1, 1, 1, 1))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def mask_scores(s: Array, seen: Array | None) -> Array:
    """Scores with MASKED where `seen` is False."""
    return s if seen is None else jnp.where(seen, s, jnp.float32(MASKED))
