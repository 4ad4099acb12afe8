"""`jax.checkpoint` can keep the results of a forward kernel by name."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention, numerics

# Kept are: O alone; O and a float32 O for δ; m and l apart, for P; no O for δ.
PRESETS = {
    "flash": numerics.FLASH,
    "float32_output": numerics.FLASH.replace(saved_output="float32"),
    "apart": numerics.FLASH.replace(statistics="m_and_l"),
    "dp_p": numerics.FLASH.replace(delta="dp_p"),
}
# The device that a program is compiled for, which decides who serves it, and numerics that keep all
# they can there.
KERNELS = {
    "tpu": (None, PRESETS["float32_output"].replace(statistics="m_and_l")),
    "gpu": ("NVIDIA A100", PRESETS["float32_output"].replace(statistics="m_and_l")),
    "hopper": ("NVIDIA H100", PRESETS["float32_output"]),
}
POLICIES = {
    "none": lambda layer: layer,
    "kept": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names(attention.CHECKPOINT_NAME),
    ),
    "again": jax.checkpoint,
}
W, X = (
    jnp.asarray(np.random.default_rng(len(shape)).normal(0, 0.3, shape), jnp.float32)
    for shape in ((64, 64), (1, 128, 64))
)


def gradient(
    chosen: numerics.Numerics, implementation: str | None, policy: str
) -> Callable[[jax.Array, jax.Array], Any]:
    """The sum of a layer's output, dX and dW, under a policy of `POLICIES`."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        q = (x @ w).reshape(1, 128, 1, 64)
        o = attention.dot_product_attention(
            q, q, q, is_causal=True, numerics=chosen, implementation=implementation
        )
        return x + o.reshape(x.shape) @ w

    run = POLICIES[policy](layer)
    return jax.value_and_grad(lambda *args: jnp.sum(run(*args).astype(jnp.float32)), (0, 1))


def equations(jaxpr: Any) -> Iterator[str]:
    """The names of all primitives, including those inside loops."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_the_forward_pass_is_not_computed_again(implementation: str, preset: str) -> None:
    def exponentials(policy: str) -> int:
        made = jax.make_jaxpr(gradient(PRESETS[preset], implementation, policy))(X, W)
        return sum(name == "exp" for name in equations(made.jaxpr))

    assert 0 < exponentials("none") == exponentials("kept") < exponentials("again")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("implementation", KERNELS)
def test_the_forward_kernel_does_not_run_again(implementation: str) -> None:
    device, chosen = KERNELS[implementation]
    unchecked = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")
    ]
    with contextlib.nullcontext() if device is None else attention.compiled_for(device):
        module = jax.export.export(
            jax.jit(gradient(chosen, None, "kept")),
            platforms=["tpu" if device is None else "cuda"],
            disabled_checks=unchecked,
        )(*(x.astype(jnp.bfloat16) for x in (X, W)))
    assert module.mlir_module().count("custom_call @") == 3  # forward, dQ, dK with dV


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_gradients_are_the_same(implementation: str) -> None:
    found = [
        jax.jit(gradient(numerics.EXACT, implementation, policy))(X, W)[1]
        for policy in ("none", "kept")
    ]
    for one, other in zip(*found, strict=True):
        assert np.any(one)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())
