"""`published` and `published_eager` against the public code of arXiv 2510.04212.

Three results are compared: what the code computed on a GPU, a NumPy reading of its source
(`test_public_code` compares these two), and the library. docs/who_rounds_what.md draws the
conclusions. `public_code.record` defines when elements differ.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import grid_inputs
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiling import slow_among
from grid_inputs import Head
from public_code.calls import PRESETS, RULES, Call, library
from public_code.reading import COMPILED, EAGER, Reading, Result, Rule, bf16
from public_code.record import SHARE, Run, by_head, difference, reading

from lowprec_attn import numerics
from lowprec_attn.arithmetic.points import Rounder

pytestmark = pytest.mark.usefixtures("strict_promotion")

# The most units by which an element may differ. Every rounding may add one. In eager mode these are
# P̄V, α Ō, α Ō + P̄V and O, and at full length 2 of the 655,360 elements of O differ by more than
# one.
MOST = {"published": 1, "published_eager": 4}


def check_same(result: dict[str, np.ndarray], want: Result, most: float) -> None:
    for name, x in result.items():
        found = difference(x, name, want)
        assert found.share <= SHARE, (name, found.share)
        assert found.most <= most, (name, found.most)


# Scores of four sizes, with and without many ties. Scores with an offset have one sign.
LENGTH = 256
STEP = 128
# The next test runs both presets with the standard maximum, at full length.
CASES: list[tuple[str, Rule]] = [("published", "published"), ("published_eager", "bounded")]


@pytest.mark.parametrize(("preset", "rule"), CASES)
def test_the_library_computes_the_reading(preset: str, rule: Rule) -> None:
    """In tiles; `dense` has the bits of `tiled` in one step (test_attention.py)."""
    chosen, rounds = PRESETS[preset]
    arrays = grid_inputs.inputs(LENGTH, step=STEP)
    inputs = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    result = library(Call("tiled", chosen.replace(kv_block=STEP), RULES[rule]), inputs)
    check_same(result, Reading(rounds, rule, STEP).attend(by_head(arrays)), MOST[preset])


@pytest.mark.parametrize(
    ("preset", "way"), [("published", "compiled"), ("published_eager", "eager")]
)
def test_the_library_computes_the_reading_at_full_length(preset: str, way: str) -> None:
    arrays = grid_inputs.inputs(1024)
    inputs = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    result = library(Call("tiled", PRESETS[preset][0], RULES["standard"]), inputs)
    run = Run(1024, way, "standard")
    check_same(result, reading(run), MOST[preset])
    # The record agrees too, in the rows for which the preset claims it.
    rows = run.kept_rows[run.kept_rows >= grid_inputs.STEP]
    for name, x in result.items():
        on_gpu = run.recorded(name)[:, run.kept_rows >= grid_inputs.STEP]
        found = difference(on_gpu, name, dataclasses.replace(reading(run), **{name: x}), rows)
        assert found.share <= (2 if name == "dk" else 1) * SHARE, (name, found.share)


def test_the_first_rows_are_those_of_the_record_too() -> None:
    """For the standard maximum; `published` differs in a sixth of their O and two fifths of dQ."""
    arrays = grid_inputs.inputs(1024)
    inputs = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    run = Run(1024, "compiled", "standard")
    first = run.kept_rows < grid_inputs.STEP
    rows = run.kept_rows[first]
    for chosen, misses in ((numerics.PUBLISHED_AS_COMPILED, False), (numerics.PUBLISHED, True)):
        result = library(Call("tiled", chosen, RULES["standard"]), inputs)
        shares = {}
        for name, x in result.items():
            want = dataclasses.replace(reading(run), **{name: x})
            shares[name] = difference(run.recorded(name)[:, first], name, want, rows).share
        assert shares["dv"] <= SHARE, shares
        assert shares["dk"] <= 2 * SHARE or misses, shares
        for name in ("out", "dq"):
            assert shares[name] > 0.1 if misses else shares[name] <= SHARE, shares


# The effect of each point on the distance from the reading: a preset without it is told apart.

MUTANT_LENGTH, MUTANT_STEP = 128, 64
MUTANT_HEADS = (Head(3, False), Head(30, False), Head(30, True), Head(150, True))


def points_of(preset: str) -> list[str]:
    """The points at which a preset rounds bfloat16 arrays; `grads` follows from the format of q."""
    chosen = PRESETS[preset][0].replace(grads="bfloat16")
    points = [point for point in numerics.POINTS if not getattr(chosen, point).is_identity]
    # If l is rounded after every step, rounding it at the end changes nothing.
    return [point for point in points if (preset, point) != ("published_eager", "normalizer")]


def float32_call(preset: str, **changes: Any) -> Call:
    """A call for float32 arrays, in which storing rounds nothing in place of a point."""
    chosen = PRESETS[preset][0].replace(
        kv_block=MUTANT_STEP, grads="bfloat16", output="bfloat16", **changes
    )
    return Call("tiled", chosen, RULES["standard"])


def mutant_inputs() -> dict[str, np.ndarray]:
    return grid_inputs.inputs(MUTANT_LENGTH, MUTANT_HEADS, step=MUTANT_STEP)


@functools.cache
def mutant_reading(preset: str) -> Result:
    arrays = by_head(mutant_inputs())
    return Reading(PRESETS[preset][1], "standard", MUTANT_STEP).attend(arrays)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Lets no cached trace hide a patched function, or outlive it."""
    harness.trace_anew()
    yield
    harness.trace_anew()


def largest_share(result: dict[str, np.ndarray], preset: str) -> float:
    want = mutant_reading(preset)
    return max(difference(x, name, want).share for name, x in result.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_without_a_mutation_the_reading_is_met(preset: str) -> None:
    result = library(float32_call(preset), mutant_inputs())
    check_same(result, mutant_reading(preset), MOST[preset])


MUTANTS = [(preset, point) for preset in PRESETS for point in points_of(preset)]
FAST_MUTANTS = [("published", "pv")]


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(
    "mutant_of", slow_among(MUTANTS, [m for m in MUTANTS if m not in FAST_MUTANTS]), ids="-".join
)
def test_a_mutant_without_a_point_is_noticed(
    mutant_of: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, point = mutant_of
    round_point = Rounder.__call__

    def skipping(self: Rounder, x: jax.Array, name: str, *rest: Any, **options: Any) -> jax.Array:
        return x if name == point else round_point(self, x, name, *rest, **options)

    monkeypatch.setattr(Rounder, "__call__", skipping)
    mutant = library(float32_call(preset), mutant_inputs(), "anew")
    assert largest_share(mutant, preset) > SHARE


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("published", {"delta": "do_o_storage"}),
        ("published", {"saved_output": "float32"}),
        ("published", {"row_sum": "rounded"}),
        ("published", {"kv_block": 128}),
        ("published", {"lse": "bfloat16"}),
        ("published_eager", {"delta": "do_o"}),
        ("published_eager", {"lse": "bfloat16"}),
    ],
)
def test_another_choice_is_noticed(preset: str, changes: dict[str, Any]) -> None:
    call = float32_call(preset)
    changed = dataclasses.replace(call, numerics=call.numerics.replace(**changes))
    assert largest_share(library(changed, mutant_inputs(), "quick"), preset) > SHARE


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_told_from_the_other(preset: str) -> None:
    (other,) = set(PRESETS) - {preset}
    assert largest_share(library(float32_call(other), mutant_inputs(), "quick"), preset) > 0.05


# Where the presets differ from the code.


@pytest.mark.parametrize(
    ("head_size", "eager", "compiled"), [(64, 0, 0), (80, 0.25, 1), (128, 0.25, 1), (256, 0, 0)]
)
def test_scores_that_another_scale_would_round_otherwise(
    head_size: int, eager: float, compiled: float
) -> None:
    """The library rounds q kᵀ · scale. The code rounds q kᵀ, and in eager mode the multiple too."""
    rng = np.random.default_rng(0)
    q, k = (bf16(rng.standard_normal((512, head_size)).astype(np.float32)) for _ in range(2))
    products, scale = q @ k.T, np.float32(head_size**-0.5)
    once = bf16(products) * scale
    assert np.mean(bf16(once) != bf16(products * scale)) == pytest.approx(eager, abs=0.03)
    assert np.mean(once != bf16(products * scale)) == pytest.approx(compiled, abs=0.03)


def test_where_the_threshold_of_ties_is_rounded() -> None:
    """From 1/4 to 1/2, the eager code also counts the bfloat16 number just below the maximum."""
    m = np.float32(0.375)
    s = np.array([m, m - 2.0**-9], np.float32)
    assert m - s[1] > 1e-3
    assert (s >= bf16(m - np.float32(1e-3))).sum() == 2
    rule = Reading(COMPILED, "published")
    assert rule._step_maximum(s[None]) == m
    assert Reading(EAGER, "published")._step_maximum(s[None]) == 2 * m
    jax_rule = RULES["published"]
    assert jax_rule(jnp.asarray(s)[None], jnp.full((1, 1), -1e30, jnp.float32)) == m
