"""Each point of each implementation rounds, and a mutant without the rounding fails.

`closer` compares a result with two independent NumPy computations, the point on and off.
"""

import functools
from collections.abc import Iterator
from typing import Any

import harness
import jax
import numpy as np
import pytest
from points import (
    CHOICES,
    GROUPS,
    ROUNDINGS,
    TOGETHER,
    check_together,
    closer,
    finite,
    with_points,
)

from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.numerics import EXACT, POINTS, Numerics, StandardMax

pytestmark = pytest.mark.usefixtures("strict_promotion")

CASE = harness.Case(is_causal=True)
IMPLEMENTATIONS = ("dense", "tiled_odd")


def serves(implementation: str, what: str) -> bool:
    """Whether the choice has an effect: one step never rescales, and tiles never normalise."""
    return (implementation, what) not in {
        ("dense", "rescale"),
        ("tiled_odd", "normalize_probs=True"),
    }


POINTS_OF_IMPLEMENTATIONS = [
    (i, point) for i in IMPLEMENTATIONS for point in POINTS if serves(i, point)
]


def plain_results(implementation: str, numerics_: Numerics) -> harness.Arrays:
    how = harness.IMPLEMENTATIONS[implementation]
    return harness.run_plain(CASE, harness.inputs(CASE), how.numerics(numerics_))


def check_rounding(implementation: str, point: str, fmt: str) -> None:
    chosen = EXACT.replace(**{point: fmt})
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    on, off = plain_results(implementation, chosen), plain_results(implementation, EXACT)
    assert closer(harness.run(how, CASE, arrays, chosen), on, off) == ROUNDINGS[point]
    with pytest.raises(AssertionError, match="between on and off"):
        closer(off, on, off)


@pytest.mark.parametrize("group", GROUPS, ids="+".join)
def test_roundings_are_there_and_their_absence_is_noticed(group: tuple[str, ...]) -> None:
    """In tiles; `dense` has the bits of `tiled` in one step (test_attention.py)."""
    how, arrays = harness.IMPLEMENTATIONS["tiled_odd"], harness.inputs(CASE)
    result = harness.run(how, CASE, arrays, with_points(*group))
    on = plain_results("tiled_odd", with_points(*group))
    for point in group:
        off = plain_results("tiled_odd", with_points(*(x for x in group if x != point)))
        assert closer(result, on, off) == ROUNDINGS[point]
        with pytest.raises(AssertionError, match="between on and off"):
            closer(off, on, off)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "point"), POINTS_OF_IMPLEMENTATIONS)
def test_rounding_is_there_in_optimized_code(implementation: str, point: str) -> None:
    check_rounding(implementation, point, "bfloat16")


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "bf16_m3"])
def test_rounding_to_other_formats_is_there(fmt: str) -> None:
    check_rounding("tiled_odd", "probs", fmt)


@pytest.mark.parametrize("name", TOGETHER)
def test_choices_are_there(name: str) -> None:
    how, arrays = harness.IMPLEMENTATIONS["tiled_odd"], harness.inputs(CASE)
    result = harness.run(how, CASE, arrays, TOGETHER[name][0])
    check_together(name, result, functools.partial(plain_results, "tiled_odd"))


@pytest.mark.slow
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if serves("tiled_odd", choice)])
def test_choice_is_there_alone_and_its_absence_is_noticed(choice: str) -> None:
    check_choice("tiled_odd", choice)


def test_probabilities_are_normalized_where_one_step_has_all_keys() -> None:
    check_choice("dense", "normalize_probs=True")


def check_choice(implementation: str, choice: str) -> None:
    chosen, otherwise, reached = CHOICES[choice]
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    on, off = plain_results(implementation, chosen), plain_results(implementation, otherwise)
    assert closer(harness.run(how, CASE, arrays, chosen), on, off) == reached
    with pytest.raises(AssertionError, match="between on and off"):
        closer(off, on, off)


@pytest.fixture
def eager() -> Iterator[None]:
    """Disables `jit`, so that no cached trace hides a patched function."""
    with jax.disable_jit():
        yield


def eager_result(implementation: str, numerics_: Numerics) -> harness.Arrays:
    how = harness.IMPLEMENTATIONS[implementation]
    call = harness.Call(how, numerics_, StandardMax(), None, CASE.is_causal, CASE.window)
    operands = harness.call_arrays(CASE, harness.inputs(CASE))
    return harness.as_float32(call.forward_and_backward(*operands, jax.random.key(0)))


# `closer` fails in the tests above where a rounding is missing; this shows it for each.
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("mutant_of", POINTS_OF_IMPLEMENTATIONS, ids="-".join)
def test_mutant_that_skips_a_rounding_is_noticed(
    mutant_of: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation, point = mutant_of
    chosen = EXACT.replace(**{point: "bfloat16"})
    on, off = plain_results(implementation, chosen), plain_results(implementation, EXACT)
    round_point = Rounder.__call__

    def skipping(self: Rounder, x: jax.Array, name: str, *rest: Any, **options: Any) -> jax.Array:
        return x if name == point else round_point(self, x, name, *rest, **options)

    monkeypatch.setattr(Rounder, "__call__", skipping)
    mutant = eager_result(implementation, chosen)
    assert closer(mutant, off, on) == ROUNDINGS[point]  # as if the point were off
    with pytest.raises(AssertionError, match="between on and off"):
        closer(mutant, on, off)


# Points of both passes, an operand of a product, and an output; one line rounds all of them.
@pytest.mark.parametrize(
    ("point", "mode"),
    [
        *((point, "stochastic") for point in ("scores", "output", "dp")),
        *((point, "error_positive") for point in ("probs", "lse")),
        *(
            pytest.param(point, mode, marks=pytest.mark.slow)
            for point in POINTS
            for mode in ("stochastic", "error_positive")
            if point not in ("scores", "probs", "lse", "output", "dp")
        ),
    ],
)
def test_other_modes_perturb_as_much_as_rounding_but_otherwise(point: str, mode: str) -> None:
    how, chosen = harness.IMPLEMENTATIONS["tiled_odd"], EXACT.replace(**{point: f"bfloat16:{mode}"})
    result = harness.run(how, CASE, harness.inputs(CASE), chosen, key=jax.random.key(0))
    on = plain_results("tiled_odd", EXACT.replace(**{point: "bfloat16"}))
    off = plain_results("tiled_odd", EXACT)
    for name in ROUNDINGS[point]:
        gap, moved, apart = (
            np.linalg.norm(finite(x) - finite(y))
            for x, y in (
                (on[name], off[name]),
                (result[name], off[name]),
                (result[name], on[name]),
            )
        )
        # The RMS error of stochastic rounding is √2 times as large. Errors of one sign add up in
        # sums of twenty terms, where varying signs partly cancel.
        assert 0.3 * gap < moved < 20**0.5 * 2 * gap, name
        assert apart > 0.3 * gap, name
