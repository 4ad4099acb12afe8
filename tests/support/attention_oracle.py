"""Attention and its gradients in float64 NumPy, written from the formulas, for the fuzzer.

It shares no code with the library or with the other references. It loops over batch elements,
heads, rows and keys one by one, and derives gradients from the definition of softmax.
"""

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The arguments of one call: arrays of float64, integers and bool, and lists of ints.

    bias and mask: [B|1, N|1, T|1, S|1]. offset and lengths: one integer per batch element.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    dlse: np.ndarray
    scale: float
    soft_cap: float | None
    is_causal: bool
    window: tuple[int, int] | None
    offset: list[int]
    query_lengths: list[int]
    key_lengths: list[int]
    query_segments: np.ndarray | None
    key_segments: np.ndarray | None
    mask: np.ndarray | None
    bias: np.ndarray | None
    sinks: np.ndarray | None


def may_see(x: Problem, b: int, n: int, t: int, s: int) -> bool:
    """Whether query t of head n may see key s."""
    position = x.offset[b] + t
    if t >= x.query_lengths[b] or s >= x.key_lengths[b]:
        return False
    if x.is_causal and s > position:
        return False
    if x.window is not None and not -x.window[0] <= s - position <= x.window[1]:
        return False
    if x.query_segments is not None and x.query_segments[b, t] != x.key_segments[b, s]:
        return False
    return x.mask is None or bool(entry(x.mask, b, n, t, s))


def entry(pairs: np.ndarray, *index: int) -> Any:
    """One entry of an array whose axes of length 1 broadcast."""
    return pairs[tuple(0 if size == 1 else i for i, size in zip(index, pairs.shape, strict=True))]


def seen_pairs(x: Problem) -> np.ndarray:
    """Which query sees which key, bool [B, N, T, S]."""
    (batch, rows, heads, _), keys = x.q.shape, x.k.shape[1]
    seen = np.zeros((batch, heads, rows, keys), bool)
    for index in np.ndindex(seen.shape):
        seen[index] = may_see(x, *index)
    return seen


def attend(x: Problem, seen: np.ndarray) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv, and dbias where there is a bias, for the pairs of `seen_pairs`.

    A row that sees no key has out = 0, lse = −inf and no gradient. With a sink, its lse is the
    sink, which receives dlse as its gradient.
    """
    heads, kv_heads = x.q.shape[2], x.k.shape[2]
    result = {name: np.zeros(y.shape) for name, y in (("out", x.do), ("dq", x.q), ("dk", x.k))}
    result["dv"], result["lse"] = np.zeros(x.v.shape), np.full(x.q.shape[:3], -math.inf)
    if x.bias is not None:
        result["dbias"] = np.zeros(x.bias.shape)
    if x.sinks is not None:
        result["dsinks"] = np.zeros(heads)
    for b, n, t in np.ndindex(seen.shape[:3]):
        keys = np.flatnonzero(seen[b, n, t])
        if keys.size:
            shared = n * kv_heads // heads  # the key head
            _add_row(x, result, (b, n, t), shared, keys)
        elif x.sinks is not None and t < x.query_lengths[b]:
            result["lse"][b, t, n] = x.sinks[n]
            result["dsinks"][n] += x.dlse[b, t, n]
    return result


def capped(x: Problem, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scores after the soft cap, and the derivative of the cap."""
    if x.soft_cap is None:
        return scores, np.ones_like(scores)
    # d tanh x / dx = 1 / cosh² x
    of_cap = np.clip(scores / x.soft_cap, -300, 300)
    return x.soft_cap * np.tanh(of_cap), np.cosh(of_cap) ** -2.0


def _add_row(
    x: Problem, result: dict[str, np.ndarray], row: tuple[int, int, int], h: int, keys: np.ndarray
) -> None:
    b, n, t = row
    q, do, k, v = x.q[b, t, n], x.do[b, t, n], x.k[b, keys, h], x.v[b, keys, h]
    scores, slope = capped(x, x.scale * (k @ q))
    if x.bias is not None:
        scores = scores + np.array([entry(x.bias, b, n, t, s) for s in keys])
    if x.sinks is not None:  # a sink acts as a key with value 0
        scores, v = np.append(scores, x.sinks[n]), np.vstack([v, 0 * v[:1]])
    lse = np.logaddexp.reduce(scores)
    p = np.exp(scores - lse)
    result["out"][b, t, n], result["lse"][b, t, n] = p @ v, lse
    # d p_i / d s_j = p_i (δ_ij − p_j), and d lse / d s_j = p_j.
    jacobian = np.diag(p) - np.outer(p, p)
    ds = jacobian @ (v @ do) + p * x.dlse[b, t, n]
    if x.sinks is not None:
        result["dsinks"][n] += ds[-1]
        p, ds = p[:-1], ds[:-1]
    result["dq"][b, t, n] = x.scale * ((ds * slope) @ k)
    result["dk"][b, keys, h] += x.scale * np.outer(ds * slope, q)
    result["dv"][b, keys, h] += np.outer(p, do)
    if x.bias is not None:
        for s, value in zip(keys, ds, strict=True):
            index = (b, n, t, s)
            place = tuple(
                0 if size == 1 else i for i, size in zip(index, x.bias.shape, strict=True)
            )
            result["dbias"][place] += value


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The result of `sizes`; `uncapped` holds dq and dk with the soft cap's derivative set to 1."""

    of: dict[str, np.ndarray]
    uncapped: dict[str, np.ndarray]
    score: float


def sizes(x: Problem, seen: np.ndarray) -> Sizes:
    """The size of each result: its value if every term were positive.

    Relative errors of the terms add up to at most that share of the size. Also the largest Σ
    |q||k|·scale + |bias| of a visible pair: a relative error of the terms of a score, times this
    sum, is a relative error of its probability.
    """
    positive = dataclasses.replace(
        x,
        q=np.abs(x.q),
        k=np.abs(x.k),
        v=np.abs(x.v),
        do=np.abs(x.do),
        dlse=np.abs(x.dlse),
        scale=abs(x.scale),
    )
    result = {name: np.zeros(y.shape) for name, y in (("out", x.do), ("dq", x.q), ("dk", x.k))}
    uncapped = {name: y.copy() for name, y in result.items() if name != "out"}
    result["dv"], largest = np.zeros(x.v.shape), 0.0
    if x.bias is not None:
        result["dbias"] = np.zeros(x.bias.shape)
    if x.sinks is not None:
        result["dsinks"] = np.zeros(x.sinks.shape)
    for b, n, t in np.ndindex(seen.shape[:3]):
        keys = np.flatnonzero(seen[b, n, t])
        if not keys.size:
            if x.sinks is not None and t < x.query_lengths[b]:
                result["dsinks"][n] += positive.dlse[b, t, n]
                largest = max(largest, abs(x.sinks[n]))
            continue
        h = n * x.k.shape[2] // x.q.shape[2]
        bias = np.zeros(keys.size)
        if x.bias is not None:
            bias = np.array([entry(x.bias, b, n, t, s) for s in keys])
        scores, slope = capped(x, x.scale * (x.k[b, keys, h] @ x.q[b, t, n]))
        scores = scores + bias
        of_sink = -np.inf if x.sinks is None else x.sinks[n]
        p = np.exp(scores - np.logaddexp(np.logaddexp.reduce(scores), of_sink))
        q, do = positive.q[b, t, n], positive.do[b, t, n]
        k, v = positive.k[b, keys, h], positive.v[b, keys, h]
        largest = max(largest, float(np.max(positive.scale * (k @ q) + np.abs(bias))))
        dp = v @ do
        ds = p * (dp + p @ dp + positive.dlse[b, t, n])
        result["out"][b, t, n] = p @ v
        if x.sinks is not None:
            p_sink = max(1 - p.sum(), 0.0)
            result["dsinks"][n] += p_sink * (p @ dp + positive.dlse[b, t, n])
            largest = max(largest, abs(of_sink))
        uncapped["dq"][b, t, n] = positive.scale * (ds @ k)
        uncapped["dk"][b, keys, h] += positive.scale * np.outer(ds, q)
        result["dq"][b, t, n] = positive.scale * ((ds * slope) @ k)
        result["dk"][b, keys, h] += positive.scale * np.outer(ds * slope, q)
        result["dv"][b, keys, h] += np.outer(p, do)
        if x.bias is not None:
            for s, value in zip(keys, ds, strict=True):
                index = (b, n, t, s)
                at = tuple(
                    0 if size == 1 else i for i, size in zip(index, x.bias.shape, strict=True)
                )
                result["dbias"][at] += value
    return Sizes(result, uncapped, largest)
