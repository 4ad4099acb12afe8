"""Every numerics point of the kernels rounds, with others and alone, and its mutant fails.

These tests run interpreted on any machine. `test_gpu_device.py` has the same tests on a device;
`test_ptx.py` and `test_tpu_compile.py` find the roundings in the machine code.
"""

import functools
import itertools
from typing import Any

import harness
import kernel_calls
import pytest
from harness import KERNELS, Case
from kernel_calls import CAUSAL, FORWARD, Call, kernel_call, run, run_plain, skip_point
from points import (
    CHOICES,
    KERNEL_GROUPS,
    KERNEL_POINTS,
    ROUNDINGS,
    TOGETHER,
    check_together,
    closer,
    with_points,
)

from lowprec_attn.numerics import EXACT, Numerics

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# A row has several steps, so that `rescale` acts.
CASES = {"gpu": CAUSAL, "tpu": Case(batch=1, rows=20, keys=140, heads=1, kv_heads=1)}
TILES: dict[str, dict[str, Any]] = {"gpu": {"sizes": harness.GPU_TALL}, "tpu": {}}


def call_of(kernels: str, chosen: Numerics, **options: Any) -> Call:
    return kernel_call(kernels, CASES[kernels], chosen, **TILES[kernels], **options)


def result_with(kernels: str, *points: str) -> harness.Arrays:
    """The result with these points; the backward pass runs only if a point acts there."""
    backward = not set(points) <= set(FORWARD)
    return run(CASES[kernels], call_of(kernels, with_points(*points), backward=backward))


@functools.cache
def plain_with(kernels: str, *points: str) -> harness.Arrays:
    return run_plain(CASES[kernels], call_of(kernels, with_points(*points)))


def reached_by(point: str, result: harness.Arrays) -> set[str]:
    return ROUNDINGS[point] & result.keys()


def check_point(kernels: str, result: harness.Arrays, point: str, *others: str) -> None:
    """Checks that `point` rounds where it should, with the others on as well."""
    on, off = (
        {name: plain_with(kernels, *points)[name] for name in result}
        for points in ((*others, point), others)
    )
    assert closer(result, on, off) == reached_by(point, result)


@pytest.mark.parametrize("group", KERNEL_GROUPS, ids="+".join)
@pytest.mark.parametrize("kernels", KERNELS)
def test_roundings_are_there(kernels: str, group: tuple[str, ...]) -> None:
    result = result_with(kernels, *group)
    for point in group:
        check_point(kernels, result, point, *(x for x in group if x != point))


@pytest.mark.slow
@pytest.mark.parametrize("point", KERNEL_POINTS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rounding_is_there_alone(kernels: str, point: str) -> None:
    check_point(kernels, result_with(kernels, point), point)


# `closer` fails in the tests above where a rounding is missing; this shows it for each.
@pytest.mark.slow
@pytest.mark.parametrize("mutant_of", list(itertools.product(KERNELS, KERNEL_POINTS)), ids="-".join)
def test_a_mutant_that_skips_the_rounding_is_noticed(
    mutant_of: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, point = mutant_of
    skip_point(monkeypatch, point)
    kernel_calls.compiled.cache_clear()
    mutant = result_with(kernels, point)
    kernel_calls.compiled.cache_clear()
    on, off = (
        {name: plain[name] for name in mutant}
        for plain in (plain_with(kernels, point), plain_with(kernels))
    )
    assert closer(mutant, off, on) == reached_by(point, mutant)  # as if the point were off
    with pytest.raises(AssertionError, match="between on and off"):
        check_point(kernels, mutant, point)


# Presets differ in the other choices, and test_kernels.py tells presets apart.
SERVED = [name for name in CHOICES if "normalize_probs" not in name]
DECLINED_ON_TPU = ("mean_key", "whole_max", "recomputed_probs", "divided_in_dv")
OF_KERNELS = [
    (kernels, name)
    for kernels in KERNELS
    for name in SERVED
    if kernels == "gpu" or not any(x in name for x in DECLINED_ON_TPU)
]


@pytest.mark.slow
@pytest.mark.parametrize("choice_of", OF_KERNELS, ids="-".join)
def test_choice_is_there_alone(choice_of: tuple[str, str]) -> None:
    kernels, choice = choice_of
    case, (chosen, otherwise, reached) = CASES[kernels], CHOICES[choice]
    on, off = (run_plain(case, call_of(kernels, n)) for n in (chosen, otherwise))
    assert closer(run(case, call_of(kernels, chosen)), on, off) == reached


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("gpu", "do, do_o_storage, subtracted"), ("tpu", "do_o_storage, row_sum")],
)
def test_choices_are_there(kernels: str, name: str) -> None:
    """Those that no preset of test_kernels.py has without others."""
    case = CASES[kernels]
    result = run(case, call_of(kernels, TOGETHER[name][0]))
    check_together(name, result, lambda chosen: run_plain(case, call_of(kernels, chosen)))


def test_shortened_significands_at_every_point_are_those_of_the_plain_emulation() -> None:
    """At all points at once, so that no operand and no store is left out."""
    chosen, fine = (
        EXACT.replace(**dict.fromkeys(KERNEL_POINTS, fmt), saved_output="same")
        for fmt in ("bf16_m2", "bfloat16")
    )
    result = run(CAUSAL, call_of("gpu", chosen))
    on, off = (run_plain(CAUSAL, call_of("gpu", n)) for n in (chosen, fine))
    assert closer(result, on, off) == result.keys()


MODES = {
    "delta_value": "f32_m10:error_positive",
    "output": "bfloat16:toward_zero",
    "dp": "bfloat16:error_positive",
}


def test_other_modes_round_otherwise_where_they_should() -> None:
    """Each is looked for with the others on, next to the same format to nearest."""
    chosen = EXACT.replace(**MODES)
    result, on = (of(CAUSAL, call_of("gpu", chosen)) for of in (run, run_plain))
    for point, text in MODES.items():
        nearest = chosen.replace(**{point: text.partition(":")[0]})
        off = run_plain(CAUSAL, call_of("gpu", nearest))
        assert closer(result, on, off) == reached_by(point, result), point


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["bf16_m2", "bfloat16:error_positive"])
@pytest.mark.parametrize("point", ["probs", "lse", "output", "dp"])
def test_a_shortened_significand_or_an_injected_error_alone(point: str, rounding: str) -> None:
    fmt, injected, _ = rounding.partition(":")
    other = fmt if injected else "bfloat16"
    chosen, nearest = (EXACT.replace(**{point: text}) for text in (rounding, other))
    result = run(CAUSAL, call_of("gpu", chosen))
    on, off = (run_plain(CAUSAL, call_of("gpu", n)) for n in (chosen, nearest))
    assert closer(result, on, off) == reached_by(point, result)
