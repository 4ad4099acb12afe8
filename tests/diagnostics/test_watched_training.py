"""`diagnostics.watch` on small trainings with Flax and Optax."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lowprec_attn import attention, diagnostics
from lowprec_attn.diagnostics import watch
from lowprec_attn.diagnostics.watch import SIGNALS

B, T, WIDTH, HEADS, LAYERS, WORDS = 2, 16, 32, 2, 2, 11
MEASURED = {*SIGNALS} - {"query_weight_gradient_error_relative"}  # JAX captures no input of W_Q


def attend(gain):
    fn = attention.attention_fn(is_causal=True, implementation="dense")

    # The parameters are named, because Linen drops keyword arguments that are not.
    def enlarged(query, key, value, bias=None, mask=None, dtype=None, precision=None):
        return fn(query * jnp.asarray(gain, query.dtype), key, value, bias, mask, dtype=dtype)

    return enlarged


class Linen(nn.Module):
    gain: float

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH)(tokens)
        for _ in range(LAYERS):
            layer = nn.MultiHeadDotProductAttention(
                HEADS, dtype=jnp.bfloat16, attention_fn=attend(self.gain), deterministic=True
            )
            x = x + layer(nn.LayerNorm()(x))
        return nn.Dense(WORDS)(x)


class Nnx(nnx.Module):
    def __init__(self, gain):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.layers = nnx.List(
            [
                nnx.MultiHeadAttention(
                    HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=rngs,
                    attention_fn=lambda q, k, v, mask=None, **_: attend(gain)(q, k, v, mask=mask),
                )
                for _ in range(LAYERS)
            ]
        )  # fmt: skip
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield (rng.integers(WORDS, size=(B, 1)) + np.arange(T + 1)) % WORDS


def error(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_linen(watched, gain, steps, rate):
    model, optimizer = Linen(gain), optax.adam(rate)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((B, T), jnp.int32))
    state = optimizer.init(params)

    @jax.jit
    def train_step(params, state, tokens):
        def loss(params):
            return error(model.apply(params, tokens[:, :-1]), tokens)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for step, tokens in enumerate(batches(steps)):
        with watched.step(step):
            params, state, loss = train_step(params, state, tokens)
        losses.append(float(loss))
    return losses


def train_nnx(watched, gain, steps, rate):
    model = Nnx(gain)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
        value, gradient = nnx.value_and_grad(lambda m: error(m(tokens[:, :-1]), tokens))(model)
        optimizer.update(model, gradient)
        return value

    losses = []
    for step, tokens in enumerate(batches(steps)):
        with watched.step(step):
            loss = train_step(model, optimizer, tokens)
        losses.append(float(loss))
    return losses


def test_a_healthy_training_is_recorded_and_trains_as_without(tmp_path, caplog):
    path, metrics = tmp_path / "attention.jsonl", {}
    watched = watch(every=10, path=path, write=lambda step, found: metrics.update({step: found}))
    losses = train_nnx(watched, 1.0, 30, 1e-2)
    assert losses == train_nnx(watch(every=10**9), 1.0, 30, 1e-2)
    assert losses[-1] < losses[0] / 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20] == list(metrics)
    for line in lines:
        assert "runaway" not in line
        assert list(line["signals"]) == ["layer_00", "layer_01"]
        for layer in line["signals"].values():
            assert set(layer) == MEASURED
            assert 0 < max(layer["query_gradient_error_relative"]) < 0.2
            assert max(layer["p_row_sum_error_rms"]) < 1e-5
            assert 0 < max(layer["rounded_ds_row_sum_rms"]) < 1e-2
    assert len(metrics[0]) == len(MEASURED) * LAYERS * HEADS
    assert not [r for r in caplog.records if r.name == "lowprec_attn.watch"]


def test_scores_that_run_away_are_warned_of(tmp_path, caplog):
    path = tmp_path / "attention.jsonl"
    train_linen(watch(every=5, path=path), 20.0, 40, 5e-2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    away = [line["step"] for line in lines if "runaway" in line]
    assert 0 not in away
    first, *_ = [r.getMessage() for r in caplog.records if r.name == "lowprec_attn.watch"]
    assert first.startswith(f"step {away[0]}: scores run away in layer_0")
    (line,) = [line for line in lines if line["step"] == away[0]]
    layers = [line["signals"][name] for name in line["runaway"]]
    share = max(max(layer["query_gradient_error_relative"]) for layer in layers)
    cure = 'attention.dot_product_attention(..., numerics="normalized_delta")'
    if share >= 0.3:
        assert f"use {cure}, whose rows of dS sum to zero" in first
    else:
        assert ("elsewhere" if share < 0.1 else "names no cause") in first


def test_what_is_recorded_is_of_the_arrays_of_the_step(tmp_path):
    path = tmp_path / "a.jsonl"
    q, k, v = jax.random.normal(jax.random.key(0), (3, B, T, HEADS, 8), jnp.bfloat16)
    v, call = v[..., :4], {"is_causal": True, "local_window_size": 5}
    call |= {"logits_soft_cap": 0.5, "sinks": jnp.arange(1.0 * HEADS)}
    attend = functools.partial(attention.dot_product_attention, **call)

    @jax.jit
    @jax.grad
    def step(q):
        return jnp.sum(attend(q, k, v).astype(jnp.float32) ** 2)

    with watch(every=1, path=path).step(7):
        step(q)
    line = json.loads(path.read_text())
    do = jax.grad(lambda o: jnp.sum(o.astype(jnp.float32) ** 2))(jax.jit(attend)(q, k, v))
    expected = diagnostics.attention_signals(q[:1], k[:1], v[:1], do[:1], numerics="flash", **call)
    assert line["step"] == 7
    assert "score_maximum_before_cap" in line["signals"]["layer_00"]
    for name, values in line["signals"]["layer_00"].items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-9)
