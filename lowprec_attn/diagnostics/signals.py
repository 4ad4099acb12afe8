"""Computes all signals of one attention layer: a flat dict with one number per head."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.max_logit import maximum
from lowprec_attn.arithmetic.request import Extras, RandomStream, Spec
from lowprec_attn.attention import validation
from lowprec_attn.diagnostics import signed_errors, weights
from lowprec_attn.diagnostics.comparison import GradientRows, Returned, ScoreRows, compare
from lowprec_attn.numerics import Numerics, RowMax, StandardMax


def attention_signals(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    do: Float[Array, "B T N V"] | None = None,
    *,
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup],
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    x: Float[Array, "B T D"] | None = None,
    w_q: Float[Array, "D N H"] | None = None,
    w_k: Float[Array, "D K H"] | None = None,
    rng_key: Key[Array, ""] | None = None,
    returned: Returned | None = None,
    projection: weights.Projection | None = None,
    common_direction: bool = False,
) -> dict[str, Float32[Array, "N ..."]]:
    """Returns the signals of one attention layer, one number per query head, over the whole batch.

    `_*` stands for _mean, _rms, _max and _coherence of `signed_error` over the B·T rows.

    Always:
      score_maximum: max |S| of S as softmax sees it: after the soft cap, rounded at `scores`.
      score_maximum_before_cap, with a soft cap: max |scale · q kᵀ|, which the cap hides.
      score_level_rms: RMS over rows of the mean score of a row, which has no effect on softmax.
        Where it is far above score_spread_mean, all scores of a row have moved together.
      score_spread_mean, score_spread_max: mean and maximum over rows of the largest score of a row
        minus its mean score.
      repeated_maxima, rounded_to_one, dominated_rows: shares in [0, 1] of the rows that see
        at least two keys; see `diagnostics.rows` (0 where there is no such row). A sink is no key.
      unnormalized_error_*: Ō minus the exact Ō of the run's own S and m.
      output_error_*: O minus O from q, k, v in float32 throughout.
      unnormalized_rms, output_rms: RMS of those exact values, to compare the errors with.
    With dO:
      delta_error_*: δ_lp − δ_hp, with δ_hp = rowsum(dO ∘ O) for O exact from the run's own S. This
        error enters the paper's dW_Q(hp) − dW_Q(lp). Where `delta` is 'normalized', 'after_cast' or
        'dp_p', and where P̄ is recomputed as it was rounded, δ_hp is Σ P dP / Σ P of the run's own P
        and dP, because an error of P or dP that δ shares moves no row sum of dS.
      delta_rms: RMS of δ_hp.
      ds_row_sum_*: Σ_j P ∘ (dP − δ) before the slope of a soft cap; 0 in exact arithmetic,
        −delta_error where only δ is wrong. With sinks j includes their column, whose dP is 0.
      rounded_ds_row_sum_*: Σ_j dS for dS as rounded at `ds`, which reaches dQ. With a soft cap
        exact rows do not sum to zero, and this is Σ_j over the keys minus the exact sum.
      p_row_sum_error_*: Σ_j P − 1 of the backward pass, with P_sink included. P is exp(S − lse), or
        exp(S − m) / l where `statistics` says so; 0 in exact arithmetic.
      query_gradient_error_relative: ‖scale (δ_lp − δ_hp) ∘ P k‖_F / ‖dQ‖_F, the errors of δ as a
        share of dQ. With a soft cap P k means slope ∘ P k, here and below.
      vanished_rows: share of all rows whose Σ_j P is below 1/2; the clamp of `PublishedMax` causes
        them.
    With dO and x (the input of W_Q):
      query_weight_gradient_exact: ‖dW_Q‖_F of exact arithmetic.
      query_weight_gradient_error_from_scores, _from_lse, _from_exponent, _from_dp, _from_delta,
        _from_ds: ‖part of the error of dW_Q‖_F over query_weight_gradient_exact, for each source
        of `diagnostics.sources`. The parts add up to the whole error; their norms do not. _from_p
        is the part of lse and exponent together: the error of P in the backward pass.
        _from_total is the whole error, without `tile_grads` and `grads`.
      query_weight_gradient_error_measured, where dQ was returned: ‖dW_Q − exact‖_F over
        query_weight_gradient_exact, for dW_Q of the returned dQ with all its roundings.
      query_weight_gradient_error: ‖dW_Q(hp) − dW_Q(lp)‖_F, the part of δ alone. It does not include
        the other parts: the rounding of dP adds as much under `published`.
      query_weight_gradient_error_relative: query_weight_gradient_error over ‖dW_Q(lp)‖_F of these
        sequences.
      query_weight_gradient_error_first_share: σ₁² / Σ σ² of the singular values of
        dW_Q(hp) − dW_Q(lp), in [1/H, 1]: 1 where it has rank one; 0 where it is zero.
      outer_product_similarity: mean cosine between the (PK)[T]ᵀ X[T] of different tokens.
      common_direction, if asked for: [N, D, H], for `diagnostics.across_steps`.
    With w_q (w_k): query_weight_norm (key_weight_norm): spectral norms. The norm of a key head is
      repeated for the query heads of its group.

    Some values are the run's own, others are computed again here. lse, and O where `saved_output`
    is 'same', are taken from `returned`; without it they are emulated in softmax steps of
    `kv_block` keys. Ō and any other O_saved are always emulated. From these values
    δ = rowsum(dO ∘ O_saved), P = exp(S − lse), dP and dS are formed as `numerics` says, in float32
    on this device, with this device's products for S and dP. A kernel that sums the products in
    another order differs by some 2⁻²⁴ Σ|q k| and 2⁻²⁴ Σ|dO v|. The row sums of P and dS are pairs
    of float32 numbers (`diagnostics.pairs`), so they lose nothing but the rounding of their terms,
    at most 2⁻²³ of each.

    Cost: about 14·B·N·T·S·H FLOP in matrix products (20 with `scores` and `dp` rounded, 4 to 6
    without dO), and 12 to 16·B·T·N·H·D with x. Under the causal mask rows are compared with the
    keys up to the end of their quarter, which saves up to 3/8 of the former. Some ten exp per
    score. Memory: O(B T N H), and chunks of 2^19 scores (2^22 on an accelerator).

    Args:
      q, k, v, scale, is_causal, local_window_size, logits_soft_cap, sinks: as in
        `attention.dot_product_attention`.
      numerics, row_max, rng_key: as in `attention.dot_product_attention`; `kv_block` and the
        default step of `tiled` apply.
      do: gradient of the loss by O.
      x: input of the query projection.
      w_q, w_k: weights of the projections.
      returned: O, lse and, if known, dQ of the implementation that runs, for exactly these arrays.
      projection: how q follows from X W_Q, where q is not X W_Q itself. The signals of W_Q's
        gradient then pull dQ and PK back to gradients by X W_Q.
      common_direction: whether to return `common_direction`. It costs only its memory.

    Raises:
      ValueError: wrong shapes, dtypes or options, a stochastic point without `rng_key`, x without
        dO, `common_direction` or `projection` without x, rows beyond all windows, which see no
        key, or `numerics` that no attention has with a soft cap or sinks.
    """
    q, k, v = (jnp.asarray(array) for array in (q, k, v))
    validation.check_inputs(q, k, v)
    _check_optional(q, k, v, returned, do=do, x=x, w_q=w_q, w_k=w_k)
    if common_direction and x is None:
        raise ValueError("common_direction needs x: it is a direction of (PK)ᵀ X")
    _check_projection(q, x, projection)
    heads = q.shape[2]
    groups = validation.head_groups(numerics, row_max, heads, k.shape[2])
    stream = None if rng_key is None else RandomStream.of(rng_key, q.shape[0], heads)
    factor = validation.scale(scale, q.shape[-1])
    spec = functools.partial(
        Spec,
        scale=factor,
        soft_cap=validation.soft_cap(logits_soft_cap, factor),
        is_causal=validation.causal(is_causal),
        window=_window(local_window_size, q.shape[1], k.shape[1]),
    )
    if projection is not None and not isinstance(projection.query_of, jax.tree_util.Partial):
        of_function = jax.tree_util.Partial(projection.query_of)  # jit takes no plain function
        projection = projection._replace(query_of=of_function)
    signals: list[dict[str, Array]] = []
    for group in groups:
        of_sinks = validation.sinks(sinks, heads)
        whole = _Arrays(q, k, v, do, w_q, w_k, stream, returned, projection, of_sinks)
        part = _select(whole, np.array(group.heads))
        chosen = spec(numerics=group.numerics, row_max=group.row_max)
        signals.append(_part_signals(part, x, spec=chosen))
        if not common_direction:
            signals[-1].pop("common_direction", None)
    back = np.argsort([head for group in groups for head in group.heads])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[back], *signals)


def _window(
    local_window_size: int | tuple[int, int] | None, rows: int, keys: int
) -> tuple[int, int] | None:
    window = validation.window(local_window_size, rows, keys)
    if window is not None and rows > keys + window[0]:
        raise ValueError(
            f"local_window_size={local_window_size!r} leaves the rows from {keys + window[0]} on "
            f"without a key: there are {rows} rows and {keys} keys"
        )
    return window


class _Arrays(NamedTuple):
    """The arguments of `attention_signals` that have a head axis."""

    q: Array
    k: Array
    v: Array
    do: Array | None
    w_q: Array | None
    w_k: Array | None
    stream: RandomStream | None
    returned: Returned | None
    projection: weights.Projection | None
    sinks: Array | None


def _select(arrays: _Arrays, which: np.ndarray) -> _Arrays:
    """Selects the query heads `which`, in whole groups, with their key heads."""
    group = arrays.q.shape[2] // arrays.k.shape[2]
    kv_which = np.unique(which // group)
    q, k, v, do, w_q, w_k, stream, returned, projection, sinks = arrays
    return _Arrays(
        q[:, :, which],
        k[:, :, kv_which],
        v[:, :, kv_which],
        None if do is None else do[:, :, which],
        None if w_q is None else w_q[:, which],
        None if w_k is None else w_k[:, kv_which],
        None if stream is None else stream._replace(head=stream.head[which]),
        jax.tree.map(lambda x: x[:, :, which], returned),
        None if projection is None else projection._replace(values=projection.values[:, :, which]),
        None if sinks is None else sinks[which],
    )


# Jitted here so that layers of a shape share one program outside of the caller's `jit` as well.
@functools.partial(jax.jit, static_argnames="spec")
def _part_signals(arrays: _Arrays, x: Array | None, spec: Spec) -> dict[str, Array]:
    """Returns the signals of heads that share their arithmetic."""
    q, k, v, do, w_q, w_k, stream, returned, projection, sinks = arrays
    result = compare(q, k, v, do, Extras(stream=stream, sinks=sinks), spec, returned)
    out = result.outputs
    signals = _score_signals(result.scores)
    signals |= _error("unnormalized", out.unnormalized, out.unnormalized_exact)
    signals |= _error("output", out.output, out.output_exact)
    if result.gradients is not None:
        signals |= _gradient_signals(result.gradients)
        if x is not None:
            dq = None if returned is None else returned.dq
            rows = result.gradients
            if projection is not None:
                rows, dq = _by_projection(rows, dq, projection)
            signals |= _query_weight_signals(rows, x, spec.scale, dq)
    if w_q is not None:
        signals["query_weight_norm"] = weights.spectral_norm(w_q)
    if w_k is not None:
        norms = weights.spectral_norm(w_k)
        signals["key_weight_norm"] = jnp.repeat(norms, q.shape[2] // k.shape[2])
    return signals


def _score_signals(scores: ScoreRows) -> dict[str, Array]:
    counted = jnp.sum(scores.sees_several.astype(jnp.float32), axis=(0, 1, 3))

    def share(flags: Array) -> Array:
        hits = jnp.sum((flags & scores.sees_several).astype(jnp.float32), axis=(0, 1, 3))
        return hits / jnp.maximum(counted, 1.0)

    before_cap = {}
    if scores.uncapped_maximum is not None:
        before_cap["score_maximum_before_cap"] = maximum(scores.uncapped_maximum, axis=(0, 1, 3))
    return before_cap | {
        "score_maximum": maximum(scores.score_maximum, axis=(0, 1, 3)),
        "score_level_rms": signed_errors.root_mean_square(scores.level),
        "score_spread_mean": jnp.mean(scores.spread, axis=(0, 1, 3)),
        "score_spread_max": jnp.max(scores.spread, axis=(0, 1, 3)),
        "repeated_maxima": share(scores.repeated_maxima),
        "rounded_to_one": share(scores.rounded_to_one),
        "dominated_rows": share(scores.dominated),
    }


def _gradient_signals(rows: GradientRows) -> dict[str, Array]:
    signals = _named(
        "delta_error", signed_errors.signed_error(rows.delta_error, jnp.zeros_like(rows.delta))
    )
    signals["delta_rms"] = signed_errors.root_mean_square(rows.delta_exact)
    signals["query_gradient_error_relative"] = _share(
        signed_errors.root_mean_square(rows.delta_error * rows.pk),
        signed_errors.root_mean_square(rows.dq.run),
    )
    for name in ("ds_row_sum", "rounded_ds_row_sum", "p_row_sum_error"):
        x = getattr(rows, name)
        signals |= _named(name, signed_errors.signed_error(x, jnp.zeros_like(x)))
    vanished = (rows.p_row_sum_error < -0.5).astype(jnp.float32)
    return signals | {"vanished_rows": jnp.mean(vanished, axis=(0, 1, 3))}


def _by_projection(
    rows: GradientRows, dq: Array | None, projection: weights.Projection
) -> tuple[GradientRows, Array | None]:
    """Pulls all parts of dQ, and PK, back to gradients by X W_Q; each of them is linear in dS."""
    pulled = projection.pullback()
    by_values = rows._replace(pk=pulled(rows.pk), dq=jax.tree.map(pulled, rows.dq))
    return by_values, None if dq is None else pulled(dq.astype(jnp.float32))


def _query_weight_signals(
    rows: GradientRows, x: Array, scale: float, dq: Array | None
) -> dict[str, Array]:
    """Returns the signals of W_Q's gradient.

    `dq` is the dQ of the implementation that runs, or None where it is not known.
    """
    of = jax.tree.map(
        lambda part: weights.query_weight_gradient(jnp.float32(scale) * part, x), rows.dq
    )
    errors = of._asdict() | {"p": of.lse + of.exponent, "total": of.error}
    exact = weights.frobenius_norm(errors.pop("exact"))
    signals = {
        f"query_weight_gradient_error_from_{name}": (
            jnp.zeros_like(exact) if error is None else _share(weights.frobenius_norm(error), exact)
        )
        for name, error in errors.items()
    }
    if dq is not None:
        measured = weights.query_weight_gradient(dq.astype(jnp.float32), x) - of.exact
        signals["query_weight_gradient_error_measured"] = _share(
            weights.frobenius_norm(measured), exact
        )
    error = weights.frobenius_norm(of.delta)
    similarity, common_direction = weights.outer_product_signals(rows.pk, x)
    return signals | {
        "query_weight_gradient_exact": exact,
        "query_weight_gradient_error": error,
        "query_weight_gradient_error_relative": _share(error, weights.frobenius_norm(of.run)),
        "query_weight_gradient_error_first_share": weights.first_share(of.delta),
        "outer_product_similarity": similarity,
        "common_direction": common_direction,
    }


def _share(error: Array, whole: Array) -> Array:
    """Returns error / whole; 0 where there is no error, for example in a head whose dO is zero."""
    return error / jnp.where(error == 0, jnp.float32(1), whole)


def _error(name: str, low: Array, high: Array) -> dict[str, Array]:
    error = _named(f"{name}_error", signed_errors.signed_error(low, high))
    return error | {f"{name}_rms": signed_errors.root_mean_square(high)}


def _named(name: str, values: dict[str, Array]) -> dict[str, Array]:
    return {f"{name}_{statistic}": value for statistic, value in values.items()}


def _check_optional(
    q: Array, k: Array, v: Array, returned: Returned | None, **arrays: Array | None
) -> None:
    (batch, length, heads, head_size), kv_heads = q.shape, k.shape[2]
    if arrays["x"] is not None and arrays["do"] is None:
        raise ValueError("x needs do: the gradient of W_Q takes both")
    of_o = (batch, length, heads, v.shape[-1])
    expected = {
        "do": of_o,
        "x": (batch, length, None),
        "w_q": (None, heads, head_size),
        "w_k": (None, kv_heads, head_size),
        "returned.o": of_o,
        "returned.lse": q.shape[:3],
        "returned.dq": q.shape,
    }
    if returned is not None:
        arrays |= {f"returned.{name}": array for name, array in returned._asdict().items()}
    for name, array in arrays.items():
        shape = expected[name]
        if array is None:
            continue
        if array.ndim != len(shape) or any(
            size not in (None, actual) for size, actual in zip(shape, array.shape, strict=True)
        ):
            listed = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name} must have shape [{listed}], got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be a float array, got {array.dtype}")


def _check_projection(q: Array, x: Array | None, projection: weights.Projection | None) -> None:
    if projection is None:
        return
    if x is None:
        raise ValueError("projection needs x: the gradient of W_Q takes both")
    if projection.values.shape != q.shape:
        raise ValueError(
            f"projection.values must have the shape of q {q.shape}, got {projection.values.shape}"
        )
