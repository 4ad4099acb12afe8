"""The row sums of P and dS follow from the O and lse that the implementation returned."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lowprec_attn import diagnostics, numerics
from lowprec_attn.diagnostics import pairs
from lowprec_attn.numerics import Numerics

ROWS, KEYS, HEADS, HEAD_SIZE = 24, 40, 2, 16
SCALE = HEAD_SIZE**-0.5


def inputs(largest_score, seed=0):
    """q, k, v, dO in float64, with values of 8 bits for which S is exact in float32."""
    r = np.random.default_rng(seed)
    k = r.integers(-8, 9, (1, KEYS, HEADS, HEAD_SIZE)) / 8
    k[:, 1::2] = k[:, ::2]  # keys tie, so that float32 holds m exactly, while lse loses log l
    q = r.integers(-8, 9, (1, ROWS, HEADS, HEAD_SIZE)) / 8
    s = np.einsum("btnh,bsnh->bnts", q, k) * SCALE
    q *= 2.0 ** np.round(np.log2(largest_score / np.abs(s).max()))
    v, do = (r.standard_normal((1, n, HEADS, HEAD_SIZE)) for n in (KEYS, ROWS))
    v, do = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (v, do))
    return q, k, v, do


@functools.partial(jax.jit, static_argnames="num")
def signals(q, k, v, do, returned, *, num):
    return diagnostics.attention_signals(
        *(x.astype(jnp.bfloat16) for x in (q, k, v, do)),
        numerics=num,
        scale=SCALE,
        returned=returned,
    )


def found(arrays, o, lse, num: Numerics):
    q, k, v, do = (jnp.asarray(x, jnp.float32) for x in arrays)
    returned = diagnostics.Returned(jnp.asarray(o, jnp.bfloat16), jnp.asarray(lse, jnp.float32))
    return signals(q, k, v, do, returned, num=num)


def exact(arrays):
    """S and P [B, N, T, S], lse and O in float64."""
    q, k, v, _ = arrays
    s = np.einsum("btnh,bsnh->bnts", q, k) * SCALE
    m = s.max(-1, keepdims=True)
    lse = m + np.log(np.exp(s - m).sum(-1, keepdims=True))
    p = np.exp(s - lse)
    return s, p, lse[..., 0], np.einsum("bnts,bsnh->btnh", p, v)


@pytest.mark.parametrize("size", [10, 1e3, 1e5])
@pytest.mark.parametrize("name", ["exact", "flash"])
def test_what_lse_loses_as_one_number_is_seen(name, size):
    arrays = inputs(size)
    s, _, lse, o = exact(arrays)
    lse = lse.astype(np.float32)
    of_lse = np.exp(s - lse[..., None].astype(np.float64)).sum(-1) - 1
    of_one_number = numerics.PRESETS[name].replace(statistics="lse")
    values = found(arrays, o, lse.swapaxes(1, 2), of_one_number)
    # The float32 error of exp and of S − lse in each term.
    bound = 4e-7
    assert np.all(np.abs(values["p_row_sum_error_mean"] - of_lse.mean((0, 2))) < bound)
    np.testing.assert_allclose(
        values["p_row_sum_error_rms"], np.sqrt((of_lse**2).mean((0, 2))), rtol=0.02, atol=bound
    )
    if size > 100:
        assert np.sqrt((of_lse**2).mean()) > 10 * bound


@pytest.mark.parametrize("size", [10, 1e3, 1e5])
def test_m_and_l_apart_lose_nothing(size):
    arrays = inputs(size)
    _, _, lse, o = exact(arrays)
    values = found(arrays, o, lse.swapaxes(1, 2), numerics.EXACT)
    assert np.all(np.asarray(values["p_row_sum_error_rms"]) < 4e-7)


def test_an_lse_that_is_off_is_seen_as_it_is():
    arrays = inputs(10)
    _, _, lse, o = exact(arrays)
    off = np.array([1e-3, -0.5]).reshape(1, 2, 1)
    values = found(arrays, o, (lse + off).swapaxes(1, 2), numerics.FLASH)
    np.testing.assert_allclose(values["p_row_sum_error_mean"], np.expm1(-off[0, :, 0]), rtol=1e-3)


@pytest.mark.parametrize("size", [1, 30])
def test_rows_of_ds_have_the_sum_that_the_returned_o_leaves(size):
    """δ = rowsum(dO ∘ O) reads an O of 8 bits, without and with a planted error."""
    arrays = inputs(size)
    _, p, lse, o = exact(arrays)
    do, v = arrays[3], arrays[2]
    for planted in (0.0, 0.25):
        rounded = (o + planted).astype(ml_dtypes.bfloat16).astype(np.float64)
        delta = np.einsum("btnh,btnh->bnt", do, rounded)
        dp = np.einsum("btnh,bsnh->bnts", do, v)
        sums = (p * (dp - delta[..., None])).sum(-1)
        values = found(arrays, rounded, lse.swapaxes(1, 2), numerics.FLASH)
        bound = 2e-7 * np.abs(dp).max()
        assert np.sqrt((sums**2).mean()) > 100 * bound
        np.testing.assert_allclose(
            values["ds_row_sum_rms"], np.sqrt((sums**2).mean((0, 2))), atol=bound
        )
        np.testing.assert_allclose(values["ds_row_sum_mean"], sums.mean((0, 2)), atol=bound)
        np.testing.assert_allclose(values["delta_error_mean"], -sums.mean((0, 2)), atol=bound)


def test_a_saved_output_that_is_not_returned_stays_emulated():
    arrays = inputs(10)
    _, _, lse, o = exact(arrays)
    values = found(arrays, o + 0.25, lse.swapaxes(1, 2), numerics.FLOAT32_OUTPUT)
    assert float(np.max(values["output_error_rms"])) > 0.2
    assert float(np.max(values["delta_error_rms"])) < 0.01


@pytest.mark.parametrize("n", [1, 2, 1023])
def test_sums_of_pairs_have_48_bits(n):
    r = np.random.default_rng(n)
    x = (r.standard_normal((20, n)) * np.exp(4 * r.standard_normal((20, n)))).astype(np.float32)
    if n > 2:
        x[:, n // 2] = -x.astype(np.float64).sum(1)  # the sum nearly cancels
    high, low = jax.jit(pairs.pair_sum)(x)
    found_sums = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    off = np.abs(found_sums - x.astype(np.float64).sum(1, keepdims=True))
    assert np.all(off <= 2.0**-44 * np.abs(x).sum(1, keepdims=True, dtype=np.float64))


def test_what_is_returned_must_fit():
    arrays = inputs(10)
    _, _, lse, o = exact(arrays)
    with pytest.raises(ValueError, match=r"returned.lse must have shape \[1, 24, 2\], got"):
        found(arrays, o, lse, numerics.FLASH)
