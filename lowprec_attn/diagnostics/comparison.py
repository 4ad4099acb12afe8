"""The arithmetic of a run beside exact arithmetic, row by row, in chunks of query rows.

The exact values are float32 throughout. Two of them are needed, because rounding the scores
changes *which* softmax is taken, consistently in forward and backward, whereas every later
rounding makes O, and with it δ, disagree with the P and dP that δ is subtracted from:

  from q, k, v           O_exact: how far the output is off in all
  from the run's own S   Ō_exact and δ_exact = rowsum(dO ∘ softmax(S) v): what enters
                         dW_Q(hp) − dW_Q(lp), where P is the same on both sides

Nothing here is arithmetic of its own: all of it is `lowprec_attn.arithmetic`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from lowprec_attn.arithmetic import backward, layout, products, softmax, visibility
from lowprec_attn.arithmetic.grid import Grid
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.recurrence import SoftmaxState, keep_unvisited
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import rows
from lowprec_attn.numerics import EXACT, StandardMax, get_format

# Scores held at a time, over batch and heads: 16 MiB per float32 temporary. A CPU is the faster for
# temporaries that stay in its caches.
SCORES_PER_CHUNK = 2**22
SCORES_PER_CHUNK_ON_CPU = 2**20

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
    """δ, row sums of the backward pass, rows of P k, and dQ before rounding at `grads`.

    δ_exact is rowsum(dO ∘ O) with O exact; where the run forms δ from dP, Σ P dP / Σ P of the
    run's own P and dP, at which rows of dS sum to zero. The row sums: Σ_j P − 1; Σ_j dS of
    dS = P ∘ (dP − δ), and of dS as rounded at `ds`.
    """

    delta: Float32[Array, "B T N 1"]
    delta_exact: Float32[Array, "B T N 1"]
    p_row_sum_error: Float32[Array, "B T N 1"]
    ds_row_sum: Float32[Array, "B T N 1"]
    rounded_ds_row_sum: Float32[Array, "B T N 1"]
    pk: Float32[Array, "B T N H"]
    dq: Float32[Array, "B T N H"]


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
) -> Comparison:
    """Runs `spec` as `tiled` does, in steps of `kv_block` keys, beside exact arithmetic.

    Cost: 3 to 4 matrix products of 2·B·N·T·S·H FLOP, 3 more with dO (compilers drop those
    whose result is not used), about ten exp per score; O(T) memory beside one chunk of
    `SCORES_PER_CHUNK` scores. Without `kv_block` the step is that of `tiled`, or all keys where
    P̄ is normalised before rounding.

    Args:
      q, k, v: as in `attention.dot_product_attention`.
      do: gradient of the loss by O, or None.
      extras: the random stream, where a point needs one; masks, biases and lengths are refused.
      spec: the arithmetic, scale and causality.

    Raises:
      ValueError: extras other than the stream, or a `kv_block` that splits rows that must stay
        whole.
    """
    if any(x is not None for x in extras._replace(stream=None)):
        raise ValueError("diagnostics take no mask, bias or lengths; cut the arrays instead")
    # Signals are of S, so S is formed; what an exponent adds to errors is not seen here.
    spec = dataclasses.replace(spec, numerics=spec.numerics.replace(exponent=None))
    grid = _grid(q, k, spec)
    tiles = grid.pad(layout.group(q, k, v, extras))
    do_tiles = None if do is None else grid.pad_rows(layout.group(do, k, v, Extras()).q)

    def chunk(i: Array) -> Comparison:
        do_tile = None if do_tiles is None else grid.query_rows(do_tiles, i)
        return _compare_rows(_Chunk(grid, tiles, i), do_tile, spec)

    stacked = lax.map(chunk, jnp.arange(grid.q_tiles))
    return jax.tree.map(lambda x: _ungroup(grid.unpad_rows(x)), stacked)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Query tile `i` against all keys."""

    grid: Grid
    tiles: layout.Grouped
    i: Array

    @property
    def q(self) -> Array:
        return self.grid.query_rows(self.tiles.q, self.i)

    @property
    def place(self) -> Place:
        first_row = self.i * self.grid.block_q
        return Place(
            span(first_row, self.grid.block_q)[:, None],
            span(0, self.tiles.k.shape[-2])[None],
        )

    def scores(self, spec: Spec) -> Array:
        tiles, place = self.tiles, self.place
        s = softmax.scores(self.q, tiles.k, None, spec, tiles.extras, place)
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
            v_block = grid.key_rows(self.tiles.v, j)
            new = softmax.softmax_step(state, s_block, v_block, spec, extras, place)
            causal = spec.is_causal and not spec.row_max.visits_above_diagonal
            visited = visibility.visited(
                extras, place, grid.keys, causal=causal, window=spec.window
            )
            return keep_unvisited(new, state, visited)

        start = softmax.initial_state(self.q, self.tiles.v, spec)
        # All blocks, although `grid.kv_end` would do: a GPU waits for the host before every turn
        # of a loop whose length is not known when it is compiled.
        return lax.fori_loop(0, grid.kv_blocks, step, start)

    def exact(self, s: Array, spec: Spec) -> SoftmaxState:
        """Float32 softmax of s in one step over all keys."""
        start = softmax.initial_state(self.q, self.tiles.v, spec)
        return softmax.softmax_step(start, s, self.tiles.v, spec, self.tiles.extras, self.place)

    def finish(self, state: SoftmaxState, spec: Spec) -> softmax.Output:
        tiles = self.tiles
        return softmax.finish(state, spec, tiles.extras, self.place.rows, tiles.q.dtype)


def _compare_rows(chunk: _Chunk, do: Array | None, spec: Spec) -> Comparison:
    exact_spec = dataclasses.replace(spec, numerics=_EXACT, row_max=StandardMax())
    s = chunk.scores(spec)
    state = chunk.run(s, spec)
    out = chunk.finish(state, spec)
    # V as attention reads it is the same in both passes, as S is.
    as_read = _EXACT.replace(value=spec.numerics.value)
    same_scores = chunk.exact(s, dataclasses.replace(exact_spec, numerics=as_read))
    o_same_scores = chunk.finish(same_scores, exact_spec).o
    if spec.numerics.scores.is_identity and spec.numerics.value.is_identity:
        o_exact = o_same_scores
    else:
        exact = chunk.exact(chunk.scores(exact_spec), exact_spec)
        o_exact = chunk.finish(exact, exact_spec).o
    if spec.numerics.normalize_probs:
        unnormalized_exact = o_same_scores
    else:
        # The same sum against the run's own m; where the two m agree the factor is exactly 1.
        unnormalized_exact = same_scores.acc * jnp.exp(same_scores.m - state.m)
    outputs = OutputRows(state.acc, unnormalized_exact, out.o.astype(jnp.float32), o_exact)
    gradients = None if do is None else _gradient_rows(chunk, s, out, o_same_scores, do, spec)
    return Comparison(_score_rows(s, spec), outputs, gradients)


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
    chunk: _Chunk, s: Array, out: softmax.Output, o_exact: Array, do: Array, spec: Spec
) -> GradientRows:
    _, k, v, extras = chunk.tiles
    q, place = chunk.q, chunk.place
    float32, k_format = get_format("float32"), get_format(k.dtype.name)
    tile = backward.backward_tile(s, out.statistics, v, do, spec, extras, place)
    if out.o_saved is None:
        delta = backward.rounded_delta(backward.delta_from_probs(tile), place.rows, spec, extras)
    else:
        delta = backward.delta_from_saved_output(do, out.o_saved, place.rows, spec, extras, q.dtype)
    exact = backward.delta_from_output(do, o_exact, _EXACT, q.dtype)
    if spec.numerics.delta in ("normalized", "dp_p"):  # of dP as rounded; its error is not δ's
        exact = exact + backward.row_sums(tile, exact, k, spec, extras, place).shift
    if spec.numerics.delta == "normalized":
        delta = delta + backward.row_sums(tile, delta, k, spec, extras, place).shift
    # dQ of all keys at once: the tiles in which `tile_grads` would round are not these.
    whole = dataclasses.replace(spec, numerics=spec.numerics.replace(tile_grads="float32"))
    dq = backward.query_gradient(tile, delta, k, whole, extras, place)
    rounded_ds = backward.rounded_ds(tile, delta, spec, extras, place)
    pk = products.dot("bkgts,bksh->bkgth", tile.p, k, float32, k_format)

    def over_row(x: Array) -> Array:
        return jnp.sum(x, axis=-1, keepdims=True)

    return GradientRows(
        delta,
        exact,
        over_row(tile.p) - 1,
        over_row(backward.ds_of(tile, delta)),
        over_row(rounded_ds) / jnp.float32(spec.scale),
        pk,
        dq,
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


def _ungroup(x: Array) -> Array:
    b, k, g, t, f = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, f)
