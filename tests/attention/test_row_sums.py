"""Row sums of the backward pass: of P = exp(S − lse), exactly 1, and of dS, exactly 0.

If every entry has its own bias, the gradient of the bias is dS before rounding, P ∘ (dP − δ +
dlse). With dO = 0 and dlse = 1 it is P itself.
"""

import dataclasses
import functools
import math
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimized
from points import presets_with_every_choice

from lowprec_attn import attention, diagnostics, numerics
from lowprec_attn.numerics import PRESETS, DynamicMax, Numerics, PublishedMax, RowMax, StandardMax

pytestmark = pytest.mark.usefixtures("strict_promotion")

SCORES = (0.0, 8.0, 30.0, 130.0, 300.0, 520.0, 1030.0, 2100.0)
KEYS, STEP, TIED = 64, 16, 8
EPS, LOW_EPS = 2.0**-24, 2.0**-8  # the largest relative rounding errors of float32 and bfloat16


@functools.partial(optimized, static_argnames=("implementation", "num", "row_max"))
def probabilities(
    scores: jax.Array, *, implementation: str, num: Numerics, row_max: RowMax
) -> tuple[jax.Array, jax.Array]:
    """P of the backward pass [T, S], and lse [T], for rows with these scores."""
    rows, keys = scores.shape
    q, k = (jnp.zeros((1, n, 1, 16), jnp.bfloat16) for n in (rows, keys))

    def attend(bias: jax.Array) -> Any:
        return attention.dot_product_attention(
            q,
            k,
            k,
            bias=bias,
            numerics=num,
            row_max=row_max,
            implementation=implementation,
            return_residual=True,
        )

    (out, lse), pullback = jax.vjp(attend, scores[None, None])
    (dbias,) = pullback((jnp.zeros_like(out), jnp.ones_like(lse)))
    return dbias[0, 0], lse[0, :, 0]


def row_sums(scores: np.ndarray, **options: Any) -> np.ndarray:
    """Σ_j P_ij, [T]."""
    p, _ = probabilities(jnp.asarray(scores, jnp.float32), **options)
    return np.asarray(p).sum(-1, dtype=np.float64)


def rows_of_scores() -> np.ndarray:
    """Rows with largest scores of ± SCORES, each reached by one key or by 8, two per step."""
    r = np.random.default_rng(0)
    largest = np.array([sign * size for size in SCORES for sign in (1, -1)] * 2)[:, None]
    scores = largest - r.uniform(0.5, 30, (len(largest), KEYS))
    half = len(largest) // 2
    scores[:half, :1], scores[half:, :: KEYS // TIED] = largest[:half], largest[half:]
    return scores


def bound(scores: np.ndarray, num: Numerics, row_max: RowMax) -> np.ndarray:
    """The allowed |Σ P − 1|, since P = exp(S − lse) and exp(lse) = Σ exp(S) up to these errors.

    lse in float32    2^-24 of |lse|, and as much of S − lse; some more for log, exp and sums
    `normalizer`      2^-8 of l
    `stats`           2^-8 of l in every step (m is subtracted as it was rounded)
    `shift`           2^-8 x, where x = m − S is the exponent of P̄, summed over the steps
                      between the maxima; weighted with P, x is on average at most log(keys)
                      plus how far a rule puts m above the largest score
    """
    largest = np.abs(scores).max(-1)
    exponent = 4 * EPS * (largest + KEYS)
    steps = 1 if num.kv_block == "all" else KEYS // STEP
    above = row_max.max_shift if isinstance(row_max, DynamicMax) else 0.0
    if not num.stats.is_identity:
        exponent += LOW_EPS * steps
    if not num.normalizer.is_identity:
        exponent += LOW_EPS
    if not num.shift.is_identity:
        exponent += LOW_EPS * (math.log(KEYS) + above)
    return np.expm1(exponent)


def with_steps(name: str) -> tuple[str, Numerics]:
    """An implementation and the preset; `tiled` takes steps of 16 keys where rows may be split."""
    num = PRESETS[name]
    if num.normalize_probs:
        return "dense", num.replace(kv_block="all")
    return "tiled", num.replace(kv_block=STEP)


NEAREST = [name for name, num in PRESETS.items() if not num.needs_bits]


# These presets have the S, m, l and lse of `flash`.
PROBABILITIES_OF_FLASH = (
    *("float32_output", "auxiliary_output", "delta_dp_p", "normalized_delta"),
    *("corrected_after_cast", "halves_output"),
)
# Presets in which every way to form P and lse occurs.
WITH_EVERY_WAY = presets_with_every_choice([n for n in NEAREST if n not in PROBABILITIES_OF_FLASH])


# A rule moves m, which matters where m or S − m is rounded.
RULES = [*((preset, StandardMax()) for preset in dict.fromkeys((*WITH_EVERY_WAY, "flash")))]
RULES += [(preset, DynamicMax()) for preset in ("published_eager", "matched")]


@pytest.mark.parametrize(("preset", "rule"), RULES)
def test_probabilities_of_the_backward_pass_sum_to_one(preset: str, rule: RowMax) -> None:
    implementation, num = with_steps(preset)
    scores = rows_of_scores()
    if isinstance(rule, DynamicMax) and num.probs.scaling is not None:
        rule = DynamicMax(max_shift=9.0)  # fits e4m3 with its scale
    sums = row_sums(scores, implementation=implementation, num=num, row_max=rule)
    excess = np.abs(sums - 1) / bound(scores, num, rule)
    assert excess.max() <= 1, (excess.argmax(), sums)


TIED_SCORES = (8.0, 130.0, 300.0, 520.0, 1030.0, 2100.0)
SUMS_OF_ROUNDED_LSE = np.array([1.0171, 1.0827, 1.0827, 0.1465, 8.0, 8.0])


def test_lse_in_bfloat16_makes_them_anything_where_scores_are_large() -> None:
    """Near 1,000, bfloat16 numbers are 8 apart, so lse = S + log 8 becomes S."""
    scores = np.repeat(np.array(TIED_SCORES)[:, None], TIED, axis=1)
    num = numerics.PUBLISHED.replace(lse="bfloat16")
    sums = row_sums(scores, implementation="dense", num=num, row_max=StandardMax())
    np.testing.assert_allclose(sums, SUMS_OF_ROUNDED_LSE, rtol=1e-3)
    assert (np.abs(sums - 1) > bound(scores, num, StandardMax())).all()

    float32 = row_sums(
        scores, implementation="dense", num=numerics.PUBLISHED, row_max=StandardMax()
    )
    assert np.abs(float32 - 1).max() <= bound(scores, num, StandardMax()).max()


# With two tied scores s and β = 2, m is 2 s and l is 2 exp(−s), which is clamped at 1e-10 for s ≥
# 23.7.
VANISHING = np.array([10.0, 20.0, 23.5, 24.5, 30.0, 40.0])


def test_rows_vanish_under_the_published_rule() -> None:
    scores = np.repeat(VANISHING[:, None], 2, axis=1)
    for preset in ("flash", "published", "published_eager"):
        sums = row_sums(scores, implementation="dense", num=PRESETS[preset], row_max=PublishedMax())
        expected = np.minimum(1, 2 * np.exp(-VANISHING) / 1e-10)
        np.testing.assert_allclose(sums, expected, rtol=0.25 if "eager" in preset else 5e-3)
        np.testing.assert_array_equal(sums < 0.5, VANISHING > 24)


@functools.partial(jax.jit, static_argnames=("num", "row_max", "causal"))
def signals(
    q: Any, k: Any, v: Any, do: Any, *, num: Numerics, row_max: RowMax, causal: bool
) -> Any:
    return diagnostics.attention_signals(
        q, k, v, do, numerics=num, row_max=row_max, scale=1.0, is_causal=causal
    )


def test_the_signal_of_vanished_rows() -> None:
    q = jnp.asarray(VANISHING, jnp.bfloat16).reshape(1, -1, 1, 1)
    k = jnp.ones((1, 2, 1, 1), jnp.bfloat16)
    found = functools.partial(signals, q, k, k, q, num=numerics.PUBLISHED, causal=False)
    assert float(found(row_max=PublishedMax())["vanished_rows"][0]) == 0.5
    assert float(found(row_max=PublishedMax())["p_row_sum_error_max"][0]) == pytest.approx(1)
    for rule in (StandardMax(), DynamicMax()):
        assert float(found(row_max=rule)["vanished_rows"][0]) == 0
        assert float(found(row_max=rule)["p_row_sum_error_max"][0]) < 1e-2


def test_the_signal_of_lse_in_bfloat16() -> None:
    q = jnp.asarray(TIED_SCORES, jnp.bfloat16).reshape(1, -1, 1, 1)
    k = jnp.ones((1, TIED, 1, 1), jnp.bfloat16)
    num = numerics.PUBLISHED.replace(lse="bfloat16")
    found = signals(q, k, k, q, num=num, row_max=StandardMax(), causal=False)
    errors = SUMS_OF_ROUNDED_LSE - 1
    assert float(found["p_row_sum_error_max"][0]) == pytest.approx(7, rel=1e-3)
    assert float(found["p_row_sum_error_mean"][0]) == pytest.approx(errors.mean(), rel=1e-3)
    rms = float(np.sqrt(np.mean(errors**2)))
    assert float(found["p_row_sum_error_rms"][0]) == pytest.approx(rms, rel=1e-3)
    assert float(found["vanished_rows"][0]) == pytest.approx(1 / 6)


@functools.partial(jax.jit, static_argnames="num")
def bias_and_query_gradients(q: Any, k: Any, v: Any, do: Any, *, num: Numerics) -> Any:
    """dS before its rounding, [B, N, T, S], as the gradient of a zero bias, and dQ."""
    (batch, rows, heads, _), keys = q.shape, k.shape[1]

    def attend(q: jax.Array, bias: jax.Array) -> jax.Array:
        return attention.dot_product_attention(
            q, k, v, bias=bias, scale=1.0, is_causal=True, numerics=num, implementation="tiled"
        )

    _, pullback = jax.vjp(attend, q, jnp.zeros((batch, heads, rows, keys), jnp.float32))
    dq, dbias = pullback(do)
    return dbias, dq


@pytest.mark.parametrize("name", ["published_eager", "normalized_delta", "corrected_after_cast"])
def test_the_signals_of_sums_of_ds_are_those_of_the_implementation(name: str) -> None:
    r = np.random.default_rng(0)
    q, k, v, do = (r.standard_normal((2, 40, 2, 16)).astype(np.float32) for _ in range(4))
    k[..., 0] = 1.0  # dQ[..., 0] is then the sum of the rounded dS
    arrays = [jnp.asarray(x) for x in (q, k, v, do)]
    num = PRESETS[name].replace(kv_block=40, grads="float32", tile_grads="float32")
    dbias, dq = bias_and_query_gradients(*arrays, num=num)
    found = signals(*arrays, num=num, row_max=StandardMax(), causal=True)
    by_row = {
        "ds_row_sum": np.asarray(dbias).sum(-1),
        "rounded_ds_row_sum": np.asarray(dq)[..., 0].swapaxes(1, 2),
    }
    for signal, sums in by_row.items():
        if (signal, name) == ("ds_row_sum", "normalized_delta"):
            assert float(found["ds_row_sum_max"].max()) < 1e-5  # float32 errors only
        elif (signal, name) == ("rounded_ds_row_sum", "normalized_delta"):
            continue  # dQ applies r / s in another way
        elif (signal, name) == ("rounded_ds_row_sum", "corrected_after_cast"):
            assert float(found["rounded_ds_row_sum_max"].max()) < 1e-5
            assert np.abs(sums).max() < 1e-5
        else:
            rms = np.sqrt((sums**2).mean((0, 2)))
            np.testing.assert_allclose(found[f"{signal}_rms"], rms, rtol=0.02)
            atol = 0.02 * float(rms.min())
            np.testing.assert_allclose(found[f"{signal}_mean"], sums.mean((0, 2)), atol=atol)
            np.testing.assert_allclose(found[f"{signal}_max"], np.abs(sums).max((0, 2)), rtol=0.02)


# Rows of dS with `delta='normalized'`. O is rounded to 3 bits, so that δ₀ has a large error.
COARSE = numerics.FLASH.replace(output="bf16_m3", dp="bfloat16", grads="float32")
WIDE = {"bias": (True, True, True)}
CASES = {
    "lengths": harness.Case(key_lengths=(20, 6), query_lengths=(4, 17), is_causal=True, **WIDE),
    "empty rows": harness.Case(mask="empty", heads=4, kv_heads=2, **WIDE),
}
IMPLEMENTATIONS_AND_CASES = [("dense", "empty rows"), ("tiled_odd", "lengths")]


def without_dlse(case: harness.Case, arrays: harness.Arrays, how: Any, num: Numerics) -> np.ndarray:
    """Σ_j dS_ij minus dlse Σ P, the part of the gradient of lse; [B, N, T]."""
    dbias = harness.run(how, case, arrays, num)["dbias"].astype(np.float64)
    return dbias.sum(-1) - arrays["dlse"].swapaxes(1, 2) * of_p(case, arrays, how, num).sum(-1)


def of_p(case: harness.Case, arrays: harness.Arrays, how: Any, num: Numerics) -> np.ndarray:
    """P, [B, N, T, S]."""
    only_lse = {"do": np.zeros_like(arrays["do"]), "dlse": np.ones_like(arrays["dlse"])}
    return harness.run(how, case, {**arrays, **only_lse}, num)["dbias"].astype(np.float64)


@pytest.mark.parametrize(("implementation", "name"), IMPLEMENTATIONS_AND_CASES)
def test_rows_of_ds_sum_to_zero_with_the_normalized_delta(implementation: str, name: str) -> None:
    case, how = CASES[name], harness.IMPLEMENTATIONS[implementation]
    arrays = harness.inputs(case)
    num = COARSE.replace(delta="normalized")
    sums = without_dlse(case, arrays, how, num)

    # Float32 errors of dP − δ, of its product with P, and of sums over some twenty keys.
    p = of_p(case, arrays, how, num)
    v = np.repeat(arrays["v"], case.heads // case.kv_heads, axis=2).astype(np.float64)
    dp = np.abs(np.einsum("btnh,bsnh->bnts", arrays["do"].astype(np.float64), v))
    size = (p * dp).sum(-1) + np.abs(arrays["dlse"]).swapaxes(1, 2) * p.sum(-1)
    # With O rounded to 3 bits, δ₀ is off by a sixteenth of its terms.
    terms = np.abs(arrays["do"].astype(np.float64)).sum(-1).swapaxes(1, 2) * np.abs(v).max()
    allowed = 32 * EPS * (size + terms * p.sum(-1))
    assert (np.abs(sums) <= allowed).all(), (np.abs(sums) / np.maximum(allowed, 1e-30)).max()

    saved = without_dlse(case, arrays, how, COARSE)
    assert np.median(np.abs(saved)[allowed > 0] / allowed[allowed > 0]) > 30


@pytest.mark.parametrize(("implementation", "name"), IMPLEMENTATIONS_AND_CASES)
def test_a_bias_has_the_ds_that_is_corrected_after_the_cast(implementation: str, name: str) -> None:
    """Its rows sum to the error of the cast, at most 2^-8 per entry; δ₀'s error is far larger."""
    case, how = CASES[name], harness.IMPLEMENTATIONS[implementation]
    arrays = harness.inputs(case)
    chosen = COARSE.replace(dp="float32")
    corrected, saved = (
        harness.run(how, case, arrays, chosen.replace(delta=delta))["dbias"].astype(np.float64)
        for delta in ("after_cast", "do_o")
    )
    expected = arrays["dlse"].swapaxes(1, 2) * of_p(case, arrays, how, chosen).sum(-1)
    sums, of_saved = (x.sum(-1) - expected for x in (corrected, saved))
    allowed = 2 * LOW_EPS * np.abs(saved).sum(-1) + 1e-5
    assert (np.abs(sums) <= allowed).all()
    assert np.median((np.abs(of_saved) / allowed)[expected != 0]) > 2


def test_rows_of_ds_sum_to_zero_for_packed_arrays() -> None:
    r = np.random.default_rng(0)
    qkv, do = (
        jnp.asarray(r.standard_normal(s), jnp.bfloat16) for s in ((2, 24, 3, 2, 16), (2, 24, 2, 16))
    )

    @functools.partial(optimized, static_argnames="num")
    def ds(qkv: jax.Array, *, num: Numerics) -> jax.Array:
        def attend(bias: jax.Array) -> jax.Array:
            return attention.dot_product_attention(
                qkv, bias=bias, is_causal=True, numerics=num, implementation="tiled"
            )

        out, pullback = jax.vjp(attend, jnp.zeros((2, 2, 24, 24), jnp.float32))
        return pullback(do.astype(out.dtype))[0]

    num = COARSE.replace(kv_block=8)
    normalized = np.abs(np.asarray(ds(qkv, num=num.replace(delta="normalized"))).sum(-1))
    saved = np.abs(np.asarray(ds(qkv, num=num)).sum(-1))
    assert normalized.max() < 1e-5 < 1e-2 < saved.max()


def test_every_preset_is_covered() -> None:
    assert set(PRESETS) - set(NEAREST) == {"stochastic_output"}
    assert dataclasses.replace(PRESETS["stochastic_output"], output=None).needs_bits is False


def of_few_keys(num: Numerics, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Row sums of dS, and δ, [T] each, for rows that see `keys` keys, all with the same P."""
    rng = np.random.default_rng(0)
    v, do = (jnp.asarray(rng.normal(size=(1, 512, 1, 64)), jnp.bfloat16) for _ in range(2))
    together = np.arange(512) // keys
    seen = jnp.asarray(together[:, None] == together)[None, None]

    def attend(bias: jax.Array) -> jax.Array:
        return attention.dot_product_attention(
            0 * v, v, v, bias=bias, mask=seen, numerics=num, implementation="dense"
        )

    out, pullback = jax.vjp(attend, jnp.zeros((1, 1, 512, 512)))
    of_keys = np.asarray(v, np.float64)[0, :, 0].reshape(-1, keys, 64)
    o = np.repeat(of_keys.mean(axis=1), keys, axis=0)
    np.testing.assert_allclose(out[0, :, 0].astype(jnp.float32), o, rtol=LOW_EPS, atol=EPS)
    (dbias,) = pullback(do)
    delta = np.sum(np.asarray(do, np.float64)[0, :, 0] * o, axis=-1)
    return np.asarray(dbias, np.float64)[0, 0].sum(axis=-1), delta


def test_in_rows_of_one_key_the_rounding_of_dp_is_left_and_that_of_o_is_not() -> None:
    """O is a row of v there, which is already bfloat16; dP is not (see the isolation results)."""
    ds, delta = of_few_keys(numerics.FLASH, 1)
    np.testing.assert_allclose(ds, 0, atol=64 * EPS * np.abs(delta).max())
    ds, delta = of_few_keys(numerics.FLASH.replace(dp="bfloat16"), 1)
    rounded = delta.astype(jnp.bfloat16).astype(np.float64) - delta
    np.testing.assert_allclose(ds, rounded, atol=64 * EPS * np.abs(delta).max())
    assert f"{np.sqrt(np.mean(ds**2) / np.mean(delta**2)):.1e}" == "1.6e-03"


def test_with_two_keys_the_roundings_of_dp_and_of_o_leave_as_much() -> None:
    of_o, _ = of_few_keys(numerics.FLASH, 2)
    of_dp, _ = of_few_keys(numerics.FLOAT32_OUTPUT.replace(dp="bfloat16"), 2)
    neither, _ = of_few_keys(numerics.FLOAT32_OUTPUT, 2)
    o, dp, none = (np.sqrt(np.mean(x**2)) for x in (of_o, of_dp, neither))
    assert 0.8 < o / dp < 1.25 and dp > 100 * none
