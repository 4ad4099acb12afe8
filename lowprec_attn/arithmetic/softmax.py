"""One online-softmax step and what ends the last: O and lse, every point named.

`dense` takes one step over all keys, `tiled` one per block of keys.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.places import Place, span, statistic
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.products import dot, format_of, query_key_products, scale_of
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import MASKED, get_format, round_to


def scores(
    q: Array, k: Array, bias: Array | None, spec: Spec, extras: Extras, place: Place
) -> Array:
    """S = round_scores(q kᵀ · scale + bias), not yet masked."""
    s = query_key_products(q, k) * scale_of(spec, extras)
    if bias is not None:
        s = s + bias.astype(jnp.float32)
    return Rounder.of(spec, extras)(s, "scores", place)


class SoftmaxState(NamedTuple):
    """Running m, l [B, K, G, T, 1] and Ō [B, K, G, T, H]; Ō′ for `saved_output='auxiliary'`."""

    m: Array
    l: Array
    acc: Array
    aux: Array | None


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
    pv = dot("bkgts,bksh->bkgth", p_rounded, v, n.probs.result_format, format_of(v))
    pv = round_point(pv, "pv", out)
    rescaled = round_point(alpha * state.acc, "rescale", out)
    acc = round_point(rescaled + pv, "accumulator", out)

    aux = state.aux
    if aux is not None:
        float32 = get_format("float32")
        aux = alpha * aux + dot("bkgts,bksh->bkgth", p, v, float32, format_of(v))
    return SoftmaxState(m, l, acc, aux)


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


def normalizer(l: Array, round_point: Rounder, place: Place) -> Array:
    """The final l, as it divides Ō and enters lse."""
    return round_point(l, "normalizer", statistic(place, "l"))
