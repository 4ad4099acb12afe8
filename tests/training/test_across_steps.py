"""Signals that join a run's measurements; `test_rescue` tests that interrupted runs repeat them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_settings, tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.across_steps import CUMULATIVE, AcrossSteps, direction_shapes
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.signals import make_signals
from lowprec_attn.training.step import make_steps, root_key

SIMILARITY = "outer_product_similarity_across_steps"
COSINE = "common_direction_across_steps"


def make_across(recorded=None, **changes):
    settings = tiny_settings(devices=1, **changes)
    return AcrossSteps(settings, run_devices(settings), None, recorded)


def test_a_step_is_compared_with_the_one_measured_before_layer_by_layer():
    rng = np.random.default_rng(0)
    made = [
        {f"layer_{i}": rng.normal(size=(2, 32, 16)).astype(np.float32) for i in range(2)}
        for _ in range(3)
    ]
    across = make_across()
    for now, before in zip(made, [None, *made], strict=False):
        signals = {layer: {"other": jnp.ones(2)} for layer in now}
        joined = across.join(signals, jax.tree.map(jnp.asarray, now))
        for layer, values in joined.items():
            if before is None:
                assert values.keys() == {"other"}
                continue
            flat = [step[layer].reshape(2, -1).astype(float) for step in (now, before)]
            products = np.sum(flat[0] * flat[1], axis=1)
            sizes = np.prod(np.linalg.norm(flat, axis=2), axis=0)
            np.testing.assert_allclose(values[SIMILARITY], products, rtol=1e-4)
            np.testing.assert_allclose(values[COSINE], products / sizes, rtol=1e-4)


def test_errors_of_delta_are_added_up_over_tokens_and_steps_from_what_was_recorded():
    def signals(*mean):
        return {"layer_0": {"delta_error_mean": np.float32(mean)}}

    recorded = make_across().add_up(signals(0.5, -1.0))
    assert recorded["layer_0"][CUMULATIVE].tolist() == [16.0, -32.0]
    resumed = make_across(recorded)
    assert resumed.add_up(signals(1.0, 1.0))["layer_0"][CUMULATIVE].tolist() == [48.0, 0.0]
    of_an_earlier_version = make_across(signals(0.5, -1.0))
    sums = of_an_earlier_version.add_up(signals(1.0, 1.0))["layer_0"][CUMULATIVE]
    assert sums.tolist() == [32.0, 32.0]


def test_directions_have_the_shape_that_a_checkpoint_asks_for():
    settings = llama_settings(devices=1)  # the head size differs from width / heads
    steps = make_steps(settings, Attend(attention.dot_product_attention))
    params = jax.eval_shape(steps.init, root_key(settings)).params
    ids = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    of = make_signals(settings.model, settings.attention, steps.loss)
    _, made = jax.eval_shape(of, params, ids, ids, jax.random.key(0))
    asked = direction_shapes(settings.model, run_devices(settings))
    assert {n: x.shape for n, x in made.items()} == {n: x.shape for n, x in asked.items()}


@pytest.mark.slow
def test_the_training_step_does_not_know_of_diagnostics():
    texts = []
    for every in (0, 3):
        settings = tiny_settings(devices=1, model__layers=1, diagnostics_every=every)
        program = make_program(settings, run_devices(settings))
        lowered = program.train.lower(program.state, program.batch, program.batch, program.root)
        texts.append(lowered.as_text())
    assert texts[0] == texts[1]
