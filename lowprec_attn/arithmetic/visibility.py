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
    """True where a row may see a column, broadcastable to the scores; None if all pairs are seen.

    Args:
      extras: optional arrays of the call; the lengths and `query_offset` are read.
      spec: static part of the call; causality and the window are read.
      place: the tile.
      mask: the result of `unhidden` for this tile, [B|1, K|1, G|1, T|1, S|1].
    """
    positions = _of_every_head(extras, place, causal=spec.is_causal, window=spec.window)
    if mask is None or positions is None:
        return positions if mask is None else mask
    return mask & positions


def unhidden(
    mask: Array | None, query_segments: Array | None, key_segments: Array | None
) -> Array | None:
    """The dense mask of a tile, narrowed to pairs of one segment; None if nothing is hidden.

    Args:
      mask: the dense mask [B|1, K|1, G|1, T|1, S|1], or None.
      query_segments, key_segments: segment ids of the tile, [B, T] and [B, S], or None.
    """
    if query_segments is None or key_segments is None:
        return mask
    rows, cols = query_segments[:, None, None, :, None], key_segments[:, None, None, None]
    return rows == cols if mask is None else mask & (rows == cols)


def visited(
    extras: Extras, place: Place, keys: int, *, causal: bool, window: Window | None
) -> Array | None:
    """True for rows [B|1, 1, 1, T, 1] that may see a key of this step by position alone.

    For a row, a step that lies wholly above the diagonal, outside the window or beyond the lengths
    does not exist, so results do not depend on whether a tile happens to contain that step. A dense
    mask and segments have no such structure, so a step that they mask wholly is still taken.

    Args:
      extras: optional arrays of the call; the lengths and `query_offset` are read.
      place: the tile, whose columns may reach beyond the keys.
      keys: the number of keys.
      causal: whether the causal diagonal applies, see `RowMax.visits_above_diagonal`.
      window: see `Spec`.

    Returns:
      The rows, or None if every row may see some key.
    """
    last = None if window is None else jnp.minimum(place.cols[:, -1:], keys - 1)
    first = Place(place.rows, place.cols[:, :1])
    return _of_every_head(extras, first, causal=causal, window=window, last=last)


def _of_every_head(
    extras: Extras, place: Place, *, causal: bool, window: Window | None, last: Array | None = None
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
    """True where a row may see a column by position alone; None if all pairs are seen.

    Args:
      place: the tile.
      causal: whether the causal diagonal applies.
      window: see `Spec`.
      last: None, or the last column of a step of which `place` has the first column. The answer
        is then whether a row may see any column of the step. It differs from the answer for the
        first column only with a window.
      limit: the number of columns that exist; None if all columns of the tile exist.
      keys, queries: the number of valid columns and rows; None if all are valid.
      offset: the column at which row 0 stands; None for 0.
    """
    parts = []
    at = place.rows if offset is None else place.rows + offset
    if limit is not None:
        parts.append(place.cols < limit)
    if causal:
        parts.append(place.cols <= at)
    if window is not None:
        left, right = window
        if not causal:  # otherwise the diagonal is the tighter bound on the right
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
    """Replaces scores by `masked` where `seen` is False; changes nothing if `seen` is None."""
    return s if seen is None else jnp.where(seen, s, jnp.float32(masked))
