"""One query tile of the forward kernel, which walks over the key tiles that it sees."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.steps import Place
from pallas_kernels.gpu.problem import Problem, mask_scores
from pallas_kernels.gpu.rounding import Rounder
from pallas_kernels.gpu.scalars import Scalars
from pallas_kernels.rounding import format_of


class Walk(NamedTuple):
    """The tile's rows and what its steps share."""

    problem: Problem
    scalars: Scalars
    batch: Array
    i: Array
    q: Array
    k_ref: Any
    v_ref: Any
    round_point: Rounder

    def keys(self, j: Array) -> Array:
        """k of key tile j."""
        return self.problem.load_keys(self.k_ref, j)

    def values(self, j: Array) -> Array:
        """v of key tile j."""
        return self.problem.load_keys(self.v_ref, j)

    def scores(self, k: Array, j: Array, *, masked: bool) -> tuple[Array, Place]:
        """S of key tile j, which holds k, in units of `score_unit`; and where it lies."""
        p, q = self.problem, self.q
        place = p.place(self.i, j)
        s = self.round_point.dot(q, k.T, format_of(q), format_of(k))
        s = s * np.float32(p.spec.scale / p.score_unit)
        s = self.round_point(s, "scores", p.spec.numerics.scores, place)
        if masked:
            s = mask_scores(s, p.visible(place, self.batch, self.scalars))
        return s, place

    def over_tiles(self, t: Array, body: Callable[..., Any], carry: Any, *, masked: bool) -> Any:
        """body(j, carry, masked=) over the key tiles of step t, all seen in full unless masked."""
        p = self.problem
        first, last = t * p.tiles_per_step, (t + 1) * p.tiles_per_step
        if not masked:
            return lax.fori_loop(first, last, partial(body, masked=False), carry)
        full, end = p.key_range(self.i, self.batch, self.scalars)
        last = jnp.minimum(last, end)
        cut = jnp.clip(full, first, last)
        carry = lax.fori_loop(first, cut, partial(body, masked=False), carry)
        return lax.fori_loop(cut, last, partial(body, masked=True), carry)

    def visits(self, t: Array) -> Array:
        """Rows for which step t exists: those it does not lie wholly beyond, by position."""
        p = self.problem
        rows = p.place(self.i, t).rows
        first = Place(rows, jnp.full((1, 1), t * p.step))
        causal = p.spec.is_causal and not p.visits_above_diagonal
        return p.visible(first, self.batch, self.scalars, causal=causal)
