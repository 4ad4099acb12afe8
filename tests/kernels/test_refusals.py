"""What the kernels decline, which implementation serves it instead, and tiles that they refuse."""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import MODULES

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.attention.dispatch import resolve
from lowprec_attn.numerics import EXACT, Numerics, StandardMax
from pallas_kernels.gpu import block_sizes as gpu_sizes
from pallas_kernels.tpu import block_sizes as tpu_sizes


def request(chosen: Numerics = numerics.FLASH, **options: Any) -> Request:
    """A request in float32 to kernels compiled for a GPU, unless the options say otherwise."""
    spec = Spec(
        numerics=chosen,
        row_max=StandardMax(),
        scale=1.0,
        block_sizes=options.pop("sizes", None),
    )
    keys, head_size = options.pop("length", 8), options.pop("head_size", 64)
    q_shape, kv_shape = ((1, t, 2, head_size) for t in (options.pop("rows", keys), keys))
    dtype = np.dtype(options.pop("dtype", "float32"))
    options = {"platform": "cuda"} | options
    return Request(spec=spec, q_shape=q_shape, kv_shape=kv_shape, dtype=dtype, **options)


def interpreted(chosen: Numerics = numerics.FLASH, **options: Any) -> Request:
    """A request to the interpreted TPU kernels."""
    return request(chosen, **({"sizes": harness.TPU_TILES, "platform": "cpu"} | options))


BIASED = EXACT.replace(ds="bfloat16:error_positive")
OFF_LANES = EXACT.replace(kv_block=64)
TILE_GRADS = EXACT.replace(tile_grads="bfloat16", kv_block=64)
LARGE = dataclasses.replace(harness.TPU_TILES, forward=tpu_sizes.Tile(query=2048, kv=2048))


@pytest.mark.parametrize(
    ("kernels", "asked"),
    [
        ("gpu", request()),
        ("gpu", request(sizes=harness.GPU_TILES, platform="cpu")),
        ("gpu", request(EXACT.replace(output="bf16_m5"))),
        ("gpu", request(BIASED)),
        ("gpu", request(mask_shape=(1, 2, 8, 8))),
        ("tpu", interpreted(mask_shape=(1, 1, 8, 8))),
        ("tpu", interpreted()),
        ("tpu", request(platform="tpu")),
        ("tpu", interpreted(EXACT.replace(kv_block=64), length=64)),
        ("tpu", interpreted(EXACT.replace(kv_block=2**16), length=2**16)),
        ("tpu", interpreted(EXACT.replace(kv_block="all"), length=1000)),
    ],
)
def test_forcing_the_kernels_where_they_serve(kernels: str, asked: Request) -> None:
    assert resolve(asked, kernels) == kernels
    assert MODULES[kernels].unsupported(asked) is None


BY_TILED, BY_DENSE, BY_BOTH = "use tiled", "use dense", "use tiled or dense"
WITHOUT = ", without these block_sizes"  # the tiles given are those of the kernels


@pytest.mark.parametrize(
    ("kernels", "asked", "reason", "serving"),
    [
        ("gpu", request(platform="cpu"), "this platform (it needs a CUDA GPU", BY_BOTH),
        ("gpu", request(EXACT.replace(pv="float8_e4m3fn")), "pv=float8_e4m3fn", BY_BOTH),
        ("gpu", request(EXACT.replace(output="float8_e5m2")), "output=float8_e5m2", BY_BOTH),
        ("gpu", request(has_bias=True), "a dense bias", BY_BOTH),
        (
            "gpu",
            request(mask_shape=(1, 1, 1, 1), length=2**16),
            "a dense mask of 4294967296 entries (it takes fewer than 2^31)",
            BY_BOTH,
        ),
        ("gpu", request(head_size=8), "head size 8", BY_BOTH),
        ("gpu", request(head_size=320), "head size 320", BY_BOTH),
        ("gpu", request(numerics.STANDARD), "normalize_probs", BY_DENSE),
        ("gpu", request(EXACT.replace(kv_block=40), length=64), "kv_block=40 (its steps", BY_TILED),
        ("gpu", request(sizes=tiled.BlockSizes()), "block_sizes of ", BY_TILED),
        (
            "gpu",
            request(numerics.TORCH_FLASH),
            "exponent=unfused (it takes shift_first, scale_first or whole_max)",
            BY_BOTH,
        ),
        ("tpu", interpreted(sizes=None), "this platform (it needs a TPU", BY_BOTH),
        ("tpu", interpreted(sizes=tiled.BlockSizes()), "block_sizes of ", BY_TILED),
        ("tpu", interpreted(numerics.STANDARD), "normalize_probs", BY_DENSE + WITHOUT),
        ("tpu", interpreted(EXACT.replace(pv="float16")), "pv=float16", BY_BOTH + WITHOUT),
        (
            "tpu",
            interpreted(EXACT.replace(pv="float8_e4m3fn")),
            "pv=float8_e4m3fn",
            BY_BOTH + WITHOUT,
        ),
        ("tpu", interpreted(EXACT.replace(output="bf16_m5")), "output=bf16_m5", BY_BOTH + WITHOUT),
        (
            "tpu",
            interpreted(EXACT.replace(exponent="scale_first")),
            "exponent=scale_first (it takes shift_first)",
            BY_BOTH + WITHOUT,
        ),
        (
            "tpu",
            interpreted(numerics.MATCHED),
            "exponent=whole_max (it takes shift_first)",
            BY_BOTH + WITHOUT,
        ),
        (
            "tpu",
            interpreted(EXACT.replace(recomputed_probs="rounded")),
            "recomputed_probs=rounded (it takes unrounded)",
            BY_BOTH + WITHOUT,
        ),
        (
            "tpu",
            interpreted(EXACT.replace(mean_key="subtracted")),
            "mean_key=subtracted (it takes kept)",
            BY_BOTH + WITHOUT,
        ),
        ("tpu", interpreted(BIASED), "ds=bfloat16:error_positive", BY_BOTH + WITHOUT),
        (
            "tpu",
            interpreted(EXACT.replace(kv_block=64), length=65),
            "kv_block=64 (its steps",
            BY_TILED + WITHOUT,
        ),
        (
            "tpu",
            interpreted(TILE_GRADS, rows=65),
            "kv_block=64 with tile_grads",
            BY_TILED + WITHOUT,
        ),
        (
            "tpu",
            interpreted(sizes=LARGE, length=4096),
            "forward=Tile(query=2048, kv=2048), which needs up to 91 MiB of VMEM of 16 "
            "(Tile(query=128, kv=2048) fits)",
            BY_BOTH + WITHOUT,
        ),
        ("tpu", interpreted(dtype="float16"), "float16 q, k and v", BY_BOTH + WITHOUT),
        ("tpu", interpreted(has_bias=True), "a dense bias", BY_BOTH + WITHOUT),
        ("tpu", interpreted(head_size=8), "head size 8", BY_BOTH + WITHOUT),
        ("tpu", interpreted(head_size=320), "head size 320", BY_BOTH + WITHOUT),
    ],
)
def test_forcing_the_kernels_names_what_they_decline_and_who_serves_it(
    kernels: str, asked: Request, reason: str, serving: str
) -> None:
    assert str(MODULES[kernels].unsupported(asked)).startswith(reason)
    with pytest.raises(NotImplementedError) as raised:
        resolve(asked, kernels)
    said = str(raised.value)
    assert f"'{kernels}' does not support {reason}" in said
    assert said.endswith(f"; {serving}")


def test_what_no_implementation_serves_says_so() -> None:
    asked = interpreted(numerics.CORRECTED_AFTER_CAST)
    asked = dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, soft_cap=5.0))
    with pytest.raises(NotImplementedError, match=r"; no other implementation does either$"):
        resolve(asked, "tpu")


def test_steps_of_multiples_of_16_keys_are_named() -> None:
    asked = request(EXACT.replace(kv_block=40), length=64)
    with pytest.raises(NotImplementedError, match=r"kv_block=40 .*multiples of 16"):
        resolve(asked, "gpu")


def test_the_public_entry_raises_the_same_error() -> None:
    q = jnp.ones((1, 16, 2, 32))
    options = {"implementation": "gpu", "block_sizes": harness.GPU_TILES}
    with pytest.raises(NotImplementedError, match=r"'gpu' does not support pv=float8_e4m3fn; "):
        attention.dot_product_attention(
            q, q, q, numerics=EXACT.replace(pv="float8_e4m3fn"), **options
        )
    with pytest.raises(NotImplementedError, match=r"'gpu' does not support a dense bias; "):
        attention.dot_product_attention(q, q, q, bias=jnp.ones((1, 2, 16, 16)), **options)


def test_64_bit_mode_is_declined_and_served_by_default() -> None:
    """Every platform's implementation is traced, so a kernel would fail a call on a CPU too."""

    def loss(q: jax.Array) -> jax.Array:
        return attention.dot_product_attention(q, q, q, is_causal=True).sum()

    with jax.enable_x64(True):
        for asked in (request(), interpreted()):
            with pytest.raises(NotImplementedError, match=r"support jax_enable_x64=True .* int32"):
                resolve(asked, "gpu" if asked.platform == "cuda" else "tpu")
        q = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.float32)
        assert jax.eval_shape(jax.grad(loss), q) == q


def test_a_long_step_takes_fewer_rows_or_several_tiles_by_default() -> None:
    for kv_block in (4096, 2**15, "all"):
        chosen = numerics.PROBE.replace(kv_block=kv_block)
        asked = request(chosen, length=2**15, dtype="bfloat16", platform="tpu")
        assert MODULES["tpu"].unsupported(asked) is None
        assert MODULES["tpu"].keys_per_step(asked) == chosen.step_of(2**15, 0)


def test_block_sizes_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"query must be one of .* got 48"):
        gpu_sizes.Tile(query=48, kv=64)
    with pytest.raises(ValueError, match=r"warps .* got 3"):
        gpu_sizes.Tile(query=64, kv=64, warps=3)
    with pytest.raises(ValueError, match="query must be a multiple of 128, got 64"):
        tpu_sizes.Tile(query=64, kv=128)
