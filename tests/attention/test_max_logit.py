"""The largest score of each head, which attention returns with `return_max_logit`.

`test_attention.py` checks its value on every case, along with the other results of the program.
"""

import dataclasses
import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from max_logits import calls, check, exact, tolerance

from lowprec_attn import attention, numerics
from lowprec_attn.numerics import Numerics, RowMax

STANDARD = numerics.StandardMax()
# Arithmetics whose m is not the largest score, each for a reason of its own.
OTHER_MAXIMA: dict[str, tuple[Numerics, RowMax]] = {
    "dynamic_max": (numerics.EXACT, numerics.DynamicMax()),
    "published_max": (numerics.EXACT, numerics.PublishedMax()),
    "lazy_max": (numerics.EXACT, numerics.LazyMax(threshold=4.0)),
    "whole_max": (numerics.EXACT.replace(exponent="whole_max"), STANDARD),
    "rounded m": (numerics.EXACT.replace(stats="bfloat16"), STANDARD),
    "rounded scores": (numerics.EXACT.replace(scores="bfloat16"), numerics.DynamicMax()),
}


# `tiled`, in steps that cut every length, has all of them; `dense` runs its code in one step. A
# kernel keeps the largest score as m if the two are the same, and otherwise next to m, whatever m
# is.
OTHER_MAXIMA_OF = [
    *(("tiled_odd", choice) for choice in OTHER_MAXIMA),
    ("dense", "lazy_max"),
    ("gpu", "dynamic_max"),
    ("gpu", "whole_max"),
    ("gpu", "rounded scores"),
    ("tpu", "published_max"),
    ("tpu", "rounded m"),
]

# Where the other results are also compared with those of a call without the largest score.
BITS_KEPT = [(name, "lazy_max") for name in ("tiled_odd", "dense")]
BITS_KEPT += [("gpu", "whole_max"), ("tpu", "published_max")]


@pytest.mark.parametrize(("implementation", "choice"), OTHER_MAXIMA_OF)
def test_it_is_not_what_the_softmax_subtracts(implementation: str, choice: str) -> None:
    how, (chosen, row_max) = harness.IMPLEMENTATIONS[implementation], OTHER_MAXIMA[choice]
    problem = harness.CASES["both_lengths_repeated_maxima"]
    arrays = harness.inputs(problem)
    *results, found = calls(how, problem, arrays, chosen, row_max, return_max_logit=True)
    expected, within = exact(problem, arrays), tolerance(problem, arrays)
    if choice == "rounded scores":
        within += 2**-8 * np.abs(expected[np.isfinite(expected)]).max()
    check(found, expected, within)
    if (implementation, choice) not in BITS_KEPT:
        return
    for result, without in zip(results, calls(how, problem, arrays, chosen, row_max), strict=True):
        np.testing.assert_array_equal(result, without)


@pytest.mark.parametrize("implementation", ["dense", "tiled_odd", *harness.KERNELS])
def test_rows_and_keys_that_do_not_exist_have_no_score_of_0(implementation: str) -> None:
    how = harness.IMPLEMENTATIONS[implementation]
    problem = dataclasses.replace(
        harness.CASES["both_lengths"], values="large_negative_scores", is_causal=False
    )
    arrays = harness.inputs(problem)
    *_, found = calls(how, problem, arrays, numerics.EXACT, STANDARD, return_max_logit=True)
    assert exact(problem, arrays).max() < -50
    check(found, exact(problem, arrays), tolerance(problem, arrays))


@pytest.mark.parametrize("where", ["a row", "every row", "a key"])
@pytest.mark.parametrize("implementation", ["dense", "tiled", *harness.KERNELS])
def test_a_score_of_nan_makes_it_nan_for_its_head(implementation: str, where: str) -> None:
    how = harness.IMPLEMENTATIONS[implementation]
    problem = harness.Case(rows=128, keys=128)
    arrays = harness.inputs(problem)
    expected, within = exact(problem, arrays), tolerance(problem, arrays)
    q, k = arrays["q"].copy(), arrays["k"].copy()
    part = {"a row": q[1, 100, 1, 3:4], "every row": q[1, :, 1], "a key": k[1, 100, 1]}[where]
    part[...] = np.nan
    arrays = {**arrays, "q": q, "k": k}
    *_, found = calls(how, problem, arrays, numerics.EXACT, STANDARD, return_max_logit=True)
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [(1, 1)])
    expected[1, 1] = np.nan
    np.testing.assert_allclose(found, expected, rtol=0, atol=within)


def test_a_row_of_nan_is_not_lost_among_many() -> None:
    """In an array of this shape XLA's maximum on a CPU leaves NaN out."""
    problem = harness.Case(rows=512, keys=64, heads=8, kv_heads=8, head_size=16)
    arrays = harness.inputs(problem)
    arrays = {**arrays, "q": arrays["q"].copy()}
    arrays["q"][0, 256, 7] = np.nan
    how = harness.IMPLEMENTATIONS["dense"]
    *_, found = calls(how, problem, arrays, numerics.EXACT, STANDARD, return_max_logit=True)
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [(0, 7)])


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [("gpu", numerics.DynamicMax()), ("tpu", STANDARD), ("tpu", numerics.DynamicMax())],
    ids=str,
)
def test_steps_of_several_tiles_have_the_same(implementation: str, rule: RowMax) -> None:
    how = harness.IMPLEMENTATIONS[implementation]
    how = dataclasses.replace(how, kv_block=2 * how.tile)
    problem = dataclasses.replace(CASE, rows=2 * how.tile, keys=3 * how.tile, batch=1)
    arrays = harness.inputs(problem)
    *_, found = calls(how, problem, arrays, numerics.EXACT, rule, return_max_logit=True)
    check(found, exact(problem, arrays), tolerance(problem, arrays))


CASE = harness.CASES["causal_repeated_maxima"]
ARRAYS = harness.inputs(CASE)
HOW_TO_TRANSFORM = ("dense", "tiled", "gpu", "tpu")


def attend(implementation: str, *qkv: jax.Array, **options: Any) -> Any:
    how = harness.IMPLEMENTATIONS[implementation]
    options = {"is_causal": True, "numerics": how.numerics(numerics.EXACT)} | options
    return attention.dot_product_attention(
        *qkv,
        implementation=how.name,
        block_sizes=how.block_sizes,
        return_max_logit=True,
        **options,
    )


QKV = tuple(jnp.asarray(ARRAYS[name]) for name in "qkv")


@pytest.mark.parametrize("implementation", HOW_TO_TRANSFORM)
def test_it_has_no_gradient_and_leaves_the_others_alone(implementation: str) -> None:
    def loss(weight: float, *qkv: jax.Array) -> jax.Array:
        out, max_logit = attend(implementation, *qkv)
        return jnp.sum(out * ARRAYS["do"]) + weight * jnp.sum(max_logit)

    # Without remat, inside it, and in a scan, as in a training step.
    def of_steps(weight: float, *qkv: jax.Array) -> jax.Array:
        step = jax.checkpoint(functools.partial(loss, weight))
        return lax.scan(lambda sum_, _: (sum_ + step(*qkv), None), 0.0, length=2)[0]

    gradients = jax.jit(jax.grad(of_steps, argnums=(1, 2, 3)))
    with_it, without = (gradients(weight, *QKV) for weight in (1e3, 0.0))
    for x, y in zip(with_it, without, strict=True):
        assert np.any(x)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", HOW_TO_TRANSFORM)
def test_an_element_of_a_batch_has_its_own(implementation: str) -> None:
    one = functools.partial(attend, implementation)
    _, found = jax.jit(one)(*QKV)
    assert len(np.unique(found)) == found.size
    # Without a batch axis, a call returns [N].
    _, by_vmap = jax.jit(jax.vmap(one))(*QKV)
    np.testing.assert_allclose(by_vmap, found, rtol=4 * plain.EPS32)


def test_heads_of_different_arithmetic_keep_their_places() -> None:
    case = harness.CASES["gqa_head_32"]
    arrays = harness.inputs(case)
    kinds = ["exact", "exact", "flash", "flash"]
    *_, found = attention.dot_product_attention(
        *(arrays[name] for name in "qkv"),
        is_causal=True,
        numerics=kinds[::-1],
        row_max=["standard", "standard", "dynamic_max", "dynamic_max"],
        implementation="tiled",
        return_residual=True,
        return_max_logit=True,
    )
    check(found, exact(case, arrays), tolerance(case, arrays))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_of_batch_and_heads_have_theirs(axis_type: AxisType) -> None:
    case = harness.Case(batch=4, heads=8, kv_heads=4, is_causal=True)
    arrays = harness.inputs(case)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")
    call = functools.partial(split, is_causal=True, numerics="exact", implementation="tiled")
    _, found = jax.jit(functools.partial(call, return_max_logit=True))(*(arrays[x] for x in "qkv"))
    check(found, exact(case, arrays), tolerance(case, arrays))


@pytest.mark.parametrize("split", ["rows", "keys"])
def test_over_shards_of_a_sequence_it_is_the_largest_of_theirs(split: str) -> None:
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
    of_rows, of_keys = PartitionSpec(None, "sequence"), PartitionSpec()
    if split == "keys":
        of_rows, of_keys = of_keys, of_rows

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(of_rows, of_keys, of_keys),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def largest(*qkv: jax.Array) -> jax.Array:
        _, found = attend("tiled", *qkv, is_causal=False)
        return lax.pmax(found, "sequence")

    case = dataclasses.replace(CASE, is_causal=False)
    check(jax.jit(largest)(*QKV), exact(case, ARRAYS), tolerance(case, ARRAYS))


@pytest.mark.parametrize("implementation", ["tiled", "gpu"])
def test_a_packed_array_has_the_same(implementation: str) -> None:
    _, found = jax.jit(functools.partial(attend, implementation))(jnp.stack(QKV, axis=2))
    check(found, exact(CASE, ARRAYS), tolerance(CASE, ARRAYS))


def test_every_way_to_call_returns_what_is_asked_for() -> None:
    call = functools.partial(attention.dot_product_attention, *QKV, is_causal=True)
    out = call()
    assert isinstance(out, jax.Array)
    (batch, rows, heads, _), (_, lse) = out.shape, call(return_residual=True)
    shapes = [x.shape for x in call(return_residual=True, return_max_logit=True)]
    assert shapes == [out.shape, (batch, rows, heads), (batch, heads)]
    same, found = call(return_max_logit=True)
    np.testing.assert_array_equal(same, out)
    assert found.shape == (batch, heads)
    assert (found <= lse.max(axis=1)).all()
