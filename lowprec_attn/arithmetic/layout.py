"""Groups the arrays of a call by key head, as the arithmetic takes them, and ungroups results.

There are K key heads, with G = N / K query heads each:

  q                [B, K, G, T, H]
  k                [B, K, S, H]
  v; dO, O         [B, K, S, V]; [B, K, G, T, V], where V may be another head size than H
  scores           [B, K, G, T, S]
  row statistics   [B, K, G, T, 1]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.recurrence import RowStatistics
from lowprec_attn.arithmetic.request import Extras


class Grouped(NamedTuple):
    """The arrays of a call grouped by key head."""

    q: Array
    k: Array
    v: Array
    extras: Extras


class Residuals(NamedTuple):
    """The residuals of the forward pass: the inputs, row statistics, and O_saved if δ needs it.

    The statistics are [..., T, 1] in `dense` and `tiled`, and [..., T] in kernels. If O_saved is
    kept in two halves, `o_low` is the lower half.
    """

    inputs: Grouped
    o_saved: Array | None
    statistics: RowStatistics
    o_low: Array | None = None


def group(q: Array, k: Array, v: Array, extras: Extras) -> Grouped:
    """Groups arrays [B, T, N, H] by key head, see the module.

    Mask and bias become [B|1, K|1, G|1, T, S], sinks [1, K, G, 1, 1], and row sums
    [B, K, G, T, 1].
    """
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    bias, mask = (x if x is None else _group_pairs(x, kv_heads) for x in (extras.bias, extras.mask))
    sinks = extras.sinks
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, n // kv_heads, 1, 1)
    by_group = (b, t, kv_heads, n // kv_heads, 1)
    row_sums = jax.tree.map(
        lambda x: x.reshape(by_group).transpose(0, 2, 3, 1, 4), extras.backward_sums
    )
    changed = {"bias": bias, "mask": mask, "sinks": sinks, "backward_sums": row_sums}
    return Grouped(q, k, v, extras._replace(**changed))


def _group_pairs(x: Array, kv_heads: int) -> Array:
    b, n, t, s = x.shape
    return x.reshape(b, 1, 1, t, s) if n == 1 else x.reshape(b, kv_heads, n // kv_heads, t, s)


def ungroup(o: Array, *of_rows: Array) -> tuple[Array, ...]:
    """Reshapes O to [B, T, N, H], and row statistics such as lse to [B, T, N]."""
    b, k, g, t, h = o.shape
    o = o.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)
    return o, *(x.reshape(b, k * g, t).transpose(0, 2, 1) for x in of_rows)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes along which an array of `shape` was broadcast to x."""
    lengths = enumerate(zip(x.shape, shape, strict=True))
    axes = tuple(i for i, (a, b) in lengths if b == 1 and a != 1)
    return jnp.sum(x, axis=axes, keepdims=True)
