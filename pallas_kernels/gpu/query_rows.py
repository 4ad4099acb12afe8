"""The query rows of a program of the forward kernel, and the key tiles that its mainloop visits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.products import format_of
from lowprec_attn.arithmetic.visibility import mask_scores
from pallas_kernels.gpu.problem import Problem, TileIndex
from pallas_kernels.gpu.products import Rounder
from pallas_kernels.scalars import Scalars


class QueryRows(NamedTuple):
    """One query tile, and what the steps of its mainloop share."""

    problem: Problem
    scalars: Scalars
    batch: Array
    head: Array
    i: Array
    q: Array
    k_ref: Any
    v_ref: Any
    round_point: Rounder

    def keys(self, j: Array) -> Array:
        """k of key tile j."""
        # Scores of keys beyond the lengths are masked, so these keys may hold anything.
        return self.problem.load_keys(self.k_ref, j, valid=self.problem.keys)

    def values(self, j: Array) -> Array:
        """v of key tile j, as rounded at `value`."""
        valid = self.problem.valid_keys(self.batch, self.scalars)
        where = self.scalars, self.batch, self.head
        return self.problem.load_values(self.v_ref, j, *where, valid=valid)

    def scores(self, k: Array, j: Array, *, masked: bool | Array) -> tuple[Array, Place]:
        """S of key tile j, whose keys are `k`, in units of `score_unit`, and the tile's place.

        masked: whether to mask; a bool is known at compile time, an array only at run time.
        """
        problem, q = self.problem, self.q
        place = problem.place(self.i, j)
        # S = q kᵀ · scale; the factor may wait for the exponent (`score_unit`)
        s = self.round_point.dot(q, k.T, format_of(q), format_of(k))
        s = problem.capped(s) * np.float32(problem.unit / problem.score_unit)
        s = self.round_point(s, "scores", place)
        if masked is False:
            return s, place

        def mask(s: Array) -> Array:
            seen = problem.visible(place, self.batch, self.scalars)
            if self.scalars.pairs is not None:
                tile = TileIndex(self.batch, self.head, self.i, j)
                seen = seen & problem.unhidden(tile, self.scalars.pairs)
            return problem.without_padding(mask_scores(s, seen), place)

        return mask(s) if masked is True else lax.cond(masked, mask, lambda s: s, s), place

    def over_tiles(
        self,
        t: Array,
        body: Callable[..., Any],
        carry: Any,
        *,
        masked: bool,
        backwards: bool = False,
    ) -> Any:
        """Runs body(j, carry, masked=) over the key tiles of step t.

        Unless `masked`, the rows see all of these tiles in full. A masked step takes one loop with
        a branch, because each of two loops would wait for its own first tiles.
        """
        problem = self.problem
        first, last = t * problem.tiles_per_step, (t + 1) * problem.tiles_per_step
        begin, full, end = problem.key_range(self.i, self.batch, self.scalars)
        if masked:
            last = jnp.minimum(last, end)
        if problem.spec.window is not None:
            first = jnp.maximum(first, begin)

        def visit(n: Array, carry: Any) -> Any:
            j = first + last - 1 - n if backwards else n
            return body(j, carry, masked=masked and (problem.masks_every_tile or j >= full))

        return lax.fori_loop(first, last, visit, carry)

    def visits(self, t: Array) -> Array:
        """True for rows for which step t exists: by position they may see one of its keys.

        The diagonal does not count if the row-max rule visits the steps above it.
        """
        problem = self.problem
        rows = problem.place(self.i, t).rows
        first = Place(rows, jnp.full((1, 1), t * problem.step))
        causal = problem.spec.is_causal and not problem.visits_above_diagonal
        last = None if problem.spec.window is None else (t + 1) * problem.step - 1
        return problem.visible(first, self.batch, self.scalars, causal=causal, last=last)
