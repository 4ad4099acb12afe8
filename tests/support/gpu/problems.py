"""The problems for the compiled kernels on a device, and the errors that are allowed."""

import dataclasses
import functools

import harness
import jax.numpy as jnp
from harness import Case
from kernel_calls import CASES, COMPILED, RULES, Call, call_of

from lowprec_attn.numerics import KvBlock, Numerics

# Each shape spans several default tiles. The values of the last ones are hard.
LONG = Case(batch=1, rows=1024, keys=1024, head_size=64, dtype="bfloat16", is_causal=True)
LARGE = {
    "grouped_1024": dataclasses.replace(LONG, batch=2, heads=4, kv_heads=2),
    "grouped_2048_head_128": dataclasses.replace(
        LONG, rows=2048, keys=2048, kv_heads=1, head_size=128
    ),
    "long_4096": dataclasses.replace(LONG, rows=4096, keys=4096, heads=1, kv_heads=1),
    "full_1024_head_256": dataclasses.replace(LONG, head_size=256, kv_heads=1, is_causal=False),
    "off_tile_lengths": dataclasses.replace(
        LONG,
        batch=3,
        rows=1000,
        keys=1531,
        query_lengths=(1000, 17, 640),
        key_lengths=(1531, 400, 0),
    ),
    "window_2048": dataclasses.replace(LONG, rows=2048, keys=2048, window=(300, 0)),
    "off_tile_window": dataclasses.replace(
        LONG, rows=1000, keys=1531, is_causal=False, window=(200, 90)
    ),
    "segments_2048": dataclasses.replace(LONG, batch=2, rows=2048, keys=2048, segments=True),
    "off_tile_mask": dataclasses.replace(
        LONG, rows=1000, keys=1000, heads=4, kv_heads=2, is_causal=False, mask="random"
    ),
    "float16_1024_head_128": dataclasses.replace(LONG, head_size=128, dtype="float16"),
    "float32_1024": dataclasses.replace(LONG, dtype="float32"),
    "head_80_1024": dataclasses.replace(LONG, head_size=80),
    "repeated_maxima_2048": dataclasses.replace(
        LONG, rows=2048, keys=2048, values="repeated_maxima"
    ),
    "one_sign_values_2048": dataclasses.replace(
        LONG, rows=2048, keys=2048, values="one_sign_values"
    ),
    "dominant_key_1024": dataclasses.replace(LONG, values="dominant_key"),
    "large_positive_scores_1024": dataclasses.replace(LONG, values="large_positive_scores"),
    "large_negative_scores_1024": dataclasses.replace(LONG, values="large_negative_scores"),
}
# The problems whose q, k and v fit into one array.
PACKED = {
    "long_4096": LARGE["long_4096"],
    "head_80_1024": LARGE["head_80_1024"],
    "off_tile_1000": dataclasses.replace(
        LONG, batch=2, rows=1000, keys=1000, query_lengths=(1000, 640), key_lengths=(400, 1000)
    ),
    "float32_1024": LARGE["float32_1024"],
}
# Presets and rules are crossed on two problems: float32 of the harness, and 16 bits with default
# tiles.
CROSSED = {
    "both_lengths_repeated_maxima": CASES["both_lengths_repeated_maxima"],
    "grouped_lengths_repeated_maxima": Case(
        rows=200,
        keys=200,
        heads=4,
        head_size=64,
        dtype="bfloat16",
        is_causal=True,
        query_lengths=(200, 77),
        key_lengths=(150, 200),
        values="repeated_maxima",
    ),
}
# Steps of several tiles: ties within a step, a cut last step, all keys, head sizes 128 and 80.
LONG_STEPS: dict[str, KvBlock] = {
    "repeated_maxima_2048": 512,
    "off_tile_lengths": 512,
    "grouped_2048_head_128": 1024,
    "head_80_1024": "all",
    "window_2048": 512,
    "grouped_lengths_repeated_maxima": 96,
    "both_lengths_repeated_maxima": 32,
}
# Most rows tie in most steps, for every layout of scores that the default tiles produce.
TIES = {
    f"ties_head_{head_size}_{dtype}": dataclasses.replace(
        LONG, rows=300, keys=300, head_size=head_size, dtype=dtype, values="small_integers"
    )
    for head_size, dtype in (
        (32, "bfloat16"),
        (64, "bfloat16"),
        (64, "float16"),
        (64, "float32"),
        (80, "bfloat16"),
        (128, "bfloat16"),
        (128, "float16"),
        (256, "bfloat16"),
    )
}
PROBLEMS = CASES | LARGE | CROSSED | TIES


@functools.cache
def oracle(case: str) -> harness.Arrays:
    return harness.oracle(PROBLEMS[case], harness.inputs(PROBLEMS[case]))


@functools.cache
def noise(case: str) -> harness.Arrays:
    """The effect of an error of one ulp in every score, plus half an ulp of the stored gradients.

    The largest entry of a gradient may belong to one dominant key alone. Its sum may then be stored
    as the neighbour of the value that `plain` stores.
    """
    problem, exact = PROBLEMS[case], oracle(case)
    of_scores = harness.score_noise(problem, harness.inputs(problem))
    half_ulp = float(jnp.finfo(problem.dtype).eps) / 2
    stored = {name: half_ulp * harness.largest(exact[name]) for name in ("dq", "dk", "dv")}
    return {name: of_scores[name] + stored.get(name, 0.0) for name in exact}


def device_call(case: str, chosen: Numerics, rule: str, kv_block: KvBlock | None = None) -> Call:
    """A call with small tiles for the cases of the harness, and default tiles for larger ones.

    kv_block: None for a step of one tile.
    """
    problem = PROBLEMS[case]
    if case in CASES:
        return call_of(problem, chosen, RULES[rule], COMPILED, kv_block=kv_block or 16)
    kv_block = kv_block or (64 if problem.head_size <= 128 else 16)
    return call_of(problem, chosen, RULES[rule], None, kv_block=kv_block)


def describe(case: Case) -> str:
    """The problem in words, for example `B2 T1024 S1024 N4 K2 H64 bfloat16 causal`."""
    sizes = zip(
        "BTSNKH",
        (case.batch, case.rows, case.keys, case.heads, case.kv_heads, case.head_size),
        strict=True,
    )
    words = [*(f"{axis}{size}" for axis, size in sizes), case.dtype]
    seen = {
        "causal": case.is_causal,
        f"window {case.window}": case.window is not None,
        "segments": case.segments,
        f"mask {case.mask}": case.mask is not None,
    }
    return " ".join([*words, *(what for what, is_so in seen.items() if is_so)])
