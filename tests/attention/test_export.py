"""`jax.export` with symbolic lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from lowprec_attn import attention, numerics
from lowprec_attn.attention import UnsupportedError

pytestmark = pytest.mark.usefixtures("strict_promotion")

N, K, H = 4, 2, 16  # the kernels serve these
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (200, 2)},
    "causal at the end": {"is_causal": True, "query_offset": "end"},
    "steps": {"is_causal": True, "numerics": numerics.EXACT.replace(kv_block=16)},
}


def exported(dimensions: str, *, gradient: bool, **options: Any) -> tuple[Any, Any]:
    """A call exported for the shapes `dimensions`, and the call itself."""
    b, t, s = export.symbolic_shape(dimensions)
    q, k = (
        jax.ShapeDtypeStruct((b, length, heads, H), jnp.float32)
        for length, heads in ((t, N), (s, K))
    )

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention.dot_product_attention(q, k, v, **({"numerics": "exact"} | options))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jnp.sin(call(q, k, v)))

    run = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else call)
    return export.export(run, platforms=("cpu", "cuda", "tpu"))(q, k, k), run


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("case", "gradient"), [(case, case not in ("full", "steps")) for case in OPTIONS]
)
def test_symbolic_lengths(case: str, gradient: bool) -> None:
    """Lengths below one tile and of several tiles, with as many queries as keys or not."""
    shapes: Any = {"b, t, s": ((1, 7, 11), (2, 290, 300))}
    if case == "causal":
        shapes["b, t, t"] = ((2, 290, 290),)
    rng = np.random.default_rng(0)
    for dimensions, sizes in shapes.items():
        program, run = exported(dimensions, gradient=gradient, **OPTIONS[case])
        for b, t, s in sizes:
            arrays = [
                rng.standard_normal((b, length, heads, H)).astype(np.float32)
                for length, heads in ((t, N), (s, K), (s, K))
            ]
            results = zip(*map(jax.tree.leaves, (program.call(*arrays), run(*arrays))), strict=True)
            for x, expected in results:
                # A known length may use shorter tiles, so sums of 300 terms differ in order.
                np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_a_mask_and_a_bias_of_symbolic_lengths(implementation: str) -> None:
    """The bias is the same for all batch elements, and its gradient sums over them."""
    b, t, s = export.symbolic_shape("b, t, s")
    shapes = ((b, t, N, H), (b, s, K, H), (b, s, K, H), (1, N, t, s), (b, 1, 1, s))
    dtypes = (*[jnp.float32] * 4, jnp.bool_)

    def loss(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        options: dict[str, Any] = {"numerics": "exact", "implementation": implementation}
        return jnp.sum(jnp.sin(attention.dot_product_attention(q, k, v, bias, mask, **options)))

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    program = export.export(run)(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    rng = np.random.default_rng(0)
    for sizes in ((1, 1, 1), (3, 150, 270)):
        of = {"b": sizes[0], "t": sizes[1], "s": sizes[2]}
        known = [[of.get(str(size), size) for size in shape] for shape in shapes]
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in known[:4]]
        mask = np.arange(sizes[2]) < sizes[2] - np.arange(sizes[0])[:, None, None, None]
        for x, expected in zip(program.call(*arrays, mask), run(*arrays, mask), strict=True):
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)


def test_steps_of_dense_are_refused_by_name() -> None:
    options = {"implementation": "dense", "numerics": numerics.EXACT.replace(kv_block=16)}
    with pytest.raises(UnsupportedError, match="'dense' does not support kv_block=16"):
        exported("b, t, s", gradient=False, **options)


@pytest.mark.parametrize("device", ["NVIDIA H100", "NVIDIA A100"])
def test_a_symbolic_batch_keeps_the_kernels_of_a_tpu_alone(device: str) -> None:
    """A GPU gets one program for every tile, head and batch element."""
    q = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), 128, 2, 64), jnp.bfloat16)
    call = jax.jit(lambda q: attention.dot_product_attention(q, q, q, is_causal=True))
    assert "attention_forward" in export.export(call, platforms=("tpu",))(q).mlir_module()
    with attention.compiled_for(device):
        assert "attention_forward" not in export.export(call, platforms=("cuda",))(q).mlir_module()


@pytest.mark.parametrize("sizes", ["b, t, n, 16", "b, t, 4, h"])
@pytest.mark.parametrize("implementation", [None, "dense"])
def test_symbolic_heads_are_refused(sizes: str, implementation: str | None) -> None:
    q = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)

    def call(q: Any) -> Any:
        return attention.dot_product_attention(q, q, q, implementation=implementation)

    message = f"query has symbolic heads or .* shape \\({sizes}\\); export with numbers there"
    with pytest.raises(ValueError, match=message):
        export.export(jax.jit(call))(q)
