"""What the backward kernels share: P and dP of a tile, dS, sums of rounded products.

Each kernel recomputes P = exp(S − lse) from q, k and lse. Keys and queries have separate kernels,
so that one program takes each sum in a fixed order. This gives the same bits on every run. The
arithmetic is that of `lowprec_attn.arithmetic.backward`, point by point. The kernels get
lse = +inf for a row without keys, so that its P is 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place, tile_number
from lowprec_attn.arithmetic.products import format_of
from lowprec_attn.arithmetic.visibility import mask_scores
from pallas_kernels.pairs import Pairs
from pallas_kernels.problem import Range, Side
from pallas_kernels.scalars import Scalars
from pallas_kernels.tpu.problem import Problem, exponential, indices, unhidden
from pallas_kernels.tpu.products import COLUMNS, Rounder


class Operands(NamedTuple):
    """q, dO [B, N, T, H], k, v [B, K, S, H], lse, δ, dlse [B, N, 1, T]; or references to tiles.

    lse is in units of `lse_unit`, like the scores from which it is subtracted. dlse is given only
    if `delta` is one of `SUMS_ROWS`; otherwise δ includes it. `after` [B, N, 1, T] is the λ of
    `delta='after_cast'` in the units of the rounded dS. With `statistics='m_and_l'`, `lse` holds m,
    and `inverse_l` [B, N, 1, T] is 1 / l, a factor of P.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any = None
    dlse: Any = None
    pairs: Pairs | None = None
    after: Any = None
    inverse_l: Any = None


class Exponents(NamedTuple):
    """lse or m of the rows, and 1 / l where it is a factor of P."""

    lse: Array
    inverse_l: Array | None = None


class Program(NamedTuple):
    """What the tiles of one program share."""

    problem: Problem
    scalars: Scalars
    batch: Array
    round_point: Rounder
    head: Array
    pairs: Pairs | None = None

    def values(self, v: Array, tile: Array) -> Array:
        """V of a key tile, rounded at `value`."""
        start = tile * self.problem.tile.kv
        return self.problem.values(v, start, self.scalars, self.batch, self.head)


def lse_unit(problem: Problem) -> float:
    """The unit of lse, or of m, in the kernels: lse = lse_unit · `Operands.lse`."""
    if problem.spec.numerics.statistics == "m_and_l":
        return problem.score_unit
    return problem.spec.scale if problem.counts_in_scale("scores") else 1.0


def probs_and_dp(
    program: Program, left: Side, right: Side, exponents: Exponents, place: Place, *, masked: bool
) -> tuple[Array, Array]:
    """Unrounded P, and dP as rounded at `dp`; `left` gives their rows, `right` their columns."""
    problem, round_point = program.problem, program.round_point
    a, b = left.for_scores, right.for_scores
    # S = q kᵀ · scale, or its transpose; P = exp(S − lse), or exp(S − m) / l
    s = round_point.dot(a, b, format_of(a), format_of(b), COLUMNS)
    unit = lse_unit(problem)
    if not problem.scales_queries and unit == 1:
        s = s * jnp.float32(problem.spec.scale)
    s = round_point(s, "scores", place)
    if masked:
        seen = problem.visible(place, program.batch, program.scalars)
        if program.pairs is not None:
            seen = seen & unhidden(program.pairs, keys_first=place.rows.shape[0] == 1)
        s = mask_scores(s, seen)
    probs = exponential(s - exponents.lse, unit)
    if exponents.inverse_l is not None:
        probs = probs * exponents.inverse_l
    # dP = dO Vᵀ
    a, b = left.for_dp, right.for_dp
    dp = round_point.dot(a, b, format_of(a), format_of(b), COLUMNS)
    return probs, round_point(dp, "dp", place)


def rounded_ds(program: Program, ds: Array, place: Place) -> Array:
    """dS · scale as rounded at `ds`; without the scale where the sums are scaled."""
    problem = program.problem
    if not scales_last(problem):
        ds = ds * jnp.float32(problem.spec.scale)
    return program.round_point(ds, "ds", place)


def scales_last(problem: Problem) -> bool:
    """Whether dQ and dK are scaled instead of dS, because scaling commutes with the roundings."""
    n = problem.spec.numerics
    return problem.scales_queries or (n.ds.is_identity and n.tile_grads.is_identity)


class GradientSum(NamedTuple):
    """A running sum of products, each rounded at `tile_grads` before it is added.

    Attributes:
      program: what the tiles of the program share.
      total: reference to the sum.
      part: reference to the product of a step that spans several tiles; None if no step does.
      size, step: keys (of dQ) or queries (of dK and dV) in a tile, and in a product that is rounded
        at once; one divides the other.
      which: 0, 1, 2 for dQ, dK, dV.
    """

    program: Program
    total: Any
    part: Any
    size: int
    step: int
    which: int

    def begin(self) -> None:
        """Sets the sums to zero."""
        for ref in (self.total, self.part):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    def add(self, tile: Array, product: Callable[[slice], Array], rows: Array) -> None:
        """Adds the products of a tile.

        Args:
          tile: the tile's number along the sum.
          product: forms the product over a slice of the tile's keys or queries.
          rows: global rows of the sum, [..., 1].
        """
        if self.program.problem.spec.numerics.tile_grads.is_identity:
            self.total[...] += product(slice(None))
        elif self.part is not None:
            self.part[...] += product(slice(None))
        else:
            for start in range(0, self.size, self.step):
                x = product(slice(start, start + self.step))
                self._add_rounded(x, rows, tile * self.size + start)

    def end_of_tile(self, tile: Array, seen: Range, tiles: int, rows: Array) -> None:
        """Adds the product of a step after the step's last tile; the sum has `tiles` tiles."""
        if self.part is None:
            return
        per_step = self.step // self.size
        first = lax.div(tile, per_step) * per_step
        is_last = (tile == first + per_step - 1) | (tile == tiles - 1)

        @pl.when(is_last & (tile >= seen.begin) & (first < seen.end))
        def add() -> None:
            self._add_rounded(self.part[...], rows, first * self.size)
            self.part[...] = jnp.zeros_like(self.part)

    def _add_rounded(self, x: Array, rows: Array, first: Array) -> None:
        place = Place(rows, indices(0, x.shape[1], 1), tile_number(first, self.which))
        self.total[...] += self.program.round_point(x, "tile_grads", place)


def sums_parts(problem: Problem, size: int, step: int) -> bool:
    """Whether a product that `tile_grads` rounds is the sum of several tiles of `size` rows."""
    return size < step and not problem.spec.numerics.tile_grads.is_identity


def visit_tile(
    index: Array, seen: Range, full: Array, problem: Problem, body: Callable[..., None]
) -> None:
    """Runs the body on tile `index` if it is visited, with a mask unless it is seen in `full`."""
    visited = (index >= seen.begin) & (index < seen.end)
    if not problem.has_masked_tiles:
        pl.when(visited)(partial(body, masked=False))
        return
    if problem.masks_every_tile:
        pl.when(visited)(partial(body, masked=True))
        return
    pl.when(visited & full)(partial(body, masked=False))
    pl.when(visited & jnp.logical_not(full))(partial(body, masked=True))
