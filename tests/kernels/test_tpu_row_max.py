"""The TPU kernel finds m from the two largest entries of a row, as the definition has it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn.numerics import MASKED, DynamicMax, PublishedMax, RowMax, StandardMax
from pallas_kernels.tpu import softmax
from pallas_kernels.tpu.softmax import Largest

RULES = [
    StandardMax(),
    DynamicMax(),
    DynamicMax(beta=3.0, tolerance=1e-3, max_shift=2.0),
    PublishedMax(),
    PublishedMax(tolerance=0.0),
]
# Columns of the maximum: one, two lanes, one lane twice, and both.
PLACES = [(5,), (5, 6), (5, 5 + 128), (0, 127, 128 + 127)]
MAXIMA = [4.0, 1e-6, 0.0, -0.5, -30.0]
# Distances below the maximum: equal, within the tolerance of 1e-3, beyond it.
DISTANCES = [0.0, 5e-4, 2e-3]


def scores(keys: int) -> np.ndarray:
    """A row [keys] for each place, maximum and distance, and one row that is fully masked."""
    rng = np.random.default_rng(0)
    rows = [np.full(keys, MASKED, np.float32)]
    for places in PLACES:
        for maximum in MAXIMA:
            for distance in DISTANCES:
                row = maximum - rng.uniform(0.1, 9.0, keys)
                row[keys // 2 + 3 :: 7] = MASKED
                first, *others = (place for place in places if place < keys)
                row[first], row[others] = maximum, maximum - distance
                rows.append(row.astype(np.float32))
    return np.stack(rows)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("keys", [128, 256, 512])
def test_m_is_that_of_the_definition(rule: RowMax, keys: int) -> None:
    """After no key, a small and a large maximum."""
    before = jnp.array([MASKED, 0.5, 100.0], jnp.float32)
    s = jnp.repeat(jnp.asarray(scores(keys)), len(before), axis=0)
    before = jnp.tile(before, len(s) // len(before))[:, None]
    found = softmax.running_max(rule, s, before, 1.0)
    np.testing.assert_array_equal(found, rule(s, before))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("tile", [128, 256])
def test_tiles_of_a_step_give_the_m_of_the_step(rule: RowMax, tile: int) -> None:
    """Some repeats lie in two tiles, so that no tile can count them alone."""
    s = scores(512)
    s[1::2] = np.roll(s[1::2], 200, axis=1)
    before = jnp.full((len(s), 1), 0.5, jnp.float32)
    largest = Largest.none((len(s), 128))
    for start in range(0, 512, tile):
        largest = largest.merge(Largest.of(jnp.asarray(s[:, start : start + tile])))
    found = largest.running_max(rule, before, 1.0)
    np.testing.assert_array_equal(found, rule(jnp.asarray(s), before))


@pytest.mark.parametrize("rule", RULES[1:], ids=repr)
def test_a_repeat_is_seen_in_one_lane_and_across_lanes(rule: Any) -> None:
    """Otherwise the comparison above would hold for a rule that never shifts."""
    row = np.full((1, 256), -5.0, np.float32)
    before = jnp.full((1, 1), MASKED, jnp.float32)
    row[0, 7] = 3.0
    assert softmax.running_max(rule, jnp.asarray(row), before, 1.0) == 3.0
    for other in (8, 7 + 128):
        tied = row.copy()
        tied[0, other] = 3.0
        assert softmax.running_max(rule, jnp.asarray(tied), before, 1.0) > 3.0
