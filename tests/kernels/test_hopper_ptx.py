"""The Hopper kernels compiled for an H200 on a host without a GPU.

Needs jax-cuda13-plugin, nvidia-cuda-nvcc and nvidia-nvvm; no device. `pytest -m ptx`.
"""

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gpu_targets import H200, lowered

from benchmarks.shapes import SHAPES
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import (
    AUXILIARY_OUTPUT,
    FLASH,
    FLOAT32_OUTPUT,
    NORMALIZED_DELTA,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import block_sizes, default_block_sizes

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
pytest.importorskip("nvidia", reason="needs nvidia-cuda-nvcc and nvidia-nvvm")

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11"),
]

KERNELS = ("forward", "query_gradients", "key_gradients")
# Bytes of registers spilled by the kernels of head sizes 64 and 128 (docs/hopper_kernels.md).
SPILLED = {"forward": (0, 0), "query_gradients": (8, 0), "key_gradients": (8, 56)}


class Code:
    """The PTX of each kernel of both passes, and the bytes that its assembler spilled."""

    def __init__(self, folder: Path) -> None:
        self.ptx, self.reports, self.spilled = {}, {}, {}
        for path in folder.glob("*.ptx"):
            text = path.read_text()
            if found := re.search(r"\.entry attention_(\w+?)_mosaic_gpu", text):
                report = path.with_suffix(".ptxas").read_text()
                self.ptx[found.group(1)], self.reports[found.group(1)] = text, report
                self.spilled[found.group(1)] = int(
                    re.search(r"(\d+) bytes spill stores", report).group(1)  # type: ignore[union-attr]
                )


@functools.cache
def code(
    head_size: int,
    chosen: Numerics = FLASH,
    rule: RowMax = StandardMax(),  # noqa: B008 (frozen)
    unordered: bool = False,
) -> Code:
    sizes = default_block_sizes(head_size, unordered=True) if unordered else None
    spec = Spec(
        numerics=chosen, row_max=rule, scale=head_size**-0.5, is_causal=True, block_sizes=sizes
    )

    def step(*qkv: jax.Array) -> Any:
        results, pullback = jax.vjp(lambda *x: hopper.attention(*x, Extras(), spec), *qkv)
        return results, pullback(results)

    found = compiled(step, (1, 256, 2, head_size))
    assert found.ptx.keys() == set(KERNELS) - ({"query_gradients"} if unordered else set())
    return found


@functools.cache
def forward_code(
    head_size: int,
    chosen: Numerics = FLASH,
    rule: RowMax = StandardMax(),  # noqa: B008 (frozen)
    is_causal: bool = True,
    **tile: Any,
) -> Code:
    """Of the forward kernel alone, with other fields of its tile."""
    spec = Spec(numerics=chosen, row_max=rule, scale=head_size**-0.5, is_causal=is_causal)
    sizes = block_sizes(head_size, spec)
    sizes = dataclasses.replace(sizes, forward=dataclasses.replace(sizes.forward, **tile))
    spec = dataclasses.replace(spec, block_sizes=sizes)
    shape = SHAPES[f"long{head_size}"].qkv
    return compiled(lambda *x: hopper.attention(*x, Extras(), spec), shape)


def compiled(step: Callable[..., Any], shape: tuple[int, ...]) -> Code:
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOSAIC_GPU_DUMP_TO", folder)
        for what in ("PTX", "PTXAS"):
            environment.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
        lowered(step, x, x, x, target=H200).compile()
        return Code(Path(folder))


@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_hardly_a_register_is_spilled(head_size: int) -> None:
    spilled = code(head_size).spilled
    for kernel, bounds in SPILLED.items():
        assert spilled[kernel] <= bounds[hopper.HEAD_SIZES.index(head_size)], kernel


@pytest.mark.parametrize(
    ("chosen", "rule"),
    [
        (FLASH, DynamicMax()),
        (FLOAT32_OUTPUT, StandardMax()),
        (AUXILIARY_OUTPUT, StandardMax()),
        (NORMALIZED_DELTA, StandardMax()),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_other_numerics_and_rules_hardly_spill(
    head_size: int, chosen: Numerics, rule: RowMax
) -> None:
    assert code(head_size, chosen, rule).spilled["forward"] <= 12
    assert "serialized" not in code(head_size, chosen, rule).reports["forward"]
    # Two sums of dQ's size, of 128 features, leave too little.
    most = 192 if chosen.delta == "normalized" and head_size == 128 else 16
    assert code(head_size, chosen, rule).spilled["query_gradients"] <= most


@pytest.mark.parametrize(("head_size", "most"), [(64, 32), (128, 96)])
def test_what_is_spilled_where_dq_is_added_to(head_size: int, most: int) -> None:
    """Most of it outside the walk, and nothing is stored within."""
    found = code(head_size, unordered=True)
    assert found.spilled["key_gradients"] <= most
    assert not re.search(r"C751[0-8]", found.reports["key_gradients"])  # products wait for nothing
    assert "cp.reduce.async.bulk.tensor" in found.ptx["key_gradients"]


@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_operands_are_rounded_once_and_products_are_warpgroups(head_size: int) -> None:
    """Mosaic GPU may contract a rounded product and a sum to one `fma.rn.bf16x2`."""
    for kernel, text in code(head_size).ptx.items():
        assert "fma.rn.bf16" not in text, kernel
        assert re.search(r"cvt\.rn\.bf16x2\.f32", text), kernel
        assert "wgmma.mma_async" in text, kernel
        assert "mma.sync" not in text, kernel


TURNS = {"turns": True}
TALL = {"warpgroups": 3, "turns": True}
DYNAMIC = {"rule": DynamicMax()}
AUXILIARY, FLOAT32 = {"chosen": AUXILIARY_OUTPUT}, {"chosen": FLOAT32_OUTPUT}
TOGETHER = {"longest_first": True, "fresh": True, "soon": 16, "apart": True}


@pytest.mark.parametrize(
    ("head_size", "options"),
    [
        pytest.param(64, {"fresh": True}, id="64, from nothing"),
        pytest.param(64, {"soon": 0}, id="64, waits after the maxima"),
        pytest.param(64, {"apart": True}, id="64, masked steps apart"),
        pytest.param(64, TOGETHER, id="64, together"),
        pytest.param(64, TALL | TOGETHER, id="64, three warpgroups"),
        pytest.param(64, TALL | TOGETHER | DYNAMIC, id="64, three warpgroups, dynamic_max"),
        pytest.param(64, TALL | TOGETHER | {"is_causal": False}, id="64, three, not causal"),
        pytest.param(64, TOGETHER | AUXILIARY, id="64, auxiliary output"),
        pytest.param(128, TOGETHER, id="128, together"),
        pytest.param(128, TURNS | TOGETHER, id="128, turns"),
        pytest.param(128, TURNS | TOGETHER | DYNAMIC, id="128, turns, dynamic_max"),
        pytest.param(128, TURNS | TOGETHER | FLOAT32, id="128, turns, float32 output"),
        pytest.param(128, TOGETHER | AUXILIARY, id="128, auxiliary output"),
    ],
)
def test_options_spill_nothing_and_serialize_nothing(
    head_size: int, options: dict[str, Any]
) -> None:
    found = forward_code(head_size, **options)
    assert found.spilled["forward"] == 0
    assert not re.search(r"C751[0-8]", found.reports["forward"])


@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_scores_may_add_to_nothing(head_size: int) -> None:
    """Instead of to 64 registers of zeros: in the first step and in the loop."""
    fresh, usual = (forward_code(head_size, fresh=on).ptx["forward"] for on in (True, False))
    product = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    # The predicate that lets a product add is true but for the first slice.
    first = [
        re.search(r", (\w+), 1, 1, 0, 0;", line).group(1)  # type: ignore[union-attr]
        for line in fresh.splitlines()
        if product in line and "begins" in line
    ]
    assert first == ["begins"] * 2
    assert "begins" not in usual
    assert fresh.count("wgmma.mma_async") == usual.count("wgmma.mma_async")


@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_masked_steps_apart_are_a_loop_more(head_size: int) -> None:
    """S of the first step, of the loop of those without a mask, of that of the others."""
    for options, steps in (({}, 2), ({"apart": True}, 3)):
        text = forward_code(head_size, **options).ptx["forward"]
        assert text.count("m64n128k16") >= steps * head_size // 16
