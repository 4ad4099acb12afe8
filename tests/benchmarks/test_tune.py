"""Tuning: the tiles that are tried, what is timed once, refusals, and inputs of kernels."""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.targets import H200, lowered, mesh_of
from harness import Case

from benchmarks.attention.records import read
from benchmarks.attention.timing import Results
from benchmarks.shapes import SHAPES, Shape
from benchmarks.tune import __main__ as command
from benchmarks.tune import hopper
from benchmarks.tune.sweep import IMPLEMENTATIONS, KERNELS, Call, differing, sweep
from lowprec_attn.errors import RunError
from pallas_kernels.gpu.hopper import tuning
from pallas_kernels.gpu.hopper.attention import is_available
from pallas_kernels.gpu.hopper.block_sizes import BackwardTile, BlockSizes, ForwardTile, Tile

needs_mosaic = pytest.mark.skipif(not is_available(), reason="needs JAX 0.11.2")

SQUARE = Case(
    batch=1,
    rows=64,
    keys=64,
    heads=1,
    kv_heads=1,
    head_size=64,
    dtype="bfloat16",
    is_causal=True,
)
NARROW = BackwardTile(warpgroups=1, step=64, stages=1, owned_stages=1)
HOPPER_TILES = BlockSizes(
    forward=ForwardTile(warpgroups=1, step=64, stages=1, owned_stages=1),
    query_gradients=NARROW,
    key_gradients=NARROW,
    interpret=True,
)


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for head_size in (64, 128, 256):
        monkeypatch.setitem(SHAPES, f"tiny{head_size}", Shape(1, 64, 1, head_size))


def call(
    preset: str = "flash",
    row_max: str = "standard",
    *,
    shape: str = "tiny64",
    implementation: str = "hopper",
    unordered: bool = False,
) -> Call:
    return Call(
        implementation=implementation,
        shape=shape,
        preset=preset,
        row_max=row_max,
        unordered=unordered,
    )


def abstract_inputs(of: Call) -> tuple[Any, Results]:
    """The table's tiles, with the shapes and dtypes of the kernels' inputs."""
    qkv = of.problem.abstract_inputs()
    sizes = of.module.table(qkv[0], of.spec)
    return sizes, jax.eval_shape(partial(of.module.inputs, spec=of.spec, sizes=sizes), *qkv)


@pytest.mark.parametrize("shape", ["tiny64", "tiny128", "long64", "long128"])
@pytest.mark.parametrize("preset", hopper.PRESETS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_tiles_are_tried_once_and_the_tables_is_among_them(
    name: str, preset: str, shape: str
) -> None:
    asked, head_size = call(preset, shape=shape, implementation=name), SHAPES[shape].head_size
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        sizes = asked.module.table(asked.problem.abstract_inputs()[0], asked.spec)
    for kernel in KERNELS:
        found = list(asked.module.tiles(kernel, head_size, asked.spec, asked.module.STAGES))
        assert len(found) == len(set(found)) > 1
        assert getattr(sizes, kernel) in found


@pytest.mark.parametrize("preset", ["flash", "float32_output", "normalized_delta"])
def test_tiles_of_head_size_256(preset: str) -> None:
    """Two warpgroups share 64 keys, and v may have fewer stages than k."""
    of = call(preset, shape="long256")
    sizes = of.module.table(of.problem.abstract_inputs()[0], of.spec)
    for kernel in KERNELS:
        found = list(of.module.tiles(kernel, 256, of.spec, of.module.STAGES))
        assert len(found) == len(set(found)) > 1
        assert getattr(sizes, kernel) in found
        two_sums = kernel == "key_gradients" or (kernel, preset) == (KERNELS[1], "normalized_delta")
        if kernel != "forward":
            assert {tile.cooperative for tile in found} == {two_sums}
        assert {tile.warpgroups for tile in found} == {2}
        assert {tile.step for tile in found} == {64}


@pytest.mark.parametrize("row_max", ["standard", "dynamic_max"])
def test_tiles_of_long_steps(row_max: str) -> None:
    of = call("published", row_max, shape="gpt2")
    sizes = of.module.table(of.problem.abstract_inputs()[0], of.spec)
    for kernel in KERNELS:
        found = list(of.module.tiles(kernel, 64, of.spec, of.module.STAGES))
        assert len(found) == len(set(found)) > 1
        assert getattr(sizes, kernel) in found
        if kernel == "forward":
            assert all(tile.step % tile.owned == 0 and not tile.early_wait for tile in found)
            assert {tile.halved for tile in found} == {False, True}
        else:
            assert not any(tile.overlap_steps for tile in found)
        assert hopper.sees(kernel, of.spec) != hopper.sees(kernel, call().spec)


RECORDS = Path(__file__).parents[2] / "results" / "hopper"
ROWS = [
    pytest.param(kernel, row, id=f"{kernel} {row['when']}")
    for kernel, rows in tuning.table().items()
    for row in rows
    if "record" in row
]


@pytest.mark.parametrize(("kernel", "row"), ROWS)
def test_tiles_of_the_table_were_timed_where_it_says(kernel: str, row: dict[str, Any]) -> None:
    """Also by the earlier names of the fields of a tile."""
    tile, head_size = hopper.TILES[kernel](**row["tile"]), row["when"]["head_size"]
    sizes = {name: shape.head_size for name, shape in SHAPES.items()} | {"short128": 128}
    timed = [
        record
        for record in read(RECORDS / row["record"])
        if record.get("kernel") == kernel and sizes[record["shape"]] == head_size
    ]
    if ".ndjson" in row["record"]:  # the script is not kept and wrote no fields
        assert timed
        return
    assert any(hopper.tile_of(x) == tile and "seconds" in x for x in timed)


def test_one_stage_is_tried_without_what_takes_two() -> None:
    for kernel in KERNELS:
        found = list(hopper.tiles(kernel, 64, call().spec, [1]))
        assert found
        if kernel != "forward":
            assert not any(tile.held or tile.overlap_steps for tile in found)


def test_tiles_without_a_kernel_are_named() -> None:
    with pytest.raises(RunError, match="long256: unordered does not fit head size 256"):
        call(shape="long256", unordered=True).check()


def test_tests_for_ties_are_tried_where_ties_count() -> None:
    standard, dynamic = call(), call(row_max="dynamic_max")
    for of, tests in ((standard, {True}), (dynamic, {True, False})):
        found = list(of.module.tiles("forward", 64, of.spec, of.module.STAGES))
        assert {tile.tests_ties for tile in found} == tests


def test_an_earlier_wait_and_orders_of_tiles_are_tried() -> None:
    of = call()
    for kernel in KERNELS:
        found = list(of.module.tiles(kernel, 64, of.spec, of.module.STAGES))
        assert {tile.longest_first for tile in found} == {False, True}
        if kernel == "forward":
            assert {tile.early_wait for tile in found} == {False, True}


@pytest.mark.parametrize(("shape", "steps"), [("tiny64", {64, 128}), ("tiny128", {64})])
def test_tiles_that_leave_each_warpgroup_a_block_of_dq(shape: str, steps: set[int]) -> None:
    of = call(shape=shape, unordered=True)
    sizes = of.module.table(of.problem.abstract_inputs()[0], of.spec)
    head_size = SHAPES[shape].head_size
    found = list(of.module.tiles("key_gradients", head_size, of.spec, of.module.STAGES))
    assert sizes.key_gradients in found
    assert {tile.step for tile in found} == steps
    assert {tile.warpgroups for tile in found} == {2}


def test_a_kernel_is_timed_again_only_where_it_sees_a_difference() -> None:
    calls = [call(preset) for preset in hopper.PRESETS]
    plan = differing([*calls, call("flash", "dynamic_max")], KERNELS)
    assert {(of.preset, of.row_max): kernels for of, kernels in plan} == {
        ("flash", "standard"): list(KERNELS),
        ("float32_output", "standard"): ["forward", "query_gradients"],
        ("normalized_delta", "standard"): list(KERNELS),
        ("auxiliary_output", "standard"): ["forward"],
        ("matched", "standard"): list(KERNELS),
        ("corrected_after_cast", "standard"): ["query_gradients", "key_gradients"],
        ("flash", "dynamic_max"): ["forward"],
    }


@needs_mosaic
@pytest.mark.parametrize(
    ("kernel", "one", "other"),
    [
        ("forward", "normalized_delta", call("corrected_after_cast")),
        ("query_gradients", "flash", call("auxiliary_output", "dynamic_max")),
        ("key_gradients", "flash", call("float32_output", "dynamic_max")),
    ],
)
def test_what_a_kernel_does_not_see_is_not_in_its_program(
    kernel: str, one: str, other: Call
) -> None:
    sizes, arrays = abstract_inputs(call(one))

    def program(of: Call) -> str:
        return str(jax.make_jaxpr(hopper.function(kernel, of.spec, sizes))(*arrays))

    assert hopper.sees(kernel, other.spec) == hopper.sees(kernel, call(one).spec)
    assert program(other) == program(call(one))
    assert kernel in program(call(one))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpu", harness.GPU_TILES),
        pytest.param("hopper", HOPPER_TILES, marks=needs_mosaic),
        pytest.param(
            "hopper",
            dataclasses.replace(
                HOPPER_TILES,
                key_gradients=dataclasses.replace(NARROW, warpgroups=2, stages=2),
                unordered=True,
            ),
            marks=needs_mosaic,
        ),
    ],
    ids=["gpu", "hopper", "hopper, unordered"],
)
def test_kernels_get_what_they_take(name: str, sizes: Any) -> None:
    """dK, dV and an unordered dQ, which need the forward kernel's results and δ."""
    module, spec = IMPLEMENTATIONS[name], call().spec
    arrays = harness.inputs(SQUARE)
    arrays["dlse"][:] = 0
    operands = module.inputs(*(jnp.asarray(arrays[x]) for x in ("q", "k", "v", "do")), spec, sizes)
    found = module.function("key_gradients", spec, sizes)(*operands)
    expected = harness.oracle(SQUARE, arrays)
    names = ("dk", "dv", "dq") if getattr(sizes, "unordered", False) else ("dk", "dv")
    for gradient, exact in zip(found, (expected[x] for x in names), strict=True):
        error = np.linalg.norm(np.asarray(gradient, np.float64) - exact)
        assert error < 2**-7 * np.linalg.norm(exact)  # a few roundings of half an ulp, 2**-9


@needs_mosaic
@pytest.mark.parametrize("preset", ["matched", "normalized_delta", "corrected_after_cast"])
def test_kernels_of_a_cure_get_what_they_take(preset: str) -> None:
    of = call(preset)
    arrays = harness.inputs(SQUARE)
    arrays["dlse"][:] = 0
    q, k, v, do = (jnp.asarray(arrays[x]) for x in ("q", "k", "v", "do"))
    operands = hopper.inputs(q, k, v, do, of.spec, HOPPER_TILES)
    found = (
        *hopper.function("query_gradients", of.spec, HOPPER_TILES)(*operands)[:1],
        *hopper.function("key_gradients", of.spec, HOPPER_TILES)(*operands),
    )
    expected = harness.oracle(SQUARE, arrays)
    for gradient, exact in zip(found, (expected[x] for x in ("dq", "dk", "dv")), strict=True):
        error = np.linalg.norm(np.asarray(gradient, np.float64) - exact)
        assert error < 2**-7 * np.linalg.norm(exact)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A kernel that returns its input, the identity matrix, after `work` products; or a fault."""

    work: int
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    forward: _Tile = _Tile(100)


def _function(kernel: str, spec: Any, sizes: _Sizes) -> Callable[..., Results]:
    def run(x: jax.Array) -> Results:
        if sizes.forward.fault == "compiler":
            raise ValueError("too much shared memory")
        for _ in range(sizes.forward.work):
            x = x @ x
        return (-x if sizes.forward.fault == "result" else x,)

    return run


FAKE = SimpleNamespace(
    TILES={"forward": _Tile},
    table=lambda q, spec: _Sizes(),
    tiles=lambda *_: (_Tile(1, "compiler"), _Tile(1, "result"), _Tile(1), _Tile(100)),
    inputs=lambda q, k, v, do, spec, sizes: (jnp.eye(32),),
    function=_function,
)


def test_records_have_the_fastest_first_and_why_others_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "fake", FAKE)
    (records,) = sweep(call(implementation="fake"), ["forward"], stages=(1,), rounds=3)
    fast, slow, *refused = records
    assert [(x["work"], x["table"]) for x in (fast, slow)] == [(1, False), (100, True)]
    for record in (fast, slow):
        assert record["seconds"] == pytest.approx(sorted(record["samples"])[1], rel=1e-4)
        assert (record["kind"], record["kernel"]) == ("tile", "forward")
    reasons = {record["fault"]: record["refused"] for record in refused}
    assert reasons["compiler"] == "ValueError: too much shared memory"
    assert reasons["result"].startswith("computes something else: 2")

    heading, first, own = command.table(records, shown=1).splitlines()
    assert heading.split()[-3:] == ["work", "fault", "µs"]
    assert not first.endswith("table")
    assert own.endswith("table")
    assert "refused" in command.table(records, shown=4)


def test_a_field_varies_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "fake", FAKE)
    of = call(implementation="fake")
    (records,) = sweep(of, ["forward"], stages=(1,), rounds=3, vary=["work"])
    assert [(x["work"], x["fault"], x["table"]) for x in records] == [
        (1, "", False),
        (100, "", True),
    ]


def test_a_field_that_tiles_have_not_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", "--vary", "step", "stages"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--vary takes query, kv, warps, stages, got step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("cpu", "error: tiles are timed on a GPU, and JAX finds none here"),
        ("gpu", "error: implementation 'hopper' does not support "),
    ],
)
def test_without_a_hopper_gpu_it_ends_with_one_line(
    backend: str,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(sys, "argv", ["tune", "--implementation", "hopper"])
    assert command.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(error)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "--unordered is of hopper, got --implementation gpu"),
        (
            ["--implementation", "hopper", "--presets", "normalized_delta"],
            "--unordered times a kernel that sees no preset, got ['normalized_delta']",
        ),
    ],
)
def test_what_has_no_sum_without_an_order_is_refused(
    options: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", "--unordered", *options])
    with pytest.raises(SystemExit):
        command.main()
    assert error in capsys.readouterr().err


@needs_mosaic
@pytest.mark.ptx
@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        ("forward", call("auxiliary_output")),
        ("query_gradients", call("float32_output", shape="tiny128")),
        ("key_gradients", call(unordered=True)),
        ("key_gradients", call(shape="tiny128", unordered=True)),
        ("query_gradients", call("float32_output", shape="tiny256")),
        ("query_gradients", call("normalized_delta", shape="tiny256")),
        ("key_gradients", call(shape="tiny256")),
    ],
)
def test_the_tile_with_the_fullest_memory_compiles(kernel: str, of: Call) -> None:
    """Without a GPU, as in test_hopper_ptx.py."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
    head_size, stages = SHAPES[of.shape].head_size, range(1, 9)

    def memory(tile: Tile) -> int:
        return hopper._shared_bytes(kernel, tile, head_size, of.spec)

    fullest = max(hopper.tiles(kernel, head_size, of.spec, stages), key=memory)
    assert memory(fullest) > 200_000
    sizes, arrays = abstract_inputs(of)
    sizes = dataclasses.replace(sizes, **{kernel: fullest})
    lowered(hopper.function(kernel, of.spec, sizes), *arrays, target=H200).compile()
