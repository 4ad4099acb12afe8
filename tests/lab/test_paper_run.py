"""paper_run.toml follows the paper's recipe, and its arms differ in their arithmetic only."""

import jax
import jax.numpy as jnp
import pytest
from command import ROOT

from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.commands import config
from lowprec_attn.lab import experiment, processes
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.optimizer import learning_rate
from pallas_kernels.gpu import attention as gpu

DEFINED = experiment.load(ROOT / "configs" / "paper_run.toml")


def settings_by_arm():
    found = {}
    for trial in DEFINED.trials:
        base, *fields = DEFINED.arguments(trial)
        found[trial.arm.name] = train_settings(config.load(base.removeprefix("--config="), fields))
    return found


def test_it_is_the_recipe_of_the_paper():
    full = train_settings(config.load("gpt2_bf16:full", []))
    for arm, settings in settings_by_arm().items():
        assert settings.optimizer == full.optimizer, arm
        assert (settings.steps, settings.batch_size) == (full.steps, full.batch_size), arm
        assert settings.batch_size * settings.model.context == 524_288
        # Two to eight GPUs take equal shares of a micro-batch.
        assert settings.batch_size // settings.accumulation_steps % 8 == 0


def test_rates_sum_to_what_the_prediction_says():
    settings = settings_by_arm()["published"]
    rate = learning_rate(settings.optimizer, settings.steps)
    assert jax.vmap(rate)(jnp.arange(4000)).sum() == pytest.approx(3, rel=0.03)
    assert DEFINED.runaway.step == 4000


def test_one_kernel_serves_every_arm():
    for arm, settings in settings_by_arm().items():
        (group,) = {group for layer in settings.attention.layers for group in layer}
        assert (settings.attention.implementation, group.numerics.kv_block) == ("gpu", 512), arm
        spec = Spec(numerics=group.numerics, row_max=group.row_max, scale=0.125, is_causal=True)
        shape = (1, settings.model.context, 12, 64)
        request = Request(
            spec=spec, q_shape=shape, kv_shape=shape, dtype=jnp.dtype("bfloat16"), platform="cuda"
        )
        assert gpu.unsupported(request) is None, arm


def test_joined_gpus_are_one_slot():
    pair, single = processes.gpu_slots(["0+1", "2"])
    assert pair.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert (pair.name, single.environment) == ("GPU 0+1", {"CUDA_VISIBLE_DEVICES": "2"})
