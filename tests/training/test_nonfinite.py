"""The search for the first non-finite value, with parameters poisoned at known places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.instability.nonfinite import Culprit, find_culprit
from lowprec_attn.training.step import make_steps, root_key


@pytest.fixture(scope="module")
def run():
    settings = tiny_settings(attention__points={"scores": "float8_e4m3fn"})
    tiled = functools.partial(attention.dot_product_attention, implementation="tiled")
    steps = make_steps(settings, Attend(tiled))
    ids = np.random.default_rng(0).integers(0, 257, (1, 4, 33))
    batch = tuple(jnp.asarray(x, jnp.int32) for x in (ids[..., :-1], ids[..., 1:]))
    return settings, steps, jax.jit(steps.init)(root_key(settings)).params, batch


@pytest.fixture(scope="module")
def once():
    """Yields a `jit` that compiles only its first function, because all searches need the same."""
    compiled = []

    def jit(function):
        if not compiled:
            compiled.append(jax.jit(function))
        return compiled[0]

    yield jit
    assert compiled  # the search has used it


def scaled(params, block, name, factor):
    copy = jax.tree.map(lambda x: x, params)
    layer = copy["blocks"][block]
    *path, leaf = name.split(".")
    for part in path:
        layer = layer[part]
    layer[leaf][...] *= jnp.float32(factor)
    return copy


CASES = {
    "weights": (0, "mlp_out.kernel", np.nan, Culprit(0, "the parameters", "before the step")),
    # |S| beyond 448 becomes NaN in float8_e4m3fn, and O is the first array that holds it.
    "scores": (1, "attention.query.kernel", 1e6, Culprit(1, "the attention output", "forward")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_layer_and_value_are_named(run, once, case):
    settings, steps, params, batch = run
    block, name, factor, expected = CASES[case]
    poisoned = scaled(params, block, name, factor)
    found = find_culprit(settings, steps, poisoned, batch, jax.random.key(0), jit=once)
    assert (found.layer, found.direction) == (expected.layer, expected.direction)
    assert found.what.startswith(expected.what)
    assert f"in layer {expected.layer}" in str(found)


def test_a_gradient_is_followed_backward(run, once):
    """Hidden units of 1e25, which a zero matrix silences, appear in gradients only."""
    settings, steps, params, batch = run
    poisoned = scaled(scaled(params, 1, "mlp_in.kernel", 1e25), 1, "mlp_out.kernel", 0.0)
    found = find_culprit(settings, steps, poisoned, batch, jax.random.key(0), jit=once)
    assert (found.layer, found.direction) == (1, "backward")


@pytest.mark.parametrize(
    ("scale", "what"),
    [(1e20, "the norm of the gradients"), (5e36, "the gradients of the parameters tokens.")],
)
def test_a_gradient_outside_the_layers_is_not_called_the_update(run, once, scale, what):
    """A last norm that large has finite logits; the table's gradient, or its square, is not."""
    settings, steps, params, batch = run
    poisoned = jax.tree.map(lambda x: x, params)
    # All rows then have nearly one hidden state, so their gradients add up.
    poisoned["positions"]["embedding"][...] += jnp.linspace(-9, 9, 32)[None]
    poisoned["norm"]["scale"][...] *= jnp.float32(scale)
    found = find_culprit(settings, steps, poisoned, batch, jax.random.key(0), jit=once)
    assert (found.layer, found.direction) == (None, "backward")
    assert found.what.startswith(what)


def test_a_healthy_step_points_at_the_update(run, once):
    settings, steps, params, batch = run
    found = find_culprit(settings, steps, params, batch, jax.random.key(0), jit=once)
    assert found.layer is None
    assert "update" in found.what
