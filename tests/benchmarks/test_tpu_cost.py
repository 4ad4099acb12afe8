"""The cost of a call, computed from the schedules of its kernels without a compiler."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.tpu import cost
from benchmarks.tpu.aot import Call, Result
from benchmarks.tpu.cost import Visits
from benchmarks.tpu.schedules import Block, Schedule
from pallas_kernels.tpu.block_sizes import Tile


@pytest.mark.parametrize("tile", [Tile(query=128, kv=256), Tile(query=384, kv=128)])
@pytest.mark.parametrize("length", [512, 1000])
def test_visits_are_those_of_the_causal_triangle(length: int, tile: Tile) -> None:
    rows, keys = (np.arange(-(-length // size)) for size in (tile.query, tile.kv))
    first, last = rows[:, None] * tile.query, (rows[:, None] + 1) * tile.query - 1
    full = keys * tile.kv + tile.kv - 1 <= first
    cut = (keys * tile.kv <= last) & ~full
    for kernel, owners in (("forward", len(rows)), ("dq", len(rows)), ("dkv", len(keys))):
        expected = Visits((full.sum(), cut.sum()), owners, full.size)
        assert Visits.of(length, tile, kernel) == expected


def test_steps_of_a_tile_are_counted_by_their_block_of_code() -> None:
    """T = 600 in tiles of 256 × 384: the diagonal cuts steps 0, 1; 2, 3; and 4 of 128 keys."""
    visits = Visits.of(600, Tile(query=256, kv=384), "forward", 128)
    first, second, third = (3, 2), (2, 2), (1, 1)  # steps 0 and 3; 1 and 4; 2
    assert visits == Visits(first + second + third, 3, 6)


def schedule(body: int, cut: int | None) -> Schedule:
    """2 bundles per program, 30 per sum, a body, and a body for cut tiles if there is one."""
    bodies = [Block(body, 8, True)] + ([] if cut is None else [Block(cut, 8, True)])
    return Schedule((Block(2, 0, False), Block(30, 0, True), *bodies), Counter(), 2**20)


def test_a_call_costs_its_bundles_times_the_visits_of_every_head() -> None:
    call = Call(generation="v5e", batch=3, length=1024, heads=2, kv_heads=2)
    schedules = {
        "jvp_attention_forward_.1": schedule(100, 110),
        "transpose_jvp_attention_query_gradients__.1": schedule(200, 220),
        "transpose_jvp_attention_key_gradients__.1": schedule(300, None),
    }
    # T = 1024 in tiles of 512: one tile is full, two are cut, and one program does nothing.
    expected = {"forward": 100 + 2 * 110, "dq": 200 + 2 * 220, "dkv": 3 * 300}
    expected = {name: 6 * (n + 2 * 30 + 4 * 2) for name, n in expected.items()}
    assert cost.cycles(call, schedules) == expected
    record = cost.record_of(call, "gpt2", Result(schedules, None, 1.0))
    assert record["cycles"]["total"] == sum(expected.values())
    peer = record | {"kernel": "splash", "preset": None}
    refused = cost.record_of(call, "gpt2", Result({}, "ValueError: too large\nmore", 1.0))
    table = list(cost.lines([peer, record, refused]))
    assert "1.000" in table[-2]
    assert table[-1].endswith("ValueError: too large")


def test_a_kernel_that_nobody_knows_is_no_silent_zero() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'mystery'"):
        cost.kernel_of("mystery")
