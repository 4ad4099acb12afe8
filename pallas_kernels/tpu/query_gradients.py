"""The kernels of dQ, and of δ where it needs a pass of its own: a program owns a query tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import SUMS_ROWS, row_shift
from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.products import format_of
from pallas_kernels.problem import Range, Side
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu.backward import (
    Exponents,
    GradientSum,
    Operands,
    Program,
    probs_and_dp,
    rounded_ds,
    scales_last,
    sums_parts,
    visit_tile,
)
from pallas_kernels.tpu.block_sizes import LANES
from pallas_kernels.tpu.problem import (
    Grid,
    Problem,
    call,
    indices,
    lanes,
    pair_specs,
    row_specs,
    to_columns,
    to_row,
)
from pallas_kernels.tpu.products import ROWS
from pallas_kernels.tpu.softmax import sum_slices


class QueryGradients(NamedTuple):
    """dQ [B, N, T, H], and the correction of dS that its kernel finds for dK, [B, N, 1, T].

    With `delta='normalized'`, `found` is δ − dlse. With 'after_cast' it is λ.
    """

    dq: Any
    found: Any = None


class _QuerySums(NamedTuple):
    """Scratch: dQ and its part, lse, δ and 1 / l; `p_dp`, `p`, `pk` as in `backward.RowSums`."""

    dq: Any
    lse: Any
    delta: Any
    p_dp: Any = None
    p: Any = None
    pk: Any = None
    inverse_l: Any = None
    part: Any = None

    @classmethod
    def shapes(cls, problem: Problem) -> "_QuerySums":
        """The shapes of the scratch that a problem needs; None for the rest."""
        tile = problem.tile
        row, sums = (tile.query, LANES), (tile.query, problem.head_size)
        result = cls(sums, row, row)
        if problem.spec.numerics.delta in SUMS_ROWS:
            result = result._replace(p_dp=row, p=row, pk=sums)
        if problem.spec.numerics.statistics == "m_and_l":
            result = result._replace(inverse_l=row)
        return result._replace(part=sums) if sums_parts(problem, tile.kv, problem.step) else result


def query_gradients(x: Operands, scalars: Scalars, problem: Problem) -> QueryGradients:
    """dQ, and what its kernel finds about δ on the way."""
    rows, statistics = row_specs(problem)
    out_spec = QueryGradients(rows)
    out = QueryGradients(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype))
    if x.dlse is not None:
        out_spec = out_spec._replace(found=statistics)
        out = out._replace(found=jax.ShapeDtypeStruct(x.lse.shape, jnp.float32))
    scratch = tuple(shape for shape in _QuerySums.shapes(problem) if shape is not None)
    outputs = out, out_spec, scratch
    return QueryGradients(*_over_queries(_query_gradients, x, scalars, problem, outputs))


def delta_from_probs(x: Operands, scalars: Scalars, problem: Problem) -> Array:
    """δ = rowsum(dP ∘ P) [B, N, 1, T], found in a separate pass over the keys."""
    statistic = (problem.tile.query, LANES)
    out = jax.ShapeDtypeStruct(x.lse.shape, jnp.float32)
    scratch = (statistic,) * (2 if x.inverse_l is None else 3)
    return _over_queries(_delta, x, scalars, problem, (out, row_specs(problem)[1], scratch))


def _over_queries(
    body: Callable[..., None], x: Operands, scalars: Scalars, problem: Problem, out: Any
) -> Any:
    """Runs a kernel with one program per query tile and head; its key tiles follow in order."""
    size = problem.tile

    def key_tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Any, ...]:
        return b, lax.div(h, problem.group), problem.key_range(i, b, scalars).clamp(j), 0

    rows, statistics = row_specs(problem)
    keys = pl.BlockSpec((None, None, size.kv, problem.head_size), key_tile)
    shape, out_spec, scratch = out
    lse, delta, dlse, inverse_l = (
        None if row is None else statistics for row in (x.lse, x.delta, x.dlse, x.inverse_l)
    )

    def tile(b: Array, h: Array, i: Array, j: Array, scalars: Scalars) -> tuple[Array, ...]:
        return b, h, i, problem.key_range(i, b, scalars).clamp(j)

    pairs = pair_specs(x.pairs, problem, tile)
    grid = Grid(
        sizes=(problem.batch, problem.heads, problem.q_tiles, problem.kv_tiles),
        parallel=3,
        in_specs=(Operands(rows, keys, keys, rows, lse, delta, dlse, pairs, inverse_l=inverse_l),),
        out_specs=out_spec,
        scratch=scratch,
    )
    return call(body, problem, grid, shape)(scalars, x)


class _BackwardRows(NamedTuple):
    """The query rows of a program of dQ or δ, at key tile j."""

    program: Program
    ref: Operands
    exponents: Exponents
    i: Array
    j: Array

    @classmethod
    def of(
        cls, scalars: Scalars, ref: Operands, exponents: Exponents, problem: Problem
    ) -> "_BackwardRows":
        batch, head, i, j = (pl.program_id(axis) for axis in range(4))
        round_point = problem.rounder(scalars, batch, head)
        program = Program(problem, scalars, batch, round_point, head, ref.pairs)
        return cls(program, ref, exponents, i, j)

    @property
    def rows(self) -> Array:
        """Global rows of the tile."""
        size = self.program.problem.tile.query
        return indices(self.i * size, size, 0)

    @property
    def seen(self) -> Range:
        """The key tiles that the mainloop visits."""
        problem, scalars, batch, *_ = self.program
        return problem.key_range(self.i, batch, scalars)

    def visit(self, contribution: Callable[[Array, Array, Place], None]) -> None:
        """Calls contribution(P, dP, place) for the key tile, if the rows see any of it."""
        problem = self.program.problem

        def add_tile(*, masked: bool) -> None:
            place = Place(self.rows, indices(self.j * problem.tile.kv, problem.tile.kv, 1))
            rows = Side(self.ref.q[...], self.ref.do[...])
            keys = Side(self.ref.k[...], self.program.values(self.ref.v[...], self.j))
            given = (x for x in self.exponents if x is not None)
            exponents = Exponents(*(lanes(x[...], problem.tile.kv) for x in given))
            probs, dp = probs_and_dp(self.program, rows, keys, exponents, place, masked=masked)
            contribution(probs, dp, place)

        seen = self.seen
        visit_tile(self.j, seen, self.j < seen.full, problem, add_tile)


def _query_gradients(
    scalars: Scalars, ref: Operands, dq_ref: Any, found_ref: Any, *scratch: Any, problem: Problem
) -> None:
    n = problem.spec.numerics
    after_cast = n.delta == "after_cast"
    given = iter(scratch)
    sums = _QuerySums(
        *(None if shape is None else next(given) for shape in _QuerySums.shapes(problem))
    )
    queries = _BackwardRows.of(scalars, ref, Exponents(sums.lse, sums.inverse_l), problem)
    round_point = queries.program.round_point
    total = GradientSum(queries.program, sums.dq, sums.part, problem.tile.kv, problem.step, 0)

    @pl.when(queries.j == 0)
    def prologue() -> None:
        total.begin()
        sums.lse[...] = to_columns(ref.lse[...])
        sums.delta[...] = to_columns(ref.delta[...])
        if sums.inverse_l is not None:
            sums.inverse_l[...] = to_columns(ref.inverse_l[...])
        for x in (sums.p_dp, sums.p, sums.pk):
            if x is not None:
                x[...] = jnp.zeros_like(x)

    def contribution(probs: Array, dp: Array, place: Place) -> None:
        # dS = P ∘ (dP − δ), dQ += dS K
        unscaled = probs * (dp - lanes(sums.delta[...], problem.tile.kv))
        ds = rounded_ds(queries.program, unscaled, place)
        k, ds_format = ref.k[...], n.ds.result_format
        rows, dot = queries.rows, round_point.dot
        total.add(queries.j, lambda x: dot(ds[:, x], k[x], ds_format, format_of(k), ROWS), rows)
        if sums.pk is not None:
            # `epilogue` corrects the row sums of dS with P K, rowsum(dS) and rowsum(P).
            rounded = round_point(probs, "probs_bwd", place)
            p_format = n.probs_bwd.result_format
            sums.pk[...] += round_point.dot(rounded, k, p_format, format_of(k), ROWS)
            sums.p_dp[...] += sum_slices(ds if after_cast else unscaled)
            sums.p[...] += sum_slices(rounded if after_cast else probs)

    queries.visit(contribution)
    total.end_of_tile(queries.j, queries.seen, problem.kv_tiles, queries.rows)

    @pl.when(queries.j == problem.kv_tiles - 1)
    def epilogue() -> None:
        scale = jnp.float32(problem.spec.scale)
        dq = sums.dq[...]
        if after_cast:
            # λ = Σ dS / Σ P of the rounded dS and P; dQ −= λ P K, and dK's kernel gets this λ.
            dlse = to_columns(ref.dlse[...])
            after = _row_shift(sums) - (dlse if scales_last(problem) else scale * dlse)
            dq = dq - lanes(after, problem.head_size) * sums.pk[...]
            found_ref[...] = to_row(after)
        dq = dq * scale if scales_last(problem) else dq
        if sums.pk is not None and not after_cast:
            # δ = δ₀ + Σ P(dP − δ₀) / Σ P, so that Σ dS = 0 without dlse; dQ −= scale (δ − δ₀) P K.
            correction = _row_shift(sums) - to_columns(ref.dlse[...])
            dq = dq - scale * lanes(correction, problem.head_size) * sums.pk[...]
            found_ref[...] = to_row(sums.delta[...] + correction)
        place = Place(queries.rows, indices(0, problem.head_size, 1), 0)
        dq_ref[...] = round_point(dq, "grads", place).astype(dq_ref.dtype)


def _row_shift(sums: _QuerySums) -> Array:
    """`row_shift` of the sums, equal in all lanes."""
    shift = row_shift(*(jnp.sum(x[...], axis=-1, keepdims=True) for x in (sums.p_dp, sums.p)))
    return jnp.broadcast_to(shift, (shift.shape[0], LANES))


def _delta(
    scalars: Scalars, ref: Operands, delta_ref: Any, *scratch: Any, problem: Problem
) -> None:
    lse, total, *rest = scratch
    exponents = Exponents(lse, *rest)
    queries = _BackwardRows.of(scalars, ref, exponents, problem)

    @pl.when(queries.j == 0)
    def prologue() -> None:
        total[...] = jnp.zeros_like(total)
        lse[...] = to_columns(ref.lse[...])
        if exponents.inverse_l is not None:
            exponents.inverse_l[...] = to_columns(ref.inverse_l[...])

    def contribution(probs: Array, dp: Array, place: Place) -> None:
        total[...] += jnp.sum(dp * probs, axis=-1, keepdims=True)  # δ = rowsum(P ∘ dP)

    queries.visit(contribution)

    @pl.when(queries.j == problem.kv_tiles - 1)
    def epilogue() -> None:
        delta_ref[...] = to_row(total[...])
