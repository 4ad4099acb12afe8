"""Every preset with every row-max rule in the GPU kernels, interpreted on any machine.

Rules act in the forward kernel alone, and interpreted backward kernels are slow to compile: the
backward pass is run once per preset. On a device `test_gpu_device.py` runs all of it.
"""

import harness
import numpy as np
import pytest
from kernel_calls import (
    PRESETS,
    REPEATED,
    RULES,
    Call,
    call_of,
    compiled,
    factor_of,
    operands_of,
    run,
    run_plain,
)
from points import closer

from pallas_kernels.gpu.problem import Problem

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


def check_accuracy(call: Call) -> harness.Arrays:
    """The result of the call, found to be as accurate as the same arithmetic in NumPy."""
    result = run(REPEATED, call)
    plain, oracle = run_plain(REPEATED, call), harness.oracle(REPEATED, harness.inputs(REPEATED))
    harness.check(result, only(result, plain), only(result, oracle), factor_of(call.spec.numerics))
    return result


def only(result: harness.Arrays, arrays: harness.Arrays) -> harness.Arrays:
    return {name: arrays[name] for name in result}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_accurate_as_plain(preset: str) -> None:
    check_accuracy(call_of(REPEATED, PRESETS[preset]))


# The others have the forward pass of `flash`, in which alone rules act.
OTHER_FORWARD = sorted(PRESETS.keys() - {"float32_output", "delta_dp_p", "normalized_delta"})


@pytest.mark.parametrize("preset", OTHER_FORWARD)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "standard"])
def test_presets_with_other_rules_are_as_accurate_as_plain(preset: str, rule: str) -> None:
    call = call_of(REPEATED, PRESETS[preset], RULES[rule], backward=preset == "published")
    result = check_accuracy(call)
    if preset in ("exact", "stochastic_output"):
        return  # the first does not depend on the rule, the second is not `plain` bit by bit
    standard = call_of(REPEATED, PRESETS[preset])
    plain = (only(result, run_plain(REPEATED, how)) for how in (call, standard))
    assert "out" in closer(result, *plain)  # P̄ is rounded against the maximum of the rule


@pytest.mark.parametrize("preset", ["flash", "published"])
@pytest.mark.parametrize("rule", [name for name in RULES if name != "standard"])
def test_a_copy_of_m_for_each_thread_of_a_row_changes_no_bit(
    preset: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(REPEATED, PRESETS[preset], RULES[rule], backward=False)
    expected = run(REPEATED, call)
    monkeypatch.setattr(Problem, "counts_ties_by_warp", True)
    result = harness.as_float32(compiled.__wrapped__(call)(*operands_of(REPEATED)))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)
