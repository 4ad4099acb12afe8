"""What only the GPU kernels do, in the interpreter; see `test_kernels.py` for the rest."""

import harness
import numpy as np
import pytest
from kernel_calls import PRESETS, REPEATED, RULES, call_of, compiled, operands_of, run

from pallas_kernels.gpu.problem import Problem

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CASE = REPEATED["gpu"]


@pytest.mark.parametrize(("preset", "rule"), [("flash", "dynamic_max"), ("published", "published")])
def test_a_copy_of_m_for_each_thread_of_a_row_changes_no_bit(
    preset: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(CASE, PRESETS[preset], RULES[rule], backward=False)
    expected = run(CASE, call)
    monkeypatch.setattr(Problem, "counts_ties_by_warp", True)
    result = harness.as_float32(compiled.__wrapped__(call)(*operands_of(CASE)))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)
