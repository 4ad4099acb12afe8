"""Keeps the values of rows that see no key, and of keys that no row sees, out of all results.

A product with 0 does not hide NaN or infinity. The plain implementations drop hidden pairs one by
one (`products.seen_dot`). A kernel instead receives arrays with zeros in the queries that see no
key and in the keys that no query sees, or reads zeros there (`pallas_kernels.gpu.hopper.ends`). A
key that some row of its head sees stays as it is for all rows. Where rows share a scale, an
infinity in one of them would set the scale of the others, so the plain implementations receive
arrays with zeros in place of hidden infinities.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic import visibility
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.request import Extras, Spec

_FAR = 2**30  # longer than any array


class Seen(NamedTuple):
    """True for rows [B|1, T, N|1] that see a key, and for keys [B|1, S, K|1] that a row sees."""

    rows: Array
    keys: Array

    def clean(self, arrays: tuple[Array, ...], *, keep_finite: bool = False) -> tuple[Array, ...]:
        """Returns the arrays with zeros in rows that see no key and keys that no row sees.

        Args:
          arrays: q, k and v, or one array that packs them.
          keep_finite: whether only NaN and infinities are replaced.
        """
        sides: tuple[Array, ...] = (self.rows, self.keys, self.keys)
        if len(arrays) == 1:
            sides = (jnp.stack(jnp.broadcast_arrays(*sides), axis=2),)
        return tuple(
            jnp.where(
                side[..., None] | jnp.isfinite(x) if keep_finite else side[..., None],
                x,
                jnp.zeros_like(x),
            )
            for side, x in zip(sides, arrays, strict=True)
        )

    def without_gradient(self, x: Array) -> Array:
        """Returns O [B, T, N, H] or lse [B, T, N] without a gradient in rows that see no key."""
        rows = self.rows if x.ndim == 3 else self.rows[..., None]
        return jnp.where(rows, x, lax.stop_gradient(x))


def seen_by_any(
    extras: Extras, spec: Spec, q: Array, k: Array, *, ends_at_lengths: bool
) -> Seen | None:
    """Finds the rows that see a key and the keys that a row sees; None if nothing is to be hidden.

    Args:
      extras, spec: the call.
      q, k: arrays [B, T, N, H] and [B, S, K, H], used for their shapes.
      ends_at_lengths: whether the implementation loads nothing beyond the lengths. Without a mask,
        segments or a window nothing else needs to be hidden then.
    """
    rows, keys = q.shape[1], k.shape[1]
    has_lengths = extras.query_lengths is not None or extras.key_lengths is not None
    if extras.query_offset is not None:
        return _in_pairs(extras, spec, q, k)
    if extras.mask is not None or extras.query_segments is not None:
        if extras.mask is None and not has_lengths and spec.shares_segments:
            return None  # a row sees the key with its own index, which no window hides
        return _in_pairs(extras, spec, q, k)
    if has_lengths and ends_at_lengths and spec.window is None:
        return None
    left, right = _reach(spec)
    if not has_lengths and rows <= keys + left and keys <= rows + right:
        return None
    return _by_position(extras, spec, rows, keys)


def _reach(spec: Spec) -> tuple[int, int]:
    """How far a row sees to the left and to the right."""
    left, right = (_FAR, _FAR) if spec.window is None else spec.window
    return left, min(right, 0) if spec.is_causal else right


def lengths_alone_hide(extras: Extras) -> bool:
    """Whether a call has lengths, and neither a mask nor segments.

    What nothing sees then comes last, see `ends_by_position`.
    """
    has_lengths = extras.query_lengths is not None or extras.key_lengths is not None
    return has_lengths and extras.mask is None and extras.query_segments is None


def ends_by_position(extras: Extras, spec: Spec, rows: int, keys: int) -> tuple[Array, Array]:
    """How many rows see a key, and how many keys a row sees, by position and lengths: [B] or [].

    These rows and keys come first, and the others last. A number may be negative, for none.
    """
    left, right = _reach(spec)
    of_rows, of_keys = (
        jnp.int32(size) if lengths is None else lengths
        for lengths, size in ((extras.query_lengths, rows), (extras.key_lengths, keys))
    )
    return (
        jnp.where(of_keys > 0, jnp.minimum(of_rows, of_keys + left), 0),
        jnp.where(of_rows > 0, jnp.minimum(of_keys, of_rows + right), 0),
    )


def _by_position(extras: Extras, spec: Spec, rows: int, keys: int) -> Seen:
    """Finds what is seen from positions and lengths alone."""
    ends = ends_by_position(extras, spec, rows, keys)
    of_rows, of_keys = (
        span(0, size)[None] < jnp.reshape(end, (-1, 1))
        for size, end in zip((rows, keys), ends, strict=True)
    )
    return Seen(of_rows[..., None], of_keys[..., None])


def _in_pairs(extras: Extras, spec: Spec, q: Array, k: Array) -> Seen:
    """Finds what is seen pair by pair, in reductions for which XLA need not store the pairs."""
    rows, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    place = Place(span(0, rows)[:, None], span(0, keys)[None])
    mask = None if extras.mask is None else extras.mask[:, None]
    mask = visibility.unhidden(mask, extras.query_segments, extras.key_segments)
    seen = visibility.visible(extras, spec, place, mask)
    assert seen is not None  # there is a mask, or positions that matter
    seen = seen[:, 0]  # [B|1, N|1, T|1, S|1]
    sees = jnp.broadcast_to(jnp.any(seen, axis=3), (*seen.shape[:2], rows))
    by_head = jnp.broadcast_to(jnp.any(seen, axis=2), (*seen.shape[:2], keys))
    if by_head.shape[1] > 1:
        by_head = by_head.reshape(len(by_head), kv_heads, -1, keys).any(axis=2)
    return Seen(sees.swapaxes(1, 2), by_head.swapaxes(1, 2))
