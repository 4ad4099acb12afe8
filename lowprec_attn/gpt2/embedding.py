"""Embedding lookup whose gradient has the same bits on every run.

The gradient of a lookup adds the rows of equal tokens. On a GPU the order of a plain scatter-add
is that in which its atomic operations arrive. XLA's deterministic form of it took a sixth of a
training step. Here tokens are sorted, and small matrix products sum equal neighbours: first within
blocks, then over blocks. Each sum is written once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Rows of a block. The products cost 2·n·d·(block + n/block²) operations in float32, which tensor
# cores do not take.
_BLOCK = 64
# Turns of the loop over the batch that are written out, which makes it one kernel. For a plain sum
# XLA's GPU compiler would lay the residual stream out with the batch last.
_UNROLLED = 64


@jax.custom_vjp
def embed(
    table: Float[Array, "V d"], positions: Float[Array, "C d"], ids: Int[Array, "B T"]
) -> Float[Array, "B T d"]:
    """table[ids] + positions[:T], for ids below V and T <= C.

    Gradients are float32 sums in an order of their own, the same on every run.
    """
    return table[ids] + positions[None, : ids.shape[1]]


def _forward(
    table: Array, positions: Array, ids: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return embed(table, positions, ids), (table, positions, ids)


def _backward(residuals: tuple[Array, Array, Array], d_out: Array) -> tuple[Array, Array, None]:
    table, positions, ids = residuals
    d_out = d_out.astype(jnp.float32)
    d_table = sum_by_id(d_out.reshape(-1, d_out.shape[-1]), ids.reshape(-1), table.shape[0])
    summed, _ = lax.scan(
        lambda total, x: (total + x, None), jnp.zeros_like(d_out[0]), d_out, unroll=_UNROLLED
    )
    d_positions = jnp.pad(summed, ((0, len(positions) - len(summed)), (0, 0)))
    return d_table.astype(table.dtype), d_positions.astype(positions.dtype), None


embed.defvjp(_forward, _backward)


def sum_by_id(
    rows: Float[Array, "n d"], ids: Int[Array, " n"], size: int
) -> Float[Array, "size d"]:
    """Row i of the result is the float32 sum of all rows whose id is i."""
    count = len(ids)
    padding = -count % _BLOCK
    order = jnp.argsort(jnp.pad(ids, (0, padding), constant_values=size))
    sorted_ids = jnp.pad(ids, (0, padding), constant_values=size)[order]
    # The padding has an id beyond the table, so that its row is never written.
    values = rows.astype(jnp.float32)[jnp.minimum(order, count - 1)]
    blocks = sorted_ids.reshape(-1, _BLOCK)

    same = blocks[:, :, None] == blocks[:, None, :]
    sums = _product("bij,bjd->bid", same, values.reshape(*blocks.shape, -1))
    # An id may run on into later blocks. They begin with it, so their first row is their sum of it.
    first, last = blocks[:, 0], blocks[:, -1]
    index = jnp.arange(len(blocks), dtype=jnp.int32)
    runs_on = (last[:, None] == first[None]) & (index[:, None] < index[None])
    later = _product("bc,cd->bd", runs_on, sums[:, 0])
    sums += jnp.where((blocks == last[:, None])[..., None], later[:, None], 0)

    position = jnp.arange(len(sorted_ids), dtype=jnp.int32)
    is_first = (position == 0) | (sorted_ids != jnp.roll(sorted_ids, 1))
    # Rows that are not written get distinct places beyond the table, so that each place is unique.
    place = jnp.where(is_first & (sorted_ids < size), sorted_ids, size + position)
    result = jnp.zeros((size, rows.shape[-1]), jnp.float32)
    flat = sums.reshape(len(sorted_ids), -1)
    return result.at[place].set(flat, mode="drop", unique_indices=True)


def _product(subscripts: str, ones: Array, values: Array) -> Array:
    """A product with zeros and ones that keeps float32."""
    return jnp.einsum(subscripts, ones.astype(jnp.float32), values, precision=lax.Precision.HIGHEST)
