"""Compares a run's arithmetic with exact arithmetic, row by row, in chunks of query rows.

The exact values are float32 throughout. They are computed from two starting points. Rounding the
scores changes *which* softmax is taken, consistently in the forward and backward pass. Every later
rounding makes O, and with it δ, disagree with P and dP in dS = P ∘ (dP − δ). Therefore

  q, k, v          give O_exact, from which the whole error of the output is measured;
  the run's own S  gives Ō_exact and δ_exact = rowsum(dO ∘ softmax(S) v), whose errors enter
                   dW_Q(hp) − dW_Q(lp), where P is the same on both sides.

The run is computed by `lowprec_attn.arithmetic` alone, and the exact side of the backward pass by
`sources`. S is what softmax sees, after a soft cap. Sums of P and of dS include the column of a
sink.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from lowprec_attn.arithmetic import backward, layout, operands, products, softmax, visibility
from lowprec_attn.arithmetic.grid import Grid
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.recurrence import RowStatistics, SoftmaxState, keep_unvisited
from lowprec_attn.arithmetic.request import Extras, Request, Spec, unsupported_row_sums
from lowprec_attn.arithmetic.sinks import SinkColumn, column
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import rows, sources
from lowprec_attn.diagnostics.pairs import pair_sum
from lowprec_attn.numerics import EXACT, Numerics, StandardMax, get_format

# Scores held at a time, over batch and heads: 16 MiB per float32 temporary. A CPU is faster with
# temporaries that stay in its caches.
SCORES_PER_CHUNK = 2**22
SCORES_PER_CHUNK_ON_CPU = 2**19

_CAUSAL_SECTIONS = 4

_EXACT = EXACT.replace(output="float32")


class ScoreRows(NamedTuple):
    """Properties of each row of scores as the run rounds them; see `diagnostics.rows`.

    `uncapped_maximum` is max |scale · q kᵀ| before the soft cap and any rounding of scores. It is
    None without a soft cap.
    """

    sees_several: Bool[Array, "B T N 1"]
    score_maximum: Float32[Array, "B T N 1"]
    level: Float32[Array, "B T N 1"]
    spread: Float32[Array, "B T N 1"]
    repeated_maxima: Bool[Array, "B T N 1"]
    rounded_to_one: Bool[Array, "B T N 1"]
    dominated: Bool[Array, "B T N 1"]
    uncapped_maximum: Float32[Array, "B T N 1"] | None


class OutputRows(NamedTuple):
    """Ō and O of the run, and the exact values of both.

    Ō is taken before the division by l, or after it where `normalize_probs` divides P̄ first.
    Ō_exact follows from the run's own S and m; a row-max rule and `stats` may change m.
    """

    unnormalized: Float32[Array, "B T N V"]
    unnormalized_exact: Float32[Array, "B T N V"]
    output: Float32[Array, "B T N V"]
    output_exact: Float32[Array, "B T N V"]


class GradientRows(NamedTuple):
    """δ, row sums of the backward pass, rows of P k, and dQ unrounded at `tile_grads` and `grads`.

    With a soft cap, `pk` is slope ∘ P k.

    `delta_exact` is rowsum(dO ∘ O) with O exact. Where the run forms δ from dP, or recomputes P̄ as
    it was rounded, it is Σ P dP / Σ P of the run's own P and dP: with this δ rows of dS sum to
    zero.

    `p_row_sum_error` is Σ_j P − 1, `ds_row_sum` is Σ_j dS for dS = P ∘ (dP − δ), and
    `rounded_ds_row_sum` is Σ_j dS for dS as rounded at `ds`. Their terms are the float32 numbers
    that the backward pass forms; their sums are pairs (`diagnostics.pairs`). Both sums of dS
    include the dS of the sink, −P_sink δ. With a soft cap, `ds_row_sum` is of dS before the slope.
    The sum of a row of rounded dS over the keys is then not zero in exact arithmetic, and
    `rounded_ds_row_sum` is its difference from the exact sum.
    """

    delta: Float32[Array, "B T N 1"]
    delta_exact: Float32[Array, "B T N 1"]
    delta_error: Float32[Array, "B T N 1"]
    p_row_sum_error: Float32[Array, "B T N 1"]
    ds_row_sum: Float32[Array, "B T N 1"]
    rounded_ds_row_sum: Float32[Array, "B T N 1"]
    pk: Float32[Array, "B T N H"]
    dq: sources.Sources


class Returned(NamedTuple):
    """What the implementation that runs returned for the same q, k, v and dO.

    Attributes:
      o: O [B, T, N, V].
      lse: as `return_residual=True` returns it, [B, T, N].
      dq: dQ [B, T, N, H]; None where it is not known.
    """

    o: Float[Array, "B T N V"]
    lse: Float32[Array, "B T N"]
    dq: Float[Array, "B T N H"] | None = None


class Comparison(NamedTuple):
    """All quantities of every row; `gradients` is None without dO."""

    scores: ScoreRows
    outputs: OutputRows
    gradients: GradientRows | None


def compare(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    do: Float[Array, "B T N V"] | None,
    extras: Extras,
    spec: Spec,
    returned: Returned | None = None,
) -> Comparison:
    """Runs `spec` as `tiled` does, in steps of `kv_block` keys, beside exact arithmetic.

    Cost: 3 to 4 matrix products of 2·B·N·T·S·H FLOP, 4 to 7 more with dO (compilers drop those
    whose result is not used), and about ten exp per score. Memory: O(T), and one chunk of
    `SCORES_PER_CHUNK` scores.

    Without `kv_block` a step takes the default number of keys of `tiled`, or all keys where P̄ is
    normalised before rounding. A scale of `ds` or `output_bwd` takes its amax over a chunk and its
    section of keys, not over the whole array. The exact side reads dO, and V in gradients, as the
    run's backward pass reads them.

    Args:
      q, k, v: as in `attention.dot_product_attention`.
      do: gradient of the loss by O, or None.
      extras: sinks, and the random stream where a point needs one. Masks, biases and lengths are
        refused.
      spec: the arithmetic, scale, soft cap and causality.
      returned: replaces the emulated O and lse; see `_with_returned`.

    Raises:
      ValueError: `extras` holds something else, `kv_block` splits rows that must stay whole, or
        `spec` relies on a sum of rows of dS that they do not have with a soft cap or sinks.
    """
    if any(x is not None for x in extras._replace(stream=None, sinks=None)):
        raise ValueError("diagnostics take no mask, bias or lengths; cut the arrays instead")
    if spec.soft_cap is not None or extras.sinks is not None:
        refused = unsupported_row_sums(Request.of(q, k, extras, spec, v))
        if refused is not None:
            raise ValueError(f"no attention has {refused}")
    # Signals are measured on S, so S is formed. Where `exponent` forms none, its errors show in lse
    # alone. `whole_max` is kept, because without it P̄ would be rounded against another maximum.
    if spec.numerics.exponent == "whole_max":
        extras = extras._replace(scale=jnp.float32(spec.scale))  # it is multiplied into S
    else:
        spec = dataclasses.replace(spec, numerics=spec.numerics.replace(exponent=None))
    grid = _grid(q, k, spec)
    inputs = layout.group(q, k, v, extras)
    tiles, read = grid.pad(inputs), grid.pad(operands.forward_operands(inputs, spec))

    def grouped(x: Array) -> Array:
        return layout.group(x, k, v, Extras()).q

    rows_of: _Rows = _Rows(
        None if returned is None else grid.pad_rows(grouped(returned.o)),
        None if returned is None else grid.pad_rows(grouped(returned.lse[..., None])),
    )
    of = None
    if do is not None:
        of = operands.backward_operands(inputs, grouped(do), spec)
        of_q = backward.query_keys(of.k, spec)
        of = of if of_q is None else of._replace(k_of_dq=of_q.k)
        of = of.with_rows(grid.pad_rows).with_keys(grid.pad_keys)

    def section(first: int, last: int, keys: int) -> Comparison:
        cut = dataclasses.replace(grid, keys=keys)
        seen = cut.kv_blocks * cut.block_kv
        of_keys, read_keys = (
            x._replace(k=x.k[:, :, :seen], v=x.v[:, :, :seen]) for x in (tiles, read)
        )

        def chunk(i: Array) -> Comparison:
            def rows_at(x: Array) -> Array:
                return cut.query_rows(x, i)

            of_rows = of
            if of is not None:
                of_rows = of.with_rows(rows_at).with_keys(lambda x: x[:, :, :seen])
            given = jax.tree.map(rows_at, rows_of)
            return _compare_rows(_Chunk(cut, of_keys, read_keys, of_rows, i), given, spec)

        return lax.map(chunk, jnp.arange(first, last))

    sections = [section(*bounds) for bounds in _sections(grid, spec)]
    stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *sections)
    return jax.tree.map(lambda x: _ungroup(grid.unpad_rows(x)), stacked)


class _Rows(NamedTuple):
    """Rows of the returned O and lse [..., T, 1]; None where they are not given."""

    o: Array | None
    lse: Array | None


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Query tile `i` against all keys.

    Attributes:
      grid: the tiles of the call.
      tiles: the arrays as they were given.
      read: the arrays as the forward pass reads them.
      of: the arrays as the backward pass reads them, with the rows of this tile; None without dO.
      i: the number of the query tile.
    """

    grid: Grid
    tiles: layout.Grouped
    read: layout.Grouped
    of: operands.BackwardOperands | None
    i: Array

    @property
    def place(self) -> Place:
        first_row = self.i * self.grid.block_q
        return Place(
            span(first_row, self.grid.block_q)[:, None], span(0, self.tiles.k.shape[-2])[None]
        )

    def scores(self, tiles: layout.Grouped, spec: Spec) -> softmax.Scores:
        """Returns the masked scores of all keys; `tiles` is `self.tiles` or `self.read`."""
        place = self.place
        q = self.grid.query_rows(tiles.q, self.i)
        s, slope = softmax.scores(q, tiles.k, None, spec, tiles.extras, place)
        seen = (place.cols < self.grid.keys)[None, None, None]
        by_position = visibility.visible(tiles.extras, spec, place, None)
        seen = seen if by_position is None else seen & by_position
        return softmax.Scores(visibility.mask_scores(s, seen, softmax.UNSEEN), slope)

    @property
    def sinks(self) -> Array | None:
        """Scores of the sinks, float32 [1, K, G, 1, 1]."""
        sinks = self.tiles.extras.sinks
        return None if sinks is None else sinks.astype(jnp.float32)

    def sink_column(self, statistics: RowStatistics, spec: Spec) -> SinkColumn | None:
        """The column of the sinks in the run's backward pass; None without sinks."""
        extras = self.tiles.extras
        if extras.sinks is None:
            return None
        sees = jnp.ones_like(statistics.subtracted, bool)  # `signals` refuses rows without keys
        unit = products.score_unit(spec, extras)
        return column(statistics, sees, self.place.rows, unit, spec, extras)

    def run(self, s: Array, spec: Spec) -> SoftmaxState:
        """Computes the run's own online softmax, one step per block of keys."""
        grid, extras = self.grid, self.tiles.extras

        def step(j: Array, state: SoftmaxState) -> SoftmaxState:
            place = grid.place(self.i, j)
            s_block = lax.dynamic_slice_in_dim(s, j * grid.block_kv, grid.block_kv, axis=4)
            v_block = grid.key_rows(self.read.v, j)
            new = softmax.softmax_step(state, s_block, v_block, spec, extras, place)
            causal = spec.is_causal and not spec.row_max.visits_above_diagonal
            visited = visibility.visited(
                extras, place, grid.keys, causal=causal, window=spec.window
            )
            return keep_unvisited(new, state, visited)

        q = grid.query_rows(self.tiles.q, self.i)
        start = softmax.initial_state(q, self.tiles.v, spec, self.tiles.extras)
        # The loop visits all blocks, although it could end at `grid.kv_end`: in a loop whose length
        # is not known at compile time, a GPU waits for the host before every iteration.
        return lax.fori_loop(0, grid.kv_blocks, step, start)


def _compare_rows(chunk: _Chunk, given: _Rows, spec: Spec) -> Comparison:
    exact_spec = dataclasses.replace(spec, numerics=_EXACT, row_max=StandardMax())
    of_run = chunk.scores(chunk.read, spec)
    unrounded = chunk.scores(chunk.tiles, exact_spec).s
    state, tiles = chunk.run(of_run.s, spec), chunk.tiles
    out = softmax.finish(state, spec, tiles.extras, chunk.place.rows, tiles.q.dtype)
    out = _with_returned(out, given, spec.numerics)
    unit = products.score_unit(spec, tiles.extras)
    s = of_run.s if unit == 1 else of_run.s * jnp.float32(unit)
    own = exact = sources.Softmax.of(s, chunk.sinks)
    if spec.numerics.rounds_scores:
        exact = sources.Softmax.of(unrounded, chunk.sinks)
    # Attention reads the same V in both passes, and the same S.
    acc, reads_all = own.times(chunk.read.v), spec.numerics.value.is_identity
    o_exact = (acc if exact is own and reads_all else exact.times(tiles.v)) / exact.l
    # The exact sum, shifted to the run's own m. Where the two m agree the factor is exactly 1.
    unnormalized_exact = acc * jnp.exp(sources.above_subtracted(own.m, state.m, spec.numerics))
    if spec.numerics.normalize_probs:
        unnormalized_exact = acc / own.l
    outputs = OutputRows(state.acc, unnormalized_exact, out.o.astype(jnp.float32), o_exact)
    gradients = None
    if chunk.of is not None:
        gradients = _gradient_rows(chunk, of_run, (own, exact), out, chunk.of, spec)
    return Comparison(_score_rows(chunk, s, spec), outputs, gradients)


def _with_returned(out: softmax.Output, given: _Rows, numerics: Numerics) -> softmax.Output:
    """Returns the emulated output, with the returned O and lse in place where they are given.

    An implementation returns neither an O that it saves beside its output, nor m and l where it
    saves them apart. These stay emulated.
    """
    if given.o is None or given.lse is None:
        return out
    is_same = numerics.saved_output == "same" and out.o_saved is not None
    o_saved = given.o if is_same else out.o_saved
    return out._replace(o=given.o, o_saved=o_saved, lse=given.lse[..., 0])


def _score_rows(chunk: _Chunk, s: Array, spec: Spec) -> ScoreRows:
    uncapped = None
    if spec.soft_cap is not None:
        plain = dataclasses.replace(spec, numerics=_EXACT, soft_cap=None)
        uncapped = rows.score_maximum(chunk.scores(chunk.read, plain).s)[..., None]
    return ScoreRows(
        rows.sees_several(s)[..., None],
        rows.score_maximum(s)[..., None],
        rows.level(s)[..., None],
        rows.spread(s)[..., None],
        rows.repeated_maxima(s)[..., None],
        rows.rounded_to_one(s, spec.numerics.probs, chunk.sinks)[..., None],
        rows.dominated_rows(s, sink=chunk.sinks)[..., None],
        uncapped,
    )


def _gradient_rows(
    chunk: _Chunk,
    scores: softmax.Scores,
    exact_of: tuple[sources.Softmax, sources.Softmax],
    out: softmax.Output,
    of: operands.BackwardOperands,
    spec: Spec,
) -> GradientRows:
    """Returns the rows of the backward pass.

    `exact_of` is the exact softmax of the scores with and without their rounding.
    """
    extras, dtype = chunk.tiles.extras, chunk.tiles.q.dtype
    place, numerics = chunk.place, spec.numerics
    tile = backward.backward_tile(scores.s, out.statistics, of.v, of.do, spec, extras, place)
    tile = tile._replace(slope=scores.slope)
    sink = chunk.sink_column(out.statistics, spec)
    k = of.k_of_dq
    if out.o_saved is None:
        delta = backward.rounded_delta(backward.delta_from_probs(tile), place.rows, spec, extras)
    else:
        o = operands.read(out.o_saved, "output_bwd", spec, extras)
        rows_and_dtype = place.rows, spec, extras, dtype
        delta = backward.delta_from_saved_output(of.do_of_delta, o, *rows_and_dtype)
    shift = jnp.zeros_like(delta)
    if numerics.delta in backward.SUMS_ROWS:
        sums = backward.row_sums(tile, delta, k, spec, extras, place)
        shift = (sums if sink is None else sums.with_sink(sink, delta, spec, extras)).shift
        if numerics.delta == "after_cast":  # its shift is that of dS · scale
            shift = shift / jnp.float32(spec.scale)
    float32, k_format = get_format("float32"), get_format(k.dtype.name)
    pk = products.dot("bkgts,bksh->bkgth", tile.behind_cap(tile.p), k, float32, k_format)

    sink_p = None if sink is None else sink.p
    run = sources.Run(tile, delta, shift, out.statistics, pk)
    exact = sources.exact_rows(*exact_of, of.do, of.v)
    follows = sources.followed(exact, tile, sink_p, numerics)
    # dQ is summed over all keys at once, not over the tiles in which `tile_grads` rounds.
    multiplied = sources.multiplied_ds(run, spec, extras, place)
    sum_of_p, sum_of_p_low = pair_sum(_with_column(tile.p, sink_p))
    sink_ds = None if sink_p is None else -sink_p * (delta + shift)  # no point rounds it
    if spec.soft_cap is None:
        rounded = _with_column(multiplied, sink_ds)
    else:
        rounded = multiplied - tile.behind_cap(exact.own.ds)
    return GradientRows(
        delta + shift,
        exact.c + follows.delta + follows.dp,
        sources.delta_error(exact, run, follows),
        (sum_of_p - 1) + sum_of_p_low,
        pair_sum(_with_column(backward.ds_of(tile, delta + shift), sink_ds))[0],
        pair_sum(rounded)[0],
        pk,
        sources.sources(exact, run, follows, multiplied, k, numerics),
    )


def _with_column(x: Array, of_sink: Array | None) -> Array:
    """Returns x [..., T, S] with the column of the sinks [..., T, 1] appended, if there is one."""
    return x if of_sink is None else jnp.concatenate([x, of_sink], axis=-1)


def _grid(q: Array, k: Array, spec: Spec) -> Grid:
    (batch, length, heads, _), keys = q.shape, k.shape[1]
    n = spec.numerics
    block_kv = n.step_of(keys, keys if n.normalize_probs else tiled.DEFAULT_KV_BLOCK)
    if n.normalize_probs and block_kv < keys:
        raise ValueError(
            f"normalize_probs takes one step over all {keys} keys, got kv_block={n.kv_block}; "
            "leave it out"
        )
    on_cpu = jax.default_backend() == "cpu"
    scores = SCORES_PER_CHUNK_ON_CPU if on_cpu else SCORES_PER_CHUNK
    chunks = -(-length // max(scores // (batch * heads * keys), 8))
    return Grid(
        rows=length,
        keys=keys,
        block_q=-(-length // chunks),
        block_kv=block_kv,
        is_causal=spec.is_causal,
    )


def _sections(grid: Grid, spec: Spec) -> list[tuple[int, int, int]]:
    """Returns ranges of chunks and the keys that each needs: (first, last + 1, keys), in order.

    Under the causal mask a row needs the keys up to its own, so early rows are compared with fewer
    keys. Each section is a loop of its own, which takes time to compile.
    """
    if not spec.is_causal or spec.row_max.visits_above_diagonal:
        return [(0, grid.q_tiles, grid.keys)]
    blocks = {-(-grid.kv_blocks * part // _CAUSAL_SECTIONS) for part in range(1, _CAUSAL_SECTIONS)}
    sections, first = [], 0
    for keys in sorted(n * grid.block_kv for n in blocks if n < grid.kv_blocks):
        last = min(keys // grid.block_q, grid.q_tiles)
        if last > first:
            sections.append((first, last, keys))
            first = last
    return [*sections, (first, grid.q_tiles, grid.keys)] if first < grid.q_tiles else sections


def _ungroup(x: Array) -> Array:
    b, k, g, t, f = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, f)
