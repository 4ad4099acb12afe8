"""The TPU kernels in Pallas' interpreter: cases, presets and rules, random bits, tiles, races.

Memory that was never written is NaN there, a read out of bounds raises, and a race is reported.
"""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import slow_among
from harness import Case
from kernel_calls import (
    PRESETS,
    RULES,
    Call,
    compiled,
    operands_of,
    run,
    run_plain,
)
from points import closer
from tpu_calls import CASES, INTERPRETED, LONG, REPEATED, STRICT, check_accuracy, tpu_call

from lowprec_attn import numerics
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import EXACT, POINTS, Numerics, StandardMax
from pallas_kernels.tpu import attention as tpu
from pallas_kernels.tpu import forward, problem, query_gradients
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

pytestmark = pytest.mark.usefixtures("strict_promotion", "no_races")


# Beside these `tiles_gqa_lengths` stays, and cases of as many keys and of larger heads.
SLOW = ("gqa_head_32", "more_keys_head_64")


@pytest.mark.parametrize("case", slow_among(CASES, SLOW))
def test_exact_arithmetic_is_as_accurate_as_plain_float32(case: str) -> None:
    check_accuracy(CASES[case], tpu_call(CASES[case], EXACT))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_accurate_as_plain(preset: str) -> None:
    check_accuracy(REPEATED, tpu_call(REPEATED, PRESETS[preset]))


# Rules act in the forward pass, which is here that of `flash`.
FORWARD_OF_FLASH = ("float32_output", "delta_dp_p", "normalized_delta")


@pytest.mark.parametrize("preset", slow_among(PRESETS, FORWARD_OF_FLASH))
@pytest.mark.parametrize("rule", [name for name in RULES if name != "standard"])
def test_presets_with_other_rules_are_as_accurate_as_plain(preset: str, rule: str) -> None:
    call = tpu_call(REPEATED, PRESETS[preset], RULES[rule], backward=False)
    result = check_accuracy(REPEATED, call)
    if preset in ("exact", "stochastic_output"):
        return  # the first does not depend on the rule, the second is not `plain` bit by bit
    standard = tpu_call(REPEATED, PRESETS[preset])
    plain = ({name: run_plain(REPEATED, how)[name] for name in result} for how in (call, standard))
    assert "out" in closer(result, *plain)  # P̄ is rounded against the maximum of the rule


# `tiled` takes the same sums in the same order. Most rows tie, the first are negative throughout,
# and steps of two thirds of the keys lie above the diagonal.
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
        else:  # a product transposed may be summed in another order
            assert harness.share_of_other_roundings(ours[name], x) < 1e-3, name


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_published_arithmetic_has_the_bits_of_tiled(rule: str, is_causal: bool) -> None:
    """All that is summed is rounded at every step, in the order of `tiled`."""
    case = dataclasses.replace(SAME_ORDER, is_causal=is_causal)
    backward = rule == "published" and is_causal  # rules and steps differ in the forward pass alone
    call = tpu_call(case, numerics.PUBLISHED_EAGER, RULES[rule], backward=backward)
    check_bits_of_tiled(case, call)


def test_steps_above_the_diagonal_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem.Problem, "visits_above_diagonal", False)
    call = tpu_call(SAME_ORDER, numerics.PUBLISHED_EAGER, RULES["published"], backward=False)
    compiled.cache_clear()
    with pytest.raises(AssertionError, match="lse"):
        check_bits_of_tiled(SAME_ORDER, call)
    compiled.cache_clear()


def test_random_bits_are_those_of_tiled() -> None:
    chosen = EXACT.replace(**dict.fromkeys(POINTS, "bfloat16:stochastic"))
    case = dataclasses.replace(LONG, batch=2, heads=2, kv_heads=1, is_causal=False)
    ours = run(case, tpu_call(case, chosen))
    theirs = run(case, tpu_call(case, chosen, sizes=TILED, implementation=tiled))
    for name, x in theirs.items():
        # With every point rounded, one that another order of a sum tips over tips others over.
        assert harness.share_of_other_roundings(ours[name], x) < 0.15, name


TALL = BlockSizes(
    forward=Tile(query=256, kv=256),
    key_gradients=Tile(query=256, kv=128),
    query_gradients=Tile(query=128, kv=256),
    interpret=STRICT,
)


def check_tiles(*, backward: bool) -> None:
    """One tile of two steps, of which the second does not exist for the first rows."""
    case = dataclasses.replace(REPEATED, values="exact_sums")
    # Ō is a sum of numbers in bfloat16, with more bits than they have, until it is rescaled.
    chosen = EXACT.replace(probs="bfloat16", row_sum="rounded", rescale="bfloat16")
    a, b = (
        run(case, tpu_call(case, chosen, sizes=sizes, backward=backward))
        for sizes in (INTERPRETED, TALL)
    )
    harness.check_same(b, a, max(case.rows, case.keys))


def test_tiles_do_not_change_the_arithmetic() -> None:
    check_tiles(backward=True)


def test_a_step_that_does_not_exist_for_a_row_must_not_round_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problem.Problem, "masked_step_changes_nothing", True)
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        check_tiles(backward=False)
    compiled.cache_clear()


# Four tiles of keys, the last one cut short; sums of a step are exact in any order.
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
TALL_STEPS = dataclasses.replace(TALL, forward=Tile(query=256, kv=512))


@pytest.mark.parametrize(
    ("rule", "kv_block"), [*((rule, 256) for rule in RULES), ("published", "all")]
)
def test_a_step_of_several_tiles_is_one_step(rule: str, kv_block: Any) -> None:
    """Ties, m, and what is rounded once a step are those of the step, whatever the tiles."""
    chosen = numerics.PUBLISHED_EAGER.replace(row_sum="rounded")
    in_tiles, in_one = (
        run(
            STEPS,
            tpu_call(STEPS, chosen, RULES[rule], kv_block=kv_block, sizes=sizes, backward=False),
        )
        for sizes in (INTERPRETED, TALL_STEPS)
    )
    for name, x in in_one.items():
        np.testing.assert_array_equal(in_tiles[name], x, err_msg=name)


@pytest.mark.parametrize("kv_block", [256, 300])
def test_presets_in_long_steps_are_as_accurate_as_plain(kv_block: int) -> None:
    """A number of keys beyond their count, off the lanes, is all of them."""
    chosen = numerics.PUBLISHED if kv_block == 256 else numerics.AUXILIARY_OUTPUT
    case = dataclasses.replace(REPEATED, keys=384 if kv_block == 256 else 256)
    call = tpu_call(case, chosen, RULES["dynamic_max"], kv_block=kv_block, backward=False)
    check_accuracy(case, call)


def test_tile_gradients_of_several_tiles_and_of_parts_of_one() -> None:
    """Products of 256 keys and queries are rounded once, in tiles of 128, 256 and 512."""
    case = dataclasses.replace(STEPS, rows=400, heads=2, kv_heads=1, values="normal")
    chosen = EXACT.replace(tile_grads="bfloat16", saved_output="same", delta="normalized")
    small = dataclasses.replace(INTERPRETED, forward=Tile(query=128, kv=256))
    wide = Tile(query=512, kv=512)
    large = dataclasses.replace(small, key_gradients=wide, query_gradients=wide)
    on, off = (run_plain(case, tpu_call(case, chosen, kv_block=step)) for step in (256, 128))
    for sizes in (small, large):
        result = run(case, tpu_call(case, chosen, kv_block=256, sizes=sizes))
        assert closer(result, on, off) == {"dq", "dk", "dv"}


def test_normalized_delta_with_groups_of_heads_and_rows_without_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a kernel that finds no r / s is noticed."""
    case = dataclasses.replace(
        CASES["tiles_gqa_lengths"], rows=130, heads=2, kv_heads=1, key_lengths=(200, 0)
    )
    chosen = EXACT.replace(output="bfloat16", saved_output="same", delta="normalized")
    call = tpu_call(case, chosen)
    on, off = (run_plain(case, how) for how in (call, tpu_call(case, chosen.replace(delta="do_o"))))
    assert closer(check_accuracy(case, call), on, off) == {"dq", "dk"}
    monkeypatch.setattr(query_gradients, "_row_shift", lambda sums: jnp.zeros_like(sums.p))
    compiled.cache_clear()
    mutant = run(case, call)
    compiled.cache_clear()
    with pytest.raises(AssertionError, match="between on and off"):
        closer(mutant, on, off)


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
    keys, head_size = options.pop("length", 8), options.pop("head_size", 64)
    q_shape, kv_shape = ((1, t, 2, head_size) for t in (options.pop("rows", keys), keys))
    dtype = np.dtype(options.pop("dtype", "float32"))
    return Request(spec=spec, q_shape=q_shape, kv_shape=kv_shape, dtype=dtype, **options)


LARGE = Tile(query=2048, kv=2048)
TILE_GRADS = EXACT.replace(tile_grads="bfloat16", kv_block=64)


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
        (request(EXACT.replace(kv_block=64), length=65), "kv_block=64 (its steps"),
        (request(EXACT.replace(kv_block=64), length=64), None),
        (request(EXACT.replace(kv_block=2**16), length=2**16), None),
        (request(EXACT.replace(kv_block="all"), length=1000), None),
        (request(TILE_GRADS, rows=65), "kv_block=64 with tile_grads"),
        (
            request(sizes=dataclasses.replace(INTERPRETED, forward=LARGE), length=4096),
            "needs up to 91 MiB of VMEM of 16 (Tile(query=128, kv=2048) fits)",
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


def test_a_long_step_takes_fewer_rows_or_several_tiles_by_default() -> None:
    for kv_block in (4096, 2**15, "all"):
        chosen = numerics.PROBE.replace(kv_block=kv_block)
        options = {"sizes": None, "length": 2**15, "dtype": "bfloat16", "platform": "tpu"}
        assert tpu.unsupported(request(chosen, **options)) is None
        assert tpu.keys_per_step(request(chosen, **options)) == chosen.step_of(2**15, 0)


def test_a_tile_off_the_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="query must be a multiple of 128, got 64"):
        Tile(query=64, kv=128)
