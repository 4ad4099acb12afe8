"""What each row-max rule does in each edge case of its docstring."""

import dataclasses
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from compiling import optimized

from lowprec_attn import attention, numerics
from lowprec_attn.numerics import MASKED, DynamicMax, LazyMax, PublishedMax, RowMax, StandardMax
from lowprec_attn.numerics.row_max import is_repeated

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

RULES: dict[str, RowMax] = {
    "standard": StandardMax(),
    "published": PublishedMax(),
    "dynamic_max": DynamicMax(),
    "lazy_max": LazyMax(),
}
TILES: dict[str, Any] = {"gpu": harness.GPU_TILES, "tpu": harness.TPU_TILES}
NEVER = MASKED  # the running maximum before the first step


def row_max(rule: RowMax, scores: list[float], m_prev: float = NEVER) -> float:
    s = jnp.array([scores], jnp.float32)
    return float(rule(s, jnp.array([[m_prev]], jnp.float32))[0, 0])


@pytest.mark.parametrize(
    ("scores", "standard", "published", "dynamic"),
    [
        ([1.0, 3.0, 2.0], 3.0, 3.0, 3.0),  # one maximum: nothing shifts
        ([1.0, 3.0, 3.0], 3.0, 6.0, 6.0),  # repeated, positive: β r_m
        ([-5.0, -3.0, -3.0], -3.0, 0.0, 0.0),  # repeated, negative: 0
        ([0.0, 0.0, -1.0], 0.0, 0.0, 1.0),  # repeated zero: unhandled; shifted like r_m = 1
        ([3.0, 2.9995, 1.0], 3.0, 6.0, 3.0),  # within 1e-3, not exactly equal
        ([50.0, 50.0], 50.0, 100.0, 70.0),  # the bound on the shift
        ([-50.0, -50.0], -50.0, 0.0, -30.0),
        ([MASKED, MASKED], MASKED, 0.0, MASKED),  # fully masked
        ([MASKED, 2.0], 2.0, 2.0, 2.0),
        ([-np.inf, -np.inf], MASKED, 0.0, MASKED),  # −inf counts as masked
        ([np.inf, 1.0], np.inf, np.inf, np.inf),
        ([np.inf, np.inf], np.inf, np.inf, np.inf),
    ],
)
def test_edge_cases(scores: list[float], standard: float, published: float, dynamic: float) -> None:
    assert row_max(StandardMax(), scores) == standard
    assert row_max(PublishedMax(), scores) == published
    assert row_max(DynamicMax(), scores) == dynamic
    assert row_max(LazyMax(), scores) == standard  # in a first step


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_running_maximum_never_falls(rule: RowMax) -> None:
    assert row_max(rule, [1.0, 1.0], m_prev=10.0) == 10.0
    assert row_max(rule, [MASKED, MASKED], m_prev=10.0) == 10.0
    assert row_max(rule, [1.0, 2.0], m_prev=-10.0) == 2.0


@pytest.mark.parametrize(
    ("scores", "m_prev", "expected"),
    [
        ([1.0, 5.0], 0.0, 0.0),  # 8 in base 2 is 5.545
        ([1.0, 5.5], 0.0, 0.0),
        ([1.0, 5.6], 0.0, 5.6),
        ([-1.0, 2.6], -3.0, 2.6),
        ([MASKED, MASKED], -3.0, -3.0),
        ([-np.inf, -np.inf], -np.inf, -np.inf),  # the start value of `tiled`
        ([-np.inf, -40.0], -np.inf, -40.0),
        ([np.inf, 1.0], 3.0, np.inf),
        ([np.inf, 1.0], np.inf, np.inf),
    ],
)
def test_a_lazy_maximum_is_raised_when_it_grows(
    scores: list[float], m_prev: float, expected: float
) -> None:
    assert row_max(LazyMax(), scores, m_prev) == np.float32(expected)
    if np.isfinite(m_prev) and np.isfinite(expected):
        s, m = jnp.array([scores], jnp.float32) / 0.125, jnp.array([[m_prev]], jnp.float32) / 0.125
        r_m = s.max(-1, keepdims=True)
        units = {"unit": 0.125, "is_repeated": is_repeated}
        found = LazyMax().running_max(r_m, s - r_m, m, **units)
        assert found == np.float32(expected) / 0.125


def test_a_threshold_of_0_is_the_standard_maximum() -> None:
    for scores, m_prev in (
        ([1.0, 2.0], 0.0),
        ([1.0, 2.0], 2.0),
        ([1.0, 2.0], 1.999),
        ([-1.0], 3.0),
    ):
        assert row_max(LazyMax(threshold=0.0), scores, m_prev) == max(*scores, m_prev)


@pytest.mark.parametrize(
    ("fmt", "largest"), [("float16", 15.9), ("float8_e4m3fn", 8.8), ("float8_e5m2", 15.8)]
)
def test_a_lazy_maximum_is_refused_where_probs_would_overflow(fmt: str, largest: float) -> None:
    """P̄ of the second key is 2 to the power of its base-2 score."""
    chosen = numerics.EXACT.replace(probs=fmt, kv_block=1)
    of = {"numerics": chosen, "implementation": "tiled"}
    scores = [0.0, largest * np.log(2) - 0.01]
    with pytest.raises(ValueError, match=f"threshold=16.0 of LazyMax.*probs={fmt}.*{largest} or"):
        attend(10.0, scores, LazyMax(threshold=16.0), **of)
    out = attend(10.0, scores, LazyMax(threshold=largest), **of)
    np.testing.assert_allclose(out, 2.0, rtol=2.0 ** -numerics.FORMATS[fmt].fraction_bits)


def test_a_whole_maximum_is_not_lazy() -> None:
    with pytest.raises(ValueError, match=r"exponent='whole_max' raises its maximum.*'standard'"):
        attend(10.0, [1.0, 2.0], LazyMax(), numerics=numerics.MATCHED, implementation="tiled")


def test_options_change_the_rules() -> None:
    assert row_max(PublishedMax(beta=7.0), [3.0, 3.0]) == 21.0
    assert row_max(PublishedMax(tolerance=0.0), [3.0, 2.9995]) == 3.0
    assert row_max(DynamicMax(beta=4.0), [3.0, 3.0]) == 12.0
    assert row_max(DynamicMax(beta=4.0), [0.0, 0.0]) == 3.0
    assert row_max(DynamicMax(tolerance=0.1), [3.0, 2.95]) == 6.0
    assert row_max(DynamicMax(max_shift=1.0), [3.0, 3.0]) == 4.0


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_agree_with_the_plain_writing(rule: RowMax) -> None:
    rng = np.random.default_rng(0)
    s = rng.integers(-6, 7, (200, 9)).astype(np.float32) * rng.choice([0.5, 1, 9], (200, 1))
    s[::5] -= 40
    s[::7, 3:] = -np.inf
    s, m_prev = s.astype(np.float32), rng.integers(-6, 7, (200, 1)).astype(np.float32)
    m_prev[::9] = NEVER
    ours = optimized(rule)(jnp.where(s == -np.inf, MASKED, s), jnp.asarray(m_prev))
    np.testing.assert_allclose(ours, plain.shifted_max(rule, s, m_prev), rtol=2 * plain.EPS32)


def attend(q: float, scores: list[float], rule: RowMax, **options: object) -> np.ndarray:
    """Attention of one row over keys with the given scores, one feature, and values 1, 2, 3, …."""
    n = len(scores)
    k = jnp.array(scores, jnp.float32).reshape(1, n, 1, 1) / q
    v = jnp.arange(1, n + 1, dtype=jnp.float32).reshape(1, n, 1, 1)
    out = attention.dot_product_attention(
        jnp.full((1, 1, 1, 1), q),
        k,
        v,
        scale=1.0,
        row_max=rule,
        **options,  # type: ignore[arg-type]
    )
    return np.asarray(out)[0, 0, 0]


EXACT_DENSE = {"numerics": numerics.EXACT, "implementation": "dense"}


def test_published_rule_underflows_to_nan_without_the_clamp() -> None:
    scores = [100.0, 100.0, 50.0]  # (β − 1) r_m = 100 > 87
    assert np.isnan(attend(10.0, scores, PublishedMax(clamp=None), **EXACT_DENSE)).all()


def test_published_rule_lets_the_row_vanish_with_the_clamp() -> None:
    scores = [100.0, 100.0, 50.0]
    assert attend(10.0, scores, PublishedMax(), **EXACT_DENSE) == 0.0


def test_dynamic_max_keeps_the_row() -> None:
    scores = [100.0, 100.0, 50.0]
    np.testing.assert_allclose(attend(10.0, scores, DynamicMax(), **EXACT_DENSE), 1.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fmt", "largest_shift"), [("float16", 9.7), ("float8_e5m2", 9.7), ("float8_e4m3fn", 4.1)]
)
def test_dynamic_max_refuses_a_shift_under_which_narrow_probs_vanish(
    fmt: str, largest_shift: float
) -> None:
    scores = [100.0, 100.0, 50.0]
    chosen = numerics.EXACT.replace(probs=fmt)
    with pytest.raises(ValueError, match=rf"max_shift=20.0.*probs={fmt}.*{largest_shift}"):
        attend(10.0, scores, DynamicMax(), numerics=chosen, implementation="dense")
    safe = DynamicMax(max_shift=largest_shift)
    out = attend(10.0, scores, safe, numerics=chosen, implementation="dense")
    # O = Σ round(P̄) v / Σ P̄ has the relative error of rounding a normal number.
    half_ulp = 2.0 ** -(numerics.FORMATS[fmt].fraction_bits + 1)
    np.testing.assert_allclose(out, 1.5, rtol=half_ulp)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_infinite_scores(rule: RowMax, implementation: str) -> None:
    q = k = v = jnp.ones((1, 2, 1, 4), jnp.float32)

    def out(bias: list[float]) -> np.ndarray:
        return np.asarray(
            attention.dot_product_attention(
                q,
                k,
                v,
                bias=jnp.array(bias, jnp.float32).reshape(1, 1, 1, 2),
                row_max=rule,
                numerics=numerics.EXACT,
                implementation=implementation,
            )
        )

    assert np.isnan(out([np.inf, 0.0])).all()
    np.testing.assert_allclose(out([-np.inf, 0.0]), 1.0, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_a_score_of_nan_reaches_o_and_lse(rule: RowMax, implementation: str) -> None:
    q = k = v = jnp.ones((1, 2, 1, 4), jnp.float32)
    results = attention.dot_product_attention(
        q.at[0, 0].set(jnp.nan),
        k,
        v,
        row_max=rule,
        numerics=numerics.EXACT,
        implementation=implementation,
        return_residual=True,
    )
    for x in results:
        assert np.isnan(x[0, 0]).all() and np.isfinite(x[0, 1]).all()


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [
        *(("tiled", rule) for rule in RULES.values()),
        *((name, rule) for name in TILES for rule in (PublishedMax(), LazyMax())),
    ],
    ids=str,
)
def test_steps_of_minus_infinity_alone_count_as_masked(rule: RowMax, implementation: str) -> None:
    rng = np.random.default_rng(0)
    shape = (1, 256, 1, 32)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(3))
    q = q.at[..., 0].set(1.0)

    def attend(first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """O and lse with S = −inf for keys first, ..., end − 1."""
        out = attention.dot_product_attention(
            q,
            k.at[:, first:end, :, 0].set(-np.inf),
            v,
            row_max=rule,
            numerics=numerics.FLASH.replace(kv_block=128),
            implementation=implementation,
            block_sizes=TILES.get(implementation),
            return_residual=True,
        )
        return np.asarray(out[0], np.float32), np.asarray(out[1])

    for first in (0, 128):
        other = slice(128 - first, 256 - first)
        float32 = (x.astype(jnp.float32) for x in (q, k[:, other], v[:, other]))
        exact = jax.nn.dot_product_attention(*float32)
        # P̄ and O are rounded to bfloat16, and |v| is below 5.
        np.testing.assert_allclose(attend(first, first + 128)[0], exact, atol=5 * 2**-8)
    out, lse = attend(0, 256)
    np.testing.assert_array_equal(out, 0.0)
    # As in a fully masked row, the published rule raises m to 0 and clamps each sum.
    expected = np.log(2e-10) if isinstance(rule, PublishedMax) else -np.inf
    np.testing.assert_allclose(lse, expected, rtol=1e-6)


@pytest.mark.parametrize("case", ["repeated_maxima", "large_negative_scores"])
@pytest.mark.parametrize("rule", ["published", "dynamic_max", "lazy_max"])
def test_softmax_does_not_depend_on_the_rule_in_exact_arithmetic(rule: str, case: str) -> None:
    problem = harness.CASES[case]
    arrays = harness.inputs(problem)
    how = harness.IMPLEMENTATIONS["dense"]
    shifted = harness.run(how, problem, arrays, numerics.EXACT, RULES[rule])
    exact = harness.oracle(problem, arrays)
    for name, x in exact.items():
        # P̄ and lse contain rounding errors of scores as large as the shift, about 2^6: 2^6 ulps of
        # the largest entry, plus a few for the sums.
        bound = 200 * plain.EPS32 * max(harness.largest(x), 1.0)
        assert harness.error(shifted[name], x) < bound, name


@pytest.mark.parametrize(
    ("rule", "together", "apart"),
    [(StandardMax(), 3.0, 3.0), (PublishedMax(), 6.0, 3.0), (DynamicMax(), 6.0, 3.0)],
)
def test_rules_act_on_one_step(rule: RowMax, together: float, apart: float) -> None:
    assert row_max(rule, [3.0, 3.0]) == together
    assert row_max(rule, [3.0], m_prev=row_max(rule, [3.0])) == apart


def test_fully_masked_row_under_each_rule() -> None:
    q = k = v = jnp.ones((1, 3, 1, 4), jnp.float32)
    mask = jnp.ones((1, 1, 3, 3), bool).at[:, :, 1].set(False)
    for rule in RULES.values():
        for implementation in ("dense", "tiled"):
            out, lse = attention.dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                row_max=rule,
                implementation=implementation,
                numerics=numerics.EXACT,
                return_residual=True,
            )
            np.testing.assert_array_equal(out[0, 1], 0.0)
            # The published rule raises m to 0 and clamps l, so the row looks like one with little
            # weight.
            expected = np.log(1e-10) if isinstance(rule, PublishedMax) else -np.inf
            np.testing.assert_allclose(lse[0, 1], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PublishedMax(beta=1.0), "beta must be greater than 1 and finite, got 1.0"),
        (lambda: DynamicMax(beta=0.5), "got 0.5"),
        (lambda: DynamicMax(beta=float("nan")), "got nan"),
        (lambda: DynamicMax(beta=float("inf")), "got inf"),
        (lambda: PublishedMax(tolerance=-1e-3), "tolerance must be 0 or positive.*-0.001"),
        (lambda: DynamicMax(tolerance=float("nan")), "tolerance.*nan"),
        (lambda: PublishedMax(clamp=0.0), "clamp must be a positive number or None, got 0.0"),
        (lambda: DynamicMax(max_shift=81.0), r"max_shift must lie in \(0, 80\], got 81.0"),
        (lambda: DynamicMax(max_shift=0.0), "max_shift.*0.0"),
        (lambda: LazyMax(threshold=65.0), r"threshold must lie in \[0, 64\], got 65.0"),
        (lambda: LazyMax(threshold=float("nan")), "got nan"),
        (
            lambda: numerics.get_row_max("dynamic"),
            r"'dynamic' \(did you mean dynamic_max\?\); rules are standard, published",
        ),
        (lambda: numerics.get_row_max("standard", beta=2.0), "'standard' has no option 'beta'"),
        (lambda: numerics.get_row_max("dynamic_max", clamp=1.0), "'clamp'; it has beta"),
    ],
)
def test_bad_options_say_what_is_wrong(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_rules_are_found_by_name_with_options() -> None:
    assert numerics.get_row_max("standard") == StandardMax()
    assert numerics.get_row_max("published", clamp=None) == PublishedMax(clamp=None)
    assert numerics.get_row_max("dynamic_max", beta=7.0) == DynamicMax(beta=7.0)
    assert numerics.get_row_max("lazy_max", threshold=4.0) == LazyMax(threshold=4.0)
    for rule in RULES.values():
        assert isinstance(rule, RowMax)
        assert hash(rule) == hash(dataclasses.replace(rule))  # type: ignore[type-var]
