"""For every point of every implementation: the rounding is there, and a mutant without it fails.

`closer` compares a result with two independent NumPy computations, the point on and off.
"""

from collections.abc import Iterator
from typing import Any

import harness
import jax
import numpy as np
import pytest

from lowprec_attn.arithmetic import steps
from lowprec_attn.numerics import EXACT, POINTS, Numerics, StandardMax

pytestmark = pytest.mark.usefixtures("strict_promotion")

CASE = harness.Case(is_causal=True)
IMPLEMENTATIONS = ("dense", "tiled_odd")

# Every point on its own, and which results it reaches; O reaches dS through δ.
ALL = {"out", "lse", "dq", "dk", "dv"}
FORWARD = {"out", "dq", "dk"}
ROUNDINGS: dict[str, set[str]] = {
    "scores": ALL,
    "shift": ALL,
    "probs": FORWARD,
    "pv": FORWARD,
    "rescale": FORWARD,
    "accumulator": FORWARD,
    "stats": ALL,
    "normalizer": ALL,
    "lse": {"lse", "dq", "dk", "dv"},
    "output": {"out"},  # `exact` saves the unrounded O for δ
    "probs_bwd": {"dv"},
    "dp": {"dq", "dk"},
    "ds": {"dq", "dk"},
    "tile_grads": {"dq", "dk", "dv"},
    "grads": {"dq", "dk", "dv"},
}

# Choices that are no rounding of their own: (with it, without it, what it reaches).
ROUNDED_OUTPUT = EXACT.replace(output="bfloat16", saved_output="same")
CHOICES: dict[str, tuple[Numerics, Numerics, set[str]]] = {
    "saved_output=same": (ROUNDED_OUTPUT, EXACT.replace(output="bfloat16"), {"dq", "dk"}),
    "saved_output=float32": (EXACT.replace(output="bfloat16"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "saved_output=auxiliary": (
        EXACT.replace(probs="bfloat16", saved_output="auxiliary"),
        EXACT.replace(probs="bfloat16"),
        {"dq", "dk"},
    ),
    "delta=do_o_storage": (
        ROUNDED_OUTPUT.replace(delta="do_o_storage"),
        ROUNDED_OUTPUT,
        {"dq", "dk"},
    ),
    "delta=normalized": (ROUNDED_OUTPUT.replace(delta="normalized"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "delta=dp_p": (ROUNDED_OUTPUT.replace(delta="dp_p"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "row_sum=rounded": (
        EXACT.replace(probs="bfloat16", row_sum="rounded"),
        EXACT.replace(probs="bfloat16"),
        ALL,
    ),
    "normalize_probs=True": (
        EXACT.replace(probs="bfloat16", normalize_probs=True),
        EXACT.replace(probs="bfloat16"),
        FORWARD,
    ),
}


def serves(implementation: str, what: str) -> bool:
    """Whether the point does anything there: one step never rescales, tiles never normalise."""
    return (implementation, what) not in {
        ("dense", "rescale"),
        ("tiled_odd", "normalize_probs=True"),
    }


POINTS_OF_IMPLEMENTATIONS = [
    (i, point) for i in IMPLEMENTATIONS for point in POINTS if serves(i, point)
]
CHOICES_OF_IMPLEMENTATIONS = [
    (i, choice) for i in IMPLEMENTATIONS for choice in CHOICES if serves(i, choice)
]


def closer(result: harness.Arrays, on: harness.Arrays, off: harness.Arrays) -> set[str]:
    """The results that the point reaches; asserts that each lies at `on`, not at `off`.

    A result near `on` differs from it by float32 noise and by the few roundings that this noise
    tips over: a quarter of the distance between the two leaves room for both.
    """
    reached = distances(result, on, off)
    for name, distance in reached.items():
        assert distance < 0.25, f"{name}: {distance} from on, in units of that between on and off"
    return set(reached)


def distances(result: harness.Arrays, on: harness.Arrays, off: harness.Arrays) -> dict[str, float]:
    """Distance from `on` over that between `on` and `off`, of the results that differ in them."""
    reached = {}
    for name, with_point in on.items():
        gap = np.linalg.norm(_finite(with_point) - _finite(off[name]))
        if gap > 1e-5 * np.linalg.norm(_finite(off[name])):
            distance = np.linalg.norm(_finite(result[name]) - _finite(with_point))
            reached[name] = float(distance / gap)
    return reached


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)


def plain_results(implementation: str, numerics_: Numerics) -> harness.Arrays:
    how = harness.IMPLEMENTATIONS[implementation]
    return harness.run_plain(CASE, harness.inputs(CASE), how.numerics(numerics_))


def check_rounding(implementation: str, point: str, fmt: str) -> None:
    chosen = EXACT.replace(**{point: fmt})
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    on, off = plain_results(implementation, chosen), plain_results(implementation, EXACT)
    assert closer(harness.run(how, CASE, arrays, chosen), on, off) == ROUNDINGS[point]


@pytest.mark.parametrize(("implementation", "point"), POINTS_OF_IMPLEMENTATIONS)
def test_rounding_is_there(implementation: str, point: str) -> None:
    check_rounding(implementation, point, "bfloat16")


@pytest.mark.parametrize("fmt", ["float16", "float8_e4m3fn", "float8_e5m2", "bf16_m3"])
def test_rounding_to_other_formats_is_there(fmt: str) -> None:
    check_rounding("tiled_odd", "probs", fmt)


@pytest.mark.parametrize(("implementation", "choice"), CHOICES_OF_IMPLEMENTATIONS)
def test_choice_is_there_and_its_absence_is_noticed(implementation: str, choice: str) -> None:
    chosen, otherwise, reached = CHOICES[choice]
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    on, off = plain_results(implementation, chosen), plain_results(implementation, otherwise)
    assert closer(harness.run(how, CASE, arrays, chosen), on, off) == reached
    with pytest.raises(AssertionError, match="between on and off"):
        closer(harness.run(how, CASE, arrays, otherwise), on, off)


@pytest.fixture
def eager() -> Iterator[None]:
    """Runs every operation by itself, so that a patched function is not hidden by a trace cache."""
    with jax.disable_jit():
        yield


def eager_result(implementation: str, numerics_: Numerics) -> harness.Arrays:
    how = harness.IMPLEMENTATIONS[implementation]
    call = harness.Call(how, numerics_, StandardMax(), None, CASE.is_causal)
    operands = harness.call_arrays(CASE, harness.inputs(CASE))
    return harness.as_float32(call.forward_and_backward(*operands, jax.random.key(0)))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("implementation", "point"), POINTS_OF_IMPLEMENTATIONS)
def test_mutant_that_skips_a_rounding_is_noticed(
    implementation: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = EXACT.replace(**{point: "bfloat16"})
    on, off = plain_results(implementation, chosen), plain_results(implementation, EXACT)
    round_point = steps.round_point

    def skipping(x: jax.Array, name: str, *rest: Any) -> jax.Array:
        return x if name == point else round_point(x, name, *rest)

    monkeypatch.setattr(steps, "round_point", skipping)
    mutant = eager_result(implementation, chosen)
    assert closer(mutant, off, on) == ROUNDINGS[point]  # it lies where the point is off
    with pytest.raises(AssertionError, match="between on and off"):
        closer(mutant, on, off)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("mode", ["stochastic", "error_positive"])
@pytest.mark.parametrize("point", POINTS)
def test_other_modes_perturb_as_much_as_rounding_but_otherwise(point: str, mode: str) -> None:
    result = eager_result("tiled_odd", EXACT.replace(**{point: f"bfloat16:{mode}"}))
    on = plain_results("tiled_odd", EXACT.replace(**{point: "bfloat16"}))
    off = plain_results("tiled_odd", EXACT)
    for name in ROUNDINGS[point]:
        gap, moved, apart = (
            np.linalg.norm(_finite(x) - _finite(y))
            for x, y in (
                (on[name], off[name]),
                (result[name], off[name]),
                (result[name], on[name]),
            )
        )
        # Stochastic rounding errs by √2 times as much in RMS; a fixed sign adds up in sums of
        # twenty terms, where signs that vary partly cancel.
        assert 0.3 * gap < moved < 20**0.5 * 2 * gap, name
        assert apart > 0.3 * gap, name
