"""The kernel of dK and dV: a program owns a key tile and loops over the query tiles."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import scaled_rows
from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.products import format_of
from pallas_kernels.problem import Side
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
from pallas_kernels.tpu.problem import Grid, Problem, call, indices, lanes, pair_specs, to_columns
from pallas_kernels.tpu.products import ROWS


def key_gradients(x: Operands, scalars: Scalars, problem: Problem) -> tuple[Array, Array]:
    """dK and dV [B, K, S, H], summed over the query heads of each group."""
    size = problem.tile

    # A key tile may lie beyond everything that the last row sees. No query tile sees it then, and
    # the index must still name a tile that exists.
    cut = problem.spec.is_causal or problem.spec.window is not None
    may_be_unseen = cut and problem.padded_keys - size.kv >= problem.padded_rows

    def visited(j: Array, i: Array, b: Array, scalars: Scalars) -> Array:
        tile = problem.query_range(j, b, scalars).clamp(i)
        return jnp.minimum(tile, problem.q_tiles - 1) if may_be_unseen else tile

    rows = pl.BlockSpec(
        (None, None, size.query, problem.head_size),
        lambda b, h, j, g, i, scalars: (b, h * problem.group + g, visited(j, i, b, scalars), 0),
    )
    keys = pl.BlockSpec(
        (None, None, size.kv, problem.head_size), lambda b, h, j, g, i, _: (b, h, j, 0)
    )
    statistics = pl.BlockSpec(
        (None, None, 1, size.query),
        lambda b, h, j, g, i, scalars: (b, h * problem.group + g, 0, visited(j, i, b, scalars)),
    )

    def tile(b: Array, h: Array, j: Array, g: Array, i: Array, scalars: Scalars) -> Any:
        return b, h * problem.group + g, visited(j, i, b, scalars), j

    pairs = pair_specs(x.pairs, problem, tile)
    of_rows = {name: statistics for name in ("after", "inverse_l") if getattr(x, name) is not None}
    operands = Operands(rows, keys, keys, rows, statistics, statistics, pairs=pairs, **of_rows)
    sums = 4 if sums_parts(problem, size.query, problem.row_step) else 2
    grid = Grid(
        sizes=(problem.batch, problem.kv_heads, problem.kv_tiles, problem.group, problem.q_tiles),
        parallel=3,
        in_specs=(operands,),
        out_specs=(keys, keys),
        scratch=((size.kv, problem.head_size),) * sums,
    )
    out = jax.ShapeDtypeStruct(x.k.shape, x.k.dtype)
    dk, dv = call(_key_gradients, problem, grid, (out, out))(scalars, x)
    return dk, dv


def _key_gradients(
    scalars: Scalars,
    ref: Operands,
    dk_ref: Any,
    dv_ref: Any,
    dk_sum: Any,
    dv_sum: Any,
    *parts: Any,
    problem: Problem,
) -> None:
    n = problem.spec.numerics
    batch, kv_head, j, g, i = (pl.program_id(axis) for axis in range(5))
    head = kv_head * problem.group + g
    round_point = problem.rounder(scalars, batch, head)
    program = Program(problem, scalars, batch, round_point, head, ref.pairs)
    dk_part, dv_part = parts or (None, None)
    dk_total = GradientSum(program, dk_sum, dk_part, problem.tile.query, problem.row_step, 1)
    dv_total = GradientSum(program, dv_sum, dv_part, problem.tile.query, problem.row_step, 2)

    @pl.when((g == 0) & (i == 0))
    def prologue() -> None:
        dk_total.begin()
        dv_total.begin()

    def add_tile(*, masked: bool) -> None:
        # P and dS are formed transposed, so that they are left operands as they are.
        cols = indices(j * problem.tile.kv, problem.tile.kv, 0)
        place = Place(indices(i * problem.tile.query, problem.tile.query, 1), cols)
        q, do = ref.q[...], ref.do[...]
        keys, rows = Side(ref.k[...], program.values(ref.v[...], j)), Side(q, do)
        inverse_l = None if ref.inverse_l is None else ref.inverse_l[...]
        exponents = Exponents(ref.lse[...], inverse_l)
        probs, dp = probs_and_dp(program, keys, rows, exponents, place, masked=masked)
        rounded = program.round_point(probs, "probs_bwd", place)
        dot, p_format = program.round_point.dot, n.probs_bwd.result_format
        # dV += Pᵀ dO
        dv_total.add(i, lambda x: dot(rounded[:, x], do[x], p_format, format_of(do), ROWS), cols)
        # dS = P ∘ (dP − δ) with the unrounded P, dK += dSᵀ q
        ds = rounded_ds(program, probs * (dp - ref.delta[...]), place)
        ds_format = n.ds.result_format
        dk_total.add(i, lambda x: dot(ds[:, x], q[x], ds_format, format_of(q), ROWS), cols)
        if ref.after is not None:
            # dK −= Pᵀ (λ q), with the λ that dQ's kernel found
            place = scaled_rows(indices(i * problem.tile.query, problem.tile.query, 0), q.shape[1])
            after = lanes(to_columns(ref.after[...]), q.shape[1])
            scaled = program.round_point(after * q.astype(jnp.float32), "ds", place)
            dk_sum[...] -= dot(rounded, scaled, p_format, ds_format, ROWS)

    seen = problem.query_range(j, batch, scalars)
    visit_tile(i, seen, (problem.key_range(i, batch, scalars).full > j), problem, add_tile)
    of_keys = indices(j * problem.tile.kv, problem.tile.kv, 0)
    for total in (dk_total, dv_total):
        total.end_of_tile(i, seen, problem.q_tiles, of_keys)

    @pl.when((g == problem.group - 1) & (i == problem.q_tiles - 1))
    def epilogue() -> None:
        # A gradient summed over a group takes the random bits of the group's first head.
        round_point = problem.rounder(scalars, batch, kv_head * problem.group)
        # Where scaling q is exact, q comes with the scale, and dK = dSᵀ q gets it from q.
        scaled = scales_last(problem) and not problem.scales_queries
        dk = dk_sum[...] * jnp.float32(problem.spec.scale) if scaled else dk_sum[...]
        start = indices(j * problem.tile.kv, problem.tile.kv, 0)
        for which, (x, out) in enumerate(((dk, dk_ref), (dv_sum[...], dv_ref)), start=1):
            place = Place(start, indices(0, problem.head_size, 1), which)
            out[...] = round_point(x, "grads", place).astype(out.dtype)
