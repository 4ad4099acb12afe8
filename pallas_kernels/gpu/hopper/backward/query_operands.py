"""What the kernels of dQ share: their arrays, their memory, and the numbers of 64 rows."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
    load,
)
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class Inputs(NamedTuple):
    """q, k, v (or one packed array each), dO and the O that δ sees; two offsets [B, N, T].

    `offset`, of `vector_rows`, is −lse·log2(e): what the exponent of P adds. `dlse` is the gradient
    of lse, which enters dS = P ∘ (dP − δ + dlse) beside δ.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    o: Any
    offset: Any
    dlse: Any


class Shared(NamedTuple):
    """Shared memory: a pipeline of q, dO and (unless `is_wide`) O; pipelines of k and v; δ; P and
    dS where they are kept there; P on its way from one warpgroup to another."""

    rows: Any
    k: Any
    v: Any
    delta: Any
    operand: Any
    probs: Any


Q, DO, O = range(3)  # buffers of the pipeline of rows, in which they are loaded


def of_rows(vectors: Any, work: WorkTile, row: Array) -> Array:
    """The numbers [64] of the rows from `row` on; beyond the last row those of the last ones."""
    inside = pl.ds(jnp.minimum(row, vectors.shape[-1] - ROWS), ROWS)
    return load(vectors.at[work.batch, work.head, inside], PER_ROW, straight=False)


def delta(
    o: Any, rows: Any, tiles: Array, me: Array | int, work: WorkTile, row: Array, problem: Problem
) -> Array:
    """δ [64] of rows that have come as filling `tiles` of their pipeline, at the place `me`."""
    if problem.is_wide:
        first = jnp.minimum(row, problem.rows - ROWS)
        part = problem.part(o, work.batch, first, ROWS, work.head)
        return _delta_of_pieces(part, rows.get(tiles, me, buffer=DO))
    of_o, of_do = (
        load(rows.get(tiles, me, buffer=buffer), TILE).astype(jnp.float32) for buffer in (O, DO)
    )
    return by_lane(jnp.add, of_o * of_do).sum(axis=1)


def _delta_of_pieces(o: Any, do: Any) -> Array:
    """δ [64] of O in global and dO in shared memory, of which registers have no room for all."""
    total = constant((ROWS, LANES), 0, TILE)
    for column in range(0, do.shape[1], ROWS):
        piece = (slice(None), pl.ds(column, ROWS))
        of_o, of_do = load(o.at[piece], TILE, straight=False), load(do.at[piece], TILE)
        total = total + by_lane(jnp.add, of_o.astype(jnp.float32) * of_do.astype(jnp.float32))
    return total.sum(axis=1)


def probs(
    s: Array, offset: Array, row: Array, t: Array, full: Array, step: int, problem: Problem
) -> Array:
    """P, not rounded, of q kᵀ [64, step] of step t; those before `full` take no mask.

    offset: what the exponent adds [64].
    """
    log2_p = problem.rounded(s) * np.float32(problem.log2_unit) + along_rows(offset, s.shape)
    if problem.masks_steps(step):
        mask = partial(problem.mask_keys, log2_p, row, t * step)
        log2_p = lax.cond(t >= full, mask, lambda: log2_p)
    return jnp.exp2(log2_p)
