"""The arithmetic of a run beside exact arithmetic, row by row, in chunks of query rows.

The exact values are float32 throughout. Two of them are needed, because rounding the scores
changes *which* softmax is taken, consistently in forward and backward, whereas every later
rounding makes O, and with it δ, disagree with the P and dP that δ is subtracted from:

  from q, k, v           O_exact: how far the output is off in all
  from the run's own S   Ō_exact and δ_exact = rowsum(dO ∘ softmax(S) v): what enters
                         dW_Q(hp) − dW_Q(lp), where P is the same on both sides

The run is `lowprec_attn.arithmetic` and nothing else. `sources` has the exact side of the backward
pass.
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
from lowprec_attn.arithmetic.recurrence import SoftmaxState, keep_unvisited
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import rows, sources
from lowprec_attn.diagnostics.pairs import pair_sum
from lowprec_attn.numerics import EXACT, Numerics, StandardMax, get_format

# Scores held at a time, over batch and heads: 16 MiB per float32 temporary. A CPU is the faster for
# temporaries that stay in its caches.
SCORES_PER_CHUNK = 2**22
SCORES_PER_CHUNK_ON_CPU = 2**19

_CAUSAL_SECTIONS = 4

_EXACT = EXACT.replace(output="float32")


class ScoreRows(NamedTuple):
    """Properties of each row of scores as the run rounds them; see `diagnostics.rows`."""

    sees_several: Bool[Array, "B T N 1"]
    score_maximum: Float32[Array, "B T N 1"]
    level: Float32[Array, "B T N 1"]
    spread: Float32[Array, "B T N 1"]
    repeated_maxima: Bool[Array, "B T N 1"]
    rounded_to_one: Bool[Array, "B T N 1"]
    dominated: Bool[Array, "B T N 1"]


class OutputRows(NamedTuple):
    """Ō before division by l (after it, where `normalize_probs` has P̄ divided first) and O.

    Ō_exact stands on the run's own S and m, which a row-max rule and `stats` may change.
    """

    unnormalized: Float32[Array, "B T N H"]
    unnormalized_exact: Float32[Array, "B T N H"]
    output: Float32[Array, "B T N H"]
    output_exact: Float32[Array, "B T N H"]


class GradientRows(NamedTuple):
    """δ, row sums of the backward pass, rows of P k, and dQ before `tile_grads` and `grads`.

    δ_exact is rowsum(dO ∘ O) with O exact; where the run forms δ from dP, Σ P dP / Σ P of the
    run's own P and dP, at which rows of dS sum to zero. The row sums: Σ_j P − 1; Σ_j dS of
    dS = P ∘ (dP − δ), and of dS as rounded at `ds`. Their terms are the float32 numbers that the
    backward pass forms, their sums are pairs.
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
    """Results of the implementation that runs, for the same q, k, v and dO.

    Attributes:
      o: O [B, T, N, H].
      lse: as `return_residual=True` gives it, [B, T, N].
      dq: dQ [B, T, N, H], None where it is not known.
    """

    o: Float[Array, "B T N H"]
    lse: Float32[Array, "B T N"]
    dq: Float[Array, "B T N H"] | None = None


class Comparison(NamedTuple):
    """Everything per row; `gradients` is None without dO."""

    scores: ScoreRows
    outputs: OutputRows
    gradients: GradientRows | None


def compare(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    do: Float[Array, "B T N H"] | None,
    extras: Extras,
    spec: Spec,
    returned: Returned | None = None,
) -> Comparison:
    """Runs `spec` as `tiled` does, in steps of `kv_block` keys, beside exact arithmetic.

    Cost: 3 to 4 matrix products of 2·B·N·T·S·H FLOP, 4 to 7 more with dO (compilers drop those
    whose result is not used), about ten exp per score; O(T) memory beside one chunk of
    `SCORES_PER_CHUNK` scores. Without `kv_block` the step is that of `tiled`, or all keys where
    P̄ is normalised before rounding. The amax of a scale of `ds` or `output_bwd` is that of a chunk
    and its section of keys, not of the whole array. dO, and V in gradients, count as they are read.

    Args:
      q, k, v: as in `attention.dot_product_attention`.
      do: gradient of the loss by O, or None.
      extras: the random stream, where a point needs one; masks, biases and lengths are refused.
      spec: the arithmetic, scale and causality.
      returned: replaces the O and lse of this run of `spec`, where they are that of its rounding.

    Raises:
      ValueError: extras other than the stream, a soft cap, or a `kv_block` that splits rows that
        must stay whole.
    """
    if spec.soft_cap is not None:
        raise ValueError(f"diagnostics take no soft cap, got {spec.soft_cap}")
    if any(x is not None for x in extras._replace(stream=None)):
        raise ValueError("diagnostics take no mask, bias, lengths or sinks; cut the arrays instead")
    # Signals are of S, so S is formed: of an exponent that is not, errors are seen in lse alone.
    if spec.numerics.exponent == "whole_max":
        extras = extras._replace(scale=jnp.float32(spec.scale))  # P̄ would be rounded otherwise
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
    """Rows of O and lse as returned [..., T, 1]; None where they are not given."""

    o: Array | None
    lse: Array | None


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Query tile `i` against all keys: arrays as they are, and as read in either pass.

    `of` is None without dO; its rows are those of the tile.
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
            span(first_row, self.grid.block_q)[:, None],
            span(0, self.tiles.k.shape[-2])[None],
        )

    def scores(self, tiles: layout.Grouped, spec: Spec) -> Array:
        """Masked scores of all keys; tiles: `tiles` or `read`."""
        place = self.place
        q = self.grid.query_rows(tiles.q, self.i)
        s = softmax.scores(q, tiles.k, None, spec, tiles.extras, place).s
        seen = (place.cols < self.grid.keys)[None, None, None]
        by_position = visibility.visible(tiles.extras, spec, place, None)
        seen = seen if by_position is None else seen & by_position
        return visibility.mask_scores(s, seen, softmax.UNSEEN)

    def run(self, s: Array, spec: Spec) -> SoftmaxState:
        """The run's own online softmax, one step per block of keys."""
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
        # All blocks, although `grid.kv_end` would do: a GPU waits for the host before every turn
        # of a loop whose length is not known when it is compiled.
        return lax.fori_loop(0, grid.kv_blocks, step, start)

    def finish(self, state: SoftmaxState, spec: Spec) -> softmax.Output:
        tiles = self.tiles
        return softmax.finish(state, spec, tiles.extras, self.place.rows, tiles.q.dtype)


def _compare_rows(chunk: _Chunk, given: _Rows, spec: Spec) -> Comparison:
    exact_spec = dataclasses.replace(spec, numerics=_EXACT, row_max=StandardMax())
    s, unrounded = chunk.scores(chunk.read, spec), chunk.scores(chunk.tiles, exact_spec)
    state = chunk.run(s, spec)
    out = _with_returned(chunk.finish(state, spec), given, spec.numerics)
    own = exact = sources.Softmax.of(s)
    if spec.numerics.rounds_scores:
        exact = sources.Softmax.of(unrounded)
    # V as attention reads it is the same in both passes, as S is.
    acc, reads_all = own.times(chunk.read.v), spec.numerics.value.is_identity
    o_exact = (acc if exact is own and reads_all else exact.times(chunk.tiles.v)) / exact.l
    # The same sum against the run's own m; where the two m agree the factor is exactly 1.
    unnormalized_exact = acc * jnp.exp(sources.above_subtracted(own.m, state.m, spec.numerics))
    if spec.numerics.normalize_probs:
        unnormalized_exact = acc / own.l
    outputs = OutputRows(state.acc, unnormalized_exact, out.o.astype(jnp.float32), o_exact)
    gradients = None
    if chunk.of is not None:
        gradients = _gradient_rows(chunk, s, (own, exact), out, chunk.of, spec)
    return Comparison(_score_rows(s, spec), outputs, gradients)


def _with_returned(out: softmax.Output, given: _Rows, numerics: Numerics) -> softmax.Output:
    """The emulated output, with O and lse as returned where they are given.

    An O that is saved beside the O handed on is not returned, nor are m and l where they are saved
    apart: those stay emulated.
    """
    if given.o is None or given.lse is None:
        return out
    is_same = numerics.saved_output == "same" and out.o_saved is not None
    o_saved = given.o if is_same else out.o_saved
    return out._replace(o=given.o, o_saved=o_saved, lse=given.lse[..., 0])


def _score_rows(s: Array, spec: Spec) -> ScoreRows:
    return ScoreRows(
        rows.sees_several(s)[..., None],
        rows.score_maximum(s)[..., None],
        rows.level(s)[..., None],
        rows.spread(s)[..., None],
        rows.repeated_maxima(s)[..., None],
        rows.rounded_to_one(s, spec.numerics.probs)[..., None],
        rows.dominated_rows(s)[..., None],
    )


def _gradient_rows(
    chunk: _Chunk,
    s: Array,
    exact_of: tuple[sources.Softmax, sources.Softmax],
    out: softmax.Output,
    of: operands.BackwardOperands,
    spec: Spec,
) -> GradientRows:
    """`exact_of`: exact softmax of the scores with and without their rounding."""
    extras, dtype = chunk.tiles.extras, chunk.tiles.q.dtype
    place, numerics = chunk.place, spec.numerics
    tile = backward.backward_tile(s, out.statistics, of.v, of.do, spec, extras, place)
    k = of.k_of_dq
    if out.o_saved is None:
        delta = backward.rounded_delta(backward.delta_from_probs(tile), place.rows, spec, extras)
    else:
        o = operands.read(out.o_saved, "output_bwd", spec, extras)
        rows_and_dtype = place.rows, spec, extras, dtype
        delta = backward.delta_from_saved_output(of.do_of_delta, o, *rows_and_dtype)
    shift = jnp.zeros_like(delta)
    if numerics.delta in backward.SUMS_ROWS:
        shift = backward.row_sums(tile, delta, k, spec, extras, place).shift
        if numerics.delta == "after_cast":  # of dS · scale
            shift = shift / jnp.float32(spec.scale)
    float32, k_format = get_format("float32"), get_format(k.dtype.name)
    pk = products.dot("bkgts,bksh->bkgth", tile.p, k, float32, k_format)

    run = sources.Run(tile, delta, shift, out.statistics, pk)
    exact = sources.exact_rows(*exact_of, of.do, of.v)
    follows = sources.followed(exact, tile, numerics)
    # dQ of all keys at once: the tiles in which `tile_grads` would round are not these.
    multiplied = sources.multiplied_ds(run, spec, extras, place)
    sum_of_p, sum_of_p_low = pair_sum(tile.p)
    return GradientRows(
        delta + shift,
        exact.c + follows.delta + follows.dp,
        sources.delta_error(exact, run, follows),
        (sum_of_p - 1) + sum_of_p_low,
        pair_sum(backward.ds_of(tile, delta + shift))[0],
        pair_sum(multiplied)[0],
        pk,
        sources.sources(exact, run, follows, multiplied, k, numerics),
    )


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
    """Chunks of rows and the keys that they need: (first, last + 1, keys), in order.

    With causality a row needs the keys up to its own, so early rows are compared with fewer. Each
    section is a loop of its own, which takes time to compile.
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
