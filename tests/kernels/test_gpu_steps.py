"""Steps of several tiles in the GPU kernels, interpreted on any machine.

A step first finds the row maximum over all its tiles, and then forms the products. What a step
computes therefore does not depend on its tiles.
"""

import dataclasses
from typing import Any

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import (
    PRESETS,
    RULES,
    call_of,
    compiled,
    operands_of,
    run,
    run_plain,
)

from lowprec_attn import numerics
from lowprec_attn.arithmetic.request import Request
from lowprec_attn.numerics import KvBlock, Numerics
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.block_sizes import BlockSizes, Tile

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# Most rows tie. Ties lie in one tile or in two, in one step or in two. Lengths cut both.
CASE = harness.Case(
    rows=80,
    keys=80,
    is_causal=True,
    query_lengths=(80, 33),
    key_lengths=(80, 51),
    values="small_integers",
)
# With scores of few bits and bfloat16 P̄, the forward pass rounds no sum, in any order.
EXACT_SUMS = dataclasses.replace(CASE, scale=0.125)
ONE_TILE = Tile(query=16, kv=64, stages=1)
WHOLE = BlockSizes(
    forward=ONE_TILE, key_gradients=ONE_TILE, query_gradients=ONE_TILE, interpret=True
)


def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes steps of 64 keys out of tiles of 16 keys."""
    monkeypatch.setattr(gpu, "_ONE_TILE", (16,))


def forward_of(chosen: Numerics, rule: str, sizes: Any = harness.GPU_TILES) -> harness.Arrays:
    """O and lse of a fresh trace, with integers for v."""
    call = call_of(EXACT_SUMS, chosen, RULES[rule], sizes, kv_block=64, backward=False)
    arrays, extras = operands_of(EXACT_SUMS)
    return harness.as_float32(
        compiled.__wrapped__(call)(arrays | {"v": jnp.rint(arrays["v"])}, extras)
    )


@pytest.mark.parametrize("rule", ["published", "dynamic_max"])
def test_tiles_of_a_step_do_not_change_a_bit(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = PRESETS["published_eager"].replace(row_sum="rounded")
    whole = forward_of(chosen, rule, WHOLE)
    split(monkeypatch)
    for name, x in forward_of(chosen, rule).items():
        np.testing.assert_array_equal(x, whole[name], err_msg=name)


def test_ties_in_different_tiles_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that counted ties tile by tile would leave m where the standard rule has it."""
    chosen = PRESETS["published"]
    split(monkeypatch)
    across, standard = (forward_of(chosen, rule)["out"] for rule in ("dynamic_max", "standard"))
    assert np.mean(across != standard) > 0.1


@pytest.mark.parametrize(
    ("preset", "rule", "kv_block"),
    [
        ("flash", "dynamic_max", 32),
        ("published", "standard", "all"),
        ("published_eager", "dynamic_max", 48),
        ("normalized_delta", "standard", 32),
    ],
)
def test_long_steps_are_as_accurate_as_plain(preset: str, rule: str, kv_block: KvBlock) -> None:
    case = dataclasses.replace(CASE, values="repeated_maxima", heads=4)
    backward = preset in ("published", "normalized_delta") and rule == "standard"
    call = call_of(case, PRESETS[preset], RULES[rule], kv_block=kv_block, backward=backward)
    result = run(case, call)
    plain, oracle = run_plain(case, call), harness.oracle(case, harness.inputs(case))
    plain, oracle = ({name: x[name] for name in result} for x in (plain, oracle))
    harness.check(result, plain, oracle)


@pytest.mark.parametrize("keys", [64, 80, 90])
def test_the_keys_of_a_last_step_count(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it holds only whole tiles of 16 keys, none of which needs a mask."""
    split(monkeypatch)
    case = harness.Case(batch=1, rows=24, keys=keys)
    call = call_of(case, PRESETS["published"], kv_block=64, backward=False)
    result = harness.as_float32(compiled.__wrapped__(call)(*operands_of(case)))
    plain, oracle = run_plain(case, call), harness.oracle(case, harness.inputs(case))
    harness.check(result, *({name: x[name] for name in result} for x in (plain, oracle)))


def test_a_step_is_arithmetic() -> None:
    """P̄V rounded once per 16 keys differs from P̄V rounded once per 64 keys."""
    chosen = PRESETS["published"]
    once, often = (
        run(CASE, call_of(CASE, chosen, kv_block=step, backward=False))["out"] for step in (64, 16)
    )
    assert np.mean(once != often) > 0.05


def test_keys_per_step_tells_the_step() -> None:
    case = dataclasses.replace(CASE, query_lengths=None, key_lengths=None)
    call = call_of(case, numerics.FLASH, kv_block="all")
    shape = (case.batch, case.keys, case.heads, case.head_size)
    request = Request(
        spec=call.spec, q_shape=shape, kv_shape=shape, dtype=np.dtype("float32"), platform="cpu"
    )
    assert gpu.keys_per_step(request) == case.keys
