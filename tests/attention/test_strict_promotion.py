"""The public doors under `jax_numpy_dtype_promotion='strict'`, in every dtype."""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from lowprec_attn import attention, diagnostics

pytestmark = pytest.mark.usefixtures("strict_promotion")

T, N, H = 20, 2, 16


def total(out: Any) -> jax.Array:
    """A number that depends on all results."""
    return sum((jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(out)), jnp.float32(0))


def of_function(x: jax.Array, **options: Any) -> Any:
    q = x.reshape(*x.shape[:2], N, H)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention.dot_product_attention(q, k, v, **options)
        return total(out[0] if isinstance(out, tuple) else out)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, q, q)


def of_linen(x: jax.Array, **options: Any) -> Any:
    attend = attention.attention_fn(**options)
    layer = linen.MultiHeadDotProductAttention(num_heads=N, dtype=x.dtype, attention_fn=attend)
    params = layer.init(jax.random.key(0), x)
    mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
    return jax.grad(lambda params: total(layer.apply(params, x, mask=mask)))(params)


def of_nnx(x: jax.Array, **options: Any) -> Any:
    attend = attention.attention_fn(**options)
    layer = nnx.MultiHeadAttention(
        num_heads=N,
        in_features=N * H,
        dtype=x.dtype,
        decode=False,
        attention_fn=attend,
        rngs=nnx.Rngs(0),
    )
    return nnx.grad(lambda layer: total(layer(x)))(layer)


def of_capture(x: jax.Array, **options: Any) -> Any:
    with diagnostics.capture() as taken:
        of_function(x, **options)
    of = taken.layers["layer_00"]
    qkv_do = (jnp.asarray(of[name]) for name in ("q", "k", "v", "do"))
    return diagnostics.attention_signals(*qkv_do, numerics="flash")


def of_mesh(x: jax.Array, **options: Any) -> Any:
    q = x.reshape(*x.shape[:2], N, H)
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    attend = attention.sharded(mesh, batch_axis="data", head_axis="model")
    return jax.jit(jax.grad(lambda q: total(attend(q, q, q, **options))))(q)


OPTIONS = {
    "logits_soft_cap": 5,
    "sinks": np.zeros(N),
    "query_seq_lengths": [3, T],
    "key_value_seq_lengths": np.array([0, T], np.uint8),
    "return_residual": True,
    "return_max_logit": True,
}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "function": (of_function, OPTIONS),
    "traced scale, bias": (
        of_function,
        {"scale": jnp.bfloat16(0.3), "bias": jnp.zeros((1, N, T, T), jnp.bfloat16)},
    ),
    "linen": (of_linen, {}),
    "nnx": (of_nnx, {"is_causal": True}),
    "capture": (of_capture, {"is_causal": True}),
    "mesh": (of_mesh, {"is_causal": True}),
}
ON_GPU = ("function", "capture", "mesh")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(
    ("implementation", "call"),
    [
        (how, call)
        for how in ("dense", "tiled", "gpu")
        for call in (ON_GPU if how == "gpu" else CALLS)
    ],
)
def test_no_call_needs_promotion(implementation: str, call: str, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, N * H)), dtype)
    run, options = CALLS[call]
    how = harness.IMPLEMENTATIONS[implementation]
    if implementation == "gpu":
        options = options | {"block_sizes": how.block_sizes}
    found = jax.tree.leaves(run(x, implementation=how.name, **options))
    assert all(np.isfinite(leaf.astype(jnp.float32)).all() for leaf in found)
