"""`diagnostics.capture` of foreign attention: jax.nn's, Flax's and a user's function."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.nn import dot_product_attention  # as a user's module would import it

from lowprec_attn import attention
from lowprec_attn.diagnostics import CaptureError, capture, captured, watch
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.diagnostics.watch import WatchError

B, T, HEADS, KV_HEADS, SIZE = 2, 12, 4, 2, 8
WIDTH = HEADS * SIZE
# Kept in a dict, because a capture replaces names in modules.
ORIGINALS = {"jax": jax.nn.dot_product_attention, "linen": nn.dot_product_attention}
Q = jax.random.normal(jax.random.key(0), (B, T, HEADS, SIZE))
K, V = jax.random.normal(jax.random.key(1), (2, B, T, KV_HEADS, SIZE))


def restored():
    assert jax.nn.dot_product_attention is dot_product_attention is ORIGINALS["jax"]
    assert nn.dot_product_attention is ORIGINALS["linen"]


def loss(w, zero=0.0, attend=None):
    """A loss through jax.nn's function under any name; the gradient by `zero` is dO."""
    attend = dot_product_attention if attend is None else attend
    return jnp.sum((attend(Q * w, K, V, is_causal=True) + zero) ** 3)


DO = jax.grad(loss, argnums=1)(2.0, jnp.zeros_like(Q))


@pytest.mark.parametrize(("jit", "by_name"), [(False, False), (True, True)])
def test_the_function_of_jax(jit, by_name, tmp_path):
    step = jax.grad(functools.partial(loss) if by_name else
                    lambda w: loss(w, attend=jax.nn.dot_product_attention))  # fmt: skip
    step = jax.jit(step) if jit else step
    expected = step(2.0)  # under jit it is compiled before the block
    with capture(None) as taken:
        assert step(2.0) == expected
    assert step(2.0) == expected
    restored()
    (layer,) = taken.layers.values()
    for name, array in {"q": Q * 2, "k": K, "v": V}.items():
        np.testing.assert_array_equal(layer[name], array)
    np.testing.assert_allclose(layer["do"], DO, rtol=1e-6)
    taken.save(tmp_path / "a.npz")
    (read,) = array_file.load(tmp_path / "a.npz")
    assert (read.is_causal, read.scale, read.notes) == (True, SIZE**-0.5, ())


def scanned(w):
    def body(q, w):
        return dot_product_attention(q * w, K, V, is_causal=True), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), Q, w * jnp.arange(1.0, 4.0))[0] ** 2)


def mapped(w):
    attend = functools.partial(jax.nn.dot_product_attention, K.repeat(2, 2) * w)
    return jnp.sum(jax.vmap(attend)(jnp.stack([Q, Q]), jnp.stack([Q, Q])) ** 2)


@pytest.mark.parametrize(("function", "times"), [(scanned, 3), (mapped, 2)])
def test_in_scan_remat_and_vmap_a_call_is_there_as_often_as_it_ran(function, times):
    with capture(None) as taken:
        jax.jit(jax.grad(function))(1.0)
    assert list(taken.layers) == ["layer_00", "layer_00.1", "layer_00.2"][:times]
    assert all(np.any(layer["do"]) for layer in taken.layers.values())
    if function is scanned:
        np.testing.assert_array_equal(taken.layers["layer_00.2"]["q"], Q)


def test_masks_lengths_and_windows_of_jax(tmp_path):
    lengths = jnp.array([T, 9])

    @jax.grad
    def step(w):
        one = jax.nn.dot_product_attention(Q * w, K, V, key_value_seq_lengths=lengths)
        two = jax.nn.dot_product_attention(Q * w, K, V, local_window_size=(3, 0))
        mask = jnp.tri(T, dtype=bool)
        return jnp.sum(one + two + jax.nn.dot_product_attention(Q * w, K, V, mask=mask))

    with capture(None) as taken:
        step(1.0)
    taken.save(tmp_path / "a.npz")
    whole, cut, window, causal = array_file.load(tmp_path / "a.npz")
    assert (whole.k.shape[1], cut.k.shape[1]) == (T, 9)
    assert (window.window, bool(causal.is_causal)) == ((3, 0), True)


class Linen(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        for _ in range(2):
            layer = nn.MultiHeadDotProductAttention(
                HEADS, dtype=jnp.bfloat16, dropout_rate=self.dropout, deterministic=False
            )
            x = x + layer(x, mask=mask)
        x = x.astype(jnp.float32)
        own = nn.dot_product_attention(*[x.reshape(Q.shape)] * 3, mask=mask)
        return x + own.reshape(x.shape)


class Nnx(nnx.Module):
    def __init__(self, dropout=0.0):
        self.layers = nnx.List(
            [
                nnx.MultiHeadAttention(
                    HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0),
                    dropout_rate=dropout, deterministic=False,
                )
                for _ in range(3)
            ]
        )  # fmt: skip

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x, mask=nnx.make_causal_mask(x[..., 0]))
        return x


X = jax.random.normal(jax.random.key(3), (B, T, WIDTH), jnp.bfloat16)


def of_linen(dropout=0.0):
    model, keys = Linen(dropout), {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    params = jax.jit(model.init)(keys, X)
    return params, lambda params: model.apply(params, X, rngs=keys)


def of_nnx():
    graph, params, rest = nnx.split(Nnx(), nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, rest)(X)


@pytest.mark.parametrize("make", [of_linen, of_nnx])
def test_models_of_flax_with_their_own_attention(make, tmp_path):
    params, apply = make()

    def cube(params):
        return jnp.sum(apply(params).astype(jnp.float32) ** 3)

    step = jax.jit(jax.grad(cube))
    expected = step(params)
    with capture(None) as taken:
        gradient = step(params)
    restored()
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)
    taken.save(tmp_path / "a.npz")
    layers = array_file.load(tmp_path / "a.npz")
    assert [layer.name for layer in layers] == ["layer_00", "layer_01", "layer_02"]
    dtypes = ["bfloat16", "bfloat16", "float32" if make is of_linen else "bfloat16"]
    assert [layer.q.dtype.name for layer in layers] == dtypes
    for layer in layers:
        assert bool(layer.is_causal)
        assert np.any(layer.do)
        o = attention.dot_product_attention(
            *(layer.q, layer.k, layer.v), is_causal=True, numerics="exact", implementation="dense"
        )
    if make is of_linen:  # its last attention is added to x directly
        found, expected = (layers[-1].q + o).reshape(X.shape), apply(params)
        # The layers before it are in bfloat16, and here they run without jit.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2**-7 * np.abs(expected).max())


@pytest.mark.parametrize("kept", [slice(None), (0,), (slice(None), slice(1)), (slice(1),)])
def test_a_mask_is_broadcast_over_several_axes_of_the_batch(kept):
    """q is [3, 2, T, N, H] and the mask [3, 2, …], [2, …], [3, 1, …] or [1, 2, …]."""
    q = jnp.stack([Q, Q + 1, Q + 2])
    mask = (np.arange(T) >= np.arange(6)[:, None]).reshape(3, 2, 1, 1, T)[kept]
    with capture(None) as taken:
        jax.jit(jax.grad(lambda q: jnp.sum(nn.dot_product_attention(q, q, q, mask=mask))))(q)
    expected = np.broadcast_to(mask, (3, 2, 1, 1, T)).reshape(6, 1, 1, T)
    np.testing.assert_array_equal(taken.layers["layer_00"]["mask"], expected)


def test_dropout_of_linen_is_named_and_that_of_nnx_refused():
    params, apply = of_linen(dropout=0.5)
    with capture() as taken:
        jax.jit(jax.grad(lambda params: jnp.sum(apply(params).astype(jnp.float32))))(params)
    assert list(taken.layers["layer_00"]["ignored"]) == ["dropout_rate"]
    with pytest.raises(CaptureError, match="pass deterministic=True"), capture():
        nnx.grad(lambda model: jnp.sum(model(X).astype(jnp.float32)))(Nnx(dropout=0.5))
    restored()


def heads_first(q, k, v, causal=False, sm_scale=None, softcap=None, tile=None):
    """A user's kernel that calls jax.nn and returns more than O."""
    rows = (x.swapaxes(-3, -2) for x in (q, k, v))
    out = jax.nn.dot_product_attention(*rows, is_causal=causal, scale=sm_scale)
    return out.swapaxes(-3, -2), None


@pytest.mark.parametrize(("batch", "jit"), [(True, True), (False, False)])
def test_a_function_of_a_user_in_its_own_layout(batch, jit, tmp_path):
    kernel = jax.jit(heads_first, static_argnames=("causal", "softcap", "tile"))
    attend = captured(kernel if jit else heads_first, layout="BNTH")
    q, k, v = (x.swapaxes(1, 2) if batch else x[0].swapaxes(0, 1) for x in (Q, K, V))

    def cube(w, zero):
        o, _ = attend(q * w, k, v, causal=True, sm_scale=0.5, softcap=30.0)
        return jnp.sum((o + zero) ** 3)

    do = jax.grad(cube, argnums=1)(2.0, jnp.zeros_like(q))
    with capture(None) as taken:
        jax.jit(jax.grad(cube))(2.0, 0.0)
    (layer,) = taken.layers.values()  # the call of jax.nn inside is not captured again
    np.testing.assert_array_equal(layer["q"], Q * 2 if batch else Q[:1] * 2)
    do = do.swapaxes(-3, -2)
    # dO = 3 O². Where O is near 0, a sum in another order differs by more than 1e-5 of it.
    np.testing.assert_allclose(layer["do"], do if batch else do[None], rtol=1e-5, atol=1e-8)
    assert (layer["is_causal"], layer["scale"]) == (True, 0.5)
    assert layer["logits_soft_cap"] == 30 and "ignored" not in layer


class Results(NamedTuple):
    o: jax.Array
    lse: jax.Array


@pytest.mark.parametrize("kind", [Results._make, list])
def test_a_function_keeps_the_kind_of_its_results(kind):
    attend = captured(lambda q, k, v: kind((dot_product_attention(q, k, v), jnp.zeros(3))))

    def cube(w):
        out = attend(Q * w, K, V)
        assert type(out) is type(kind((Q, K)))
        return jnp.sum(out[0] ** 3)

    with capture(None) as taken:
        jax.grad(cube)(2.0)
    (layer,) = taken.layers.values()
    np.testing.assert_array_equal(layer["q"], Q * 2)


def test_results_without_a_first_are_refused_by_name():
    attend = captured(lambda q, k, v: {"o": dot_product_attention(q, k, v)})
    refused = pytest.raises(CaptureError, match="returned dict; wrap a function that returns O")
    with refused, capture(None):
        jax.grad(lambda w: jnp.sum(attend(Q * w, K, V)["o"]))(2.0)


def test_a_function_that_calls_ours_is_captured_once():
    exact = functools.partial(attention.dot_product_attention, numerics="exact", is_causal=True)
    attend = captured(lambda q, k, v, is_causal=True: exact(q, k, v))
    step = jax.jit(jax.grad(lambda w: loss(w, attend=attend)))
    with capture(None) as taken:
        step(2.0)
    (layer,) = taken.layers.values()
    np.testing.assert_array_equal(layer["q"], Q * 2)
    with capture(None) as taken:  # ours is captured again where no other function calls it
        jax.grad(lambda w: loss(w, attend=lambda q, k, v, is_causal: exact(q, k, v)))(2.0)
    assert len(taken.layers) == 1


def with_sinks(q, k, v, softcap=0.0, s_aux=None):
    """A function with the soft cap of flash_attn (0 is none) and the sinks of FlashAttention-3."""
    return jax.nn.dot_product_attention(q, k, v)


def test_sinks_of_a_function_are_kept_and_a_cap_of_0_is_none():
    sinks = jnp.arange(1.0, 1 + Q.shape[2])
    attend = captured(with_sinks)
    with capture(1) as taken:
        jax.grad(lambda w: jnp.sum(attend(Q * w, K, V, s_aux=w * sinks)))(2.0)
        jax.grad(lambda w: jnp.sum(attend(Q * w, K, V, softcap=3.0)))(2.0)
    first, second = taken.layers.values()
    np.testing.assert_array_equal(first["sinks"], 2 * sinks)
    assert "logits_soft_cap" not in first and "ignored" not in first
    assert second["logits_soft_cap"] == 3 and "sinks" not in second


def scaled_by_itself(q, k, v, is_causal=True, scale=0.25):
    """A user's function with its own defaults."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def test_defaults_of_a_function_count():
    with capture() as taken:
        jax.grad(lambda w: jnp.sum(captured(scaled_by_itself)(Q * w, K, V)))(2.0)
    layer = taken.layers["layer_00"]
    assert (layer["is_causal"], layer["scale"]) == (True, 0.25)
    assert "ignored" not in layer


MASK = jnp.tri(T, dtype=bool)


def masked_by_itself(q, k, v, *, mask=MASK, local_window_size=(3, 0)):
    """A user's function with a mask and a window as defaults."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, local_window_size=local_window_size)


def with_segments(q, k, v, segments=None, mask=None, local_window_size=None):
    """A function with an argument that hides keys and is not known to `captured`."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, local_window_size=local_window_size)


@pytest.mark.parametrize("segments", [jnp.zeros(T, int), np.zeros(T, int)])
def test_an_array_of_an_unknown_name_is_named(segments):
    attend = captured(with_segments)
    with capture() as taken:
        jax.grad(lambda w: jnp.sum(attend(Q * w, K, V, segments=segments)))(2.0)
    assert list(taken.layers["layer_00"]["ignored"]) == ["segments"]


@pytest.mark.parametrize("jit", [False, True])
def test_what_a_partial_holds_and_arrays_that_are_defaults_count(jit):
    held = functools.partial(
        with_segments, segments=jnp.zeros(T, int), mask=MASK, local_window_size=(3, 0)
    )
    for function, ignored in ((masked_by_itself, []), (held, ["segments"])):
        attend = captured(jax.jit(function) if jit else function)
        with capture() as taken:
            jax.grad(lambda w, attend=attend: jnp.sum(attend(Q * w, K, V)))(2.0)
        layer = taken.layers["layer_00"]
        np.testing.assert_array_equal(layer["mask"], MASK[None, None])
        assert tuple(layer["window"]) == (3, 0)
        assert list(layer.get("ignored", [])) == ignored


def test_rows_beyond_the_window_of_all_keys_are_named():
    with pytest.raises(WatchError, match=r"layer_00: window .* without a key"), watch(1).step(0):
        jax.grad(
            lambda w: jnp.sum(
                jax.nn.dot_product_attention(Q * w, K[:, :4], V[:, :4], local_window_size=(3, 0))
            )
        )(1.0)


def test_splash_behind_a_function_that_says_what_it_computes():
    """The kernel has no argument q; the function around it says causality and scale."""
    tokens, heads, size = 128, 2, 128
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((tokens, tokens))] * heads)
    kernel = splash_attention.make_splash_mha_single_device(mask, interpret=True)
    with pytest.raises(ValueError, match="SplashAttentionKernel has no argument query or q"):
        captured(kernel)

    def splash(q, k, v, is_causal=True, scale=size**-0.5):
        return jax.vmap(kernel)(q * scale, k, v)

    q = np.random.default_rng(5).standard_normal((2, heads, tokens, size), np.float32)

    def cube(w, attend):
        return jnp.sum(attend(q * w, q, q) ** 3)

    gradient = jax.jit(jax.grad(cube), static_argnums=1)
    with capture() as taken:
        found = gradient(2.0, captured(splash, layout="BNTH"))
    np.testing.assert_array_equal(found, gradient(2.0, splash))
    (layer,) = taken.layers.values()
    np.testing.assert_array_equal(layer["q"], 2 * q[:1].swapaxes(1, 2))
    assert (layer["is_causal"], layer["scale"]) == (True, size**-0.5)


def test_tokamax(monkeypatch):
    tokamax = pytest.importorskip("tokamax", reason="needs tokamax")
    monkeypatch.setattr("sys.argv", ["python"])  # tokamax reads flags from it

    def cube(w, attend):
        o = attend(Q * w, K, V, is_causal=True, logits_soft_cap=30.0, implementation="xla")
        return jnp.sum(o.astype(jnp.float32) ** 3)

    gradient = jax.jit(jax.grad(cube), static_argnums=1)
    usual = tokamax.dot_product_attention
    with capture() as taken:
        found = gradient(2.0, captured(usual))
    np.testing.assert_array_equal(found, gradient(2.0, usual))
    (layer,) = taken.layers.values()
    np.testing.assert_array_equal(layer["q"], 2 * Q[:1])
    assert layer["is_causal"] and layer["logits_soft_cap"] == 30 and "ignored" not in layer


def test_what_is_not_seen_says_so():
    partial = functools.partial(ORIGINALS["jax"], is_causal=True)
    message = r"nothing was captured: .*wrap another attention by diagnostics.captured"
    for function in (
        jax.grad(lambda w: jnp.sum(partial(Q * w, K, V))),
        jax.jit(jax.grad(loss)).lower(2.0).compile(),
    ):
        with pytest.raises(CaptureError, match=message), capture():
            function(2.0)
    with pytest.raises(TypeError, match="forward-mode"), capture():
        jax.jvp(loss, (2.0,), (1.0,))
    restored()
    with capture() as taken:
        jax.grad(lambda w: jnp.sum(captured(partial)(Q * w, K, V)))(2.0)
    assert np.any(taken.layers["layer_00"]["do"])
    with pytest.raises(ValueError, match="layout must be BTNH or BNTH, got 'THD'"):
        captured(dot_product_attention, layout="THD")
    with pytest.raises(ValueError, match="<lambda> has no argument query or q; wrap a function"):
        captured(lambda x: x)


def test_a_watch_sees_them_too(tmp_path):
    found = {}
    with watch(every=1, write=lambda step, metrics: found.update(metrics)).step(0):
        jax.jit(jax.grad(loss))(2.0)
    scores = np.einsum("btkgh,bskh->bkgts", 2 * Q.reshape(B, T, KV_HEADS, 2, SIZE), K)[0]
    largest = np.max(np.abs(np.tril(scores)), axis=(2, 3)).ravel() * SIZE**-0.5
    shown = [found[f"attention/layer_00/head_{n}/score_maximum"] for n in range(HEADS)]
    np.testing.assert_allclose(shown, largest, rtol=1e-5)
