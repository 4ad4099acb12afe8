"""Every numerics point of the TPU kernels: it is there, and its mutant fails.

In Pallas' interpreter; `test_tpu_compile.py` finds the roundings in the code for the chips.
"""

import functools

import harness
import kernel_calls
import pytest
from harness import Case
from kernel_calls import FORWARD, Call, run, run_plain, skip_point
from points import CHOICES, ROUNDINGS, closer
from tpu_calls import tpu_call

from lowprec_attn.numerics import EXACT, POINTS

pytestmark = pytest.mark.usefixtures("strict_promotion", "no_races")

# Two steps of keys for every row, so that `rescale` acts.
CASE = Case(batch=1, rows=20, keys=140, heads=1, kv_heads=1)


def call_with(*points: str) -> Call:
    """`exact` with these points in bfloat16, backward only where some point acts there."""
    chosen = EXACT.replace(**dict.fromkeys(points, "bfloat16"))
    return tpu_call(CASE, chosen, backward=not set(points) <= set(FORWARD))


@functools.cache
def plain_with(*points: str) -> harness.Arrays:
    return run_plain(CASE, call_with(*points))


def check_point(result: harness.Arrays, point: str) -> None:
    on, off = ({name: x[name] for name in result} for x in (plain_with(point), plain_with()))
    assert closer(result, on, off) == ROUNDINGS[point] & result.keys()


@pytest.mark.parametrize("point", POINTS)
def test_rounding_is_there_and_a_mutant_without_it_is_noticed(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_point(run(CASE, call_with(point)), point)
    skip_point(monkeypatch, point)
    kernel_calls.compiled.cache_clear()
    mutant = run(CASE, call_with(point))
    kernel_calls.compiled.cache_clear()
    with pytest.raises(AssertionError, match="between on and off"):
        check_point(mutant, point)


@pytest.mark.parametrize("choice", [name for name in CHOICES if "normalize" not in name])
def test_choice_is_there(choice: str) -> None:
    chosen, otherwise, reached = CHOICES[choice]
    on, off = (run_plain(CASE, tpu_call(CASE, n)) for n in (chosen, otherwise))
    assert closer(run(CASE, tpu_call(CASE, chosen)), on, off) == reached
