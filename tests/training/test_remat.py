"""Blocks that are computed again in the backward pass: the same numbers in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_settings, tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.training import models
from lowprec_attn.training.config import ConfigError
from lowprec_attn.training.devices import compiler_options, make_program, run_devices
from lowprec_attn.training.resources import memory
from lowprec_attn.training.signals import make_signals
from lowprec_attn.training.step import make_steps, root_key

TILED = functools.partial(attention.dot_product_attention, implementation="tiled")
POLICIES = (
    "nothing_saveable",
    "attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
# In float32: where a sum in another order is rounded to bfloat16, it may be another number.
EXACT = {"model__activation_dtype": "float32", "attention__numerics": "exact"}
# Every policy and every part of a model that a block has, each once.
CASES = [
    ("gpt2 clipped", "attention_saveable"),
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
    """Float32 sums of the same terms, which XLA may take in another order."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


jit = functools.partial(jax.jit, compiler_options=compiler_options("cpu"))


def begun(name, remat, packed=False):
    """Settings, functions, the first state and batch of a model; loss and gradients of a row."""
    settings = MODELS[name](model__remat=remat, devices=1)
    steps = make_steps(settings, Attend(TILED, packed))
    inputs, targets = map(jnp.asarray, tokens(settings))
    state = jit(steps.init)(root_key(settings))
    of = (inputs[0, :1], targets[0, :1], jax.random.key(1))
    grads = jit(jax.value_and_grad(lambda p: steps.loss(p, *of)[0]))(state.params)
    return settings, steps, state, (inputs, targets), jax.device_get(grads)


@functools.cache
def stepped(name, remat):
    """Loss, gradients and signals of a model, and its state after a step."""
    settings, steps, state, (inputs, targets), grads = begun(name, remat)
    of = (inputs[0, :1], targets[0, :1], jax.random.key(1))
    signals = jit(make_signals(settings.model, settings.attention, steps.loss))(state.params, *of)[
        0
    ]
    new, metrics = jit(steps.train)(state, inputs, targets, root_key(settings))
    return grads, *jax.device_get((signals, metrics, new.params))


@pytest.mark.parametrize(("name", "remat"), CASES)
def test_loss_gradients_signals_and_step_are_the_same(name, remat):
    (grads, signals, metrics, params), plain = stepped(name, remat), stepped(name, None)
    rounds = MODELS[name]().model.activation_dtype == "bfloat16" or name == "gpt2 stochastic"
    tolerance = 2.0**-8 if rounds else 1e-5
    assert_close((grads[0], metrics.loss), (plain[0][0], plain[2].loss), 1e-5)
    assert_close(grads[1], plain[0][1], tolerance)
    # Adam divides by the root of the second moment: what is near zero may move by lr.
    assert_close((metrics.grad_norm, params), (plain[2].grad_norm, plain[3]), tolerance)
    assert metrics.heads_clipped is None or metrics.heads_clipped > 0
    for layer, expected in plain[1].items():
        assert signals[layer].keys() == expected.keys()
        for signal in ("score_maximum", "output_rms", "delta_rms", "query_weight_gradient_exact"):
            np.testing.assert_allclose(
                signals[layer][signal], expected[signal], rtol=4 * tolerance, err_msg=signal
            )


def test_a_packed_projection_is_the_same():
    found, plain = (begun("gpt2", remat, True)[-1] for remat in ("nothing_saveable", None))
    assert_close(found, plain)


def of_devices(remat, shard_optimizer):
    """A program on four devices, its memory, and the state and losses after two steps."""
    settings = llama_settings(
        devices=4,
        accumulation_steps=2,
        shard_optimizer=shard_optimizer,
        model__remat=remat,
        model__width=64,
        model__vocab_size=320,
    )
    devices, root = run_devices(settings), root_key(settings)
    program = make_program(settings, devices)
    state, losses = program.init(root), []
    for seed in range(2):
        inputs, targets = tokens(settings, seed)
        arrays = devices.put({"inputs": inputs, "targets": targets})
        state, metrics = program.train(state, *arrays, root)
        losses.append(float(metrics.loss))
    return program, state, losses


@pytest.fixture(scope="module")
def whole():
    return of_devices(None, False)


@pytest.fixture(scope="module")
def split_and_again():
    return of_devices("nothing_saveable", True)


def test_devices_a_split_optimizer_and_remat_together_change_nothing(whole, split_and_again):
    np.testing.assert_allclose(split_and_again[2], whole[2], rtol=1e-6)
    assert whole[2][0] != whole[2][1]
    assert_close(split_and_again[1].params, whole[1].params)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_checkpoint_of_one_is_read_by_the_other(whole, split_and_again, reverse, tmp_path):
    source, target = (whole, split_and_again)[:: -1 if reverse else 1]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, source[1], {"next_index": 2})
        restored = checkpoints.restore(target[0].state)
    for x, saved, like in zip(
        *map(jax.tree.leaves, (restored.state, source[1], target[0].state)), strict=True
    ):
        assert x.sharding == like.sharding
        np.testing.assert_array_equal(x, saved)


@pytest.mark.parametrize("made", [tiny_settings, llama_settings])
def test_less_is_kept_for_the_backward_pass(made):
    """Of shapes alone: XLA's CPU compiler shares no memory between what may run at once."""
    shape = {"model__layers": 6, "model__width": 64, "batch_size": 64, "devices": 1}
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
        # The parameters are counted in both; moments and gradients are no residuals.
        state = 16 * models.parameter_count(settings.model)
        kept = memory.least_bytes(settings, 1) - state
        assert 0.1 * taken[remat] < kept < taken[remat]
    assert taken["nothing_saveable"] < 0.3 * taken[None]
    assert taken["nothing_saveable"] < 0.6 * taken["dots_saveable"] < 0.5 * taken[None]
    # Besides a block's float32 input of the model's width: O in the activations' format, and lse.
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
