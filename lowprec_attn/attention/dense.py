"""Unfused attention with every numerics point: one softmax step over all keys, O(T S) memory.

The preset `standard` needs it, and small studies use it. `tiled` computes the same arithmetic in
tiles.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowprec_attn.arithmetic import backward, layout, operands, sinks, softmax, visibility
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.products import score_unit
from lowprec_attn.arithmetic.recurrence import keep_unvisited
from lowprec_attn.arithmetic.request import Extras, Request, Spec, unsupported_row_sums
from lowprec_attn.arithmetic.transforms import named


def unsupported(request: Request) -> str | None:
    """Names the feature of the request that `dense` cannot serve, or None."""
    if request.spec.block_sizes is not None:
        return f"block_sizes={request.spec.block_sizes} (dense has no tiles)"
    numerics, rows, keys = request.spec.numerics, request.q_shape[1], request.kv_shape[1]
    if numerics.step_of(keys, keys) != keys:
        return f"kv_block={numerics.kv_block} (dense takes one step over all {keys} keys)"
    if not numerics.tile_grads.is_identity and numerics.step_of(rows, rows) != rows:
        return (
            f"tile_grads={numerics.tile_grads} with kv_block={numerics.kv_block} "
            f"(dense has one tile of all {rows} queries)"
        )
    return unsupported_row_sums(request)


def keys_per_step(request: Request) -> int:
    """The number of all keys, because there is only one step."""
    return request.kv_shape[1]


def exponent_of(request: Request) -> str:
    """How both passes form exponents: `Numerics.exponent`, or 'shift_first' if that is None."""
    return request.spec.numerics.exponent or "shift_first"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """Returns O = softmax(q kᵀ · scale + bias) v [B, T, N, V] and the float32 lse [B, T, N].

    Values are rounded as `spec.numerics` says. With `spec.max_logit` the function also returns the
    largest score of every row [B, T, N].
    """
    return layout.ungroup(*_attend(*layout.group(q, k, v, extras), spec))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, extras: Extras, spec: Spec) -> tuple[Array, ...]:
    return _forward(q, k, v, extras, spec)[0]


def _forward(
    q: Array, k: Array, v: Array, extras: Extras, spec: Spec
) -> tuple[tuple[Array, ...], layout.Residuals]:
    inputs = layout.Grouped(q, k, v, extras)
    of = operands.forward_operands(inputs, spec)
    place, s, seen, _ = _scores(of.q, of.k, extras, spec)
    start = softmax.initial_state(q, v, spec, extras)
    state = softmax.softmax_step(start, s, of.v, spec, extras, place, seen)
    exists = visibility.visited(extras, place, k.shape[-2], causal=False, window=spec.window)
    state = keep_unvisited(state, start, exists)
    out = named(softmax.finish(state, spec, extras, place.rows, q.dtype))
    return (out.o, *out.of_rows), layout.Residuals(inputs, out.o_saved, out.statistics)


def _backward(
    spec: Spec, res: layout.Residuals, cotangents: tuple[Array, ...]
) -> tuple[Array, Array, Array, Extras]:
    extras, dtype = res.inputs.extras, res.inputs.q.dtype
    do, dlse, *_ = cotangents
    of = operands.backward_operands(res.inputs, do, spec)
    place, s, seen, slope = _scores(of.q, of.k, extras, spec)
    n, dlse, sink = spec.numerics, dlse[..., None], None
    given_dlse = dlse
    if extras.sinks is not None:
        sees = jnp.ones((), bool) if seen is None else jnp.any(seen, axis=-1, keepdims=True)
        unit = score_unit(spec, extras)
        sink = sinks.column(res.statistics, sees, place.rows, unit, spec, extras)
        of, dlse = of.with_do(sink.seen), sink.seen(dlse)
    tile = backward.backward_tile(s, res.statistics, of.v, of.do, spec, extras, place, seen)
    tile = tile._replace(slope=slope)
    if res.o_saved is None:
        delta = backward.rounded_delta(backward.delta_from_probs(tile), place.rows, spec, extras)
    else:
        o = operands.read(res.o_saved, "output_bwd", spec, extras)
        delta = backward.delta_from_saved_output(of.do_of_delta, o, place.rows, spec, extras, dtype)
    of_q = backward.query_keys(of.k, spec)
    k_of_q = of.k_of_dq if of_q is None else of_q.k
    # Since d lse / dS = P, the gradient of lse enters dS = P ∘ (dP − δ + dlse) next to δ. A δ that
    # is corrected gets it by the correction.
    shifted = delta if n.delta in backward.SUMS_ROWS else delta - dlse
    tile = tile._replace(ds_amax=backward.largest_ds(tile, shifted, spec, extras))
    dq = backward.query_gradient(tile, shifted, k_of_q, spec, extras, place)
    corrected, lacks = backward.Delta(shifted, shifted), None
    if n.delta in backward.SUMS_ROWS:
        sums = backward.row_sums(tile, delta, k_of_q, spec, extras, place)
        if sink is not None:
            sums = sums.with_sink(sink, delta, spec, extras)
        dq, corrected, lacks = backward.corrected(dq, sums, delta, dlse, spec, extras)
    if of_q is not None:
        dq = of_q.give_back(dq, dlse, spec, extras)
    dk, dv = backward.key_gradients(tile, corrected, of.q_of_dk, of.do_of_dv, spec, extras, place)
    dbias = None
    if extras.bias is not None:
        ds = backward.ds_of(tile, corrected.unrounded)
        dbias = layout.sum_to_shape(ds, extras.bias.shape).astype(extras.bias.dtype)
    dscale = None
    if extras.scale is not None:
        dscale = backward.scale_gradient(tile, corrected.unrounded, of.q, of.k)
    rounded = backward.round_gradients(dq, dk, dv, res.inputs, spec)
    dsinks = None
    if sink is not None and extras.sinks is not None:
        of_rows = sink.gradient(corrected.unrounded, given_dlse)
        dsinks = layout.sum_to_shape(of_rows, extras.sinks.shape).astype(extras.sinks.dtype)
    row_sums = None
    if extras.backward_sums is not None:
        of_keys = backward.query_sums(tile, shifted, spec, extras, place)
        row_sums = of_keys.of_query_gradient(lacks)
    return (*rounded, Extras(bias=dbias, scale=dscale, sinks=dsinks, backward_sums=row_sums))


_attend.defvjp(_forward, _backward)


def _scores(
    q: Array, k: Array, extras: Extras, spec: Spec
) -> tuple[Place, Array, Array | None, Array | None]:
    """Returns the place of the scores, masked S, which pairs are seen, and the soft cap's slope."""
    place = Place(span(0, q.shape[-2])[:, None], span(0, k.shape[-2])[None])
    s, slope = softmax.scores(q, k, extras.bias, spec, extras, place)
    mask = visibility.unhidden(extras.mask, extras.query_segments, extras.key_segments)
    seen = visibility.visible(extras, spec, place, mask)
    return place, visibility.mask_scores(s, seen, softmax.UNSEEN), seen, slope
