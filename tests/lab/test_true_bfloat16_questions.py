"""Experiments besides true_bfloat16.toml change only what their arms are named after."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import ROOT

from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.commands import config
from lowprec_attn.lab import experiment
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.optimizer import learning_rate
from pallas_kernels.gpu import attention as gpu

LLAMA = ROOT / "configs" / "llama_true_bfloat16.toml"
COARSE = ROOT / "configs" / "coarse.toml"
REGIME = ROOT / "configs" / "true_bfloat16.toml"


@functools.cache
def settings_by_arm(path):
    found, defined = {}, experiment.load(path)
    for trial in defined.with_seeds([1]).trials:
        base, *fields = defined.arguments(trial)
        found[trial.arm.name] = train_settings(config.load(base.removeprefix("--config="), fields))
    return found


def questions_of(name):
    return ROOT / "configs" / f"true_bfloat16_{name}.toml"


def differing(one, other):
    """Dotted names of the settings that differ."""
    found = set()
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if (
            dataclasses.is_dataclass(a)
            and dataclasses.is_dataclass(b)
            and field.name != "attention"
        ):
            found |= {f"{field.name}.{name}" for name in differing(a, b)}
        elif a != b:
            found.add(field.name)
    return found


CHANGES = {
    "weight_decay": {"optimizer.weight_decay"},
    "eps_1e6": {"optimizer.eps"},
    "eps_1e5": {"optimizer.eps"},
    "b2_99": {"optimizer.b2"},
    "b2_999": {"optimizer.b2"},
    "qk_norm": {"model.qk_norm"},
    "qk_clip": {"optimizer.qk_clip"},
    "z_loss": {"model.z_loss"},
    "logits_float32": {"model.logits_dtype"},
    "biases": {"model.biases"},
    "context_2048": {"model.context", "batch_size"},  # keeps the tokens per step
    "tokens_131k": {"batch_size", "accumulation_steps"},
    # Settings of attention name every layer and head.
    "medium": {"model.layers", "model.heads", "model.width", "accumulation_steps", "attention"},
    "cosine": {"optimizer.end_lr"},
}


def test_a_recipe_changes_what_it_is_called_after():
    recipes, regime = settings_by_arm(questions_of("recipes")), settings_by_arm(REGIME)
    for arithmetic in ("flash", "exact"):
        # Equal to the regime, so that records of the regime are controls of this file.
        assert differing(recipes[arithmetic], regime[arithmetic]) == {"name"}
        for change, fields in CHANGES.items():
            arm = recipes[f"{arithmetic}_{change}"]
            assert differing(arm, recipes[arithmetic]) == fields, change
    assert len(recipes) == 2 + 2 * len(CHANGES)


def sum_of_rates(settings, steps):
    rate = learning_rate(settings.optimizer, settings.steps)
    return jax.vmap(rate)(jnp.arange(steps)).sum()


def test_rates_are_compared_at_one_sum():
    until = {1e-3: 5000, 6e-4: 7700}
    # Arms with one rate differ in their arithmetic only.
    rates = {
        (settings.optimizer, settings.steps): settings
        for settings in settings_by_arm(questions_of("rates")).values()
    }
    sums = [sum_of_rates(of, until[of.optimizer.peak_lr]) for of in rates.values()]
    assert {of.optimizer.peak_lr for of in rates.values()} == until.keys()
    expected = sum_of_rates(settings_by_arm(REGIME)["flash"], 3000)
    np.testing.assert_allclose(sums, expected, rtol=0.01)


def test_the_recipe_of_llama_is_the_regime_but_for_decay_and_rates():
    of_llama, of_regime = settings_by_arm(LLAMA), settings_by_arm(REGIME)
    one, other = of_llama["flash"], of_regime["flash"]
    changed = {"optimizer.weight_decay", "optimizer.warmup_steps", "optimizer.end_lr"}
    assert differing(one, dataclasses.replace(other, model=one.model)) == {
        *changed,
        *("name", "steps"),
    }
    for arithmetic in ("flash", "exact", "normalized_delta", "matched"):
        arm = of_llama[arithmetic]
        assert differing(arm, one) == ({"attention"} if arithmetic != "flash" else set())
        assert differing(of_llama[f"{arithmetic}_qk_norm"], arm) == {"model.qk_norm"}
        ours, theirs = (
            {group.numerics for layer in arms[arithmetic].attention.layers for group in layer}
            for arms in (of_llama, of_regime)
        )
        assert ours == theirs
    assert len(of_llama) == 8
    np.testing.assert_allclose(sum_of_rates(one, one.steps), sum_of_rates(other, 3000), rtol=0.01)


ASKED = {name: questions_of(name) for name in ("delta", "rates", "recipes", "why")}
ASKED |= {"llama": LLAMA, "coarse": COARSE}


@pytest.mark.parametrize("name", ASKED)
def test_arms_run_on_the_kernels_of_the_regime(name):
    for arm, settings in settings_by_arm(ASKED[name]).items():
        (group,) = {group for layer in settings.attention.layers for group in layer}
        numerics, model = group.numerics, settings.model
        exponent = "whole_max" if arm.startswith("matched") else "shift_first"
        assert (settings.attention.implementation, numerics.exponent) == ("gpu", exponent)
        spec = Spec(numerics=numerics, row_max=group.row_max, scale=0.125, is_causal=True)
        request = Request(
            spec=spec,
            q_shape=(1, model.context, model.heads, model.head_size),
            kv_shape=(1, model.context, model.kv_heads, model.head_size),
            dtype=jnp.dtype("bfloat16"),
            platform="cuda",
        )
        assert gpu.unsupported(request) is None, arm


POINTS = {
    "normalized": {"delta"},
    "one_step": {"kv_block"},
    "dp_p": {"delta"},
    "auxiliary_output": {"saved_output"},
    "float32_pv": {"pv"},
    "float32_output": {"pv", "output"},
    "float32_normalizer": {"normalizer"},
    "only_dp": {"pv", "output", "normalizer"},
    "only_normalizer": {"pv", "output", "dp"},
    "dp_p_float32_normalizer": {"delta", "normalizer"},
}
ROW_MAXIMA = {"published_max", "dynamic_max", "dynamic_max_4", "dynamic_max_7"}


def test_a_row_of_the_isolation_table_changes_what_it_is_called_after():
    arms = settings_by_arm(questions_of("isolation"))
    published = arms["published"]
    assert differing(published, settings_by_arm(REGIME)["published"]) == {"name"}
    groups = {
        name: {group for layer in settings.attention.layers for group in layer}
        for name, settings in arms.items()
    }
    (of_published,) = groups["published"]
    for name, points in POINTS.items():
        (group,) = groups[name]
        assert group.row_max == of_published.row_max
        changed = {
            field.name
            for field in dataclasses.fields(group.numerics)
            if getattr(group.numerics, field.name) != getattr(of_published.numerics, field.name)
        }
        assert changed == points, name
    for name in ROW_MAXIMA:
        (group,) = groups[name]
        assert group.numerics == of_published.numerics
    assert len({group.row_max for name in ROW_MAXIMA for group in groups[name]}) == 4
    in_layer, elsewhere = (
        [layer == published.attention.layers[0] for layer in arms[name].attention.layers]
        for name in ("layer_1", "other_layers")
    )
    assert in_layer == [not found for found in elsewhere] == [i == 1 for i in range(12)]
    exact = settings_by_arm(REGIME)["exact"].attention.layers[0]
    assert arms["layer_1"].attention.layers[0] == exact == arms["other_layers"].attention.layers[1]
    assert set(arms) == {"published", "layer_1", "other_layers", *POINTS, *ROW_MAXIMA}
    for settings in arms.values():
        assert differing(settings, published) <= {"attention"}


def test_an_arm_of_few_bits_is_exact_but_for_what_it_is_called_after():
    groups = {
        name: next(iter({group for layer in of.attention.layers for group in layer}))
        for name, of in settings_by_arm(COARSE).items()
    }
    exact = groups.pop("exact")
    points = {"output": {"output", "saved_output"}, "value": {"value"}, "normalized": {"delta"}}
    for name, group in groups.items():
        expected = set().union(*(points.get(word, ()) for word in name.split("_")))
        if name == "output_apart":
            expected = {"output", "output_bwd"}
        changed = {
            f.name
            for f in dataclasses.fields(exact.numerics)
            if getattr(group.numerics, f.name) != getattr(exact.numerics, f.name)
        }
        assert changed == expected, name
        assert (group.row_max != exact.row_max) == name.endswith("dynamic_max")


def test_an_error_of_delta_is_the_only_rounding():
    numerics = {
        name: next(iter({group for layer in of.attention.layers for group in layer})).numerics
        for name, of in settings_by_arm(questions_of("delta")).items()
    }
    exact = numerics.pop("exact")
    del numerics["flash"]
    for name, of in numerics.items():
        changed = {
            f.name
            for f in dataclasses.fields(exact)
            if getattr(of, f.name) != getattr(exact, f.name)
        }
        points = {
            "output_stochastic": {"output", "saved_output"},  # the model's O, which δ reads
            "output_apart": {"output_bwd"},
        }
        assert changed == points.get(name, {"delta_value"}), name
