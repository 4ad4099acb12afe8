"""The trainer's signals describe the softmax steps of its attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_settings

from lowprec_attn import attention, diagnostics, numerics
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
        names = "query_weight_gradient_error", "query_weight_gradient_exact", "common_direction"
        return dict.fromkeys(names, jnp.zeros(2))

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
    jax.eval_shape(
        signals.make_signals(settings.model, settings.attention, steps.loss),
        params,
        inputs,
        inputs,
        jax.random.key(0),
    )
    shared = numerics.PROBE.replace(kv_block=keys), StandardMax()
    assert described == [*group_heads([shared] * 2)]  # one description serves both layers


def test_layers_of_one_arithmetic_are_compiled_once_and_keep_their_places():
    settings = tiny_settings(
        model__layers=3,
        attention__numerics="stochastic_output",
        attention__layers={"1": {"numerics": "probe"}},
    )
    steps = make_steps(settings, Attend(attention.dot_product_attention))
    params = jax.jit(steps.init)(root_key(settings)).params
    ids = jax.random.randint(jax.random.key(1), (1, 33), 0, 257)
    args = (params, ids[:, :-1], ids[:, 1:], jax.random.key(2))
    traced = jax.jit(signals.make_signals(settings.model, settings.attention, steps.loss)).trace(
        *args
    )
    found, directions = traced.lower().compile()(*args)
    names = [f"layer_{i}" for i in range(3)]
    assert [*found] == [*directions] == names
    layers = jax.jit(signals.make_layers(settings.model, steps.loss))(*args)
    for i, arrays in [(0, layers[0]), (2, layers[2])]:
        alone = diagnostics.attention_signals(
            **arrays._asdict(),
            numerics=signals.as_computed(settings.attention, i, arrays, None),
            is_causal=True,
            rng_key=jax.random.fold_in(args[-1], i),
            common_direction=True,
        )
        np.testing.assert_allclose(
            directions[names[i]], alone.pop("common_direction"), rtol=1e-5, atol=1e-6
        )
        for name in ("score_maximum", "output_error_rms", "query_weight_norm", "delta_rms"):
            np.testing.assert_allclose(found[names[i]][name], alone[name], rtol=1e-4)
    equations = traced.jaxpr.eqns
    lengths = [e.params["length"] for e in equations if e.primitive.name == "scan"]
    assert [n for n in lengths if n > 1] == [2]


def test_signals_stand_on_the_lse_of_the_run():
    """If the lse of a run is too large by 1/2, rows of P sum to exp(−1/2)."""

    def attend(*arrays, return_residual=False, **options):
        out, lse = attention.dot_product_attention(*arrays, return_residual=True, **options)
        return (out, lse + 0.5) if return_residual else out

    settings = tiny_settings(attention__numerics="flash", model__layers=1)
    steps = make_steps(settings, Attend(attend))
    inputs = jax.random.randint(jax.random.key(1), (1, 32), 0, settings.model.vocab_size)
    params = jax.jit(steps.init)(root_key(settings)).params
    found, _ = jax.jit(signals.make_signals(settings.model, settings.attention, steps.loss))(
        params, inputs, inputs, jax.random.key(0)
    )
    for layer in found.values():
        np.testing.assert_allclose(layer["p_row_sum_error_mean"], np.expm1(-0.5), rtol=1e-5)
        np.testing.assert_allclose(
            layer["query_weight_gradient_error_from_lse"], -np.expm1(-0.5), rtol=1e-3
        )
