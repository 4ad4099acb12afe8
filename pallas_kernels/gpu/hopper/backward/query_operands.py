"""What the kernels of dQ share: their arrays, their memory, and the numbers of 64 rows."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
    load,
)
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class QueryInputs(NamedTuple):
    """q, k, v (or one packed array each), dO and the O that δ sees; two offsets [B, N, T].

    `offset`, of `vector_rows`, is −lse·log2(e): what the exponent of P adds. `dlse` is the gradient
    of lse, which enters dS = P ∘ (dP − δ + dlse) beside δ.
    """

    q: Ref
    k: Ref
    v: Ref
    do: Ref
    o: Ref
    offset: Ref
    dlse: Ref


class Gradients(NamedTuple):
    """dQ [B, T, N, H], or the packed array's gradient; what dS adds to dP [B, N, `vector_rows`]."""

    dq: Ref
    dp_offset: Ref


class QueryMemory(NamedTuple):
    """Shared memory.

    Attributes:
      rows: the pipeline of q, through which dQ leaves, dO and (unless `is_wide`) O: its buffers.
      k, v: pipelines, which may differ in their stages.
      delta: what dS adds to dP, on its way out, for every consumer.
      operand: P and dS of every consumer, where products take them from memory (`from_memory`).
      probs: P on its way from one consumer to the other, if they are `cooperative`.
    """

    rows: Pipeline
    k: Pipeline
    v: Pipeline
    delta: Ref
    operand: Ref | None
    probs: Exchange


Q, DO, O = range(3)  # buffers of the pipeline of rows, in which they are loaded


def of_rows(vectors: Ref, work: WorkTile, row: Array) -> Array:
    """The numbers [64] of the rows from `row` on; beyond the last row those of the last ones."""
    inside = pl.ds(jnp.minimum(row, vectors.shape[-1] - ROWS), ROWS)
    return load(vectors.at[work.batch, work.head, inside], PER_ROW, straight=False)


def delta(
    o: Ref,
    rows: Pipeline,
    tiles: Array,
    me: Array | int,
    work: WorkTile,
    row: Array,
    problem: Problem,
) -> Array:
    """δ [64] of rows that have come as filling `tiles` of their pipeline, at the place `me`."""
    if problem.is_wide:
        first = jnp.minimum(row, problem.rows - ROWS)
        part = problem.part(o, work.batch, first, ROWS, work.head)
        return _delta_of_pieces(part, rows.get(tiles, me, buffer=DO))
    # Products of float32, as `lowprec_attn.arithmetic.backward` has them.
    of_o, of_do = (
        load(rows.get(tiles, me, buffer=buffer), TILE).astype(jnp.float32) for buffer in (O, DO)
    )
    return by_lane(jnp.add, of_o * of_do).sum(axis=1)


def _delta_of_pieces(o: Ref, do: Ref) -> Array:
    """δ [64] of O in global and dO in shared memory, of which registers have no room for all."""
    # O straight from global memory, where the four threads of a row read 32 bytes together.
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
    # P from lse, as in FlashAttention-2's Algorithm 2: no maximum is looked for again.
    log2_p = problem.rounded(s) * np.float32(problem.log2_unit) + along_rows(offset, s.shape)
    if problem.masks_steps(step):
        mask = partial(problem.mask_keys, log2_p, row, t * step)
        log2_p = lax.cond(t >= full, mask, lambda: log2_p)
    return jnp.exp2(log2_p)
