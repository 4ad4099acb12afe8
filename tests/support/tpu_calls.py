"""The TPU kernels in Pallas' interpreter, on the harness's cases and some of several tiles.

Memory that was never written is NaN there, a read out of bounds raises, and a race is reported.
"""

import dataclasses
from typing import Any

import harness
from harness import Case
from jax.experimental.pallas import tpu as pltpu
from kernel_calls import Call, call_of, factor_of, run, run_plain

from lowprec_attn.numerics import Numerics
from pallas_kernels.tpu import attention as tpu
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
TILE = Tile(query=128, kv=128)
INTERPRETED = BlockSizes(forward=TILE, key_gradients=TILE, query_gradients=TILE, interpret=STRICT)

# The harness's cases in few tiles, and some that take several tiles of rows and of keys.
LONG = Case(batch=1, rows=150, keys=200, head_size=32, is_causal=True)
CASES = {name: case for name, case in harness.CASES.items() if not (case.mask or case.bias)} | {
    "tiles": LONG,
    "tiles_full": dataclasses.replace(LONG, is_causal=False, scale=0.3),
    "tiles_gqa_lengths": dataclasses.replace(
        LONG, batch=2, heads=4, query_lengths=(150, 40), key_lengths=(200, 131)
    ),
    "tiles_head_192": dataclasses.replace(LONG, heads=1, kv_heads=1, head_size=192),
}
CASES = {name: case for name, case in CASES.items() if case.dtype != "float16"}
REPEATED = dataclasses.replace(
    LONG, rows=200, keys=256, query_lengths=(170,), key_lengths=(250,), values="repeated_maxima"
)


def tpu_call(case: Case, chosen: Numerics, *rule: Any, **options: Any) -> Call:
    """A call in steps of 128 keys."""
    options = {"sizes": INTERPRETED, "kv_block": 128, "implementation": tpu} | options
    return call_of(case, chosen, *rule, **options)


def check_accuracy(case: Case, call: Call) -> harness.Arrays:
    """The result of the call, found to be as accurate as the same arithmetic in NumPy."""
    result, arrays = run(case, call), harness.inputs(case)
    plain, oracle = run_plain(case, call), harness.oracle(case, arrays)
    noise = harness.score_noise(case, arrays)
    plain, oracle = ({name: x[name] for name in result} for x in (plain, oracle))
    harness.check(result, plain, oracle, factor_of(call.spec.numerics), noise)
    return result
