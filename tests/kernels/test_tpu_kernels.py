"""What only the TPU kernels do, interpreted: the bits of `tiled`, long steps, races.

In the interpreter memory that was never written is NaN, a read out of bounds raises, and a race is
reported.
"""

import dataclasses
import functools
from typing import Any

import harness
import jax
import numpy as np
import pytest
from harness import LONG, LONG_CASES, STRICT, Case
from kernel_calls import (
    REPEATED,
    RULES,
    Call,
    check_accuracy,
    compiled,
    kernel_call,
    run,
    run_plain,
)
from points import closer

from lowprec_attn import numerics
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import EXACT, Numerics
from pallas_kernels.tpu import forward, problem
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

pytestmark = pytest.mark.usefixtures("strict_promotion", "no_races")

TPU_TILES = harness.strict("tpu").block_sizes
call_of = functools.partial(kernel_call, "tpu", sizes=TPU_TILES)


# `tiled` takes the same sums in the same order. Most rows tie, the scores of the first rows are all
# negative, and the steps of two thirds of the keys lie above the diagonal.
SAME_ORDER = dataclasses.replace(
    LONG, rows=128, keys=384, dtype="bfloat16", values="repeated_maxima"
)
TILED = tiled.BlockSizes(query=128, kv_bwd=128)


def check_bits_of_tiled(case: Case, call: Call) -> None:
    theirs = dataclasses.replace(
        call,
        spec=dataclasses.replace(call.spec, block_sizes=TILED),
        implementation=tiled,
    )
    ours = run(case, call)
    for name, x in run(case, theirs).items():
        if name in ("out", "lse"):
            np.testing.assert_array_equal(ours[name], x, err_msg=name)
        else:  # a transposed product may be summed in another order
            assert harness.share_of_other_roundings(ours[name], x) < 1e-3, name


@pytest.mark.parametrize(
    ("rule", "is_causal"), [*((rule, True) for rule in RULES), ("published", False)]
)
def test_published_arithmetic_has_the_bits_of_tiled(rule: str, is_causal: bool) -> None:
    """Every sum is rounded at every step, in the order of `tiled`."""
    case = dataclasses.replace(SAME_ORDER, is_causal=is_causal)
    backward = rule == "published" and is_causal  # only the forward pass depends on rules and steps
    call = call_of(case, numerics.PUBLISHED_EAGER, RULES[rule], backward=backward)
    check_bits_of_tiled(case, call)


# Four tiles of keys, the last one partial. The sums of a step are exact in any order.
STEPS = dataclasses.replace(
    LONG,
    rows=300,
    keys=500,
    heads=1,
    kv_heads=1,
    dtype="bfloat16",
    query_lengths=(290,),
    key_lengths=(490,),
    values="exact_sums",
)
TALL_STEPS = BlockSizes(
    forward=Tile(query=256, kv=512),
    key_gradients=Tile(query=256, kv=128),
    query_gradients=Tile(query=128, kv=256),
    interpret=STRICT,
)


@pytest.mark.parametrize(("rule", "kv_block"), [("published", 256), ("dynamic_max", "all")])
def test_a_step_of_several_tiles_is_one_step(rule: str, kv_block: Any) -> None:
    """Ties, m, and the roundings once a step belong to the step, whatever its tiles."""
    chosen = numerics.PUBLISHED_EAGER.replace(row_sum="rounded")
    in_tiles, in_one = (
        run(
            STEPS,
            call_of(STEPS, chosen, RULES[rule], kv_block=kv_block, sizes=sizes, backward=False),
        )
        for sizes in (TPU_TILES, TALL_STEPS)
    )
    for name, x in in_one.items():
        np.testing.assert_array_equal(in_tiles[name], x, err_msg=name)


@pytest.mark.parametrize("kv_block", [256, 300])
def test_presets_in_long_steps_are_as_accurate_as_plain(kv_block: int) -> None:
    """A step larger than the number of keys, which is no multiple of the lanes, takes all keys."""
    chosen = numerics.PUBLISHED if kv_block == 256 else numerics.AUXILIARY_OUTPUT
    case = dataclasses.replace(REPEATED["tpu"], keys=384 if kv_block == 256 else 256)
    call = call_of(case, chosen, RULES["dynamic_max"], kv_block=kv_block, backward=False)
    check_accuracy(case, call)


def test_tile_gradients_of_several_tiles_and_of_parts_of_one() -> None:
    """Products of 256 keys and queries are rounded once, in tiles of 128, 256 and 512."""
    case = dataclasses.replace(STEPS, rows=400, heads=2, kv_heads=1, values="normal")
    chosen = EXACT.replace(tile_grads="bfloat16", saved_output="same", delta="normalized")
    small = dataclasses.replace(TPU_TILES, forward=Tile(query=128, kv=256))
    wide = Tile(query=512, kv=512)
    large = dataclasses.replace(small, key_gradients=wide, query_gradients=wide, interpret=True)
    on, off = (run_plain(case, call_of(case, chosen, kv_block=step)) for step in (256, 128))
    for sizes in (small, large):
        result = run(case, call_of(case, chosen, kv_block=256, sizes=sizes))
        assert closer(result, on, off) == {"dq", "dk", "dv"}


# The interpreter that watches memory takes twice as long; the test above has it for one of them.
@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [(numerics.NORMALIZED_DELTA, harness.TPU_TILES), (numerics.CORRECTED_AFTER_CAST, TPU_TILES)],
    ids=["normalized", "after_cast"],
)
def test_row_sums_of_ds_with_groups_of_heads_and_rows_without_keys(
    chosen: Numerics, sizes: BlockSizes
) -> None:
    case = dataclasses.replace(
        LONG_CASES["tiles_gqa_lengths"], rows=130, heads=2, kv_heads=1, key_lengths=(200, 0)
    )
    call = call_of(case, chosen, sizes=sizes)
    on, off = (run_plain(case, how) for how in (call, call_of(case, numerics.FLASH)))
    assert closer(check_accuracy(case, call), on, off) == {"dq", "dk"}


def test_on_two_cores_and_a_race_there_is_noticed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores share the parallel axes; the axis of a sum must not be one of them."""
    cores = dataclasses.replace(STRICT, num_cores_or_threads=2)
    case = dataclasses.replace(LONG, rows=128, heads=1, kv_heads=1, is_causal=False)
    call = call_of(case, EXACT, sizes=dataclasses.replace(TPU_TILES, interpret=cores))
    check_accuracy(case, call)
    assert "RACE DETECTED" not in capfd.readouterr().out
    build = problem.call

    def careless(body: Any, p: Any, grid: problem.Grid, out: Any) -> Any:
        return build(body, p, grid._replace(parallel=len(grid.sizes)), out)

    monkeypatch.setattr(forward, "call", careless)
    compiled.cache_clear()
    try:
        run(case, dataclasses.replace(call, backward=False))
        found = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises this on a race
        found = str(error)
    compiled.cache_clear()
    assert "RACE DETECTED" in found
