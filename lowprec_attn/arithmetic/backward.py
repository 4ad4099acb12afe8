"""The backward pass of one tile, every point named: P, dP, δ, dS, what it adds to dQ, dK and dV."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic.layout import Grouped
from lowprec_attn.arithmetic.places import Place, span, tile_number
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.powers import power
from lowprec_attn.arithmetic.products import (
    LOG2E,
    dot,
    format_of,
    powers,
    query_key_products,
    scale_of,
    score_unit,
    seen_dot,
)
from lowprec_attn.arithmetic.recurrence import RowStatistics
from lowprec_attn.arithmetic.request import BackwardSums, Extras, Spec
from lowprec_attn.arithmetic.sinks import SinkColumn
from lowprec_attn.numerics import Format, Numerics, largest, round_to


class BackwardTile(NamedTuple):
    """P [B, K, G, T, S], unrounded, and dP as rounded at its point.

    `seen` is True where a row sees a key, and broadcasts to them; None: everywhere. P is 0
    elsewhere, but dP and δ may not be finite there. `apart` is P̄ as rounded at `probs`, and 1 / l
    [B, K, G, T, 1], with `divided_in_dv='do'`. `slope` is the derivative of the soft cap.
    `ds_amax` is that of dS over all tiles where the scale of `ds` asks for it; None: this is all.
    """

    p: Array
    dp: Array
    seen: Array | None
    apart: tuple[Array, Array] | None = None
    slope: Array | None = None
    ds_amax: Array | None = None

    def behind_cap(self, x: Array) -> Array:
        """P or dS, the gradient of S, times dS / d(scale · q kᵀ), which is 1 without a soft cap."""
        # Of a hidden pair the slope may not be finite.
        return x if self.slope is None else _where_seen(self.seen, x * self.slope)


def undivided_probabilities(
    s: Array, statistics: RowStatistics, spec: Spec, extras: Extras, place: Place
) -> Array:
    """P̄ = exp(S − m), rounded at `probs` where it is recomputed so; or P = exp(S − lse)."""
    subtracted, inverse_l = statistics
    if inverse_l is None:
        # A row without keys has lse = −inf; its scores are all masked and exp must give 0.
        subtracted = jnp.where(subtracted == -jnp.inf, jnp.float32(0), subtracted)
    if spec.numerics.exponent == "whole_max":
        p = power(s, score_unit(spec, extras) * LOG2E, subtracted)
    elif spec.numerics.exponent in ("scale_first", "unfused"):
        unit = score_unit(spec, extras)
        of_statistic = 1.0 if inverse_l is None else unit  # m counts as the scores do
        p = powers(s, subtracted, unit, of_statistic, spec.numerics.exponent)
    else:
        p = jnp.exp(s - subtracted)
    if spec.numerics.recomputed_probs == "unrounded":
        return p
    # As in the forward pass: random bits do not depend on the step.
    return Rounder.of(spec, extras)(p, "probs", dataclasses.replace(place, step=0))


def backward_tile(
    s: Array,
    statistics: RowStatistics,
    v: Array,
    do: Array,
    spec: Spec,
    extras: Extras,
    place: Place,
    seen: Array | None = None,
) -> BackwardTile:
    """P and dP = round_dp(dO round_value(v)ᵀ).

    Args:
      s: masked scores, as the forward pass rounded them, [B, K, G, T, S].
      statistics: of its rows, [B, K, G, T, 1].
      v, do: values of the block of keys, and dO of the rows, as `operands` reads them.
      spec, extras: the call.
      place: the tile.
      seen: see `BackwardTile`.
    """
    p = p_bar = undivided_probabilities(s, statistics, spec, extras, place)
    apart = None
    if (inverse_l := statistics.inverse_l) is not None:
        p = p_bar * inverse_l
        if spec.numerics.divided_in_dv == "do":
            apart = _where_seen(seen, p_bar), inverse_l
    p = _where_seen(seen, p)  # the last: 1 / l of a row may not be finite
    dp = dot("bkgth,bksh->bkgts", do, v, format_of(do), format_of(v))
    return BackwardTile(p, Rounder.of(spec, extras)(dp, "dp", place), seen, apart)


def _where_seen(seen: Array | None, x: Array) -> Array:
    return x if seen is None else jnp.where(seen, x, jnp.float32(0))


def delta_from_output(do: Array, o_saved: Array, numerics: Numerics, dtype: np.dtype) -> Array:
    """δ = rowsum(dO ∘ O_saved), float32 [..., T, 1].

    Args:
      do, o_saved: [..., T, H], or parts of H whose δ are added up.
      numerics: `delta='do_o_storage'` rounds the products.
      dtype: of the queries, which `output` may follow.
    """
    products = do.astype(jnp.float32) * o_saved.astype(jnp.float32)
    if numerics.delta == "do_o_storage":
        products = round_to(products, numerics.rounding_at("output", dtype).format)
    return jnp.sum(products, axis=-1, keepdims=True)


def delta_from_saved_output(
    do: Array, o_saved: Array, rows: Array, spec: Spec, extras: Extras, dtype: np.dtype
) -> Array:
    """δ = round_delta_value(rowsum(dO ∘ O_saved)), [B, K, G, T, 1].

    Args:
      do, o_saved: [B, K, G, T, H], O as rounded at `output_bwd`.
      rows: global row indices [T, 1].
      spec, extras: the call.
      dtype: of the queries.
    """
    return rounded_delta(delta_from_output(do, o_saved, spec.numerics, dtype), rows, spec, extras)


def rounded_delta(delta: Array, rows: Array, spec: Spec, extras: Extras) -> Array:
    """δ [B, K, G, T, 1] of rows [T, 1] as rounded at `delta_value`."""
    return Rounder.of(spec, extras)(delta, "delta_value", Place(rows, span(0, 1)[None]))


def delta_from_probs(tile: BackwardTile) -> Array:
    """δ = rowsum(dP ∘ P) over the keys of this tile, not rounded yet, [B, K, G, T, 1]."""
    return jnp.sum(_where_seen(tile.seen, tile.dp * tile.p), axis=-1, keepdims=True)


class Delta(NamedTuple):
    """What is subtracted from a row, [..., T, 1]: δ from dP, and λ P from dS as rounded.

    Attributes:
      rounded: the δ of the dS that is rounded at `ds`.
      unrounded: that of the dS that is not, in the gradients of a bias and of the scale.
      after: λ; None except with `delta='after_cast'`.
    """

    rounded: Array
    unrounded: Array
    after: Array | None = None


class RowSums(NamedTuple):
    """Σ P (dP − δ₀), Σ P [..., T, 1] and Σ round(P) k [..., T, H] of `delta='normalized'`.

    With 'after_cast' the first two are those of dS · scale and of P as rounded.
    """

    p_dp: Array
    p: Array
    pk: Array

    @property
    def shift(self) -> Array:
        """By which δ exceeds δ₀."""
        return row_shift(self.p_dp, self.p)

    def with_sink(self, sink: SinkColumn, delta: Array, spec: Spec, extras: Extras) -> "RowSums":
        """The sums over keys and the sink, whose dP is 0: its dS is −P_sink δ₀, which none rounds.

        Over all columns P sums to one and dS to zero, so it is these sums that δ is formed of.
        """
        ds = -sink.p * delta
        if spec.numerics.delta == "after_cast":
            ds = ds * scale_of(spec, extras)
        return RowSums(self.p_dp + ds, self.p + sink.p, self.pk)


# Choices of `delta` that ask for the sums, in a pass over the keys before that of dK.
SUMS_ROWS = ("normalized", "after_cast")


def row_shift(p_dp: Array, p: Array) -> Array:
    """Σ P (dP − δ₀) / Σ P, by which a normalised δ exceeds δ₀; 0 where p is 0, without keys."""
    empty = p == 0
    return jnp.where(empty, jnp.float32(0), p_dp / jnp.where(empty, jnp.float32(1), p))


def row_sums(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> RowSums:
    """The sums over the keys of this tile; `delta` is δ₀, [B, K, G, T, 1]."""
    n = spec.numerics
    # Rows of dS = P ∘ (dP − δ) sum to zero, because softmax is blind to a shift of a whole row. It
    # is a shift of S: behind a soft cap, where the slope multiplies dS, rows sum to anything. So
    # the sums are those of dS and P before it, and what δ lacks takes slope ∘ P from dQ.
    of_pk = tile.behind_cap(tile.p)
    p = p_rounded = Rounder.of(spec, extras)(of_pk, "probs_bwd", place)
    if n.delta == "after_cast":
        ds = rounded_ds(tile, delta, spec, extras, place)
    else:
        ds, p = ds_of(tile, delta), tile.p
    return RowSums(
        jnp.sum(ds, axis=-1, keepdims=True),
        jnp.sum(p, axis=-1, keepdims=True),
        seen_dot(
            "bkgts,bksh->bkgth",
            p_rounded,
            k,
            n.probs_bwd.result_format,
            format_of(k),
            tile.seen,
        ),
    )


class QueryKeys(NamedTuple):
    """k − k̄ [B, K, S, H], rounded to the format of k, in the products of dQ; and k̄ [B, K, 1, H]."""

    k: Array
    mean: Array

    def give_back(self, dq: Array, dlse: Array, spec: Spec, extras: Extras) -> Array:
        """dQ [B, K, G, T, H] with what dlse [B, K, G, T, 1] adds to it by way of the mean."""
        return dq + scale_of(spec, extras) * dlse * self.mean[:, :, None]


def query_keys(k: Array, spec: Spec) -> QueryKeys | None:
    """Those of `mean_key='subtracted'`; None where dQ is formed of k as it is."""
    return None if spec.numerics.mean_key == "kept" else without_mean(k)


def without_mean(k: Array) -> QueryKeys:
    """k [B, K, S, H] less the mean of all keys; see `request.unsupported_row_sums`."""
    x = k.astype(jnp.float32)
    mean = jnp.mean(x, axis=-2, keepdims=True)
    return QueryKeys(round_to(x - mean, format_of(k)).astype(k.dtype), mean)


def corrected(
    dq: Array, sums: RowSums, delta: Array, dlse: Array, spec: Spec, extras: Extras
) -> tuple[Array, Delta]:
    """dQ before rounding at `grads`, and what dS has in dK.

    Args:
      dq: that of `delta`, without dlse.
      sums: over all keys.
      delta: δ₀, [..., T, 1].
      dlse: the gradient of lse, [..., T, 1]. d lse / dS = P, so it enters dS beside δ.
      spec, extras: the call.
    """
    scale = scale_of(spec, extras)
    # Of a row that sees nothing, dlse may be anything.
    dlse = jnp.where(sums.p == 0, jnp.float32(0), dlse)
    lacks = _lacking(sums, dlse, scale, spec.numerics)
    if spec.numerics.delta == "after_cast":
        unrounded = delta + row_shift(sums.shift, scale) - dlse
        return dq - lacks * sums.pk, Delta(delta, unrounded, lacks)
    dq = dq - lacks * sums.pk
    delta = delta + sums.shift - dlse
    return dq, Delta(delta, delta)


def _lacking(sums: RowSums, dlse: Array, scale: Array, numerics: Numerics) -> Array:
    if numerics.delta == "after_cast":
        return sums.shift - scale * dlse
    return scale * (sums.shift - dlse)


def lacking(sums: RowSums, dlse: Array, spec: Spec, extras: Extras) -> Array:
    """The factor of round(P) that dQ takes from the dS · scale of δ₀, [..., T, 1]."""
    dlse = jnp.where(sums.p == 0, jnp.float32(0), dlse)
    return _lacking(sums, dlse, scale_of(spec, extras), spec.numerics)


class QuerySums(NamedTuple):
    """Sums over keys [..., T, 1]: of P, of dS · scale as rounded, and of P as rounded.

    The last two are behind a soft cap, as dQ multiplies k with them.
    """

    p: Array
    ds: Array
    p_rounded: Array

    @classmethod
    def zeros(cls, like: Array) -> "QuerySums":
        """Of no key; like: a row statistic."""
        zeros = jnp.zeros_like(like)
        return cls(zeros, zeros, zeros)

    def of_query_gradient(self, lacks: Array | None) -> BackwardSums:
        """Of the dS that dQ has; lacks: see `lacking`, None: nothing."""
        ds = self.ds if lacks is None else self.ds - lacks * self.p_rounded
        return BackwardSums(self.p, ds)


def query_sums(
    tile: BackwardTile, delta: Array, spec: Spec, extras: Extras, place: Place
) -> QuerySums:
    """Those of the keys of this tile; delta: that of the dS which dQ multiplies."""
    p_rounded = Rounder.of(spec, extras)(tile.behind_cap(tile.p), "probs_bwd", place)
    ds = rounded_ds(tile, delta, spec, extras, place)
    return QuerySums(*(jnp.sum(x, axis=-1, keepdims=True) for x in (tile.p, ds, p_rounded)))


def ds_of(tile: BackwardTile, delta: Array) -> Array:
    """dS = P ∘ (dP − δ), the gradient of S and of the bias, before rounding at `ds`."""
    return _where_seen(tile.seen, tile.p * (tile.dp - delta))


def scaled_ds(tile: BackwardTile, delta: Array, spec: Spec, extras: Extras) -> Array:
    """dS · scale, behind a soft cap: what is rounded at `ds`."""
    return tile.behind_cap(ds_of(tile, delta)) * scale_of(spec, extras)


def rounded_ds(
    tile: BackwardTile, delta: Array, spec: Spec, extras: Extras, place: Place, axis: int = -1
) -> Array:
    """dS · scale as rounded at `ds`; axis: that which its product sums over."""
    scaled = scaled_ds(tile, delta, spec, extras)
    return Rounder.of(spec, extras)(scaled, "ds", place, axis=axis, amax=tile.ds_amax)


def largest_ds(tile: BackwardTile, delta: Array, spec: Spec, extras: Extras) -> Array | None:
    """`ds_amax` of this tile alone, [B, K, 1, 1, 1] or [1, 1, 1, 1, 1]; None: no scale needs it.

    With `delta='normalized'` it is that of dS without what makes rows sum to zero, in dQ and dK.
    """
    scaling = spec.numerics.ds.scaling
    if scaling is None or not scaling.needs_largest:
        return None
    return largest(scaled_ds(tile, delta, spec, extras), scaling)


def query_gradient(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> Array:
    """What the tile adds to dQ, float32 [B, K, G, T, H], as rounded at `tile_grads`."""
    n = spec.numerics
    ds = rounded_ds(tile, delta, spec, extras, place)
    dq = seen_dot("bkgts,bksh->bkgth", ds, k, n.ds.result_format, format_of(k), tile.seen)
    features = span(0, k.shape[-1])[None]
    tile_place = Place(place.rows, features, tile_number(place.cols[0, 0], 0))
    return Rounder.of(spec, extras)(dq, "tile_grads", tile_place)


def key_gradients(
    tile: BackwardTile,
    delta: Delta,
    q: Array,
    do: Array,
    spec: Spec,
    extras: Extras,
    place: Place,
) -> tuple[Array, Array]:
    """What the tile adds to dK and dV, float32 [B, K, S, H], summed over the query heads.

    At `tile_grads` the product of each query head is rounded by itself. q and do are those of
    products over rows (`operands`).
    """
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    ds = rounded_ds(tile, delta.rounded, spec, extras, place, axis=-2)
    p_rounded = round_point(tile.p, "probs_bwd", place, axis=-2)

    def product(a: Array, b: Array, formats: tuple[Format, Format], which: int) -> Array:
        if n.tile_grads.is_identity:
            return seen_dot("bkgts,bkgth->bksh", a, b, *formats, tile.seen)
        by_head = seen_dot("bkgts,bkgth->bkgsh", a, b, *formats, tile.seen)
        features = span(0, b.shape[-1])[None]
        number = tile_number(place.rows[0, 0], which)
        tile_place = Place(place.cols.reshape(-1, 1), features, number)
        rounded = round_point(by_head, "tile_grads", tile_place)
        return jnp.sum(rounded, axis=2)

    dk = product(ds, q, (n.ds.result_format, format_of(q)), 1)
    if delta.after is not None:
        features = scaled_rows(place.rows, q.shape[-1])
        rows = round_point(delta.after * q.astype(jnp.float32), "ds", features)
        p_format, ds_format = n.probs_bwd.result_format, n.ds.result_format
        dk = dk - seen_dot("bkgts,bkgth->bksh", p_rounded, rows, p_format, ds_format, tile.seen)
    if tile.apart is None:
        return dk, product(p_rounded, do, (n.probs_bwd.result_format, format_of(do)), 2)
    p_bar, inverse_l = tile.apart
    features = scaled_rows(place.rows, do.shape[-1])
    do = round_point(do.astype(jnp.float32) * inverse_l, "probs_bwd", features)
    return dk, product(p_bar, do, (n.probs.result_format, n.probs_bwd.result_format), 2)


def scaled_rows(rows: Array, head_size: int) -> Place:
    """The place of λ q, or of dO / l, of rows [T, 1]: its random bits are not those of dS or P."""
    return Place(rows, span(0, head_size)[None], 1)


def scale_gradient(tile: BackwardTile, delta: Array, q: Array, k: Array) -> Array:
    """Contribution of one tile to the gradient of a traced scale, Σ dS ∘ q kᵀ, float32."""
    ds = tile.behind_cap(ds_of(tile, delta))
    return jnp.sum(_where_seen(tile.seen, ds * query_key_products(q, k)))


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
