"""Runs whose attention is a function of another library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_settings, tiny_settings

from lowprec_attn.errors import UserError
from lowprec_attn.gpt2 import functions
from lowprec_attn.training.announcement import arithmetic
from lowprec_attn.training.config import ConfigError
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.signals import make_signals
from lowprec_attn.training.step import make_steps, root_key

FLOAT32 = {"model__activation_dtype": "float32", "model__layers": 1}
SMALL = {"devices": 1, "batch_size": 8, "model__context": 32}


@jax.custom_vjp
def with_a_wrong_dq(q, k, v, scale):
    """Attention whose dQ is too large by a tenth; `wrong` gives it jax.nn's parameters."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)


def _forward(*args):
    return jax.vjp(with_a_wrong_dq.fun, *args)


def _backward(pullback, do):
    dq, *others = pullback(do)
    return 1.1 * dq, *others


with_a_wrong_dq.defvjp(_forward, _backward)


def wrong(q, k, v, *, scale, is_causal):
    assert is_causal
    return with_a_wrong_dq(q, k, v, scale)


NOT_CALLABLE = 1.0


def gradients(make=tiny_settings, **changes):
    """The loss of a batch at initialisation, and its gradient."""
    _, steps, params, ids = begun(make, **changes)

    def loss(params):
        return steps.loss(params, ids[:, :-1], ids[:, 1:], jax.random.key(0))[0]

    return jax.jit(jax.value_and_grad(loss))(params)


def begun(make, **changes):
    settings = make(**SMALL, **changes)
    steps = make_steps(settings, run_devices(settings).attend_part)
    params = jax.jit(steps.init)(root_key(settings)).params
    ids = jax.random.randint(jax.random.key(1), (1, 33), 0, settings.model.vocab_size)
    return settings, steps, params, ids


def measured(run=lambda f, *args: jax.jit(f)(*args), **changes):
    """The signals of layer 0 at initialisation."""
    settings, steps, params, ids = begun(tiny_settings, **changes)
    of = make_signals(settings.model, settings.attention, steps.loss)
    found, _ = run(of, params, ids[:, :-1], ids[:, 1:], jax.random.key(0))
    return found["layer_0"]


@pytest.mark.parametrize("make", [tiny_settings, llama_settings])
def test_gradients_with_jax_nn_are_those_of_exact_attention(make):
    changes = {**FLOAT32, "attention__numerics": "exact"}
    loss, found = gradients(make, **changes, attention__function="jax.nn:xla")
    expected, of_exact = gradients(make, **changes)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(of_exact), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


def test_a_run_calls_the_function_that_is_named():
    """Its dQ is too large by a tenth, so the gradient of W_Q is as well, and no other."""
    wrong, right = (
        gradients(**FLOAT32, attention__function=name)[1]["blocks"][0]["attention"]
        for name in (f"{__name__}:wrong", "jax.nn")
    )
    for name, factor in {"query": 1.1, "key": 1.0, "value": 1.0}.items():
        x, y = (of[name]["kernel"][...] for of in (wrong, right))
        np.testing.assert_allclose(x, factor * y, rtol=1e-4, atol=1e-6 * float(jnp.abs(y).max()))


def test_signals_measure_the_function_itself():
    """A dQ that is a tenth too large is an error of a tenth; float32 leaves none."""
    name = "query_weight_gradient_error_measured"
    found = measured(**FLOAT32, attention__function=f"{__name__}:wrong")
    np.testing.assert_allclose(found[name], 0.1, rtol=1e-4)
    found = measured(**FLOAT32, attention__function="jax.nn")
    assert max(found[name]) < 1e-5
    assert max(np.abs(found["output_error_rms"])) < 1e-5 * max(found["output_rms"])
    assert name not in measured(**FLOAT32, run=jax.eval_shape)


def test_the_announcement_names_the_function():
    (line,) = arithmetic(tiny_settings(attention__function="jax.nn:cudnn"))
    assert "`jax.nn:cudnn`" in line
    assert "computed by" not in line
    assert "on a GPU not always to the same bits" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__function": "cudnn"}, "must be jax.nn, .*got 'cudnn'"),
        ({"attention__function": "jax.nn:flash"}, "must be jax.nn, .*got 'jax.nn:flash'"),
        ({"attention__function": "m:f", "attention__implementation": "tiled"}, "implementation"),
        (
            {"attention__function": "m:f", "attention__layers": {"1": {"numerics": "exact"}}},
            "layers",
        ),
        ({"attention__function": "m:f", "attention__heads": {"0": {"numerics": "exact"}}}, "heads"),
        (
            {"attention__function": "m:f", "optimizer__qk_clip": 100.0},
            "optimizer.qk_clip must be None",
        ),
    ],
)
def test_what_a_function_cannot_compute_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(**changes)


def test_llamas_soft_cap_and_sinks_are_refused():
    for name in ({"model__soft_cap": 50.0}, {"model__sinks": True}):
        with pytest.raises(ConfigError, match="computes all heads in one arithmetic"):
            llama_settings(attention__function="jax.nn", **name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "function=no_such_module:f: .*no module named no_such_module"),
        (f"{__name__}:no_such", "has no 'no_such'"),
        (f"{__name__}:NOT_CALLABLE", "is no function but float"),
        ("raises_at_import:f", "cannot import raises_at_import: ValueError: of its own"),
    ],
)
def test_a_function_that_is_not_there_is_refused_in_one_line(name, message, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise ValueError('of its own')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        functions.find(name)
    assert "\n" not in str(error.value)


def test_a_function_is_found_in_the_folder_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "attention_of_mine.py").write_text("class A:\n    f = staticmethod(lambda: 7)\n")
    monkeypatch.chdir(tmp_path)
    assert functions.find("attention_of_mine:A.f")() == 7


def test_a_missing_cudnn_is_said_in_one_line():
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(UserError, match=r"attention\.function=jax\.nn:cudnn: .*cuDNN"):
        functions.find("jax.nn:cudnn")(x, x, x, scale=0.125, is_causal=True)
