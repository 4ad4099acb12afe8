"""What is said about Adam's last update, against the update itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_settings, with_optimizer

from lowprec_attn.training.adam_signals import make_adam_signals
from lowprec_attn.training.optimizer import adamw

STEPS = 10


def weights(seed, scale=1.0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    blocks = [
        {
            "attention": {name: {"kernel": normal(4, 4)} for name in ("query", "key")},
            "kernel": normal(4, 8),
            "norm": normal(8),
        }
        for _ in range(2)
    ]
    return {"blocks": blocks, "tokens": normal(6, 4), "norm": normal(4)}


def rms(tree):
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    return np.sqrt(np.mean(np.square(values, dtype=np.float64)))


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.1}, {"eps": 0.0}, {"clip_norm": None}])
def test_the_ratio_is_that_of_the_update_that_was_made(changes):
    settings = with_optimizer(tiny_settings(), **changes).optimizer
    optimizer, params = adamw(settings, STEPS), weights(0)
    state = optimizer.init(params)
    for seed in range(1, 5):
        grads = weights(seed)
        grads["blocks"][1]["kernel"] = grads["blocks"][1]["kernel"].at[0].set(0.0)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    found, _ = make_adam_signals(settings, STEPS, 2).measure(params, state)
    assert list(found) == ["layer_0", "layer_1", "outside"]
    for i in range(2):
        expected = rms(updates["blocks"][i]) / rms(params["blocks"][i])
        assert found[f"layer_{i}"]["update_ratio"] == pytest.approx(expected, rel=1e-5)
    outside = [(tree["tokens"], tree["norm"]) for tree in (updates, params)]
    assert found["outside"]["update_ratio"] == pytest.approx(
        rms(outside[0]) / rms(outside[1]), 1e-5
    )
    # Of a row of 8 in 72 coordinates no gradient has come; with ε = 0 none is below it.
    share = 8 / 72 if settings.eps else 0.0
    assert found["layer_1"]["below_epsilon"] == pytest.approx(share)
    assert found["layer_0"]["below_epsilon"] == 0.0


@pytest.mark.parametrize(("scale", "share"), [(1e-12, 1.0), (1e-4, 0.0)])
def test_gradients_are_compared_with_epsilon(scale, share):
    settings = with_optimizer(tiny_settings(), eps=1e-8).optimizer
    optimizer, params = adamw(settings, STEPS), weights(0)
    _, state = optimizer.update(weights(1, scale), optimizer.init(params), params)
    found, _ = make_adam_signals(settings, STEPS, 2).measure(params, state)
    for part in found.values():
        assert part["below_epsilon"] == pytest.approx(share, abs=0.02)


def directions_by_hand(settings, gradients):
    """m̂ / (√v̂ + ε) after each of some steps, in float64; b₁ and b₂ are those of float32."""
    b1, b2 = float(np.float32(settings.b1)), float(np.float32(settings.b2))
    m = v = 0.0
    found = []
    for t, gradient in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * gradient
        v = b2 * v + (1 - b2) * gradient**2
        found.append(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + settings.eps))
    return found


def cosine(a, b):
    return np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("eps", [1e-8, 1.0])  # the last bends the direction
def test_updates_are_compared_with_the_one_before_and_with_those_of_the_next_layer(eps):
    changes = {"eps": eps, "weight_decay": 0.1, "clip_norm": None}
    settings = with_optimizer(tiny_settings(), **changes).optimizer
    optimizer, params = adamw(settings, STEPS), weights(0)
    signals = make_adam_signals(settings, STEPS, 2)
    measure, join = jax.jit(signals.measure), jax.jit(signals.join)
    state, gradients = optimizer.init(params), [weights(seed) for seed in range(1, 5)]
    for grads in gradients:
        values, last = measure(params, state)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    found = join(values, last, state)

    def of(layer, name):
        made = [g["blocks"][layer]["attention"][name]["kernel"] for g in gradients]
        return directions_by_hand(settings, [np.asarray(g, np.float64) for g in made])

    for name in ("query", "key"):
        for layer in range(2):
            *_, before, now = of(layer, name)
            told = found[f"layer_{layer}"][f"{name}_update_autocorrelation"]
            assert told == pytest.approx(cosine(now, before), abs=1e-5)
        expected = cosine(of(0, name)[-2], of(1, name)[-2])
        told = found["layer_0"][f"{name}_update_next_layer"]
        assert told == pytest.approx(expected, abs=1e-5)
        assert f"{name}_update_next_layer" not in found["layer_1"]
    assert found["outside"].keys() == {"update_ratio", "below_epsilon"}
    assert {name: found["layer_0"][name] for name in values["layer_0"]} == values["layer_0"]
    # A step that was withheld has left the state as it was.
    withheld = join(*measure(params, state), state)
    assert np.isnan(withheld["layer_0"]["query_update_autocorrelation"])


def test_independent_gradients_have_an_autocorrelation_of_about_beta_1():
    settings = with_optimizer(tiny_settings(), b1=0.9, b2=0.999, clip_norm=None).optimizer
    rng = np.random.default_rng(0)
    *_, before, now = directions_by_hand(settings, rng.normal(size=(300, 64, 64)))
    assert cosine(now, before) == pytest.approx(0.9, abs=0.01)


def test_without_any_update_a_direction_is_like_no_other():
    settings = with_optimizer(tiny_settings(), clip_norm=None).optimizer
    params = jax.tree.map(jnp.zeros_like, weights(0))
    optimizer, signals = adamw(settings, STEPS), make_adam_signals(settings, STEPS, 2)
    _, state = optimizer.update(params, optimizer.init(params), params)
    values, last = signals.measure(weights(0), state)
    _, state = optimizer.update(params, state, params)
    found = signals.join(values, last, state)["layer_0"]
    assert found["query_update_autocorrelation"] == found["key_update_next_layer"] == 0
