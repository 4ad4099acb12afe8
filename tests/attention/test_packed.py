"""q, k and v in one array [B, T, 3, N, H] give the same bits as three, in every implementation."""

import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import PRESETS, call_of, run

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import planes
from lowprec_attn.numerics import FLASH, DynamicMax

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CASE = harness.Case(is_causal=True, dtype="bfloat16", rows=21, keys=21, heads=3, kv_heads=3)
LENGTHS = harness.Case(
    rows=21,
    keys=21,
    heads=2,
    head_size=24,
    query_lengths=(4, 17),
    key_lengths=(20, 6),
    sinks=True,
    soft_cap=2.0,
)


def results(attend: Callable[..., Any], operands: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """O, lse and the gradients of `attend(q, k, v)` or `attend(qkv)`."""

    @jax.jit
    def forward_and_backward(*operands: jax.Array) -> tuple[Any, Any]:
        out, pullback = jax.vjp(functools.partial(attend, return_residual=True), *operands)
        return out, planes(*pullback(jax.tree.map(jnp.ones_like, out)))

    (out, lse), grads = forward_and_backward(*operands)
    return harness.as_float32({"out": out, "lse": lse} | dict(zip("qkv", grads, strict=True)))


def assert_same_bits(attend: Callable[..., Any], **how: Any) -> None:
    arrays = harness.inputs(CASE)
    qkv = tuple(jnp.asarray(arrays[name]) for name in "qkv")
    attend = functools.partial(attend, **how)
    apart, packed = results(attend, qkv), results(attend, (jnp.stack(qkv, axis=2),))
    assert np.abs(apart["k"]).max() > 0
    for name, x in apart.items():
        np.testing.assert_array_equal(packed[name], x, name)


@pytest.mark.parametrize(
    "how",
    [
        {"implementation": "dense", "logits_soft_cap": 2.0},
        {
            "implementation": "tiled",
            "sinks": jnp.array([0.5, -1.0, 2.0]),
            "numerics": FLASH.replace(output="bfloat16:stochastic"),
            "rng_key": jax.random.key(1),
        },
        {"numerics": [numerics.PUBLISHED, FLASH, FLASH], "row_max": DynamicMax()},
        {"implementation": "gpu", "block_sizes": harness.GPU_TILES},
    ],
    ids=["dense", "tiled", "heads apart", "gpu"],
)
def test_an_array_of_all_three_gives_the_same_bits(how: dict[str, Any]) -> None:
    assert_same_bits(attention.dot_product_attention, is_causal=True, **how)


def test_shards_of_an_array_of_all_three_do() -> None:
    mesh = jax.make_mesh((2, 3), ("data", "model"), devices=jax.devices()[:6])
    assert_same_bits(
        attention.sharded(mesh, batch_axis="data", head_axis="model"),
        numerics=FLASH.replace(scores="bfloat16:stochastic"),
        rng_key=jax.random.key(1),
    )


def test_the_batch_axis_may_be_left_out_or_mapped() -> None:
    arrays = harness.inputs(CASE)
    packed = jnp.stack([jnp.asarray(arrays[name]) for name in "qkv"], axis=2)
    options = {"implementation": "gpu", "block_sizes": harness.GPU_TILES}
    attend = functools.partial(attention.dot_product_attention, is_causal=True, **options)
    whole = attend(packed)
    np.testing.assert_array_equal(attend(packed[1]), whole[1])
    np.testing.assert_array_equal(jax.vmap(attend)(packed), whole)
    of_one = jax.grad(lambda x: attend(x).astype(jnp.float32).sum())
    np.testing.assert_array_equal(jax.vmap(of_one)(packed), of_one(packed))


def test_the_gpu_kernels_read_and_write_it_in_place() -> None:
    """With lengths, shapes off the tiles, and a head size between powers of two.

    This preset has a kernel of δ too. On a device every preset runs.
    """
    chosen = PRESETS["delta_dp_p"]
    apart, packed = (
        run(LENGTHS, call_of(LENGTHS, chosen, sizes=harness.GPU_TALL, packed=packed))
        for packed in (False, True)
    )
    for name, x in apart.items():
        np.testing.assert_array_equal(packed[name], x, name)
