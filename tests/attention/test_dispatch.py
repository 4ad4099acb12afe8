"""Which implementation computes a call: chosen at lowering, for the platform of the lowering."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from gpu.targets import mesh_of

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention.dispatch import resolve, resolve_by_platform
from lowprec_attn.numerics import StandardMax
from pallas_kernels.gpu.device import kernel_or
from pallas_kernels.gpu.hopper.attention import is_available


def request(numerics_=numerics.FLASH, length=16, **options):
    spec = Spec(numerics=numerics_, row_max=StandardMax(), scale=0.125, is_causal=True)
    shape = (1, length, 2, 64)
    return Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=jnp.dtype("bfloat16"), **options)


def test_the_fastest_implementation_of_each_platform_is_chosen():
    names = {"cuda": "gpu", "tpu": "tpu", "default": "tiled"}
    assert resolve_by_platform(request(), None) == names


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (request(has_bias=True), "tiled"),
        (request(numerics.FLASH.replace(pv="float8_e5m2")), "tiled"),
        (request(numerics.FLASH.replace(kv_block=8)), "tiled"),
        (request(numerics.STANDARD), "dense"),
    ],
)
def test_what_the_kernels_decline_goes_to_the_same_arithmetic_elsewhere(asked, name):
    assert resolve_by_platform(asked, None) == dict.fromkeys(("cuda", "tpu", "default"), name)


@pytest.mark.parametrize(
    ("capability", "name"), [("7.5", "tiled"), ("8.0", "gpu"), ("12.0", "gpu"), ("gfx942", "tiled")]
)
def test_gpus_older_than_ampere_and_of_amd_keep_tiled(capability, name, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability, device_kind="a GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert resolve_by_platform(request(), None)["cuda"] == name
    kernel = kernel_or(lambda: "kernel", lambda: "plain").keywords["cuda"]
    assert kernel() == ("kernel" if name == "gpu" else "plain")


def test_a_chosen_implementation_serves_every_platform():
    assert set(resolve_by_platform(request(), "dense").values()) == {"dense"}


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_the_kernels_cannot_be_forced_where_there_is_no_such_device(name):
    match = f"'{name}' does not support this platform.*tiled"
    with pytest.raises(NotImplementedError, match=match):
        resolve_by_platform(request(), name)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"])
def test_the_platform_that_a_call_is_lowered_for_decides(kind):
    def loss(q):
        out = attention.dot_product_attention(q, q, q, is_causal=True)
        return out.astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):  # lowering asks for the kind of the GPU
        traced = jax.jit(jax.grad(loss)).trace(q)
        for_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
        for_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
        for_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("forward", "key_gradients", "query_gradients"):
        assert f"attention_{kernel}" not in for_cpu
        assert f"attention_{kernel}" in for_gpu
        assert f"attention_{kernel}" in for_tpu
    assert "tpu_custom_call" in for_tpu
    assert ("mosaic_gpu" in for_gpu) == (kind == "NVIDIA H200" and is_available())


@pytest.mark.skipif(not is_available(), reason="needs JAX 0.11.2")
@pytest.mark.parametrize(
    "change",
    [
        *({}, {"numerics": "matched"}, {"numerics": "corrected_after_cast"}),
        *({"window": (64, 0)}, {"soft_cap": 30.0}, {"max_logit": True}),
    ],
)
def test_a_hopper_gpu_takes_its_own_kernels_unasked(change):
    of_spec = {name: value for name, value in change.items() if name != "numerics"}
    preset = numerics.PRESETS[change.get("numerics", "flash")]
    asked = request(preset, length=128, platform="cuda")
    asked = dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, **of_spec))
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert resolve(asked) == "hopper"
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA A100-SXM4-80GB")):
        assert resolve(asked) == "gpu"
