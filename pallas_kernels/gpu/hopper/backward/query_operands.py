"""What the dQ kernels share: their arrays, their shared memory, and δ and P of 64 rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import row_shift
from lowprec_attn.arithmetic.products import cap_slope
from lowprec_attn.arithmetic.request import BackwardSums
from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.ends import Ends
from pallas_kernels.gpu.hopper.machine.exchange import Exchange
from pallas_kernels.gpu.hopper.machine.instructions import any_of_rows, multiply_add, unpacked
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
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import Segments
from pallas_kernels.gpu.hopper.tile_scheduler import WorkTile


class QueryInputs(NamedTuple):
    """The inputs of the dQ kernels. Vectors are [B, N, T].

    Attributes:
      q, k, v: the three arrays; each of them is the packed array, if there is one.
      do: dO.
      o: the O that δ sees.
      offset: what the exponent of P adds, with T = `vector_rows`; see `forward.operands.Outputs`.
      dlse: the gradient of lse, which enters dS = P ∘ (dP − δ + dlse).
      o_low: the lower half of O, if δ sees both halves.
      inverse_l: 1 / l, with T = `vector_rows`, if it is saved.
      more: what the exponent of P adds besides, with T = `vector_rows`, if log₂ l is saved.
      segments: the ids, if ids hide keys.
      ends: the ends of what is seen, if lengths alone hide keys.
    """

    q: Ref
    k: Ref
    v: Ref
    do: Ref
    o: Ref
    offset: Ref
    dlse: Ref
    o_low: Ref = None
    inverse_l: Ref = None
    more: Ref = None
    segments: Segments | None = None
    ends: Ends | None = None

    def end(self, work: WorkTile, problem: Problem) -> Array | None:
        """How many rows of the tile's batch element see a key, if lengths alone hide keys."""
        return None if self.ends is None else self.ends.of_element(work.batch, problem).rows


class Gradients(NamedTuple):
    """The outputs of the dQ kernels.

    Attributes:
      dq: dQ [B, T, N, H], or the gradient of the packed array.
      dp_offset: what dS adds to dP [B, N, `vector_rows`].
      correction: with `delta='after_cast'`, −λ q [B, T, N, H] as rounded at `ds`. Its product with
        Pᵀ corrects dK.
      row_sums: both of `BackwardSums`, [B, N, `vector_rows`], if they are asked for.
    """

    dq: Ref
    dp_offset: Ref
    correction: Ref = None
    row_sums: BackwardSums | None = None


class QueryMemory(NamedTuple):
    """Shared memory of the dQ kernels.

    Attributes:
      rows: the pipeline of what belongs to the query rows. Its buffers are q, dO and, unless
        `is_wide`, O or both halves of O. dQ leaves through the memory of q, or through that of dO
        if consumers are `cooperative` and dO is as large.
      k, v: pipelines, which may differ in their stages.
      delta: what dS adds to dP, on its way out, for every consumer. None if there are ids: it then
        leaves from registers.
      operand: P and dS of every consumer, if products take them from memory (`from_memory`).
      probs: P on its way from one consumer to the other, if they are `cooperative`.
    """

    rows: Pipeline
    k: Pipeline
    v: Pipeline
    delta: Ref | None
    operand: Ref | None
    probs: Exchange


Q, DO, O, O_LOW = range(4)  # buffers of the pipeline of rows


def of_rows(vectors: Ref, work: WorkTile, row: Array) -> Array:
    """Loads the numbers [64] of the rows from `row` on, or of the last 64 if these lie beyond."""
    inside = pl.ds(jnp.minimum(row, vectors.shape[-1] - ROWS), ROWS)
    return load(vectors.at[work.batch, work.head, inside], PER_ROW, straight=False)


class Large(NamedTuple):
    """Whether some of 64 rows have large scores, and what their exponents add besides.

    Attributes:
      vectors: `QueryInputs.more`.
      work, row: the tile, and its first row.
      are_there: 0 if no row of the warp has large scores.
    """

    vectors: Ref
    work: WorkTile
    row: Array
    are_there: Array

    @classmethod
    def of(cls, x: QueryInputs, work: WorkTile, row: Array, problem: Problem) -> "Large | None":
        """Those of the rows from `row` on, or None if log₂ l is not saved."""
        if x.more is None:
            return None
        more = of_rows(x.more, work, row)
        return cls(x.more, work, row, any_of_rows(more, interpret=problem.sizes.interpret))

    def added_to(self, log2_p: Array) -> Array:
        """Returns the exponents of P, from those that lack the second number."""
        # It is loaded anew, because rows of large scores are rare and registers are few.
        more = of_rows(self.vectors, self.work, self.row)
        return log2_p + along_rows(more, log2_p.shape)


def delta(
    x: QueryInputs,
    rows: Pipeline,
    tiles: Array,
    me: Array | int,
    work: WorkTile,
    row: Array,
    problem: Problem,
) -> Array:
    """Returns δ [64] of the rows that filling `tiles` of their pipeline has at place `me`."""
    if problem.is_wide:
        first = jnp.minimum(row, problem.rows - ROWS)
        halves = [o for o in (x.o, x.o_low) if o is not None]
        parts = [problem.part(o, work.batch, first, ROWS, work.head) for o in halves]
        return _delta_of_pieces(parts, rows.get(tiles, me, buffer=DO))
    # The products are float32, as in `lowprec_attn.arithmetic.backward`.
    of_o, of_do = (
        load(rows.get(tiles, me, buffer=buffer), TILE).astype(jnp.float32) for buffer in (O, DO)
    )
    if problem.saves_halves:
        of_o = of_o + load(rows.get(tiles, me, buffer=O_LOW), TILE).astype(jnp.float32)
    return by_lane(jnp.add, of_o * of_do).sum(axis=1)


def _delta_of_pieces(halves: list[Ref], do: Ref) -> Array:
    """Returns δ [64] from O in global and dO in shared memory, 64 columns at a time.

    Registers have no room for all columns. halves: O, or the two arrays whose sum it is.
    """
    # O comes straight from global memory: the four threads of a row read 32 bytes together.
    total = constant((ROWS, LANES), 0, TILE)
    for column in range(0, do.shape[1], ROWS):
        piece = (slice(None), pl.ds(column, ROWS))
        of_o, *low = (load(o.at[piece], TILE, straight=False) for o in halves)
        of_do = load(do.at[piece], TILE)
        of_o = sum((x.astype(jnp.float32) for x in low), start=of_o.astype(jnp.float32))
        total = total + by_lane(jnp.add, of_o * of_do.astype(jnp.float32))
    return total.sum(axis=1)


def terms_of_ds(ds: Array, problem: Problem, *, reports: bool = False) -> tuple[Array, ...]:
    """What the rows sum of dS: to correct dQ, if rows are summed, then for `BackwardSums`."""
    terms = (summed(ds, problem),) if problem.sums_rows else ()
    if not reports or problem.corrects_after_cast:  # which sums the rounded dS anyway
        return terms
    return (*terms, rounded(ds, problem))


def terms_of_p(probs: Array, problem: Problem, *, reports: bool = False) -> tuple[Array, ...]:
    """What the rows sum of P: to correct dQ, if rows are summed, then for `BackwardSums`."""
    terms = (summed(probs, problem),) if problem.sums_rows else ()
    if not reports:
        return terms
    # Σ P k, which corrects dQ, is of rounded P.
    return (*terms, rounded(probs, problem) if problem.normalizes_delta else probs)


def summed(x: Array, problem: Problem) -> Array:
    """The dS or P whose rows are summed: rounded with `delta='after_cast'`, otherwise not."""
    return rounded(x, problem) if problem.corrects_after_cast else x


def rounded(x: Array, problem: Problem) -> Array:
    """The dS or P that products take, in float32."""
    return unpacked(x.astype(problem.dtype), interpret=problem.sizes.interpret)


class RowSums(NamedTuple):
    """What 64 rows sum over the keys.

    Attributes:
      dq: Σ dS k [64, H].
      pk: Σ P k [64, H], if rows are summed.
      ds, p: the sums [64] of `terms_of_ds` and of `terms_of_p`.
    """

    dq: Array
    pk: Array | None = None
    ds: tuple[Array, ...] = ()
    p: tuple[Array, ...] = ()

    def reported(
        self, lacks: Array | None, inverse_l: Array | None, problem: Problem
    ) -> BackwardSums:
        """The sums of the P and dS in dQ [64], as `arithmetic.backward.QuerySums` has them.

        Args:
          lacks: what corrects dQ, see `lacks_of`, if rows are summed.
          inverse_l: 1 / l, which P lacks unless rows are summed, or None.
          problem: the kernel's problem.
        """
        ds, p = self.ds[-1], self.p[-1]
        if lacks is not None:
            p_rounded, p = self.p if problem.corrects_after_cast else self.p[::-1]
            ds = ds - lacks * p_rounded
        elif inverse_l is not None:
            p = p * inverse_l
        if problem.scales_last:
            ds = ds * np.float32(problem.spec.scale)
        return BackwardSums(p, ds)


def lacks_of(r: Array, s: Array, dlse: Array, problem: Problem) -> Array:
    """Returns what δ₀ lacks, in the units of dS: r / s − dlse, with r = Σ dS and s = Σ P [64].

    With `delta='after_cast'` it is λ, from the sums of the rounded dS and P.
    """
    if problem.corrects_after_cast:
        # dlse of a row that sees no key may be anything.
        dlse = jnp.where(s == 0, np.float32(0), dlse)
    return row_shift(r, s) - dlse


def correction_of_dk(q: Array, after: Array, problem: Problem) -> Array:
    """Returns −λ q as rounded at `ds`, from q [64, H] and λ [64]."""
    # The sign is taken here, because products only add.
    return (q.astype(jnp.float32) * along_rows(-after, q.shape)).astype(problem.dtype)


def probs(
    s: Array,
    offset: Array,
    row: Array,
    t: Array,
    keys: KeySteps,
    problem: Problem,
    same_ids: Callable[[], Array] | None = None,
    large: Large | None = None,
) -> Array:
    """Returns P, unrounded, from q kᵀ [64, step] of the t-th step that the rows visit.

    With a soft cap it is P times the cap's derivative, which is a factor of dS. If 1 / l is saved,
    it is P̄ instead of P, rounded or not as `recomputed_probs` says.

    Args:
      s: q kᵀ.
      offset: what the exponent adds [64].
      row: the first row.
      t, keys: the step, and the steps that the rows visit.
      problem: the kernel's problem.
      same_ids: returns which pairs share an id, if there are ids.
      large: the rows of large scores, if log₂ l is saved.
    """
    s = problem.capped(s)
    if problem.whole_max or problem.saves_log2_l:
        interpret, added = problem.sizes.interpret, along_rows(offset, s.shape)
        log2_p = multiply_add(s, problem.log2_unit, added, interpret=interpret)
    else:
        # P comes from lse, as in FlashAttention-2's Algorithm 2, so no maximum is taken again.
        log2_p = problem.rounded(s) * np.float32(problem.log2_unit) + along_rows(offset, s.shape)
    step = s.shape[1]
    if problem.masks_steps(step) or large is not None:

        def rarely() -> Array:
            found = log2_p
            if large is not None:
                found = lax.cond(
                    large.are_there != 0, lambda: large.added_to(log2_p), lambda: log2_p
                )
            if not problem.masks_steps(step):
                return found
            alike = None if same_ids is None else same_ids()
            return problem.mask_keys(found, row, keys.of(t) * step, alike=alike)

        is_rare = keys.takes_mask(t)
        if large is not None:
            is_rare = (is_rare.astype(jnp.int32) | large.are_there) != 0
        log2_p = lax.cond(is_rare, rarely, lambda: log2_p)
    found = powers.recomputed(log2_p, problem)
    return found if problem.spec.soft_cap is None else found * cap_slope(s)
