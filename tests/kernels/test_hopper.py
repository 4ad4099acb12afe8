"""The Hopper kernels in the interpreter: cases, rules, packed arrays, scheduler, refusals.

The interpreter reports races (those of products with the help of `product_races`) and barriers that
are left half used. It takes P̄, P and dS from shared memory; `test_hopper_device.py` tests that
operands in registers give the same bits.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.product_races import check_products
from gpu.targets import mesh_of
from harness import Case
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_calls import (
    call_of,
    check_accuracy,
    check_rows_without_a_score,
    run,
    run_plain,
)

from benchmarks.shapes import SHAPES
from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import dot_product_attention, tiled
from lowprec_attn.attention.dispatch import UnsupportedError, resolve
from lowprec_attn.numerics import (
    AUXILIARY_OUTPUT,
    CORRECTED_AFTER_CAST,
    FLASH,
    FLOAT32_OUTPUT,
    HALVES_OUTPUT,
    MATCHED,
    MATCHED_FLOAT32_OUTPUT,
    NORMALIZED_DELTA,
    PRESETS,
    PUBLISHED,
    DynamicMax,
    Numerics,
    PublishedMax,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import (
    BackwardTile,
    BlockSizes,
    ForwardTile,
    block_sizes,
    default_block_sizes,
    keeps_auxiliary,
    rounds_products,
)
from pallas_kernels.gpu.hopper.forward.kernel import forward
from pallas_kernels.gpu.hopper.machine.layouts import TILE, load, tiles_of
from pallas_kernels.gpu.hopper.machine.warpgroups import interpreter
from pallas_kernels.gpu.hopper.machine.wgmma import accumulator
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.tile_scheduler import (
    LongestFirstScheduler,
    StaticScheduler,
    WorkTile,
)

pytestmark = pytest.mark.usefixtures("no_races", "products_are_checked")
needs_mosaic = pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2")

SIZES = harness.HOPPER_TILES
# Three query tiles, each with the rows of two warpgroups, the last half empty; heads share keys.
GROUPED = Case(
    batch=1, rows=320, keys=320, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
MORE_KEYS = dataclasses.replace(GROUPED, rows=64, keys=192, kv_heads=2, is_causal=False)
FEW = dataclasses.replace(MORE_KEYS, heads=1, kv_heads=1)
MORE_ROWS = dataclasses.replace(GROUPED, rows=256, keys=192, kv_heads=2)
WIDE = dataclasses.replace(MORE_KEYS, rows=128, heads=1, kv_heads=1, head_size=128, is_causal=True)
TIES = dataclasses.replace(WIDE, head_size=64, values="repeated_maxima")
MATCHED_AND_CORRECTED = MATCHED.replace(delta="after_cast")
WIDEST = dataclasses.replace(GROUPED, rows=192, keys=192, head_size=256)
# Values of another head size than queries and keys.
OF_192 = dataclasses.replace(WIDEST, head_size=192, value_size=128)
OF_128 = dataclasses.replace(OF_192, head_size=128, value_size=64)


@pytest.fixture
def products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper.is_available():
        check_products(monkeypatch)


def call(case: Case, chosen: Numerics = FLASH, rule: RowMax | None = None, **options: Any) -> Any:
    how = {"sizes": SIZES, "kv_block": 64, "implementation": hopper} | options
    return call_of(case, chosen, rule or StandardMax(), **how)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "chosen", "rule"),
    [
        pytest.param(GROUPED, FLASH, StandardMax(), id="causal, grouped heads"),
        pytest.param(MORE_KEYS, FLASH, StandardMax(), id="not causal, more keys"),
        pytest.param(WIDE, FLOAT32_OUTPUT, StandardMax(), id="head 128, scale no power of two"),
        pytest.param(WIDE, NORMALIZED_DELTA, StandardMax(), id="normalized delta, head 128"),
        pytest.param(MORE_KEYS, NORMALIZED_DELTA, StandardMax(), id="normalized delta"),
        pytest.param(FEW, AUXILIARY_OUTPUT, StandardMax(), id="auxiliary output"),
        pytest.param(TIES, FLASH, DynamicMax(), id="ties, dynamic_max"),
        pytest.param(TIES, FLASH, DynamicMax(tolerance=0.1, beta=7), id="near ties"),
        pytest.param(GROUPED, CORRECTED_AFTER_CAST, StandardMax(), id="corrected after the cast"),
        pytest.param(WIDE, CORRECTED_AFTER_CAST, StandardMax(), id="the same, head 128"),
        pytest.param(MORE_KEYS, CORRECTED_AFTER_CAST, StandardMax(), id="the same, more keys"),
        pytest.param(GROUPED, MATCHED, StandardMax(), id="matched, grouped heads"),
        pytest.param(MORE_ROWS, MATCHED, StandardMax(), id="matched, more rows"),
        pytest.param(WIDE, MATCHED, StandardMax(), id="matched, head 128"),
        pytest.param(MORE_KEYS, MATCHED_FLOAT32_OUTPUT, StandardMax(), id="matched, float32 O"),
        pytest.param(TIES, MATCHED, DynamicMax(), id="matched, ties, dynamic_max"),
        pytest.param(FEW, MATCHED_AND_CORRECTED, StandardMax(), id="matched, corrected as well"),
    ],
)
def test_as_accurate_as_plain(case: Case, chosen: Numerics, rule: RowMax) -> None:
    check_accuracy(case, call(case, chosen, rule))


def with_tiles(sizes: BlockSizes, **changes: Any) -> BlockSizes:
    """A copy with other fields of all three tiles."""
    tiles = {
        name: dataclasses.replace(getattr(sizes, name), **changes)
        for name in ("forward", "query_gradients", "key_gradients")
    }
    return dataclasses.replace(sizes, **tiles)


def of_table(case: Case, chosen: Numerics, rule: RowMax, *, long: bool) -> BlockSizes:
    """The table's tiles for this case, interpreted, with few programs."""
    sizes = default_block_sizes(
        case.head_size,
        value_size=case.value_size,
        saves_float32=chosen.saved_dtype == jnp.float32,
        saves_halves=chosen.saved_output == "halves",
        keeps_auxiliary=keeps_auxiliary(chosen),
        sums_keys=chosen.delta in SUMS_ROWS,
        corrects_after_cast=chosen.delta == "after_cast",
        long=long,
        rounds_products=rounds_products(chosen),
        counts_ties=isinstance(rule, DynamicMax),
    )
    return dataclasses.replace(sizes, programs=2, interpret=True)


def published(
    case: Case, rule: RowMax | None = None, *, halved: bool = True, **options: Any
) -> Any:
    sizes = of_table(case, PUBLISHED, rule or StandardMax(), long=False)
    forward = dataclasses.replace(sizes.forward, halved=halved)
    sizes = dataclasses.replace(sizes, forward=forward)
    return call(case, PUBLISHED, rule, **({"sizes": sizes, "kv_block": 128} | options))


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "rule", "kv_block"),
    [
        pytest.param(GROUPED, StandardMax(), 128, id="causal, grouped heads"),
        pytest.param(
            dataclasses.replace(GROUPED, batch=2, heads=1, values="repeated_maxima"),
            *(DynamicMax(), 256),
            id="ties within parts and between them",
        ),
        pytest.param(MORE_KEYS, DynamicMax(), 128, id="not causal, more keys"),
        pytest.param(MORE_ROWS, StandardMax(), 256, id="more rows"),
        pytest.param(
            dataclasses.replace(GROUPED, rows=640, keys=640, heads=1),
            *(StandardMax(), 512),
            id="as published",
        ),
    ],
)
@pytest.mark.parametrize("halved", [False, True], ids=["whole", "halved"])
def test_products_of_long_steps_are_rounded(
    case: Case, rule: RowMax, kv_block: int, halved: bool
) -> None:
    check_accuracy(case, published(case, rule, kv_block=kv_block, halved=halved))


@needs_mosaic
@pytest.mark.parametrize("point", ["scores", "pv", "normalizer", "dp", "tile_grads"])
def test_products_are_rounded_where_published_says(point: str) -> None:
    """Noise rarely tips a rounding. Without the point, most numbers of some array differ."""
    case = dataclasses.replace(GROUPED, heads=1)
    whole = published(case)
    without = dataclasses.replace(
        whole.spec, numerics=whole.spec.numerics.replace(**{point: "float32"})
    )
    result = run(case, whole)
    expected, others = (
        run_plain(case, dataclasses.replace(whole, spec=spec)) for spec in (whole.spec, without)
    )

    def differ(x: dict[str, Any], name: str) -> float:
        return float(np.mean(x[name] != result[name]))

    names = ("out", "dq", "dk", "dv")
    assert max(differ(expected, name) for name in names) < 0.01
    assert max(differ(others, name) for name in names) > 0.1


@needs_mosaic
@pytest.mark.parametrize("halved", [False, True], ids=["whole", "halved"])
@pytest.mark.parametrize("rule", [StandardMax(), DynamicMax()], ids=str)
def test_rows_of_minus_infinity_alone_are_empty_in_long_steps(rule: RowMax, halved: bool) -> None:
    of = published(FEW, rule, halved=halved)
    spec = dataclasses.replace(of.spec, is_causal=True, scale=0.125)
    check_rows_without_a_score(hopper.attention, spec, 64)


@needs_mosaic
@pytest.mark.parametrize("halved", [False, True], ids=["whole", "halved"])
def test_ties_of_long_steps_are_counted_once(halved: bool) -> None:
    """A maximum that returns in a later part is repeated; one that a later part exceeds is not."""
    case = dataclasses.replace(FEW, rows=64, keys=256)
    arrays = harness.inputs(case)
    keys = np.zeros_like(arrays["k"])
    keys[0, [3, 200], 0, 0] = 2  # the largest scores of the even rows, in two parts of 128
    keys[0, [5, 6], 0, 1] = 1  # the largest scores of the odd rows, except for key 130
    keys[0, 130, 0, 1] = 2
    queries = np.zeros_like(arrays["q"])
    queries[0, ::2, 0, 0], queries[0, 1::2, 0, 1] = 4, 4
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (queries, keys, arrays["v"]))
    for rule in (StandardMax(), DynamicMax()):
        spec = published(case, rule, kv_block=256, halved=halved).spec
        out, _ = hopper.attention(q, k, v, Extras(), spec)
        expected, _ = tiled.attention(
            *(q, k, v), Extras(), dataclasses.replace(spec, block_sizes=None)
        )
        np.testing.assert_array_equal(out, expected)
        if rule == StandardMax():
            standard = out
    moved = (np.asarray(out, np.float32) != np.asarray(standard, np.float32)).any(axis=(2, 3))[0]
    assert moved[::2].any() and not moved[1::2].any()


def test_keys_per_step_are_those_of_long_steps() -> None:
    assert hopper.keys_per_step(request(PUBLISHED)) == 512


@needs_mosaic
def test_tiles_that_long_steps_do_not_take_are_refused() -> None:
    with pytest.raises(
        ValueError, match="kv_block=128 needs a step that is a multiple of the tile's"
    ):
        run(FEW, published(FEW, sizes=SIZES))
    whole = of_table(FEW, PUBLISHED, StandardMax(), long=False)
    for kernel, tile, named in (
        (
            "query_gradients",
            BackwardTile(ping_pong=True, overlap_steps=True),
            "needs overlap_steps=False, since",
        ),
        (
            "key_gradients",
            BackwardTile(ping_pong=True, overlap_steps=True),
            "needs overlap_steps=False and cooperative=False",
        ),
        (
            "key_gradients",
            BackwardTile(step=64, cooperative=True),
            "needs overlap_steps=False and cooperative=False",
        ),
    ):
        sizes = dataclasses.replace(whole, **{kernel: tile})
        with pytest.raises(ValueError, match=f"tile_grads=bfloat16 {named}"):
            run(FEW, published(FEW, sizes=sizes))


@needs_mosaic
@pytest.mark.parametrize("rule", [StandardMax(), DynamicMax()], ids=str)
@pytest.mark.parametrize("tests_ties", [False, True])
@pytest.mark.parametrize("chosen", [FLASH, MATCHED, CORRECTED_AFTER_CAST], ids=str)
def test_rows_of_minus_infinity_alone_are_empty(
    rule: RowMax, tests_ties: bool, chosen: Numerics
) -> None:
    sizes = of_table(FEW, chosen, StandardMax(), long=False)
    tile = dataclasses.replace(sizes.forward, tests_ties=tests_ties)
    sizes = dataclasses.replace(sizes, forward=tile)
    spec = Spec(numerics=chosen, row_max=rule, scale=0.125, is_causal=True, block_sizes=sizes)
    check_rows_without_a_score(hopper.attention, spec, 64)


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "keys", "chosen", "rule"),
    [
        (64, 64, FLASH, StandardMax()),
        (64, 192, FLASH, DynamicMax()),
        (192, 192, FLOAT32_OUTPUT, StandardMax()),
        (192, 320, NORMALIZED_DELTA, DynamicMax()),
        (320, 192, FLASH, StandardMax()),
        (320, 320, AUXILIARY_OUTPUT, StandardMax()),
        (576, 576, FLASH, StandardMax()),
        (320, 320, MATCHED, DynamicMax()),
        (192, 320, CORRECTED_AFTER_CAST, StandardMax()),
    ],
    ids=str,
)
def test_tiles_of_long_calls(rows: int, keys: int, chosen: Numerics, rule: RowMax) -> None:
    """The rows of three warpgroups do not fill whole steps; lengths end within tiles or beyond."""
    case = dataclasses.replace(GROUPED, rows=rows, keys=keys)
    long, short = (
        call(case, chosen, rule, sizes=of_table(case, chosen, rule, long=long), kv_block=None)
        for long in (True, False)
    )
    check_accuracy(case, long)
    result, expected = run(case, long), run(case, short)
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
@pytest.mark.parametrize(
    ("chosen", "rule"), [(FLASH, DynamicMax()), (FLOAT32_OUTPUT, StandardMax())], ids=str
)
def test_tiles_of_long_calls_at_head_size_128(chosen: Numerics, rule: RowMax) -> None:
    case = dataclasses.replace(WIDE, rows=192, values="repeated_maxima")
    sizes = of_table(case, chosen, rule, long=True)
    check_accuracy(case, call(case, chosen, rule, sizes=sizes, kv_block=None))


@needs_mosaic
@pytest.mark.parametrize(
    ("changes", "chosen", "rule", "long"),
    [
        pytest.param({}, FLASH, StandardMax(), False, id="causal, grouped heads"),
        pytest.param(
            {"rows": 64, "kv_heads": 2, "is_causal": False},
            *(FLASH, StandardMax(), False),
            id="not causal, more keys",
        ),
        pytest.param(
            {"rows": 320, "values": "repeated_maxima"},
            *(FLOAT32_OUTPUT, DynamicMax(), False),
            id="more rows, ties, float32_output",
        ),
        pytest.param({}, NORMALIZED_DELTA, StandardMax(), False, id="normalized delta"),
        pytest.param({}, MATCHED, StandardMax(), False, id="matched"),
        pytest.param({}, CORRECTED_AFTER_CAST, StandardMax(), False, id="corrected after the cast"),
        pytest.param(
            {"batch": 2, "heads": 1, "scale": 0.05},
            *(FLASH, DynamicMax(), True),
            id="scale no power of two, long",
        ),
    ],
)
def test_head_size_256(changes: dict[str, Any], chosen: Numerics, rule: RowMax, long: bool) -> None:
    """With the table's tiles: lengths end within tiles, and a program has several tiles."""
    case = dataclasses.replace(WIDEST, **changes)
    sizes = of_table(case, chosen, rule, long=long)
    check_accuracy(case, call(case, chosen, rule, sizes=sizes, kv_block=None))


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        pytest.param(OF_192, FLASH, id="192 and 128, causal, grouped heads"),
        pytest.param(
            dataclasses.replace(OF_192, rows=64, keys=128, is_causal=False),
            NORMALIZED_DELTA,
            id="192 and 128, not causal, normalized delta",
        ),
        pytest.param(OF_128, FLASH, id="128 and 64, causal, grouped heads"),
        pytest.param(
            dataclasses.replace(OF_128, rows=64, keys=128, is_causal=False),
            NORMALIZED_DELTA,
            id="128 and 64, not causal, normalized delta",
        ),
    ],
)
def test_values_of_another_head_size(case: Case, chosen: Numerics) -> None:
    """With the table's tiles: the last query tile is half empty, or warpgroups share 64 rows."""
    sizes = of_table(case, chosen, StandardMax(), long=False)
    check_accuracy(case, call(case, chosen, sizes=sizes, kv_block=None))


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "chosen", "programs"),
    [
        (GROUPED, FLASH, 1),
        (MORE_ROWS, FLASH, 2),
        pytest.param(WIDEST, FLASH, 1, marks=pytest.mark.slow),
        (GROUPED, NORMALIZED_DELTA, 3),
        (MORE_KEYS, NORMALIZED_DELTA, 1),
        (WIDE, NORMALIZED_DELTA, 2),
        (GROUPED, CORRECTED_AFTER_CAST, 3),
        (WIDE, MATCHED_AND_CORRECTED, 2),
        (GROUPED, MATCHED, 1),
    ],
    ids=str,
)
def test_two_warpgroups_of_64_rows_change_no_bit(
    case: Case, chosen: Numerics, programs: int
) -> None:
    tile = dataclasses.replace(harness.HOPPER_BACKWARD, owned_stages=1)
    split = dataclasses.replace(tile, cooperative=True)
    whole = dataclasses.replace(SIZES, query_gradients=tile, key_gradients=tile, programs=programs)
    halves = dataclasses.replace(
        whole,
        query_gradients=split if chosen.delta in SUMS_ROWS else tile,
        key_gradients=split,
    )
    result, expected = (run(case, call(case, chosen, sizes=x)) for x in (halves, whole))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(GROUPED, id="head 64"),
        pytest.param(WIDEST, id="head 256", marks=pytest.mark.slow),
    ],
)
def test_fewer_stages_of_values_change_no_bit(case: Case) -> None:
    tile = dataclasses.replace(harness.HOPPER_BACKWARD, owned_stages=1, stages=3, v_stages=1)
    sizes = dataclasses.replace(SIZES, query_gradients=tile)
    result, expected = (run(case, call(case, sizes=x)) for x in (sizes, SIZES))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_no_vector_ends_within_a_step(warpgroups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, a copy past the end of a vector would hit the rows of the next head."""
    ends: dict[int, list[int]] = {0: [], 1: []}  # of reads, of writes

    def watch(name: str, array: int) -> None:
        copy = getattr(plgpu, name)

        def watched(*refs: Any, **options: Any) -> None:
            *_, length = refs[array].ref.shape
            if len(refs[array].shape) == 1:
                rows = refs[array].transforms[-1].indices[-1]
                jax.debug.callback(
                    lambda row: ends[array].append(length - int(row) - rows.size), rows.start
                )
            copy(*refs, **options)

        monkeypatch.setattr(plgpu, name, watched)

    watch("copy_gmem_to_smem", 0)
    watch("copy_smem_to_gmem", 1)
    # The second of two warpgroups has no rows. These sizes occur nowhere else, so no other test's
    # trace is reused.
    tile = dataclasses.replace(harness.HOPPER_BACKWARD, step=128)
    forward = dataclasses.replace(harness.HOPPER_FORWARD, warpgroups=warpgroups)
    sizes = dataclasses.replace(SIZES, forward=forward, programs=1, key_gradients=tile)
    run(FEW, call(FEW, sizes=sizes))
    # Reads: two vectors of a query step, for each of two key tiles. Writes: three vectors of rows
    # from each of two warpgroups, whether a tile has two warpgroups or three.
    assert ends[0] == [0] * 4
    assert sorted(ends[1]) == [0] * 3 + [64] * 3


@needs_mosaic
@pytest.mark.parametrize("waits", [True, False])
def test_a_race_of_a_product_is_seen(waits: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Warpgroup 1 multiplies what warpgroup 0 has written, with and without waiting for it."""

    def kernel(x: Any, out: Any, operand: Any, result: Any, written: Any) -> None:
        def write() -> None:
            operand[...] = load(x, TILE)
            plgpu.commit_smem()
            plgpu.barrier_arrive(written)

        def multiply() -> None:
            if waits:
                plgpu.barrier_wait(written)

            def product(total: Any) -> jax.Array:
                plgpu.wgmma(total, operand, operand)
                return total[...]

            result[...] = pl.run_scoped(product, accumulator(64, 64))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out)
            plgpu.wait_smem_to_gmem(0)
            if not waits:  # completes the barrier, which is not under test
                plgpu.barrier_wait(written)

        me = jax.lax.axis_index("warpgroup")
        pl.when(me == 0)(write)
        pl.when(me == 1)(multiply)

    run_kernel = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            tiles_of((64, 64), jnp.bfloat16),
            tiles_of((64, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=1),
        ],
        num_threads=2,
        thread_name="warpgroup",
        **interpreter(on=True),
    )
    raised = ""
    try:
        run_kernel(jnp.ones((64, 64), jnp.bfloat16)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:  # raised by JAX 0.12; earlier versions print a race
        raised = str(error)
    assert ("RACE DETECTED" in capfd.readouterr().out + raised) != waits


@needs_mosaic
def test_a_tie_shifts_the_maximum() -> None:
    """Otherwise the test above could not tell the rule from the standard one."""
    shifted, standard = (run(TIES, call(TIES, FLASH, rule)) for rule in (DynamicMax(), None))
    assert np.mean(shifted["out"] != standard["out"]) > 0.01


@needs_mosaic
@pytest.mark.parametrize("case", [TIES, GROUPED], ids=["ties", "hardly any, and masks"])
def test_testing_for_ties_changes_no_bit(case: Case) -> None:
    tile = dataclasses.replace(harness.HOPPER_FORWARD, tests_ties=False)
    sizes = dataclasses.replace(SIZES, forward=tile)
    result, expected = (run(case, call(case, FLASH, DynamicMax(), sizes=x)) for x in (sizes, SIZES))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
def test_auxiliary_output_is_exact_but_for_its_storage() -> None:
    """O′ errs by half an ulp of bfloat16; O, from rounded P̄, by more where a sum cancels."""
    case, arrays = FEW, harness.inputs(FEW)
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
    spec = call(case, AUXILIARY_OUTPUT).spec
    out = forward(q, k, v, Problem.of(q, k, spec, SIZES))
    exact = harness.oracle(case, arrays)["out"]
    allowed = 2.0**-8 * np.abs(exact) + 2.0**-18  # and float32 sums of a few hundred terms
    beyond = {
        name: np.mean(np.abs(np.asarray(x, np.float64) - exact) > allowed)
        for name, x in (("O", out.o), ("O′", out.saved))
    }
    assert beyond["O′"] == 0
    assert beyond["O"] > 0.1


@needs_mosaic
@pytest.mark.parametrize("longest_first", [False, True])
def test_three_warpgroups_of_which_two_see_fewer_steps(longest_first: bool) -> None:
    case = dataclasses.replace(GROUPED, rows=192, keys=192, heads=1)
    tall: dict[str, Any] = {"warpgroups": 3, "step": 64, "stages": 1, "owned_stages": 1}
    sizes = with_tiles(SIZES, **tall, longest_first=longest_first)
    result, expected = run(case, call(case, sizes=sizes)), run(case, call(case))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
def test_many_tiles_of_one_program_in_one_buffer() -> None:
    """q must not wait for memory that is freed only after q has come."""
    sizes = with_tiles(SIZES, warpgroups=1, stages=1, owned_stages=1)
    sizes = dataclasses.replace(sizes, programs=1)
    case = dataclasses.replace(GROUPED, rows=192, keys=192)
    result, expected = run(case, call(case, sizes=sizes)), run(case, call(case))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
@pytest.mark.parametrize(
    ("head_size", "make"),
    [
        pytest.param(64, call, id="64"),
        pytest.param(
            64,
            partial(call, sizes=dataclasses.replace(SIZES, unordered=True)),
            id="64, unordered",
        ),
        pytest.param(
            256,
            partial(call, sizes=of_table(WIDEST, FLASH, StandardMax(), long=False)),
            id="256",
            marks=pytest.mark.slow,
        ),
        pytest.param(64, published, id="64, published"),
        pytest.param(64, partial(call, chosen=MATCHED), id="64, matched"),
        pytest.param(64, partial(call, chosen=CORRECTED_AFTER_CAST), id="64, after the cast"),
    ],
)
def test_packed_arrays_give_the_same_bits(head_size: int, make: Callable[..., Any]) -> None:
    case = dataclasses.replace(GROUPED, rows=128, keys=128, kv_heads=2, head_size=head_size)
    result, expected = (run(case, make(case, packed=p)) for p in (True, False))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "chosen", "step"),
    [
        (GROUPED, FLASH, 128),
        (MORE_ROWS, FLASH, 64),
        (MORE_KEYS, AUXILIARY_OUTPUT, 64),
        (dataclasses.replace(WIDE, keys=192, rows=320), FLOAT32_OUTPUT, 64),
        (dataclasses.replace(WIDE, rows=64, keys=320, is_causal=False), FLASH, 64),
    ],
    ids=[
        "a block of rows each",
        "steps alternate, more rows",
        "one step",
        "a block of columns each",
        "head 128, one step",
    ],
)
def test_dq_without_an_order(case: Case, chosen: Numerics, step: int) -> None:
    """dV is the same. δ and dQ are summed in another order, which tips a few roundings."""
    tile = dataclasses.replace(harness.HOPPER_BACKWARD, step=step, owned_stages=1)
    sizes = dataclasses.replace(SIZES, key_gradients=tile, programs=2)
    unordered = call(case, chosen, sizes=dataclasses.replace(sizes, unordered=True))
    result, expected = run(case, unordered), run(case, call(case, chosen, sizes=sizes))
    for name in ("out", "lse", "dv"):
        np.testing.assert_array_equal(result[name], expected[name])
    for name in ("dq", "dk"):
        assert np.mean(result[name] != expected[name]) < 0.01
    check_accuracy(case, unordered)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "unordered"),
    [
        (dataclasses.replace(FEW, keys=200), True),  # a part of a warpgroup's keys, and all
        (dataclasses.replace(FEW, keys=320), True),
        (dataclasses.replace(FEW, rows=320, keys=72, is_causal=True), True),
        # The kernel of dK and dV multiplies by an infinite P of padded keys, and stores neither.
        pytest.param(
            dataclasses.replace(FEW, keys=200),
            False,
            marks=pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
        ),
    ],
    ids=["64 and 8 keys", "64 keys", "causal", "ordered"],
)
def test_padded_keys_add_nothing_to_rows_of_scores_far_below_0(case: Case, unordered: bool) -> None:
    """Zeros score 0, so P = exp(0 − lse) of a padded key is infinite, and times 0 NaN."""
    case = dataclasses.replace(case, values="large_negative_scores", scale=1.0)
    result = check_accuracy(case, call(case, sizes=dataclasses.replace(SIZES, unordered=unordered)))
    assert result["lse"].max() < -89


@needs_mosaic
def test_vmap_gives_the_bits_of_a_loop() -> None:
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sin(dot_product_attention(q, k, v, block_sizes=SIZES, **how)).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    how = {"is_causal": True, "numerics": FLASH, "implementation": "hopper"}
    q, k, v = (
        jax.random.normal(key, (2, 1, 128, 1, 64), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 3)
    )
    found = jax.vmap(gradients, in_axes=(0, None, 0))(q, k[0], v)
    for i in range(2):
        for x, expected in zip(found, gradients(q[i], k[0], v[i]), strict=True):
            np.testing.assert_array_equal(x[i], expected)


def dealt(scheduler: StaticScheduler | LongestFirstScheduler) -> list[list[WorkTile]]:
    """The tiles of each program."""
    programs = jnp.arange(scheduler.grid, dtype=jnp.int32)
    most = jnp.arange(max(int(scheduler.count(p)) for p in programs), dtype=jnp.int32)
    found = jax.vmap(lambda p: jax.vmap(lambda u: scheduler.work_tile(p, u))(most))(programs)
    counts = np.asarray(jax.vmap(scheduler.count)(programs))
    exists = np.asarray(found.is_valid) & (np.asarray(most) < counts[:, np.newaxis])
    numbers = np.stack(np.broadcast_arrays(*found), axis=-1)
    return [
        [WorkTile(*row) for row in rows[e].tolist()]
        for rows, e in zip(numbers, exists, strict=True)
    ]


@pytest.mark.parametrize("how", ["in pairs", "in order", 1, 4, 6])
@pytest.mark.parametrize(("tiles", "programs"), [(1, 4), (4, 3), (5, 2), (7, 132)])
def test_every_tile_belongs_to_one_program(tiles: int, programs: int, how: str | int) -> None:
    sizes = {"tiles": tiles, "heads": 3, "batch": 2, "programs": programs}
    scheduler: StaticScheduler | LongestFirstScheduler
    if isinstance(how, int):
        scheduler = LongestFirstScheduler(**sizes, longest_last=True, at_a_time=how)
    else:
        scheduler = StaticScheduler(**sizes, longest_last=True, in_pairs=how == "in pairs")
    done = collections.Counter(
        (t.block, t.head, t.batch) for tiles in dealt(scheduler) for t in tiles
    )
    assert done == collections.Counter(
        (tile, head, batch) for tile in range(tiles) for head in range(3) for batch in range(2)
    )


def test_pairs_are_equally_long() -> None:
    scheduler = StaticScheduler(
        tiles=8, heads=1, batch=4, in_pairs=True, longest_last=True, programs=16
    )
    lengths = {sum(int(work.block) + 1 for work in own) for own in dealt(scheduler)}
    assert lengths == {9}


@pytest.mark.parametrize("longest_last", [True, False])
@pytest.mark.parametrize(
    ("shape", "at_a_time", "most"), [("gpt2", 96, 1.02), ("long64", 16, 1.01), ("long128", 8, 1.01)]
)
def test_the_longest_first_end_together(
    shape: str, at_a_time: int, most: float, longest_last: bool
) -> None:
    """No program runs much beyond the mean, where pairs are off by 3 %; heads stay in order."""
    of, tiles = SHAPES[shape], SHAPES[shape].length // 128
    sizes = {"tiles": tiles, "heads": of.heads, "batch": of.batch, "programs": 132}

    def longest(scheduler: StaticScheduler | LongestFirstScheduler) -> float:
        ends = [
            sum(1 + (t.block if longest_last else tiles - 1 - t.block) for t in own)
            for own in dealt(scheduler)
        ]
        return max(ends) / np.mean(ends)

    scheduler = LongestFirstScheduler(**sizes, longest_last=longest_last, at_a_time=at_a_time)
    assert longest(scheduler) < most
    assert longest(StaticScheduler(**sizes, longest_last=longest_last, in_pairs=True)) > 1.03
    for own in dealt(scheduler):
        times = [(t.batch * of.heads + t.head) // at_a_time for t in own]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("shape", "heads"), [("gpt2", 96), ("long64", 16), ("long128", 8)], ids=lambda x: str(x)
)
def test_heads_of_a_time_fit_in_the_cache(shape: str, heads: int) -> None:
    """The limit is 32 MiB for the operands that programs walk over: K and V, or Q and dO."""
    of, tile = SHAPES[shape], ForwardTile(longest_first=True)
    x = jax.ShapeDtypeStruct(of.qkv, jnp.bfloat16)
    spec = call(GROUPED, kv_block=None).spec
    problem = Problem.of(x, x, spec, default_block_sizes(of.head_size))
    for scheduler in (problem.by_query(tile), problem.by_key(tile)):
        assert isinstance(scheduler, LongestFirstScheduler)
        rounds = -(-scheduler.tiles * heads // scheduler.grid)
        time = {t.batch * of.heads + t.head for own in dealt(scheduler) for t in own[: rounds - 1]}
        assert time == set(range(heads))


@pytest.mark.parametrize("rows", [64, 192, 320, 576, 1024])
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_row_belongs_to_one_warpgroup(rows: int, is_causal: bool) -> None:
    """Up to the end of the vectors; tiles of equal length are dealt out in order."""
    sizes = default_block_sizes(64, long=True)
    x = jax.ShapeDtypeStruct((2, rows, 3, 64), jnp.bfloat16)
    spec = dataclasses.replace(call(GROUPED, kv_block=None).spec, is_causal=is_causal)
    problem = Problem.of(x, x, spec, sizes)
    scheduler = problem.by_query(sizes.forward)
    assert isinstance(scheduler, LongestFirstScheduler if is_causal else StaticScheduler)
    assert is_causal or scheduler == problem.by_query(ForwardTile(warpgroups=3))
    starts = collections.Counter(
        (t.batch, t.head, t.block * 192 + warpgroup * 64)
        for own in dealt(scheduler)
        for t in own
        for warpgroup in range(3)
    )
    assert set(starts.values()) == {1}
    assert set(starts) >= set(itertools.product(range(2), range(3), range(0, rows, 64)))
    beyond = {row for *_, row in starts if row >= problem.vector_rows}
    assert len(beyond) < 3


@needs_mosaic
def test_steps_of_head_size_256_have_64_keys() -> None:
    for kv_block in (None, 64):
        asked = request(FLASH.replace(kv_block=kv_block), head_size=256, sizes=None)
        assert hopper.keys_per_step(asked) == 64


@pytest.mark.parametrize("shape", [(1, 4096, 2, 64), (1, 8192, 3, 2, 64), (1, 4096, 2, 128)])
def test_who_takes_the_tiles_of_long_calls(shape: tuple[int, ...]) -> None:
    def is_long(spec: Spec, shape: tuple[int, ...] = shape) -> bool:
        return block_sizes(shape, spec).forward.longest_first

    spec = dataclasses.replace(call(GROUPED).spec, block_sizes=None)
    of_128 = dataclasses.replace(spec, numerics=FLASH.replace(kv_block=128))
    auxiliary = dataclasses.replace(spec, numerics=AUXILIARY_OUTPUT)
    assert is_long(dataclasses.replace(spec, numerics=FLASH))
    assert is_long(of_128)
    assert not is_long(of_128, (1, 2048, *shape[2:]))
    assert not is_long(dataclasses.replace(of_128, is_causal=False))
    assert not is_long(auxiliary)
    assert not is_long(dataclasses.replace(spec, numerics=FLASH.replace(kv_block=64)))


def test_who_overlaps_tiles() -> None:
    def overlaps(shape: tuple[int, ...] = (1, 1024, 2, 64), **changes: Any) -> bool:
        spec = dataclasses.replace(call(GROUPED).spec, block_sizes=None, numerics=FLASH)
        spec = dataclasses.replace(spec, row_max=DynamicMax())
        return block_sizes(shape, dataclasses.replace(spec, **changes)).forward.overlap_tiles

    assert overlaps()
    assert overlaps(numerics=FLOAT32_OUTPUT)
    assert not overlaps(row_max=StandardMax())
    assert not overlaps(numerics=AUXILIARY_OUTPUT)
    assert not overlaps(numerics=FLASH.replace(kv_block=64))
    assert not overlaps(numerics=PUBLISHED)
    assert not overlaps((1, 4096, 2, 64))
    assert not overlaps((1, 1024, 2, 128))


@needs_mosaic
@pytest.mark.parametrize("chosen", [FLASH, AUXILIARY_OUTPUT], ids=str)
def test_rounding_later_changes_no_bit(chosen: Numerics) -> None:
    """The interpreter waits for all products, so an earlier wait only moves the rounding."""
    tile = dataclasses.replace(harness.HOPPER_FORWARD, early_wait=True)
    sizes = dataclasses.replace(SIZES, forward=tile)
    result, expected = (run(WIDE, call(WIDE, chosen, sizes=x)) for x in (sizes, SIZES))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


@needs_mosaic
def test_the_order_of_tiles_changes_no_bit() -> None:
    case = dataclasses.replace(GROUPED, batch=2)
    sizes = dataclasses.replace(with_tiles(SIZES, longest_first=True), programs=3)
    result, expected = run(case, call(case, sizes=sizes)), run(case, call(case))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


def request(chosen: Numerics = FLASH, **options: Any) -> Request:
    spec = Spec(
        numerics=chosen,
        row_max=options.pop("row_max", StandardMax()),
        scale=options.pop("scale", 0.125),
        window=options.pop("window", None),
        soft_cap=options.pop("soft_cap", None),
        block_sizes=options.pop("sizes", SIZES),
    )
    rows, keys = options.pop("rows", 128), options.pop("keys", 128)
    head_size, dtype = options.pop("head_size", 64), options.pop("dtype", "bfloat16")
    q_shape, kv_shape = (1, rows, 2, head_size), (1, keys, 2, head_size)
    return Request(spec=spec, q_shape=q_shape, kv_shape=kv_shape, dtype=jnp.dtype(dtype), **options)


@needs_mosaic
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(sizes=None, platform="cpu"), "this platform (it needs a Hopper GPU"),
        (request(sizes=None, platform="cuda"), "an unknown GPU (it needs a Hopper GPU)"),
        (request(dtype="float16"), "float16 (it takes bfloat16)"),
        (request(head_size=96), "head size 96 (it takes 64 or 128 or 256)"),
        (request(AUXILIARY_OUTPUT, head_size=256), "saved_output=auxiliary at head size 256"),
        (
            request(head_size=256, sizes=dataclasses.replace(SIZES, unordered=True)),
            "unordered=True at head size 256",
        ),
        (
            request(FLASH.replace(kv_block=128), head_size=256),
            "kv_block=128 (it takes 64 or None) at head size 256",
        ),
        (request(rows=100), "100 queries (it takes multiples of 64)"),
        (request(keys=72), "72 keys (it takes multiples of 64)"),
        (
            request(PUBLISHED, has_lengths=True, has_segments=True),
            "segments, lengths with tile_grads=bfloat16",
        ),
        (request(mask_shape=(1, 1, 128, 128)), "a dense mask"),
        (
            request(value_size=128),
            "values of head size 128 with queries of 64 (it takes equal sizes, or 128 with 192",
        ),
        (request(head_size=192), "head size 192 (it takes 64 or 128 or 256)"),
        (
            request(CORRECTED_AFTER_CAST, head_size=128, value_size=64),
            "delta=after_cast for values of head size 64 with queries of 128",
        ),
        (
            request(head_size=128, value_size=64, sizes=dataclasses.replace(SIZES, unordered=True)),
            "unordered=True for values of head size 64 with queries of 128",
        ),
        (
            request(AUXILIARY_OUTPUT, head_size=192, value_size=128),
            "saved_output=auxiliary at head size 192",
        ),
        (
            request(soft_cap=30.0, head_size=192, value_size=128),
            "logits_soft_cap=30.0 at head size 192",
        ),
        (
            request(PUBLISHED, soft_cap=30.0, has_sinks=True),
            "logits_soft_cap=30.0, sinks with tile_grads=bfloat16",
        ),
        (
            request(NORMALIZED_DELTA, soft_cap=30.0),
            "logits_soft_cap=30.0 with delta=normalized (it takes do_o)",
        ),
        (
            request(CORRECTED_AFTER_CAST, has_sinks=True),
            "sinks with delta=after_cast (it takes do_o)",
        ),
        (request(soft_cap=2000.0), "logits_soft_cap=2000.0 (it takes up to 1024)"),
        (request(soft_cap=30.0, head_size=256), "logits_soft_cap=30.0 at head size 256"),
        (
            request(
                soft_cap=30.0,
                sizes=dataclasses.replace(
                    SIZES, key_gradients=BackwardTile(step=64, cooperative=True)
                ),
            ),
            "logits_soft_cap=30.0 with cooperative=True",
        ),
        (request(has_bias=True), "a dense bias"),
        (
            request(window=(8, 8), sizes=dataclasses.replace(SIZES, unordered=True)),
            "a local window with unordered=True",
        ),
        (request(PUBLISHED, window=(8, 8)), "a local window with tile_grads=bfloat16"),
        (request(scale=-0.125), "scale=-0.125 (it takes numbers above 0)"),
        (request(row_max=PublishedMax()), "row_max=PublishedMax"),
        (
            request(PUBLISHED, sizes=None, platform="cuda"),
            "an unknown GPU (it needs a Hopper GPU)",
        ),
        (request(PUBLISHED, head_size=128), "head size 128 with tile_grads=bfloat16 (it takes 64)"),
        (request(PUBLISHED, scale=0.1), "scale=0.1 with tile_grads=bfloat16 (it takes powers of"),
        (
            request(PUBLISHED, row_max=DynamicMax(tolerance=0.1)),
            "row_max.tolerance=0.1 with tile_grads=bfloat16 (it takes 0)",
        ),
        (
            request(PUBLISHED, sizes=dataclasses.replace(SIZES, unordered=True)),
            "unordered=True with tile_grads=bfloat16",
        ),
        (
            request(PUBLISHED.replace(kv_block=64)),
            "kv_block=64 with tile_grads=bfloat16 (it takes 128 or 256 or 384 or 512)",
        ),
        (
            request(PUBLISHED.replace(delta="normalized")),
            "delta=normalized, saved_output=same with tile_grads=bfloat16 (it takes do_o, same)",
        ),
        (request(PUBLISHED.replace(scores="float32")), "scores=float32 (it takes bfloat16)"),
        (request(PRESETS["published_eager"]), "shift=bfloat16 (it takes float32)"),
        (request(PRESETS["probe"]), "scores=bfloat16 (it takes float32)"),
        (request(PRESETS["exact"]), "probs=float32 (it takes bfloat16)"),
        (request(PRESETS["delta_dp_p"]), "delta=dp_p (it takes do_o or normalized or after_cast)"),
        *(
            (
                request(chosen, sizes=dataclasses.replace(SIZES, unordered=True)),
                f"{named} with unordered=True (which takes",
            )
            for chosen, named in (
                (NORMALIZED_DELTA, "delta=normalized"),
                (CORRECTED_AFTER_CAST, "delta=after_cast"),
                (MATCHED, "statistics=m_and_l"),
                (HALVES_OUTPUT, "saved_output=halves"),
            )
        ),
        (request(MATCHED.replace(divided_in_dv="do")), "divided_in_dv=do (it takes probs)"),
        (request(MATCHED.replace(mean_key="subtracted")), "mean_key=subtracted (it takes kept)"),
        (
            request(FLASH.replace(exponent="shift_first")),
            "exponent=shift_first (it takes scale_first or whole_max)",
        ),
        (
            request(PUBLISHED.replace(row_sum="rounded")),
            "statistics=lse, row_sum=rounded with tile_grads=bfloat16 (it takes lse, unrounded)",
        ),
        (request(FLASH.replace(kv_block=512)), "kv_block=512 (it takes 64 or 128 or None)"),
    ],
)
def test_what_it_declines_is_named_with_who_serves_it(asked: Request, reason: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        resolve(asked, "hopper")
    assert reason in str(raised.value)


@needs_mosaic
@pytest.mark.parametrize(
    ("asked", "kind", "name"),
    [
        (request(sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (request(head_size=256, sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (
            request(AUXILIARY_OUTPUT, head_size=256, sizes=None, platform="cuda"),
            "NVIDIA H200",
            "gpu",
        ),
        (request(sizes=None, platform="cuda"), "NVIDIA A100-SXM4-80GB", "gpu"),
        (request(rows=100, sizes=None, platform="cuda"), "NVIDIA H200", "gpu"),
        (request(PUBLISHED, sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (request(PUBLISHED, head_size=128, sizes=None, platform="cuda"), "NVIDIA H200", "gpu"),
        (request(window=(8, 8), sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (request(has_lengths=True, sizes=None, platform="cuda"), "NVIDIA H200", "gpu"),
        (request(has_segments=True, sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (request(has_sinks=True, sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
        (request(soft_cap=30.0, sizes=None, platform="cuda"), "NVIDIA H200", "hopper"),
    ],
)
def test_the_fastest_that_serves_is_chosen(asked: Request, kind: str, name: str) -> None:
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        assert resolve(asked) == name


@needs_mosaic
@pytest.mark.parametrize(
    ("head_size", "value_size", "has_lengths", "name"),
    [
        (192, 128, False, "hopper"),
        (128, 64, False, "hopper"),
        (192, 128, True, "hopper"),
        (128, 64, True, "gpu"),
        (128, 128, True, "gpu"),
    ],
)
def test_values_of_another_head_size_take_the_faster_kernels(
    head_size: int, value_size: int, has_lengths: bool, name: str
) -> None:
    asked = request(
        head_size=head_size,
        value_size=value_size,
        has_lengths=has_lengths,
        sizes=None,
        platform="cuda",
    )
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert resolve(asked) == name


def test_tiles_of_values_of_another_head_size_are_those_of_two_pairs() -> None:
    for head_size, value_size in ((192, 192), (64, 128), (256, 128)):
        with pytest.raises(ValueError, match=f"{head_size} with values of {value_size}"):
            default_block_sizes(head_size, value_size=value_size)
    with pytest.raises(ValueError, match="unordered needs values of head size 128, got 64"):
        default_block_sizes(128, value_size=64, unordered=True)


def test_tiles_of_long_steps_are_of_one_head_size() -> None:
    with pytest.raises(ValueError, match="rounds_products needs head size 64, got 128"):
        default_block_sizes(128, rounds_products=True)


@needs_mosaic
@pytest.mark.parametrize("kind", ["NVIDIA B200", "NVIDIA A100-SXM4-80GB"])
def test_another_generation_is_named(kind: str) -> None:
    reason = rf"support {kind} \(it needs a Hopper GPU\); use gpu"
    with (
        jax.sharding.use_abstract_mesh(mesh_of(kind)),
        pytest.raises(UnsupportedError, match=reason),
    ):
        resolve(request(sizes=None, platform="cuda"), "hopper")


def test_older_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"JAX .* \(it needs 0\.11\.2\)"):
        resolve(request(), "hopper")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"warpgroups": 4}, "warpgroups must be one of"),
        ({"step": 32}, "step must be one of"),
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"v_stages": 0}, "v_stages must be at least 1, got 0"),
        ({"held": True}, "held=True needs ping_pong=True"),
        ({"held": True, "ping_pong": True, "stages": 1}, "held=True needs two stages or more"),
        (
            {"overlap_steps": True, "ping_pong": True, "held": True},
            "overlap_steps=True needs .*held=True",
        ),
        ({"overlap_steps": True, "stages": 1}, "overlap_steps=True needs two stages or more"),
        (
            {"overlap_steps": True, "cooperative": True, "step": 64},
            "overlap_steps=True needs .*cooperative=True",
        ),
        (
            {"overlap_tiles": True, "owned_stages": 1},
            "overlap_tiles=True needs owned_stages=2 and a step .*128 rows, got .*owned_stages=1",
        ),
        ({"overlap_tiles": True, "step": 64}, "overlap_tiles=True needs .*step=64"),
        ({"halved": True, "step": 64}, "halved=True needs step=128, got step=64"),
        (
            {"overlap_tiles": True, "warpgroups": 3},
            "overlap_tiles=True needs .*192 rows, got .*warpgroups=3",
        ),
        (
            {"cooperative": True},
            "cooperative=True needs two warpgroups, step=64 and ping_pong=False, got .*step=128",
        ),
        (
            {"cooperative": True, "step": 64, "ping_pong": True},
            "cooperative=True needs .*ping_pong=True",
        ),
        (
            {"cooperative": True, "step": 64, "warpgroups": 3},
            "cooperative=True needs .*warpgroups=3",
        ),
    ],
)
def test_impossible_tiles_are_refused(options: dict[str, int], named: str) -> None:
    """By every kernel whose tile has these fields."""
    fields = ({x.name for x in dataclasses.fields(of)} for of in (ForwardTile, BackwardTile))
    found = [
        of
        for of, own in zip((ForwardTile, BackwardTile), fields, strict=True)
        if own >= set(options)
    ]
    assert found
    for of in found:
        with pytest.raises(ValueError, match=named):
            of(**options)


@needs_mosaic
@pytest.mark.parametrize(
    ("chosen", "field", "named"),
    [
        (PUBLISHED, "overlap_tiles", "overlap_tiles=True does not support tile_grads=bfloat16"),
        (
            AUXILIARY_OUTPUT,
            "overlap_tiles",
            "overlap_tiles=True does not support saved_output=auxiliary",
        ),
        (FLASH, "halved", "halved=True needs tile_grads=bfloat16, got float32"),
    ],
)
def test_sums_of_other_numerics_are_named(chosen: Numerics, field: str, named: str) -> None:
    sizes = of_table(FEW, chosen, StandardMax(), long=False)
    sizes = dataclasses.replace(sizes, forward=ForwardTile(**{field: True}))
    with pytest.raises(ValueError, match=named):
        run(FEW, call(FEW, chosen, sizes=sizes, kv_block=128))


@needs_mosaic
@pytest.mark.parametrize("step", [64, 128])
def test_a_step_of_other_keys_than_the_call_asks_for_is_refused(step: int) -> None:
    """Tiles must not change what is computed, and the number of keys of a step does."""
    sizes = dataclasses.replace(SIZES, forward=ForwardTile(step=step))
    asked = 192 - step
    with pytest.raises(ValueError, match=f"kv_block={asked} takes step={asked}, got step={step}"):
        run(FEW, call(FEW, sizes=sizes, kv_block=asked))


def test_stages_of_v_are_those_of_dqs_kernel() -> None:
    dataclasses.replace(SIZES, query_gradients=BackwardTile(v_stages=1))
    with pytest.raises(
        ValueError, match="must have v_stages=None, because only query_gradients uses it, got 1"
    ):
        dataclasses.replace(SIZES, key_gradients=BackwardTile(v_stages=1))


@needs_mosaic
def test_a_single_sum_is_not_shared() -> None:
    sizes = dataclasses.replace(SIZES, query_gradients=BackwardTile(step=64, cooperative=True))
    with pytest.raises(ValueError, match="cooperative=True needs delta=normalized or after_cast"):
        run(FEW, call(FEW, sizes=sizes))


@pytest.mark.parametrize(
    "tile", [BackwardTile(step=64, cooperative=True), BackwardTile(overlap_steps=True)], ids=str
)
def test_unordered_dq_is_neither_cooperative_nor_overlapped(tile: BackwardTile) -> None:
    with pytest.raises(
        ValueError, match="unordered=True needs cooperative=False and overlap_steps=False"
    ):
        dataclasses.replace(SIZES, key_gradients=tile, unordered=True)


@needs_mosaic
@pytest.mark.parametrize("chosen", [NORMALIZED_DELTA, CORRECTED_AFTER_CAST], ids=str)
def test_rows_that_are_summed_overlap_no_steps(chosen: Numerics) -> None:
    sizes = dataclasses.replace(SIZES, query_gradients=BackwardTile(step=64, overlap_steps=True))
    with pytest.raises(
        ValueError, match=f"overlap_steps=True does not support delta='{chosen.delta}'"
    ):
        run(FEW, call(FEW, chosen, sizes=sizes))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_block": 128}, "kv_block=128"),
        ({"keeps_auxiliary": True}, "keeps_auxiliary"),
        ({"unordered": True}, "unordered"),
    ],
)
def test_what_does_not_fit_head_size_256_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} does not fit head size 256"):
        default_block_sizes(256, **options)


@pytest.mark.parametrize(
    "tile", [BackwardTile(warpgroups=3, step=64), BackwardTile(step=64, stages=1)]
)
def test_unordered_dq_takes_two_warpgroups_and_two_stages(tile: BackwardTile) -> None:
    with pytest.raises(
        ValueError, match="unordered=True needs two warpgroups, and two stages or more"
    ):
        dataclasses.replace(SIZES, key_gradients=tile, unordered=True)


@needs_mosaic
def test_steps_of_more_than_a_block_of_dq_each_are_refused() -> None:
    tile = dataclasses.replace(harness.HOPPER_BACKWARD, step=128)
    sizes = dataclasses.replace(SIZES, key_gradients=tile, unordered=True)
    with pytest.raises(ValueError, match="step=64 or less at head size 128, got step=128"):
        run(WIDE, call(WIDE, sizes=sizes))


@needs_mosaic
@pytest.mark.parametrize("variants", [False, True], ids=["plain", "ids, sinks and a soft cap"])
@pytest.mark.parametrize("chosen", [FLOAT32_OUTPUT, CORRECTED_AFTER_CAST, MATCHED], ids=str)
@pytest.mark.parametrize("rows", [256, 4096])
@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
def test_default_tiles_lower_for_a_hopper_gpu(
    head_size: int, rows: int, chosen: Numerics, variants: bool
) -> None:
    """Lowering needs no such GPU. It goes as far as Mosaic GPU's check of shared memory."""
    x = jax.ShapeDtypeStruct((1, rows, 2, head_size), jnp.bfloat16)
    spec = Spec(
        numerics=chosen,
        row_max=DynamicMax(),
        scale=head_size**-0.5,
        is_causal=True,
        soft_cap=30.0 if variants else None,
    )
    ids, sinks = jnp.zeros((1, rows), jnp.int32), jnp.zeros(2)
    extras = Extras(query_segments=ids, key_segments=ids, sinks=sinks) if variants else Extras()

    def step(*qkv: jax.Array) -> Any:
        results, pullback = jax.vjp(lambda *x: hopper.attention(*x, extras, spec), *qkv)
        return pullback(results)

    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        if head_size == 256 and chosen == MATCHED and jax.__version_info__ >= (0, 12):
            asked = request(chosen, head_size=head_size, sizes=None, platform="cuda")
            with pytest.raises(UnsupportedError, match="saved_output=halves on JAX 0"):
                resolve(asked, "hopper")
            assert resolve(asked) == "gpu"
            return
        text = jax.jit(step).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("forward", "query_gradients", "key_gradients"):
        assert f"attention_{kernel}" in text
