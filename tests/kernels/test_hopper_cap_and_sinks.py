"""Soft caps and sinks in the interpreted Hopper kernels."""

import dataclasses

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.product_races import check_products
from harness import Case
from kernel_calls import call_of, check_accuracy, run

from lowprec_attn.numerics import FLASH, HALVES_OUTPUT, MATCHED, DynamicMax, Numerics, RowMax
from lowprec_attn.numerics import StandardMax as Standard
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import BlockSizes, default_block_sizes

pytestmark = [
    pytest.mark.usefixtures("no_races", "products_are_checked"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

SIZES = harness.HOPPER_TILES
CASE = Case(
    batch=1, rows=192, keys=192, heads=2, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
CASES = {
    "cap": dataclasses.replace(CASE, soft_cap=2.0),
    "cap, large scores": dataclasses.replace(
        CASE, soft_cap=30.0, values="large_positive_scores", scale=0.05
    ),
    "cap, window, ties": dataclasses.replace(
        CASE, soft_cap=50.0, window=(30, 0), values="repeated_maxima"
    ),
    "cap, head 128": dataclasses.replace(CASE, soft_cap=3.0, head_size=128, heads=1),
    "sinks": dataclasses.replace(CASE, sinks=True),
    "sinks, low scores": dataclasses.replace(
        CASE, kv_heads=2, sinks=True, values="large_negative_scores", scale=0.25
    ),
    "sinks, lengths": dataclasses.replace(
        CASE, batch=2, rows=128, keys=128, sinks=True, query_lengths=(90, 128), key_lengths=(128, 0)
    ),
    "both": dataclasses.replace(CASE, is_causal=False, sinks=True, soft_cap=3.0, segments=True),
}


@pytest.fixture
def products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_products(monkeypatch)


def of_table(case: Case) -> BlockSizes:
    """The tiles that a device would use, interpreted."""
    sizes = default_block_sizes(
        case.head_size, soft_cap=case.soft_cap is not None, has_sinks=case.sinks, long=True
    )
    return dataclasses.replace(sizes, programs=2, interpret=True)


@pytest.mark.parametrize(
    ("name", "chosen", "rule", "of_device"),
    [
        *((name, FLASH, Standard(), False) for name in list(CASES)[:2]),
        ("cap, window, ties", FLASH, DynamicMax(), False),
        ("cap, head 128", FLASH, Standard(), True),
        ("sinks", FLASH, Standard(), True),
        ("sinks, low scores", HALVES_OUTPUT, DynamicMax(), False),
        ("sinks, lengths", MATCHED, Standard(), False),
        ("both", MATCHED, Standard(), False),
        ("both", FLASH, Standard(), True),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_caps_and_sinks(name: str, chosen: Numerics, rule: RowMax, of_device: bool) -> None:
    case = CASES[name]
    sizes = of_table(case) if of_device else SIZES
    step = sizes.forward.step
    check_accuracy(case, call_of(case, chosen, rule, sizes, kv_block=step, implementation=hopper))


def test_a_sink_of_minus_infinity_is_none() -> None:
    """The results are equal to the bit, and the gradient of the sink is 0."""
    case = dataclasses.replace(CASE, rows=128, keys=128, heads=1)
    of = call_of(case, FLASH, Standard(), SIZES, kv_block=64, implementation=hopper)
    plain = run(case, of)
    arrays = {name: jnp.asarray(x) for name, x in harness.inputs(case).items()}
    from kernel_calls import compiled, extras_of

    extras = extras_of(case)._replace(sinks=jnp.array([-jnp.inf]))
    result = harness.as_float32(compiled(of)(arrays, extras))
    assert result.pop("dsinks") == 0
    for name, x in plain.items():
        np.testing.assert_array_equal(result[name], x)


def test_tanh_errs_by_less_than_said() -> None:
    from pallas_kernels.gpu.hopper.machine.instructions import tanh

    small = np.logspace(-30, 0, 10_001)
    x = np.concatenate([np.linspace(-12, 12, 100_000), small, [-np.inf, -200, 200, np.inf]])
    x = x.astype(np.float32)
    for factor in (1.0, 0.0025):
        found = np.asarray(tanh(jnp.asarray(x), factor, interpret=True), np.float64)
        exact = np.tanh(x.astype(np.float64) * np.float32(factor))
        assert np.abs(found / exact - 1).max() < 2.0**-21
        assert np.abs(found).max() <= 1 + 2.0**-22
    assert np.isnan(tanh(jnp.array([jnp.nan]), 1.0, interpret=True)).all()
