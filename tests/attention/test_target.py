"""Programs for a named GPU, on a host without one."""

import dataclasses
import logging
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention import dispatch
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import default_block_sizes

SHAPE = (1, 256, 2, 64)


def request(chosen=numerics.FLASH, platform="cuda"):
    spec = Spec(numerics=chosen, row_max=numerics.StandardMax(), scale=0.125, is_causal=True)
    bfloat16 = jnp.dtype("bfloat16")
    return Request(spec=spec, q_shape=SHAPE, kv_shape=SHAPE, dtype=bfloat16, platform=platform)


def exported():
    """The text of an exported program."""

    def attend(q, k, v):
        return attention.dot_product_attention(
            q, k, v, is_causal=True, numerics=numerics.FLASH, scale=0.125
        )

    arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 3
    disabled = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    disabled.append(jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2"))
    export = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=disabled)
    return export(*arrays).mlir_module()


needs_hopper = pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2")


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        pytest.param("NVIDIA H100", "hopper", marks=needs_hopper),
        pytest.param("NVIDIA H200", "hopper", marks=needs_hopper),
        pytest.param("9.0", "hopper", marks=needs_hopper),
        pytest.param("H100", "hopper", marks=needs_hopper),
        pytest.param("sm_90a", "hopper", marks=needs_hopper),
        pytest.param("h100", "hopper", marks=needs_hopper),
        pytest.param("nvidia h200", "hopper", marks=needs_hopper),
        ("NVIDIA A100-SXM4-80GB", "gpu"),
        ("8.9", "gpu"),
        ("10.0", "gpu"),
    ],
)
def test_a_named_device_gets_its_fastest_implementation(device, taken):
    with attention.compiled_for(device):
        assert attention.resolve(request()) == taken
        said = attention.explanation(request())
    assert (
        said == taken if taken == "hopper" else said.startswith(f"{taken}, since hopper does not")
    )
    assert attention.explanation(request()).startswith("gpu, since hopper does not support ")


@needs_hopper
def test_lengths_of_few_rows_get_the_kernels_that_are_faster_with_them():
    def with_lengths(rows, **fields):
        shape = (1, rows, 2, 64)
        given = {"q_shape": shape, "kv_shape": shape, "has_lengths": True, **fields}
        return dataclasses.replace(request(), **given)

    with attention.compiled_for("NVIDIA H100"):
        assert attention.resolve(with_lengths(1024)) == "gpu"
        said = attention.explanation(with_lengths(1024))
        assert attention.resolve(with_lengths(1024), "hopper") == "hopper"
        assert attention.resolve(with_lengths(4096)) == "hopper"
        assert attention.resolve(with_lengths(1024, has_segments=True)) == "hopper"
        assert attention.resolve(with_lengths(1024, has_sinks=True)) == "hopper"
        sizes = default_block_sizes(head_size=64)  # only `hopper` has these sizes
        of_hopper = dataclasses.replace(request().spec, block_sizes=sizes)
        assert attention.resolve(with_lengths(1024, spec=of_hopper)) == "hopper"
    assert said == "gpu, since hopper is slower with lengths below 4096 rows"


def test_the_log_says_why_of_a_device_that_is_known(caplog):
    chosen = numerics.FLASH.replace(kv_block=176)  # no other test uses this step
    asked = request(chosen)
    with caplog.at_level("INFO", logger="lowprec_attn"):
        dispatch.resolve_by_platform(asked, None)
        with attention.compiled_for("NVIDIA A100"):
            dispatch.resolve_by_platform(asked, None)
    of_none, of_ampere = (record.message for record in caplog.records)
    assert "since" not in of_none
    assert re.search(r"since hopper does not support .*, on cuda", of_ampere)


@needs_hopper
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_an_exported_program_has_the_kernel_of_the_device_that_was_named():
    with attention.compiled_for("NVIDIA A100"):
        ampere = exported()
    with attention.compiled_for("NVIDIA H100"):
        hopper_program = exported()
    assert "triton" in ampere and "mosaic_gpu" not in ampere
    assert "mosaic_gpu" in hopper_program and "triton" not in hopper_program


def test_the_example_of_the_docstring_runs():
    example = textwrap.dedent(attention.compiled_for.__doc__.partition("readable::\n")[2])

    def attend(q, k, v):
        return attention.dot_product_attention(q, k, v, is_causal=True)

    given = dict.fromkeys("qkv", jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16))
    exec(example, names := {"jax": jax, "attention": attention, "attend": attend, **given})
    assert "attention_forward" in names["exported"].mlir_module()


def test_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(hopper, "is_available", lambda: True)
    with attention.compiled_for("NVIDIA L4"):
        reason = "gpu, since hopper does not support NVIDIA L4 (it needs a Hopper GPU)"
        assert attention.explanation(request()) == reason
    reason = "gpu, since hopper does not support an unknown GPU (it needs a Hopper GPU)"
    assert attention.explanation(request()) == reason
    assert attention.explanation(request(platform="default")).startswith(
        "tiled, since hopper does not"
    )


def test_a_kind_that_is_new_is_served_with_a_warning(caplog):
    for known in ("B200", "sm_80", "NVIDIA B200", "b200", "SM_80", "Nvidia gh200 480GB"):
        with caplog.at_level(logging.WARNING), attention.compiled_for(known):
            assert not caplog.records
    with caplog.at_level(logging.WARNING), attention.compiled_for("NVIDIA R100"):
        assert attention.resolve(request()) == "gpu"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "attention has not been compiled for NVIDIA R100 before; `gpu` serves it"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("7.5", "compute capability 7.5 .the kernels need 8.0, Ampere"),
        ("sm_75", "compute capability sm_75 .the kernels need 8.0, Ampere"),
        ("TPU v5e", "TPU v5e is no GPU; a program for a TPU takes `tpu` without this"),
        ("11.3", "11.3 is none of 8.0, 8.9, 9.0, 10.0; name the kind"),
        ("", "a device kind or a compute capability, got ''"),
        (9.0, "a device kind or a compute capability, got 9.0"),
    ],
)
def test_a_target_that_is_none_is_refused(device, words):
    with pytest.raises(ValueError, match=words), attention.compiled_for(device):
        pass


def test_a_mesh_that_is_set_is_not_replaced():
    refused = pytest.raises(ValueError, match="cannot change the mesh that is set")
    with attention.compiled_for("NVIDIA H100"), refused, attention.compiled_for("NVIDIA A100"):
        pass
