"""The compiled TPU kernels on a TPU, with the checks that run interpreted elsewhere.

JAX_PLATFORMS=tpu,cpu pytest -m tpu -n 0 tests/kernels/test_tpu_device.py
"""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import PRESETS, REPEATED, RULES, Call, check_accuracy, kernel_call, run

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Extras, Request
from lowprec_attn.attention.dispatch import resolve_by_platform
from lowprec_attn.numerics import EXACT, Numerics, RowMax

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("strict_promotion")]

CASES = harness.cases_of("tpu")
REPEATED_MAXIMA = REPEATED["tpu"]


def compiled_call(case: harness.Case, chosen: Numerics, *rule: RowMax) -> Call:
    return kernel_call("tpu", case, chosen, *rule, sizes=None)


@pytest.mark.parametrize("case", CASES)
def test_exact_arithmetic_is_as_accurate_as_plain_float32(case: str) -> None:
    check_accuracy(CASES[case], compiled_call(CASES[case], EXACT))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_accurate_as_plain(preset: str, rule: str) -> None:
    check_accuracy(REPEATED_MAXIMA, compiled_call(REPEATED_MAXIMA, PRESETS[preset], RULES[rule]))


@pytest.mark.parametrize("preset", PRESETS)
def test_two_runs_have_equal_bits(preset: str) -> None:
    call = compiled_call(REPEATED_MAXIMA, PRESETS[preset])
    first, second = run(REPEATED_MAXIMA, call), run(REPEATED_MAXIMA, call)
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)


def test_a_call_without_a_choice_takes_the_kernels() -> None:
    q = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)
    chosen = attention.dot_product_attention(q, q, q, is_causal=True, numerics=numerics.FLASH)
    forced = attention.dot_product_attention(
        q, q, q, is_causal=True, numerics=numerics.FLASH, implementation="tpu"
    )
    np.testing.assert_array_equal(np.asarray(chosen), np.asarray(forced))
    spec = compiled_call(REPEATED_MAXIMA, numerics.FLASH).spec
    assert resolve_by_platform(Request.of(q, q, Extras(), spec), None)["tpu"] == "tpu"
    assert jax.default_backend() == "tpu"
