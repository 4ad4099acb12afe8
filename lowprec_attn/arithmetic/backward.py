"""The backward pass of one tile with every point: P, dP, δ, dS, and its part of dQ, dK and dV."""

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
    """P and dP of a tile, and what else its gradients need.

    Attributes:
      p: P [B, K, G, T, S], unrounded; 0 where a key is hidden.
      dp: dP as rounded at `dp`. It need not be finite where a key is hidden.
      seen: True where a row sees a key, broadcastable to P; None if all pairs are seen.
      apart: with `divided_in_dv='do'`, P̄ as rounded at `probs` and 1 / l [B, K, G, T, 1].
      slope: the derivative of the soft cap; None without a cap.
      ds_amax: the amax of dS over all tiles, if the scale of `ds` needs it. With None, the amax of
        this tile is used.
    """

    p: Array
    dp: Array
    seen: Array | None
    apart: tuple[Array, Array] | None = None
    slope: Array | None = None
    ds_amax: Array | None = None

    def behind_cap(self, x: Array) -> Array:
        """Multiplies P or dS by dS / d(scale · q kᵀ), the slope of a soft cap (1 if none)."""
        # The slope of a hidden pair need not be finite.
        return x if self.slope is None else _where_seen(self.seen, x * self.slope)


def undivided_probabilities(
    s: Array, statistics: RowStatistics, spec: Spec, extras: Extras, place: Place
) -> Array:
    """Returns P̄ = exp(S − m) if the statistics are m and 1 / l, else P = exp(S − lse).

    With `recomputed_probs='rounded'`, P̄ is rounded at `probs`.
    """
    subtracted, inverse_l = statistics
    if inverse_l is None:
        # A row without keys has lse = −inf. Its scores are all masked, and exp must return 0.
        subtracted = jnp.where(subtracted == -jnp.inf, jnp.float32(0), subtracted)
    if spec.numerics.exponent == "whole_max":
        p = power(s, score_unit(spec, extras) * LOG2E, subtracted)
    elif spec.numerics.exponent in ("scale_first", "unfused"):
        unit = score_unit(spec, extras)
        of_statistic = 1.0 if inverse_l is None else unit  # m has the unit of the scores
        p = powers(s, subtracted, unit, of_statistic, spec.numerics.exponent)
    else:
        p = jnp.exp(s - subtracted)
    if spec.numerics.recomputed_probs == "unrounded":
        return p
    # As in the forward pass, the random bits do not depend on the step.
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
    """Returns the tile with P and dP = round_dp(dO round_value(v)ᵀ), without slope and `ds_amax`.

    Args:
      s: masked scores [B, K, G, T, S], rounded as in the forward pass.
      statistics: the statistics of the rows, [B, K, G, T, 1].
      v, do: the values of the block and the dO of the rows, as `operands` reads them.
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
    p = _where_seen(seen, p)  # after the product, because 1 / l of a row need not be finite
    dp = dot("bkgth,bksh->bkgts", do, v, format_of(do), format_of(v))
    return BackwardTile(p, Rounder.of(spec, extras)(dp, "dp", place), seen, apart)


def _where_seen(seen: Array | None, x: Array) -> Array:
    return x if seen is None else jnp.where(seen, x, jnp.float32(0))


def delta_from_output(do: Array, o_saved: Array, numerics: Numerics, dtype: np.dtype) -> Array:
    """Returns δ = rowsum(dO ∘ O_saved), float32 [..., T, 1].

    Args:
      do, o_saved: [..., T, H], or a part of H; the caller then adds up the δ of the parts.
      numerics: `delta='do_o_storage'` rounds the products.
      dtype: dtype of the queries, whose format `output` may follow.
    """
    products = do.astype(jnp.float32) * o_saved.astype(jnp.float32)
    if numerics.delta == "do_o_storage":
        products = round_to(products, numerics.rounding_at("output", dtype).format)
    return jnp.sum(products, axis=-1, keepdims=True)


def delta_from_saved_output(
    do: Array, o_saved: Array, rows: Array, spec: Spec, extras: Extras, dtype: np.dtype
) -> Array:
    """Returns δ = round_delta_value(rowsum(dO ∘ O_saved)), [B, K, G, T, 1].

    Args:
      do, o_saved: dO and O [B, K, G, T, H]; O is already rounded at `output_bwd`.
      rows: global row indices [T, 1].
      spec, extras: the call.
      dtype: dtype of the queries.
    """
    return rounded_delta(delta_from_output(do, o_saved, spec.numerics, dtype), rows, spec, extras)


def rounded_delta(delta: Array, rows: Array, spec: Spec, extras: Extras) -> Array:
    """Rounds δ [B, K, G, T, 1] of rows [T, 1] at `delta_value`."""
    return Rounder.of(spec, extras)(delta, "delta_value", Place(rows, span(0, 1)[None]))


def delta_from_probs(tile: BackwardTile) -> Array:
    """Returns δ = rowsum(dP ∘ P) over the keys of this tile, [B, K, G, T, 1], not yet rounded."""
    return jnp.sum(_where_seen(tile.seen, tile.dp * tile.p), axis=-1, keepdims=True)


class Delta(NamedTuple):
    """The row values [..., T, 1] of dS: δ is subtracted from dP, and λ P from the rounded dS.

    Attributes:
      rounded: the δ in the dS that is rounded at `ds`.
      unrounded: the δ in the unrounded dS, for the gradients of bias, scale and sinks.
      after: λ with `delta='after_cast'`, else None.
    """

    rounded: Array
    unrounded: Array
    after: Array | None = None


class RowSums(NamedTuple):
    """The sums over keys that `delta='normalized'` and 'after_cast' need.

    Attributes:
      p_dp: Σ P (dP − δ₀) [..., T, 1]; with 'after_cast', the sum of dS · scale as rounded at `ds`.
      p: Σ P [..., T, 1]; with 'after_cast', the sum of P as rounded at `probs_bwd`.
      pk: Σ round(P) k [..., T, H].
    """

    p_dp: Array
    p: Array
    pk: Array

    @property
    def shift(self) -> Array:
        """The number by which δ exceeds δ₀; with 'after_cast', λ without the part of dlse."""
        return row_shift(self.p_dp, self.p)

    def with_sink(self, sink: SinkColumn, delta: Array, spec: Spec, extras: Extras) -> "RowSums":
        """Adds the sink's column to the sums over keys.

        δ is formed of sums over keys and sink, over which P sums to one and dS to zero. The dP of
        the sink is 0, so its dS is −P_sink δ₀, which no point rounds.
        """
        ds = -sink.p * delta
        if spec.numerics.delta == "after_cast":
            ds = ds * scale_of(spec, extras)
        return RowSums(self.p_dp + ds, self.p + sink.p, self.pk)


# The choices of `delta` that need `RowSums`, in a pass over the keys before the pass for dK.
SUMS_ROWS = ("normalized", "after_cast")


def row_shift(p_dp: Array, p: Array) -> Array:
    """Returns Σ P (dP − δ₀) / Σ P, by which a normalised δ exceeds δ₀; 0 in rows without keys."""
    empty = p == 0
    return jnp.where(empty, jnp.float32(0), p_dp / jnp.where(empty, jnp.float32(1), p))


def row_sums(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> RowSums:
    """Returns the `RowSums` over the keys of this tile; `delta` is δ₀, [B, K, G, T, 1]."""
    n = spec.numerics
    # Rows of dS = P ∘ (dP − δ) sum to zero, because softmax does not change if a whole row of S is
    # shifted. Behind a soft cap, where the slope multiplies dS, rows need not sum to zero. The sums
    # are therefore taken of dS and P before the slope, and the correction of δ subtracts slope ∘ P
    # from the dS of dQ.
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
            "bkgts,bksh->bkgth", p_rounded, k, n.probs_bwd.result_format, format_of(k), tile.seen
        ),
    )


class QueryKeys(NamedTuple):
    """The keys of dQ with `mean_key='subtracted'`.

    Attributes:
      k: k − k̄ [B, K, S, H], rounded to the format of k, the operand of the product of dQ.
      mean: k̄ [B, K, 1, H], the mean of all keys.
    """

    k: Array
    mean: Array

    def give_back(self, dq: Array, dlse: Array, spec: Spec, extras: Extras) -> Array:
        """Adds to dQ [B, K, G, T, H] the part scale · dlse · k̄, which k − k̄ leaves out of it.

        Rows of dS sum to dlse [B, K, G, T, 1], and not to zero, if lse has a gradient.
        """
        return dq + scale_of(spec, extras) * dlse * self.mean[:, :, None]


def query_keys(k: Array, spec: Spec) -> QueryKeys | None:
    """Returns the `QueryKeys` with `mean_key='subtracted'`, or None if dQ is formed of k itself."""
    return None if spec.numerics.mean_key == "kept" else without_mean(k)


def without_mean(k: Array) -> QueryKeys:
    """Subtracts the mean of all keys from k [B, K, S, H].

    `request.unsupported_row_sums` refuses the calls for which this is wrong.
    """
    x = k.astype(jnp.float32)
    mean = jnp.mean(x, axis=-2, keepdims=True)
    return QueryKeys(round_to(x - mean, format_of(k)).astype(k.dtype), mean)


def corrected(
    dq: Array, sums: RowSums, delta: Array, dlse: Array, spec: Spec, extras: Extras
) -> tuple[Array, Delta, Array]:
    """Returns the corrected dQ, the `Delta` to use in dK, and the factor that dQ lacked.

    dQ is not rounded at `grads` yet. The factor [..., T, 1] is that of the round(P) which dQ
    subtracts from the dS · scale of δ₀.

    Args:
      dq: the dQ that δ₀ gives, without dlse.
      sums: the sums over all keys.
      delta: δ₀, [..., T, 1].
      dlse: the gradient of lse, [..., T, 1]. Since d lse / dS = P, it enters dS next to δ.
      spec, extras: the call.
    """
    scale = scale_of(spec, extras)
    # The dlse of a row that sees nothing may hold any value.
    dlse = jnp.where(sums.p == 0, jnp.float32(0), dlse)
    if spec.numerics.delta == "after_cast":
        lacks = sums.shift - scale * dlse
        in_dk = Delta(delta, delta + row_shift(sums.shift, scale) - dlse, lacks)
    else:
        lacks = scale * (sums.shift - dlse)
        delta = delta + sums.shift - dlse
        in_dk = Delta(delta, delta)
    return dq - lacks * sums.pk, in_dk, lacks


class QuerySums(NamedTuple):
    """Sums over keys [..., T, 1]: of P, of the rounded dS · scale, and of the rounded P.

    The last two are taken behind a soft cap, because dQ multiplies k with these values.
    """

    p: Array
    ds: Array
    p_rounded: Array

    @classmethod
    def zeros(cls, like: Array) -> "QuerySums":
        """The sums over no key; `like` is a row statistic of the right shape."""
        zeros = jnp.zeros_like(like)
        return cls(zeros, zeros, zeros)

    def of_query_gradient(self, lacks: Array | None) -> BackwardSums:
        """The sums of the P and dS in dQ; `lacks` is the result of `lacking`, or None for 0."""
        ds = self.ds if lacks is None else self.ds - lacks * self.p_rounded
        return BackwardSums(self.p, ds)


def query_sums(
    tile: BackwardTile, delta: Array, spec: Spec, extras: Extras, place: Place
) -> QuerySums:
    """Returns the sums over the keys of this tile; `delta` is the δ of the dS in dQ."""
    p_rounded = Rounder.of(spec, extras)(tile.behind_cap(tile.p), "probs_bwd", place)
    ds = rounded_ds(tile, delta, spec, extras, place)
    return QuerySums(*(jnp.sum(x, axis=-1, keepdims=True) for x in (tile.p, ds, p_rounded)))


def ds_of(tile: BackwardTile, delta: Array) -> Array:
    """Returns dS = P ∘ (dP − δ), the gradient of S and of the bias, before rounding at `ds`."""
    return _where_seen(tile.seen, tile.p * (tile.dp - delta))


def scaled_ds(tile: BackwardTile, delta: Array, spec: Spec, extras: Extras) -> Array:
    """Returns dS · scale, behind the soft cap if there is one: the value that `ds` rounds."""
    return tile.behind_cap(ds_of(tile, delta)) * scale_of(spec, extras)


def rounded_ds(
    tile: BackwardTile, delta: Array, spec: Spec, extras: Extras, place: Place, axis: int = -1
) -> Array:
    """Returns dS · scale as rounded at `ds`; `axis` is the axis over which its product sums."""
    scaled = scaled_ds(tile, delta, spec, extras)
    return Rounder.of(spec, extras)(scaled, "ds", place, axis=axis, amax=tile.ds_amax)


def largest_ds(tile: BackwardTile, delta: Array, spec: Spec, extras: Extras) -> Array | None:
    """The `ds_amax` of this tile, [B, K, 1, 1, 1] or [1, 1, 1, 1, 1]; None if no scale needs it.

    With `delta='normalized'` it is the amax of dS before the correction that makes rows sum to
    zero, for dQ and dK alike.
    """
    scaling = spec.numerics.ds.scaling
    if scaling is None or not scaling.needs_largest:
        return None
    return largest(scaled_ds(tile, delta, spec, extras), scaling)


def query_gradient(
    tile: BackwardTile, delta: Array, k: Array, spec: Spec, extras: Extras, place: Place
) -> Array:
    """The contribution of the tile to dQ, float32 [B, K, G, T, H], rounded at `tile_grads`."""
    n = spec.numerics
    ds = rounded_ds(tile, delta, spec, extras, place)
    dq = seen_dot("bkgts,bksh->bkgth", ds, k, n.ds.result_format, format_of(k), tile.seen)
    features = span(0, k.shape[-1])[None]
    tile_place = Place(place.rows, features, tile_number(place.cols[0, 0], 0))
    return Rounder.of(spec, extras)(dq, "tile_grads", tile_place)


def key_gradients(
    tile: BackwardTile, delta: Delta, q: Array, do: Array, spec: Spec, extras: Extras, place: Place
) -> tuple[Array, Array]:
    """The contributions of the tile to dK and dV, float32 [B, K, S, H], summed over query heads.

    `tile_grads` rounds the product of each query head by itself. `q` and `do` are the operands
    `q_of_dk` and `do_of_dv` of `BackwardOperands`.
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
    """The place of λ q or dO / l of rows [T, 1]; its random bits are not those of dS or P."""
    return Place(rows, span(0, head_size)[None], 1)


def scale_gradient(tile: BackwardTile, delta: Array, q: Array, k: Array) -> Array:
    """The contribution of a tile to the gradient of a traced scale, Σ dS ∘ q kᵀ, float32."""
    ds = tile.behind_cap(ds_of(tile, delta))
    return jnp.sum(_where_seen(tile.seen, ds * query_key_products(q, k)))


def round_gradients(
    dq: Array, dk: Array, dv: Array, inputs: Grouped, spec: Spec
) -> tuple[Array, Array, Array]:
    """Rounds the finished float32 sums at `grads` and converts them to the dtypes of the inputs."""

    def finished(x: Array, like: Array, which: int) -> Array:
        h = x.shape[-1]
        # dK and dV have no group axis. `which` gives the three arrays different random bits.
        x5 = x if x.ndim == 5 else x[:, :, None]
        place = Place(span(0, x.shape[-2])[:, None], span(0, h)[None], which)
        rounded = Rounder.of(spec, inputs.extras)(x5, "grads", place, like.dtype)
        return rounded.reshape(x.shape).astype(like.dtype)

    return finished(dq, inputs.q, 0), finished(dk, inputs.k, 1), finished(dv, inputs.v, 2)
