"""One online-softmax step of whole arrays, and the division after the last step: O and lse.

`dense` takes one step over all keys, `tiled` one step per block of keys.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic import sinks
from lowprec_attn.arithmetic.places import Place, span, statistic
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.powers import power, power_of_two, whole_max
from lowprec_attn.arithmetic.products import (
    LOG2E,
    cap_slope,
    capped,
    counts_in_scale,
    format_of,
    m_in_scores,
    powers,
    query_key_products,
    scale_of,
    score_unit,
    seen_dot,
)
from lowprec_attn.arithmetic.recurrence import (
    RowStatistics,
    SoftmaxState,
    divisor,
    divisor_of_o,
    log_sum_exp,
    m_and_inverse_l,
    next_accumulator,
    next_sum,
    subtracted_max,
    summed_probs,
)
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import Numerics, RowMax, get_format, round_to
from lowprec_attn.numerics.row_max import is_repeated

# The score of a hidden pair. It is −inf here, because with a bias any finite float32, even one
# below MASKED, may be a real score. Kernels take no bias; they use the finite MASKED, which avoids
# NaN.
UNSEEN = -jnp.inf


class Scores(NamedTuple):
    """The scores S, float32 [B, K, G, T, S], not yet masked, in the unit `score_unit`.

    `slope` is the derivative of the soft cap, which multiplies dS; None without a cap.
    """

    s: Array
    slope: Array | None = None


def scores(
    q: Array, k: Array, bias: Array | None, spec: Spec, extras: Extras, place: Place
) -> Scores:
    """Returns S = round_scores(q kᵀ · scale + bias), and the slope of a soft cap.

    With a soft cap c, S = round_scores(c tanh(q kᵀ · scale / c) + bias).

    Args:
      q, k: query rows and keys of the tile.
      bias: bias of the tile, [B|1, K|1, G|1, T|1, S|1], or None.
      spec, extras: the call, for the scale and the rounding.
      place: the tile.
    """
    s, slope = query_key_products(q, k), None
    if spec.soft_cap is not None:
        s = capped(s, spec, extras)
        slope = cap_slope(s)
    if counts_in_scale(spec, extras):
        return Scores(s, slope)
    s = s * (scale_of(spec, extras) if spec.soft_cap is None else jnp.float32(spec.soft_cap))
    if bias is not None:
        s = s + bias.astype(jnp.float32)
    return Scores(Rounder.of(spec, extras)(s, "scores", place), slope)


def initial_state(q: Array, v: Array, spec: Spec, extras: Extras) -> SoftmaxState:
    """The state before the first key, which includes the sink if there is one."""
    b, k, g, t, _ = q.shape
    # `zeros_like(q)`, because under `jax.shard_map` the carry of a loop must vary over the mesh
    # axes over which q varies.
    row = jnp.zeros_like(q, jnp.float32, (b, k, g, t, 1))
    acc = jnp.zeros_like(q, jnp.float32, (b, k, g, t, v.shape[-1]))
    aux = acc if spec.numerics.saved_output == "auxiliary" else None
    max_logit = jnp.full_like(row, UNSEEN) if spec.max_logit else None
    if extras.sinks is not None:
        start = sinks.start_of_rows(extras.sinks, score_unit(spec, extras), spec)
        m, l = (jnp.broadcast_to(x, row.shape) for x in start)
        return SoftmaxState(m, l, acc, aux, max_logit)
    return SoftmaxState(jnp.full_like(row, UNSEEN), row, acc, aux, max_logit)


def is_empty(m: Array) -> Array:
    """Whether a row has seen neither a key nor a sink."""
    return m == UNSEEN


def softmax_step(
    state: SoftmaxState,
    s: Array,
    v: Array,
    spec: Spec,
    extras: Extras,
    place: Place,
    seen: Array | None = None,
) -> SoftmaxState:
    """Takes one online-softmax step over a block of keys (FlashAttention-2, Algorithm 1).

    Args:
      state: the state before the step.
      s: masked scores of the block, [B, K, G, T, S].
      v: values of the block, as `operands` reads them, [B, K, S, H].
      spec, extras: the call.
      place: the rows and the keys of the block. The first key identifies the step.
      seen: True where a row sees a key, broadcastable to s; None if all pairs are seen.

    Raises:
      ValueError: a point rounds stochastically and there are no random bits.
    """
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    out = Place(place.rows, span(0, v.shape[-1])[None], place.cols[0, 0])
    place = dataclasses.replace(place, step=0)

    # O and lse do not depend on m in exact arithmetic, so no derivative goes through m. In low
    # precision the terms of that derivative would not cancel.
    unit = score_unit(spec, extras)
    m = _running_max(n, spec.row_max, lax.stop_gradient(s), state.m, unit)
    m = round_point(m, "stats", statistic(out, "m"))
    subtracted = subtracted_max(m, is_empty(m))
    if n.exponent == "whole_max":
        p = power(s, unit * LOG2E, subtracted)
        alpha = power_of_two(state.m - subtracted)
    elif n.exponent in ("scale_first", "unfused"):
        p = powers(s, subtracted, unit, unit, n.exponent)
        alpha = jnp.exp2((state.m - subtracted) * jnp.float32(unit * LOG2E))
    else:
        p = jnp.exp(round_point.shift(s - subtracted, place))
        alpha = jnp.exp(round_point.shift(state.m - subtracted, statistic(out, "alpha")))

    p_rounded = round_point(p, "probs", place)
    row_sum = jnp.sum(summed_probs(p, p_rounded, n), axis=-1, keepdims=True)
    l = next_sum(state.l, alpha, row_sum, spec.row_max, round_point, out)

    if n.normalize_probs:  # all keys are in this one step, so l is final
        p_rounded = round_point(p / divisor(l, is_empty(m), round_point, place), "probs", place)
    pv = seen_dot("bkgts,bksh->bkgth", p_rounded, v, n.probs.result_format, format_of(v), seen)
    acc = next_accumulator(state.acc, alpha, pv, round_point, out)

    aux = state.aux
    if aux is not None:
        float32 = get_format("float32")
        aux = alpha * aux + seen_dot("bkgts,bksh->bkgth", p, v, float32, format_of(v), seen)
    max_logit = state.max_logit
    if max_logit is not None:
        of_step = jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True)
        max_logit = jnp.maximum(max_logit, of_step)
    return SoftmaxState(m, l, acc, aux, max_logit)


def _running_max(n: Numerics, rule: RowMax, s: Array, m: Array, unit: float) -> Array:
    if n.exponent == "whole_max":
        of_step = _running_max(n.replace(exponent=None), rule, s, jnp.full_like(m, UNSEEN), unit)
        return jnp.maximum(m, whole_max(of_step, unit * LOG2E))
    if unit == 1:
        return rule(s, m)
    r_m = jnp.max(s, axis=-1, keepdims=True)
    return rule.running_max(r_m, s - r_m, m, unit=unit, is_repeated=is_repeated)


class Output(NamedTuple):
    """The results of the forward pass.

    Attributes:
      o: O as returned.
      o_saved: the O that δ reads; None if δ needs no O.
      lse: lse [B, K, G, T].
      apart: m and 1 / l, [B, K, G, T, 1], if the backward pass forms P from them; else None.
      max_logit: the largest score of every row [B, K, G, T], if it is asked for; else None.
    """

    o: Array
    o_saved: Array | None
    lse: Array
    apart: tuple[Array, Array] | None = None
    max_logit: Array | None = None

    @property
    def of_rows(self) -> tuple[Array, ...]:
        """lse, and the largest score if it is asked for."""
        return (self.lse,) if self.max_logit is None else (self.lse, self.max_logit)

    @property
    def statistics(self) -> RowStatistics:
        """The statistics [B, K, G, T, 1] from which the backward pass forms P."""
        return (
            RowStatistics(self.lse[..., None]) if self.apart is None else RowStatistics(*self.apart)
        )


def finish(state: SoftmaxState, spec: Spec, extras: Extras, rows: Array, dtype: np.dtype) -> Output:
    """Divides Ō by l and forms lse.

    A row that saw no key has O = 0. Its lse is the sink, or −inf without a sink or beyond the query
    lengths.

    Args:
      state: the state after the last step.
      spec: the call's static part.
      extras: the call's optional arrays.
      rows: global row indices [T, 1].
      dtype: dtype of the queries.
    """
    n, round_point = spec.numerics, Rounder.of(spec, extras)
    place = Place(rows, span(0, state.acc.shape[-1])[None])
    # On a CPU XLA's maximum of a row of NaN may be −inf. Its l is NaN all the same.
    empty = is_empty(state.m) & ~jnp.isnan(state.l)
    l = divisor(state.l, empty, round_point, place)
    of_o = divisor_of_o(state.l, l, empty, rows, n)
    acc = state.acc if n.normalize_probs else state.acc / of_o
    o = round_point(acc, "output", place, dtype).astype(n.output_dtype(dtype))

    if n.delta == "dp_p":
        saved = None
    elif n.saved_output == "same":
        saved = o
    elif n.saved_output == "float32":
        saved = acc
    elif n.saved_output == "halves":
        high = o.astype(jnp.float32)
        saved = high + round_to(acc - high, "bfloat16")
    else:
        assert state.aux is not None
        saved = round_to(state.aux / of_o, "bfloat16").astype(jnp.bfloat16)

    lse = log_sum_exp(m_in_scores(state.m, spec, extras), l, empty, round_point, place)
    exists = None if extras.sinks is None else sinks.within_lengths(rows, extras)
    if exists is not None:
        lse = jnp.where(exists, lse, -jnp.inf)
    apart = m_and_inverse_l(state.m, l, empty) if n.statistics == "m_and_l" else None
    max_logit = None
    if state.max_logit is not None:
        max_logit = (state.max_logit * jnp.float32(score_unit(spec, extras)))[..., 0]
    return Output(o, saved, lse[..., 0], apart, max_logit)
