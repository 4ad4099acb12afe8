"""A second, independent implementation of every numerics point: whole-row float32 NumPy, no JAX.

It shares no code with the library. Its errors, with the same numerics, bound those of the library's
implementations. It also shows that each rounding happens. It rounds to nearest only. Letters follow
`lowprec_attn.attention.reference`; arrays are [B, N, T, ...].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import scales

from lowprec_attn import numerics
from lowprec_attn.numerics import Numerics, Rounding, RowMax

EPS32 = float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The inputs besides q, k, v; NumPy arrays broadcast to [B, N, T, S]."""

    numerics: Numerics
    row_max: RowMax
    scale: float
    seen: np.ndarray  # True where a row sees a key
    visited: np.ndarray  # True where position allows it, whatever the dense mask and segments say
    within_lengths: np.ndarray  # like `visited`, without causality
    bias: np.ndarray | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # [N]
    exists: np.ndarray | None = None  # [B, 1, T, 1], True for rows within the lengths

    @property
    def unit(self) -> float:
        """The factor from q·k, or from its tanh under a soft cap, to S."""
        return self.scale if self.soft_cap is None else self.soft_cap


def round_nearest(x: np.ndarray, rounding: Rounding, **of_scale: Any) -> np.ndarray:
    """Rounds float32 values to nearest even, through ml_dtypes or float64.

    The mode `error_positive` adds the size of the error instead. `toward_zero` needs a format with
    float32's exponents. `of_scale` holds arguments of `scales.round_scaled`.
    """
    fmt = rounding.format
    if rounding.scaling is not None:
        assert rounding.mode == "nearest", rounding
        return scales.round_scaled(x, fmt.name, str(rounding.scaling), **of_scale)
    if rounding.mode == "error_positive":
        return x + np.abs(round_nearest(x, Rounding(fmt)) - x)
    if rounding.mode == "toward_zero":
        assert fmt.has_float32_exponents, fmt
        return shorten(x, fmt.fraction_bits, np.trunc)
    assert rounding.mode == "nearest", rounding
    if fmt.name == "float32":
        return x
    if fmt.name.startswith(("bf16_m", "f32_m")):
        return shorten(x, fmt.fraction_bits)
    return x.astype(getattr(ml_dtypes, fmt.name, fmt.name)).astype(np.float32)


def shorten(x: np.ndarray, fraction_bits: int, whole: Callable = np.rint) -> np.ndarray:
    """Rounds to `fraction_bits` stored bits with float32's exponents, exactly in float64.

    whole: how a number of quanta becomes whole; to nearest even by default.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x64 = x.astype(np.float64)
    finite = np.where(np.isfinite(x64), x64, 0.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, -126)
    quantum = np.ldexp(1.0, exponent - fraction_bits)
    rounded = np.where(np.isfinite(x64), whole(finite / quantum) * quantum, x64)
    limit = (2.0 - 2.0**-fraction_bits) * 2.0**127
    rounded = np.where(np.abs(rounded) > limit, np.copysign(np.inf, rounded), rounded)
    return np.copysign(rounded, x64).astype(np.float32)


def shifted_max(rule: RowMax, s: np.ndarray, m_prev: np.ndarray) -> np.ndarray:
    """The row-max rules, written as the design states them; masked s are −inf."""
    r_m = s.max(-1, keepdims=True)
    if isinstance(rule, numerics.StandardMax):
        return np.maximum(m_prev, r_m)
    if isinstance(rule, numerics.LazyMax):
        growth = np.where(r_m == -np.inf, np.float32(0), r_m - np.maximum(m_prev, numerics.MASKED))
        return np.where(growth > np.float32(rule.threshold * np.log(2)), r_m, m_prev)
    assert isinstance(rule, numerics.PublishedMax | numerics.DynamicMax)
    tied = (s >= r_m - np.float32(rule.tolerance)).sum(-1, keepdims=True) > 1
    beta = np.float32(rule.beta)
    if isinstance(rule, numerics.PublishedMax):
        moved = np.where(r_m > 0, beta * r_m, np.float32(0))
    else:
        tied &= r_m > -np.inf
        moved = np.where(r_m > 0, beta * r_m, np.where(r_m == 0, beta - 1, np.float32(0)))
        moved = np.minimum(moved, r_m + np.float32(rule.max_shift))
    return np.maximum(m_prev, np.where(tied, moved, r_m))


def step_of(n: Numerics, keys: int) -> int:
    """Keys per step; all keys if `kv_block` is None or 'all'."""
    return n.kv_block if isinstance(n.kv_block, int) else keys


@dataclasses.dataclass
class Forward:
    s: np.ndarray
    o: np.ndarray
    o_saved: np.ndarray
    lse: np.ndarray
    m: np.ndarray
    l: np.ndarray  # 1 where a row saw no key; m is 0 there


LOG2E = float(np.log2(np.e))


def raw_scores(opt: Options) -> bool:
    """Whether one multiplication forms the exponent from q·k, instead of from S."""
    n = opt.numerics
    formed = [n.scores] if n.exponent == "whole_max" else [n.scores, n.stats]
    products = n.exponent in ("scale_first", "unfused", "whole_max")
    counts = products and opt.bias is None and opt.unit > 0
    return counts and all(x.format.name == "float32" for x in formed)


def power(s: np.ndarray, factor: float, subtracted: np.ndarray, n: Numerics) -> np.ndarray:
    """2^(s · factor − subtracted), with the exponent rounded once; float64 products are exact.

    With `unfused` the product is rounded to float32 too.
    """
    if n.exponent == "unfused":
        return np.exp2(s * np.float32(factor) - subtracted)
    exponent = s.astype(np.float64) * float(np.float32(factor)) - subtracted
    return np.exp2(exponent.astype(np.float32))


# The spacing of float32 numbers from 64 to 128, to which 96 + S₂ − M is rounded.
GRID = 2.0**-17


def whole_max(s: np.ndarray, factor: float) -> np.ndarray:
    """The maximum of a row, in base 2, rounded up to a whole number; −inf without a score."""
    r_m = s.max(-1, keepdims=True).astype(np.float64)
    return np.ceil((r_m * float(np.float32(factor))).astype(np.float32))


def power_against(s: np.ndarray, factor: float, m: np.ndarray) -> np.ndarray:
    """2^(S₂ − M), with S₂ − M on the grid. P̄ below 2^-32 has a finer grid, which no bound sees."""
    x = s.astype(np.float64) * float(np.float32(factor)) - m
    return np.exp2(np.rint(x / GRID) * GRID).astype(np.float32)


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, opt: Options, dtype: str) -> Forward:
    """Online softmax in steps of `kv_block` keys (None: all). q, k, v are float32 values."""
    n = opt.numerics
    raw, scale_first = raw_scores(opt), n.exponent in ("scale_first", "unfused")
    whole = n.exponent == "whole_max"
    unit = opt.unit if raw else 1.0
    s = q @ k.swapaxes(-1, -2)
    if opt.soft_cap is not None:
        s = np.tanh(s * np.float32(opt.scale / opt.soft_cap))
    s = s * np.float32(opt.unit / unit)
    s = round_nearest(s if opt.bias is None else s + opt.bias, n.scores)
    s = np.where(opt.seen, s, np.float32(-np.inf))
    m = np.full((*s.shape[:-1], 1), -np.inf, np.float32)
    l = np.zeros_like(m)
    if opt.sinks is not None:
        sink = opt.sinks.astype(np.float32)[:, None, None] / np.float32(unit)
        m = np.broadcast_to(sink, m.shape)
        l = np.where(m == -np.inf, np.float32(0), np.float32(1))
        if whole:
            m, sink = np.broadcast_to(whole_max(sink, LOG2E * unit), m.shape), m
            l = np.exp2(sink.astype(np.float64) * LOG2E * unit - m).astype(np.float32)
    acc = np.zeros((*s.shape[:-1], v.shape[-1]), np.float32)
    aux = acc
    size = step_of(n, s.shape[-1])
    for first in range(0, s.shape[-1], size):
        keys = slice(first, first + size)
        s_step, v_step = s[..., keys], v[..., keys, :]
        rule = opt.row_max
        if whole:
            of_step = np.full_like(m, -np.inf)
            of_step = shifted_max(rule, s_step * np.float32(unit), of_step) / np.float32(unit)
            if isinstance(rule, numerics.StandardMax):
                of_step = s_step.max(-1, keepdims=True)
            m_new = np.maximum(m, whole_max(of_step, LOG2E * unit))
            m_new = round_nearest(m_new, n.stats)
        elif raw and not isinstance(rule, numerics.StandardMax):
            m_new = shifted_max(rule, s_step * np.float32(unit), m * np.float32(unit))
            m_new = m_new / np.float32(unit)
        else:
            m_new = round_nearest(shifted_max(rule, s_step, m), n.stats)
        shift = np.where(m_new == -np.inf, np.float32(0), m_new)
        if not whole:
            p, alpha = (
                np.exp(round_nearest(np.maximum(x - shift, np.float32(-128)), n.shift))
                if n.shift.format.name != "float32"
                else np.exp(x - shift)
                for x in (s_step, m)
            )
        if scale_first:
            c = np.float32(LOG2E * unit)
            p, alpha = power(s_step, c, shift * c, n), np.exp2((m - shift) * c)
        elif whole:
            p = power_against(s_step, LOG2E * unit, shift)
            alpha = np.exp2(m.astype(np.float64) - shift).astype(np.float32)
        p_r = round_nearest(p, n.probs, amax=1)
        total = (p_r if n.row_sum == "rounded" else p).sum(-1, keepdims=True, dtype=np.float32)
        if opt.row_max.clamp is not None:
            total = np.maximum(total, np.float32(opt.row_max.clamp))
        l_new = round_nearest(alpha * l + total, n.stats)
        if n.normalize_probs:
            final = round_nearest(l_new, n.normalizer)
            p_r = round_nearest(p / np.where(final == 0, np.float32(1), final), n.probs)
        pv = round_nearest(p_r @ v_step, n.pv)
        acc_new = round_nearest(round_nearest(alpha * acc, n.rescale) + pv, n.accumulator)
        aux_new = alpha * aux + p @ v_step
        here = (opt.within_lengths if opt.row_max.visits_above_diagonal else opt.visited)[
            ..., keys
        ].any(-1, keepdims=True)
        m, l = np.where(here, m_new, m), np.where(here, l_new, l)
        acc, aux = np.where(here, acc_new, acc), np.where(here, aux_new, aux)
    empty = m == -np.inf
    divisor = np.where(empty, np.float32(1), round_nearest(l, n.normalizer))
    of_o = divisor
    if n.divisor == "first_unrounded":
        first = np.arange(s.shape[-2])[:, None] < step_of(n, s.shape[-2])
        of_o = np.where(first & ~empty, l, divisor)
    acc = acc if n.normalize_probs else acc / of_o
    o = round_nearest(acc, n.rounding_at("output", np.dtype(getattr(ml_dtypes, dtype, dtype))))
    saved = {
        "same": o,
        "float32": acc,
        "halves": o + (acc - o).astype(ml_dtypes.bfloat16).astype(np.float32),
        "auxiliary": (aux / of_o).astype(ml_dtypes.bfloat16).astype(np.float32),
    }[n.saved_output]
    of_m = np.float32(np.log(2.0) if whole else unit)
    lse = round_nearest(m * of_m + np.log(divisor), n.lse)
    lse = np.where(empty, np.float32(-np.inf), lse)
    if opt.sinks is not None:
        lse = np.where(opt.exists, lse, np.float32(-np.inf))
    return Forward(s, o, saved, lse, np.where(empty, np.float32(0), m), divisor)


def tile_slices(n: Numerics, rows: int, keys: int) -> list[tuple[slice, slice]]:
    """Square tiles of `kv_block` queries and keys if their products are rounded, else one tile."""
    if n.tile_grads.format.name == "float32":
        return [(slice(None), slice(None))]
    size = n.kv_block if isinstance(n.kv_block, int) else max(rows, keys)
    return [
        (slice(i, i + size), slice(j, j + size))
        for i in range(0, rows, size)
        for j in range(0, keys, size)
    ]


def attend(inputs: dict[str, np.ndarray], opt: Options, dtype: str) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv and dbias of inputs q k v do dlse ([B, T, N, H] as in the library)."""
    n, np_dtype = opt.numerics, np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v, do = (inputs[name].astype(np.float32).swapaxes(1, 2) for name in ("q", "k", "v", "do"))
    group = q.shape[1] // k.shape[1]

    def read(x: np.ndarray, rounding: Rounding, axis: int = -1) -> np.ndarray:
        result = round_nearest(x, rounding, axis=axis, group=x.shape[1] // kv_heads)
        return result.repeat(q.shape[1] // x.shape[1], 1)

    kv_heads, given_do = k.shape[1], do
    q_of_dk, k_of_dq = read(q, n.query, -2), read(k, n.key, -2)
    do, do_of_dv = read(do, n.do), read(do, n.do, -2)
    along = n.do.scaling is not None and str(n.do.scaling) in ("mx", "nvfp4")
    do_of_delta = given_do if along else do
    fwd = forward(read(q, n.query), read(k, n.key), read(v, n.value, -2), opt, dtype)
    q, k, v = read(q, n.query), read(k, n.key), read(v, n.value)

    unit = opt.unit if raw_scores(opt) else 1.0
    if n.exponent in ("scale_first", "unfused"):
        lse = np.where(fwd.lse == -np.inf, np.float32(0), fwd.lse)
        apart = n.statistics == "m_and_l"
        of_row = fwd.m * np.float32(unit * LOG2E) if apart else lse * np.float32(LOG2E)
        p_bar = power(fwd.s, LOG2E * unit, of_row, n)
    elif n.exponent == "whole_max":
        p_bar = power_against(fwd.s, LOG2E * unit, fwd.m)
    elif n.statistics == "m_and_l":
        p_bar = np.exp(fwd.s - fwd.m)
    else:
        p_bar = np.exp(fwd.s - np.where(fwd.lse == -np.inf, np.float32(0), fwd.lse))
    if n.recomputed_probs == "rounded":
        p_bar = round_nearest(p_bar, n.probs, amax=1)
    p = p_bar / (fwd.l if n.statistics == "m_and_l" else np.float32(1))
    dp = round_nearest(do @ v.swapaxes(-1, -2), n.dp)
    if n.delta == "dp_p":
        products = dp * p
    else:
        products = do_of_delta * round_nearest(fwd.o_saved, n.output_bwd, group=group)
        if n.delta == "do_o_storage":
            products = round_nearest(products, Rounding(n.rounding_at("output", np_dtype).format))
    delta = round_nearest(products.sum(-1, keepdims=True, dtype=np.float32), n.delta_value)
    dlse = inputs["dlse"].swapaxes(1, 2)[..., None]
    scale, tiles = np.float32(opt.scale), tile_slices(n, *p.shape[-2:])
    slope = np.float32(1)
    if opt.soft_cap is not None:
        capped = np.tanh(q @ k.swapaxes(-1, -2) * np.float32(opt.scale / opt.soft_cap))
        slope = (1 - capped) * (1 + capped)

    # A scale of dS takes its amax from the first δ, before the correction that makes rows sum to 0.
    first = delta if n.delta in ("normalized", "after_cast") else delta - dlse
    kind = "" if n.ds.scaling is None else str(n.ds.scaling)
    amax = scales.largest(p * (dp - first) * slope * scale, kind, group)

    def rounded_ds(delta: np.ndarray, axis: int = -1) -> np.ndarray:
        return round_nearest(p * (dp - delta) * slope * scale, n.ds, axis=axis, amax=amax)

    def sum_over_tiles(shape: tuple[int, ...], product: Callable[..., Any]) -> np.ndarray:
        total = np.zeros(shape, np.float32)
        for rows, cols in tiles:
            where, x = product(rows, cols)
            total[..., where, :] += round_nearest(x, n.tile_grads)
        return total

    k_of_q, given_back = k_of_dq, np.float32(0)
    if n.mean_key == "subtracted":
        mean = k.mean(-2, keepdims=True)
        k_of_q = round_nearest(k - mean, Rounding(numerics.get_format(dtype)))
        given_back = scale * dlse * mean
    p_r, taken_from_dk = round_nearest(p, n.probs_bwd, axis=-2, amax=1), np.float32(0)
    p_sink = np.float32(0)
    if opt.sinks is not None:
        of_row = opt.sinks.astype(np.float32)[:, None, None]
        if n.statistics == "m_and_l":
            of_m = np.float32(np.log(2.0) if n.exponent == "whole_max" else unit)
            p_sink = np.exp(of_row - fwd.m * of_m) / fwd.l
        else:
            p_sink = np.exp(of_row - np.where(fwd.lse == -np.inf, np.float32(0), fwd.lse))
        p_sink = np.where(opt.exists, p_sink, np.float32(0))
    if n.delta == "normalized":
        r = (p * (dp - delta)).sum(-1, keepdims=True, dtype=np.float32)
        total = p.sum(-1, keepdims=True, dtype=np.float32) + p_sink
        r = r - p_sink * delta
        moved = np.where(total == 0, np.float32(0), r / np.where(total == 0, 1, total))
        of_pk = round_nearest(p * slope, n.probs_bwd, amax=1)
        ds_of_q, correction = rounded_ds(delta), scale * (moved - dlse) * (of_pk @ k_of_q)
        delta = delta + moved - dlse
    elif n.delta == "after_cast":
        ds_of_q = rounded_ds(delta)
        r, total = (x.sum(-1, keepdims=True, dtype=np.float32) for x in (ds_of_q, p_r))
        r, total = r - p_sink * delta * scale, total + p_sink
        moved = np.where(total == 0, np.float32(0), r / np.where(total == 0, 1, total))
        after = moved - scale * dlse
        correction, of_k = after * (p_r @ k), round_nearest(after * q, n.ds)
        taken_from_dk = p_r.swapaxes(-1, -2) @ of_k
    else:
        delta = delta - dlse
        ds_of_q, correction = rounded_ds(delta), np.float32(0)
    ds, ds_of_k = p * (dp - delta), rounded_ds(delta, -2)
    of_sink = -p_sink * delta
    if n.delta == "after_cast":
        ds, of_sink = ds - p * after / scale, of_sink - p_sink * after / scale
    dq = sum_over_tiles(q.shape, lambda i, j: (i, ds_of_q[..., i, j] @ k_of_q[..., j, :]))
    dq = dq - correction + given_back
    of_dv = (p_r, do_of_dv)
    if n.divided_in_dv == "do":
        of_dv = (p_bar, round_nearest(do / fwd.l, n.probs_bwd))
    dk, dv = (
        sum_over_tiles(
            like.shape, lambda i, j, a=a, b=b: (j, a[..., i, j].swapaxes(-1, -2) @ b[..., i, :])
        )
        for like, (a, b) in ((k, (ds_of_k, q_of_dk)), (v, of_dv))
    )

    dk = dk - taken_from_dk

    def of_key_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    grads = n.rounding_at("grads", np_dtype)
    result = {"out": fwd.o, "dq": dq, "dk": of_key_heads(dk), "dv": of_key_heads(dv)}
    for name in ("dq", "dk", "dv"):
        result[name] = round_nearest(result[name], grads, group=result[name].shape[1] // kv_heads)
    result = {name: x.swapaxes(1, 2) for name, x in result.items()}
    result["lse"] = fwd.lse[..., 0].swapaxes(1, 2)
    if opt.sinks is not None:
        result["dsinks"] = of_sink.sum((0, 2, 3), dtype=np.float32)
    if opt.bias is not None:
        axes = tuple(i for i, size in enumerate(opt.bias.shape) if size == 1)
        result["dbias"] = ds.sum(axes, keepdims=True)
    return result
