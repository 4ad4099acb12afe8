"""`attention_fn` in the multi-head attention of Linen and NNX, against Flax's own default."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from lowprec_attn import attention, numerics

pytestmark = pytest.mark.usefixtures("strict_promotion")

B, T, FEATURES, HEADS = 2, 7, 16, 2
EXACT_FN = attention.attention_fn(numerics=numerics.EXACT)


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (B, T, FEATURES))


MASKS = {
    "none": None,
    "causal": nn.make_causal_mask(np.ones((B, T))),  # float32 [B, 1, T, T]
    "padding": nn.make_attention_mask(
        np.ones((B, T), bool), np.arange(T) < np.array([[4], [6]]), dtype=jnp.bool_
    ),
    "causal and padding": nn.combine_masks(
        nn.make_causal_mask(np.ones((B, T))),
        nn.make_attention_mask(np.ones((B, T)), np.arange(T) < np.array([[4], [6]])),
    ),
    # All rows see key 0, because a row without keys is 0 here and a mean in Flax.
    "of heads": (np.random.default_rng(0).random((B, HEADS, T, T)) < 0.8) | (np.arange(T) == 0),
}


def linen(fn: Any, **options: Any) -> nn.MultiHeadDotProductAttention:
    extra = {} if fn is None else {"attention_fn": fn}
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, deterministic=True, **extra, **options)


def nnx_layer(fn: Any, **options: Any) -> nnx.MultiHeadAttention:
    extra = {} if fn is None else {"attention_fn": fn}
    return nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **extra, **options
    )


# Two float32 computations of sums of T and H terms, whose entries are of order 1.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("mask", MASKS)
def test_linen_equals_the_flax_default(mask: str) -> None:
    x = inputs()
    params = linen(None).init(jax.random.key(1), x)
    expected = linen(None).apply(params, x, mask=MASKS[mask])
    out = linen(EXACT_FN).apply(params, x, mask=MASKS[mask])
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    if mask != "none":  # Linen drops unknown keywords; this shows that the mask arrived
        assert np.abs(out - linen(EXACT_FN).apply(params, x)).max() > 1e-2


@pytest.mark.parametrize("mask", MASKS)
def test_nnx_equals_the_flax_default(mask: str) -> None:
    x = inputs()
    expected = nnx_layer(None)(x, mask=MASKS[mask])
    out = nnx_layer(EXACT_FN)(x, mask=MASKS[mask])
    np.testing.assert_allclose(out, expected, **TOLERANCE)


CAUSAL_FN = attention.attention_fn(numerics=numerics.EXACT, is_causal=True)


def test_nnx_is_causal_without_a_mask() -> None:
    x = inputs()
    causal = nnx_layer(None)(x, mask=MASKS["causal"])
    np.testing.assert_allclose(nnx_layer(EXACT_FN)(x, is_causal=True), causal, **TOLERANCE)
    np.testing.assert_allclose(nnx_layer(CAUSAL_FN)(x), causal, **TOLERANCE)


@pytest.mark.parametrize("mask", ["causal and padding", "of heads"])
def test_a_mask_narrows_causality(mask: str) -> None:
    """In Linen and NNX, with a mask that is known during tracing or traced."""
    x, params = inputs(), linen(None).init(jax.random.key(1), inputs())
    both = np.asarray(MASKS["causal"], bool) & np.asarray(MASKS[mask], bool)
    expected = linen(None).apply(params, x, mask=both)
    given = jnp.asarray(MASKS[mask])
    traced = jax.jit(lambda mask: linen(CAUSAL_FN).apply(params, x, mask=mask))
    np.testing.assert_allclose(traced(given), expected, **TOLERANCE)
    np.testing.assert_allclose(linen(CAUSAL_FN).apply(params, x, mask=given), expected, **TOLERANCE)
    expected = nnx_layer(None)(x, mask=both)
    np.testing.assert_allclose(nnx_layer(CAUSAL_FN)(x, mask=given), expected, **TOLERANCE)


@pytest.mark.parametrize("shape", [(B, 1, 1, T), (B, 1, T, 1), (1, 1, 1, 1)])
def test_a_mask_that_repeats_its_values_is_not_taken_for_a_causal_one(shape: Any) -> None:
    """Row t of these shows the keys s <= t, before they are repeated over rows or keys."""
    x, mask = inputs(), np.broadcast_to(np.tri(*shape[-2:], dtype=np.bool_), shape)
    params = linen(None).init(jax.random.key(1), x)
    expected = linen(None).apply(params, x, mask=mask)
    out = linen(EXACT_FN).apply(params, x, mask=mask)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


FAST_FN, FAST_CAUSAL_FN = attention.attention_fn(), attention.attention_fn(is_causal=True)
LENGTH = 128
KNOWN = nn.make_causal_mask(np.ones((1, LENGTH)))
# How a module learns that it is causal, and whether the kernels know it without a mask.
CAUSAL_CALLS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "linen, attention_fn": (FAST_CAUSAL_FN, {}, True),
    "linen, a mask known here": (FAST_FN, {"mask": KNOWN}, True),
    "linen, both": (FAST_CAUSAL_FN, {"mask": KNOWN}, True),
    "linen, a traced mask": (FAST_FN, {"mask": None}, False),
    "nnx, attention_fn": (FAST_CAUSAL_FN, {}, True),
    "nnx, a mask known here": (FAST_FN, {"mask": KNOWN}, True),
    "nnx, is_causal": (FAST_FN, {"is_causal": True}, True),
    "nnx, a traced mask": (FAST_FN, {"mask": None}, False),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("case", CAUSAL_CALLS)
def test_causality_reaches_the_kernels(case: str) -> None:
    fn, options, by_position = CAUSAL_CALLS[case]
    x = jnp.ones((1, LENGTH, FEATURES * HEADS), jnp.float32)
    if case.startswith("linen"):
        layer = linen(fn)
        params = jax.eval_shape(linen(None).init, jax.random.key(1), x)
    else:
        options = {"decode": False} | options
        params, layer = (
            {},
            nnx.MultiHeadAttention(HEADS, x.shape[-1], attention_fn=fn, rngs=nnx.Rngs(0)),
        )

    def apply(params: Any, x: jax.Array) -> jax.Array:
        given = options
        if "mask" in options and options["mask"] is None:  # formed inside `jit` from traced values
            given = {**options, "mask": nn.make_causal_mask(x[..., 0])}
        return layer.apply(params, x, **given) if params else layer(x, **given)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):  # lowering asks for the kind of the GPU
        traced = jax.jit(apply).trace(params, x)
        texts = [traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "tpu")]
    for text in texts:
        assert "attention_forward" in text
        assert (f"1x1x{LENGTH}x{LENGTH}xi8" not in text) == by_position


SHORT = 5  # a window relative to the row
DECODED: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},
    "window": {"local_window_size": (SHORT, 1)},
    "both": {"is_causal": True, "local_window_size": SHORT},
}
LONGER = 12


def whole_sequence(options: dict[str, Any]) -> np.ndarray:
    """The mask of a layer that sees all positions at once; a cache holds no later positions."""
    rows, cols = np.arange(LONGER)[:, None], np.arange(LONGER)
    seen = cols <= rows
    return seen & (cols >= rows - SHORT) if "local_window_size" in options else seen


@pytest.mark.parametrize("case", DECODED)
def test_linen_decodes_step_by_step_as_the_whole_sequence(case: str) -> None:
    fn = attention.attention_fn(numerics=numerics.EXACT, **DECODED[case])
    x = jax.random.normal(jax.random.key(4), (B, LONGER, FEATURES))
    params = linen(None).init(jax.random.key(1), x)
    expected = linen(None).apply(params, x, mask=whole_sequence(DECODED[case])[None, None])
    layer = linen(fn, decode=True)
    cache = linen(None, decode=True).init(jax.random.key(1), x)["cache"]
    step = jax.jit(lambda cache, x: layer.apply({**params, "cache": cache}, x, mutable=["cache"]))
    for t in range(LONGER):
        out, changed = step(cache, x[:, t : t + 1])
        cache = changed["cache"]
        np.testing.assert_allclose(out[:, 0], expected[:, t], **TOLERANCE)


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("case", DECODED)
def test_nnx_decodes_step_by_step_as_the_whole_sequence(case: str, kv_heads: int) -> None:
    fn = attention.attention_fn(numerics=numerics.EXACT, **DECODED[case])
    x = jax.random.normal(jax.random.key(4), (B, LONGER, FEATURES))
    mask = whole_sequence(DECODED[case])[None, None]
    expected = nnx_layer(None, num_kv_heads=kv_heads)(x, mask=mask)
    layer = nnx_layer(fn, num_kv_heads=kv_heads)
    layer.init_cache(x.shape)
    # With a causal call, Flax would combine the mask with a triangle of one row, which is not meant
    # here.
    for t in range(LONGER):
        out = layer(x[:, t : t + 1], decode=True)
        np.testing.assert_allclose(out[:, 0], expected[:, t], **TOLERANCE)


def test_decoding_beside_a_mask_of_ones_own() -> None:
    """The mask is left padding: it hides the first two keys from every step."""
    fn = attention.attention_fn(numerics=numerics.EXACT, is_causal=True, local_window_size=SHORT)
    x = jax.random.normal(jax.random.key(4), (B, LONGER, FEATURES))
    shown = np.arange(LONGER) >= 2
    mask = whole_sequence(DECODED["both"]) & shown
    expected = nnx_layer(None)(x, mask=mask[None, None])
    layer = nnx_layer(fn)
    layer.init_cache(x.shape)
    for t in range(LONGER):
        out = layer(x[:, t : t + 1], decode=True, mask=shown[None, None, None])
        if t >= 2:  # before, a row without keys is 0 here, a mean in Flax
            np.testing.assert_allclose(out[:, 0], expected[:, t], **TOLERANCE)


@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize("queries", [1, 5])
def test_positions_are_refused_in_cross_attention(case: str, queries: int) -> None:
    fn = attention.attention_fn(numerics=numerics.EXACT, **DECODED[case])
    x, encoded = inputs()[:, :queries], inputs()
    params = linen(None).init(jax.random.key(1), x, encoded)
    text = rf"with {queries} queries and 7 keys: cross-attention has no positions"
    with pytest.raises(ValueError, match=text):
        linen(fn).apply(params, x, encoded)
    with pytest.raises(ValueError, match=text):
        nnx_layer(fn)(x, encoded)
    plain = linen(EXACT_FN).apply(params, x, encoded)
    np.testing.assert_allclose(plain, linen(None).apply(params, x, encoded), **TOLERANCE)


def test_a_module_of_ones_own_passes_query_offset() -> None:
    q, k = inputs()[:, 4:].reshape(B, 3, HEADS, -1), inputs().reshape(B, T, HEADS, -1)
    mask = np.arange(T) <= np.arange(4, 7)[:, None]
    expected = nn.dot_product_attention(q, k, k, mask=mask[None, None])
    for offset in (4, "end", jnp.int32(4)):
        out = CAUSAL_FN(q, k, k, query_offset=offset)
        np.testing.assert_allclose(out, expected, **TOLERANCE)


def test_gradients_of_parameters_equal_the_flax_default() -> None:
    x = inputs()
    params = linen(None).init(jax.random.key(1), x)

    def gradients(layer: nn.Module) -> Any:
        return jax.grad(lambda p: jnp.sum(layer.apply(p, x, mask=MASKS["causal"]) ** 2))(params)

    ours, theirs = gradients(linen(EXACT_FN)), gradients(linen(None))
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("make", [linen, nnx_layer])
def test_bfloat16_layers_keep_their_dtype(make: Any) -> None:
    x = inputs().astype(jnp.bfloat16)
    layer = make(attention.attention_fn(), dtype=jnp.bfloat16)
    if make is linen:
        out = layer.apply(layer.init(jax.random.key(1), x), x)
    else:
        out = layer(x)
    assert out.dtype == jnp.bfloat16


def test_stochastic_rounding_takes_a_key_or_draws_one_at_every_use() -> None:
    q = inputs().reshape(B, T, HEADS, -1)
    chosen = numerics.STOCHASTIC_OUTPUT
    fixed = attention.attention_fn(numerics=chosen, rng_key=jax.random.key(3))
    np.testing.assert_array_equal(fixed(q, q, q), fixed(q, q, q))
    drawn = attention.attention_fn(numerics=chosen, rng_key=nnx.Rngs(noise=0).noise)
    assert np.any(np.asarray(drawn(q, q, q)) != np.asarray(drawn(q, q, q)))


def test_active_dropout_is_refused_and_inactive_is_not() -> None:
    x = inputs()
    layer = linen(EXACT_FN, dropout_rate=0.1)
    params = linen(None).init(jax.random.key(1), x)
    np.testing.assert_allclose(layer.apply(params, x), linen(None).apply(params, x), **TOLERANCE)
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.1"):
        layer.clone(deterministic=False).apply(params, x, rngs={"dropout": jax.random.key(2)})
    nnx_dropout = nnx_layer(EXACT_FN, dropout_rate=0.1)
    nnx_dropout(x, deterministic=True)
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.1"):
        nnx_dropout(x, deterministic=False)


def test_sown_weights_are_refused() -> None:
    x = inputs()
    params = linen(None).init(jax.random.key(1), x)
    with pytest.raises(NotImplementedError, match="sown attention weights"):
        linen(EXACT_FN).apply(params, x, sow_weights=True, mutable=["intermediates"])
    with pytest.raises(NotImplementedError, match="sown attention weights"):
        nnx_layer(EXACT_FN)(x, sow_weights=True)


def test_without_a_batch_axis() -> None:
    x = inputs()[0]
    params = linen(None).init(jax.random.key(1), x)
    mask = MASKS["causal"][0]  # [1, T, T]
    np.testing.assert_allclose(
        linen(EXACT_FN).apply(params, x, mask=mask),
        linen(None).apply(params, x, mask=mask),
        **TOLERANCE,
    )
