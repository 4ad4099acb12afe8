"""Which results each point reaches, and how to tell from them that it rounds."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import harness
import numpy as np

from lowprec_attn.numerics import EXACT, MATCHED, PLAIN_POINTS, POINTS, PRESETS, Numerics

KERNEL_POINTS = tuple(point for point in POINTS if point not in PLAIN_POINTS)

# One program tests several points: each is looked for with the others on. Points that one line of
# code might confuse are in different groups. So are the two roundings of l, after every step and at
# the end, which have the same effect.
KERNEL_GROUPS = (
    ("shift", "pv"),
    ("probs", "rescale"),
    ("accumulator", "normalizer"),
    ("stats", "output"),
    ("scores", "lse", "dp", "tile_grads"),
    ("value", "output_bwd", "probs_bwd", "ds"),
    ("delta_value", "grads"),
)
GROUPS = (*KERNEL_GROUPS, PLAIN_POINTS)
assert sorted(itertools.chain(*GROUPS)) == sorted(POINTS)

# The results that each point reaches when it is the only one. O reaches dS through δ.
ALL = {"out", "lse", "dq", "dk", "dv"}
FORWARD = {"out", "dq", "dk"}
ROUNDINGS: dict[str, set[str]] = {
    "query": ALL,
    "key": ALL,
    "do": {"dq", "dk", "dv"},
    "scores": ALL,
    "shift": ALL,
    "probs": FORWARD,
    "value": FORWARD,
    "pv": FORWARD,
    "rescale": FORWARD,
    "accumulator": FORWARD,
    "stats": ALL,
    "normalizer": ALL,
    "lse": {"lse", "dq", "dk", "dv"},
    "output": {"out"},  # `exact` saves the unrounded O for δ
    "output_bwd": {"dq", "dk"},
    "delta_value": {"dq", "dk"},
    "probs_bwd": {"dv"},
    "dp": {"dq", "dk"},
    "ds": {"dq", "dk"},
    "tile_grads": {"dq", "dk", "dv"},
    "grads": {"dq", "dk", "dv"},
}

# Choices that are not roundings of one point: (with the choice, without it, the results it
# reaches).
ROUNDED_OUTPUT = EXACT.replace(output="bfloat16", saved_output="same")
CHOICES: dict[str, tuple[Numerics, Numerics, set[str]]] = {
    "saved_output=same": (ROUNDED_OUTPUT, EXACT.replace(output="bfloat16"), {"dq", "dk"}),
    "saved_output=float32": (EXACT.replace(output="bfloat16"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "saved_output=auxiliary": (
        EXACT.replace(probs="bfloat16", saved_output="auxiliary"),
        EXACT.replace(probs="bfloat16"),
        {"dq", "dk"},
    ),
    "saved_output=halves": (
        ROUNDED_OUTPUT.replace(saved_output="halves"),
        ROUNDED_OUTPUT,
        {"dq", "dk"},
    ),
    # The lower half has 8 bits, so the sum holds less than float32.
    "saved_output=halves, coarse": (
        EXACT.replace(output="bf16_m1", saved_output="halves"),
        EXACT.replace(output="bf16_m1"),
        {"dq", "dk"},
    ),
    "delta=do_o_storage": (
        ROUNDED_OUTPUT.replace(delta="do_o_storage"),
        ROUNDED_OUTPUT,
        {"dq", "dk"},
    ),
    "delta=normalized": (ROUNDED_OUTPUT.replace(delta="normalized"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "delta=after_cast": (
        ROUNDED_OUTPUT.replace(delta="after_cast", ds="bfloat16", probs_bwd="bfloat16"),
        ROUNDED_OUTPUT.replace(ds="bfloat16", probs_bwd="bfloat16"),
        {"dq", "dk"},
    ),
    "delta=dp_p": (ROUNDED_OUTPUT.replace(delta="dp_p"), ROUNDED_OUTPUT, {"dq", "dk"}),
    "mean_key=subtracted": (
        ROUNDED_OUTPUT.replace(ds="bfloat16", mean_key="subtracted"),
        ROUNDED_OUTPUT.replace(ds="bfloat16"),
        {"dq"},
    ),
    "mean_key=subtracted, normalized": (
        ROUNDED_OUTPUT.replace(ds="bfloat16", delta="normalized", mean_key="subtracted"),
        ROUNDED_OUTPUT.replace(ds="bfloat16", delta="normalized"),
        {"dq"},
    ),
    "divisor=first_unrounded": (
        EXACT.replace(normalizer="bfloat16", divisor="first_unrounded"),
        EXACT.replace(normalizer="bfloat16"),
        FORWARD,
    ),
    "row_sum=rounded": (
        EXACT.replace(probs="bfloat16", row_sum="rounded"),
        EXACT.replace(probs="bfloat16"),
        ALL,
    ),
    "exponent=whole_max": (
        EXACT.replace(probs="bfloat16", exponent="whole_max"),
        EXACT.replace(probs="bfloat16", exponent="shift_first"),
        FORWARD,
    ),
    "recomputed_probs=rounded": (
        EXACT.replace(probs="bfloat16", recomputed_probs="rounded"),
        EXACT.replace(probs="bfloat16"),
        {"dq", "dk", "dv"},
    ),
    "divided_in_dv=do": (
        MATCHED.replace(divided_in_dv="do"),
        MATCHED,
        {"dv"},
    ),
    "normalize_probs=True": (
        EXACT.replace(probs="bfloat16", normalize_probs=True),
        EXACT.replace(probs="bfloat16"),
        FORWARD,
    ),
}


# The same choices in few programs: each is looked for with the others on. It is named by what
# stands in its place without it, and the results that it reaches follow.
Together = tuple[Numerics, dict[tuple[str, str], set[str]]]
TOGETHER: dict[str, Together] = {
    "do, do_o_storage, subtracted": (
        MATCHED.replace(
            divided_in_dv="do", delta="do_o_storage", saved_output="same", mean_key="subtracted"
        ),
        {
            ("divided_in_dv", "probs"): {"dv"},
            ("delta", "do_o"): {"dq", "dk"},
            ("row_sum", "unrounded"): ALL,
            ("mean_key", "kept"): {"dq"},
        },
    ),
    "first_unrounded, auxiliary": (
        EXACT.replace(
            probs="bfloat16",
            normalizer="bfloat16",
            divisor="first_unrounded",
            output="bfloat16",
            saved_output="auxiliary",
        ),
        {("divisor", "rounded"): FORWARD, ("saved_output", "same"): {"dq", "dk"}},
    ),
    "recomputed, halves": (
        ROUNDED_OUTPUT.replace(probs="bfloat16", recomputed_probs="rounded", saved_output="halves"),
        {
            ("recomputed_probs", "unrounded"): {"dq", "dk", "dv"},
            ("saved_output", "same"): {"dq", "dk"},
        },
    ),
    "normalized, subtracted": (
        ROUNDED_OUTPUT.replace(ds="bfloat16", delta="normalized", mean_key="subtracted"),
        {("delta", "do_o"): {"dq", "dk"}, ("mean_key", "kept"): {"dq"}},
    ),
    "after_cast": (
        ROUNDED_OUTPUT.replace(ds="bfloat16", probs_bwd="bfloat16", delta="after_cast"),
        {("delta", "do_o"): {"dq", "dk"}},
    ),
    "dp_p": (ROUNDED_OUTPUT.replace(delta="dp_p"), {("delta", "do_o"): {"dq", "dk"}}),
    "do_o_storage, row_sum": (
        ROUNDED_OUTPUT.replace(probs="bfloat16", row_sum="rounded", delta="do_o_storage"),
        {("delta", "do_o"): {"dq", "dk"}, ("row_sum", "unrounded"): ALL},
    ),
    # The lower half has 8 bits, so the sum holds less than float32.
    "halves, coarse": (
        EXACT.replace(output="bf16_m1", saved_output="halves"),
        {("saved_output", "float32"): {"dq", "dk"}},
    ),
    "float32, whole_max": (
        EXACT.replace(output="bfloat16", probs="bfloat16", exponent="whole_max"),
        {("saved_output", "same"): {"dq", "dk"}, ("exponent", "shift_first"): FORWARD},
    ),
}


def check_together(
    name: str, result: harness.Arrays, plain: Callable[[Numerics], harness.Arrays]
) -> None:
    """Checks that each choice is in the result; `plain` computes the same in NumPy."""
    chosen, choices = TOGETHER[name]
    on = plain(chosen)
    for (field, other), reached in choices.items():
        off = plain(chosen.replace(**{field: other}))
        assert closer(result, on, off) == reached, field


def with_points(*points: str) -> Numerics:
    """`exact` with these points in bfloat16."""
    return EXACT.replace(**dict.fromkeys(points, "bfloat16"))


def closer(result: harness.Arrays, on: harness.Arrays, off: harness.Arrays) -> set[str]:
    """The results that the point reaches, each of which must lie near `on`, away from `off`.

    A result near `on` differs from it by float32 noise and by the few roundings that the noise
    changes. A quarter of the distance between `on` and `off` leaves room for both.
    """
    reached = distances(result, on, off)
    for name, distance in reached.items():
        assert distance < 0.25, f"{name}: {distance} from on, in units of that between on and off"
    return set(reached)


def distances(result: harness.Arrays, on: harness.Arrays, off: harness.Arrays) -> dict[str, float]:
    """The distance from `on` over that between `on` and `off`, where these two differ."""
    reached = {}
    for name, with_point in on.items():
        gap = np.linalg.norm(finite(with_point) - finite(off[name]))
        if gap > 1e-5 * np.linalg.norm(finite(off[name])):
            distance = np.linalg.norm(finite(result[name]) - finite(with_point))
            reached[name] = float(distance / gap)
    return reached


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)


def presets_with_every_choice(names: Sequence[str]) -> list[str]:
    """A small set of presets, found greedily, that together make every choice of the given presets.

    Tests that must meet every arithmetic use these. Each format at each point, and each exponent,
    δ, saved O and row sum, occurs in one of them.
    """
    choices = {
        name: {
            (field.name, str(getattr(PRESETS[name], field.name)))
            for field in dataclasses.fields(Numerics)
            if field.name != "kv_block"
        }
        for name in names
    }
    missing, chosen = set().union(*choices.values()), []
    while missing:
        chosen.append(max(names, key=lambda name: len(choices[name] & missing)))
        missing -= choices[chosen[-1]]
    return chosen
