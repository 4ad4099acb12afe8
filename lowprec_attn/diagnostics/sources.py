"""Where the error of dQ, and with it that of W_Q's gradient, comes from: one part for each source.

dW_Q of a head is scale · Xᵀ (dS K), linear in dS, so an error of dS is a sum of parts whose dW_Q
add up. Let, for each row,

  P, dP, δ, round(dS)  be those of the run's backward pass, dS = P ∘ (dP − δ),
  P_e, dP_e, δ_e       exact: softmax of q kᵀ · scale, dO vᵀ, Σ P_e dP_e,
  P_s, δ_s             exact on the run's own S, rounded at `scores`: softmax(S), Σ P_s dP_e,
  g = exp(lse_s − lse) by which lse of the run, or its m and l, misses that of softmax(S).

V is as attention reads it, on both sides, and k that of dQ.

Behind a soft cap, S = c · tanh(scale · q kᵀ / c), each dS below is that of S, and is multiplied by
the slope of the cap before k is: the same float32 slope on both sides, counted nowhere. A sink is
one more column with dP = 0 and without a key: in l and Σ P, and in δ by them, but in no product.

From the exact dS_e to the run's, points are switched one after the other, in this order:

  dS_e = P_e ∘ (dP_e − δ_e)
    + scores    P_s ∘ (dP_e − δ_s) − dS_e                  another softmax, in both passes alike
    + lse       (g − 1) P_s ∘ (dP_e − δ_s)                 m, l and lse as saved
    + exponent  P ∘ (dP_e − δ_P) − g P_s ∘ (dP_e − δ_s)    P = exp(S − lse) as it is computed
    + dp        P ∘ (dP − dP_e − Δ)                        dP as rounded at `dp`
    + delta     −P ∘ (δ − δ_P − Δ)                         O, P̄ V, δ itself: what the paper blames
    + ds        round(dS) − P ∘ (dP − δ)                   the cast of dS
    = round(dS)

with δ_P = δ_s and Δ = 0, which makes it a telescoping sum. A δ that is formed of the run's P and dP
(`delta='dp_p'`, 'normalized', 'after_cast') follows them: then δ_P = Σ P dP_e / Σ P and
Δ = Σ P (dP − dP_e) / Σ P, so that an error that δ shares is counted where it arises, and `delta` is
what remains. The sum is the same. `lse` and `exponent` together are the part of P, called `p`.

The sum is exact and not of first order: a product of two errors, such as that of P and δ, belongs
to the later of the two. In another order parts differ by such products, which matter where Σ P is
far from 1. Norms of parts do not add up, because parts may cancel.

Not among the parts are `tile_grads` and `grads`, which round dQ and not dS.

Errors are far below the float32 values they are differences of. Therefore dP and δ are taken
relative to c, the exact dP of the row's largest score: with D = dP_e − c, δ_s − c = Σ P_s D, and
nothing cancels in a row that is nearly one key. What is left of float32:

  q kᵀ and dO vᵀ are float32 products of this device, off by some 2⁻²⁴ Σ|q k| and 2⁻²⁴ Σ|dO v|. The
  first is common to both sides and counted nowhere. The second is counted with `delta`, since
  dP − δ is the difference of two sums of the same products in different orders.
  Beside that, parts have relative errors of about 1e-6.
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

    None: a point that rounds nothing.
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
    """The run's backward pass of rows with all their keys.

    Attributes:
      tile: its P and dP.
      delta, shift: its δ is their sum [..., T, 1]; a shift is what `delta='normalized'` adds to δ₀,
        or 'after_cast' as λ / scale, which enters dQ by a way of its own.
      statistics: of rows as saved, [..., T, 1].
      pk: P k, [..., T, H], with the k of dQ; behind a soft cap slope ∘ P k.
      sink_p: P_sink of the run, [..., T, 1]; None without sinks.
    """

    tile: backward.BackwardTile
    delta: Array
    shift: Array
    statistics: RowStatistics
    pk: Array
    sink_p: Array | None = None


class Softmax(NamedTuple):
    """P = weights / l with weights = exp(S − m), exact but for float32.

    `sink` is the weight of the sink [..., T, 1], which is in m and l; None without sinks.
    """

    weights: Array
    m: Array
    l: Array
    sink: Array | None = None

    @classmethod
    def of(cls, s: Array, sink: Array | None = None) -> "Softmax":
        """Of masked scores [..., T, S] and, where there are sinks, theirs [..., 1, 1]."""
        m = jnp.max(s, axis=-1, keepdims=True)
        if sink is None:
            weights = jnp.exp(s - m)
            return cls(weights, m, jnp.sum(weights, axis=-1, keepdims=True))
        m = jnp.maximum(m, sink)
        weights, of_sink = jnp.exp(s - m), jnp.exp(sink - m)
        return cls(weights, m, jnp.sum(weights, axis=-1, keepdims=True) + of_sink, of_sink)

    def times(self, v: Array) -> Array:
        """weights v, [..., T, H]."""
        return _product(self.weights, v)


class Gradient(NamedTuple):
    """δ − c = Σ P D and dS = P ∘ (dP − δ) of a softmax, exact but for float32."""

    delta: Array
    ds: Array

    @classmethod
    def of(cls, softmax: Softmax, d: Array, c: Array) -> "Gradient":
        """Of D and c, see the module."""
        p = softmax.weights / softmax.l
        delta = jnp.sum(p * d, axis=-1, keepdims=True)
        if softmax.sink is not None:  # whose D is −c
            delta = delta - softmax.sink / softmax.l * c
        return cls(delta, p * (d - delta))


class Exact(NamedTuple):
    """What rows have in exact arithmetic; see the module for c [..., T, 1] and D [..., T, S].

    `own` and `unrounded` are of the scores as the run rounds them, and before that: one object
    where `scores` rounds nothing.
    """

    c: Array
    d: Array
    softmax: Softmax
    own: Gradient
    unrounded: Gradient


def exact_rows(own: Softmax, unrounded: Softmax, do: Array, v: Array) -> Exact:
    """dS of exact arithmetic.

    Args:
      own, unrounded: softmax of scores with and without the rounding at `scores`, `query` and
        `key`; one object where they round nothing.
      do, v: as dP reads them, [B, K, G, T, H] and [B, K, S, H].
    """
    dp = products.dot("bkgth,bksh->bkgts", do, v, products.format_of(do), products.format_of(v))
    # Rounding is monotone: this key has a largest score of both kinds.
    most: Array | int = 1
    if unrounded.sink is not None:  # which may be the largest
        most = jnp.max(unrounded.weights, axis=-1, keepdims=True)
    largest = _first_of(unrounded.weights == most)
    c = jnp.take_along_axis(dp, largest, axis=-1, mode="promise_in_bounds")
    d = dp - c
    of_own = Gradient.of(own, d, c)
    of_unrounded = of_own if unrounded is own else Gradient.of(unrounded, d, c)
    return Exact(c, d, own, of_own, of_unrounded)


class Followed(NamedTuple):
    """δ_P − c and Δ of the module, [..., T, 1]."""

    delta: Array
    dp: Array


def followed(
    exact: Exact, tile: backward.BackwardTile, sink_p: Array | None, numerics: Numerics
) -> Followed:
    """What an exact δ is, beside the run's own P and dP, and P_sink where there are sinks."""
    # The O of a P̄ that is recomputed as it was rounded has the same P̄.
    shares_p = numerics.recomputed_probs == "rounded"
    if not shares_p and numerics.delta not in ("dp_p", *backward.SUMS_ROWS):
        return Followed(exact.own.delta, jnp.zeros_like(exact.own.delta))
    total = jnp.sum(tile.p, axis=-1, keepdims=True)
    of_d = jnp.sum(tile.p * exact.d, axis=-1, keepdims=True)
    of_dp = jnp.sum(tile.p * _dp_error(exact, tile), axis=-1, keepdims=True)
    if sink_p is not None:  # whose dP is 0 on both sides
        total, of_d = total + sink_p, of_d - sink_p * exact.c
    return Followed(backward.row_shift(of_d, total), backward.row_shift(of_dp, total))


def delta_error(exact: Exact, run: Run, follows: Followed) -> Array:
    """δ of the run less the exact one, [..., T, 1]."""
    return (run.delta - exact.c) - follows.delta - follows.dp + run.shift


def multiplied_ds(run: Run, spec: Spec, extras: Extras, place: Place) -> Array:
    """What k is multiplied with in dQ / scale: dS as rounded at `ds`, [..., T, S]."""
    ds = backward.rounded_ds(run.tile, run.delta, spec, extras, place) / jnp.float32(spec.scale)
    if spec.numerics.delta not in backward.SUMS_ROWS:
        return ds
    of_pk = run.tile.behind_cap(run.tile.p)
    return ds - run.shift * Rounder.of(spec, extras)(of_pk, "probs_bwd", place)


def sources(
    exact: Exact,
    run: Run,
    follows: Followed,
    multiplied: Array,
    k: Array,
    numerics: Numerics,
) -> Sources:
    """The exact dQ / scale, and the parts of its error.

    Cost: a product with k for the exact dS, the exponent and each of the points `scores`, `dp` and
    `ds` that rounds, 2·B·N·T·S·H FLOP each.

    Args:
      exact, run, follows: of the same rows.
      multiplied: `multiplied_ds`.
      k: that of dQ, [B, K, S, H].
      numerics: of the run.
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
    """By how much a score exceeds what is subtracted from scores, which may be M in base 2."""
    if numerics.exponent == "whole_max":
        return powers.distance(m, products.LOG2E, subtracted, multiply_add) * jnp.float32(
            powers.LN2
        )
    return m - subtracted


def _dp_error(exact: Exact, tile: backward.BackwardTile) -> Array:
    return (tile.dp - exact.c) - exact.d


def _first_of(flags: Array) -> Array:
    """Index of the first True of a row, [..., T, 1]; 0 where there is none, as in a row of NaN."""
    n = flags.shape[-1]
    at = jnp.arange(n, dtype=jnp.int32).reshape((1,) * (flags.ndim - 1) + (n,))
    # Faster than `argmax` on a CPU.
    return jnp.min(jnp.where(flags, at, n), axis=-1, keepdims=True) % n


def _product(a: Array, b: Array) -> Array:
    """a b of float32 [B, K, G, T, S] and rows of keys or values [B, K, S, H]."""
    return products.dot("bkgts,bksh->bkgth", a, b, get_format("float32"), products.format_of(b))
