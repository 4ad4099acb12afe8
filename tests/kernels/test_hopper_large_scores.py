"""`statistics='m_and_l'` in the Hopper kernels where δ takes row sums, interpreted.

Rows of large scores form P from m and l. All other rows form it from lse, as without `m_and_l`.
"""

import dataclasses
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiling import optimized
from kernel_calls import check_accuracy
from test_hopper import call
from test_hopper_matched import Problem
from test_hopper_visibility import cooperative

from lowprec_attn.arithmetic.request import Extras
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import CORRECTED_AFTER_CAST, NORMALIZED_DELTA, Numerics
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.forward.kernel import forward
from pallas_kernels.gpu.hopper.problem import LARGE
from pallas_kernels.gpu.hopper.problem import Problem as KernelProblem

pytestmark = [
    pytest.mark.usefixtures("no_races"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

CURES = [NORMALIZED_DELTA, CORRECTED_AFTER_CAST]
# Next to the first two, float32 loses a part of log l; next to the last, all of it.
LEVELS = (2.0**20, -(2.0**20), -(2.0**30))


def with_lse(num: Numerics) -> Numerics:
    return num.replace(statistics="lse")


def gradients(problem: Problem, arrays: Any, dlse: float, num: Numerics) -> dict[str, np.ndarray]:
    """Of the kernels, compiled as a user's: otherwise `lse` alone rounds an exponent twice."""
    q, k, v, do = map(jnp.asarray, arrays)

    @optimized
    def step(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        attend = partial(hopper.attention, extras=Extras(), spec=problem.spec(num))
        (out, lse), pullback = jax.vjp(attend, q, k, v)
        dq, dk, dv = pullback((do, jnp.full_like(lse, dlse)))
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    return {name: np.asarray(x, np.float32) for name, x in step(q, k, v, do).items()}


def arrays_at(problem: Problem, level: float, rows: slice) -> tuple[np.ndarray, ...]:
    """q k v dO; the scores of some rows lie near a level. All products q kᵀ are whole numbers."""
    q, k, v, do = (x.astype(np.float64) for x in problem.arrays(1.0))
    r = np.random.default_rng(1)
    q[..., 2:], k[..., 2:] = (r.integers(-1, 2, x[..., 2:].shape) for x in (q, k))
    k[..., 1] = abs(level) ** 0.5 * 8
    q[:, rows, :, 1] = np.sign(level) * abs(level) ** 0.5
    return tuple(x.astype(ml_dtypes.bfloat16) for x in (q, k, v, do))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num", CURES, ids=lambda n: n.delta)
def test_rows_of_p_sum_to_one(num: Numerics, level: float) -> None:
    """With the unit matrix as dO, a row of dVᵀ sums to a row of P."""
    problem = Problem(rows=64, keys=64)
    q, k, v, do = arrays_at(problem, level, slice(None))
    unit = np.eye(64)[None, :, None].astype(do.dtype)
    found, without = (
        gradients(problem, (q, k, v, unit), 0.0, n)["dv"].sum(axis=(0, 1, 2))
        for n in (num, with_lse(num))
    )
    assert np.abs(found - 1).max() <= 2.0**-8  # because P is rounded to bfloat16
    assert np.abs(without - 1).max() > 0.02


@pytest.mark.parametrize(
    ("num", "problem"),
    [
        (NORMALIZED_DELTA, Problem(rows=128, keys=128)),
        (CORRECTED_AFTER_CAST, Problem(rows=128, keys=128, is_causal=False)),
        (CORRECTED_AFTER_CAST, Problem(rows=64, keys=128, head_size=128, is_causal=False)),
    ],
    ids=["causal", "not causal", "head 128"],
)
def test_large_and_other_rows_in_one_tile(num: Numerics, problem: Problem) -> None:
    large = 40  # neither all rows of a tile nor those of whole warps
    arrays = arrays_at(problem, -(2.0**20), slice(large))
    found, without = (gradients(problem, arrays, 0.5, n) for n in (num, with_lse(num)))
    for what in ("out", "dq"):
        np.testing.assert_array_equal(found[what][:, large:], without[what][:, large:])
    spec = problem.spec(num.replace(exponent="scale_first"), None)
    for what, expected in problem.gradients(tiled, arrays, 0.5, spec).items():
        # The features that make the level multiply what rounding leaves of sums over dS.
        near, far = (
            np.linalg.norm((x[what] - expected)[..., 2:]) / np.linalg.norm(expected[..., 2:])
            for x in (found, without)
        )
        assert near < 2e-3, what
        assert what == "out" or far > 4 * near, what


@pytest.mark.parametrize("largest", [0.6, 0.9])
def test_ordinary_rows_are_saved_as_without_m_and_l(largest: float) -> None:
    """In base 2, scores of 0.6 `LARGE` lie just below `LARGE`, and those of 0.9 lie above it."""
    problem = Problem(rows=128, keys=128)
    q, k, v = map(jnp.asarray, problem.arrays(largest * LARGE)[:3])
    found, expected = (
        forward(q, k, v, KernelProblem.of(q, k, problem.spec(n), harness.HOPPER_TILES))
        for n in (NORMALIZED_DELTA, with_lse(NORMALIZED_DELTA))
    )
    assert found.inverse_l is None
    offset, lse, more = (np.asarray(x) for x in (found.offset, expected.offset, found.more))
    is_large = np.abs(lse) > LARGE
    assert is_large.any() == (largest > 0.7)
    np.testing.assert_array_equal(offset[~is_large], lse[~is_large])
    assert not more[~is_large].any()
    np.testing.assert_allclose((offset + more)[is_large], lse[is_large], atol=2.0**-12)


# Scores around −720, hence −1,040 in base 2, so that most rows have large scores and some have not.
FAR = harness.Case(
    batch=1, rows=128, keys=128, heads=2, kv_heads=1, head_size=64, dtype="bfloat16", scale=2.0,
    is_causal=True, values="large_negative_scores",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "num", "options"),
    [
        ({"segments": True}, NORMALIZED_DELTA, {}),
        ({"segments": True}, CORRECTED_AFTER_CAST, {"sizes": cooperative()}),
        ({"window": (50, 0), "kv_heads": 2}, NORMALIZED_DELTA, {"packed": True}),
    ],
    ids=["segments", "segments, cooperative", "window, packed"],
)
def test_with_other_masks_and_tiles(
    changes: dict[str, Any], num: Numerics, options: dict[str, Any]
) -> None:
    case = dataclasses.replace(FAR, **changes)
    check_accuracy(case, call(case, num, **options))
