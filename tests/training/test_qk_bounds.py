"""Bounds on the scores of attention from the start of a run: `qk_norm` and `qk_clip`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend, HeadNorm, LayerRecord, parameter_count, score_scale
from lowprec_attn.training import qk_clip, step
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.qk_clip import clipped, largest_scores
from lowprec_attn.training.step import make_loss, make_steps, root_key

TILED = functools.partial(attention.dot_product_attention, implementation="tiled")
EXACT = {"model__activation_dtype": "float32", "attention__numerics": "exact"}


def tokens(settings):
    """Inputs and targets [A, B/A, T]."""
    shape = (settings.batch_size, settings.model.context + 1)
    ids = np.random.default_rng(0).integers(0, settings.model.vocab_size, shape)
    parts = (settings.accumulation_steps, -1, settings.model.context)
    return tuple(jnp.asarray(x.reshape(parts), jnp.int32) for x in (ids[:, :-1], ids[:, 1:]))


@functools.cache
def first_state(model):
    """The first state of a run with this model; all tests here have one seed and optimizer."""
    settings = dataclasses.replace(tiny_settings(devices=1, model__layers=1), model=model)
    return jax.jit(make_steps(settings, Attend(TILED)).init)(root_key(settings))


def begin(settings, packed=False):
    steps = make_steps(settings, Attend(TILED, packed))
    return steps, jax.tree.map(lambda x: x, first_state(settings.model))  # tests change their copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_is_that_of_float64_rounded_once(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.standard_normal((2, 5, 3, 16)), dtype)
    scale = 1 + 0.3 * rng.standard_normal(16)
    norm = HeadNorm(16, dtype, nnx.Rngs(0))
    norm.norm.scale[...] = jnp.asarray(scale, jnp.float32)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
    # Six float32 operations, or half an ulp of one rounding to bfloat16.
    np.testing.assert_allclose(
        np.asarray(norm(x), np.float64), exact, rtol={"float32": 1e-6, "bfloat16": 2.0**-8}[dtype]
    )
    assert norm(x).dtype == dtype


def test_with_qk_norm_the_size_of_q_and_k_does_not_count():
    """The norm comes before the products, so weights ten times as large give the same loss."""
    settings = tiny_settings(model__qk_norm=True, model__layers=1, devices=1, **EXACT)
    inputs, targets = (x[0] for x in tokens(settings))
    found = []
    for packed in (False, True):
        steps, state = begin(settings, packed)
        loss = jax.jit(jax.value_and_grad(lambda p, s=steps: s.loss(p, inputs, targets)[0]))
        found.append(loss(state.params))
        assert parameter_count(settings.model) == sum(x.size for x in jax.tree.leaves(state.params))
    (value, grads), (packed_value, packed_grads) = found
    np.testing.assert_allclose(packed_value, value, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(packed_grads), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-5 * np.abs(x).max())
    kernel = state.params["blocks"][0]["attention"]["query"]["kernel"]
    kernel[...] = 10 * kernel[...]
    # ε = 1e-6, compared to mean squares of 0.01.
    np.testing.assert_allclose(loss(state.params)[0], value, rtol=1e-5)
    assert np.abs(grads["blocks"][0]["attention"]["key_norm"]["norm"]["scale"][...]).max() > 0


def test_without_qk_norm_there_are_no_such_parameters():
    steps = make_steps(tiny_settings(devices=1, model__layers=1), Attend(TILED))
    state = jax.eval_shape(steps.init, jax.random.key(0))
    assert "query_norm" not in state.params["blocks"][0]["attention"]


@pytest.mark.parametrize("placement", ["scores", "qk"])
def test_the_largest_score_is_that_of_keys_a_row_sees(placement):
    model = tiny_settings(model__scale_placement=placement).model
    q, k = np.random.default_rng(1).standard_normal((2, 2, 3, 7, 2, 16)).astype(np.float32)
    q[1, 0, 0, 0] *= 100
    k[:, 1, -1, 1] *= 1000  # only the last row sees the last key
    k[:, :, 0, 1] *= -100  # scores far below zero
    records = [
        LayerRecord(x=None, q=jnp.asarray(a), k=jnp.asarray(b), v=None, o=None, residual=None)
        for a, b in zip(q, k, strict=True)
    ]
    scores = np.einsum("lbtnh,lbsnh->lbnts", *(x.astype(np.float64) for x in (q, k)))
    scores *= score_scale(model)[0]
    expected = np.where(np.tri(7, dtype=bool), scores, -np.inf).max(axis=(1, 3, 4))
    np.testing.assert_allclose(largest_scores(model, records), expected, rtol=1e-6)
    assert (scores.max(axis=(1, 3, 4)) > expected).any()
    assert (np.abs(scores * np.tri(7)).max(axis=(1, 3, 4)) > expected).any()


def test_attention_gives_the_scores_of_the_clip(monkeypatch):
    settings = clip_settings(1e-3, accumulation_steps=2)
    _, state = begin(settings)
    loss = make_loss(settings.model, settings.attention, Attend(TILED, packed=True, max_logit=True))
    largest = []
    for inputs, targets in zip(*tokens(settings), strict=True):
        _, records = jax.jit(loss)(state.params, inputs, targets)
        found = largest_scores(settings.model, records)
        computed = [record._replace(max_logit=None) for record in records]
        np.testing.assert_allclose(found, largest_scores(settings.model, computed), rtol=1e-6)
        largest.append(found)
    # The step takes the scores from attention; forming the products itself would now fail.
    monkeypatch.setattr(qk_clip, "score_scale", None)
    train = jax.jit(make_steps(settings, Attend(TILED, packed=True)).train)
    for order in (1, -1):  # the largest is in the first micro-batch, or in the last
        _, metrics = train(state, *(x[::order] for x in tokens(settings)), root_key(settings))
        np.testing.assert_allclose(metrics.max_logit, np.max(largest), rtol=1e-6)
        assert int(metrics.heads_clipped) == np.sum(np.max(largest, axis=0) > 1e-3)


def test_scores_below_zero_are_not_those_of_no_micro_batch():
    """A key bias opposed to the query bias shifts all scores of a head."""
    settings = clip_settings(1.0, accumulation_steps=2, model__biases=True)
    steps, state = begin(settings)
    for name, sign in (("query", 1.0), ("key", -1.0)):
        state.params["blocks"][0]["attention"][name]["bias"][...] = jnp.full((32,), sign)
    _, metrics = jax.jit(steps.train)(state, *tokens(settings), root_key(settings))
    assert -8 < metrics.max_logit < -1
    assert int(metrics.heads_clipped) == 0


def clip_settings(threshold, **changes):
    """Settings in which only the clip changes parameters, because the learning rate is 0."""
    still = {"optimizer__peak_lr": 0.0, "optimizer__end_lr": 0.0, "model__layers": 1, "devices": 1}
    return tiny_settings(**{**EXACT, **still, "optimizer__qk_clip": threshold, **changes})


def scores_of(settings, steps, params):
    @jax.jit
    def of_part(*batch):
        return largest_scores(settings.model, steps.loss(params, *batch)[1])

    return np.max([of_part(*part) for part in zip(*tokens(settings), strict=True)], axis=0)


def test_after_the_clip_no_score_on_the_same_inputs_is_above_the_threshold():
    settings = clip_settings(None)
    steps, state = begin(settings)
    before = scores_of(settings, steps, state.params)[0]
    threshold = float(before.mean())  # one of two heads is above it
    settings = clip_settings(threshold)
    steps, state = begin(settings)
    root = root_key(settings)
    new, metrics = jax.jit(steps.train)(state, *tokens(settings), root)
    after = scores_of(settings, steps, new.params)[0]
    # Three float32 roundings, and the roundings of the products.
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)
    assert int(metrics.heads_clipped) == 1
    kept = int(np.argmin(before))
    old, changed = (
        p["blocks"][0]["attention"]["query"]["kernel"][...].reshape(32, 2, 16)
        for p in (state.params, new.params)
    )
    np.testing.assert_array_equal(old[:, kept], changed[:, kept])
    assert (np.abs(changed[:, 1 - kept]) < np.abs(old[:, 1 - kept])).all()
    # Everything else is unchanged.
    for name in ("value", "out"):
        np.testing.assert_array_equal(
            *(p["blocks"][0]["attention"][name]["kernel"][...] for p in (state.params, new.params))
        )


def test_the_clip_takes_biases_too():
    settings = clip_settings(None, model__biases=True)
    steps, state = begin(settings)
    attention = state.params["blocks"][0]["attention"]
    for name in ("query", "key"):
        attention[name]["bias"][...] = jnp.full((32,), 3.0)
    before = scores_of(settings, steps, state.params)
    params, _ = clipped(state.params, jnp.asarray(before), 1.0)
    np.testing.assert_allclose(scores_of(settings, steps, params), np.ones((1, 2)), rtol=1e-5)


def test_the_score_is_the_largest_of_all_micro_batches_and_devices():
    whole = clip_settings(1e-3)
    steps, state = begin(whole)
    one, _ = jax.jit(steps.train)(state, *tokens(whole), root_key(whole))
    tiled = {"attention__implementation": "tiled"}
    split = clip_settings(1e-3, accumulation_steps=2, devices=2, **tiled)
    devices = run_devices(split)
    steps = make_steps(split, devices.attend_part, devices.over_devices)
    state = jax.jit(steps.init, out_shardings=devices.replicated)(root_key(split))
    other, metrics = devices.jit(steps.train)(state, *tokens(split), root_key(split))
    assert int(metrics.heads_clipped) == 2
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5)


def test_a_score_that_is_not_finite_withholds_the_update(monkeypatch):
    monkeypatch.setattr(step, "largest_scores", lambda *_: jnp.full((1, 2), jnp.inf))
    settings = clip_settings(10.0, optimizer__peak_lr=0.1)
    steps, state = begin(settings)
    new, metrics = jax.jit(steps.train)(state, *tokens(settings), root_key(settings))
    assert np.isfinite(metrics.loss)
    assert not metrics.applied
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_threshold_that_no_head_exceeds_leaves_every_bit():
    _, state = begin(clip_settings(1.0))
    params, count = clipped(state.params, jnp.full((1, 2), 1.0), 1.0)
    assert int(count) == 0
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
