"""Tests `diagnostics.capture` through jit, scan and Flax; dO comes from zeros added to O."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lowprec_attn import attention
from lowprec_attn.diagnostics import CaptureError, capture
from lowprec_attn.diagnostics.examine import array_file

B, T, WIDTH, HEADS = 2, 16, 16, 2
LAYERS = 2


class Tap:
    """Attention that keeps q, k and v, and adds zeros to its output, whose gradient is dO."""

    def __init__(self, number):
        self.number, self.attend = (
            number,
            attention.attention_fn(is_causal=True, implementation="dense"),
        )

    def __call__(self, query, key, value, mask=None, **others):
        Tap.seen[self.number] = {"q": query, "k": key, "v": value}
        out = self.attend(query, key, value, mask=mask)
        return out if Tap.zeros is None else out + Tap.zeros[self.number].astype(out.dtype)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(LAYERS):
            layer = nn.MultiHeadDotProductAttention(
                HEADS, dtype=jnp.bfloat16, attention_fn=Tap(number), deterministic=True
            )
            x = x + layer(x)
        return x


X = jax.random.normal(jax.random.key(0), (B, T, WIDTH), jnp.bfloat16)


def test_every_layer_of_a_flax_model_is_captured(tmp_path):
    """Of Linen. `test_watched_training` and the examples have models of NNX."""
    Tap.zeros, Tap.seen = None, {}
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(1), X)

    def loss(params):
        return jnp.sum(model.apply(params, X).astype(jnp.float32) ** 3)

    def with_zeros(zeros):
        Tap.zeros, Tap.seen = zeros, {}
        value = loss(params)
        Tap.zeros = None
        return value, Tap.seen

    zeros = [jnp.zeros((B, T, HEADS, WIDTH // HEADS), jnp.bfloat16)] * LAYERS
    d_outputs, seen = jax.jit(jax.grad(with_zeros, has_aux=True))(zeros)
    step = jax.jit(jax.grad(loss))
    expected = step(params)  # compiled before the block
    with capture(sequences=None) as taken:
        gradient = step(params)
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)
    assert list(taken.layers) == ["layer_00", "layer_01"]
    for number, layer in enumerate(taken.layers.values()):
        for name, array in {**seen[number], "do": d_outputs[number]}.items():
            assert layer[name].dtype == jnp.bfloat16
            np.testing.assert_array_equal(layer[name], array)
        assert (layer["is_causal"], layer["scale"]) == (True, (WIDTH // HEADS) ** -0.5)
        assert "ignored" not in layer
        assert np.any(layer["do"])

    taken.save(tmp_path / "step.npz")
    layers = array_file.load(tmp_path / "step.npz")
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    for layer in layers:
        np.testing.assert_array_equal(layer.do, taken.layers[layer.name]["do"])
        assert (layer.is_causal, layer.scale) == (True, (WIDTH // HEADS) ** -0.5)


def attend(w, x, **options):
    return attention.dot_product_attention(x * w, x, x, **{"implementation": "dense"} | options)


ROWS = jax.random.normal(jax.random.key(2), (2, 8, 2, 8))


def scanned(w):
    body = jax.checkpoint(lambda x, w: (attend(w, x), None))
    return jnp.sum(jax.lax.scan(body, ROWS, w * jnp.arange(1.0, 4.0))[0] ** 2)


def mapped(w):
    return jnp.sum(jax.vmap(functools.partial(attend, w))(jnp.stack([ROWS, ROWS])) ** 2)


def sharded(w):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    return jnp.sum(attention.sharded(mesh, batch_axis="data")(ROWS * w, ROWS, ROWS) ** 2)


def in_shards(w):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    attend = attention.within_shard(batch_axis="data")
    part = PartitionSpec("data")
    run = jax.shard_map(
        lambda q, x: attend(q, x, x), mesh=mesh, in_specs=(part,) * 2, out_specs=part
    )
    return jnp.sum(run(ROWS * w, ROWS) ** 2)


@pytest.mark.parametrize(
    ("loss", "times", "batch"),
    [(scanned, 3, 2), (mapped, 2, 2), (sharded, 1, 2), (in_shards, 2, 1)],
)
def test_a_call_is_there_as_often_as_it_ran(loss, times, batch):
    with capture(sequences=None) as taken:
        jax.jit(jax.grad(loss))(1.0)
    assert list(taken.layers) == ["layer_00", "layer_00.1", "layer_00.2"][:times]
    assert all(layer["do"].shape == (batch, 8, 2, 8) for layer in taken.layers.values())
    if loss is scanned:  # the last layer is first, and its q is x times 3
        last, *_, first = taken.layers.values()
        np.testing.assert_array_equal(first["q"], ROWS)
        np.testing.assert_array_equal(last["q"], last["k"] * 3)


def test_a_program_is_kept_for_every_number_of_sequences_and_none_else():
    traced = []

    @jax.jit
    def step(w):
        traced.append(w)
        return jax.grad(lambda w: jnp.sum(attend(w, ROWS) ** 2))(w)

    step(1.0)
    taken = []
    for sequences in (None, 1, 1):
        with capture(sequences) as one:
            step(1.0)
        taken.append(one.layers["layer_00"]["do"])
        step(1.0)
    assert len(traced) == 3
    assert [do.shape[0] for do in taken] == [2, 1, 1]
    np.testing.assert_array_equal(taken[0][:1], taken[1])
    np.testing.assert_array_equal(taken[1], taken[2])


MASK = np.tri(8, dtype=bool)[None, None]


@pytest.mark.parametrize(
    ("options", "ignored", "is_causal"),
    [
        ({}, (), False),
        ({"mask": MASK}, (), True),
        ({"bias": np.where(MASK, 0, -np.inf).astype(np.float32)}, (), True),
        ({"local_window_size": 2, "key_value_seq_lengths": [8, 8]}, (), False),
        ({"query_segment_ids": np.zeros((2, 8), np.int32)}, ("query_segment_ids",), False),
        ({"logits_soft_cap": 3.0, "sinks": np.array([1.0, -2.0], np.float32)}, (), False),
    ],
)
def test_masks_are_kept_and_what_is_not_kept_is_named(options, ignored, is_causal, tmp_path):
    with capture() as taken:
        jax.jit(jax.grad(lambda w: jnp.sum(attend(w, ROWS, scale=0.5, **options))))(1.0)
    (layer,) = taken.layers.values()
    assert tuple(layer.get("ignored", ())) == ignored
    assert (layer["is_causal"], layer["scale"]) == (False, 0.5)
    for name in ("mask", "bias", "key_value_seq_lengths"):
        assert (name in layer) == (name in options)
        if name in options:
            np.testing.assert_array_equal(layer[name], np.asarray(options[name])[:1])
    taken.save(tmp_path / "a.npz")
    (read,) = array_file.load(tmp_path / "a.npz")
    assert (bool(read.is_causal), read.scale) == (is_causal, 0.5)
    assert any("not kept" in note for note in read.notes) is bool(ignored)
    assert read.window == ((2, 2) if "local_window_size" in options else None)
    assert read.soft_cap == options.get("logits_soft_cap")
    np.testing.assert_array_equal(read.sinks, options.get("sinks"))


def test_a_traced_scale_is_not_kept():
    with capture() as taken:
        jax.jit(jax.grad(lambda w: jnp.sum(attend(w, ROWS, scale=w, implementation="tiled"))))(1.0)
    (layer,) = taken.layers.values()
    assert "scale" not in layer
    assert list(layer["ignored"]) == ["scale"]


def test_a_block_without_a_backward_pass_says_so(tmp_path):
    with pytest.raises(CaptureError, match=r"run jax.grad of the loss in it"), capture():
        attend(1.0, ROWS)
    with pytest.raises(RuntimeError, match="cannot be nested"), capture(), capture():
        pass
    with pytest.raises(ZeroDivisionError), capture():
        _ = 1 / 0
    with pytest.raises(ValueError, match="sequences must be at least 1, or None for all, got 0"):
        capture(sequences=0).__enter__()
    with capture() as taken:  # none of the failed blocks above is still open
        jax.grad(lambda w: jnp.sum(attend(w, ROWS)))(1.0)
    with pytest.raises(CaptureError, match=r"is saved as .npz, got .*a.safetensors"):
        taken.save(tmp_path / "a.safetensors")
