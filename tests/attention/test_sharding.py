"""Attention over 8 simulated devices equals the unsharded call, with random bits and gradients."""

import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowprec_attn import attention
from lowprec_attn.numerics import EXACT, FLASH, Numerics

pytestmark = pytest.mark.usefixtures("strict_promotion")

CASE = harness.Case(batch=4, heads=8, kv_heads=4, is_causal=True)
AXES: dict[str, tuple[str | None, str | None]] = {
    "heads": (None, "model"),
    "batch and heads": ("data", "model"),
    "nothing": (None, None),
}
# Stochastic rounding at a forward, a backward and a final point, where the last folds the heads of
# a group.
STOCHASTIC = FLASH.replace(
    scores="bfloat16:stochastic",
    output="bfloat16:stochastic",
    ds="bfloat16:stochastic",
    grads="bfloat16:stochastic",
)


def mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)


def results(attend: Callable[..., Any], chosen: Numerics, **options: Any) -> harness.Arrays:
    arrays = harness.inputs(CASE)
    differentiated, rest, cotangents = harness.call_arrays(CASE, arrays)
    rest = {name: x for name, x in rest.items() if x is not None} | options

    @jax.jit
    def forward_and_backward(x: dict[str, Any]) -> dict[str, Any]:
        def call(x: dict[str, Any]) -> Any:
            return attend(
                **harness.by_argument(x),
                **rest,
                numerics=chosen,
                is_causal=True,
                rng_key=jax.random.key(3),
                return_residual=True,
            )

        (out, lse), pullback = jax.vjp(call, x)
        (grads,) = pullback((jnp.asarray(cotangents[0]).astype(out.dtype), cotangents[1]))
        return {"out": out, "lse": lse} | {f"d{name}": g for name, g in grads.items()}

    return harness.as_float32(forward_and_backward(differentiated))


@functools.cache
def whole_results(implementation: str) -> harness.Arrays:
    return results(attention.dot_product_attention, STOCHASTIC, implementation=implementation)


@pytest.mark.parametrize(
    ("implementation", "axes"),
    [("dense", "heads"), ("tiled", "batch and heads"), ("tiled", "nothing")],
)
def test_shards_draw_the_bits_of_the_whole(implementation: str, axes: str) -> None:
    batch_axis, head_axis = AXES[axes]
    split = attention.sharded(mesh(), batch_axis=batch_axis, head_axis=head_axis)
    options = {"implementation": implementation}
    whole = whole_results(implementation)
    shards = results(split, STOCHASTIC, **options)
    np.testing.assert_allclose(shards["lse"], whole["lse"], rtol=4 * plain.EPS32)
    for name in ("out", "dq", "dk", "dv"):
        # XLA may sum a smaller array in another order. Noise of 2^-22 tips one stochastic rounding
        # to bfloat16 in 2^14. Other random bits would change every second entry.
        assert np.mean(shards[name] != whole[name]) < 0.01, name


def test_masks_biases_and_lengths_are_split_too() -> None:
    rng = np.random.default_rng(0)
    b, n, t = CASE.batch, CASE.heads, CASE.rows
    split = attention.sharded(mesh(), batch_axis="data", head_axis="model")
    for mask, bias in (((b, 1), (1, n)), ((1, n), (b, 1)), ((b, n), (1, 1))):
        options = {
            "mask": rng.random((*mask, t, t)) < 0.7,
            "bias": rng.standard_normal((*bias, t, t)).astype(np.float32),
            "key_value_seq_lengths": np.array([20, 3, 11, 0], np.int32),
            "query_seq_lengths": np.array([20, 20, 5, 7], np.int32),
            "query_segment_ids": rng.integers(0, 2, (b, t)),
            "implementation": "dense",
        }
        whole = results(attention.dot_product_attention, EXACT, **options)
        harness.check_same(results(split, EXACT, **options), whole, CASE.keys)


def test_arrays_may_come_split_and_the_result_stays_split() -> None:
    devices, spec = mesh(), PartitionSpec("data", None, "model", None)
    arrays = harness.inputs(CASE)
    q, k, v = (jax.device_put(arrays[n], NamedSharding(devices, spec)) for n in ("q", "k", "v"))
    split = attention.sharded(devices, batch_axis="data", head_axis="model")
    out = jax.jit(functools.partial(split, numerics=EXACT))(q, k, v)
    assert out.sharding.is_equivalent_to(NamedSharding(devices, spec), out.ndim)
    expected = attention.dot_product_attention(q, k, v, numerics=EXACT)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


def test_meshes_with_explicit_axes() -> None:
    """The axes that `jax.make_mesh` makes by default."""
    devices, spec = mesh(AxisType.Explicit), PartitionSpec("data", None, "model", None)
    arrays = harness.inputs(CASE)
    split = functools.partial(
        attention.sharded(devices, batch_axis="data", head_axis="model"), numerics=EXACT
    )
    whole = functools.partial(attention.dot_product_attention, numerics=EXACT)
    qkv = [jnp.asarray(arrays[n]) for n in ("q", "k", "v")]
    np.testing.assert_allclose(split(*qkv), whole(*qkv), rtol=0, atol=1e-6)
    with jax.set_mesh(devices):
        q, k, v = (jax.device_put(x, NamedSharding(devices, spec)) for x in qkv)
        np.testing.assert_allclose(jax.jit(split)(q, k, v), whole(*qkv), rtol=0, atol=1e-6)
        grad = jax.jit(jax.grad(lambda q: jnp.sum(split(q, k, v))))(q)
        for implementation in (None, "tiled"):
            options = {"implementation": implementation}
            with pytest.raises(ValueError, match=r"explicit mesh axis 'data'; call attention.shar"):
                jax.jit(functools.partial(whole, **options))(q, k, v)
        dense = jax.jit(functools.partial(whole, implementation="dense"))(q, k, v)
        np.testing.assert_allclose(dense, whole(*qkv), rtol=0, atol=1e-6)
    unsharded = jax.grad(lambda q: jnp.sum(whole(q, *qkv[1:])))(qkv[0])
    np.testing.assert_allclose(grad, unsharded, rtol=0, atol=1e-6)


def test_a_shard_map_over_some_axes_leaves_the_others_to_the_compiler() -> None:
    qkv = [jnp.asarray(harness.inputs(CASE)[n]) for n in ("q", "k", "v")]
    spec, attend = (
        PartitionSpec("data"),
        functools.partial(attention.dot_product_attention, numerics=EXACT, implementation="dense"),
    )
    with jax.set_mesh(mesh(AxisType.Auto)):
        run = jax.shard_map(attend, in_specs=spec, out_specs=spec, axis_names={"data"})
        np.testing.assert_allclose(jax.jit(run)(*qkv), attend(*qkv), rtol=0, atol=1e-6)


def test_heads_of_different_arithmetic_split_over_the_batch() -> None:
    chosen = [EXACT] * 4 + [EXACT.replace(scores="float16")] * 4
    split = attention.sharded(mesh(), batch_axis="data")
    whole, shards = (
        results(attend, chosen, implementation="dense")  # type: ignore[arg-type]
        for attend in (attention.dot_product_attention, split)
    )
    harness.check_same(shards, whole, CASE.keys)
