"""Diagnostics against numbers worked out by hand, the float64 oracle and the implementations."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import diagnostics, numerics
from lowprec_attn.arithmetic.request import Extras, RandomStream, Spec
from lowprec_attn.attention import dense, reference, tiled
from lowprec_attn.diagnostics import comparison, rows, weights
from lowprec_attn.numerics import MASKED, StandardMax, get_rounding, round_to

M = MASKED
BFLOAT16 = get_rounding("bfloat16")


def make_arrays(seed=0, *, length=40, keys=40, heads=4, kv_heads=2, head_size=16, batch=2):
    """q, k, v, dO in bfloat16, with a repeated key so that rows tie."""
    r = np.random.default_rng(seed)
    q = r.standard_normal((batch, length, heads, head_size)) * 2
    k = r.standard_normal((batch, keys, kv_heads, head_size))
    k[:, 1] = k[:, 0]
    v = r.standard_normal((batch, keys, kv_heads, head_size))
    do = r.standard_normal(q.shape)
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do))


# Jitted, so that it compiles once per arithmetic instead of once per operation.
compare = jax.jit(comparison.compare, static_argnames="spec")


@functools.partial(
    jax.jit, static_argnames=("numerics", "row_max", "scale", "is_causal", "common_direction")
)
def attention_signals(q, k, v, do=None, **options):
    return diagnostics.attention_signals(q, k, v, do, **options)


def make_spec(num, *, is_causal=True, row_max=StandardMax(), head_size=16):  # noqa: B008
    return Spec(numerics=num, row_max=row_max, scale=head_size**-0.5, is_causal=is_causal)


# The rows: a tie, a near tie, one visible key, no visible key, one key with all weight.
SCORES = jnp.array(
    [[2, 2, 1, M], [2, 1.9995, -3, M], [0, M, M, M], [M, M, M, M], [9, 0, 0, 0]], jnp.float32
)


def test_score_maximum_is_the_largest_size_among_seen_keys():
    np.testing.assert_array_equal(rows.score_maximum(SCORES), [2, 3, 0, 0, 9])


def test_repeated_maxima_ignore_masked_entries():
    expected = np.array([1, 0, 0, 0, 0], bool)
    np.testing.assert_array_equal(rows.repeated_maxima(SCORES), expected)


def test_rounded_to_one_contains_the_exact_ties():
    expected = np.array([1, 1, 0, 0, 0], bool)
    np.testing.assert_array_equal(rows.rounded_to_one(SCORES, BFLOAT16), expected)


@pytest.mark.parametrize(("gap", "expected"), [(0.0019, True), (0.0020, False)])
def test_p_bar_rounds_to_one_below_a_gap_of_two_to_the_minus_nine(gap, expected):
    # exp(−g) ≥ 1 − 2⁻⁹ exactly where g ≤ 0.001955.
    s = jnp.array([[5.0, 5.0 - gap]], jnp.float32)
    assert rows.rounded_to_one(s, BFLOAT16)[0] == expected


def test_level_and_spread_are_those_of_the_keys_seen():
    s = jnp.array([[1.0, 3.0, M], [-2.0, -2.0, -2.0], [M, M, M]], jnp.float32)
    np.testing.assert_array_equal(rows.level(s), [2, -2, 0])
    np.testing.assert_array_equal(rows.spread(s), [1, 0, 0])


def test_what_moves_all_scores_of_a_row_moves_their_level_and_not_their_spread():
    """q moves along the mean key, as errors of δ move it."""
    q, k, v, _ = (x.astype(jnp.float32) for x in make_arrays(kv_heads=4))

    def level_and_spread(q):
        found = attention_signals(q, k, v, numerics=numerics.EXACT, scale=1.0)
        return np.asarray(found["score_level_rms"]), np.asarray(found["score_spread_mean"])

    k = k - jnp.mean(k, axis=-1, keepdims=True) + 1  # (1, …, 1) · k is 16 for every key
    q = q - jnp.mean(q, axis=-1, keepdims=True)
    (level, spread), (moved_level, moved_spread) = level_and_spread(q), level_and_spread(q + 1)
    np.testing.assert_allclose(moved_level, np.hypot(level, 16), rtol=0.05)
    np.testing.assert_allclose(moved_spread, spread, rtol=1e-4)
    assert np.all(spread > 4)


def test_dominated_rows():
    # Row 4 has max P = 1 / (1 + 3 e⁻⁹) = 0.99963, above 1 − 2⁻⁹ = 0.99805.
    np.testing.assert_array_equal(
        rows.dominated_rows(SCORES), np.array([False, False, True, False, True])
    )
    assert not rows.dominated_rows(SCORES, threshold=0.9997)[4]
    np.testing.assert_array_equal(
        rows.sees_several(SCORES), np.array([True, True, False, False, True])
    )


def test_signed_error_of_scalars_by_hand():
    x = jnp.array([3.0, -1.0, 1.0, 1.0]).reshape(1, 4, 1, 1)
    error = diagnostics.signed_error(x + 7, jnp.full_like(x, 7))
    assert {name: float(value[0]) for name, value in error.items()} == pytest.approx(
        {"mean": 1.0, "rms": math.sqrt(3), "max": 3.0, "coherence": 4 / math.sqrt(12)}
    )


def test_coherence_of_equal_orthogonal_and_absent_errors():
    # The heads: the same vector in all 4 rows; pairwise orthogonal unit vectors; no error.
    same = jnp.tile(jnp.array([1.0, -2.0, 0.5, 0.0]), (4, 1))
    x = jnp.stack([same, jnp.eye(4), jnp.zeros((4, 4))], axis=1)[None]
    coherence = diagnostics.signed_error(x, jnp.zeros_like(x))["coherence"]
    np.testing.assert_allclose(coherence, [2.0, 1.0, 0.0], rtol=1e-6)


def test_the_worked_rounding_number_of_the_paper():
    """−2.40625 + (−2.296875) plus a residue is −4.703990459; bfloat16 makes it −4.71875."""
    exact, rounded = -4.703990459, -4.71875
    assert round_to(jnp.float32(exact), "bfloat16") == rounded

    # One row has the scores 0, 0, −4: two P̄ are exactly 1 and the third adds the residue.
    residue = exact - (-2.40625 - 2.296875)
    q = jnp.ones((1, 1, 1, 1), jnp.float32)
    k = jnp.array([0.0, 0.0, -4.0]).reshape(1, 3, 1, 1)
    v = jnp.array([-2.40625, -2.296875, residue / math.exp(-4)]).reshape(1, 3, 1, 1)
    signals = attention_signals(q, k, v, jnp.ones_like(q), numerics=numerics.PUBLISHED, scale=1.0)
    assert signals["repeated_maxima"][0] == signals["rounded_to_one"][0] == 1
    assert float(signals["unnormalized_error_mean"][0]) == pytest.approx(-0.01475954, abs=1e-6)
    # l = 2 + e⁻⁴ rounds to 2.015625, and −4.71875 / 2.015625 = −2.3411 rounds to −2.34375.
    delta_error = -2.34375 - exact / (2 + math.exp(-4))
    assert float(signals["delta_error_mean"][0]) == pytest.approx(delta_error, abs=1e-6)


# (arithmetic, is_causal, keys) for 40 rows. Some blocks need padding; one has more rows than keys.
CASES = {
    "published": (numerics.PUBLISHED.replace(kv_block=24), True, 30),
    "flash": (numerics.FLASH.replace(kv_block=24), False, 56),
    "standard": (numerics.STANDARD, True, 40),
    "stochastic_output": (numerics.STOCHASTIC_OUTPUT.replace(kv_block=16), True, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_the_output_compared_is_that_of_the_implementation(case, monkeypatch):
    monkeypatch.setattr(comparison, "SCORES_PER_CHUNK_ON_CPU", 2**12)  # 9 to 17 of 40 rows
    num, is_causal, keys = CASES[case]
    q, k, v, _ = make_arrays(keys=keys)
    spec = make_spec(num, is_causal=is_causal)
    batch, head = (jnp.arange(n, dtype=jnp.int32) for n in (q.shape[0], q.shape[2]))
    extras = Extras(stream=RandomStream(jnp.array([3, 4], jnp.uint32), batch, head))
    implementation = dense if num.normalize_probs else tiled
    out, _ = jax.jit(implementation.attention, static_argnames="spec")(q, k, v, extras, spec)
    result = compare(q, k, v, None, extras, spec)
    # Float32 sums in another order may push a few values across a rounding boundary.
    same = result.outputs.output == out.astype(jnp.float32)
    assert float(jnp.mean(same.astype(jnp.float32))) > 0.995


@pytest.mark.parametrize(
    ("rule", "keys"),
    [(StandardMax(), 30), (numerics.PublishedMax(), 40), (StandardMax(), 56)],
)
def test_rows_compared_in_sections_have_what_they_have_in_one(rule, keys, monkeypatch):
    q, k, v, do = make_arrays(keys=keys)
    spec = make_spec(numerics.EXACT.replace(kv_block=8, output="float32"), row_max=rule)

    def compared():
        # A new function, because jit would reuse the program with the old size of a chunk.
        return jax.jit(lambda *arrays: comparison.compare(*arrays, Extras(), spec))(q, k, v, do)

    whole = compared()
    monkeypatch.setattr(comparison, "SCORES_PER_CHUNK_ON_CPU", 2**11)  # 8 to 10 rows
    parts = compared()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(a))) + 1e-5)


@pytest.mark.parametrize("window", [None, (6, 0)])
def test_the_exact_side_is_the_oracle(window):
    q, k, v, do = make_arrays()
    spec = dataclasses.replace(make_spec(numerics.FLASH.replace(kv_block=16)), window=window)
    result = compare(q, k, v, do, Extras(), spec)
    masking = reference.Masking(is_causal=True, window=window)
    o = reference.attention(q, k, v, masking=masking).o
    delta = reference.backward(q, k, v, do, masking=masking).delta
    np.testing.assert_allclose(result.outputs.output_exact, o, atol=2e-6)
    np.testing.assert_allclose(result.gradients.delta_exact[..., 0], delta, atol=2e-5)


@pytest.mark.parametrize("name", ["published", "delta_dp_p"])
def test_delta_is_that_of_the_backward_pass(name):
    """dQ = Σ dS k is linear in δ, so it tells which δ the implementation used."""
    q, k, v, do = (x.astype(jnp.float32) for x in make_arrays())
    num = numerics.PRESETS[name].replace(grads="float32", kv_block=16)
    spec = make_spec(num)
    result = compare(q, k, v, do, Extras(), spec)

    @jax.jit
    def dq(q):
        return jax.vjp(lambda q: tiled.attention(q, k, v, Extras(), spec)[0], q)[1](do)[0]

    np.testing.assert_allclose(0.25 * result.gradients.dq.run, dq(q), atol=2e-3, rtol=1e-2)


def test_unrounded_arithmetic_has_no_errors():
    q, k, v, do = (x.astype(jnp.float32) for x in make_arrays())
    signals = attention_signals(
        q, k, v, do, numerics=numerics.EXACT.replace(kv_block=16), is_causal=True
    )
    for name in ("unnormalized_error", "output_error", "delta_error", "ds_row_sum"):
        assert float(jnp.max(signals[f"{name}_max"])) < 1e-4, name
    for name in ("rounded_ds_row_sum", "p_row_sum_error"):
        assert float(jnp.max(signals[f"{name}_max"])) < 1e-4, name
    assert float(jnp.max(signals["vanished_rows"])) == 0
    assert float(jnp.min(signals["delta_rms"])) > 0.1


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_rows_of_what_is_matched_sum_to_one_and_zero_over_several_steps(size):
    """The emulation keeps `whole_max`, or P̄ would round against another maximum in every step."""
    q, k, v, do = (x.astype(jnp.bfloat16) for x in make_arrays())
    num = numerics.MATCHED_FLOAT32_OUTPUT.replace(kv_block=16)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 40, 24)), jnp.bfloat16)
    signals = attention_signals(size * q, k, v, do, x=x, numerics=num, is_causal=True)
    assert float(jnp.max(signals["p_row_sum_error_max"])) < 1e-6
    # m and M have different units. What remains is due to l, which adds the rounded P̄.
    assert float(jnp.max(signals["query_weight_gradient_error_from_lse"])) < 5e-3
    assert float(jnp.max(signals["ds_row_sum_rms"])) < 2e-6
    error = signals["delta_error_rms"] / signals["delta_rms"]
    assert float(jnp.max(error)) < 1e-6  # P̄ is rounded, and the exact δ follows it
    of_flash = attention_signals(
        size * q, k, v, do, numerics=numerics.FLASH.replace(kv_block=16), is_causal=True
    )
    assert float(jnp.min(of_flash["ds_row_sum_rms"])) > 1e-4


def test_an_error_of_dp_that_delta_shares_is_none_of_delta():
    q, k, v, do = make_arrays()

    def error_of_delta(name):
        num = numerics.PUBLISHED.replace(delta=name, kv_block=16)
        signals = attention_signals(q, k, v, do, numerics=num, is_causal=True)
        return signals["delta_error_rms"] / signals["delta_rms"]

    assert float(jnp.min(error_of_delta("do_o"))) > 1e-3
    assert float(jnp.max(error_of_delta("normalized"))) < 1e-5
    # Σ P is 1 ± 2⁻⁸, because l is rounded, and `dp_p` does not divide by Σ P.
    assert float(jnp.min(error_of_delta("dp_p"))) > 1e-4


def test_rows_of_ds_sum_to_minus_the_error_of_delta():
    q, k, v, do = make_arrays()
    result = compare(q, k, v, do, Extras(), make_spec(numerics.FLASH)).gradients
    error = result.delta - result.delta_exact
    assert float(jnp.max(jnp.abs(error))) > 1e-3
    np.testing.assert_allclose(result.ds_row_sum, -error, atol=2e-5)


@pytest.mark.parametrize("rule", [numerics.StandardMax(), numerics.DynamicMax()])
def test_rounded_scores_are_an_error_of_the_output_and_not_of_delta(rule):
    """The exact Ō and δ use the run's own S (and m); the exact O has no rounding at all."""
    q, k, v, do = (x.astype(jnp.float32) for x in make_arrays())
    num = numerics.EXACT.replace(scores="bfloat16")  # makes ties; nothing else is rounded
    result = compare(q, k, v, do, Extras(), make_spec(num, row_max=rule))
    outputs, gradients = result.outputs, result.gradients
    ties = result.scores.repeated_maxima & result.scores.sees_several
    assert float(jnp.mean(ties.astype(jnp.float32))) > 0.02
    np.testing.assert_allclose(outputs.unnormalized, outputs.unnormalized_exact, atol=1e-4)
    np.testing.assert_allclose(gradients.delta, gradients.delta_exact, atol=1e-4)
    assert float(jnp.max(jnp.abs(outputs.output - outputs.output_exact))) > 1e-3


def test_query_weight_gradient_error_is_what_changing_delta_changes():
    """Checks the paper's identity with two backward passes that differ in δ alone."""
    q, k, v, do = (x.astype(jnp.float32) for x in make_arrays(kv_heads=4))
    r = np.random.default_rng(5)
    x = jnp.asarray(r.standard_normal((2, 40, 24)), jnp.float32)
    w_q = jnp.asarray(r.standard_normal((24, 4, 16)), jnp.float32)
    q = jnp.einsum("btd,dnh->btnh", x, w_q) / 5

    low = numerics.EXACT.replace(output="bf16_m3", saved_output="same", grads="float32")
    high = low.replace(saved_output="float32")

    def query_weight_gradient(num):
        @jax.jit
        def dq(q):
            return jax.vjp(lambda q: dense.attention(q, k, v, Extras(), make_spec(num))[0], q)[1](
                do
            )

        return weights.query_weight_gradient(dq(q)[0], x)

    low_gradient = query_weight_gradient(low)
    expected = query_weight_gradient(high) - low_gradient
    rows_low = compare(q, k, v, do, Extras(), make_spec(low)).gradients
    error = (rows_low.delta - rows_low.delta_exact)[..., 0]
    dq_error = 0.25 * error[..., None] * rows_low.pk
    computed = weights.query_weight_gradient(dq_error, x)
    size = float(jnp.max(jnp.abs(expected)))
    assert size > 0.1
    np.testing.assert_allclose(computed, expected, atol=1e-4 * size)

    signals = attention_signals(q, k, v, do, numerics=low, is_causal=True, x=x, w_q=w_q, w_k=w_q)
    norm = np.linalg.norm(np.asarray(expected).transpose(1, 0, 2).reshape(4, -1), axis=1)
    np.testing.assert_allclose(signals["query_weight_gradient_error"], norm, rtol=1e-3)
    values = np.linalg.svd(np.asarray(expected).transpose(1, 0, 2), compute_uv=False)
    share = values[:, 0] ** 2 / np.sum(values**2, axis=1)
    assert np.all(share < 0.9)
    name = "query_weight_gradient_error_first_share"
    np.testing.assert_allclose(signals[name], share, rtol=1e-3)
    both = jnp.sqrt(
        jnp.sum(dq_error**2, (0, 1, 3)) / jnp.sum((0.25 * rows_low.dq.run) ** 2, (0, 1, 3))
    )
    np.testing.assert_allclose(signals["query_gradient_error_relative"], both, rtol=1e-3)
    total = np.asarray(low_gradient).transpose(1, 0, 2).reshape(4, -1)
    np.testing.assert_allclose(
        signals["query_weight_gradient_error_relative"],
        norm / np.linalg.norm(total, axis=1),
        rtol=1e-2,
    )


def test_a_matrix_of_rank_one_has_all_in_its_first_singular_value():
    w = jnp.stack([jnp.outer(jnp.arange(1.0, 4), jnp.ones(2)), jnp.zeros((3, 2))], axis=1)
    np.testing.assert_allclose(weights.first_share(w), [1, 0], atol=1e-6)


def test_outer_product_similarity_by_hand():
    # Over 2 tokens the heads have pk alike (cosine 1), orthogonal (0), opposite (−1). x is alike.
    pk = jnp.array([[[1.0, 0], [1, 0], [2, 1]], [[3.0, 0], [0, 2], [-4, -2]]])[None]
    x = jnp.array([[[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]]])
    similarity, _ = weights.outer_product_signals(pk, x)
    np.testing.assert_allclose(similarity, [1, 0, -1], atol=1e-6)


def test_outer_product_similarity_is_the_mean_over_pairs():
    r = np.random.default_rng(0)
    pk, x = r.standard_normal((2, 9, 3, 4)) + 0.5, r.standard_normal((2, 9, 5)) + 0.5
    pk[0, 0, 1] = 0  # a token without a direction is not counted
    similarity, _ = weights.outer_product_signals(
        jnp.asarray(pk, jnp.float32), jnp.asarray(x, jnp.float32)
    )
    for head in range(3):
        outer = np.einsum("bth,btd->bthd", pk[:, :, head], x).reshape(18, -1)
        norms = np.linalg.norm(outer, axis=1)
        unit = outer[norms > 0] / norms[norms > 0, None]
        cosines = unit @ unit.T
        pairs = cosines[~np.eye(len(unit), dtype=bool)]
        assert float(similarity[head]) == pytest.approx(pairs.mean(), abs=1e-5)


def test_similarity_across_steps_is_the_mean_over_pairs_of_tokens():
    """Checks `attention_signals` against the matrices of all tokens in NumPy."""
    units, directions = [], []
    for seed in (0, 1):
        q, k, v, do = (x.astype(jnp.float32) for x in make_arrays(seed, length=9, keys=9))
        x = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 9, 5)) + 0.5, jnp.float32)
        options = {"numerics": numerics.FLASH, "is_causal": True, "x": x}
        asked = attention_signals(q, k, v, do, common_direction=True, **options)
        directions.append(asked.pop("common_direction"))
        assert directions[-1].shape == (4, 5, 16)
        signals = functools.partial(diagnostics.attention_signals, **options)
        assert asked.keys() == jax.eval_shape(signals, q, k, v, do).keys()
        # This is P k of the exact softmax, because no point of `flash` rounds what enters it.
        scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) / 4
        scores = np.where(np.tri(9, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        pk = np.einsum("bnts,bsnh->btnh", p, np.repeat(k, 2, axis=2))
        outer = np.einsum("btnh,btd->nbtdh", pk, x).reshape(4, 18, -1)
        units.append(outer / np.linalg.norm(outer, axis=2, keepdims=True))
    found = diagnostics.across_steps(*directions)
    means = [unit.mean(axis=1) for unit in units]
    norms = np.prod([np.linalg.norm(mean, axis=1) for mean in means], axis=0)
    for head in range(4):
        expected = (units[0][head] @ units[1][head].T).mean()
        similarity = float(found["outer_product_similarity_across_steps"][head])
        assert similarity == pytest.approx(expected, abs=1e-5)
        cosine = float(found["common_direction_across_steps"][head])
        assert cosine == pytest.approx(expected / norms[head], abs=1e-4)
    same = diagnostics.across_steps(directions[0], directions[0])
    np.testing.assert_allclose(same["common_direction_across_steps"], 1, rtol=1e-6)
    none = diagnostics.across_steps(directions[0], jnp.zeros_like(directions[0]))
    assert all(not np.any(value) for value in none.values())


def test_spectral_norm_is_the_largest_singular_value():
    w = np.random.default_rng(0).standard_normal((24, 3, 8)).astype(np.float32)
    expected = [np.linalg.norm(w[:, n], ord=2) for n in range(3)]
    np.testing.assert_allclose(diagnostics.spectral_norm(jnp.asarray(w)), expected, rtol=1e-5)


@jax.numpy_dtype_promotion("strict")
@jax.numpy_rank_promotion("raise")
def test_signals_per_head_are_those_of_calls_with_one_arithmetic():
    q, k, v, _ = make_arrays()
    dynamic = numerics.DynamicMax()
    signals = functools.partial(attention_signals, q, k, v, is_causal=True)
    num = (*[numerics.PUBLISHED] * 2, *[numerics.FLASH] * 2)
    mixed = signals(numerics=num, row_max=(StandardMax(), StandardMax(), dynamic, dynamic))
    published = signals(numerics=numerics.PUBLISHED)
    flash = signals(numerics=numerics.FLASH, row_max=dynamic)
    assert mixed.keys() == published.keys()
    for name, value in mixed.items():
        expected = np.concatenate([published[name][:2], flash[name][2:]])
        np.testing.assert_allclose(value, expected, rtol=2e-2, atol=1e-5, err_msg=name)


def test_shares_count_rows_that_see_two_keys_and_batches_are_reduced():
    # With 3 causal rows, row 0 sees one key and does not count. Sequence 0 has equal keys, so its
    # rows 1 and 2 tie. In sequence 1 row 1 ties, and row 2 has one key far ahead.
    q = jnp.ones((2, 3, 1, 2), jnp.bfloat16)
    k = q.at[1].set(0).at[1, 2].set(40)
    signals = attention_signals(q, k, k, numerics=numerics.FLASH, is_causal=True)
    assert {name: value.shape for name, value in signals.items()} == dict.fromkeys(signals, (1,))
    assert float(signals["repeated_maxima"][0]) == 0.75
    assert float(signals["rounded_to_one"][0]) == 0.75
    assert float(signals["dominated_rows"][0]) == 0.25
    assert float(signals["score_maximum"][0]) == pytest.approx(80 / math.sqrt(2))


def test_layers_of_a_shape_share_a_program_outside_of_a_jit(caplog):
    arrays = [jax.random.normal(jax.random.key(i), (1, 24, 2, 8)) for i in range(5)]
    call = functools.partial(diagnostics.attention_signals, numerics=numerics.FLASH)
    call(*arrays[:4])
    with jax.log_compiles():
        call(*arrays[1:])
        assert "Compiling" not in caplog.text
        call(*arrays[1:], is_causal=True)
    assert "Compiling jit(_part_signals)" in caplog.text  # a compilation would have been seen


def test_memory_does_not_hold_all_scores():
    q, k, v, do = (jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.bfloat16) for _ in range(4))
    signals = functools.partial(
        diagnostics.attention_signals, numerics=numerics.PUBLISHED, is_causal=True
    )
    compiled = jax.jit(signals).lower(q, k, v, do).compile()
    all_scores = 2 * 8192 * 8192 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_scores / 8


def test_wrong_arguments_are_named():
    q, k, v, do = make_arrays()
    signals = functools.partial(diagnostics.attention_signals, q, k, v, numerics=numerics.FLASH)
    with pytest.raises(ValueError, match=r"do must have shape \[2, 40, 4, 16\]"):
        signals(do[:, 1:])
    with pytest.raises(ValueError, match="needs do: the gradient of W_Q takes both"):
        signals(x=jnp.ones((2, 40, 8)))
    with pytest.raises(ValueError, match="common_direction needs x"):
        signals(do, common_direction=True)
    with pytest.raises(ValueError, match=r"w_k must have shape \[any, 2, 16\]"):
        signals(w_k=jnp.ones((8, 4, 16)))
    with pytest.raises(ValueError, match="random bits"):
        attention_signals(q, k, v, numerics=numerics.STOCHASTIC_OUTPUT)
    with pytest.raises(ValueError, match="one step over all 40 keys, got kv_block=8"):
        attention_signals(q, k, v, numerics=numerics.STANDARD.replace(kv_block=8))
    with pytest.raises(ValueError, match=r"leaves the rows from 13 on without a key: .* 40 rows"):
        diagnostics.attention_signals(
            q, k[:, :10], v[:, :10], numerics=numerics.FLASH, local_window_size=3
        )
    with pytest.raises(ValueError, match="take no mask, bias or lengths"):
        extras = Extras(key_lengths=jnp.array([3, 3], jnp.int32))
        comparison.compare(q, k, v, None, extras, make_spec(numerics.FLASH))


def test_published_rule_that_underflows_shows_as_nan():
    """With r_m = 100 and no clamp, m is β·r_m, so every exp is 0 and the row is 0 / 0."""
    q = jnp.full((1, 2, 1, 1), 10.0)
    rule = numerics.PublishedMax(clamp=None)
    signals = attention_signals(q, q, q, numerics=numerics.FLASH, row_max=rule, scale=1.0)
    assert math.isnan(signals["output_error_rms"][0])
    safe = dataclasses.replace(rule, clamp=1e-10)
    vanished = attention_signals(q, q, q, numerics=numerics.FLASH, row_max=safe, scale=1.0)
    assert float(vanished["output_error_mean"][0]) == -10.0


def test_published_rule_that_underflows_shows_as_vanished_rows():
    """The dS of a vanished row is 0 too, so its row sum of dS does not show the fault."""
    q, v = jnp.full((1, 2, 1, 1), 10.0), jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    chosen = {"numerics": numerics.FLASH, "scale": 1.0}
    safe = attention_signals(q, q, v, v, **chosen)
    gone = attention_signals(q, q, v, v, **chosen, row_max=numerics.PublishedMax())
    assert (float(safe["vanished_rows"][0]), float(gone["vanished_rows"][0])) == (0, 1)
    assert float(gone["p_row_sum_error_mean"][0]) == pytest.approx(-1)
    assert float(safe["p_row_sum_error_max"][0]) < 1e-5
    assert max(float(x["ds_row_sum_max"][0]) for x in (safe, gone)) < 1e-5


@pytest.mark.parametrize("rows_of_nan", [slice(100, 101), slice(None)])
def test_the_largest_score_of_a_head_with_a_nan_is_nan(rows_of_nan):
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 128, 2, 16)), jnp.float32)
    bad = q.at[0, rows_of_nan, 1, 3].set(jnp.nan)
    chosen = {"numerics": numerics.FLASH, "is_causal": True, "logits_soft_cap": 5.0}
    found, expected = (diagnostics.attention_signals(x, q, q, **chosen) for x in (bad, q))
    for name in ("score_maximum", "score_maximum_before_cap"):
        assert found[name][0] == expected[name][0]
        assert math.isnan(found[name][1])
