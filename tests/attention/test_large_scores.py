"""Rows of huge scores: if m and l are saved apart, Σ P is 1 whatever the scores.

Left padding by an additive bias gives such scores to the rows of the padding. A single float32 lse
loses log l there: between 1e6 and 2e6, float32 numbers are 1/16 to 1/8 apart.
"""

import dataclasses

import harness
import numpy as np
import pytest
from kernel_calls import kernel_call, run, run_plain

from lowprec_attn.numerics import EXACT, FLASH, get_preset

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

LEAST = float(np.finfo(np.float32).min)
# MASKED, which the kernels use for a missing score, is one of these values.
BIASES = (1e6, -1e6, -1e9, -1e30, LEAST / 2, -(2.0**127), LEAST)
CASE = harness.Case(rows=13, keys=13, heads=2, kv_heads=1, is_causal=True, bias=(True, True, True))
PADDED = 6  # keys on the left, hidden from later rows; rows of the padding see nothing else


def inputs(bias: float) -> harness.Arrays:
    arrays = harness.inputs(CASE)
    arrays["bias"][...] = 0.0
    arrays["bias"][..., :PADDED] = bias
    return arrays


def exact_of(arrays: harness.Arrays) -> harness.Arrays:
    """The float64 results for float32 scores; next to a bias of 1e9, q·k vanishes."""
    q, k = (arrays[name].astype(np.float64).swapaxes(1, 2) for name in ("q", "k"))
    products = q @ k.repeat(CASE.heads // CASE.kv_heads, 1).swapaxes(-1, -2) * CASE.head_size**-0.5
    s = (products + arrays["bias"]).astype(np.float32).astype(np.float64)
    return harness.oracle(CASE, arrays | {"bias": s - products})


def check(result: harness.Arrays, exact: harness.Arrays) -> None:
    for name in ("out", "dq", "dk", "dv"):
        bound = 32 * 2.0**-24 * harness.largest(exact[name])
        assert harness.error(result[name], exact[name]) <= bound, name


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("implementation", ["dense", "tiled_odd"])
def test_padding_by_a_bias(implementation: str, bias: float) -> None:
    arrays = inputs(bias)
    result = harness.run(harness.IMPLEMENTATIONS[implementation], CASE, arrays, EXACT)
    check(result, exact_of(arrays))
    if bias < -1e8:  # scores of these rows are equal
        v = arrays["v"][:, :PADDED].astype(np.float64)
        means = np.cumsum(v, axis=1) / np.arange(1, PADDED + 1)[:, None, None]
        assert np.abs(result["out"][:, :PADDED] - means.repeat(2, 2)).max() < 1e-6


@pytest.mark.parametrize("exponent", ["scale_first", "unfused"])
@pytest.mark.parametrize("implementation", ["dense", "tiled_odd"])
def test_padding_by_the_lowest_score_in_base_2(implementation: str, exponent: str) -> None:
    """log2 e times this score is beyond float32."""
    arrays, num = inputs(LEAST), EXACT.replace(exponent=exponent)
    result = harness.run(harness.IMPLEMENTATIONS[implementation], CASE, arrays, num)
    check(result, exact_of(arrays))


@pytest.mark.parametrize(
    ("implementation", "preset"),
    [
        *(("dense", name) for name in ("standard", "jax_nn", "matched", "normalized_delta")),
        *(("tiled_odd", name) for name in ("matched", "normalized_delta", "corrected_after_cast")),
    ],
)
def test_presets_that_save_m_and_l_keep_their_probabilities(
    implementation: str, preset: str
) -> None:
    """Each row of P sums to 1 in the backward pass: if dO is 1 everywhere, dV counts the rows."""
    arrays = inputs(-1e9)
    arrays["do"][...] = 1.0
    how, num = harness.IMPLEMENTATIONS[implementation], get_preset(preset)
    sums = harness.run(how, CASE, arrays, num)["dv"].sum(axis=1)
    rows = CASE.rows * CASE.heads // CASE.kv_heads
    assert np.abs(sums - rows).max() <= 2.0**-8 * rows  # because P is rounded to bfloat16


@pytest.mark.parametrize("implementation", ["dense", "tiled_odd"])
def test_lse_as_one_number_is_noticed(implementation: str) -> None:
    arrays, how = inputs(-1e6), harness.IMPLEMENTATIONS[implementation]
    result = harness.run(how, CASE, arrays, EXACT.replace(statistics="lse"))
    with pytest.raises(AssertionError, match=r"dq|dk|dv"):
        check(result, exact_of(arrays))


HUGE = harness.Case(batch=1, rows=20, keys=140, heads=2, kv_heads=1, scale=1.0)
HUGE_OF_SIGN = {
    sign: dataclasses.replace(HUGE, values=f"huge_{sign}_scores")
    for sign in ("positive", "negative")
}


def errors_of(result: harness.Arrays, case: harness.Case) -> dict[str, float]:
    """Errors relative to the largest entries. Kernels take no bias, so q and k make the scores."""
    exact = harness.oracle(case, harness.inputs(case))
    # Feature 0 of q and k is 2^11. It multiplies the rounding error of a sum over dS, so it is left
    # out.
    return {
        name: harness.error(result[name][..., 1:], exact[name][..., 1:])
        / harness.largest(exact[name][..., 1:])
        for name in ("out", "dq", "dk", "dv")
    }


@pytest.mark.parametrize("sign", HUGE_OF_SIGN)
@pytest.mark.parametrize("kernels", harness.KERNELS)
def test_scores_of_four_million_in_the_kernels(kernels: str, sign: str) -> None:
    case = HUGE_OF_SIGN[sign]
    errors = errors_of(run(case, kernel_call(kernels, case, EXACT)), case)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("implementation", ["dense", "tiled_odd", "gpu"])
@pytest.mark.parametrize("exponent", ["scale_first", "shift_first", "whole_max"])
def test_what_an_exponent_loses_where_the_maximum_moves(exponent: str, implementation: str) -> None:
    """`scale_first` loses what FlashAttention-2 does, because c m is rounded anew for each m.

    α = 2^(c (m_old − m)) is nearly exact. Formed from the rounded products c m_old and c m, it
    would have their rounding errors and lose nothing. FlashAttention does not form it so.
    """
    case, how = HUGE_OF_SIGN["positive"], harness.IMPLEMENTATIONS[implementation]
    num, arrays = EXACT.replace(exponent=exponent), harness.inputs(case)
    result = harness.run(how, case, arrays, num)
    emulated = harness.run_plain(case, arrays, how.numerics(num))
    out, expected = (errors_of(x, case)["out"] for x in (result, emulated))
    if exponent == "scale_first" and implementation != "dense":  # `dense` has a single m
        assert 0.03 < out < 0.1
        assert 0.03 < expected < 0.1
    else:
        assert out < 1e-5
    assert np.abs(result["out"] - emulated["out"])[..., 1:].max() < 2e-6


@pytest.mark.parametrize("kernels", harness.KERNELS)
def test_rounding_to_bfloat16_takes_m_and_l_apart_as_well(kernels: str) -> None:
    """An lse would lose log l, as the emulation of it shows."""
    case, one = HUGE_OF_SIGN["negative"], kernel_call(kernels, HUGE, FLASH)
    chosen = FLASH.replace(statistics="m_and_l")
    apart = errors_of(run(case, kernel_call(kernels, case, chosen)), case)
    together = errors_of(run_plain(case, one), case)
    assert apart["dv"] < 0.01 < 0.1 < together["dv"], (apart, together)
