"""`matched` and the correction after the cast in the Hopper kernels, interpreted: row sums.

Σ P and Σ dS are summed in dQ's kernel, before dS is rounded. The kernel of dK and dV forms the
transposed products; its dV and dK are compared with those of `tiled`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_calls import check_accuracy, run, run_plain
from test_hopper import FEW, GROUPED, call

from lowprec_attn.arithmetic import powers as tiled_powers
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import reference, tiled
from lowprec_attn.numerics import (
    CORRECTED_AFTER_CAST,
    FLASH,
    HALVES_OUTPUT,
    MATCHED,
    MATCHED_FLOAT32_OUTPUT,
    Numerics,
    StandardMax,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.backward import query_mainloop
from pallas_kernels.gpu.hopper.problem import Problem as KernelProblem

pytestmark = [
    pytest.mark.usefixtures("no_races"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

SCORES = (1.0, 30.0, 1e3, 1e5, 1e7)
# What rounding leaves of Σ dS, relative to Σ P Σ |dO v|, with O saved in float32 and as halves.
BOUNDS = {MATCHED_FLOAT32_OUTPUT: 1e-6, MATCHED: 1e-5}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of several steps of 64 keys; at head size 128 the scale is not a power of two."""

    rows: int = 192
    keys: int = 192
    heads: int = 1
    kv_heads: int = 1
    head_size: int = 64
    is_causal: bool = True
    far_below: bool = False  # scores are −1e6 and below

    def arrays(self, largest: float) -> tuple[np.ndarray, ...]:
        """q k v dO in bfloat16; the first feature of k is 1 and not part of the scores."""
        r = np.random.default_rng(0)
        of_rows = (1, self.rows, self.heads, self.head_size)
        of_keys = (1, self.keys, self.kv_heads, self.head_size)
        q, k, v, do = (r.standard_normal(x) for x in (of_rows, of_keys, of_keys, of_rows))
        q[..., :2], k[..., :2] = 0, 0
        of_head = np.repeat(k, self.heads // self.kv_heads, axis=2)
        q *= largest / np.abs(np.einsum("btnh,bsnh->bnts", q, of_head)).max() * self.head_size**0.5
        k[..., 0] = 1
        if self.far_below:
            q[..., 1], k[..., 1] = -(2.0**10), 2.0**10 * self.head_size**0.5
        return tuple(x.astype(ml_dtypes.bfloat16) for x in (q, k, v, do))

    def spec(self, num: Numerics, sizes: Any = harness.HOPPER_TILES) -> Spec:
        return Spec(
            numerics=num.replace(kv_block=64),
            row_max=StandardMax(),
            scale=self.head_size**-0.5,
            is_causal=self.is_causal,
            block_sizes=sizes,
        )

    def gradients(self, module: Any, arrays: Any, dlse: float, spec: Spec) -> dict[str, np.ndarray]:
        q, k, v, do = map(jnp.asarray, arrays)
        (out, lse), pullback = jax.vjp(lambda *x: module.attention(*x, Extras(), spec), q, k, v)
        dq, dk, dv = pullback((do, jnp.full_like(lse, dlse)))
        found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        return {name: np.asarray(x, np.float32) for name, x in found.items()}


PROBLEMS = {
    "causal": Problem(),
    "grouped": Problem(heads=2),
    "head 128": Problem(rows=128, head_size=128),
    "more keys": Problem(rows=64, keys=320, is_causal=False),
    "rows of -1e6": Problem(far_below=True),
}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, np.ndarray]]:
    """Records Σ dS of dQ's kernel before the cast, over steps and heads, [64] by first row."""
    found: dict[int, np.ndarray] = {}
    form = query_mainloop._ds

    def recorded(probs: jax.Array, dp: jax.Array, rows: Any) -> jax.Array:
        def add(row: Any, ds: Any) -> None:
            total = np.asarray(ds, np.float64).sum(axis=1)
            found[int(row)] = found.get(int(row), 0) + total

        ds = form(probs, dp, rows)
        jax.debug.callback(add, rows.row, ds)
        return ds

    monkeypatch.setattr(query_mainloop, "_ds", recorded)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def summed_rows(
    problem: Problem, arrays: Any, dlse: float, num: Numerics, sums: dict[int, np.ndarray]
) -> np.ndarray:
    """Σ dS of a single head, [T]."""
    sums.clear()
    spec = problem.spec(num)
    problem.gradients(hopper, arrays, dlse, spec)
    jax.effects_barrier()
    total = np.concatenate([sums[row] for row in sorted(sums)])[: problem.rows]
    assert len(total) == problem.rows
    # The kernel applies a scale that is a power of two only later.
    return total if spec.scale_is_power_of_two else total / spec.scale


def sizes_of_terms(problem: Problem, arrays: Any) -> np.ndarray:
    """Σ P Σ |dO v| for every row."""
    q, k, v, do = arrays
    masking = reference.Masking(is_causal=problem.is_causal)
    p = reference.attention(q, k, v, masking=masking).p
    products = np.einsum("btnh,bsnh->bnts", *(np.abs(x.astype(np.float64)) for x in (do, v)))
    return (p * products).sum(-1)[0, 0]


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        *(("causal", largest) for largest in SCORES),
        *((name, x) for name in ("head 128", "more keys", "rows of -1e6") for x in (30.0, 1e7)),
    ],
)
def test_rows_of_p_sum_to_one_and_of_ds_to_zero(
    name: str, largest: float, sums: dict[int, np.ndarray]
) -> None:
    problem = PROBLEMS[name]
    q, k, v, do = arrays = problem.arrays(largest)
    # With dO = 0 and dlse = 1, dS is P.
    p = summed_rows(problem, (q, k, v, np.zeros_like(do)), 1.0, MATCHED, sums)
    assert np.abs(p - 1).max() <= 1e-6
    terms = sizes_of_terms(problem, arrays)
    for num, bound in BOUNDS.items():
        ds = summed_rows(problem, arrays, 0.0, num, sums)
        assert (np.abs(ds) <= bound * terms).all(), num


@pytest.mark.parametrize("largest", [1.0, 30.0, 1e3, 1e5, 1e7])
def test_another_maximum_gives_the_same_significand(largest: float) -> None:
    """To the bit; above 2^-32 it is also the significand of `tiled`."""
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    spec = PROBLEMS["causal"].spec(MATCHED)
    of = KernelProblem.of(x, x, spec, harness.HOPPER_TILES)
    r = np.random.default_rng(0)
    s = largest * r.uniform(-1, 1, (64, 128)).astype(np.float32)
    s[:, ::3] = s.max(1, keepdims=True) - r.uniform(0, 300, s[:, ::3].shape)
    s = s.astype(np.float32)
    m = np.asarray(tiled_powers.whole_max(jnp.asarray(s.max(1)), of.log2_unit))

    def probs(m: np.ndarray) -> np.ndarray:
        added = -powers.offset(jnp.asarray(m))
        return np.asarray(powers.exponentials(jnp.asarray(s), added[:, None], of))

    final = probs(m)
    for steps in (1, 5, 31):  # a later step raised M by this much
        earlier = probs(m - np.float32(steps)) * np.exp2(np.float32(-steps))
        visited = (s * np.float64(of.log2_unit) <= m[:, None] - steps) & (final > 0)
        assert visited.any()
        np.testing.assert_array_equal(earlier[visited], final[visited])
    expected = np.asarray(tiled_powers.power(jnp.asarray(s), of.log2_unit, jnp.asarray(m)[:, None]))
    above = expected > 2.0**-32
    np.testing.assert_array_equal(final[above], expected[above] * np.exp2(np.float32(powers.UNIT)))


@pytest.mark.parametrize(
    "changes",
    [
        {"exponent": "scale_first"},
        {"row_sum": "unrounded"},
        {"recomputed_probs": "unrounded"},
        {"saved_output": "same"},
    ],
    ids=str,
)
def test_without_one_of_its_parts_they_do_not(
    changes: dict[str, str], sums: dict[int, np.ndarray]
) -> None:
    problem = PROBLEMS["causal"]
    arrays = problem.arrays(30.0)
    ds = summed_rows(problem, arrays, 0.0, MATCHED_FLOAT32_OUTPUT.replace(**changes), sums)
    assert (np.abs(ds) / sizes_of_terms(problem, arrays)).max() > 2e-5


def with_exact_scores(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Rounds q and k to so few bits that float32 sums of products q kᵀ are exact in any order.

    The kernel of dK and dV forms k qᵀ. The interpreter multiplies by NumPy, whose BLAS may add the
    terms of k qᵀ in another order than those of q kᵀ (OpenBLAS does on AMD's Zen and Intel's
    Haswell). The last bit of a score of 1e7 is a factor of up to 2.7 in P.
    """
    q, k, v, do = arrays

    def rounded(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        unit = 2.0 ** (np.ceil(np.log2(np.abs(x).max())) - 7)
        return (np.rint(x / unit) * unit).astype(ml_dtypes.bfloat16)

    # Whole numbers up to 2^7 in some unit: a sum of 128 products is at most 2^21.
    return rounded(q), rounded(k), v, do


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        *(("causal", largest) for largest in SCORES),
        *((name, 30.0) for name in ("grouped", "head 128", "more keys")),
        ("head 128", 1e5),
    ],
)
def test_numbers_of_both_backward_kernels_are_those_of_tiled(name: str, largest: float) -> None:
    """Except where float32 sums in another order tip a rounding, and P̄ < 2^-61, 0 here."""
    problem = PROBLEMS[name]
    arrays = with_exact_scores(problem.arrays(largest))
    result, expected = (
        problem.gradients(module, arrays, 1.0, problem.spec(MATCHED, sizes))
        for module, sizes in ((hopper, harness.HOPPER_TILES), (tiled, None))
    )
    # In saturated rows, dS is a remainder of float32 sums, and depends on their order.
    names = ("out", "dv", "dq", "dk") if largest < 1e3 else ("out", "dv")
    for what in names:
        least = 2.0**-50 * np.abs(expected[what]).max()
        assert np.mean(np.abs(result[what] - expected[what]) > least) < 0.01, what


CHOICES: dict[str, tuple[Numerics, str]] = {
    "m and l": (FLASH.replace(statistics="m_and_l"), ""),
    "halves": (HALVES_OUTPUT, "dq"),
    "rounded row sum": (FLASH.replace(row_sum="rounded"), "lse"),
    "whole maximum": (FLASH.replace(exponent="whole_max", statistics="m_and_l"), "out"),
    "rounded P̄ in P": (
        FLASH.replace(recomputed_probs="rounded", statistics="m_and_l"),
        "dv",
    ),
    "matched": (MATCHED, "out"),
    "after the cast": (CORRECTED_AFTER_CAST, "dk"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_is_there_alone(name: str) -> None:
    """Noise rarely tips a rounding. Without the choice some array lies farther away."""
    chosen, changed = CHOICES[name]
    case = dataclasses.replace(GROUPED, rows=128, keys=192, is_causal=False, heads=1)
    result = check_accuracy(case, call(case, chosen))
    expected, others = (run_plain(case, call(case, n)) for n in (chosen, FLASH))
    # NumPy forms exponents by subtracting first, which tips a few more roundings.
    for what in ("out", "dq", "dk", "dv"):
        assert np.mean(result[what] != expected[what]) < 0.03, what
    if changed:
        near, far = (np.abs(result[changed] - x[changed]).mean() for x in (expected, others))
        assert near < far / 3


def test_rounded_rows_of_ds_sum_to_zero_after_the_correction() -> None:
    """dQ along a feature that is 1 in all keys is Σ (dS − λ P), with both terms rounded."""
    problem = PROBLEMS["causal"]
    arrays = problem.arrays(30.0)
    found, flash = (
        np.abs(problem.gradients(hopper, arrays, 0.0, problem.spec(n))["dq"][..., 0])
        for n in (CORRECTED_AFTER_CAST, FLASH)
    )
    assert found.max() < 1e-6 < 1e-4 < np.median(flash[:, 1:])


def test_dk_of_rows_that_are_one_key_is_corrected() -> None:
    """In a row of one key, the error of δ is all of dS, and λ P removes all of it."""
    problem = Problem()
    arrays = problem.arrays(1e3)
    corrected, flash, expected = (
        problem.gradients(module, arrays, 0.0, problem.spec(n, sizes))["dk"]
        for module, n, sizes in (
            (hopper, CORRECTED_AFTER_CAST, harness.HOPPER_TILES),
            (hopper, FLASH, harness.HOPPER_TILES),
            (tiled, CORRECTED_AFTER_CAST.replace(exponent="scale_first"), None),
        )
    )
    q, k, v, do = arrays
    exact = reference.backward(q, k, v, do, masking=reference.Masking(is_causal=True)).dk

    def error(x: np.ndarray) -> float:
        return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))

    assert error(corrected) < 1.5 * error(expected) + 1e-3
    assert 3 * error(corrected) < error(flash)


def test_a_wait_of_either_kind_gives_the_same_bits() -> None:
    tile = dataclasses.replace(harness.HOPPER_FORWARD, early_wait=True)
    sizes = dataclasses.replace(harness.HOPPER_TILES, forward=tile)
    result, expected = (
        run(FEW, call(FEW, MATCHED, sizes=x)) for x in (sizes, harness.HOPPER_TILES)
    )
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)
