"""The forward kernel: O, lse and the O that δ reads.

A program owns a tile of query rows. Its key tiles follow in order on the last axis of the grid,
with the running state in scratch memory (FlashAttention-2, arXiv 2307.08691, Algorithm 1). A key
tile holds one or more online-softmax steps. A step longer than a tile takes two passes, first for
its row maximum and then for its products. Tiles above the causal diagonal are neither computed nor
fetched. Without a window, segments or a dense mask, a tile is masked only if the diagonal, a length
or the end of the keys cuts it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.max_logit import is_tracked
from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.recurrence import (
    SoftmaxState,
    divisor,
    divisor_of_o,
    log_sum_exp,
    m_and_inverse_l,
)
from lowprec_attn.numerics import MASKED
from pallas_kernels.problem import Outputs
from pallas_kernels.rounder import BFLOAT16
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu import softmax
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.mainloop import (
    Inputs,
    KeyTiles,
    LongStep,
    Program,
    read,
    take_part,
    take_steps,
)
from pallas_kernels.tpu.problem import (
    Grid,
    Problem,
    call,
    indices,
    lanes,
    pair_specs,
    row_specs,
    to_row,
)
from pallas_kernels.tpu.products import Rounder


def forward(x: Inputs, scalars: Scalars, problem: Problem) -> Outputs:
    """Runs the kernel on q [B, N, T, H], k and v [B, K, S, H], padded to whole tiles."""
    size = problem.tile
    order = KeyTiles.of(problem)

    def key_tile(b: Array, h: Array, i: Array, tile: Array, scalars: Scalars) -> tuple[Any, ...]:
        # A hidden tile maps to the nearest visited one. A block that stays is not fetched again.
        visited = problem.key_range(i, b, scalars)
        return b, lax.div(h, problem.group), visited.clamp(tile), 0

    block = (None, None, size.kv, problem.head_size)
    rows, statistics = row_specs(problem)
    keys = pl.BlockSpec(block, lambda b, h, i, j, x: key_tile(b, h, i, order.tile(j), x))
    values = pl.BlockSpec(block, lambda b, h, i, j, x: key_tile(b, h, i, order.tile_of_v(j), x))

    def tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Array, ...]:
        return b, h, i, problem.key_range(i, b, scalars).clamp(order.tile(j))

    pairs = pair_specs(x.pairs, problem, tile)
    n = problem.spec.numerics
    shape = (problem.batch, problem.heads, problem.padded_rows, problem.head_size)
    o = jax.ShapeDtypeStruct(shape, n.output_dtype(problem.dtype))
    row = jax.ShapeDtypeStruct((problem.batch, problem.heads, 1, problem.padded_rows), jnp.float32)
    saved = None if n.saved_dtype is None else jax.ShapeDtypeStruct(shape, n.saved_dtype)
    out = Outputs.of(o, row, saved, problem.spec)
    per_row, accumulator = (size.query, LANES), (size.query, problem.head_size)
    state = (per_row, per_row, accumulator) + (accumulator,) * problem.keeps_auxiliary
    tracked = (per_row,) * is_tracked(problem.spec, has_sinks=False)
    grid = Grid(
        sizes=(problem.batch, problem.heads, problem.q_tiles, order.programs),
        parallel=3,
        in_specs=(Inputs(rows, keys, values, pairs),),
        out_specs=Outputs.of(rows, statistics, None if saved is None else rows, problem.spec),
        scratch=tracked + state + ((per_row,) * 2 + state) * order.is_long,
    )
    return Outputs(*call(_forward, problem, grid, out)(scalars, x))


def _forward(scalars: Scalars, inputs: Inputs, *refs: Any, problem: Problem) -> None:
    size = len(Outputs._fields)
    out, scratch = Outputs(*refs[:size]), refs[size:]
    max_logit = None
    if is_tracked(problem.spec, has_sinks=False):
        max_logit, scratch = scratch[0], scratch[1:]
    batch, head, i, j = (pl.program_id(axis) for axis in range(4))
    program = Program(problem, scalars, batch, problem.rounder(scalars, batch, head), i, head)
    order = KeyTiles.of(problem)
    size, missing = (4, ()) if problem.keeps_auxiliary else (3, (None,))
    state_ref = SoftmaxState(*scratch[:size], *missing)._replace(max_logit=max_logit)

    @pl.when(j == 0)
    def prologue() -> None:
        state_ref.m[...] = jnp.full_like(state_ref.m, MASKED)
        # l, Ō, Ō′
        for ref in state_ref[1:4]:
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)
        if max_logit is not None:
            max_logit[...] = jnp.full_like(max_logit, MASKED)

    if order.is_long:
        first, second, m, *sums = scratch[size:]
        ref = LongStep(softmax.Largest(first, second), m, softmax.Sums(*sums, *missing))
        take_part(program, inputs, state_ref, ref, j)
    else:
        take_steps(program, inputs, state_ref, j)

    @pl.when(j == order.programs - 1)
    def epilogue() -> None:
        state = read(state_ref)
        limit = None if scalars.query_lengths is None else scalars.query_lengths[batch]
        _epilogue(state, problem, program.round_point, program.rows(), limit, out)


def _epilogue(
    state: SoftmaxState,
    problem: Problem,
    round_point: Rounder,
    rows: Array,
    query_length: Array | None,
    out: Outputs,
) -> None:
    """Divides by l and stores. A row that saw no key has O = 0 and lse = −inf."""
    place = Place(rows, indices(0, problem.head_size, 1))
    empty = state.m <= MASKED
    if query_length is not None:
        empty = empty | (rows >= query_length)
    l = state.l
    if problem.keeps_partial_sums:
        l = jnp.broadcast_to(jnp.sum(l, axis=-1, keepdims=True), l.shape)
    if problem.interpret is not None:  # on a CPU XLA's maximum of a row of NaN may be −inf
        exists = True if query_length is None else rows < query_length
        empty = empty & ~(jnp.isnan(l) & exists)
    unrounded_l, l = l, divisor(l, empty, round_point, place)
    of_o = divisor_of_o(unrounded_l, l, empty, rows, problem.spec.numerics)

    def divided(acc: Array) -> Array:
        quotient = acc / lanes(of_o, problem.head_size)  # O = Ō / l
        if query_length is None:
            return quotient
        return jnp.where(rows >= query_length, jnp.float32(0), quotient)

    unrounded = divided(state.acc)
    o = round_point(unrounded, "output", place)
    out.o[...] = o.astype(out.o.dtype)
    if state.aux is not None:
        # O′ = Ō′ / l, for δ alone
        out.saved[...] = round_point.nearest(divided(state.aux), BFLOAT16).astype(jnp.bfloat16)
    elif out.saved is not None and problem.spec.numerics.saved_output == "halves":
        out.saved[...] = round_point.as_bfloat16(unrounded - o)  # the lower half of O
    elif out.saved is not None:
        out.saved[...] = unrounded

    if out.apart is not None:
        for ref, x in zip(out.apart, m_and_inverse_l(state.m, l, empty), strict=True):
            ref[...] = to_row(x)
    if out.max_logit is not None:
        largest = state.m if state.max_logit is None else state.max_logit
        none = empty | (largest <= MASKED)
        largest = jnp.where(none, -jnp.inf, largest * jnp.float32(problem.score_unit))
        out.max_logit[...] = to_row(largest)
    # lse = m + log l, with m in units of S
    m = state.m * jnp.float32(problem.score_unit)
    out.lse[...] = to_row(log_sum_exp(m, l, empty, round_point, place))
