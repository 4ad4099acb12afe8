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
    found = make_adam_signals(settings, STEPS, 2)(params, state)
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
    found = make_adam_signals(settings, STEPS, 2)(params, state)
    for part in found.values():
        assert part["below_epsilon"] == pytest.approx(share, abs=0.02)
