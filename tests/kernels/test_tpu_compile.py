"""The TPU kernels compiled by the TPU's compiler, for every generation, without a TPU.

This needs libtpu (`pip install -e '.[tpu-compile]'`), but no device. `pytest -m tpu_compile`.
"""

import dataclasses
import functools
import importlib.util
import itertools
import re
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
from points import KERNEL_POINTS

from benchmarks.tpu.aot import TOPOLOGIES, Call, Result, compile_calls
from benchmarks.tpu.schedules import Schedule
from lowprec_attn.arithmetic.request import Request
from lowprec_attn.numerics import PRESETS
from pallas_kernels.tpu.attention import unsupported
from pallas_kernels.tpu.block_sizes import VMEM_LIMIT, block_sizes_of, vmem_bytes

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install -e '.[tpu-compile]'",
    ),
]

FORWARD, KEY, QUERY, DELTA = "forward", "key_gradients", "query_gradients", "delta"
Schedules = dict[str, Schedule]


@functools.cache
def results(calls: tuple[Call, ...]) -> dict[Call, Result]:
    """Compiles all calls in one process, whose start takes as long as some compilations."""
    return dict(zip(calls, compile_calls(calls), strict=True))


def kernels(call: Call, calls: tuple[Call, ...]) -> Schedules:
    """The compiled kernels of a call, by name; `calls` are compiled together with it."""
    result = results(calls)[call]
    assert result.error is None, result.error
    names = "|".join((FORWARD, KEY, QUERY, DELTA))
    found = {}
    for operation, schedule in result.schedules.items():
        match = re.search(rf"attention_({names})_", operation)
        assert match is not None, operation
        found[match[1]] = schedule
    return found


def large(generation: str, **changes: Any) -> Call:
    """A call on arrays too large for XLA to keep whole in VMEM, so that it takes windows."""
    call = Call(generation=generation, **changes)
    return dataclasses.replace(call, batch=2**18 // call.length)


DECLINED = {
    "standard": "normalize_probs",
    "transformer_engine_fp8": "query=float8_e4m3fn",
    "jax_nn": "normalize_probs",
    **dict.fromkeys(
        ("flash_attention_3", "flash_attention_3_fp8", "tokamax"), "exponent=scale_first"
    ),
    **dict.fromkeys(("torch_flash", "jax_pallas"), "exponent=unfused"),
    "matched": "exponent=whole_max",
    "matched_float32_output": "exponent=whole_max",
}
GROUPS = {
    "generations": tuple(
        Call(generation=generation, length=length, row_max=rule)
        for generation in TOPOLOGIES
        for length, rule in ((1024, "dynamic_max"), (32768, "standard"))
    ),
    # Each preset runs on one of two generations in turn: compilers differ by generation, kernels do
    # not.
    "presets": tuple(
        Call(generation=generation, preset=preset)
        for generation, preset in zip(
            itertools.cycle(("v5e", "v6e")), (x for x in PRESETS if x not in DECLINED)
        )
    ),
    "shapes": (
        Call(generation="v5e", length=1000, keys=1100),
        Call(generation="v6e", length=1100, keys=1000),
        Call(generation="v5e", length=1000, has_lengths=True),
        Call(generation="v5e", heads=8, kv_heads=2),
        Call(generation="v5e", length=1000, heads=8, kv_heads=2, has_lengths=True, head_size=80),
        Call(generation="v5e", head_size=32),
        Call(generation="v5e", head_size=128),
        Call(generation="v5e", head_size=256),
        Call(generation="v5e", dtype="float32"),
        Call(generation="v5e", length=1),
        Call(generation="v5e", length=100, keys=1100),
    ),
    "hidden": (
        *(
            Call(generation=generation, length=2048, window=(300, 0), has_segments=True)
            for generation in TOPOLOGIES
        ),
        Call(generation="v5e", length=1000, keys=3000, window=(100, 50), row_max="published"),
        Call(generation="v6e", length=1000, keys=1100, has_segments=True, has_lengths=True),
        *(Call(generation=generation, has_mask=True) for generation in TOPOLOGIES),
        Call(generation="v5e", length=1000, keys=1100, heads=8, has_mask=True, preset="published"),
        large("v5e", preset="exact", has_mask=True, head_size=256),
        large("v5e", preset="exact", has_mask=True, length=8192),
        large("v5e", preset="exact", has_segments=True, window=(2000, 0), head_size=256),
    ),
    # Steps of several tiles: by default because one tile does not fit, or because of the given
    # tile.
    "steps": tuple(
        Call(generation=generation, preset=preset, row_max="published", **changes)
        for generation, preset, changes in (
            ("v5e", "published_eager", {"length": 8192, "points": (("kv_block", "all"),)}),
            ("v6e", "auxiliary_output", {"tile": (256, 256), "points": (("kv_block", 512),)}),
            ("v5e", "published", {"tile": (256, 256), "has_lengths": True}),
            ("v6e", "published", {"tile": (256, 1024), "length": 2048}),
            ("v5e", "flash", {"points": (("kv_block", 4096),), "length": 8192}),
        )
    ),
    # The calls that take most memory; `exact` keeps the most terms of operands.
    "memory": (
        large("v5e", row_max="dynamic_max"),
        large("v5e", preset="published", head_size=128),
        large("v5e", preset="auxiliary_output"),
        large("v4", preset="exact"),
        large("v5e", preset="exact", head_size=256),
        large("v5e", preset="exact", dtype="float32", length=8192),
        large("v5e", preset="exact", dtype="float32", head_size=256),
        large("v5e", preset="exact", tile=(128, 128)),
        large("v5e", preset="exact", tile=(256, 1024)),
        large("v5e", preset="exact", tile=(1024, 256)),
        large("v5e", preset="exact", points=(("delta", "normalized"), ("tile_grads", "bfloat16"))),
        large("v5e", preset="published_eager", tile=(256, 256), row_max="published"),
        large("v5e", preset="published_eager", head_size=256, length=8192),
    ),
}


def label(call: Call) -> str:
    """The fields of a call that differ from their defaults."""
    pairs = ((field, getattr(call, field.name)) for field in dataclasses.fields(Call))
    return "-".join(
        f"{field.name}={value}" if isinstance(value, int) else str(value)
        for field, value in pairs
        if value != field.default and field.name != "batch"
    )


@pytest.mark.parametrize(
    ("group", "call"),
    [
        pytest.param(group, call, id=f"{group}-{label(call)}")
        for group, calls in GROUPS.items()
        for call in calls
    ],
)
def test_kernels_compile_and_take_no_more_memory_than_foretold(group: str, call: Call) -> None:
    schedules = kernels(call, GROUPS[group])
    in_its_own_pass = {DELTA} if call.spec.numerics.delta == "dp_p" else set()
    assert schedules.keys() == {FORWARD, KEY, QUERY} | in_its_own_pass
    for name, schedule in schedules.items():
        kernel = QUERY if name == DELTA else name  # δ has the tile of dQ, and less to keep
        assert schedule.vmem <= memory_bound(call, kernel) <= VMEM_LIMIT, name


def memory_bound(call: Call, kernel: str) -> int:
    """The bytes of VMEM that the kernel may use."""
    given: Any = call.spec.block_sizes
    size, itemsize = call.head_size, jnp.dtype(call.dtype).itemsize
    keys = call.keys or call.length
    masked = {"has_mask": call.has_mask}
    sizes = block_sizes_of(given, call.spec.numerics, call.length, keys, size, itemsize, **masked)
    return vmem_bytes(kernel, getattr(sizes, kernel), size, itemsize, **masked)


@pytest.mark.parametrize(
    "call", [Call(generation="v5e", preset=preset) for preset in DECLINED], ids=label
)
def test_a_preset_that_is_not_served_is_declined_by_name(call: Call) -> None:
    error = results((call,))[call].error
    assert error is not None
    assert error.startswith(f"NotImplementedError: {DECLINED[call.preset]}")


def test_a_tile_that_does_not_fit_is_refused_and_the_alternative_compiles() -> None:
    """All kernels have the same tile here, so several may refuse it, one after another."""
    call = Call(generation="v5e", length=4096, tile=(2048, 2048))
    refused = []
    while reason := refusal(call):
        match = re.match(r"(\w+)=.*\(Tile\(query=(\d+), kv=(\d+)\) fits\)", reason)
        assert match is not None, reason
        refused.append(match[1])
        call = dataclasses.replace(call, tile=(int(match[2]), int(match[3])))
    assert refused[0] == FORWARD
    assert len(refused) == len(set(refused))
    assert kernels(call, (call,)).keys() == {FORWARD, KEY, QUERY}


def refusal(call: Call) -> str | None:
    """Why the kernels do not serve a call; None if they do."""
    shape = (call.batch, call.length, call.heads, call.head_size)
    dtype = jnp.dtype(call.dtype)
    request = Request(spec=call.spec, q_shape=shape, kv_shape=shape, dtype=dtype, platform="tpu")
    return unsupported(request)


# For roundings. With tiles of 128 × 128 and head size 64, each of S, P̄, P, dP, dS, O, the sums and
# the row statistics is 16 float32 registers. The code for a tile exists twice, with and without a
# mask.
_TILE = 2 * 16
# The registers that each kernel rounds, by point.
ROUNDED = {
    "scores": {FORWARD: _TILE, KEY: _TILE, QUERY: _TILE},
    "probs": {FORWARD: _TILE},
    "value": {FORWARD: _TILE, KEY: _TILE, QUERY: _TILE},
    "pv": {FORWARD: _TILE},
    "rescale": {FORWARD: _TILE},
    "accumulator": {FORWARD: _TILE},
    "shift": {FORWARD: 2 * _TILE},  # for P̄ and for α
    "stats": {FORWARD: 2 * _TILE},  # for m and for l
    "normalizer": {FORWARD: 16},
    "lse": {FORWARD: 16},
    "output": {FORWARD: 16},
    "output_bwd": {},  # δ is formed outside the kernels
    "delta_value": {},
    "probs_bwd": {KEY: _TILE},
    "dp": {KEY: _TILE, QUERY: _TILE},
    "ds": {KEY: _TILE, QUERY: _TILE},
    "tile_grads": {KEY: 2 * _TILE, QUERY: _TILE},  # dK, dV; dQ
    "grads": {KEY: 2 * 16, QUERY: 16},
}
# Operands of a product. Unrounded, an operand is three bfloat16 terms, two of which are converted
# back to float32 to be subtracted from the rest. Rounded, it is one term, and none is converted
# back.
OPERANDS = ("probs", "value", "probs_bwd", "ds")


def point_call(generation: str, **points: str) -> Call:
    """`exact` with some points changed. Arrays are float32, so that storing rounds nothing."""
    return Call(
        generation=generation,
        preset="exact",
        points=tuple(points.items()),
        dtype="float32",
        length=256,
        tile=(128, 128),
    )


# The generations whose code is searched: v5e converts one register at a time, v6e two.
NEAREST, STOCHASTIC = "v5e", "v6e"
ROUNDING = (
    point_call(NEAREST),
    *(point_call(NEAREST, **{point: "bfloat16"}) for point in KERNEL_POINTS),
    point_call(NEAREST, probs="bfloat16", row_sum="rounded"),
    *(point_call(STOCHASTIC, **{point: "bfloat16:stochastic"}) for point in KERNEL_POINTS),
)


def returning(schedule: Schedule) -> int:
    """The number of float32 registers that are converted back from bfloat16.

    v5e packs and unpacks each register by itself (`vunpack.c.l`), v6e two at once (`.l` and `.h`).
    """
    return sum(n for name, n in schedule.conversions.items() if name.startswith("vunpack"))


def masked(schedule: Schedule) -> int:
    """The number of float32 registers with cleared lower half, the end of stochastic rounding."""
    return schedule.conversions["vand.u32 4294901760"]


def check_nearest(point: str, schedules: Schedules, unrounded: Schedules) -> None:
    """Checks that kernels with a bfloat16 point have its roundings, compared to kernels without."""
    for kernel, schedule in schedules.items():
        expected = ROUNDED[point].get(kernel, 0) * (-2 if point in OPERANDS else 1)
        assert returning(schedule) - returning(unrounded[kernel]) == expected, kernel
        if expected:
            packed = [x[kernel].conversions["vpack.c.bf16"] for x in (schedules, unrounded)]
            assert (packed[0] - packed[1]) * expected > 0, kernel


def check_stochastic(point: str, schedules: Schedules) -> None:
    """Checks that a stochastic point rounds, and that `exact` has no other such rounding."""
    counts = {kernel: n for kernel, schedule in schedules.items() if (n := masked(schedule))}
    assert counts == ROUNDED[point]


def without_one(schedules: Schedules, kernel: str, instruction: str) -> Schedules:
    """The compiler's result with one register of one kernel left unrounded."""
    fewer = schedules[kernel].conversions - Counter([instruction])
    return schedules | {kernel: dataclasses.replace(schedules[kernel], conversions=fewer)}


@pytest.mark.parametrize("point", KERNEL_POINTS)
def test_rounding_to_nearest_is_there_and_a_dropped_one_is_noticed(point: str) -> None:
    unrounded = kernels(point_call(NEAREST), ROUNDING)
    rounded = kernels(point_call(NEAREST, **{point: "bfloat16"}), ROUNDING)
    check_nearest(point, rounded, unrounded)
    # The check must fail for a kernel that does not round, and for one that misses one rounding.
    for kernel in ROUNDED[point]:
        with pytest.raises(AssertionError):
            check_nearest(point, rounded | {kernel: unrounded[kernel]}, unrounded)
        with pytest.raises(AssertionError):
            check_nearest(point, without_one(rounded, kernel, "vunpack.c.l.bf16"), unrounded)


@pytest.mark.parametrize("point", KERNEL_POINTS)
def test_stochastic_rounding_is_there_and_a_dropped_one_is_noticed(point: str) -> None:
    rounded = kernels(point_call(STOCHASTIC, **{point: "bfloat16:stochastic"}), ROUNDING)
    check_stochastic(point, rounded)
    for kernel in ROUNDED[point]:
        with pytest.raises(AssertionError):
            check_stochastic(point, without_one(rounded, kernel, "vand.u32 4294901760"))


def test_the_row_sum_sees_rounded_probabilities() -> None:
    """P̄ that only a product reads is packed and not converted back; P̄ that is summed is."""
    alone = kernels(point_call(NEAREST, probs="bfloat16"), ROUNDING)
    summed = kernels(point_call(NEAREST, probs="bfloat16", row_sum="rounded"), ROUNDING)
    assert returning(summed[FORWARD]) - returning(alone[FORWARD]) == _TILE
