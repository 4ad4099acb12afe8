"""configs/true_bfloat16.toml: each arm has the kernel, tile and exponent that it claims."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from command import ROOT
from gpu.targets import mesh_of

from lowprec_attn.arithmetic.request import Extras, RandomStream, Request, Spec
from lowprec_attn.commands import config
from lowprec_attn.lab import experiment
from lowprec_attn.training.config import train_settings
from pallas_kernels.gpu import attention as gpu

DEFINED = experiment.load(ROOT / "configs" / "true_bfloat16.toml")
TRIALS = {trial.arm.name: trial for trial in DEFINED.with_seeds([1]).trials}


def settings_of(name):
    base, *fields = DEFINED.arguments(TRIALS[name])
    return train_settings(config.load(base.removeprefix("--config="), fields))


def group_of(name):
    """The single arithmetic that all heads of all layers have."""
    (group,) = {group for layer in settings_of(name).attention.layers for group in layer}
    return group


def choices(name):
    """The choices of the arm's numerics and its row maximum, by name."""
    group = group_of(name)
    return {**vars(group.numerics), "row_max": group.row_max}


@pytest.mark.parametrize("name", TRIALS)
def test_an_arm_is_pinned_and_differs_in_attention_alone(name):
    settings, first = settings_of(name), settings_of("flash")
    assert dataclasses.replace(settings, attention=first.attention) == first
    assert settings.attention.implementation == "gpu"
    numerics = group_of(name).numerics
    assert numerics.exponent in ("shift_first", "scale_first", "whole_max")
    assert numerics.kv_block == (512 if name.startswith("published") else 64)
    assert settings.batch_size * settings.model.context == 32_768
    assert settings.diagnostics_every and 2000 % settings.diagnostics_every == 0


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith(("flash_", "exact_"))])
def test_an_arm_called_after_another_differs_from_it_in_one_choice(name):
    of, _, _ = name.partition("_")
    ours, theirs = choices(name), choices(of)
    assert len([choice for choice in ours if ours[choice] != theirs[choice]]) == 1


def test_the_kernels_trace_and_lower_every_arm():
    shape = jax.ShapeDtypeStruct((1, 1024, 1, 64), jnp.bfloat16)
    programs = set()
    for name in TRIALS:
        group = group_of(name)
        spec = Spec(numerics=group.numerics, row_max=group.row_max, scale=0.125, is_causal=True)
        request = Request(
            spec=spec,
            q_shape=shape.shape,
            kv_shape=shape.shape,
            dtype=shape.dtype,
            platform="cuda",
        )
        assert gpu.unsupported(request) is None, name
        drawn = group.numerics.needs_bits

        def step(q, k, v, do, spec=spec, drawn=drawn):
            extras = Extras(stream=RandomStream.of(jax.random.key(0), 1, 1) if drawn else None)
            o, pullback = jax.vjp(lambda *x: gpu.attention(*x, extras, spec)[0], q, k, v)
            return o, pullback(do)

        with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
            traced = jax.jit(step).trace(*[shape] * 4)
            programs.add(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(programs) == len(TRIALS)  # so every choice reaches the kernel
