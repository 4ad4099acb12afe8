"""The TPU kernels in Pallas' interpreter: cases, presets and rules, random bits, tiles, races.

Memory that was never written is NaN there, a read out of bounds raises, and a race is reported.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case
from jax.experimental.pallas import tpu as pltpu
from kernel_calls import (
    PRESETS,
    RULES,
    Call,
    call_of,
    compiled,
    factor_of,
    operands_of,
    run,
    run_plain,
)
from test_points import closer

from lowprec_attn import numerics, tiled
from lowprec_attn.numerics import EXACT, POINTS, Numerics, StandardMax
from lowprec_attn.request import Extras, Request, Spec
from pallas_kernels.tpu import attention as tpu
from pallas_kernels.tpu import forward, problem
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

pytestmark = pytest.mark.usefixtures("strict_promotion", "no_races")

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


@pytest.fixture
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints the races that it finds."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


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


@pytest.mark.parametrize("case", CASES)
def test_exact_arithmetic_is_as_accurate_as_plain_float32(case: str) -> None:
    check_accuracy(CASES[case], tpu_call(CASES[case], EXACT))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_accurate_as_plain(preset: str) -> None:
    check_accuracy(REPEATED, tpu_call(REPEATED, PRESETS[preset]))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "standard"])
def test_presets_with_other_rules_are_as_accurate_as_plain(preset: str, rule: str) -> None:
    call = tpu_call(REPEATED, PRESETS[preset], RULES[rule], backward=False)
    result = check_accuracy(REPEATED, call)
    if preset in ("exact", "stochastic_output"):
        return  # the first does not depend on the rule, the second is not `plain` bit by bit
    standard = tpu_call(REPEATED, PRESETS[preset])
    plain = ({name: run_plain(REPEATED, how)[name] for name in result} for how in (call, standard))
    assert "out" in closer(result, *plain)  # P̄ is rounded against the maximum of the rule


# One tile of queries and keys, so that `tiled` takes the same sums in the same shapes.
SAME_ORDER = dataclasses.replace(
    LONG, rows=128, keys=384, is_causal=False, dtype="bfloat16", values="repeated_maxima"
)
TILED = tiled.BlockSizes(query=128, kv_bwd=128)


@pytest.mark.parametrize("rule", RULES)
def test_published_arithmetic_has_the_bits_of_tiled(rule: str) -> None:
    """All that the forward pass sums is rounded at every step, in the order of `tiled`."""
    ours = run(SAME_ORDER, tpu_call(SAME_ORDER, numerics.PUBLISHED, RULES[rule]))
    theirs = run(
        SAME_ORDER,
        tpu_call(SAME_ORDER, numerics.PUBLISHED, RULES[rule], sizes=TILED, implementation=tiled),
    )
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)


def test_random_bits_are_those_of_tiled() -> None:
    chosen = EXACT.replace(**dict.fromkeys(POINTS, "bfloat16:stochastic"))
    case = dataclasses.replace(LONG, batch=2, heads=4)
    ours = run(case, tpu_call(case, chosen))
    theirs = run(case, tpu_call(case, chosen, sizes=TILED, implementation=tiled))
    for name, x in theirs.items():
        # With every point rounded, one that another order of a sum tips over tips others over.
        assert harness.share_of_other_roundings(ours[name], x) < 0.15, name


def test_tiles_do_not_change_the_arithmetic() -> None:
    """One tile of two steps, of which the second does not exist for the first rows."""
    tall = BlockSizes(
        forward=Tile(query=256, kv=256),
        key_gradients=Tile(query=256, kv=128),
        query_gradients=Tile(query=128, kv=256),
        interpret=STRICT,
    )
    chosen = numerics.PUBLISHED.replace(accumulator="float32")  # `rescale` rounds more than it
    a, b = (
        run(REPEATED, tpu_call(REPEATED, chosen, RULES["published"], sizes=sizes))
        for sizes in (INTERPRETED, tall)
    )
    harness.check_same(b, a, max(REPEATED.rows, REPEATED.keys))


def test_a_step_that_does_not_exist_for_a_row_must_not_round_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "_masked_step_changes_nothing", lambda problem: True)
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        test_tiles_do_not_change_the_arithmetic()
    compiled.cache_clear()


def test_steps_longer_than_a_tile_or_the_keys() -> None:
    """`kv_block` sets the step whatever the tile; one beyond the keys is one step."""
    for kv_block in (256, 1024):
        call = tpu_call(REPEATED, numerics.PUBLISHED, RULES["dynamic_max"], kv_block=kv_block)
        check_accuracy(REPEATED, call)


def test_on_two_cores_and_a_race_there_is_noticed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores share the parallel axes; the axis that a sum runs along must not be one of them."""
    cores = dataclasses.replace(STRICT, num_cores_or_threads=2)
    case = dataclasses.replace(LONG, rows=128, heads=1, kv_heads=1, is_causal=False)
    call = tpu_call(case, EXACT, sizes=dataclasses.replace(INTERPRETED, interpret=cores))
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
    except jax.errors.JaxRuntimeError as error:  # what JAX 0.12 makes of a race
        found = str(error)
    compiled.cache_clear()
    assert "RACE DETECTED" in found


def test_vmap_with_its_own_lengths() -> None:
    case = Case(batch=3, heads=1, kv_heads=1, key_lengths=(20, 0, 7))
    call = tpu_call(case, EXACT, backward=False)
    arrays, _ = operands_of(case)
    mapped = jax.vmap(lambda x, lengths: call(x, Extras(key_lengths=lengths)), in_axes=(0, 0))(
        {name: x[:, None] for name, x in arrays.items()},
        jnp.array(case.key_lengths, jnp.int32)[:, None],
    )
    expected = harness.oracle(case, harness.inputs(case))
    for name, x in mapped.items():
        assert harness.error(np.asarray(x)[:, 0], expected[name]) < 1e-5, name


def request(chosen: Numerics = numerics.FLASH, **options: Any) -> Request:
    spec = Spec(
        numerics=chosen,
        row_max=StandardMax(),
        scale=1.0,
        block_sizes=options.pop("sizes", INTERPRETED),
    )
    shape = (1, options.pop("length", 8), 2, options.pop("head_size", 64))
    dtype = np.dtype(options.pop("dtype", "float32"))
    return Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=dtype, **options)


LARGE = Tile(query=2048, kv=2048)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(), None),
        (request(sizes=None), "needs a TPU"),
        (request(sizes=tiled.BlockSizes()), "block_sizes"),
        (request(numerics.STANDARD), "normalize_probs"),
        (request(EXACT.replace(pv="float16")), "pv=float16"),
        (request(EXACT.replace(pv="float8_e4m3fn")), "pv=float8_e4m3fn"),
        (request(EXACT.replace(output="bf16_m5")), "output=bf16_m5"),
        (request(EXACT.replace(ds="bfloat16:error_positive")), "ds=bfloat16:error_positive"),
        (request(EXACT.replace(kv_block=64)), "kv_block=64"),
        (request(EXACT.replace(kv_block=2**16), length=2**16), "Tile(query=128, kv=65536)"),
        (
            request(sizes=dataclasses.replace(INTERPRETED, forward=LARGE), length=4096),
            "needs up to 85 MiB of VMEM of 16 (Tile(query=256, kv=2048) fits)",
        ),
        (request(dtype="float16"), "float16 q, k and v"),
        (request(has_bias=True), "bias"),
        (request(has_mask=True), "mask"),
        (request(head_size=8), "head size 8"),
        (request(head_size=320), "head size 320"),
    ],
)
def test_what_is_declined_is_named(asked: Request, reason: str | None) -> None:
    answer = tpu.unsupported(dataclasses.replace(asked, platform="cpu"))
    assert answer is None if reason is None else reason in str(answer)
    assert tpu.unsupported(request(sizes=None, platform="tpu")) is None


def test_a_long_step_takes_fewer_rows_by_default() -> None:
    chosen = numerics.PROBE.replace(kv_block=4096)
    options = {"sizes": None, "length": 4096, "dtype": "bfloat16", "platform": "tpu"}
    assert tpu.unsupported(request(chosen, **options)) is None


def test_a_tile_off_the_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="query must be a multiple of 128, got 64"):
        Tile(query=64, kv=128)
