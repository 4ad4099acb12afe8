"""The trainer's signals describe the softmax steps that its attention takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_settings

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.attention.dispatch import keys_per_step
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.numerics import StandardMax
from lowprec_attn.training import signals
from lowprec_attn.training.step import make_steps, root_key
from pallas_kernels.gpu import block_sizes


def request(chosen=numerics.PROBE, *, keys=512, head_size=64, sizes=None, platform=None):
    spec = Spec(numerics=chosen, row_max=StandardMax(), scale=0.1, block_sizes=sizes)
    shape = (1, keys, 1, head_size)
    return Request(
        spec=spec, q_shape=shape, kv_shape=shape, dtype=jnp.dtype("bfloat16"), platform=platform
    )


@pytest.mark.parametrize(
    ("asked", "implementation", "keys"),
    [
        (request(), None, tiled.DEFAULT_KV_BLOCK),
        (request(numerics.FLASH.replace(kv_block=24)), None, 24),
        (request(numerics.PUBLISHED, keys=1024), None, 512),
        (request(numerics.PUBLISHED, keys=1024, platform="cuda"), None, 512),
        (request(numerics.PUBLISHED, keys=1024, platform="tpu"), None, 512),
        (request(numerics.STANDARD), None, 512),
        (request(), "dense", 512),
        (request(platform="cuda"), None, 64),
        (request(keys=1024, platform="tpu"), None, 512),
        (request(numerics.FLASH.replace(kv_block=128), platform="tpu"), None, 128),
        (request(numerics.EXACT, head_size=256, platform="cuda"), None, 16),
        (request(numerics.FLASH.replace(kv_block=128), platform="cuda"), None, 128),
        (request(numerics.FLASH.replace(kv_block=48), platform="cuda"), None, 48),
    ],
)
def test_the_step_is_that_of_what_serves_the_request(asked, implementation, keys):
    assert keys_per_step(asked, implementation) == keys


TILE = block_sizes.Tile(query=16, kv=16)
INTERPRETED = block_sizes.BlockSizes(
    forward=TILE, key_gradients=TILE, query_gradients=TILE, interpret=True
)


@pytest.mark.parametrize(
    ("name", "keys", "sizes"),
    [("tiled", 512, None), ("gpu", 64, INTERPRETED)],
    ids=["tiled", "gpu"],
)
def test_without_kv_block_an_implementation_takes_the_step_that_it_tells(name, keys, sizes):
    told = keys_per_step(request(keys=keys, head_size=16, sizes=sizes), name)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, keys, 1, 16), jnp.bfloat16)

    def out(kv_block):
        return attention.dot_product_attention(
            q,
            k,
            v,
            numerics=numerics.PROBE.replace(kv_block=kv_block),
            implementation=name,
            block_sizes=sizes,
        )

    np.testing.assert_array_equal(out(None), out(told))
    assert (out(None) != out(2 * told)).any()


@pytest.mark.parametrize(
    ("implementation", "kv_block", "keys"),
    [(None, None, 8), ("dense", None, 32), (None, 16, 16), ("dense", 64, 32)],
)
def test_the_signals_describe_the_step_that_runs(implementation, kv_block, keys, monkeypatch):
    described = []

    def attention_signals(*_, numerics, **options):
        described.extend(numerics)
        return {"query_weight_gradient_error": jnp.zeros(2), "common_direction": jnp.zeros(2)}

    monkeypatch.setattr(signals, "attention_signals", attention_signals)
    monkeypatch.setattr(tiled, "DEFAULT_KV_BLOCK", 8)
    settings = tiny_settings(
        attention__numerics="probe",
        attention__implementation=implementation,
        attention__kv_block=kv_block,
    )
    steps = make_steps(settings, Attend(attention.dot_product_attention))
    inputs = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    params = jax.eval_shape(steps.init, root_key(settings)).params
    jax.eval_shape(signals.make_signals(settings, steps), params, inputs, inputs, jax.random.key(0))
    shared = numerics.PROBE.replace(kv_block=keys), StandardMax()
    assert described == [*group_heads([shared] * 2)] * 2
