"""Every numerics point of the GPU kernels, alone and in pairs: it is there, and its mutant fails.

Interpreted on any machine; compiled on a device in `test_gpu_device.py`.
"""

import functools
import itertools
import random

import harness
import kernel_calls
import pytest
from compiling import slow_among
from kernel_calls import CAUSAL, FORWARD, TALL, Call, call_of, run, run_plain, skip_point
from points import CHOICES, ROUNDINGS, closer

from lowprec_attn.numerics import EXACT, POINTS, Numerics

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

PAIRS = list(itertools.combinations(POINTS, 2))
SAMPLE = random.Random(0).sample(PAIRS, 6)


def with_points(*points: str) -> Numerics:
    return EXACT.replace(**dict.fromkeys(points, "bfloat16"))


def call_with(*points: str) -> Call:
    """`exact` with these points in bfloat16, backward only where some point acts there."""
    backward = not set(points) <= set(FORWARD)
    return call_of(CAUSAL, with_points(*points), sizes=TALL, backward=backward)


@functools.cache
def plain_with(*points: str) -> harness.Arrays:
    return run_plain(CAUSAL, call_of(CAUSAL, with_points(*points)))


def reached_by(point: str, result: harness.Arrays) -> set[str]:
    return ROUNDINGS[point] & result.keys()


def check_point(result: harness.Arrays, point: str, *others: str) -> None:
    """`point` acts where it should, whatever the others do."""
    on, off = (
        {name: plain_with(*points)[name] for name in result}
        for points in ((*others, point), others)
    )
    assert closer(result, on, off) == reached_by(point, result)


@pytest.mark.parametrize("point", POINTS)
def test_rounding_is_there_and_a_mutant_without_it_is_noticed(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_point(run(CAUSAL, call_with(point)), point)
    skip_point(monkeypatch, point)
    kernel_calls.compiled.cache_clear()
    mutant = run(CAUSAL, call_with(point))
    kernel_calls.compiled.cache_clear()
    on, off = (
        {name: plain[name] for name in mutant} for plain in (plain_with(point), plain_with())
    )
    assert closer(mutant, off, on) == reached_by(point, mutant)  # it lies where the point is off
    with pytest.raises(AssertionError, match="between on and off"):
        check_point(mutant, point)


@pytest.mark.parametrize("choice", [name for name in CHOICES if "normalize" not in name])
def test_choice_is_there(choice: str) -> None:
    chosen, otherwise, reached = CHOICES[choice]
    on, off = (run_plain(CAUSAL, call_of(CAUSAL, n)) for n in (chosen, otherwise))
    assert closer(run(CAUSAL, call_of(CAUSAL, chosen, sizes=TALL)), on, off) == reached


@pytest.mark.parametrize("pair", slow_among(SAMPLE, SAMPLE[3:]), ids="+".join)
def test_of_two_points_each_is_there(pair: tuple[str, str]) -> None:
    result = run(CAUSAL, call_with(*pair))
    check_point(result, *pair)
    check_point(result, *reversed(pair))


def test_shortened_significands_at_every_point_are_those_of_the_plain_emulation() -> None:
    """At all of them at once, which leaves no operand and no store out."""
    chosen, fine = (
        EXACT.replace(**dict.fromkeys(POINTS, fmt), saved_output="same")
        for fmt in ("bf16_m2", "bfloat16")
    )
    result = run(CAUSAL, call_of(CAUSAL, chosen, sizes=TALL))
    on, off = (run_plain(CAUSAL, call_of(CAUSAL, n)) for n in (chosen, fine))
    assert closer(result, on, off) == result.keys()


@pytest.mark.parametrize("rounding", ["bf16_m2", "bfloat16:error_positive"])
@pytest.mark.parametrize("point", ["probs", "lse", "output", "dp"])
def test_a_shortened_significand_or_an_injected_error_at_one_point(
    point: str, rounding: str
) -> None:
    chosen, nearest = (EXACT.replace(**{point: text}) for text in (rounding, "bfloat16"))
    result = run(CAUSAL, call_of(CAUSAL, chosen, sizes=TALL))
    on, off = (run_plain(CAUSAL, call_of(CAUSAL, n)) for n in (chosen, nearest))
    assert closer(result, on, off) == ROUNDINGS[point] & result.keys()
