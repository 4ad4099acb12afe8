"""Flash attention as loops over tiles in plain JAX, for every point, rule, `kv_block` and backend.

Each query tile loops over blocks of keys, and the backward pass recomputes P from q, k and the
saved row statistics (FlashAttention-2, arXiv 2307.08691, Algorithms 1 and 2). Memory is therefore
linear in the sequence length. Blocks of keys above the causal diagonal or outside the window are
not visited.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from lowprec_attn.arithmetic import backward, layout, operands, sinks, softmax, visibility
from lowprec_attn.arithmetic.grid import Grid, Index
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.products import score_unit
from lowprec_attn.arithmetic.recurrence import RowStatistics, SoftmaxState, keep_unvisited
from lowprec_attn.arithmetic.request import (
    BackwardSums,
    Extras,
    Request,
    Spec,
    unsupported_in_tiles,
)
from lowprec_attn.arithmetic.transforms import differentiated_as, named

DEFAULT_KV_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Tile sizes, which affect only speed.

    Attributes:
      query: query rows per tile.
      kv_bwd: keys per tile in the backward pass. In the forward pass a tile has `kv_block` keys. If
        `tile_grads` rounds, tiles of the backward pass have `kv_block` rows and `kv_block` keys,
        and both sizes here are ignored in that pass.

    Raises:
      ValueError: a size is not positive.
    """

    query: int = 256
    kv_bwd: int = 256

    def __post_init__(self) -> None:
        for name in ("query", "kv_bwd"):
            if getattr(self, name) < 1:
                raise ValueError(f"block size {name} must be positive, got {getattr(self, name)}")


def unsupported(request: Request) -> str | None:
    """Names the feature of the request that `tiled` cannot serve, or None."""
    return unsupported_in_tiles(request, BlockSizes) or _unsupported_scales(request)


def _unsupported_scales(request: Request) -> str | None:
    """Names a block scale of P̄, P or dS whose blocks a tile would cut, or None.

    These arrays exist only in tiles, so a block must lie within one tile.
    """
    n, sizes = request.spec.numerics, request.spec.block_sizes or BlockSizes()
    assert isinstance(sizes, BlockSizes)  # `unsupported_in_tiles` declines any other
    rows, keys = request.q_shape[1], request.kv_shape[1]
    tiles = {"kv_block": (keys_per_step(request), keys)}
    if n.tile_grads.is_identity:
        tiles |= {"query": (sizes.query, rows), "kv_bwd": (sizes.kv_bwd, keys)}
    for point in ("probs", "probs_bwd", "ds"):
        rounding = getattr(n, point)
        block = None if rounding.scaling is None else rounding.scaling.block_on_axis
        for name, (size, length) in tiles.items():
            # One tile holds the whole axis; of a symbolic length this is not known.
            is_one = isinstance(length, int) and size >= length
            if block is not None and size % block and not is_one:
                return f"{point}={rounding} with {name}={size} (it takes multiples of {block})"
    return None


def keys_per_step(request: Request) -> int:
    """The number of keys per online-softmax step."""
    return request.spec.numerics.step_of(request.kv_shape[1], DEFAULT_KV_BLOCK)


def exponent_of(request: Request) -> str:
    """How both passes form exponents: `Numerics.exponent`, or 'shift_first' if that is None."""
    return request.spec.numerics.exponent or "shift_first"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """Returns O = softmax(q kᵀ · scale + bias) v [B, T, N, V] and the float32 lse [B, T, N].

    Values are rounded as `spec.numerics` says. With `spec.max_logit` the function also returns the
    largest score of every row [B, T, N].
    """
    return layout.ungroup(*_attend(*layout.group(q, k, v, extras), spec))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, extras: Extras, spec: Spec) -> tuple[Array, ...]:
    return _forward(q, k, v, extras, spec).results


class _Written(NamedTuple):
    """What the forward pass computes.

    Attributes:
      results: O, lse and, with `spec.max_logit`, the largest scores.
      o_saved: the O that δ reads, if it differs from the returned O; else None.
      statistics: the row statistics from which the backward pass recomputes P.
    """

    results: tuple[Array, ...]
    o_saved: Array | None
    statistics: RowStatistics


def _forward(
    q: Array, k: Array, v: Array, extras: Extras, spec: Spec, *, every_block: bool = False
) -> _Written:
    inputs = layout.Grouped(q, k, v, extras)
    grid = _grid(inputs, spec, backward=False, every_block=every_block)
    tiles = grid.pad(operands.forward_operands(inputs, spec))

    def query_tile(i: Index) -> softmax.Output:
        q_tile = grid.query_rows(tiles.q, i)

        def step(j: Index, state: SoftmaxState) -> SoftmaxState:
            k_tile, v_tile = (grid.key_rows(x, j) for x in (tiles.k, tiles.v))
            s, seen, place, _ = _tile_scores(grid, tiles.extras, q_tile, k_tile, (i, j), spec)
            new = softmax.softmax_step(state, s, v_tile, spec, extras, place, seen)
            # With a rule that visits tiles above the diagonal, every row takes those blocks too.
            visited = visibility.visited(
                extras, place, grid.keys, causal=grid.rows_can_miss_blocks, window=spec.window
            )
            return keep_unvisited(new, state, visited)

        start = softmax.initial_state(q_tile, v, spec, extras)
        state = lax.fori_loop(grid.kv_begin(i), grid.kv_end(i), step, start)
        rows = span(i * grid.block_q, grid.block_q)[:, None]
        return softmax.finish(state, spec, extras, rows, q.dtype)

    out = lax.map(query_tile, jnp.arange(grid.q_tiles))
    o = grid.unpad_rows(out.o)
    of_rows = [grid.unpad_rows(x[..., None])[..., 0] for x in out.of_rows]
    saved = None
    if out.o_saved is not None and spec.numerics.saved_output != "same":
        saved = grid.unpad_rows(out.o_saved)
    statistics = RowStatistics(of_rows[0][..., None])
    if out.apart is not None:
        statistics = RowStatistics(*map(grid.unpad_rows, out.apart))
    return _Written((o, *of_rows), saved, statistics)


class _Sums(NamedTuple):
    """Running float32 sums of the backward pass over all query tiles."""

    dk: Array
    dv: Array
    dbias: Array | None
    dscale: Array | None
    dsinks: Array | None


class _BackwardRows(NamedTuple):
    """The rows of one query tile in the backward pass, and loops over the key blocks they visit.

    `of` holds the q and dO of these rows, and all keys and values. `dtype` is the dtype of the
    inputs. For `ds_amax` see `BackwardTile`.
    """

    grid: Grid
    extras: Extras
    i: Index
    of: operands.BackwardOperands
    statistics: RowStatistics
    dlse: Array
    of_q: backward.QueryKeys | None
    spec: Spec
    dtype: np.dtype
    sink: sinks.SinkColumn | None = None
    ds_amax: Array | None = None

    def with_sink(self) -> "_BackwardRows":
        """Returns the rows with their sink column, and with dO and dlse 0 in rows without keys."""

        extras, rows = self.extras, self.grid.place(self.i, 0).rows

        def step(j: Index, sees: Array) -> Array:
            seen = _seen(self.grid, extras, self.i, j, self.spec)
            # If nothing hides keys, every row sees some.
            return sees | (seen is None or jnp.any(seen, axis=-1, keepdims=True))

        blocks = self.grid.kv_begin(self.i), self.grid.kv_end(self.i)
        sees = lax.fori_loop(*blocks, step, jnp.zeros_like(self.dlse, bool))
        unit = score_unit(self.spec, extras)
        sink = sinks.column(self.statistics, sees, rows, unit, self.spec, extras)
        return self._replace(of=self.of.with_do(sink.seen), dlse=sink.seen(self.dlse), sink=sink)

    def over_keys(self, add: Callable[..., Any], total: Any) -> Any:
        """Loops over the key blocks j with total = add(total, j, tile, k, place).

        Args:
          add: adds a block; `tile` is its `BackwardTile` and `k` its keys as S reads them.
          total: the start of the sum.
        """

        def step(j: Index, total: Any) -> Any:
            k, v = (self.grid.key_rows(x, j) for x in (self.of.k, self.of.v))
            found = _tile_scores(self.grid, self.extras, self.of.q, k, (self.i, j), self.spec)
            s, seen, place, slope = found
            args = v, self.of.do, self.spec, self.extras, place, seen
            tile = backward.backward_tile(s, self.statistics, *args)
            return add(total, j, tile._replace(slope=slope, ds_amax=self.ds_amax), k, place)

        return lax.fori_loop(self.grid.kv_begin(self.i), self.grid.kv_end(self.i), step, total)

    def query_gradient(
        self, tile: backward.BackwardTile, delta: Array, k: Array, place: Place
    ) -> Array:
        """The contribution of a block to dQ; `k` holds the keys as the product of dQ reads them."""
        return backward.query_gradient(tile, delta, k, self.spec, self.extras, place)

    def k_of_q(self, j: Index) -> Array:
        """The keys of block j as the product of dQ reads them."""
        return self.grid.key_rows(self.of.k_of_dq, j)

    def finished(self, dq: Array) -> Array:
        """Returns dQ from its sum over all blocks; adds back dlse times the mean key if needed."""
        if self.of_q is None:
            return dq
        return self.of_q.give_back(dq, self.dlse, self.spec, self.extras)

    def delta(self, o_saved: Array | None) -> Array:
        """δ or δ₀, without dlse. If no O is saved, this takes a pass over the keys."""
        rows = span(self.i * self.grid.block_q, self.grid.block_q)[:, None]
        if o_saved is None:
            delta = self.over_keys(
                lambda total, j, tile, k, place: total + backward.delta_from_probs(tile),
                jnp.zeros_like(self.dlse),
            )
            return backward.rounded_delta(delta, rows, self.spec, self.extras)
        o = self.grid.query_rows(o_saved, self.i)
        return backward.delta_from_saved_output(
            self.of.do_of_delta, o, rows, self.spec, self.extras, self.dtype
        )

    def largest_ds(self, delta: Array) -> Array:
        """`ds_amax` over the keys of these rows, [B, K, 1, 1, 1]."""

        def larger(total: Array, j: Index, tile: backward.BackwardTile, *_: Any) -> Array:
            amax = backward.largest_ds(tile, delta, self.spec, self.extras)
            return total if amax is None else jnp.maximum(total, amax)

        return self.over_keys(larger, jnp.zeros_like(self.dlse[:, :, :1, :1]))

    def corrected(self, delta: Array) -> tuple[Array, backward.Delta, BackwardSums | None]:
        """Corrects δ₀ so that rows of dS sum to zero, in a separate pass over the keys.

        Args:
          delta: δ₀ of the rows.

        Returns:
          dQ, the `Delta` to use in dK, and the row sums that the call asks for, or None.
        """
        extras = self.extras

        def add(total: Any, j: Index, tile: backward.BackwardTile, _: Array, place: Any) -> Any:
            k = self.k_of_q(j)
            sums = backward.row_sums(tile, delta, k, self.spec, extras, place)
            dq = self.query_gradient(tile, delta, k, place)
            return jax.tree.map(jnp.add, total, (dq, sums, self.reported(tile, delta, place)))

        zero, row = jnp.zeros_like(self.of.q, jnp.float32), jnp.zeros_like(self.dlse)
        start = zero, backward.RowSums(row, row, zero), self.nothing_reported()
        dq, sums, reported = self.over_keys(add, start)
        if self.sink is not None:
            sums = sums.with_sink(self.sink, delta, self.spec, extras)
        dq, in_dk, lacks = backward.corrected(dq, sums, delta, self.dlse, self.spec, extras)
        return dq, in_dk, None if reported is None else reported.of_query_gradient(lacks)

    def reported(
        self, tile: backward.BackwardTile, delta: Array, place: Place
    ) -> backward.QuerySums | None:
        """The row sums of a block, or None if the call asks for none; `delta` is the δ of dQ."""
        extras = self.extras
        if extras.backward_sums is None:
            return None
        return backward.query_sums(tile, delta, self.spec, extras, place)

    def nothing_reported(self) -> backward.QuerySums | None:
        """The row sums before the first block: zeros, or None if the call asks for none."""
        asked = self.extras.backward_sums is not None
        return backward.QuerySums.zeros(self.dlse) if asked else None

    def gradients(
        self, sums: _Sums, delta: backward.Delta, dq: Array | None
    ) -> tuple[_Sums, Array, BackwardSums | None]:
        """Adds the contributions of this query tile to the sums over tiles.

        Args:
          sums: the sums before this tile.
          delta: what is subtracted from the rows of dP and dS.
          dq: the finished sum of dQ over blocks, or None if it is to be computed here.

        Returns:
          The sums with this tile, its dQ, and its row sums if they are asked for and dQ is computed
          here.
        """
        grid, extras, of = self.grid, self.extras, self.of

        def add(total: Any, j: Index, tile: backward.BackwardTile, k: Array, place: Any) -> Any:
            sums, dq_sum, reported = total
            if dq_sum is not None:
                dq_sum = dq_sum + self.query_gradient(tile, delta.rounded, self.k_of_q(j), place)
            if reported is not None:
                of_block = self.reported(tile, delta.rounded, place)
                reported = jax.tree.map(jnp.add, reported, of_block)
            dk, dv = backward.key_gradients(
                tile, delta, of.q_of_dk, of.do_of_dv, self.spec, extras, place
            )
            ds, dbias, dscale = backward.ds_of(tile, delta.unrounded), sums.dbias, sums.dscale
            if dbias is not None:
                dbias = grid.add_pairs(dbias, ds, self.i, j)
            if dscale is not None:
                dscale = dscale + backward.scale_gradient(tile, delta.unrounded, of.q, k)
            dk, dv = grid.add_keys(sums.dk, dk, j), grid.add_keys(sums.dv, dv, j)
            return _Sums(dk, dv, dbias, dscale, sums.dsinks), dq_sum, reported

        start = jnp.zeros_like(of.q, jnp.float32) if dq is None else None
        nothing = self.nothing_reported() if dq is None else None
        sums, dq_sum, reported = self.over_keys(add, (sums, start, nothing))
        of_rows = None if reported is None else reported.of_query_gradient(None)
        return sums, self.finished(dq_sum if dq is None else dq), of_rows


def _backward(
    spec: Spec, res: layout.Residuals, cotangents: tuple[Array, ...], *, every_block: bool = False
) -> tuple[Array, Array, Array, Extras]:
    dtype, n = res.inputs.q.dtype, spec.numerics
    do, dlse, *_ = cotangents
    grid = _grid(res.inputs, spec, backward=True, every_block=every_block)
    of = operands.backward_operands(res.inputs, do, spec)
    # The mean of all keys is taken before padding.
    of_q = backward.query_keys(of.k, spec)
    if of_q is not None:
        of = of._replace(k_of_dq=of_q.k)
    of = of.with_rows(grid.pad_rows).with_keys(grid.pad_keys)
    extras = grid.pad_extras(res.inputs.extras)
    dlse = grid.pad_rows(dlse[..., None])
    # Padding with +inf gives padded rows P = 0. Their scores are the bias, whose exp may overflow.
    subtracted, inverse_l = res.statistics
    subtracted = grid.pad_rows(subtracted, jnp.inf)
    inverse_l = None if inverse_l is None else grid.pad_rows(inverse_l)
    o_saved = None
    if res.o_saved is not None:
        o_saved = grid.pad_rows(operands.read(res.o_saved, "output_bwd", spec, extras))

    def rows_of(i: Index) -> tuple[_BackwardRows, Array]:
        """Returns the rows of query tile i and their δ or δ₀, without dlse."""
        statistics, dlse_tile = jax.tree.map(
            lambda x: grid.query_rows(x, i), (RowStatistics(subtracted, inverse_l), dlse)
        )
        of_rows = of.with_rows(lambda x: grid.query_rows(x, i))
        queries = _BackwardRows(grid, extras, i, of_rows, statistics, dlse_tile, of_q, spec, dtype)
        if extras.sinks is not None:
            queries = queries.with_sink()
        return queries, queries.delta(o_saved)

    def largest_ds(i: Index) -> Array:
        queries, delta = rows_of(i)
        return queries.largest_ds(delta if n.delta in backward.SUMS_ROWS else delta - queries.dlse)

    ds_amax = None
    if n.ds.scaling is not None and n.ds.scaling.needs_largest:
        ds_amax = jnp.max(lax.map(largest_ds, jnp.arange(grid.q_tiles)), axis=0)
        ds_amax = ds_amax if n.ds.scaling.kind == "head" else jnp.max(ds_amax, keepdims=True)

    def query_tile(sums: _Sums, i: Index) -> tuple[_Sums, tuple[Array, BackwardSums | None]]:
        queries, delta = rows_of(i)
        queries = queries._replace(ds_amax=ds_amax)

        def with_dsinks(delta: backward.Delta) -> _Sums:
            if queries.sink is None or sums.dsinks is None:
                return sums
            of_rows = queries.sink.gradient(delta.unrounded, grid.query_rows(dlse, i))
            dsinks = sums.dsinks + layout.sum_to_shape(of_rows, sums.dsinks.shape)
            return sums._replace(dsinks=dsinks)

        if n.delta in backward.SUMS_ROWS:
            dq, corrected, of_rows = queries.corrected(delta)
            sums, dq, _ = queries.gradients(with_dsinks(corrected), corrected, dq)
            return sums, (dq, of_rows)
        # Since d lse / dS = P, the gradient of lse enters dS = P ∘ (dP − δ + dlse) next to δ.
        delta = delta - queries.dlse
        unshifted = backward.Delta(delta, delta)
        sums, dq, of_rows = queries.gradients(with_dsinks(unshifted), unshifted, None)
        return sums, (dq, of_rows)

    zeros = partial(jnp.zeros_like, dtype=jnp.float32)
    dbias, dscale, dsinks = (
        None if x is None else zeros(x) for x in (extras.bias, extras.scale, extras.sinks)
    )
    sums = _Sums(zeros(of.k), zeros(of.v), dbias, dscale, dsinks)
    sums, (dq, of_rows) = lax.scan(query_tile, sums, jnp.arange(grid.q_tiles))

    keys, given = res.inputs.k.shape[-2], res.inputs.extras
    dk, dv = (x[..., :keys, :] for x in (sums.dk, sums.dv))
    rounded = backward.round_gradients(grid.unpad_rows(dq), dk, dv, res.inputs, spec)
    if given.bias is not None and sums.dbias is not None:
        t, s = given.bias.shape[-2:]
        dbias = sums.dbias[..., :t, :s].astype(given.bias.dtype)
    if extras.sinks is not None and sums.dsinks is not None:
        dsinks = sums.dsinks.astype(extras.sinks.dtype)
    row_sums = jax.tree.map(grid.unpad_rows, of_rows)
    d_extras = Extras(bias=dbias, scale=sums.dscale, sinks=dsinks, backward_sums=row_sums)
    return (*rounded, d_extras)


def _saving(
    q: Array, k: Array, v: Array, extras: Extras, spec: Spec
) -> tuple[tuple[Array, ...], layout.Residuals]:
    """Runs the forward pass; returns its results and what is kept for the backward pass."""
    forward = differentiated_as(
        partial(_forward, spec=spec), partial(_forward, spec=spec, every_block=True)
    )
    results, saved, statistics = named(forward(q, k, v, extras))
    if spec.numerics.delta != "dp_p" and spec.numerics.saved_output == "same":
        saved = results[0]
    return results, layout.Residuals(layout.Grouped(q, k, v, extras), saved, statistics)


# A loop that ends at the causal diagonal or at a window has a traced length, and JAX cannot
# differentiate such a loop in reverse mode. Second derivatives therefore differentiate twins that
# loop over every block and compute the same values.
_attend.defvjp(
    _saving,
    lambda spec, res, cotangents: differentiated_as(
        partial(_backward, spec), partial(_backward, spec, every_block=True)
    )(res, cotangents),
)


def _grid(inputs: layout.Grouped, spec: Spec, *, backward: bool, every_block: bool) -> Grid:
    rows, keys = inputs.q.shape[-2], inputs.k.shape[-2]
    sizes = spec.block_sizes or BlockSizes()
    assert isinstance(sizes, BlockSizes)  # `unsupported` declines any other
    n = spec.numerics
    step = n.step_of(keys, DEFAULT_KV_BLOCK)
    block_q, block_kv = sizes.query, _at_most(sizes.kv_bwd, keys) if backward else step
    if backward and not n.tile_grads.is_identity:
        block_kv, block_q = step, n.step_of(rows, DEFAULT_KV_BLOCK)
    # Tiles above the diagonal have P = 0. Only some rules visit them, in the forward pass.
    skips = spec.is_causal and (backward or not spec.row_max.visits_above_diagonal)
    offset = inputs.extras.query_offset
    return Grid(
        rows=rows,
        keys=keys,
        block_q=_at_most(block_q, rows),
        block_kv=block_kv,
        is_causal=skips,
        window=spec.window,
        every_block=every_block,
        least_offset=0 if offset is None else jnp.min(offset),
        largest_offset=0 if offset is None else jnp.max(offset),
    )


def _at_most(block: int, length: Any) -> int:
    """Returns `block`, limited to `length` unless that is symbolic."""
    return min(block, length) if isinstance(length, int) else block


def _tile_scores(
    grid: Grid, extras: Extras, q: Array, k: Array, at: tuple[Index, Index], spec: Spec
) -> tuple[Array, Array | None, Place, Array | None]:
    """Returns the masked scores of a query tile against a block of keys, with their circumstances.

    Args:
      grid, extras, spec: the call.
      q, k: the query tile and the block of keys, as S reads them.
      at: the tile (i, j).

    Returns:
      The masked scores, which pairs are seen (None: all), the place of the tile, and the slope of
      the soft cap (None without a cap).
    """
    place = grid.place(*at)
    bias = None if extras.bias is None else grid.pairs(extras.bias, *at)
    s, slope = softmax.scores(q, k, bias, spec, extras, place)
    seen = _seen(grid, extras, *at, spec)
    s = visibility.mask_scores(s, seen, softmax.UNSEEN)
    if grid.kv_padding:
        s = visibility.mask_scores(s, (place.cols < grid.keys)[None, None, None], softmax.UNSEEN)
    return s, seen, place, slope


def _seen(grid: Grid, extras: Extras, i: Index, j: Index, spec: Spec) -> Array | None:
    """Which keys of block j the rows of query tile i see; None if all, padding included."""
    mask = None if extras.mask is None else grid.pairs(extras.mask, i, j)
    mask = visibility.unhidden(mask, *grid.segments(extras, i, j))
    place = grid.place(i, j)
    seen = visibility.visible(extras, spec, place, mask)
    if seen is None:
        return None
    # Padding counts as hidden, because a product of padding with NaN or infinity is not zero.
    return seen & ((place.rows < grid.rows) & (place.cols < grid.keys))[None, None, None]
