"""Every implementation on every case against the float64 reference, and what tiles keep."""

import dataclasses
import functools
import inspect
from typing import Any

import harness
import jax
import jax.numpy as jnp
import max_logits
import numpy as np
import points
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.attention import entry, tiled

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

RULES: dict[str, numerics.RowMax] = {
    "standard": numerics.StandardMax(),
    "published": numerics.PublishedMax(),
    "dynamic_max": numerics.DynamicMax(),
    "lazy_max": numerics.LazyMax(threshold=0.5),  # for scores that vary little
}
# A rule depends on the scores of one step, so rules are tried where a maximum repeats.
PRESETS_AND_RULES = [
    *((preset, "standard") for preset, n in numerics.PRESETS.items() if not n.normalize_probs),
    ("flash_attention_3", "lazy_max"),
    ("published", "published"),
    ("published", "dynamic_max"),
]
# Every choice and rule, but not every combination.
EVERY_CHOICE = {
    **{
        f"{preset}-standard": (numerics.PRESETS[preset], "standard")
        for preset in points.presets_with_every_choice([of for of, _ in PRESETS_AND_RULES])
    },
    **{
        f"{preset}-{rule}": (numerics.PRESETS[preset], rule)
        for preset, rule in PRESETS_AND_RULES
        if rule != "standard"
    },
}
# The same choices and rules in fewer arithmetics, and every point.
IN_ONE_STEP = {
    "published_eager, published": (numerics.PUBLISHED_EAGER, "published"),
    "published_as_compiled": (numerics.PUBLISHED_AS_COMPILED, "standard"),
    "matched, dynamic_max": (numerics.MATCHED, "dynamic_max"),
    "scale_first, auxiliary, lazy_max": (
        numerics.FLASH_ATTENTION_3.replace(saved_output="auxiliary"),
        "lazy_max",
    ),
    "dp_p, stochastic": (
        numerics.DELTA_DP_P.replace(output="bfloat16:stochastic", exponent="shift_first"),
        "standard",
    ),
    **{
        name: (numerics.PRESETS[name], "standard")
        for name in (
            *("jax_pallas", "normalized_delta", "corrected_after_cast"),
            *("flash_attention_3_fp8", "transformer_engine_fp8"),
        )
    },
    "every point": (
        numerics.EXACT.replace(**dict.fromkeys(numerics.POINTS, "bfloat16")),
        "standard",
    ),
}
KEY = jax.random.key(7)
IN_PLAIN_JAX = [name for name in harness.IMPLEMENTATIONS if name not in harness.KERNELS]


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(("implementation", "case"), harness.every_case())
def test_exact_arithmetic_is_as_accurate_as_plain_float32(implementation: str, case: str) -> None:
    problem = harness.cases_of(implementation)[case]
    is_long = case in harness.LONG_CASES
    how = harness.strict(implementation) if is_long else harness.IMPLEMENTATIONS[implementation]
    arrays = harness.inputs(problem)
    # The same program also returns the largest scores, which do not change the other results; see
    # test_max_logit.py.
    result = harness.run(how, problem, arrays, numerics.EXACT, max_logit=True)
    others = {name: x for name, x in result.items() if name != "max_logit"}
    harness.check(
        others,
        harness.run_plain(problem, arrays, how.numerics(numerics.EXACT)),
        harness.oracle(problem, arrays),
        noise=harness.score_noise(problem, arrays),
    )
    max_logits.check(
        result["max_logit"],
        max_logits.exact(problem, arrays),
        max_logits.tolerance(problem, arrays),
    )
    harness.check_skips(how, problem, arrays)
    harness.check_hidden(how, problem, arrays, result, numerics.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "case"),
    [(name, case) for name in IN_PLAIN_JAX for case in harness.cases_of(name)],
)
def test_so_is_optimized_code(implementation: str, case: str) -> None:
    test_exact_arithmetic_is_as_accurate_as_plain_float32(implementation, case)


@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_presets_and_rules_are_as_accurate_as_plain(choice: str) -> None:
    """In tiles; `dense` has the same bits as `tiled` in one step, as tested below."""
    problem = harness.CASES["both_lengths_repeated_maxima"]
    how, arrays = harness.IMPLEMENTATIONS["tiled_odd"], harness.inputs(problem)
    chosen, rule = EVERY_CHOICE[choice]
    # The plain implementation rounds to nearest. Stochastic rounding moves up to twice as far.
    factor = 2 if chosen.needs_bits else 1
    same = harness.run_plain(
        problem, arrays, how.numerics(chosen.replace(output="bfloat16")), RULES[rule]
    )
    result = harness.run(how, problem, arrays, chosen, RULES[rule], KEY)
    harness.check(result, same, harness.oracle(problem, arrays), 2 * factor)


@pytest.mark.parametrize("preset", ["standard", "jax_nn"])
def test_unfused_presets_are_as_accurate_as_plain(preset: str) -> None:
    chosen = numerics.PRESETS[preset]
    problem, how = harness.CASES["causal_repeated_maxima"], harness.IMPLEMENTATIONS["dense"]
    arrays = harness.inputs(problem)
    harness.check(
        harness.run(how, problem, arrays, chosen),
        harness.run_plain(problem, arrays, chosen),
        harness.oracle(problem, arrays),
    )


@pytest.mark.parametrize("choice", IN_ONE_STEP)
def test_tiled_in_one_step_equals_dense_bit_for_bit(choice: str) -> None:
    """What test_points.py shows of `tiled` at each point and choice therefore holds for `dense`."""
    problem = harness.CASES["both_lengths_repeated_maxima"]
    arrays = harness.inputs(problem)
    one_tile = harness.Implementation(
        name="tiled", kv_block=64, block_sizes=tiled.BlockSizes(query=64, kv_bwd=64)
    )
    chosen, rule = IN_ONE_STEP[choice]
    row_max = RULES[rule]
    dense_ = harness.run(harness.IMPLEMENTATIONS["dense"], problem, arrays, chosen, row_max, KEY)
    tiled_ = harness.run(one_tile, problem, arrays, chosen, row_max, KEY)
    for name, x in dense_.items():
        np.testing.assert_array_equal(tiled_[name], x, err_msg=name)


# Choices that a tile could change: random bits by position, scales of blocks and of arrays, what
# steps round, and each sum over the steps of a backward pass.
OF_TILES = {
    "stochastic_output-standard",
    "transformer_engine_fp8-standard",
    "flash_attention_3_fp8-standard",
    "published_eager-standard",
    "corrected_after_cast-standard",
    "matched-standard",
    "published-published",
    "flash_attention_3-lazy_max",
}
assert EVERY_CHOICE.keys() >= OF_TILES


@pytest.mark.parametrize("choice", sorted(OF_TILES))
def test_block_sizes_do_not_change_the_arithmetic(choice: str) -> None:
    problem = harness.CASES["both_lengths_repeated_maxima"]
    arrays = harness.inputs(problem)
    chosen, rule = EVERY_CHOICE[choice]
    row_max = RULES[rule]
    first = harness.IMPLEMENTATIONS["tiled_odd"]
    second = dataclasses.replace(first, block_sizes=tiled.BlockSizes(query=16, kv_bwd=4))
    a, b = (harness.run(how, problem, arrays, chosen, row_max, KEY) for how in (first, second))
    # A row of the forward pass is the same sum in any tile, with the same random bits.
    np.testing.assert_array_equal(a["out"], b["out"])
    np.testing.assert_array_equal(a["lse"], b["lse"])
    harness.check_same(b, a, max(problem.rows, problem.keys))


ATTEND = functools.partial(attention.dot_product_attention, return_residual=True)
MIXED = numerics.FLASH.replace(scores="bfloat16:stochastic", output="bfloat16:stochastic")


def qkv(case: harness.Case) -> list[jax.Array]:
    arrays = harness.inputs(case)
    return [jnp.asarray(arrays[name]) for name in ("q", "k", "v")]


# Arguments that mean the same as in `jax.nn.dot_product_attention`, and their values.
_LENGTHS = np.array([11, 20], np.int32)
ARGUMENTS = {
    "bias": np.random.default_rng(1).standard_normal((1, 2, 20, 20)).astype(np.float32),
    "mask": np.random.default_rng(2).random((2, 1, 20, 20)) < 0.8,
    "scale": 0.3,
    "is_causal": True,
    "local_window_size": (9, 4),
    "query_seq_lengths": _LENGTHS[::-1],
    "key_value_seq_lengths": _LENGTHS,
    "return_residual": True,
}


def test_the_arguments_are_those_of_jax_nn_by_name() -> None:
    names = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(names) - {*ARGUMENTS, "query", "key", "value"} == {"implementation"}
    query, key, value = qkv(harness.Case())
    call = {"query": query, "key": key, "value": value} | ARGUMENTS
    call["mask"][..., 0] = True  # because a row without keys is 0 here and a mean in JAX
    ours = attention.dot_product_attention(**call, numerics="exact", implementation="dense")
    settings = [name for name, x in call.items() if not isinstance(x, np.ndarray | jax.Array)]
    compiled = jax.jit(jax.nn.dot_product_attention, static_argnames=[*settings, "implementation"])
    theirs = compiled(**call, implementation="xla")
    for x, y in zip(ours, theirs, strict=True):
        for batch, length in enumerate(ARGUMENTS["query_seq_lengths"]):
            np.testing.assert_allclose(x[batch, :length], y[batch, :length], rtol=0, atol=1e-5)


def test_heads_equal_those_of_separate_calls() -> None:
    """With numerics and rules per head and random bits; heads 0 1 | 2 3 | 4 5 share a key head.

    Heads are split and joined outside the implementations, so one suffices; `dense` compiles
    fastest.
    """
    case = harness.Case(heads=6, kv_heads=3, is_causal=True, values="repeated_maxima")
    pairs = [
        (MIXED, numerics.StandardMax()),
        (numerics.EXACT, numerics.StandardMax()),
        (MIXED, numerics.DynamicMax()),
    ]

    shared = {"is_causal": True, "rng_key": KEY, "implementation": "dense"}

    @functools.partial(jax.jit, static_argnames=("numerics", "row_max"))
    def results(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        attend = functools.partial(ATTEND, **shared, **options)
        (out, lse), pullback = jax.vjp(attend, q, k, v)
        return (out, lse, *pullback((jnp.cos(out), lse)))

    of_heads = [pair for pair in pairs for _ in range(2)]
    by_head = {
        "numerics": tuple(chosen for chosen, _ in of_heads),
        "row_max": tuple(rule for _, rule in of_heads),
    }
    given = (*qkv(case), None, None)
    call, _ = entry.prepare(given, entry.Options(**by_head, **shared))
    of_groups, _ = entry.prepare(given, entry.Options(numerics=group_heads(of_heads), **shared))
    assert of_groups.parts == call.parts
    mixed = results(*qkv(case), **by_head)
    for group, (chosen, rule) in enumerate(pairs):
        alone = results(*qkv(case), numerics=chosen, row_max=rule)
        for x, y, size in zip(mixed, alone, (2, 2, 2, 1, 1), strict=True):
            heads = slice(group * size, (group + 1) * size)
            a, b = np.asarray(x)[:, :, heads], np.asarray(y)[:, :, heads]
            # Other random bits would move about half of all entries by 2^-8. A smaller array may be
            # summed in another order, which tips few roundings.
            assert np.mean(np.abs(a - b) > 2.0**-12 * np.abs(b).max()) < 0.01


def test_per_head_output_formats_meet_in_float32() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(harness.Case()))
    chosen = [numerics.FLASH, numerics.FLASH.replace(output="float32")]
    out, _ = ATTEND(q, k, v, numerics=chosen)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[:, :, 0], ATTEND(q, k, v)[0][:, :, 0].astype(jnp.float32))


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_without_a_batch_axis(implementation: str) -> None:
    q, k, v = qkv(harness.Case())
    mask = jnp.asarray(np.random.default_rng(0).random((2, 20, 20)) < 0.7)
    attend = functools.partial(ATTEND, implementation=implementation, numerics=numerics.EXACT)
    batched = attend(q[:1], k[:1], v[:1], mask=mask[None])
    for x, y in zip(attend(q[0], k[0], v[0], mask=mask), batched, strict=True):
        np.testing.assert_array_equal(x, y[0])


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_vmap_of_forward_and_gradient_with_its_own_lengths(implementation: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 9, 2, 8)), jnp.float32) for _ in range(3))
    lengths = jnp.array([[9, 4], [0, 1], [7, 7]], jnp.int32)

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            out, _ = ATTEND(
                q,
                k,
                v,
                key_value_seq_lengths=lengths,
                is_causal=True,
                implementation=implementation,
                numerics=numerics.EXACT,
            )
            return jnp.sum(out**2)

        return jax.grad(loss)(q)

    together = jax.jit(jax.vmap(gradient))(q, k, v, lengths)
    one = jax.jit(gradient)
    for i in range(3):
        np.testing.assert_allclose(together[i], one(q[i], k[i], v[i], lengths[i]), atol=1e-5)
    assert np.all(together[1, 0] == 0.0)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_checkpoint_repeats_the_same_random_bits(implementation: str) -> None:
    q, k, v = qkv(harness.Case(is_causal=True))

    @jax.jit
    def gradients(q: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(q: jax.Array) -> jax.Array:
            out, lse = ATTEND(q, k, v, numerics=MIXED, rng_key=key, implementation=implementation)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

        return jax.grad(loss)(q), jax.grad(jax.checkpoint(loss))(q)

    kept, recomputed = gradients(q, KEY)
    np.testing.assert_allclose(recomputed, kept, atol=1e-6)
    assert np.abs(gradients(q, jax.random.key(8))[0] - kept).max() > 1e-4


@pytest.mark.parametrize("implementation", [None, "dense", "tiled"])
def test_equal_calls_outside_of_a_jit_are_compiled_once(
    implementation: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Their gradients are compiled once too, whatever function is differentiated."""
    q, k, v = qkv(harness.Case(is_causal=True))

    def call() -> None:
        def loss(q: jax.Array) -> jax.Array:
            return ATTEND(q, k, v, is_causal=True, implementation=implementation)[1].sum()

        jax.grad(loss)(q)
        loss(q)

    call()
    with jax.log_compiles():
        call()
        assert "Compiling" not in caplog.text
        ATTEND(q, k, v, scale=0.3, implementation=implementation)
    assert "Compiling jit(_compute)" in caplog.text  # otherwise the test could not see it


def test_memory_of_tiled_is_linear_in_the_length() -> None:
    def temporary_bytes(length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(ATTEND(q, k, v, is_causal=True, implementation="tiled")[0])

        step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return step.memory_analysis().temp_size_in_bytes

    # At 1,024 keys a tile still takes most of the memory, whose layout is up to XLA.
    sizes = [temporary_bytes(length) for length in (2048, 4096, 8192)]
    # Tiles have a fixed size, the rest grows with the length: linear in the keys, no square term.
    assert sizes[2] - sizes[1] <= 2.1 * (sizes[1] - sizes[0])
    assert sizes[2] < 8192 * 8192 * 4 / 16


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(harness.Case())
    chosen = numerics.FLASH.replace(kv_block=19)  # no other test uses this step
    with caplog.at_level("INFO", logger="lowprec_attn"):
        for _ in range(2):
            ATTEND(q, k, v, numerics=chosen)
    assert [r.message for r in caplog.records] == [f"attention: tiled (shift_first) for {chosen}"]


@pytest.mark.parametrize(
    "options",
    [
        lambda n: {"key_value_seq_lengths": [n, n]},
        lambda n: {"is_causal": True, "query_offset": [n, n]},
        lambda n: {"sinks": [n * 1.0, n * 1.0]},
        lambda n: {"query_segment_ids": [[n, 0, n], [n, n, 0]]},
    ],
    ids=["lengths", "offset", "sinks", "segments"],
)
def test_a_list_may_hold_traced_numbers(options: Any) -> None:
    q = jax.random.normal(jax.random.key(0), (2, 3, 2, 16))

    def attend(n: Any) -> Any:
        return attention.dot_product_attention(q, q, q, numerics="exact", **options(n))

    # Two programs may fuse differently, so they may differ by a few bits.
    np.testing.assert_allclose(jax.jit(attend)(2), attend(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        lambda n: {"query_segment_ids": [n, 0, n]},
        lambda n: {"mask": [[[True, False, n > 3]] * 3]},
        lambda n: {"bias": [[[n * 1.0, 0.0, 1.0]] * 3]},
    ],
    ids=["segments", "mask", "bias"],
)
def test_a_list_may_lack_the_batch_axis(options: Any) -> None:
    q = jax.random.normal(jax.random.key(0), (3, 2, 16))

    def attend(n: Any, batch: Any = None) -> Any:
        given = {name: np.asarray(x)[batch] if batch else x for name, x in options(n).items()}
        x = q[batch] if batch else q
        return attention.dot_product_attention(x, x, x, numerics="exact", **given)

    expected = attend(2, (None,))[0]
    np.testing.assert_array_equal(attend(2), expected)
    np.testing.assert_allclose(jax.jit(attend)(2), expected, rtol=1e-6, atol=1e-6)
