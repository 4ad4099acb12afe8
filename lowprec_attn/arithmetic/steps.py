"""The arithmetic of one online-softmax step and of one backward tile, every point named.

`dense` takes one step over all keys, `tiled` one per block of keys; both call these functions.
Arrays are grouped by key head: q, dO, O are [B, K, G, T, H], k and v [B, K, S, H], scores
[B, K, G, T, S], row statistics [B, K, G, T, 1], for K key heads and G = N / K queries each.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, RandomStream, Spec
from lowprec_attn.numerics import (
    MASKED,
    SALTS,
    Format,
    Numerics,
    counter_bits,
    get_format,
    round_to,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile lies: global rows [T, 1] and columns [1, S] (keys, or features of an output).

    `step` is the first key of the online-softmax step, for values that every step rounds anew.
    """

    rows: Array
    cols: Array
    step: Array | int = 0


def span(start: Array | int, size: int) -> Array:
    """The indices start, ..., start + size − 1."""
    return jnp.asarray(start, jnp.int32) + jnp.arange(size, dtype=jnp.int32)


# Columns that tell the random bits of row statistics apart, where a point rounds several.
_COLUMNS = {"m": 0, "l": 1, "lse": 2, "alpha": -1}


def statistic(place: Place, name: str) -> Place:
    """The place of a row statistic: `m`, `l`, `lse`, or the exponent of `alpha`."""
    return Place(place.rows, jnp.full((1, 1), _COLUMNS[name], jnp.int32), place.step)


_FLOAT32 = get_format("float32")


class SoftmaxState(NamedTuple):
    """Running m, l [B, K, G, T, 1] and Ō [B, K, G, T, H]; Ō′ for `saved_output='auxiliary'`."""

    m: Array
    l: Array
    acc: Array
    aux: Array | None


class Grouped(NamedTuple):
    """The arrays of a call in the layout of this module."""

    q: Array
    k: Array
    v: Array
    extras: Extras


class Residuals(NamedTuple):
    """What the forward pass keeps for the backward pass: inputs, O_saved if δ needs it, lse."""

    inputs: Grouped
    o_saved: Array | None
    lse: Array


def group(q: Array, k: Array, v: Array, extras: Extras) -> Grouped:
    """From [B, T, N, H] to the layout of this module; mask and bias to [B|1, K|1, G|1, T, S]."""
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    bias, mask = (x if x is None else _group_pairs(x, kv_heads) for x in (extras.bias, extras.mask))
    return Grouped(q, k, v, extras._replace(bias=bias, mask=mask))


def _group_pairs(x: Array, kv_heads: int) -> Array:
    b, n, t, s = x.shape
    return x.reshape(b, 1, 1, t, s) if n == 1 else x.reshape(b, kv_heads, n // kv_heads, t, s)


def ungroup(o: Array, lse: Array) -> tuple[Array, Array]:
    """O and lse back to [B, T, N, H] and [B, T, N]."""
    b, k, g, t, h = o.shape
    o = o.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)
    return o, lse.reshape(b, k * g, t).transpose(0, 2, 1)


def dot(equation: str, a: Array, b: Array, a_format: Format, b_format: Format) -> Array:
    """A matrix product with float32 accumulation.

    Operands that both live in one 16-bit format go in as such (tensor cores take them so);
    otherwise both go in as float32 and are multiplied as float32, never as TF32 or bfloat16.
    """
    dtype = a_format.dtype
    if a_format.dtype != b_format.dtype or dtype.itemsize != 2:
        dtype = jnp.dtype(jnp.float32)
    return jnp.einsum(
        equation,
        a.astype(dtype),
        b.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _format_of(x: Array) -> Format:
    return get_format(x.dtype.name)


# exp(−128) is 0 in float32, and −128 a number of every format; MASKED may not be.
LEAST_SHIFT = -128.0


class Rounder(NamedTuple):
    """Rounds at the points of `numerics`; `stream` gives the random bits that a point may need."""

    numerics: Numerics
    stream: RandomStream | None

    @classmethod
    def of(cls, spec: Spec, extras: Extras) -> "Rounder":
        """The roundings of a call."""
        return cls(spec.numerics, extras.stream)

    def __call__(
        self, x: Array, point: str, place: Place, dtype: np.dtype = _FLOAT32.dtype
    ) -> Array:
        """x rounded at a point of `POINTS`; random bits are a function of the place.

        dtype: of the inputs, which `output` and `grads` follow.
        """
        rounding = self.numerics.rounding_at(point, dtype)
        if rounding.is_identity:
            return x
        bits = self._bits(x, point, place) if rounding.needs_bits else None
        return round_to(x, rounding.format, rounding.mode, bits)

    def shift(self, x: Array, place: Place) -> Array:
        """An exponent S − m or m_old − m as rounded at `shift`."""
        if self.numerics.shift.is_identity:
            return x
        return self(jnp.maximum(x, jnp.float32(LEAST_SHIFT)), "shift", place)

    def _bits(self, x: Array, point: str, place: Place) -> Array:
        stream = self.stream
        if stream is None:
            rounding = getattr(self.numerics, point)
            raise ValueError(f"{point}={rounding} draws random bits; pass key=jax.random.key(...)")
        b, k, g = x.shape[:3]
        bits = counter_bits(
            stream.seed,
            SALTS[point],
            stream.batch.reshape(b, 1, 1, 1, 1),
            # A gradient summed over a group (g = 1) is told apart by the group's first head.
            stream.head.reshape(1, k, -1, 1, 1)[:, :, :g],
            place.rows[None, None, None],
            place.cols[None, None, None],
            place.step,
        )
        return jnp.broadcast_to(bits, x.shape)


def visible(extras: Extras, spec: Spec, place: Place, mask: Array | None) -> Array | None:
    """True where a row may see a column, broadcastable to the scores; None where all may.

    Args:
      extras: for the lengths.
      spec: for causality.
      place: the tile.
      mask: the dense mask of this tile, [B|1, K|1, G|1, T|1, S|1].
    """
    positions = _positions_visible(extras, place, causal=spec.is_causal)
    if mask is None or positions is None:
        return positions if mask is None else mask
    return mask & positions


def _positions_visible(extras: Extras, place: Place, *, causal: bool) -> Array | None:
    rows, cols = (x[None, None, None] for x in (place.rows, place.cols))
    parts = []
    if causal:
        parts.append(cols <= rows)
    if extras.key_lengths is not None:
        parts.append(cols < extras.key_lengths.reshape(-1, 1, 1, 1, 1))
    if extras.query_lengths is not None:
        parts.append(rows < extras.query_lengths.reshape(-1, 1, 1, 1, 1))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def scores(
    q: Array, k: Array, bias: Array | None, spec: Spec, extras: Extras, place: Place
) -> Array:
    """S = round_scores(q kᵀ · scale + bias), not yet masked."""
    s = _products(q, k) * _scale(spec, extras)
    if bias is not None:
        s = s + bias.astype(jnp.float32)
    return Rounder.of(spec, extras)(s, "scores", place)


def _products(q: Array, k: Array) -> Array:
    return dot("bkgth,bksh->bkgts", q, k, _format_of(q), _format_of(k))


def _scale(spec: Spec, extras: Extras) -> Array:
    return jnp.float32(spec.scale) if extras.scale is None else extras.scale


def mask_scores(s: Array, seen: Array | None) -> Array:
    """Scores with MASKED where `seen` is False."""
    return s if seen is None else jnp.where(seen, s, jnp.float32(MASKED))


def initial_state(q: Array, v: Array, spec: Spec) -> SoftmaxState:
    """No key seen yet."""
    b, k, g, t, _ = q.shape
    # Like q: under `jax.shard_map` the carry of a loop varies over mesh axes as q does.
    row = jnp.zeros_like(q, jnp.float32, (b, k, g, t, 1))
    acc = jnp.zeros_like(q, jnp.float32, (b, k, g, t, v.shape[-1]))
    aux = acc if spec.numerics.saved_output == "auxiliary" else None
    return SoftmaxState(jnp.full_like(row, MASKED), row, acc, aux)


def softmax_step(
    state: SoftmaxState, s: Array, v: Array, spec: Spec, extras: Extras, place: Place
) -> SoftmaxState:
    """One online-softmax step over the scores s of one block of keys."""
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    place = dataclasses.replace(place, step=0)
    every_step = dataclasses.replace(place, step=place.cols[0, 0])
    out = Place(place.rows, span(0, v.shape[-1])[None], every_step.step)

    # O and lse do not depend on m, so no derivative goes through it: in low precision the terms
    # that it adds to theirs would not cancel.
    m = spec.row_max(lax.stop_gradient(s), state.m)
    m = round_point(m, "stats", statistic(every_step, "m"))
    # Where every key so far is masked, m == MASKED: subtract 0, so that exp gives 0, not 1.
    subtracted = jnp.where(m <= MASKED, jnp.float32(0), m)
    p = jnp.exp(round_point.shift(s - subtracted, place))
    of_alpha = statistic(every_step, "alpha")
    alpha = jnp.exp(round_point.shift(state.m - subtracted, of_alpha))

    p_rounded = round_point(p, "probs", place)
    row_sum = jnp.sum(p_rounded if n.row_sum == "rounded" else p, axis=-1, keepdims=True)
    if spec.row_max.clamp is not None:
        row_sum = jnp.maximum(row_sum, jnp.float32(spec.row_max.clamp))
    l = alpha * state.l + row_sum
    l = round_point(l, "stats", statistic(every_step, "l"))

    if n.normalize_probs:  # all keys are in this one step, so l is final
        # A row that sees no key has l = 0 and all its p = 0.
        divisor = jnp.where(m <= MASKED, 1.0, normalizer(l, round_point, place))
        p_rounded = round_point(p / divisor, "probs", place)
    pv = dot("bkgts,bksh->bkgth", p_rounded, v, n.probs.result_format, _format_of(v))
    pv = round_point(pv, "pv", out)
    rescaled = round_point(alpha * state.acc, "rescale", out)
    acc = round_point(rescaled + pv, "accumulator", out)

    aux = state.aux
    if aux is not None:
        float32 = get_format("float32")
        aux = alpha * aux + dot("bkgts,bksh->bkgth", p, v, float32, _format_of(v))
    return SoftmaxState(m, l, acc, aux)


def normalizer(l: Array, round_point: Rounder, place: Place) -> Array:
    """The final l, as it divides Ō and enters lse."""
    return round_point(l, "normalizer", statistic(place, "l"))


def visited(extras: Extras, place: Place, *, causal: bool) -> Array | None:
    """True for rows [B|1, 1, 1, T, 1] that may see a key of this step by position alone.

    A step that lies wholly above the diagonal or beyond the lengths does not exist for a row:
    whether a tile happens to contain it must not matter. A dense mask has no such structure;
    a step that it masks wholly is taken. None where every row may see some key.

    Args:
      extras: for the lengths.
      place: the tile.
      causal: whether the diagonal counts, see `RowMax.visits_above_diagonal`.
    """
    return _positions_visible(extras, Place(place.rows, place.cols[:, :1]), causal=causal)


def keep_unvisited(new: SoftmaxState, old: SoftmaxState, visited: Array | None) -> SoftmaxState:
    """The new state where a row was visited, the old one elsewhere."""
    if visited is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, visited), new, old)


class Output(NamedTuple):
    """O as handed on, the O that δ sees (None: not kept), and lse [B, K, G, T]."""

    o: Array
    o_saved: Array | None
    lse: Array


def finish(state: SoftmaxState, spec: Spec, extras: Extras, rows: Array, dtype: np.dtype) -> Output:
    """Divides by l. A row that saw no key has O = 0 and lse = −inf.

    Args:
      state: after the last step.
      spec: the call's static part.
      extras: the call's optional arrays.
      rows: global row indices [T, 1].
      dtype: of the queries.
    """
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    place = Place(rows, span(0, state.acc.shape[-1])[None])
    empty = state.m <= MASKED
    divisor = jnp.where(empty, jnp.float32(1), normalizer(state.l, round_point, place))
    acc = state.acc if n.normalize_probs else state.acc / divisor
    o = round_point(acc, "output", place, dtype).astype(n.output_dtype(dtype))

    if n.delta == "dp_p":
        saved = None
    elif n.saved_output == "same":
        saved = o
    elif n.saved_output == "float32":
        saved = acc
    else:
        assert state.aux is not None
        saved = round_to(state.aux / divisor, "bfloat16").astype(jnp.bfloat16)

    lse = state.m + jnp.log(divisor)
    lse = round_point(lse, "lse", statistic(place, "lse"))
    lse = jnp.where(empty, -jnp.inf, lse)
    return Output(o, saved, lse[..., 0])


def delta_from_output(do: Array, o_saved: Array, numerics: Numerics, dtype: np.dtype) -> Array:
    """δ = rowsum(dO ∘ O_saved), [..., 1], for queries of `dtype`; may be summed over parts of H."""
    products = do.astype(jnp.float32) * o_saved.astype(jnp.float32)
    if numerics.delta == "do_o_storage":
        products = round_to(products, numerics.rounding_at("output", dtype).format)
    return jnp.sum(products, axis=-1, keepdims=True)


class BackwardTile(NamedTuple):
    """P [B, K, G, T, S], unrounded, and dP as rounded at its point."""

    p: Array
    dp: Array


def backward_tile(
    s: Array, lse: Array, v: Array, do: Array, spec: Spec, extras: Extras, place: Place
) -> BackwardTile:
    """P = exp(S − lse) and dP = round_dp(dO vᵀ)."""
    # A row without keys has lse = −inf; its scores are all MASKED and exp must give 0.
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, jnp.float32(0), lse))
    dp = dot("bkgth,bksh->bkgts", do, v, _format_of(do), _format_of(v))
    return BackwardTile(p, Rounder.of(spec, extras)(dp, "dp", place))


def delta_from_probs(tile: BackwardTile) -> Array:
    """δ = rowsum(dP ∘ P) over the keys of this tile, [B, K, G, T, 1]."""
    return jnp.sum(tile.dp * tile.p, axis=-1, keepdims=True)


class RowSums(NamedTuple):
    """Of `delta='normalized'`: Σ P (dP − δ₀), Σ P [..., T, 1] and Σ round(P) k [..., T, H]."""

    p_dp: Array
    p: Array
    pk: Array

    @property
    def shift(self) -> Array:
        """r / s, by which δ exceeds δ₀: 0 for a row without keys."""
        return jnp.where(self.p == 0, jnp.float32(0), self.p_dp / jnp.where(self.p == 0, 1, self.p))


def row_sums(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> RowSums:
    """The sums over the keys of this tile, with δ₀ for `delta`."""
    n = spec.numerics
    p_rounded = Rounder.of(spec, extras)(tile.p, "probs_bwd", place)
    return RowSums(
        jnp.sum(tile.p * (tile.dp - delta), axis=-1, keepdims=True),
        jnp.sum(tile.p, axis=-1, keepdims=True),
        dot("bkgts,bksh->bkgth", p_rounded, k, n.probs_bwd.result_format, _format_of(k)),
    )


def corrected_dq(dq: Array, sums: RowSums, dlse: Array, spec: Spec, extras: Extras) -> Array:
    """dQ of δ₀ and without dlse as that of δ₀ + r / s − dlse, before rounding at `grads`."""
    return dq - _scale(spec, extras) * (sums.shift - dlse) * sums.pk


def ds_of(tile: BackwardTile, delta: Array) -> Array:
    """dS = P ∘ (dP − δ), the gradient of the scores and of the bias, before rounding at `ds`."""
    return tile.p * (tile.dp - delta)


def rounded_ds(tile: BackwardTile, delta: Array, spec: Spec, extras: Extras, place: Place) -> Array:
    """dS · scale as rounded at `ds`."""
    scaled = ds_of(tile, delta) * _scale(spec, extras)
    return Rounder.of(spec, extras)(scaled, "ds", place)


def query_gradient(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> Array:
    """What the tile adds to dQ, float32."""
    n = spec.numerics
    ds = rounded_ds(tile, delta, spec, extras, place)
    dq = dot("bkgts,bksh->bkgth", ds, k, n.ds.result_format, _format_of(k))
    features = span(0, k.shape[-1])[None]
    tile_place = Place(place.rows, features, tile_number(place.cols[0, 0], 0))
    return Rounder.of(spec, extras)(dq, "tile_grads", tile_place)


def key_gradients(
    tile: BackwardTile,
    delta: Array,
    q: Array,
    do: Array,
    spec: Spec,
    extras: Extras,
    place: Place,
) -> tuple[Array, Array]:
    """What the tile adds to dK and dV [B, K, S, H], float32, summed over the query heads."""
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    ds = rounded_ds(tile, delta, spec, extras, place)
    p_rounded = round_point(tile.p, "probs_bwd", place)

    def product(a: Array, b: Array, a_format: Format, which: int) -> Array:
        if n.tile_grads.is_identity:
            return dot("bkgts,bkgth->bksh", a, b, a_format, _format_of(b))
        by_head = dot("bkgts,bkgth->bkgsh", a, b, a_format, _format_of(b))
        features = span(0, b.shape[-1])[None]
        number = tile_number(place.rows[0, 0], which)
        tile_place = Place(place.cols.reshape(-1, 1), features, number)
        rounded = round_point(by_head, "tile_grads", tile_place)
        return jnp.sum(rounded, axis=2)

    dk = product(ds, q, n.ds.result_format, 1)
    return dk, product(p_rounded, do, n.probs_bwd.result_format, 2)


def tile_number(first: Array, which: int) -> Array:
    """Tells apart the random bits of dQ, dK and dV (0, 1, 2) in the tiles along their sum."""
    return 3 * first + which


def scale_gradient(ds: Array, q: Array, k: Array) -> Array:
    """Contribution of one tile to the gradient of a traced scale, Σ dS ∘ q kᵀ, float32."""
    return jnp.sum(ds * _products(q, k))


def round_gradients(
    dq: Array, dk: Array, dv: Array, inputs: Grouped, spec: Spec
) -> tuple[Array, Array, Array]:
    """The finished float32 sums, rounded at `grads` and stored in the dtypes of the inputs."""

    def finished(x: Array, like: Array, which: int) -> Array:
        h = x.shape[-1]
        # dK and dV have no group axis; `which` tells the three arrays' random bits apart.
        x5 = x if x.ndim == 5 else x[:, :, None]
        place = Place(span(0, x.shape[-2])[:, None], span(0, h)[None], which)
        rounded = Rounder.of(spec, inputs.extras)(x5, "grads", place, like.dtype)
        return rounded.reshape(x.shape).astype(like.dtype)

    return finished(dq, inputs.q, 0), finished(dk, inputs.k, 1), finished(dv, inputs.v, 2)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes along which an array of `shape` was broadcast to x."""
    axes = tuple(i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if b == 1 and a > 1)
    return jnp.sum(x, axis=axes, keepdims=True)
