"""Blocks that are computed again in the backward pass give the same numbers with less memory.

test_devices.py has them on several devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_settings, tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training import models
from lowprec_attn.training.config import ConfigError
from lowprec_attn.training.devices import compiler_options
from lowprec_attn.training.resources import memory
from lowprec_attn.training.signals import make_layers
from lowprec_attn.training.step import make_steps, root_key

TILED = functools.partial(attention.dot_product_attention, implementation="tiled")
POLICIES = (
    "nothing_saveable",
    "attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
# In float32, because a sum in another order may round to another bfloat16.
EXACT = {"model__activation_dtype": "float32", "attention__numerics": "exact"}
# Every policy and every part of a block occurs once.
CASES = [
    ("gpt2", "attention_saveable"),
    ("gpt2 stochastic", "nothing_saveable"),
    ("llama", "dots_with_no_batch_dims_saveable"),
    ("llama in bfloat16", "dots_saveable"),
]
MODELS = {
    "gpt2": functools.partial(tiny_settings, **EXACT),
    "gpt2 clipped": functools.partial(tiny_settings, optimizer__qk_clip=0.01, **EXACT),
    "gpt2 stochastic": functools.partial(
        tiny_settings, model__activation_dtype="float32", attention__numerics="stochastic_output"
    ),
    "llama": functools.partial(
        llama_settings, model__qk_norm=True, model__soft_cap=1.0, model__sinks=True, **EXACT
    ),
    "llama in bfloat16": llama_settings,
}


def tokens(settings, seed=0):
    ids = np.random.default_rng(seed).integers(
        0, settings.model.vocab_size, (settings.batch_size, settings.model.context + 1)
    )
    shape = (settings.accumulation_steps, -1, settings.model.context)
    return tuple(ids.astype(np.int32)[:, cut].reshape(shape) for cut in (np.s_[:-1], np.s_[1:]))


def assert_close(found, expected, tolerance=1e-5):
    """Checks float32 sums of the same terms, which XLA may add in another order."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


jit = functools.partial(jax.jit, compiler_options=compiler_options("cpu"))


@functools.cache
def first_state(name):
    settings = MODELS[name](model__layers=1, devices=1)
    return jit(make_steps(settings, Attend(TILED)).init)(root_key(settings))


def begun(name, remat, packed=False):
    """Settings, functions, first state and batch of a model with one block."""
    settings = MODELS[name](model__remat=remat, model__layers=1, devices=1)
    steps = make_steps(settings, Attend(TILED, packed))
    return settings, steps, first_state(name), tuple(map(jnp.asarray, tokens(settings)))


@pytest.mark.parametrize(("name", "remat"), CASES)
def test_loss_and_gradients_are_the_same(name, remat):
    found = []
    for policy in (remat, None):
        _, steps, state, (inputs, targets) = begun(name, policy)

        def loss(params, of=steps, inputs=inputs[0], targets=targets[0]):
            return of.loss(params, inputs, targets, jax.random.key(1))[0]

        found.append(jit(jax.value_and_grad(loss))(state.params))
    (loss, gradients), (expected, plain) = found
    rounds = MODELS[name]().model.activation_dtype == "bfloat16" or name == "gpt2 stochastic"
    assert_close(loss, expected, 1e-5)
    assert_close(gradients, plain, 2.0**-8 if rounds else 1e-5)


def test_a_step_that_clips_is_the_same():
    found = []
    for policy in ("attention_saveable", None):
        settings, steps, state, batch = begun("gpt2 clipped", policy)
        found.append(jax.device_get(jit(steps.train)(state, *batch, root_key(settings))))
    (state, metrics), (expected, plain) = found
    assert_close((metrics.loss, metrics.grad_norm), (plain.loss, plain.grad_norm))
    # Adam divides by the root of the second moment, so an entry near zero may move by lr.
    assert_close(state.params, expected.params)
    assert metrics.heads_clipped == plain.heads_clipped > 0


@pytest.mark.parametrize(("name", "remat"), [CASES[2]])
def test_arrays_of_the_signals_are_the_same(name, remat):
    found = []
    for policy in (remat, None):
        settings, steps, state, (inputs, targets) = begun(name, policy)

        def arrays(params, of=steps, model=settings.model, inputs=inputs, targets=targets):
            args = params, inputs[0, :1], targets[0, :1], jax.random.key(1)
            (layer,) = make_layers(model, of.loss)(*args)
            gradient = layer.projection.pullback()(layer.q)[0]
            return gradient, layer._replace(projection=None)

        found.append(jit(arrays)(state.params))
    assert_close(*found, 4e-5)


def test_a_packed_projection_is_the_same():
    found = []
    for remat in ("nothing_saveable", None):
        _, steps, state, (inputs, targets) = begun("gpt2", remat, packed=True)
        loss = functools.partial(steps.loss, inputs=inputs[0, :1], targets=targets[0, :1])
        found.append(jit(jax.value_and_grad(lambda p, of=loss: of(p)[0]))(state.params))
    assert_close(*found)


@pytest.mark.parametrize("made", [tiny_settings, llama_settings])
def test_less_is_kept_for_the_backward_pass(made):
    """Counted from shapes: XLA's CPU compiler shares no memory between parallel operations."""
    shape = {"model__layers": 4, "model__width": 64, "batch_size": 64, "devices": 1}
    taken = {}
    for remat in (None, "dots_saveable", "attention_saveable", "nothing_saveable"):
        settings = made(model__remat=remat, **shape)
        steps = make_steps(settings, Attend(TILED))
        params = jax.eval_shape(steps.init, root_key(settings)).params
        ids = jax.ShapeDtypeStruct((64, settings.model.context), jnp.int32)
        _, residuals = jax.eval_shape(
            lambda p, *ids, of=steps: jax.vjp(lambda p: of.loss(p, *ids)[0], p), params, ids, ids
        )
        taken[remat] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))
        # Both counts include the parameters; moments and gradients are not residuals.
        state = 16 * models.parameter_count(settings.model)
        kept = memory.least_bytes(settings, 1) - state
        assert 0.1 * taken[remat] < kept < taken[remat]
    assert taken["nothing_saveable"] < 0.3 * taken[None]
    assert taken["nothing_saveable"] < 0.6 * taken["dots_saveable"] < 0.5 * taken[None]
    # The policy keeps O, in the activations' format, and lse, in addition to the float32 input of a
    # block.
    model = settings.model
    of_token = model.heads * (model.value_size * jnp.dtype(model.activation_dtype).itemsize + 4)
    more = taken["attention_saveable"] - taken["nothing_saveable"]
    assert more == model.layers * 64 * model.context * of_token


@pytest.mark.parametrize("made", [tiny_settings, llama_settings])
def test_another_policy_is_named(made):
    words = f"config.model.remat must be one of {', '.join(POLICIES)}, or None, got 'full'"
    with pytest.raises(ConfigError) as error:
        made(model__remat="full")
    assert str(error.value) == words
