"""What the kernels of both devices have in common, interpreted: presets, rules, bits, tiles, vmap.

Cases are in `test_attention.py`, numerics points in `test_kernel_points.py`, refusals in
`test_refusals.py`. `test_gpu_device.py` and `test_tpu_device.py` test the compiled kernels.
"""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import slow_among
from harness import KERNELS, LONG, Case
from kernel_calls import (
    CAUSAL,
    PRESETS,
    REPEATED,
    RULES,
    check_accuracy,
    kernel_call,
    run,
    run_plain,
)
from points import KERNEL_POINTS, closer

from lowprec_attn import numerics
from lowprec_attn.arithmetic.request import Extras
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import EXACT
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


# Presets that differ from another preset only in what δ reads.
OTHER_DELTA = dict.fromkeys(
    (
        *("float32_output", "auxiliary_output", "delta_dp_p", "normalized_delta"),
        *("corrected_after_cast", "halves_output"),
    ),
    "flash",
) | {"flash": "float32_output"}


PRESETS_OF_KERNELS = [
    (kernels, preset)
    for kernels in KERNELS
    for preset in PRESETS
    if kernels == "gpu" or "matched" not in preset
]
# Every choice occurs in one of these presets, except where another test has it. `exact` runs the
# cases of test_attention.py, and random bits have a test below. test_kernel_points.py and
# test_cap_sinks_values.py have `matched` and an auxiliary O on the GPU, and test_tpu_kernels.py has
# `published_eager` and the corrections of δ on the TPU.
FAST_PRESETS = [
    *(("gpu", name) for name in ("published_eager", "published_as_compiled", "delta_dp_p")),
    *(("gpu", name) for name in ("normalized_delta", "corrected_after_cast")),
    *(("tpu", name) for name in ("published_as_compiled", "delta_dp_p")),
    *(("tpu", name) for name in ("auxiliary_output", "halves_output")),
]


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "preset_of",
    slow_among(PRESETS_OF_KERNELS, set(PRESETS_OF_KERNELS) - set(FAST_PRESETS)),
    ids="-".join,
)
def test_presets_are_as_accurate_as_plain(preset_of: tuple[str, str]) -> None:
    kernels, preset = preset_of
    case = REPEATED[kernels]
    watched = harness.strict(kernels).block_sizes
    result = check_accuracy(case, kernel_call(kernels, case, PRESETS[preset], sizes=watched))
    if preset in OTHER_DELTA:
        plain = (
            run_plain(case, kernel_call(kernels, case, PRESETS[name]))
            for name in (preset, OTHER_DELTA[preset])
        )
        assert closer(result, *plain) == {"dq", "dk"}


OTHER_RULES = [name for name in RULES if name != "standard"]
RULES_OF_PRESETS = [(*of, rule) for of in PRESETS_OF_KERNELS for rule in OTHER_RULES]


# Rules act in the forward pass, so they are tried with that of `flash` and with that of the public
# code. The next test has the lazy rule, in a case where it differs from the standard rule. On the
# TPU, test_tpu_kernels.py has the bits of each rule; test_gpu_steps.py has others on the GPU.
FAST_RULES = [
    *(("gpu", "flash", rule) for rule in OTHER_RULES if rule != "lazy_max"),
    ("gpu", "published", "published"),
]


@pytest.mark.parametrize(
    "rule_of",
    slow_among(RULES_OF_PRESETS, [x for x in RULES_OF_PRESETS if x not in FAST_RULES]),
    ids="-".join,
)
def test_presets_with_other_rules_are_as_accurate_as_plain(rule_of: tuple[str, str, str]) -> None:
    kernels, preset, rule = rule_of
    case = REPEATED[kernels]
    backward = kernels == "gpu" and preset == "published"
    call = kernel_call(kernels, case, PRESETS[preset], RULES[rule], backward=backward)
    result = check_accuracy(case, call)
    if preset in ("exact", "stochastic_output") or "matched" in preset:
        return  # O ignores the rule, or is stochastic and not `plain` to the bit
    if rule == "lazy_max":
        return  # no maximum of this case grows in a later step; the next test has some
    standard = kernel_call(kernels, case, PRESETS[preset])
    plain = ({name: run_plain(case, how)[name] for name in result} for how in (call, standard))
    assert "out" in closer(result, *plain)  # P̄ is rounded against the maximum that the rule chose


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_lazy_maximum_stays_where_it_grows_by_little(kernels: str) -> None:
    case = {
        "gpu": dataclasses.replace(CAUSAL, query_lengths=(20, 19), key_lengths=(20, 18)),
        "tpu": dataclasses.replace(harness.LONG, query_lengths=(140,), key_lengths=(190,)),
    }[kernels]
    calls = [
        kernel_call(kernels, case, PRESETS["flash"], RULES[rule], backward=False)
        for rule in ("lazy_max", "standard")
    ]
    result = check_accuracy(case, calls[0])
    lazy, standard = ({x: run_plain(case, call)[x] for x in result} for call in calls)
    assert "out" in closer(result, lazy, standard)


WINDOWED = {
    "gpu": dataclasses.replace(harness.CASES["causal_window"], values="repeated_maxima"),
    "tpu": dataclasses.replace(
        harness.LONG_CASES["tiles_causal_window"], batch=1, query_lengths=None, is_causal=False
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_steps_outside_the_window_do_not_exist(kernels: str) -> None:
    """Otherwise the published rule would move m there, and the step would round Ō once more."""
    case = WINDOWED[kernels]
    call = kernel_call(kernels, case, numerics.PUBLISHED_EAGER, RULES["published"], backward=False)
    check_accuracy(case, call)


# A case, the tiles of `tiled`, and the share of roundings that another order of a sum may tip. On
# the TPU's longer rows, with every point rounded, a tipped rounding tips others.
RANDOM = {
    "gpu": (
        dataclasses.replace(CAUSAL, heads=4, kv_heads=2, value_size=20),
        tiled.BlockSizes(query=5, kv_bwd=9),
        0.05,
    ),
    "tpu": (
        dataclasses.replace(LONG, batch=2, heads=2, kv_heads=1, is_causal=False),
        tiled.BlockSizes(query=128, kv_bwd=128),
        0.15,
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_random_bits_are_those_of_tiled(kernels: str) -> None:
    case, tiles, share = RANDOM[kernels]
    chosen = EXACT.replace(**dict.fromkeys(KERNEL_POINTS, "bfloat16:stochastic"))
    ours = run(case, kernel_call(kernels, case, chosen))
    theirs = run(case, kernel_call(kernels, case, chosen, sizes=tiles, implementation=tiled))
    for name, x in theirs.items():
        assert harness.share_of_other_roundings(ours[name], x) < share, name


# Until it is rescaled, Ō is a sum of bfloat16 numbers that has more bits than they have.
ROUNDED_WHEN_RESCALED = EXACT.replace(probs="bfloat16", row_sum="rounded", rescale="bfloat16")
# One tile of two steps, the second of which does not exist for the first rows.
TPU_TALL = BlockSizes(
    forward=Tile(query=256, kv=256),
    key_gradients=Tile(query=256, kv=128),
    query_gradients=Tile(query=128, kv=256),
    interpret=True,
)
TALL: dict[str, tuple[Case, Any, str, Any]] = {
    "gpu": (REPEATED["gpu"], numerics.PUBLISHED, "published", harness.GPU_TALL),
    "tpu": (
        dataclasses.replace(REPEATED["tpu"], values="exact_sums"),
        ROUNDED_WHEN_RESCALED,
        "standard",
        TPU_TALL,
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_tiles_do_not_change_the_arithmetic(kernels: str) -> None:
    case, chosen, rule, tall = TALL[kernels]
    a, b = (
        run(case, kernel_call(kernels, case, chosen, RULES[rule], **sizes))
        for sizes in ({}, {"sizes": tall})
    )
    harness.check_same(b, a, max(case.rows, case.keys))


@pytest.mark.parametrize(
    ("kernels", "head_size"), [("gpu", 24), ("tpu", 16)], ids=["gpu, between powers of two", "tpu"]
)
def test_vmap_with_its_own_lengths_and_segments(kernels: str, head_size: int) -> None:
    case = Case(
        batch=3, heads=1, kv_heads=1, head_size=head_size, key_lengths=(20, 0, 7), segments=True
    )
    call = kernel_call(kernels, case, EXACT, backward=False)
    arrays = {name: jnp.asarray(x)[:, None] for name, x in harness.inputs(case).items()}

    def mapped_call(x: dict[str, Any], lengths: jax.Array) -> dict[str, jax.Array]:
        segments = (x[name] for name in ("query_segments", "key_segments"))
        return call(x, Extras(None, None, None, lengths, None, None, *segments))

    mapped = jax.vmap(mapped_call)(arrays, jnp.array(case.key_lengths, jnp.int32)[:, None])
    expected = harness.oracle(case, harness.inputs(case))
    for name, x in mapped.items():
        assert harness.error(np.asarray(x)[:, 0], expected[name]) < 1e-5, name
