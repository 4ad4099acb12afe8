"""Wrong references: what a kernel may do wrong, in words, and the results that it then returns."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lowprec_attn.attention import reference
from lowprec_attn.check.measure import WORDS, Exact, Found, both_passes, by_key_head, results
from lowprec_attn.check.measure import exact as exact_of
from lowprec_attn.check.measure import slope as slope_of
from lowprec_attn.check.problems import Problem, part_of, products, scores

_TILES = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
LSE_ROUNDED = "lse is rounded to "  # no bug, but a risk
_OF_PROBLEM = ("scale", "soft_cap", "dlse")  # all other changes are of the problem's masking


def of(problem: Problem, exact: Exact, bad: Collection[str]) -> Iterator[tuple[str, Found]]:
    """Yields each mistake in words, with the results that it causes.

    Args:
      problem: the problem on which a kernel errs.
      exact: its exact results.
      bad: the names of the results that err.

    Yields:
      Words, in which `{}` stands for the names of results, and results by name.
    """
    yield from _lse(problem, exact)
    if set(bad) == {"lse"}:  # the softmax is right
        return
    yield from _layouts(problem)
    for words, changes in (*_scales(problem), *_visibilities(problem), *_left_out(problem)):
        yield words, _reference(problem, **changes)
        if "dlse" not in changes:  # dlse is read in the backward pass only
            yield f"in the backward pass alone, {words}", _backward_alone(problem, exact, changes)
    yield from _lengths(problem, exact, may_lose_all="o" in bad)
    yield from _heads(problem)
    yield from _batches(problem, exact)
    yield from _softmaxes(problem, exact)
    yield from _soft_caps_and_biases(problem, exact)
    yield from _sinks(problem, exact)
    yield from _exchanged(exact)
    yield from _factors(problem, exact)


def _changed(problem: Problem, changes: dict[str, Any]) -> Problem:
    own = {name: x for name, x in changes.items() if name in _OF_PROBLEM}
    rest = {name: x for name, x in changes.items() if name not in _OF_PROBLEM}
    return problem.replace(**own).masked(**rest)


def _reference(problem: Problem, arrays: Sequence[np.ndarray] = (), **changes: Any) -> Found:
    """Returns the float64 results of the problem with other arrays or changed settings."""
    q, k, v, do = arrays or problem.arrays
    other = _changed(problem, changes).replace(q=q, k=k, v=v, do=do)
    with np.errstate(all="ignore"):
        return results(other, *both_passes(other))


def _backward_alone(problem: Problem, exact: Exact, changes: dict[str, Any]) -> Found:
    """Returns the gradients if only the backward pass has a wrong mask, scale or score.

    O and lse are those of the right forward pass.
    """
    other = _changed(problem, changes)
    s = reference.attention(*other.arrays[:3], **other.settings).s
    lse = exact.found["lse"].transpose(0, 2, 1, 3)
    with np.errstate(all="ignore"):
        p = np.exp(np.where(np.isfinite(lse), s - lse, -np.inf))
        ds = p * (exact.dp - _delta(other, exact))
        found = _of_ds(other, ds) | {"dv": _of_p(problem, p)}
        if problem.masking.bias is not None:  # even if the changed backward pass ignores the bias
            found["dbias"] = ds.sum(0, keepdims=True).swapaxes(1, 2)
        return found


def _delta(problem: Problem, exact: Exact) -> np.ndarray:
    """Returns δ − dlse [B, N, T, 1], with δ computed from the right O."""
    do = problem.do.astype(np.float64)
    delta = np.sum(do * exact.found["o"], -1)
    if problem.dlse is not None:
        delta = delta - problem.dlse
    return delta.transpose(0, 2, 1)[..., None]


def _of_p(problem: Problem, p: np.ndarray) -> np.ndarray:
    """Returns dV for the probabilities `p` [B, N, T, S]."""
    do = problem.do.astype(np.float64)
    return by_key_head(reference.over_rows(p, do), problem.k.shape[2])


def _of_ds(
    problem: Problem, ds: np.ndarray, slope: np.ndarray | None = None, of_bias: float = 1.0
) -> Found:
    """Returns dQ and dK for a given dS, and the gradient of the bias if there is one.

    Args:
      problem: the problem; its scale and soft cap are used.
      ds: dS [B, N, T, S].
      slope: a slope to use in place of the soft cap's.
      of_bias: the factor of the bias in S.
    """
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    kv_heads = k.shape[2]
    k = np.repeat(k, q.shape[2] // kv_heads, axis=2)
    dx = ds * (slope_of(problem) if slope is None else slope) * problem.scale
    found = {
        "dq": reference.over_keys(dx, k),
        "dk": by_key_head(reference.over_rows(dx, q), kv_heads),
    }
    if problem.masking.bias is not None:
        found["dbias"] = of_bias * ds.sum(0, keepdims=True).swapaxes(1, 2)
    return found


def _layouts(problem: Problem) -> Iterator[tuple[str, Found]]:
    q, k = problem.q, problem.k
    masking = problem.masking
    arrays = (masking.mask, masking.bias, masking.sinks, problem.dlse)
    if all(x is None for x in arrays) and q.shape == k.shape and q.shape[1] != q.shape[2]:
        turned = _reference(problem, [x.swapaxes(1, 2) for x in problem.arrays])
        yield (
            "the axes of heads and tokens are swapped: is the layout BNTH (--layout)?",
            {n: turned[n].swapaxes(1, 2) for n in ("o", "dq", "dk", "dv")},
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
    if masking.window is not None:
        left, right = masking.window
        off_by_one = "the window is off by one: a row sees one key too "
        yield "the window is ignored", {"window": None}
        yield off_by_one + "many before it", {"window": (left + 1, right)}
        yield off_by_one + "few before it", {"window": (left - 1, right)}
        if not masking.is_causal:
            yield off_by_one + "many behind it", {"window": (left, right + 1)}
            yield off_by_one + "few behind it", {"window": (left, right - 1)}
            if left != right:
                yield "the two sides of the window are exchanged", {"window": (right, left)}
    if masking.mask is not None:
        yield "the mask is ignored", {"mask": None}
        yield "the mask is inverted", {"mask": ~masking.mask}


def _left_out(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields mistakes with the soft cap, bias, sinks and dlse, such as ignoring an argument."""
    masking = problem.masking
    if problem.soft_cap is not None:
        yield "the soft cap is ignored", {"soft_cap": None}
        # (c tanh(q kᵀ / c)) · scale
        before = {"soft_cap": problem.soft_cap * problem.scale}
        yield "the scale is multiplied in after the soft cap", before
    if masking.bias is not None:
        yield "the bias is ignored", {"bias": None}
        yield "the bias has the wrong sign", {"bias": -masking.bias}
        yield "every head has the bias of the first", {"bias": _of_first(masking.bias, 1)}
    if masking.sinks is not None and len(masking.sinks) > 1:
        yield "every head has the sink of the first", {"sinks": _of_first(masking.sinks, 0)}
    if problem.dlse is not None:
        yield "the gradient of lse is ignored", {"dlse": None}
        yield "the gradient of lse has the wrong sign", {"dlse": -problem.dlse}


def _of_first(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the first head's part of `x`, repeated for all heads along `axis`."""
    return np.repeat(x.take([0], axis), x.shape[axis], axis)


def _lengths(problem: Problem, exact: Exact, *, may_lose_all: bool) -> Iterator[tuple[str, Found]]:
    """Yields mistakes at the last tile of keys or rows.

    Args:
      problem: the problem.
      exact: its exact results.
      may_lose_all: whether to include tiles that are larger than the whole length. All keys or rows
        are then lost, and O is zero too.
    """
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    q, k, v, do = problem.arrays
    never = set() if may_lose_all else {0}
    for whole in {keys // tile * tile for tile in _TILES} - {keys} - never:
        yield (
            "the last keys, which do not fill a tile, are left out",
            _reference(problem, key_lengths=np.full(len(q), whole)),
        )
    for more in {-keys % tile for tile in _TILES} - {0}:
        padding = ((0, 0), (0, more), (0, 0), (0, 0))
        mask = problem.masking.mask
        if mask is not None:
            mask = np.pad(mask, (*3 * ((0, 0),), (0, more)), constant_values=True)
        bias = problem.masking.bias
        bias = None if bias is None else np.pad(bias, (*3 * ((0, 0),), (0, more)))
        wide = (q, *(np.pad(x, padding) for x in (k, v)), do)
        padded = _reference(problem, wide, mask=mask, bias=bias)
        padded |= {n: padded[n][:, :keys] for n in ("dk", "dv")}
        if bias is not None:
            padded["dbias"] = padded["dbias"][..., :keys]
        yield "zeros that fill the last tile of keys are attended to", padded
    for whole in {rows // tile * tile for tile in _TILES} - {rows} - never:
        yield (
            "the last rows, which do not fill a tile, are left out",
            _without_rows(problem, exact.found, np.arange(rows) >= whole),
        )


def _without_rows(problem: Problem, right: Found, lost: np.ndarray) -> Found:
    keep = ~lost[:, None, None]
    q, k, v, do = problem.arrays
    dlse = None if problem.dlse is None else np.where(keep[..., 0], problem.dlse, 0.0)
    rest = (q, k, v, np.where(keep, do, np.zeros((), do.dtype)))
    of_rest = _reference(problem, rest, dlse=dlse)
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
    count = problem.q.shape[0]
    if count > 1:
        same = {n: np.repeat(x[:1], x.shape[0], 0) for n, x in exact.found.items()}
        yield "every sequence gets the results of the first", same
        q, k, v, do = problem.arrays
        k, v = (np.repeat(x[:1], x.shape[0], 0) for x in (k, v))
        yield "every sequence reads the keys of the first", _reference(problem, (q, k, v, do))
        summed = [n for n in ("dsinks", "dbias") if n in exact.found]
        for index, which in ((0, "first"), (count - 1, "last")) if summed else ():
            words = f"{{}} is that of the {which} sequence alone, not the sum over the batch"
            alone = exact_of(part_of(problem, batch=slice(index, index + 1))).found
            yield words, {n: alone[n] for n in summed}
        words = "{} is the mean over the sequences, not their sum"
        yield words, {n: exact.found[n] / count for n in summed}


def _softmaxes(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    p, dp = exact.p, exact.dp
    right = np.sum(p * dp, -1, keepdims=True)
    delta = _delta(problem, exact)
    of_lse = right - delta
    without = _of_ds(problem, p * (dp + of_lse))
    if problem.masking.sinks is not None:
        lse = exact.found["lse"]
        weights = np.exp(problem.masking.sinks.astype(np.float64)[:, None] - lse)
        of_rows = weights * of_lse.transpose(0, 2, 1, 3)
        without["dsinks"] = of_rows.sum((0, 1), keepdims=True)
    yield "δ = rowsum(dO ∘ O) is left out of dS", without
    yield "δ is added to dP, not subtracted", _of_ds(problem, p * (dp + right + of_lse))
    yield "dS lacks the factor P", _of_ds(problem, np.where(p > 0, dp - delta, 0.0))
    lse = exact.found["lse"].transpose(0, 2, 1, 3)
    with np.errstate(over="ignore", invalid="ignore"):
        m = np.where(p > 0, scores(problem), -np.inf).max(-1, keepdims=True)
        l = np.exp(np.where(np.isfinite(lse) & np.isfinite(m), lse - m, 0.0))
        p_bar = np.where(p > 0, p * l, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        unnormalized = {
            "o": exact.found["o"] * l.transpose(0, 2, 1, 3),
            "dv": _of_p(problem, p_bar),
            **_of_ds(problem, p_bar * (dp - delta)),
        }
    yield "P is not divided by the row sum l", unnormalized


def _soft_caps_and_biases(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    """Yields wrong orders of scale, soft cap and bias, and wrong derivatives of the cap."""
    cap, bias = problem.soft_cap, problem.masking.bias
    one = np.ones((1, 1, 1, 1))
    if cap is not None:
        ds = exact.p * (exact.dp - _delta(problem, exact))
        yield "the derivative of the soft cap is left out of dS", _of_ds(problem, ds, one)
        # A kernel may use t² in place of 1 − t², where t is the tanh.
        squared = _of_ds(problem, ds, 1 - slope_of(problem))
        yield "tanh² in the place of the soft cap's derivative, 1 − tanh²", squared
    if bias is None:
        return
    added, scale = bias.astype(np.float64), problem.scale
    x = products(problem)
    if not np.isclose(scale, 1):
        s = scores(problem) - added + scale * added
        words = "the bias is added before the scale, and so multiplied by it"
        yield words, _of_scores(problem, s, slope_of(problem), of_bias=scale)
    if cap is not None:
        t = np.tanh((x + added) / cap)
        slope = 1 - t**2
        found = _of_scores(problem, cap * t, slope)
        ds = found.pop("ds")
        found["dbias"] = (ds * slope).sum(0, keepdims=True).swapaxes(1, 2)
        yield "the bias is added before the soft cap", found


def _of_scores(problem: Problem, s: np.ndarray, slope: np.ndarray, of_bias: float = 1.0) -> Found:
    """Returns the results for other scores; `ds` is among them.

    Args:
      problem: the problem.
      s: the scores [B, N, T, S].
      slope: their derivative by q kᵀ · scale.
      of_bias: their derivative by the bias.
    """
    hidden = reference.attention(*problem.arrays[:3], **problem.settings).s == -np.inf
    # The scores are passed as a bias on scores of 0. Keys are hidden by the masking, not by it.
    plain = problem.replace(q=np.zeros_like(problem.q), soft_cap=None)
    plain = plain.masked(bias=np.where(hidden, 0.0, s))
    forward, backward = both_passes(plain)
    found = results(plain, forward, backward) | {"ds": backward.ds}
    return found | _of_ds(problem, backward.ds, slope, of_bias)


def _sinks(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    sinks = problem.masking.sinks
    if sinks is None:
        return
    without = exact_of(problem.masked(sinks=None))
    words = "the sinks are missing from l"
    yield words, without.found | {"dsinks": 0 * exact.found["dsinks"]}
    # A handwritten backward pass computes exp(sink − lse) from the lse that lacks the sinks.
    lse = without.found["lse"]
    with np.errstate(all="ignore"):
        weights = np.where(np.isfinite(lse), np.exp(sinks.astype(np.float64)[:, None] - lse), 0.0)
        of_rows = -weights * _delta(problem, without).transpose(0, 2, 1, 3)
    yield words, {"dsinks": of_rows.sum((0, 1), keepdims=True)}
    p = without.p
    lost = _of_ds(problem, p * (exact.dp - _delta(problem, exact))) | {"dv": _of_p(problem, p)}
    yield "in the backward pass alone, the sinks are missing from l", lost
    scaled = _reference(problem, sinks=sinks.astype(np.float64) * problem.scale)
    scaled["dsinks"] = scaled["dsinks"] * problem.scale
    yield "the sinks are multiplied by the scale", scaled
    delta = _delta(problem, exact).transpose(0, 2, 1, 3)
    yield "{} lacks the factor exp(sink − lse)", {"dsinks": -delta.sum((0, 1), keepdims=True)}
    rows = np.prod(problem.q.shape[:2])
    yield "{} is a mean over the rows, not a sum", {"dsinks": exact.found["dsinks"] / rows}


def _lse(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    """Yields wrong values of lse; the gradients still follow from the right lse."""
    lse = exact.found["lse"]
    m = reference.attention(*problem.arrays[:3], **problem.settings).s.max(-1, keepdims=True)
    m = m.transpose(0, 2, 1, 3)
    if problem.masking.sinks is not None:
        m = np.maximum(m, problem.masking.sinks.astype(np.float64)[:, None])
        without = problem.masked(sinks=None)
        forward = reference.attention(*problem.arrays[:3], **without.settings)
        yield "lse lacks the sinks", {"lse": forward.lse[..., None]}
    m = np.where(np.isfinite(m), m, 0.0)
    base_2 = {"lse": lse * np.log2(np.e)}
    if problem.dlse is not None:  # the gradient passed through lse has the factor too
        base_2 = _reference(problem, dlse=problem.dlse * np.log2(np.e)) | base_2
    yield "lse is in base 2", base_2
    yield "lse lacks the logarithm of l", {"lse": m + np.exp(lse - m)}
    yield "lse is the maximum m alone", {"lse": m}
    yield "lse is log l, without the maximum m", {"lse": lse - m}
    yield "lse has the wrong sign", {"lse": -lse}
    for dtype in (ml_dtypes.bfloat16, np.float16):
        with np.errstate(over="ignore"):
            rounded = lse.astype(dtype).astype(np.float64)
        yield f"{LSE_ROUNDED}{np.dtype(dtype).name}", {"lse": rounded}


def _exchanged(exact: Exact) -> Iterator[tuple[str, Found]]:
    for one, other in itertools.combinations(("dq", "dk", "dv"), 2):
        x, y = exact.found[one], exact.found[other]
        if x.shape == y.shape:
            yield f"{WORDS[one]} and {WORDS[other]} are swapped", {one: y, other: x}


def _factors(problem: Problem, exact: Exact) -> Iterator[tuple[str, Found]]:
    every = {n: x for n, x in exact.found.items() if n != "lse"}
    scaled = {n: x for n, x in every.items() if n in ("dq", "dk")}
    others = {n: x for n, x in every.items() if n not in scaled}
    for words, factor, of_results in (
        ("{} lacks the factor scale", 1 / problem.scale, scaled),
        ("{} has the factor scale twice", problem.scale, scaled),
        ("{} is divided by the scale", 1 / problem.scale, others),
        ("{} is multiplied by the scale", problem.scale, others),
        ("{} has a factor log2 e", np.log2(np.e), every),
        ("{} has a factor ln 2", np.log(2), every),
        ("{} has the wrong sign", -1.0, every),
        ("{} is zero", 0.0, every),
        ("{} is twice too large", 2.0, every),
        ("{} is twice too small", 0.5, every),
    ):
        if factor != 1.0:
            yield words, {n: factor * x for n, x in of_results.items()}
