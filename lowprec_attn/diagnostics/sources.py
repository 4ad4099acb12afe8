"""Splits the error of dQ, and with it the error of W_Q's gradient, into one part per source.

dW_Q of a head is scale · Xᵀ (dS K), which is linear in dS. So where the error of dS is split into
parts, the dW_Q of the parts add up. For each row

  P, dP, δ, round(dS)   are the values of the run's backward pass, with dS = P ∘ (dP − δ);
  P_e, dP_e, δ_e        are exact: softmax of q kᵀ · scale, dO vᵀ, Σ P_e dP_e;
  P_s, δ_s              are exact on the run's own S, rounded at `scores`: softmax(S), Σ P_s dP_e;
  g = exp(lse_s − lse)  is the factor by which the run's lse, or its m and l, misses softmax(S).

Both sides use V as attention reads it, and the k of dQ.

With a soft cap, S = c · tanh(scale · q kᵀ / c), each dS below is the gradient of S, which is
multiplied by the slope of the cap before it is multiplied by k. Both sides use the same float32
slope, so it counts as no error. A sink is one more column with dP = 0 and without a key. It enters
l and Σ P, and δ through them, but no product with k.

The points are switched from exact to the run's arithmetic one after the other, in this order:

  dS_e = P_e ∘ (dP_e − δ_e)
    + scores    P_s ∘ (dP_e − δ_s) − dS_e                  another softmax, in both passes alike
    + lse       (g − 1) P_s ∘ (dP_e − δ_s)                 m, l and lse as saved
    + exponent  P ∘ (dP_e − δ_P) − g P_s ∘ (dP_e − δ_s)    P = exp(S − lse) as it is computed
    + dp        P ∘ (dP − dP_e − Δ)                        dP as rounded at `dp`
    + delta     −P ∘ (δ − δ_P − Δ)                         O, P̄ V, δ itself: what the paper blames
    + ds        round(dS) − P ∘ (dP − δ)                   the cast of dS
    = round(dS)

with δ_P = δ_s and Δ = 0, which makes it a telescoping sum. A δ that is formed from the run's P and
dP (`delta='dp_p'`, 'normalized', 'after_cast') follows them, and so does δ where P̄ is recomputed as
it was rounded. Then δ_P = Σ P dP_e / Σ P and Δ = Σ P (dP − dP_e) / Σ P, so that an error that δ
shares is counted where it arises, and `delta` is what remains. The sum is the same. `lse` and
`exponent` together are the part of P, called `p`.

The sum is exact, not a first-order approximation. A product of two errors, for example of P and of
δ, belongs to the later of the two. In another order the parts would differ by such products, which
matter where Σ P is far from 1. The norms of the parts do not add up, because parts may cancel.

`tile_grads` and `grads` are not among the parts, because they round dQ, not dS.

Errors are differences of float32 values that are far larger. Therefore dP and δ are taken relative
to c, the exact dP of the row's largest score: with D = dP_e − c, δ_s − c = Σ P_s D, and nothing
cancels in a row with nearly all its weight on one key. These float32 errors remain:

  q kᵀ and dO vᵀ are float32 products of this device, with errors of some 2⁻²⁴ Σ|q k| and
  2⁻²⁴ Σ|dO v|. The first error is common to both sides and not counted. The second is counted with
  `delta`, since dP − δ is the difference of two sums of the same products in different orders.
  Apart from these, parts have relative errors of about 1e-6.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic import backward, powers, products
from lowprec_attn.arithmetic.fused import multiply_add
from lowprec_attn.arithmetic.places import Place
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.recurrence import RowStatistics
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import Numerics, get_format


class Sources(NamedTuple):
    """dQ / scale of exact arithmetic, and what each source adds to it, float32 [..., T, H].

    A source is None where its point rounds nothing.
    """

    exact: Array
    scores: Array | None
    lse: Array
    exponent: Array
    dp: Array | None
    delta: Array
    ds: Array | None

    @property
    def error(self) -> Array:
        """The sum of all parts."""
        return functools.reduce(jnp.add, (part for part in self[1:] if part is not None))

    @property
    def run(self) -> Array:
        """dQ / scale of the run."""
        return self.exact + self.error


class Run(NamedTuple):
    """The run's backward pass for some rows and all their keys.

    Attributes:
      tile: the run's P and dP.
      delta, shift: the run's δ is delta + shift, [..., T, 1]. The shift is what
        `delta='normalized'` adds to δ₀, or λ / scale of 'after_cast', which enters dQ separately.
      statistics: the row statistics as saved, [..., T, 1].
      pk: P k, [..., T, H], with the k of dQ; slope ∘ P k with a soft cap.
    """

    tile: backward.BackwardTile
    delta: Array
    shift: Array
    statistics: RowStatistics
    pk: Array


class Softmax(NamedTuple):
    """P = weights / l with weights = exp(S − m), exact up to float32 rounding.

    `sink` is the weight of the sink [..., T, 1], which m and l include; None without sinks.
    """

    weights: Array
    m: Array
    l: Array
    sink: Array | None = None

    @classmethod
    def of(cls, s: Array, sink: Array | None = None) -> "Softmax":
        """Returns the softmax of masked scores [..., T, S], with sinks of scores [..., 1, 1]."""
        m = jnp.max(s, axis=-1, keepdims=True)
        if sink is None:
            weights = jnp.exp(s - m)
            return cls(weights, m, jnp.sum(weights, axis=-1, keepdims=True))
        m = jnp.maximum(m, sink)
        weights, of_sink = jnp.exp(s - m), jnp.exp(sink - m)
        return cls(weights, m, jnp.sum(weights, axis=-1, keepdims=True) + of_sink, of_sink)

    def times(self, v: Array) -> Array:
        """Returns the product of `weights` and v, [..., T, H]."""
        return _product(self.weights, v)


class Gradient(NamedTuple):
    """δ − c = Σ P D and dS = P ∘ (dP − δ) of a softmax, exact up to float32 rounding."""

    delta: Array
    ds: Array

    @classmethod
    def of(cls, softmax: Softmax, d: Array, c: Array) -> "Gradient":
        """Returns the gradient from D and c, which the module defines."""
        p = softmax.weights / softmax.l
        delta = jnp.sum(p * d, axis=-1, keepdims=True)
        if softmax.sink is not None:  # its dP is 0, so its D is −c
            delta = delta - softmax.sink / softmax.l * c
        return cls(delta, p * (d - delta))


class Exact(NamedTuple):
    """Rows in exact arithmetic.

    Attributes:
      c, d: c [..., T, 1] and D [..., T, S], which the module defines.
      softmax: of the scores as the run rounds them.
      own, unrounded: the gradients for the scores as the run rounds them, and for the scores before
        rounding; one object where nothing rounds the scores.
    """

    c: Array
    d: Array
    softmax: Softmax
    own: Gradient
    unrounded: Gradient


def exact_rows(own: Softmax, unrounded: Softmax, do: Array, v: Array) -> Exact:
    """Returns c, D and dS of exact arithmetic.

    Args:
      own, unrounded: softmax of the scores with and without the rounding at `scores`, `query` and
        `key`; one object where these points round nothing.
      do, v: dO and V as dP reads them, [B, K, G, T, H] and [B, K, S, H].
    """
    dp = products.dot("bkgth,bksh->bkgts", do, v, products.format_of(do), products.format_of(v))
    # Rounding is monotone, so a key with the largest unrounded score has a largest rounded one too.
    most: Array | int = 1
    if unrounded.sink is not None:  # the sink may exceed all keys, whose weights are then below 1
        most = jnp.max(unrounded.weights, axis=-1, keepdims=True)
    largest = _first_of(unrounded.weights == most)
    c = jnp.take_along_axis(dp, largest, axis=-1, mode="promise_in_bounds")
    d = dp - c
    of_own = Gradient.of(own, d, c)
    of_unrounded = of_own if unrounded is own else Gradient.of(unrounded, d, c)
    return Exact(c, d, own, of_own, of_unrounded)


class Followed(NamedTuple):
    """δ_P − c and Δ, [..., T, 1], which the module defines."""

    delta: Array
    dp: Array


def followed(
    exact: Exact, tile: backward.BackwardTile, sink_p: Array | None, numerics: Numerics
) -> Followed:
    """Returns the exact δ that belongs to the run's own P and dP, and to P_sink with sinks."""
    # Where P̄ is recomputed as it was rounded, the O that δ reads was formed from the same P̄.
    shares_p = numerics.recomputed_probs == "rounded"
    if not shares_p and numerics.delta not in ("dp_p", *backward.SUMS_ROWS):
        return Followed(exact.own.delta, jnp.zeros_like(exact.own.delta))
    total = jnp.sum(tile.p, axis=-1, keepdims=True)
    of_d = jnp.sum(tile.p * exact.d, axis=-1, keepdims=True)
    of_dp = jnp.sum(tile.p * _dp_error(exact, tile), axis=-1, keepdims=True)
    if sink_p is not None:  # the sink's dP is 0 on both sides
        total, of_d = total + sink_p, of_d - sink_p * exact.c
    return Followed(backward.row_shift(of_d, total), backward.row_shift(of_dp, total))


def delta_error(exact: Exact, run: Run, follows: Followed) -> Array:
    """Returns δ of the run minus the exact δ, [..., T, 1]."""
    return (run.delta - exact.c) - follows.delta - follows.dp + run.shift


def multiplied_ds(run: Run, spec: Spec, extras: Extras, place: Place) -> Array:
    """Returns the factor of k in dQ / scale: dS as rounded at `ds`, [..., T, S]."""
    ds = backward.rounded_ds(run.tile, run.delta, spec, extras, place) / jnp.float32(spec.scale)
    if spec.numerics.delta not in backward.SUMS_ROWS:
        return ds
    of_pk = run.tile.behind_cap(run.tile.p)
    return ds - run.shift * Rounder.of(spec, extras)(of_pk, "probs_bwd", place)


def sources(
    exact: Exact, run: Run, follows: Followed, multiplied: Array, k: Array, numerics: Numerics
) -> Sources:
    """Returns the exact dQ / scale and the parts of the run's error.

    Cost: one product with k, of 2·B·N·T·S·H FLOP, for the exact dS, one for the exponent, and one
    for each of the points `scores`, `dp` and `ds` that rounds.

    Args:
      exact, run, follows: all for the same rows.
      multiplied: the result of `multiplied_ds`.
      k: the k of dQ, [B, K, S, H].
      numerics: the numerics of the run.
    """
    tile, own = run.tile, exact.own
    subtracted, inverse_l = run.statistics
    sum_of_p = exact.softmax.l if inverse_l is None else exact.softmax.l * inverse_l
    above = above_subtracted(exact.softmax.m, subtracted, numerics)
    gain_less_one = jnp.expm1(above + jnp.log(sum_of_p))
    of_own = _product(tile.behind_cap(own.ds), k)
    lse = gain_less_one * of_own
    p_part = tile.p * (exact.d - follows.delta) - own.ds
    exponent = _product(tile.behind_cap(p_part - gain_less_one * own.ds), k)

    delta = -delta_error(exact, run, follows) * run.pk
    scores = dp = ds = None
    if numerics.rounds_scores:
        scores = _product(tile.behind_cap(own.ds - exact.unrounded.ds), k)
    if not numerics.dp.is_identity:
        dp_part = tile.behind_cap(tile.p * _dp_error(exact, tile))
        dp = _product(dp_part, k) - follows.dp * run.pk
    if not numerics.ds.is_identity:
        unrounded = tile.behind_cap(backward.ds_of(tile, run.delta + run.shift))
        ds = _product(multiplied - unrounded, k)
    of_exact = of_own if scores is None else of_own - scores
    return Sources(of_exact, scores, lse, exponent, dp, delta, ds)


def above_subtracted(m: Array, subtracted: Array, numerics: Numerics) -> Array:
    """Returns m minus what the run subtracts from scores, which `whole_max` holds in base 2."""
    if numerics.exponent == "whole_max":
        return powers.distance(m, products.LOG2E, subtracted, multiply_add) * jnp.float32(
            powers.LN2
        )
    return m - subtracted


def _dp_error(exact: Exact, tile: backward.BackwardTile) -> Array:
    return (tile.dp - exact.c) - exact.d


def _first_of(flags: Array) -> Array:
    """Returns the index of the first True of a row, [..., T, 1]; 0 without one (a row of NaN)."""
    n = flags.shape[-1]
    at = jnp.arange(n, dtype=jnp.int32).reshape((1,) * (flags.ndim - 1) + (n,))
    # This is faster than `argmax` on a CPU.
    return jnp.min(jnp.where(flags, at, n), axis=-1, keepdims=True) % n


def _product(a: Array, b: Array) -> Array:
    """Returns the product of float32 a [B, K, G, T, S] and keys or values b [B, K, S, H]."""
    return products.dot("bkgts,bksh->bkgth", a, b, get_format("float32"), products.format_of(b))
