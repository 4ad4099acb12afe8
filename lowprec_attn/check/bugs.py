"""Bugs by name: each is a wrong reference, and the one that explains the results names the bug."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowprec_attn.attention import reference
from lowprec_attn.check.measure import RESULTS, WORDS, Exact, Found, row_errors
from lowprec_attn.check.problems import Problem

_TILES = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
_EXPLAINED = 0.15  # a bug's name leaves less than this part of the error


def name(
    problem: Problem, exact: Exact, found: Found, bad: dict[str, float]
) -> tuple[str, frozenset[str]] | None:
    """What explains the bad results of a problem, and which of them; None: nothing known.

    Args:
      problem: on which they are bad.
      exact: its exact results.
      found: the kernel's.
      bad: results, and the largest row error that rounding explains.
    """
    best: tuple[int, float, str, frozenset[str]] | None = None
    errors = row_errors({n: found[n] for n in bad}, exact)
    for words, wrong in _wrong(problem, exact):
        left = row_errors({n: found[n] for n in bad if n in wrong}, exact, wrong)
        ratios = {n: _rms(left[n]) / _rms(errors[n]) for n in left}
        explained = {n: ratio for n, ratio in ratios.items() if ratio < _EXPLAINED}
        if explained:
            fit = (len(explained), -max(explained.values()), words, frozenset(explained))
            best = fit if best is None or fit[:2] > best[:2] else best
    if best is None:
        return None
    _, _, words, which = best
    return words.replace("{}", " and ".join(WORDS[n] for n in sorted(which))), which


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2))) if np.isfinite(errors).all() else np.inf


def not_finite(problem: Problem, errors: Found) -> str:
    """Words for results that are NaN or infinite."""
    masking = problem.masking
    if masking.mask is not None:
        sees = np.array(masking.mask)
        if masking.is_causal:
            sees &= np.tri(*sees.shape[-2:]).astype(bool)
        hidden: np.ndarray = ~np.any(sees, axis=-1)  # [B, 1, T]
        o = np.isinf(errors["o"]).any(-1) if "o" in errors else None
        if hidden.any():
            where = "in rows that see no key"
            if o is not None and o.any() and not (o & ~hidden[:, 0]).any():
                return f"NaN behind a mask: {where}"
            return "NaN behind a mask: rows that see no key reach the gradients"
        return "NaN behind a mask"
    s = np.abs(_scores(problem)).max()
    if s > 80:
        return (
            f"NaN or infinity at scores of {s:.0e}: exp overflows, or a whole row underflows "
            "(which maximum is subtracted?)"
        )
    return "NaN or infinity at moderate scores"


def _scores(problem: Problem) -> np.ndarray:
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("btnh,bsnh->bnts", q, k) * problem.scale


def _wrong(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    """Words for what a kernel may do wrong, `{}` standing for the results, and what comes of it."""
    yield from _layouts(problem)
    for words, changes in (*_scales(problem), *_visibilities(problem)):
        yield words, _reference(problem, **changes)
        yield f"in the backward pass alone, {words}", _backward_alone(problem, exact, changes)
    yield from _lengths(problem)
    yield from _heads(problem)
    yield from _batches(problem, exact)
    yield from _softmaxes(problem, exact)
    yield from _factors(problem, exact)


def _reference(problem: Problem, arrays: Sequence[np.ndarray] = (), **changes: Any) -> Found:
    """Float64 results of other arrays, masks or scales."""
    q, k, v, do = arrays or problem.arrays
    scale = changes.pop("scale", problem.scale)
    masking = dataclasses.replace(problem.masking, **changes)
    with np.errstate(all="ignore"):
        o = reference.attention(q, k, v, scale=scale, masking=masking).o
        back = reference.backward(q, k, v, do, scale=scale, masking=masking)
    return {"o": o, "dq": back.dq, "dk": back.dk, "dv": back.dv}


def _backward_alone(problem: Problem, exact: Exact, changes: dict[str, Any]) -> Found:
    """Gradients of another mask or scale with the O and lse of the right forward pass."""
    heads, kv_heads = problem.q.shape[2], problem.k.shape[2]
    scale = changes.get("scale", problem.scale)
    others = {name: x for name, x in changes.items() if name != "scale"}
    masking = dataclasses.replace(problem.masking, **others)
    q, k, v, do = (x.astype(np.float64) for x in problem.arrays)
    s = reference.attention(q, k, v, scale=scale, masking=masking).s
    k = np.repeat(k, heads // kv_heads, axis=2)
    lse = exact.found["lse"].transpose(0, 2, 1)[..., None]
    with np.errstate(all="ignore"):
        p = np.exp(np.where(np.isfinite(lse), s - lse, -np.inf))
        delta = np.sum(do * exact.found["o"], -1).transpose(0, 2, 1)[..., None]
        ds = p * (exact.dp - delta) * problem.scale
        return {
            "dq": np.einsum("bnts,bsnh->btnh", ds, k),
            "dk": _by_key_head(np.einsum("bnts,btnh->bsnh", ds, q), kv_heads),
            "dv": _by_key_head(np.einsum("bnts,btnh->bsnh", p, do), kv_heads),
        }


def _by_key_head(x: np.ndarray, kv_heads: int) -> np.ndarray:
    b, s, _, h = x.shape
    return x.reshape(b, s, kv_heads, -1, h).sum(3)


def _layouts(problem: Problem) -> Iterator[tuple[str, Found]]:
    q, k = problem.q, problem.k
    if problem.masking.mask is None and q.shape == k.shape and q.shape[1] != q.shape[2]:
        turned = _reference(problem, [x.swapaxes(1, 2) for x in problem.arrays])
        yield (
            "the axes of heads and tokens are swapped: is the layout BNTH (--layout)?",
            {n: x.swapaxes(1, 2) for n, x in turned.items()},
        )


def _scales(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    size = problem.q.shape[-1]
    wrong = {
        "q kᵀ is not scaled": 1.0,
        "q kᵀ is scaled by 1/H": 1 / size,
        "the scale is applied twice to q kᵀ": problem.scale**2,
        "the scale asked for is ignored: it is 1/√H": size**-0.5,
        "the exponent lacks log2 e (2^S in the place of e^S)": problem.scale * np.log(2),
        "the exponent has log2 e twice": problem.scale / np.log(2),
    }
    for words, scale in wrong.items():
        if not np.isclose(scale, problem.scale):
            yield words, {"scale": scale}


def _visibilities(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    masking = problem.masking
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    if masking.is_causal:
        yield "causality is ignored", {"is_causal": False}
        offset = np.asarray(masking.query_offset).item()
        off_by_one = "the causal diagonal is off by one: "
        yield off_by_one + "a row sees one key too many", {"query_offset": offset + 1}
        yield off_by_one + "a row does not see itself", {"query_offset": offset - 1}
        if rows != keys:
            other = keys - rows if offset == 0 else 0
            corner = "last" if other else "first"
            yield (
                f"the causal diagonal is aligned with the {corner} row and key",
                {"query_offset": other},
            )
    else:
        yield "rows are causal that should not be", {"is_causal": True}
    if masking.mask is not None:
        yield "the mask is ignored", {"mask": None}
        yield "the mask is inverted", {"mask": ~masking.mask}


def _lengths(problem: Problem) -> Iterator[tuple[str, Found]]:
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    q, k, v, do = problem.arrays
    right = _reference(problem)
    for whole in {keys // tile * tile for tile in _TILES} - {keys}:
        yield (
            "the last keys, which do not fill a tile, are left out",
            _reference(problem, key_lengths=np.full(len(q), whole)),
        )
    for more in {-keys % tile for tile in _TILES} - {0}:
        padding = ((0, 0), (0, more), (0, 0), (0, 0))
        mask = problem.masking.mask
        if mask is not None:
            mask = np.pad(mask, (*3 * ((0, 0),), (0, more)), constant_values=True)
        padded = _reference(problem, (q, *(np.pad(x, padding) for x in (k, v)), do), mask=mask)
        padded |= {n: padded[n][:, :keys] for n in ("dk", "dv")}
        yield "zeros that fill the last tile of keys are attended to", padded
    for whole in {rows // tile * tile for tile in _TILES} - {rows}:
        yield (
            "the last rows, which do not fill a tile, are left out",
            _without_rows(problem, right, np.arange(rows) >= whole),
        )


def _without_rows(problem: Problem, right: Found, lost: np.ndarray) -> Found:
    keep = ~lost[:, None, None]
    q, k, v, do = problem.arrays
    of_rest = _reference(problem, (q, k, v, np.where(keep, do, np.zeros((), do.dtype))))
    return of_rest | {"o": np.where(keep, right["o"], 0.0)}


def _heads(problem: Problem) -> Iterator[tuple[str, Found]]:
    heads, kv_heads = problem.q.shape[2], problem.k.shape[2]
    if heads == kv_heads:
        if heads > 1:
            q, k, v, do = problem.arrays
            first = _reference(
                problem, (q, *(np.repeat(x[:, :, :1], heads, 2) for x in (k, v)), do)
            )
            yield "every head reads the first key head", first
        return
    group = heads // kv_heads
    q, k, v, do = problem.arrays
    every = _reference(problem, (q, *(np.repeat(x, group, 2) for x in (k, v)), do))

    def summed(pick: Callable[[np.ndarray], np.ndarray]) -> Found:
        b, s, _, h = every["dk"].shape
        return {n: pick(every[n].reshape(b, s, kv_heads, group, h)) for n in ("dk", "dv")}

    wrong = "wrong sum over the query heads of a key head: "
    yield wrong + "the first head alone", summed(lambda x: x[:, :, :, 0])
    yield wrong + "the last head alone", summed(lambda x: x[:, :, :, -1])
    yield wrong + "their mean", summed(lambda x: x.mean(3))
    order = np.arange(heads) % kv_heads  # as if head n read key head n mod K
    turned = _reference(problem, (q, k[:, :, order], v[:, :, order], do))
    for n in ("dk", "dv"):
        turned[n] = np.stack([turned[n][:, :, order == i].sum(2) for i in range(kv_heads)], 2)
    yield "query head n reads key head n mod K, where n div (N / K) is right", turned
    b, s, _, h = every["dk"].shape
    mixed = {n: every[n].reshape(b, s, group, kv_heads, h).sum(2) for n in ("dk", "dv")}
    yield wrong + "heads n mod K in the place of n div (N / K)", mixed


def _batches(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    if problem.q.shape[0] > 1:
        same = {n: np.repeat(x[:1], x.shape[0], 0) for n, x in exact.found.items()}
        yield "every sequence gets the results of the first", same
        q, k, v, do = problem.arrays
        k, v = (np.repeat(x[:1], x.shape[0], 0) for x in (k, v))
        yield "every sequence reads the keys of the first", _reference(problem, (q, k, v, do))


def _softmaxes(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    heads, kv_heads = problem.q.shape[2], problem.k.shape[2]
    q, k, do = (x.astype(np.float64) for x in (problem.q, problem.k, problem.do))
    k = np.repeat(k, heads // kv_heads, axis=2)

    def of_ds(ds: np.ndarray) -> Found:
        ds = ds * problem.scale
        return {
            "dq": np.einsum("bnts,bsnh->btnh", ds, k),
            "dk": _by_key_head(np.einsum("bnts,btnh->bsnh", ds, q), kv_heads),
        }

    p, dp = exact.p, exact.dp
    delta = np.sum(p * dp, -1, keepdims=True)
    yield "δ = rowsum(dO ∘ O) is left out of dS", of_ds(p * dp)
    yield "δ is added to dP, not subtracted", of_ds(p * (dp + delta))
    yield "dS lacks the factor P", of_ds(np.where(p > 0, dp - delta, 0.0))
    lse = exact.found["lse"].transpose(0, 2, 1)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        m = np.where(p > 0, _scores(problem), -np.inf).max(-1, keepdims=True)
        l = np.exp(np.where(np.isfinite(lse), lse - m, 0.0))
    p_bar = p * l
    unnormalized = {
        "o": exact.found["o"] * l[..., 0].transpose(0, 2, 1)[..., None],
        "dv": _by_key_head(np.einsum("bnts,btnh->bsnh", p_bar, do), kv_heads),
        **of_ds(p_bar * (dp - delta)),
    }
    yield "P is not divided by the row sum l", unnormalized


def _factors(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    factors = {
        "{} lacks the factor scale": 1 / problem.scale,
        "{} has the factor scale twice": problem.scale,
        "{} has a factor log2 e": np.log2(np.e),
        "{} has a factor ln 2": np.log(2),
        "{} has the wrong sign": -1.0,
        "{} is zero": 0.0,
        "{} is twice too large": 2.0,
        "{} is twice too small": 0.5,
    }
    for words, factor in factors.items():
        if factor != 1.0:
            yield words, {n: factor * exact.found[n] for n in RESULTS}
