"""The forward kernel: O, lse and the O that δ reads.

A program owns a tile of query rows and loops over the key tiles that they may see. An
online-softmax step (FlashAttention-2, arXiv 2307.08691, Algorithm 1) takes one tile or several.
Tiles above the causal diagonal are neither computed nor loaded. Without a window, segments or a
dense mask, a tile is masked only if the diagonal, a length or the end of the keys cuts it. The
arithmetic is that of `lowprec_attn.arithmetic.softmax`, point by point.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.powers import LN2
from lowprec_attn.arithmetic.recurrence import (
    SoftmaxState,
    divisor,
    divisor_of_o,
    keep_unvisited,
    log_sum_exp,
    m_and_inverse_l,
)
from lowprec_attn.numerics import MASKED, get_rounding
from pallas_kernels.gpu.instructions import anew
from pallas_kernels.gpu.problem import Problem, call, whole
from pallas_kernels.gpu.products import Rounder
from pallas_kernels.gpu.query_rows import QueryRows
from pallas_kernels.gpu.softmax import (
    initial_state,
    step_above_diagonal,
    step_of_one_tile,
    step_of_tiles,
)
from pallas_kernels.problem import Outputs
from pallas_kernels.scalars import Scalars

_BFLOAT16 = get_rounding("bfloat16")


def forward(q: Array, k: Array, v: Array, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the forward kernel. If q, k and v are packed, each of them is the whole array."""
    n = problem.spec.numerics
    lse, statistics = problem.tile_statistics
    shape = (problem.batch, problem.rows, problem.heads, problem.value_size)
    o = jax.ShapeDtypeStruct(shape, n.output_dtype(problem.dtype))
    saved = None if n.saved_dtype is None else jax.ShapeDtypeStruct(shape, n.saved_dtype)
    out = Outputs.of(o, lse, saved, problem.spec)
    rows = problem.head_rows(values=True)
    out_specs = Outputs.of(rows, statistics, None if saved is None else rows, problem.spec)
    specs = ((problem.head_rows(0), *problem.head_keys, jax.tree.map(whole, scalars)), out_specs)
    return Outputs(*call(_forward, problem, problem.query_grid, specs, out)(q, k, v, scalars))


def _forward(
    q_ref: Any, k_ref: Any, v_ref: Any, scalars: Scalars, *out: Any, problem: Problem
) -> None:
    i, head, batch = problem.query_tile(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    start = i * problem.tile.query
    q = problem.load_rows(q_ref, start, valid=problem.rows)
    round_point = problem.rounder(scalars, batch, head)
    queries = QueryRows(problem, scalars, batch, head, i, q, k_ref, v_ref, round_point)
    take_step = step_of_one_tile if problem.tiles_per_step == 1 else step_of_tiles

    def step(t: Array, state: SoftmaxState, *, masked: bool) -> SoftmaxState:
        new = take_step(state, t, queries, masked=masked)
        if not masked or problem.masked_step_changes_nothing:
            return new
        return keep_unvisited(new, state, queries.visits(t))

    begin, full, end = problem.key_range(i, batch, scalars, size=problem.step)
    sink = None if scalars.start is None else tuple(x[head] for x in scalars.start)
    state = initial_state(problem, sink)
    several = problem.tiles_per_step > 1
    if several and problem.has_masked_tiles and problem.masked_step_changes_nothing:
        # A step of several tiles decides by itself which of them to mask, so one loop takes all
        # steps.
        full = begin
    elif not problem.masks_every_tile:
        state = lax.fori_loop(0, full, partial(step, masked=False), state)
    # The end of the keys may cut a step without cutting any of its tiles.
    if problem.has_masked_tiles or problem.keys % problem.step != 0:
        state = lax.fori_loop(full, end, partial(step, masked=True), state)
    if problem.visits_above_diagonal:
        every = problem.key_range(i, batch, scalars, size=problem.step, causal=False)
        state = lax.fori_loop(end, every.end, partial(step_above_diagonal, queries=queries), state)
    if several:
        # Otherwise the addresses of q, which O shares, would stay in registers in the mainloop.
        start = anew(start, interpret=problem.interpret)
    exists = problem.exists(start, batch, scalars) if scalars.start is not None else None
    _epilogue(state, problem, round_point, start, Outputs(*out), exists)


def _epilogue(
    state: SoftmaxState,
    problem: Problem,
    round_point: Rounder,
    start: Array,
    out: Outputs,
    exists: Array | None,
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0, and lse = −inf or its sink.

    exists: with sinks, which rows lie within the lengths; None if all do.
    """
    place = problem.features(start, problem.tile.query, values=True)
    one = partial(jnp.max, axis=-1, keepdims=True)  # takes one of equal copies
    m = one(state.m)
    l = jnp.sum(state.l, axis=-1, keepdims=True) if problem.keeps_partial_sums else one(state.l)
    empty = m <= MASKED
    unrounded_l, l = l, divisor(l, empty, round_point, place)
    of_o = divisor_of_o(unrounded_l, l, empty, place.rows, problem.spec.numerics)
    unrounded = state.acc / of_o  # O = Ō / l
    o = round_point(unrounded, "output", place)
    problem.store_rows(out.o, o, start)
    if state.aux is not None:  # O′ = Ō′ / l
        problem.store_rows(out.saved, round_point.nearest(state.aux / of_o, _BFLOAT16), start)
    elif out.saved is not None:
        halves = problem.spec.numerics.saved_output == "halves"
        saved = round_point.nearest(unrounded - o, _BFLOAT16) if halves else unrounded
        problem.store_rows(out.saved, saved, start)

    if out.apart is not None:
        for ref, x in zip(out.apart, m_and_inverse_l(m, l, empty), strict=True):
            problem.store_statistics(ref, x[:, 0], start)
    if out.max_logit is not None:
        largest = m if state.max_logit is None else one(state.max_logit)
        largest = jnp.where(largest <= MASKED, -jnp.inf, largest * np.float32(problem.score_unit))
        problem.store_statistics(out.max_logit, largest[:, 0], start)
    # lse = m + log l, with m in units of S
    m = m * np.float32(LN2 if problem.whole_max else problem.score_unit)
    lse = log_sum_exp(m, l, empty, round_point, place)
    if exists is not None:
        lse = jnp.where(exists, lse, -jnp.inf)
    problem.store_statistics(out.lse, lse[:, 0], start)
