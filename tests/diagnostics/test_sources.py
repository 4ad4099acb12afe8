"""The parts of the error of W_Q's gradient, against float64 NumPy written out here."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lowprec_attn import diagnostics, numerics
from lowprec_attn.arithmetic import backward
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import comparison
from lowprec_attn.numerics import StandardMax

ROWS, HEAD_SIZE = 64, 16
SCALE = HEAD_SIZE**-0.5
PARTS = ("scores", "lse", "exponent", "dp", "delta", "ds")


def bf16(x):
    return np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


def on_grid(x, largest):
    """Rounds x to 8 bits below its largest entry, so that q kᵀ is exact in float32."""
    step = 2.0 ** np.ceil(np.log2(largest)) / 256
    return np.round(x / step) * step


def clustered(largest_score, seed=0, *, rows=ROWS, head_size=HEAD_SIZE):
    """q, k, v, dO [T, H] with keys near six directions, because keys of trained models cluster."""
    r = np.random.default_rng(seed)
    directions, spread = r.standard_normal((6, head_size)), 0.1
    k = directions[r.integers(6, size=rows)] + spread * r.standard_normal((rows, head_size))
    q = directions[r.integers(6, size=rows)] + spread * r.standard_normal((rows, head_size))
    seen = np.where(np.tri(rows, dtype=bool), q @ k.T, 0)
    q *= largest_score / (np.abs(seen).max() * head_size**-0.5)
    v = r.standard_normal((rows, head_size)) + r.standard_normal(head_size)
    arrays = on_grid(q, np.abs(q).max()), on_grid(k, np.abs(k).max()), v, r.standard_normal(v.shape)
    return tuple(bf16(x) for x in arrays)


def saturated():
    """Inputs for which every row but the first two has nearly all weight on the key before it."""
    _, k, v, do = clustered(4.0)
    k = on_grid(np.random.default_rng(1).choice([-1.0, 1.0], k.shape), 1)
    return 8 * np.roll(k, 1, axis=0), k, v, do


def one_key():
    """Inputs for which each row keeps one key (exp(−1e3) = 0), so the exact gradient is 0."""
    q, k, v, do = saturated()
    return bf16(64 * q), k, v, do


def ties():
    q, k, v, do = clustered(100.0)
    k[1::2] = k[::2]
    return q, k, v, do


INPUTS = {
    **{f"clustered {size:g}": functools.partial(clustered, size) for size in (10, 100, 1e3, 1e4)},
    "saturated": saturated,
    "one key": one_key,
    "ties": ties,
}
ARITHMETIC = {
    "flash": numerics.FLASH,
    "published": numerics.PUBLISHED.replace(kv_block="all"),
    "delta_dp_p": numerics.DELTA_DP_P.replace(dp="bfloat16"),
    "normalized_delta": numerics.NORMALIZED_DELTA.replace(dp="bfloat16"),
    "corrected_after_cast": numerics.CORRECTED_AFTER_CAST.replace(dp="bfloat16"),
    "normalized_delta, lse": numerics.NORMALIZED_DELTA.replace(dp="bfloat16", statistics="lse"),
    "corrected_after_cast, lse": numerics.CORRECTED_AFTER_CAST.replace(
        dp="bfloat16", statistics="lse"
    ),
    "value": numerics.FLASH.replace(value="float8_e4m3fn"),
    "mean_key": numerics.FLASH.replace(mean_key="subtracted"),
}


norm = np.linalg.norm


class Expected(NamedTuple):
    exact: np.ndarray
    total: np.ndarray
    scores: np.ndarray
    lse: np.ndarray
    exponent: np.ndarray
    dp: np.ndarray
    delta: np.ndarray
    ds: np.ndarray
    size: float  # the size in dQ of an error in every dS of 1e-7 of the largest dP


def softmax(s):
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def rows_sum(x):
    return x.sum(1, keepdims=True)


def expected_parts(arrays, o, lse, num, gain=1.0):
    """Returns dQ and its parts in float64 from O and lse; `gain` multiplies the backward P."""
    q, k, v, do = arrays
    if not num.value.is_identity:
        v = v.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    hidden = ~np.tri(len(q), dtype=bool)
    s_exact = np.where(hidden, -np.inf, q @ k.T * SCALE)
    s = s_exact if num.scores.is_identity else np.where(hidden, -np.inf, bf16(s_exact))
    dp_exact = do @ v.T
    dp = dp_exact if num.dp.is_identity else bf16(dp_exact)
    lse_exact = s.max(1) + np.log(np.exp(s - s.max(1, keepdims=True)).sum(1))
    if num.statistics == "m_and_l":  # P is formed from them, whatever lse was returned
        lse = lse_exact
    p = np.exp((s - lse[:, None]).astype(np.float32).astype(np.float64)) * gain
    exact = softmax(s_exact) * (dp_exact - rows_sum(softmax(s_exact) * dp_exact))
    of_scores = softmax(s) * (dp_exact - rows_sum(softmax(s) * dp_exact))
    factor = np.exp(lse_exact - lse)[:, None]
    first = rows_sum(do * o)  # δ₀
    rounded = bf16(p * (dp - first) * SCALE) / SCALE
    delta = {
        "do_o": first,
        "dp_p": rows_sum(dp * p),
        "normalized": rows_sum(dp * p) / rows_sum(p),
        "after_cast": first + rows_sum(rounded) / rows_sum(bf16(p)),
    }[num.delta]
    # The exact δ after P is switched to the run's, and after dP is.
    after_p = after_dp = rows_sum(softmax(s) * dp_exact)
    if num.delta != "do_o":
        after_p, after_dp = rows_sum(p * dp_exact) / rows_sum(p), rows_sum(p * dp) / rows_sum(p)
    if num.delta in ("normalized", "after_cast"):
        multiplied = rounded - (delta - first) * bf16(p)
    else:
        multiplied = bf16(p * (dp - delta) * SCALE) / SCALE
    stages = {
        "scores": of_scores,
        "lse": factor * of_scores,
        "exponent": p * (dp_exact - after_p),
        "dp": p * (dp - after_dp),
        "delta": p * (dp - delta),
        "ds": multiplied,
    }
    matrices, before = {}, exact
    for name, after in stages.items():
        matrices[name], before = after - before, after
    size = 1e-7 * SCALE * np.abs(dp_exact).max() * np.abs(k).max()
    if num.mean_key == "subtracted":
        k = bf16(k - k.mean(0))
    parts = {name: SCALE * x @ k for name, x in matrices.items()}
    return Expected(SCALE * exact @ k, SCALE * (multiplied - exact) @ k, **parts, size=size)


def returned_of(arrays, num):
    """O in bfloat16, and lse in float32 with added errors of some 1e-3."""
    q, k, v, _ = arrays
    s = q @ k.T * SCALE
    s = np.where(np.tri(len(q), dtype=bool), s if num.scores.is_identity else bf16(s), -np.inf)
    lse = s.max(1) + np.log(np.exp(s - s.max(1, keepdims=True)).sum(1))
    off = 1e-3 * np.random.default_rng(7).standard_normal(len(q))
    return bf16(softmax(s) @ v), (lse + off).astype(np.float32).astype(np.float64)


def one_head(x, dtype=jnp.bfloat16):
    return jnp.asarray(x, dtype)[None, :, None]


@functools.partial(jax.jit, static_argnames="num")
def compare(q, k, v, do, returned, *, num):
    spec = Spec(numerics=num, row_max=StandardMax(), scale=SCALE, is_causal=True)
    return comparison.compare(q, k, v, do, Extras(), spec, returned).gradients


def found_parts(arrays, o, lse, num):
    returned = diagnostics.Returned(one_head(o), jnp.asarray(lse, jnp.float32)[None, :, None])
    rows = compare(*(one_head(x) for x in arrays), returned, num=num)
    return {
        name: np.zeros_like(o) if part is None else SCALE * np.asarray(part)[0, :, 0]
        for name, part in rows.dq._asdict().items()
    } | {"total": SCALE * np.asarray(rows.dq.error)[0, :, 0]}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_parts_are_those_of_float64(inputs, name):
    arrays, num = INPUTS[inputs](), ARITHMETIC[name]
    o, lse = returned_of(arrays, num)
    expected = expected_parts(arrays, o, lse, num)
    found = found_parts(arrays, o, lse, num)
    residue = np.sqrt(ROWS) * expected.size  # the float32 error of dP − δ
    for part in ("exact", *PARTS, "total"):
        wanted = getattr(expected, part)
        # Numbers that differ slightly may round differently: about one of some thousand does.
        is_cast = part in ("ds", "dp", "total")
        # Float32 sums depend on the processor: 0.52 of the residue with AVX2, 0.4 with AVX-512.
        bound = (0.02 if is_cast else 1e-4) * norm(wanted) + (1.0 if is_cast else 0.6) * residue
        assert norm(found[part] - wanted) <= bound, part
    if inputs != "one key":  # its gradient is 0, and so are some errors of it
        errs = {"lse": num.statistics == "lse", "delta": num.delta == "do_o", "ds": True}
        for part in (part for part, large in errs.items() if large):
            assert norm(getattr(expected, part)) > 0.7 * residue, part  # a missing part would show


@pytest.mark.parametrize("name", ["flash", "normalized_delta, lse"])
def test_a_wrong_exponent_is_a_part_of_its_own(name, monkeypatch):
    arrays, num = clustered(100.0), ARITHMETIC[name]
    gain = 1 + 2.0**-6 * np.where(np.arange(ROWS) % 3 == 0, 1, -0.5)
    as_it_is = backward.backward_tile

    def backward_tile(s, *args):
        tile = as_it_is(s, *args)
        factors = jnp.asarray(gain, jnp.float32)[: s.shape[-1]]
        return tile._replace(p=tile.p * factors.reshape(1, 1, 1, 1, -1))

    monkeypatch.setattr(backward, "backward_tile", backward_tile)
    compare.clear_cache()
    o, lse = returned_of(arrays, num)
    expected = expected_parts(arrays, o, lse, num, gain)
    found = found_parts(arrays, o, lse, num)
    compare.clear_cache()
    for part in ("lse", "exponent", "delta"):
        wanted = getattr(expected, part)
        bound = 1e-4 * norm(wanted) + 0.4 * np.sqrt(ROWS) * expected.size
        assert norm(found[part] - wanted) <= bound, part
    assert norm(expected.exponent) > 5 * norm(expected.lse) > 0


@functools.partial(jax.jit, static_argnames=("num", "head_size"))
def signals_of(q, k, v, do, x, returned=None, *, num, head_size=HEAD_SIZE):
    return diagnostics.attention_signals(
        q, k, v, do, numerics=num, scale=head_size**-0.5, is_causal=True, x=x, returned=returned
    )


def shares(arrays, num, x=None, returned=None):
    """Returns the signals of the sources; x defaults to the unit matrix, for which dW_Q is dQ."""
    rows, head_size = arrays[0].shape
    x = jnp.eye(rows)[None] if x is None else x
    q, k, v, do = (one_head(a) for a in arrays)
    found = signals_of(q, k, v, do, x, returned, num=num, head_size=head_size)
    start = "query_weight_gradient_"
    return {n.removeprefix(start): float(s[0]) for n, s in found.items() if n.startswith(start)}


def test_the_signals_are_norms_of_the_parts_of_dw_q():
    arrays, num = clustered(100.0), ARITHMETIC["published"]
    x = np.random.default_rng(3).standard_normal((ROWS, 24)).astype(np.float32)
    o, lse = returned_of(arrays, num)
    returned = diagnostics.Returned(one_head(o), jnp.asarray(lse, jnp.float32)[None, :, None])
    found = shares(arrays, num, jnp.asarray(x)[None], returned)
    expected = expected_parts(arrays, o, lse, num)

    def of_weight(dq):
        return norm(x.T.astype(np.float64) @ dq)

    exact = of_weight(expected.exact)
    assert found["exact"] == pytest.approx(exact, rel=1e-4)
    parts = {name: getattr(expected, name) for name in (*PARTS, "total")}
    for name, part in (parts | {"p": expected.lse + expected.exponent}).items():
        wanted = of_weight(part) / exact
        assert found[f"error_from_{name}"] == pytest.approx(wanted, rel=0.02, abs=1e-6), name
    assert found["error"] == pytest.approx(of_weight(expected.delta), rel=1e-3)
    whole = of_weight(expected.exact + expected.total)
    assert found["error_relative"] == pytest.approx(of_weight(expected.delta) / whole, rel=2e-3)


@pytest.mark.parametrize("size", [10, 100, 1e3, 1e4])
def test_exact_arithmetic_has_no_errors(size):
    found = shares(clustered(size), numerics.EXACT)
    assert found["exact"] > 0
    # The bound includes the error of lse as one float32 number, 2⁻²⁴ of its size.
    assert max(found[f"error_from_{name}"] for name in PARTS) < 1e-5 + 2**-23 * size


@pytest.mark.parametrize("size", [10, 100, 1e3, 1e4])
def test_most_of_the_error_of_flash_is_that_of_delta_where_keys_cluster(size):
    arrays = clustered(size, rows=256, head_size=64)
    found = shares(arrays, numerics.FLASH)
    assert found["error_from_delta"] > found["error_from_ds"]
    assert found["error_from_delta"] > 0.5 * found["error_from_total"] > 5e-3
    assert found["error_from_p"] < 1e-2 * found["error_from_total"]
    if size == 1e4:
        assert found["error_from_delta"] > 5 * found["error_from_ds"]
    float32 = shares(arrays, numerics.FLASH.replace(ds="float32"))
    assert float32["error_from_ds"] == 0
    assert float32["error_from_delta"] == pytest.approx(found["error_from_delta"], rel=1e-4)


@functools.partial(jax.jit, static_argnames="num")
def run_tiled(q, k, v, do, *, num):
    spec = Spec(numerics=num, row_max=StandardMax(), scale=SCALE, is_causal=True)
    (o, lse), pull = jax.vjp(lambda q: tiled.attention(q, k, v, Extras(), spec), q)
    return o, lse, pull((do, jnp.zeros_like(lse)))[0]


def one_flip(arrays):
    """Returns the share of exact dQ by which another cast of the largest dS may change it.

    The emulation sums δ in another order than the implementation, so their casts may differ.
    """
    q, k, v, do = arrays
    p = softmax(np.where(np.tri(len(q), dtype=bool), q @ k.T * SCALE, -np.inf))
    dp = do @ v.T
    ds = p * (dp - rows_sum(p * dp))
    return 2.0**-8 * np.abs(ds).max() * norm(k, axis=1).max() / norm(ds @ k)


@pytest.mark.parametrize("inputs", ["clustered 100", "clustered 10000", "saturated", "ties"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_total_is_the_error_of_the_dq_of_the_implementation(inputs, name):
    arrays = INPUTS[inputs]()
    num = ARITHMETIC[name].replace(grads="float32", tile_grads="float32", output="bfloat16")
    q, k, v, do = (one_head(x, jnp.float32) for x in arrays)
    returned = diagnostics.Returned(*run_tiled(q, k, v, do, num=num))
    found = signals_of(q, k, v, do, jnp.eye(ROWS)[None], returned, num=num)
    measured = float(found["query_weight_gradient_error_measured"][0])
    total = float(found["query_weight_gradient_error_from_total"][0])
    assert measured > 1e-3
    assert total == pytest.approx(measured, rel=0.02, abs=one_flip(arrays))
