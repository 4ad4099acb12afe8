"""`matched`: l, P̄V and dS use the same P̄, so that rows of P sum to 1 and rows of dS to 0.

If every entry has its own bias, the gradient of the bias is dS before its cast. With dO = 0 and
dlse = 1 it is P. Without a bias, dQ along a feature that is 1 in all keys shows the row sums.
"""

import dataclasses
import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiling import optimized

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import powers
from lowprec_attn.arithmetic.fused import multiply_add
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import FLASH, MATCHED, MATCHED_FLOAT32_OUTPUT, Numerics

pytestmark = pytest.mark.usefixtures("strict_promotion")

SCORES = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
# The allowed row sums of dS, relative to Σ |P dP|: the remainder of float32 and of O saved in
# halves.
BOUNDS = {"matched_float32_output": 1e-6, "matched": 1e-5}
LOG2E = float(np.log2(np.e))


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows and keys, with steps and tiles that divide neither, and a mask."""

    rows: int = 70
    keys: int = 70
    heads: int = 2
    kv_heads: int = 2
    is_causal: bool = False
    window: tuple[int, int] | None = None
    padding: int = 0  # keys on the left with a bias of −1e6
    row_max: str = "standard"
    steps: tuple[int, int, int] = (16, 24, 20)  # rows, keys forward, keys backward


CASES = {
    "causal": Case(is_causal=True),
    "grouped": Case(heads=4, is_causal=True),
    "window": Case(is_causal=True, window=(9, 0)),
    "rows without keys": Case(rows=90, keys=40, window=(9, 3)),
    "rows of -1e6": Case(is_causal=True, padding=13),
    "dynamic": Case(is_causal=True, row_max="dynamic_max"),
    "one step": Case(is_causal=True, steps=(70, 70, 70)),
    "small steps": Case(is_causal=True, steps=(8, 8, 64)),
}


def inputs(case: Case, largest: float) -> list[np.ndarray]:
    """q k v do in bfloat16 and a bias; keys lie in a few directions, and their feature 0 is 1."""
    r = np.random.default_rng(0)
    size = 32
    directions = r.standard_normal((6, size))
    q, do = (r.standard_normal((1, case.rows, case.heads, size)) for _ in range(2))
    k, v = (r.standard_normal((1, case.keys, case.kv_heads, size)) for _ in range(2))
    q = 0.3 * q + directions[r.integers(6, size=q.shape[:3])]
    k = 0.3 * k + directions[r.integers(6, size=k.shape[:3])]
    k[..., 0] = 0
    of_head = np.repeat(k, case.heads // case.kv_heads, axis=2)
    factor = largest / np.abs(np.einsum("btnh,bsnh->bnts", q, of_head)).max() * size**0.5
    q *= factor
    k[..., 0], q[..., 0] = 1, 0
    bias = np.zeros((1, case.heads, case.rows, case.keys), np.float32)
    bias[..., : case.padding] = -1e6
    return [*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v, do)), bias]


@functools.partial(jax.jit, static_argnames=("num", "case"))
def gradients(arrays: Any, dlse: Any, *, num: Numerics, case: Case) -> Any:
    """dQ, and dS as the gradient of the bias."""
    q, k, v, do, bias = arrays
    query, forward, backward = case.steps

    def attend(q: jax.Array, bias: jax.Array) -> Any:
        return attention.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            is_causal=case.is_causal,
            local_window_size=case.window,
            numerics=num.replace(kv_block=forward),
            row_max=case.row_max,
            implementation="tiled",
            block_sizes=tiled.BlockSizes(query=query, kv_bwd=backward),
            return_residual=True,
        )

    return jax.vjp(attend, q, bias)[1]((do, dlse))


def rows_of(case: Case, largest: float, num: Numerics) -> dict[str, np.ndarray]:
    """For rows that see a key, [rows]: Σ P − 1, Σ dS, Σ bfloat16(dS), Σ |P dP|, Σ P Σ |dO v|."""
    arrays = inputs(case, largest)
    q, k, v, do, bias = arrays
    dlse = np.zeros(q.shape[:3], np.float32)
    _, ds = gradients(tuple(arrays), dlse, num=num, case=case)
    _, p = gradients((q, k, v, np.zeros_like(do), bias), dlse + 1, num=num, case=case)
    ds, p = (np.asarray(x, np.float64)[0] for x in (ds, p))
    assert np.isfinite(ds).all()
    do, v = (x[0].astype(np.float64) for x in (do, v))
    v = np.repeat(v, case.heads // case.kv_heads, axis=1)
    dp, terms = (np.einsum("tnh,snh->nts", f(do), f(v)) for f in (np.array, np.abs))
    seen = p.sum(-1) != 0
    assert (ds[~seen] == 0).all()
    return {
        "p": p.sum(-1)[seen] - 1,
        "ds": ds.sum(-1)[seen],
        "cast": ds.astype(ml_dtypes.bfloat16).astype(np.float64).sum(-1)[seen],
        "p_dp": np.abs(p * dp).sum(-1)[seen],
        "terms": (p * terms).sum(-1)[seen],
    }


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "matched") for case in CASES),
        ("small steps", "matched_float32_output"),
    ],
)
def test_rows_of_p_sum_to_one_and_of_ds_to_zero(case: str, name: str) -> None:
    """A single row's |Σ P dP| may be small compared to its terms, since dP is itself a sum."""
    for largest in SCORES:
        rows = rows_of(CASES[case], largest, numerics.PRESETS[name])
        assert len(rows["p"]) > 60
        assert np.abs(rows["p"]).max() <= 1e-6, largest
        assert (np.abs(rows["ds"]) <= BOUNDS[name] * rows["terms"]).all(), largest
        assert rms(rows["ds"]) <= BOUNDS[name] * rms(rows["p_dp"]), largest


def test_the_cast_of_ds_leaks_as_before() -> None:
    """Rows sum to zero before the cast, which rounds each entry by 2^-9, as in `flash`."""
    for largest in (1.0, 10.0, 100.0):
        matched, flash = (
            rows_of(CASES["causal"], largest, n) for n in (MATCHED_FLOAT32_OUTPUT, FLASH)
        )
        assert rms(flash["ds"]) > 1e3 * rms(matched["ds"])
        assert 1e3 * rms(matched["ds"]) < rms(matched["cast"]) < rms(flash["cast"])


PARTS: dict[str, dict[str, str]] = {
    "the maximum": {"exponent": "shift_first"},
    "the row sum": {"row_sum": "unrounded"},
    "P̄ in dS": {"recomputed_probs": "unrounded"},
    "O": {"saved_output": "same"},
}


@pytest.mark.parametrize("part", PARTS)
def test_without_one_of_its_parts_they_do_not(part: str) -> None:
    """The passes have different steps here. Each part matters at some size of scores."""
    changed = MATCHED_FLOAT32_OUTPUT.replace(**PARTS[part])
    rows = [rows_of(CASES["small steps"], largest, changed) for largest in (10.0, 100.0)]
    assert max(rms(x["ds"]) / rms(x["p_dp"]) for x in rows) > 1e-5


def test_in_one_step_the_maximum_may_be_any() -> None:
    num = MATCHED_FLOAT32_OUTPUT.replace(exponent="shift_first")
    rows = rows_of(CASES["one step"], 100.0, num)
    assert rms(rows["ds"]) < 1e-6 * rms(rows["p_dp"])


def products_of(largest: float) -> np.ndarray:
    """q·k of rows, float32 [512, 256]; a third of each row lies within 40 of its maximum."""
    r = np.random.default_rng(0)
    x = largest * r.uniform(-1, 1, (512, 256)).astype(np.float32)
    x[:, ::3] = x.max(-1, keepdims=True) - r.uniform(0, 40, x[:, ::3].shape)
    return x.astype(np.float32)


@functools.partial(optimized, static_argnames="factor")
def power(s: jax.Array, m: jax.Array, *, factor: float) -> jax.Array:
    return powers.power(s, factor, m)


def differing(largest: float, factor: float) -> tuple[float, float]:
    """The effect of another M on P̄: the differing share above 2^-32, the relative error below."""
    s = products_of(largest)
    m = np.asarray(powers.whole_max(jnp.asarray(s.max(-1, keepdims=True)), factor))
    final = np.asarray(power(s, m, factor=factor))
    share, error = 0.0, 0.0
    for steps in (1, 2, 5, 20, 31):  # a later step raised M by this much
        earlier = m - np.float32(steps)
        p = np.asarray(power(s, earlier, factor=factor)) * np.exp2(np.float32(-steps))
        visited = (s * np.float64(factor) <= earlier) & (final > 2.0**-100)
        above, below = visited & (final > 2.0**-32), visited & (final <= 2.0**-32)
        share = max(share, (p != final)[above].mean() if above.any() else 0.0)
        error = max(error, np.abs(p[below] / final[below] - 1).max(initial=0.0))
    return share, error


@pytest.mark.parametrize("factor", [LOG2E, 0.125 * LOG2E, 0.0883883 * LOG2E])
@pytest.mark.parametrize("largest", [1.0, 30.0, 1e3, 1e5, 1e7])
def test_another_maximum_gives_the_same_significand(largest: float, factor: float) -> None:
    """To the bit. In bfloat16, a P̄ below 2^-32 moves Σ P by at most 2^-32 · 2^-8."""
    share, error = differing(largest, factor)
    assert share == 0
    assert error < 2.0**-17


def test_exponents_that_are_rounded_against_each_maximum_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(powers, "HIGH", 0.0)
    power.clear_cache()
    assert differing(30.0, LOG2E)[0] > 1e-3
    power.clear_cache()


def test_powers_are_exact() -> None:
    whole = np.arange(-140, 128, dtype=np.float32)
    expected = np.where(whole < -126, 0, np.exp2(whole.astype(np.float64)))
    np.testing.assert_array_equal(powers.power_of_two(jnp.asarray(whole)), expected)
    part = np.arange(2**17, dtype=np.float32) * np.float32(2.0**-17)
    of_part = np.asarray(powers.exp2(jnp.asarray(part)))
    for steps in (1, 7, 31, 126):
        shifted = np.asarray(powers.exp2(jnp.asarray(part - np.float32(steps))))
        if steps <= 64:
            np.testing.assert_array_equal(shifted, of_part * np.exp2(np.float32(-steps)))
    assert np.abs(of_part / np.exp2(part.astype(np.float64)) - 1).max() < 2.0**-22


LEAST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("size", [0.0, 1e9, -1e30, -1.9e38, LEAST, -LEAST])
def test_rows_of_huge_scores_are_those_of_their_ties(size: float) -> None:
    lower = max(size - abs(size) / 2 - 200, LEAST)
    s = jnp.array([[size, size, -jnp.inf, -jnp.inf if lower == size else lower]], jnp.float32)
    m = powers.whole_max(s.max(-1, keepdims=True), LOG2E)
    power = jax.jit(powers.power, static_argnums=1)
    np.testing.assert_array_equal(power(s, LOG2E, m), [[1, 1, 0, 0]])
    for x in (jnp.inf, jnp.nan):
        assert np.isnan(power(jnp.array([[x, 1.0, 0.0, 0.0]]), LOG2E, jnp.full((1, 1), x))[0, 0])


def test_multiply_adds_of_the_distance_are_rounded_once() -> None:
    s, m = jnp.float32(12345.678), jnp.float32(17811.0)
    found = float(powers.distance(s, LOG2E, m, multiply_add))
    exact = float(s) * float(np.float32(LOG2E)) - float(m)
    assert found == np.rint(exact * 2**17) / 2**17


HARNESS_CASES = (
    *("causal_window", "mask_empty_rows_and_blocks", "bias_of_heads"),
    *("large_positive_scores", "large_negative_scores", "bfloat16_repeated_maxima"),
)


# `dense` has the bits of `tiled` in one step (test_attention.py). The two presets save O
# differently, which affects only the case with rows without keys.
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "matched") for case in HARNESS_CASES),
        ("mask_empty_rows_and_blocks", "matched_float32_output"),
    ],
)
def test_it_is_as_accurate_as_the_emulation(case: str, name: str) -> None:
    how, problem = harness.IMPLEMENTATIONS["tiled_odd"], harness.CASES[case]
    arrays, num = harness.inputs(problem), numerics.PRESETS[name]
    plain = harness.run_plain(problem, arrays, how.numerics(num))
    result = harness.run(how, problem, arrays, num)
    harness.check(result, plain, harness.oracle(problem, arrays))


def test_dv_of_either_operand_is_as_accurate() -> None:
    """P̄ / l rounded again, or dO / l: either way two roundings to bfloat16."""
    problem = dataclasses.replace(harness.CASES["bfloat16"], rows=90, keys=90)
    arrays, how = harness.inputs(problem), harness.IMPLEMENTATIONS["tiled"]
    exact = harness.oracle(problem, arrays)["dv"]
    errors = {
        choice: harness.run(
            how, problem, arrays, MATCHED.replace(divided_in_dv=choice, grads="float32")
        )["dv"]
        - exact
        for choice in ("probs", "do")
    }
    assert 0.8 < rms(errors["do"]) / rms(errors["probs"]) < 1.25
