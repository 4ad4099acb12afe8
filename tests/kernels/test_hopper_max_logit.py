"""The largest score of each head from the interpreted Hopper kernels."""

import dataclasses

import harness
import numpy as np
import pytest
from gpu.product_races import check_products
from harness import Case
from max_logits import calls, check, exact, tolerance

from lowprec_attn.numerics import (
    FLASH,
    MATCHED,
    NORMALIZED_DELTA,
    PUBLISHED,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import BackwardTile, ForwardTile

pytestmark = [
    pytest.mark.usefixtures("no_races", "products_are_checked"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

CASE = Case(
    batch=1, rows=192, keys=192, heads=2, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
TIES = dataclasses.replace(CASE, values="repeated_maxima", scale=0.3)
CASES: dict[str, tuple[Case, Numerics, RowMax]] = {
    "the running maximum": (CASE, FLASH, StandardMax()),
    "normalized delta": (CASE, NORMALIZED_DELTA, StandardMax()),
    "not causal, head 256": (
        dataclasses.replace(CASE, rows=64, is_causal=False, head_size=256, heads=1),
        FLASH,
        StandardMax(),
    ),
    "below zero": (dataclasses.replace(CASE, values="large_negative_scores"), FLASH, StandardMax()),
    "lengths, below zero": (
        dataclasses.replace(
            CASE, values="large_negative_scores", query_lengths=(90,), key_lengths=(150,)
        ),
        FLASH,
        StandardMax(),
    ),
    "ties": (TIES, FLASH, DynamicMax()),
    "near ties": (TIES, FLASH, DynamicMax(tolerance=0.1, beta=7)),
    "whole maximum": (TIES, MATCHED, StandardMax()),
    "whole maximum, ties": (TIES, MATCHED, DynamicMax()),
    "sinks": (dataclasses.replace(CASE, sinks=True), FLASH, StandardMax()),
    "sinks above and below": (
        dataclasses.replace(CASE, sinks=True, values="large_negative_scores", scale=0.25),
        FLASH,
        DynamicMax(),
    ),
    "lengths, sinks": (
        dataclasses.replace(
            CASE, batch=2, sinks=True, query_lengths=(90, 192), key_lengths=(192, 0)
        ),
        MATCHED,
        StandardMax(),
    ),
    "segments, cap": (dataclasses.replace(CASE, segments=True, soft_cap=3.0), FLASH, StandardMax()),
    "window": (dataclasses.replace(TIES, window=(30, 0)), FLASH, DynamicMax()),
    # S is rounded before it is multiplied by the scale, a power of two.
    "long steps": (
        dataclasses.replace(TIES, rows=256, keys=512, scale=0.25),
        PUBLISHED,
        DynamicMax(),
    ),
}


@pytest.fixture
def products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_products(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_largest_score(name: str) -> None:
    case, chosen, rule = CASES[name]
    how = harness.Implementation(name="hopper", kv_block=64, block_sizes=harness.HOPPER_TILES)
    if name == "long steps":
        tiles = {"forward": ForwardTile(step=128)}
        tiles |= dict.fromkeys(("query_gradients", "key_gradients"), BackwardTile(step=128))
        sizes = dataclasses.replace(harness.HOPPER_TILES, **tiles)
        how = dataclasses.replace(how, kv_block=256, block_sizes=sizes)
    arrays = harness.inputs(case)
    *results, found = calls(how, case, arrays, chosen, rule, return_max_logit=True)
    expected, within = exact(case, arrays), tolerance(case, arrays)
    if not chosen.scores.is_identity:
        within += 2**-8 * np.abs(expected).max()
    check(found, expected, within)
    # The other results keep their bits.
    for result, without in zip(results, calls(how, case, arrays, chosen, rule), strict=True):
        np.testing.assert_array_equal(result, without)


def test_a_score_of_nan_makes_it_nan_for_its_head() -> None:
    case = dataclasses.replace(CASE, batch=2)
    how = harness.Implementation(name="hopper", kv_block=64, block_sizes=harness.HOPPER_TILES)
    arrays = harness.inputs(case)
    q = arrays["q"].copy()
    q[1, 100, 1, 3] = np.nan
    *_, found = calls(how, case, {**arrays, "q": q}, FLASH, StandardMax(), return_max_logit=True)
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [(1, 1)])
