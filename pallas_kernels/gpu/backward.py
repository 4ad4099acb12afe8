"""The backward kernels: dK and dV of a key tile, dQ of a query tile, δ where it needs a pass.

Each kernel recomputes P = exp(S − lse) from q, k and lse. Keys and queries have separate kernels,
so that one program takes each sum in a fixed order. This needs no atomics and gives the same bits
on every run. The arithmetic is that of `lowprec_attn.arithmetic.backward`, point by point.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import delta_from_output, row_shift, scaled_rows
from lowprec_attn.arithmetic.places import Place, span, tile_number
from lowprec_attn.arithmetic.powers import HIGH, offset_of
from lowprec_attn.arithmetic.products import cap_slope, format_of
from lowprec_attn.arithmetic.visibility import mask_scores
from pallas_kernels.gpu.instructions import exp2, fused_multiply_add, multiply_add, whole_exp2
from pallas_kernels.gpu.problem import LANES, LOG2E, Problem, TileIndex, by_lane, call, whole
from pallas_kernels.gpu.products import Rounder
from pallas_kernels.problem import Range, Side
from pallas_kernels.scalars import Scalars

# δ is summed over this many columns at a time, because whole rows of a float32 O cost the registers
# of a fourth program per multiprocessor.
_DELTA_COLUMNS = 32


class Operands(NamedTuple):
    """q [B, T, N, H], dO [B, T, N, V], k [B, S, K, H], v [B, S, K, V], two offsets [B, N, T].

    The fields are arrays or references to their parts. Where q, k and v are packed, each of them is
    the whole array.

    `offset` is what the exponent of P adds to a row's scores, and `dp_offset` is what dS adds to
    the row's dP. Both are computed once per row. A kernel that loops over rows would compute them
    again for every tile, and for every thread that holds a row.

    `dp_offset` may be absent. The kernel of dQ, which owns its rows and has their dO at hand, then
    forms it from `o`, `o_low` and `dlse`. `o` [B, T, N, V] is the O that δ reads, or the upper half
    of that O, with the lower half in `o_low`. `dlse` [B, N, T] is the gradient of lse. Because
    d lse / dS = P, it enters dS = P ∘ (dP − δ + dlse) beside δ.

    `after` [B, N, T] is λ in the units of dS. The kernel of dQ finds it with `delta='after_cast'`.

    `inverse_l` [B, N, T] is 1 / l, a factor of P with `statistics='m_and_l'`.

    The next three come with `mean_key='subtracted'`: `k_of_q` [B, S, K, H] is the k of dQ, `mean`
    [B, 1, K, H] is the mean that was subtracted from it, and `given` [B, N, T] is dlse.

    `sink` [B, N, T] is the P of the sinks. It is given where rows of dS are summed.

    `gradients` is the packed array that holds dQ and receives dK and dV.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    offset: Any
    dp_offset: Any = None
    o: Any = None
    dlse: Any = None
    after: Any = None
    o_low: Any = None
    inverse_l: Any = None
    k_of_q: Any = None
    mean: Any = None
    given: Any = None
    sink: Any = None
    gradients: Any = None


class Exponents(NamedTuple):
    """What the exponent of P adds to the scores of a row, and 1 / l where it is a factor of P."""

    offset: Array
    inverse_l: Array | None = None


class _Tile(NamedTuple):
    """P, dP as rounded at `dp`, and P before it is multiplied by 1 / l (`undivided`).

    P is not rounded, except that the P̄ in it may be rounded at `probs`. `undivided` is this P̄, or
    P where there is no factor 1 / l. `slope` is the derivative of the soft cap, None without one.
    """

    probs: Array
    dp: Array
    undivided: Array
    slope: Array | None = None

    def behind_cap(self, x: Array) -> Array:
        """x, which is P or dS, times dS / d(scale · q·k); this factor is 1 without a soft cap."""
        return x if self.slope is None else x * self.slope


class Program(NamedTuple):
    """What the tiles of one program share."""

    problem: Problem
    scalars: Scalars
    batch: Array
    head: Array
    round_point: Rounder

    def tile(self, i: Array, j: Array) -> TileIndex:
        """The index of the program's tile (i, j)."""
        return TileIndex(self.batch, self.head, i, j)


def exponent_offset(subtracted: Array, problem: Problem) -> Array:
    """What the exponent of P adds to the scores of a row: −lse or −m; 0 for rows without keys.

    It is in units of log 2 where P is 2^(S·log2 e + offset). Where P̄ is formed against a whole
    number, it is the number that is added to S log2 e.
    """
    if problem.whole_max:
        return offset_of(subtracted)
    factor = LOG2E if problem.hides_exponent_noise or problem.scales_first else 1.0
    if problem.scales_first and problem.spec.numerics.statistics == "m_and_l":
        factor = problem.score_unit * LOG2E
    empty = subtracted == -jnp.inf
    return jnp.where(empty, jnp.float32(0), -subtracted) * jnp.float32(factor)


def dp_offset(delta: Array, problem: Problem) -> Array:
    """What dS adds to dP: −δ, times scale where dS is P ∘ (dP·scale + offset)."""
    return -delta if problem.scales_last else delta * jnp.float32(-problem.spec.scale)


def _probs_and_dp(
    program: Program,
    left: Side,
    right: Side,
    exponents: Exponents,
    tile: TileIndex,
    place: Place,
    *,
    masked: bool,
) -> "_Tile":
    """P and dP of a tile; `left` gives their rows, `right` their columns."""
    problem, round_point = program.problem, program.round_point
    n = problem.spec.numerics
    a, b = left.for_scores, right.for_scores
    # S = q kᵀ, or its transpose; P = exp(S · factor − lse), or exp(S · factor − m) / l
    s, factor = round_point.dot(a, b.T, format_of(a), format_of(b)), np.float32(problem.unit)
    s, slope = problem.capped(s), None
    if problem.spec.soft_cap is not None:
        slope = cap_slope(s)
    if not n.scores.is_identity:
        s, factor = round_point(s * factor, "scores", place), np.float32(1)
    log2e = np.float32(LOG2E)
    offset, inverse_l = exponents
    # m is in the units of the forward kernel's scores.
    in_units, to_log2 = factor / np.float32(problem.score_unit), problem.score_unit * LOG2E
    # The choices of `Numerics.exponent`. The first takes one instruction. It is taken where the
    # roundings of P̄, P and dS exceed its error.
    if problem.hides_exponent_noise:
        log2_p = multiply_add(s, factor * log2e, offset, interpret=problem.interpret)
    elif problem.whole_max or problem.scales_first:
        c = np.float32(to_log2)
        log2_p = fused_multiply_add(s * in_units, c, offset, interpret=problem.interpret)
        if problem.whole_max:
            log2_p = log2_p - np.float32(HIGH)
    elif inverse_l is not None:
        log2_p = (s * in_units + offset) * np.float32(to_log2)
    else:
        log2_p = (s * factor + offset) * log2e
    if masked:
        seen = problem.visible(place, program.batch, program.scalars)
        if (pairs := program.scalars.pairs) is not None:
            keys_first = place.rows.shape[0] == 1
            seen = seen & problem.unhidden(tile, pairs, keys_first=keys_first)
        log2_p = mask_scores(log2_p, seen)
    power = whole_exp2 if problem.whole_max else exp2
    probs = undivided = power(log2_p, interpret=problem.interpret)
    if n.recomputed_probs == "rounded":
        probs = undivided = round_point(probs, "probs", place)
    if inverse_l is not None:
        probs = probs * inverse_l
    # dP = dO Vᵀ
    a, b = left.for_dp, right.for_dp
    dp = round_point.dot(a, b.T, format_of(a), format_of(b))
    return _Tile(probs, round_point(dp, "dp", place), undivided, slope)


def _rounded_ds(program: Program, tile: _Tile, offset: Array, place: Place) -> Array:
    """dS · scale behind the cap, rounded at `ds`; without the scale where the sums are scaled."""
    ds = tile.behind_cap(_unrounded_ds(program.problem, tile, offset))
    return program.round_point(ds, "ds", place)


def _unrounded_ds(problem: Problem, tile: _Tile, offset: Array) -> Array:
    probs, dp = tile.probs, tile.dp
    # dS = P ∘ (dP − δ) · scale. The sums are scaled instead where that commutes with rounding.
    if problem.scales_last:
        return probs * (dp + offset)
    return probs * multiply_add(
        dp, np.float32(problem.spec.scale), offset, interpret=problem.interpret
    )


def _scaled_sum(ds_sum: Array, problem: Problem) -> Array:
    return ds_sum * jnp.float32(problem.spec.scale) if problem.scales_last else ds_sum


def key_gradients(x: Operands, scalars: Scalars, problem: Problem) -> tuple[Array, ...]:
    """dK and dV, summed over the query heads of each group; or one packed array with dQ as well."""

    def all_rows(j: Array, h: Array, b: Array) -> tuple[Array, int, Array]:
        return b, 0, h

    q = problem.block(problem.rows, all_rows, plane=0, heads=problem.group)
    k = problem.block(problem.keys, all_rows, plane=1)
    v = problem.block(problem.keys, all_rows, plane=2, values=True)
    do = problem.block(problem.rows, all_rows, heads=problem.group, values=True)
    statistics = pl.BlockSpec((None, problem.group, problem.rows), lambda j, h, b: (b, h, 0))
    if problem.packed:
        block = (None, problem.tile.kv, 3, None, problem.padded_head)
        gradients = pl.BlockSpec(block, lambda j, h, b: (b, j, 0, h, 0))
        blocks = [gradients]
    else:
        gradients = None
        blocks = [
            problem.block(problem.tile.kv, lambda j, h, b: (b, j, h), values=values)
            for values in (False, True)
        ]
    of_rows = {name: statistics for name in ("after", "inverse_l") if getattr(x, name) is not None}
    in_specs = Operands(q, k, v, do, statistics, statistics, gradients=gradients, **of_rows)
    out = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x.k, x.v)][: len(blocks)]
    specs = ((in_specs, jax.tree.map(whole, scalars)), blocks)
    grid = (problem.kv_tiles, problem.kv_heads, problem.batch)
    # The array that dQ was written into is the last of the operands.
    aliases = {len(jax.tree.leaves(x)) - 1: 0} if problem.packed else {}
    return tuple(call(_key_gradients, problem, grid, specs, out, aliases)(x, scalars))


def _key_gradients(ref: Operands, scalars: Scalars, *out: Any, problem: Problem) -> None:
    n = problem.spec.numerics
    dk_ref, dv_ref = (out[0].at[:, jnp.int32(plane)] for plane in (1, 2)) if problem.packed else out
    j, kv_head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first_head = kv_head * problem.group
    valid_rows = problem.valid_rows(batch, scalars)
    valid_keys = problem.valid_keys(batch, scalars)
    k = problem.load_keys(ref.k, j, valid=valid_keys)
    keys = Side(k, problem.load_values(ref.v, j, scalars, batch, first_head, valid=valid_keys))
    begin, full, end = problem.query_range(j, batch, scalars)
    first_key = j * problem.tile.kv
    zeros = zeros_of_v = jnp.zeros((problem.tile.kv, problem.padded_head), jnp.float32)
    if problem.padded_value != problem.padded_head:
        zeros_of_v = jnp.zeros((problem.tile.kv, problem.padded_value), jnp.float32)
    per_product, _ = problem.tiles_per_rounded_product

    def of_keys(which: int, step: int = 0) -> Place:
        """The place of dK (1) or dV (2)."""
        return problem.features(first_key, problem.tile.kv, step, values=which == 2)

    def add_head(g: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        head = kv_head * problem.group + g
        program = Program(problem, scalars, batch, head, problem.rounder(scalars, batch, head))

        def divided(do: Array, start: Array) -> Array:
            """dO / l as rounded at `probs_bwd`."""
            rows = span(start, problem.tile.query)[:, None]
            place = scaled_rows(rows, problem.padded_value)
            inverse_l = problem.load_statistics(ref.inverse_l, start, g, valid=valid_rows)
            do = do.astype(jnp.float32) * inverse_l[:, None]
            return program.round_point(do, "probs_bwd", place)

        def corrected(dk: Array, p_rounded: Array, q: Array, start: Array) -> Array:
            """dK less round(P)ᵀ round(λ q), the correction of `delta='after_cast'`."""
            after = problem.load_statistics(ref.after, start, g, valid=valid_rows)[:, None]
            rows = span(start, problem.tile.query)[:, None]
            place = scaled_rows(rows, problem.padded_head)
            q = program.round_point(after * q.astype(jnp.float32), "ds", place)
            formats = n.probs_bwd.result_format, n.ds.result_format
            return dk - program.round_point.dot(p_rounded, q, *formats)

        def add_tile(i: Array, sums: tuple[Array, ...], *, masked: bool) -> tuple[Array, ...]:
            dk, dv, *apart = sums
            start = i * problem.tile.query
            q = problem.load_rows(ref.q, start, g, valid=valid_rows)
            do = problem.load_rows(ref.do, start, g, valid=valid_rows, values=True)
            offset, of_dp = (
                problem.load_statistics(r, start, g, valid=valid_rows)[None]
                for r in (ref.offset, ref.dp_offset)
            )
            # Keys first, so that P and dS are left operands without a transpose.
            place = problem.place(i, j, keys_first=True)
            inverse_l = None
            if ref.inverse_l is not None:
                inverse_l = problem.load_statistics(ref.inverse_l, start, g, valid=valid_rows)
                inverse_l = inverse_l[None]
            exponents = Exponents(offset, inverse_l)
            rows, index = Side(q, do), program.tile(i, j)
            tile = _probs_and_dp(program, keys, rows, exponents, index, place, masked=masked)
            # dV += Pᵀ dO, or P̄ᵀ (dO / l)
            p_rounded = program.round_point(tile.probs, "probs_bwd", place)
            of_dv, formats = (p_rounded, do), (n.probs_bwd.result_format, format_of(do))
            if n.divided_in_dv == "do":
                of_dv = tile.undivided, divided(do, start)
                formats = n.probs.result_format, n.probs_bwd.result_format
            dv = dv + program.round_point.dot(*of_dv, *formats)
            # dK += dSᵀ q
            ds = _rounded_ds(program, tile, of_dp, place)
            dk = dk + program.round_point.dot(ds, q, n.ds.result_format, format_of(q))
            if apart:
                apart = [corrected(x, p_rounded, q, start) for x in apart]
            elif ref.after is not None:
                dk = corrected(dk, p_rounded, q, start)
            return dk, dv, *apart

        def add_tiles(begin: Array, full: Array, end: Array, sums: Any) -> Any:
            sums = lax.fori_loop(begin, full, partial(add_tile, masked=True), sums)
            if problem.masks_every_tile:
                return sums
            return lax.fori_loop(full, end, partial(add_tile, masked=False), sums)

        if per_product is None:
            return add_tiles(begin, full, end, sums)

        def add_product(c: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            first, last = c * per_product, jnp.minimum((c + 1) * per_product, end)
            first = jnp.maximum(first, begin)
            start = (zeros, zeros_of_v, *sums[2:])
            products = add_tiles(first, jnp.clip(full, first, last), last, start)
            dk, dv = (
                _rounded_product(program, x, of_keys(which), c, which)
                for which, x in enumerate(products[:2], start=1)
            )
            return sums[0] + dk, sums[1] + dv, *products[2:]

        first = lax.div(begin, per_product)
        return lax.fori_loop(first, lax.div(end + per_product - 1, per_product), add_product, sums)

    # Products that are rounded one by one exclude the correction of dK, which has its own sum.
    apart = ref.after is not None and per_product is not None
    dk, dv, *rest = lax.fori_loop(
        0, problem.group, add_head, (zeros, zeros_of_v, *(zeros,) * apart)
    )
    dk = sum(rest, start=dk)
    sums = (_scaled_sum(dk, problem), dv)
    # A gradient summed over a group takes the random bits of the group's first head.
    round_point = problem.rounder(scalars, batch, kv_head * problem.group)
    for which, (x, out) in enumerate(zip(sums, (dk_ref, dv_ref), strict=True), start=1):
        rounded = round_point(x, "grads", of_keys(which, which))
        problem.store(out, rounded, first_key, problem.keys, values=which == 2)


def _rounded_product(program: Program, x: Array, place: Place, c: Array, which: int) -> Array:
    """Product c of the sum dQ, dK or dV (0, 1, 2), as rounded at `tile_grads`."""
    problem = program.problem
    queries, keys = problem.tiles_per_rounded_product
    tiles, size = (keys, problem.tile.kv) if which == 0 else (queries, problem.tile.query)
    assert tiles is not None
    number = tile_number(c * (tiles * size), which)
    place = dataclasses.replace(place, step=number)
    return program.round_point(x, "tile_grads", place)


class Found(NamedTuple):
    """What the kernel of dQ finds for the kernel of dK: `dp_offset` and `after`, see `Operands`."""

    dp_offset: Any
    after: Any = None


def query_gradients(
    x: Operands, scalars: Scalars, problem: Problem, *, row_sums: bool = False
) -> tuple[Array, Found, tuple[Array, ...]]:
    """dQ, the row statistics found on the way, and with `row_sums` both of `BackwardSums`."""
    outputs = [(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), problem.tile_rows(0))]
    if x.dp_offset is None:
        rows = 2 if problem.spec.numerics.delta == "after_cast" else 1
        outputs += [problem.tile_statistics] * rows
    body: Callable[..., None] = _query_gradients
    formed = len(outputs)
    if row_sums:
        body = _query_gradients_and_row_sums
        outputs += [problem.tile_statistics] * 2
    dq, *others = _over_queries(body, x, scalars, problem, outputs)
    found = Found(*others[: formed - 1]) if x.dp_offset is None else Found(x.dp_offset)
    return dq, found, tuple(others[formed - 1 :])


def delta_from_probs(x: Operands, scalars: Scalars, problem: Problem) -> Array:
    """δ = rowsum(dP ∘ P) [B, N, T], found in a separate pass over the keys."""
    return _over_queries(_delta, x, scalars, problem, [problem.tile_statistics])[0]


def _over_queries(
    body: Callable[..., None], x: Operands, scalars: Scalars, problem: Problem, outputs: Any
) -> Any:
    """Runs a kernel with one program per query tile and head; outputs: (shape, block) of each."""
    rows = problem.head_rows(values=True)
    statistics = pl.BlockSpec((None, None, problem.rows), lambda i, n, b: (b, n, 0))
    every = Operands(
        problem.head_rows(0),
        *problem.head_keys,
        do=rows,
        offset=statistics,
        dp_offset=statistics,
        o=rows,
        dlse=statistics,
        o_low=rows,
        inverse_l=statistics,
        k_of_q=problem.of_key_head(problem.keys),
        mean=problem.of_key_head(1),
        given=statistics,
        sink=statistics,
    )
    given = (None if a is None else spec for a, spec in zip(x, every, strict=True))
    shapes, out_specs = zip(*outputs, strict=True)
    specs = ((Operands(*given), jax.tree.map(whole, scalars)), out_specs)
    return call(body, problem, problem.query_grid, specs, shapes)(x, scalars)


class _BackwardRows(NamedTuple):
    """The query rows of a program of dQ or δ, which sums over the key tiles that they see."""

    program: Program
    ref: Operands
    i: Array
    start: Array
    rows: Side
    exponents: Exponents

    @classmethod
    def of(cls, ref: Operands, scalars: Scalars, problem: Problem) -> "_BackwardRows":
        i, head, batch = problem.query_tile(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
        start = i * problem.tile.query
        valid = problem.valid_rows(batch, scalars)
        q = problem.load_rows(ref.q, start, valid=valid)
        rows = Side(q, problem.load_rows(ref.do, start, valid=valid, values=True))
        offset = problem.load_statistics(ref.offset, start, valid=valid)[:, None]
        program = Program(problem, scalars, batch, head, problem.rounder(scalars, batch, head))
        inverse_l = None
        if ref.inverse_l is not None:
            inverse_l = problem.load_statistics(ref.inverse_l, start, valid=valid)[:, None]
        return cls(program, ref, i, start, rows, Exponents(offset, inverse_l))

    def statistic(self, ref: Any) -> Array:
        """A row statistic of the tile, [query, 1]."""
        problem, scalars, batch, *_ = self.program
        valid = problem.valid_rows(batch, scalars)
        return problem.load_statistics(ref, self.start, valid=valid)[:, None]

    def sum(self, contribution: Callable[..., Any], zero: Any) -> Any:
        """The sum of contribution(tile, k, place) over the key tiles: one array or several."""
        return self._sum(contribution, zero, self._range())

    def sum_of_rounded(self, contribution: Callable[..., Any], zero: Any) -> Any:
        """`sum`, with the first of several sums rounded at `tile_grads` product by product."""
        _, per_product = self.program.problem.tiles_per_rounded_product
        if per_product is None:
            return self.sum(contribution, zero)
        begin, full, end = self._range()
        place = self.program.problem.features(self.start, self.program.problem.tile.query)
        windowed = self.program.problem.spec.window is not None
        start = lax.div(begin, per_product) if windowed else 0

        def add_product(c: Array, total: Any) -> Any:
            first, last = c * per_product, jnp.minimum((c + 1) * per_product, end)
            if windowed:
                first = jnp.maximum(first, begin)
            part = Range(first, jnp.clip(full, first, last), last)
            sums = self._sum(contribution, zero, part)
            product = _rounded_product(self.program, sums[0], place, c, 0)
            return jax.tree.map(jnp.add, total, (product, *sums[1:]))

        return lax.fori_loop(start, lax.div(end + per_product - 1, per_product), add_product, zero)

    def _range(self) -> Range:
        problem, scalars, batch, *_ = self.program
        return problem.key_range(self.i, batch, scalars)

    def _sum(self, contribution: Callable[..., Any], zero: Any, visited: Range) -> Any:
        """`sum` over the visited tiles; tiles before `full` take no mask."""
        problem = self.program.problem
        valid = problem.valid_keys(self.program.batch, self.program.scalars)

        def add_tile(j: Array, total: Any, *, masked: bool) -> Any:
            _, scalars, batch, head, _ = self.program
            k = problem.load_keys(self.ref.k, j, valid=valid)
            v = problem.load_values(self.ref.v, j, scalars, batch, head, valid=valid)
            keys = Side(k, v)
            place = problem.place(self.i, j)
            index = self.program.tile(self.i, j)
            tile = _probs_and_dp(
                self.program, self.rows, keys, self.exponents, index, place, masked=masked
            )
            of_q = self.ref.k_of_q
            k = keys.for_scores if of_q is None else problem.load_keys(of_q, j, valid=valid)
            new = contribution(tile, k, place)
            return jax.tree.map(jnp.add, total, new)

        begin, full, end = visited
        total = zero
        # Masked tiles come first, because ptxas serialises all tensor-core instructions in the
        # other order: a program without unmasked tiles would zero the accumulator of a pending one.
        if problem.has_masked_tiles:
            total = lax.fori_loop(full, end, partial(add_tile, masked=True), total)
        if problem.masks_every_tile:
            return total
        return lax.fori_loop(begin, full, partial(add_tile, masked=False), total)


def _query_gradients_and_row_sums(
    ref: Operands, scalars: Scalars, *out: Any, problem: Problem
) -> None:
    *out_of_dq, p_ref, ds_ref = out
    _query_gradients(ref, scalars, *out_of_dq, problem=problem, row_sums=(p_ref, ds_ref))


def _query_gradients(
    ref: Operands,
    scalars: Scalars,
    *out: Any,
    problem: Problem,
    row_sums: tuple[Any, Any] | None = None,
) -> None:
    n = problem.spec.numerics
    queries = _BackwardRows.of(ref, scalars, problem)
    round_point = queries.program.round_point
    normalized, after_cast = n.delta == "normalized", n.delta == "after_cast"
    sums_rows = normalized or after_cast
    if ref.dp_offset is None:
        delta = _delta_from_output(queries)
        of_dp = dp_offset(delta if sums_rows else delta - queries.statistic(ref.dlse), problem)
        if not normalized:
            problem.store_statistics(out[1], of_dp[:, 0], queries.start)
    else:
        of_dp = queries.statistic(ref.dp_offset)

    # dQ = Σ dS K over the key tiles. Where the row sums of dS are corrected, P K is summed as well.
    def product(tile: _Tile, k: Array, place: Place) -> Array:
        ds = _rounded_ds(queries.program, tile, of_dp, place)
        return round_point.dot(ds, k, n.ds.result_format, format_of(k))

    def with_row_sums(tile: _Tile, k: Array, place: Place) -> tuple[Array, ...]:
        # Rows of dS sum to zero only before a soft cap's slope, see `arithmetic.backward.row_sums`.
        p_rounded = round_point(tile.behind_cap(tile.probs), "probs_bwd", place)
        pk = round_point.dot(p_rounded, k, n.probs_bwd.result_format, format_of(k))
        ds = _unrounded_ds(problem, tile, of_dp)
        return product(tile, k, place), pk, by_lane(jnp.sum, ds), by_lane(jnp.sum, tile.probs)

    def with_rounded_sums(tile: _Tile, k: Array, place: Place) -> tuple[Array, ...]:
        p_rounded = round_point(tile.probs, "probs_bwd", place)
        ds = _rounded_ds(queries.program, tile, of_dp, place)
        dq, pk = (
            round_point.dot(x, k, rounding.result_format, format_of(k))
            for x, rounding in ((ds, n.ds), (p_rounded, n.probs_bwd))
        )
        return dq, pk, by_lane(jnp.sum, ds), by_lane(jnp.sum, p_rounded)

    def reported(tile: _Tile, place: Place) -> tuple[Array, ...]:
        """The `arithmetic.backward.QuerySums` in the units of dS; the last only where needed."""
        if row_sums is None:
            return ()
        summed = [tile.probs, _rounded_ds(queries.program, tile, of_dp, place)]
        if sums_rows:
            summed.append(round_point(tile.behind_cap(tile.probs), "probs_bwd", place))
        return tuple(by_lane(jnp.sum, x) for x in summed)

    zero = jnp.zeros((problem.tile.query, problem.padded_head), jnp.float32)
    none: tuple[Array, ...] = ()
    if row_sums is not None:
        none = (jnp.zeros((problem.tile.query, LANES), jnp.float32),) * (2 + sums_rows)
    lacks, of_rows = None, list[Array]()
    if sums_rows:
        lanes = jnp.zeros((problem.tile.query, LANES), jnp.float32)
        contribution = with_rounded_sums if after_cast else with_row_sums
        dq, pk, *sums = queries.sum_of_rounded(
            lambda tile, k, place: (*contribution(tile, k, place), *reported(tile, place)),
            (zero, zero, lanes, lanes, *none),
        )
        r, s, *of_rows = (jnp.sum(x, axis=-1, keepdims=True) for x in sums)
        if ref.sink is not None:  # a column with dP = 0, whose dS is not rounded
            p_sink = queries.statistic(ref.sink)
            r, s = r + p_sink * of_dp, s + p_sink
        # The correction of δ₀, r / s − dlse, or λ; in the units of dS. The dlse of a row that sees
        # no key may be anything.
        dlse = jnp.where(s == 0, jnp.float32(0), queries.statistic(ref.dlse))
        lacks = row_shift(r, s) + dp_offset(dlse, problem)
        if after_cast:
            problem.store_statistics(out[2], lacks[:, 0], queries.start)
        else:
            problem.store_statistics(out[1], (of_dp - lacks)[:, 0], queries.start)
        dq = dq - lacks * pk
    elif problem.tiles_per_rounded_product[1] is None and row_sums is None:
        dq = queries.sum(product, zero)
    else:
        dq, *sums = queries.sum_of_rounded(
            lambda tile, k, place: (product(tile, k, place), *reported(tile, place)), (zero, *none)
        )
        of_rows = [jnp.sum(x, axis=-1, keepdims=True) for x in sums]
    if row_sums is not None:
        p, ds, *p_rounded = of_rows
        if lacks is not None:
            ds = ds - lacks * p_rounded[0]
        ds = _scaled_sum(ds, problem)
        for out_ref, x in zip(row_sums, (p, ds), strict=True):
            problem.store_statistics(out_ref, x[:, 0], queries.start)
    if ref.mean is not None:
        # `k_of_q` lacks the mean. Rows of P = d lse / dS sum to one, so the mean times dlse is
        # added to dQ.
        dq = dq - dp_offset(queries.statistic(ref.given), problem) * problem.load_one(ref.mean)
    dq = _scaled_sum(dq, problem)
    dq = round_point(dq, "grads", problem.features(queries.start, problem.tile.query, 0))
    problem.store(out[0], dq, queries.start, problem.rows)


def _delta_from_output(queries: _BackwardRows) -> Array:
    """δ = rowsum(dO ∘ O), rounded, [query, 1]."""
    problem, ref, columns = queries.program.problem, queries.ref, 0
    refs = (ref.do, ref.o) if ref.o_low is None else (ref.do, ref.o, ref.o_low)
    valid = problem.valid_rows(queries.program.batch, queries.program.scalars)
    parts = (problem.load_row_parts(r, queries.start, _DELTA_COLUMNS, valid=valid) for r in refs)
    delta = jnp.zeros((problem.tile.query, 1), jnp.float32)
    for do, o, *low in zip(*parts, strict=True):
        rows, features = span(queries.start, problem.tile.query), span(columns, o.shape[1])
        place = Place(rows[:, None], features[None])
        o = sum((x.astype(jnp.float32) for x in low), start=o.astype(jnp.float32))
        o = queries.program.round_point(o, "output_bwd", place)
        delta = delta + delta_from_output(do, o, problem.spec.numerics, problem.dtype)
        columns += o.shape[1]
    return _rounded_delta(queries, delta)


def _rounded_delta(queries: _BackwardRows, delta: Array) -> Array:
    """δ [query, 1] as rounded at `delta_value`."""
    place = Place(span(queries.start, delta.shape[0])[:, None], span(0, 1)[None])
    return queries.program.round_point(delta, "delta_value", place)


def _delta(ref: Operands, scalars: Scalars, delta_ref: Any, *, problem: Problem) -> None:
    queries = _BackwardRows.of(ref, scalars, problem)

    def contribution(tile: _Tile, k: Array, place: Place) -> Array:
        return jnp.sum(tile.dp * tile.probs, axis=-1, keepdims=True)

    delta = queries.sum(contribution, jnp.zeros((problem.tile.query, 1), jnp.float32))
    problem.store_statistics(delta_ref, _rounded_delta(queries, delta)[:, 0], queries.start)
