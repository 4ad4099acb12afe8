"""Which keys a row sees, and which online-softmax steps exist for it."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import MASKED

# How far a row sees to the left and to the right.
Window = tuple[int, int]


def visible(extras: Extras, spec: Spec, place: Place, mask: Array | None) -> Array | None:
    """True where a row may see a column, broadcastable to the scores; None where all may.

    Args:
      extras: for the lengths and the rows' offset.
      spec: for causality and the window.
      place: the tile.
      mask: what is `unhidden` in this tile, [B|1, K|1, G|1, T|1, S|1].
    """
    positions = _of_every_head(extras, place, causal=spec.is_causal, window=spec.window)
    if mask is None or positions is None:
        return positions if mask is None else mask
    return mask & positions


def unhidden(
    mask: Array | None, query_segments: Array | None, key_segments: Array | None
) -> Array | None:
    """The dense mask of a tile, narrowed to pairs of one segment; None where nothing is hidden.

    Args:
      mask: [B|1, K|1, G|1, T|1, S|1].
      query_segments, key_segments: of the tile, [B, T] and [B, S].
    """
    if query_segments is None or key_segments is None:
        return mask
    rows, cols = query_segments[:, None, None, :, None], key_segments[:, None, None, None]
    return rows == cols if mask is None else mask & (rows == cols)


def visited(
    extras: Extras, place: Place, keys: int, *, causal: bool, window: Window | None
) -> Array | None:
    """True for rows [B|1, 1, 1, T, 1] that may see a key of this step by position alone.

    A step that lies wholly above the diagonal, outside the window or beyond the lengths does not
    exist for a row: whether a tile happens to contain it must not matter. A dense mask and segments
    have no such structure, so a step that they mask wholly is taken. None where every row may see
    some key.

    Args:
      extras: for the lengths and the rows' offset.
      place: the tile, whose columns may reach beyond the keys.
      keys: how many keys there are.
      causal: whether the diagonal counts, see `RowMax.visits_above_diagonal`.
      window: see `Spec`.
    """
    last = None if window is None else jnp.minimum(place.cols[:, -1:], keys - 1)
    first = Place(place.rows, place.cols[:, :1])
    return _of_every_head(extras, first, causal=causal, window=window, last=last)


def _of_every_head(
    extras: Extras,
    place: Place,
    *,
    causal: bool,
    window: Window | None,
    last: Array | None = None,
) -> Array | None:
    rows, cols = (x[None, None, None] for x in (place.rows, place.cols))
    keys, queries, offset = (
        None if x is None else x.reshape(-1, 1, 1, 1, 1)
        for x in (extras.key_lengths, extras.query_lengths, extras.query_offset)
    )
    last = None if last is None else last[None, None, None]
    given = {"keys": keys, "queries": queries, "offset": offset}
    return by_position(Place(rows, cols), causal=causal, window=window, last=last, **given)


def by_position(
    place: Place,
    *,
    causal: bool,
    window: Window | None = None,
    last: Array | int | None = None,
    limit: Array | int | None = None,
    keys: Array | None = None,
    queries: Array | None = None,
    offset: Array | None = None,
) -> Array | None:
    """True where a row may see a column by position alone; None where all may.

    Args:
      place: the tile.
      causal: whether the diagonal counts.
      window: see `Spec`.
      last: the column is the first of a step that ends with this one, and a row may see one of
        them. Without a window the first decides.
      limit: how many columns there are, None: as many as the tile's.
      keys, queries: how many columns and rows are valid, None: all.
      offset: the column at which row 0 stands, None: 0.
    """
    parts = []
    at = place.rows if offset is None else place.rows + offset
    if limit is not None:
        parts.append(place.cols < limit)
    if causal:
        parts.append(place.cols <= at)
    if window is not None:
        left, right = window
        if not causal:  # the diagonal is nearer
            parts.append(place.cols <= at + right)
        nearest = place.cols if last is None else last
        if last is not None:
            for end in (x for x in (limit, keys) if x is not None):
                nearest = jnp.minimum(nearest, end - 1)
        parts.append(nearest >= at - left)
    if keys is not None:
        parts.append(place.cols < keys)
    if queries is not None:
        parts.append(place.rows < queries)
    return functools.reduce(jnp.logical_and, parts) if parts else None


def mask_scores(s: Array, seen: Array | None, masked: float = MASKED) -> Array:
    """Scores with `masked` where `seen` is False; unchanged where `seen` is None."""
    return s if seen is None else jnp.where(seen, s, jnp.float32(masked))
