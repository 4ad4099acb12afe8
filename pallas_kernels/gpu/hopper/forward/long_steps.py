"""The mainloop over steps of more keys than registers have room for: the 512 of `published`.

There a step is what rounds: S, dP, P̄V of a step, the last l, and what a tile of as many queries by
as many keys adds to a gradient. Kernels take a long step in parts, the `step` of their tiles.

Forward, the maximum of a row has to be known before the first P̄, and S of 64 rows by 512 keys has
256 registers in a thread. So it is multiplied twice, part by part: for the maximum, and for P̄. That
is three products for two, and k is loaded twice, the second time from the L2 cache.
"""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax
from pallas_kernels.gpu.hopper.block_sizes import ROWS, ForwardTile
from pallas_kernels.gpu.hopper.forward.operands import QueryRows, Running
from pallas_kernels.gpu.hopper.forward.softmax import exponentials, masked, no_key_yet, offset
from pallas_kernels.gpu.hopper.machine.instruction_order import finish_before_waiting
from pallas_kernels.gpu.hopper.machine.instructions import ONE, at_least
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
)
from pallas_kernels.gpu.hopper.machine.types import Accumulator, Ref
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator, as_operand, begin_product

# Ō, and the rest.
_Carry = tuple[Array, Running]


def mainloop(rows: QueryRows) -> _Carry:
    """Ō, m, l and the largest score after the last step."""
    problem = rows.problem
    begin, end = problem.long_steps(rows.tile.step, rows.end)
    none = constant((ROWS, problem.head_size), 0, TILE), no_key_yet(problem, has_sinks=False)
    acc, running = lax.fori_loop(begin, end, partial(_long_step, rows=rows), none)
    return acc, running


def _long_step(i: Array, carry: _Carry, *, rows: QueryRows) -> _Carry:
    acc, (m, l, max_logit) = carry
    problem = rows.problem
    first, last = problem.parts_of_long_step(i, rows.tile.step, rows.end)
    # k comes twice: part t as filling n + t, and again as n + (last − first) + t.
    n = 2 * (rows.steps + first) - first
    r_m, ties = _maxima(first, last, n, rows)

    def is_repeated(*_: object) -> Array:
        assert ties is not None  # the standard rule does not ask
        return ties != ONE

    new = problem.spec.row_max.running_max(
        r_m, r_m, m, unit=problem.spec.scale, is_repeated=is_repeated
    )
    alpha = jnp.exp2((m - new) * np.float32(problem.log2_unit))

    def values(pv: Accumulator) -> tuple[Array, Array]:
        total = along_rows(alpha, l.shape) * l

        def add_part(t: Array, l: Array) -> Array:
            return _add_part(pv, t, l, new, n + (last - first) + t, rows)

        total = lax.fori_loop(first, last, add_part, total)
        return total, plgpu.wgmma_accumulator_load(pv, wait_n=None)

    # A sum of its own for each long step: it is rounded before it is added to Ō.
    l, pv = pl.run_scoped(values, accumulator(ROWS, problem.head_size))
    acc = along_rows(alpha, acc.shape) * acc + problem.rounded(pv)
    if max_logit is not None:
        max_logit = jnp.maximum(max_logit, r_m)
    return acc, Running(new, l, max_logit)


def _maxima(first: Array, last: Array, n: Array, rows: QueryRows) -> tuple[Array, Array | None]:
    """The maxima of parts first ... last − 1, [64], and, where ties count, how many have them."""
    if isinstance(rows.problem.spec.row_max, DynamicMax):
        none = constant((ROWS,), MASKED, PER_ROW)
        none_yet = none, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.int32), PER_ROW)
        step = partial(_larger_and_ties, n=n, rows=rows)
        r_m, ties = lax.fori_loop(first, last, step, none_yet)
        return r_m, ties
    none = constant((ROWS, LANES), MASKED, TILE)
    return lax.fori_loop(first, last, partial(_larger, n=n, rows=rows), none).max(axis=1), None


def _larger(t: Array, r: Array, *, n: Array, rows: QueryRows) -> Array:
    for i, s in enumerate(_scores(t, n + t, rows)):
        r = jnp.maximum(r, by_lane(jnp.maximum, s))
        _before_next_piece(i, jnp.abs(r), rows)
    return r


def _larger_and_ties(
    t: Array, carry: tuple[Array, Array], *, n: Array, rows: QueryRows
) -> tuple[Array, Array]:
    r, ties = carry
    interpret = rows.problem.sizes.interpret
    for s in _scores(t, n + t, rows):
        of_piece = by_lane(jnp.maximum, s).max(axis=1)
        new = jnp.maximum(r, of_piece)
        near = at_least(s, along_rows(new, s.shape), interpret=interpret)
        ties = jnp.where(of_piece > r, np.int32(0), ties)  # a new maximum begins the count anew
        r, ties = new, ties + by_lane(jnp.add, near).sum(axis=1)
    return r, ties


def _add_part(pv: Accumulator, t: Array, l: Array, m: Array, of_k: Array, rows: QueryRows) -> Array:
    """l with part t; its P̄V is added to `pv`. of_k: the filling of k's pipeline."""
    problem, shared = rows.problem, rows.shared
    memory = None if shared.probs is None else shared.probs.at[rows.me]
    pieces = _pieces(rows.tile)
    keys = rows.tile.step // pieces
    found = []
    for i, s in enumerate(_scores(t, of_k, rows)):
        found.append(exponentials(s, along_rows(offset(m, problem), s.shape), problem))
        if i < pieces - 1:  # the last piece's sum hides its P̄V, below
            l = l + by_lane(jnp.add, found[-1])
        _before_next_piece(i, l, rows)
    of_v = rows.steps + t
    shared.v.consumer_wait(of_v)
    for i, probs in enumerate(found):
        place = None if memory is None else memory.at[:, pl.ds(i * keys, keys)]
        values = _piece(shared.v.get(of_v), i, rows.tile)
        plgpu.wgmma(pv, as_operand(probs.astype(problem.dtype), place), values)
    l = l + by_lane(jnp.add, found[-1])  # meanwhile
    plgpu.wgmma_wait(0)
    shared.v.consumer_release(of_v)
    return l


def _pieces(tile: ForwardTile) -> int:
    """Pieces of a part whose products are started apart."""
    return 2 if tile.halved else 1


def _piece(ref: Ref, i: int, tile: ForwardTile) -> Ref:
    """The i-th piece of a part of k or v."""
    keys = tile.step // _pieces(tile)
    return ref.at[pl.ds(i * keys, keys)] if tile.halved else ref


def _scores(t: Array, n: Array, rows: QueryRows) -> Iterator[Array]:
    """S of a part, rounded, piece by piece, from the n-th filling of k's pipeline.

    All of them are begun at first: a piece is multiplied while the one before is looked at.
    """
    shared, tile, problem = rows.shared, rows.tile, rows.problem
    pieces, interpret = _pieces(tile), problem.sizes.interpret
    shared.k.consumer_wait(n)
    q, k = shared.q.get(rows.tiles, rows.me), shared.k.get(n)
    begun = [begin_product(q, _piece(k, i, tile), interpret=interpret) for i in range(pieces)]
    for i, s in enumerate(begun):
        plgpu.wgmma_wait(pieces - 1 - i)
        if i == pieces - 1:  # not sooner: products still read k
            shared.k.consumer_release(n)
        yield masked(problem.rounded(s), rows, t, i * (tile.step // pieces))


def _before_next_piece(i: int, x: Array, rows: QueryRows) -> None:
    """x ≥ 0, of the i-th piece, is computed before the next one is waited for."""
    if i < _pieces(rows.tile) - 1 and not rows.problem.sizes.interpret:
        finish_before_waiting(x)
