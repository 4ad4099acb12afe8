"""The forward pass of the Hopper kernels in FP8: in the interpreter, and what it declines.

The interpreter takes P̄ from shared memory, with keys in their own order. The order in which a
device's registers need them is checked here against Mosaic GPU's layouts;
`test_hopper_device.py` runs it.
"""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case
from kernel_calls import call_of, check_accuracy, run

from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import dot_product_attention, tiled
from lowprec_attn.attention.dispatch import UnsupportedError, declined_by, resolve
from lowprec_attn.numerics import (
    FLASH_ATTENTION_3_FP8,
    TRANSFORMER_ENGINE_FP8,
    DynamicMax,
    Numerics,
    StandardMax,
    get_rounding,
    round_scaled,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import ForwardTile, default_block_sizes

pytestmark = [
    pytest.mark.usefixtures("no_races"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

GROUPED = Case(
    batch=2, rows=320, keys=320, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
MORE_KEYS = dataclasses.replace(GROUPED, rows=64, keys=192, kv_heads=2, is_causal=False)
MORE_ROWS = dataclasses.replace(GROUPED, rows=256, keys=192, kv_heads=2)
WIDE = dataclasses.replace(MORE_KEYS, rows=128, heads=1, kv_heads=1, head_size=128, is_causal=True)
BY_TENSOR = FLASH_ATTENTION_3_FP8.replace(
    **dict.fromkeys(("query", "key", "value"), "float8_e4m3fn/tensor")
)
TILES = harness.HOPPER_TILES


def of_table(head_size: int, *, long: bool) -> Any:
    """The table's tiles, interpreted, with few programs."""
    sizes = default_block_sizes(head_size, long=long, reads_codes=True)
    return dataclasses.replace(sizes, programs=2, interpret=True)


def call(case: Case, chosen: Numerics = FLASH_ATTENTION_3_FP8, **options: Any) -> Any:
    how = {"sizes": TILES, "kv_block": 64, "implementation": hopper, "backward": False}
    return call_of(case, chosen, StandardMax(), **(how | options))


def in_tiles(of: Any, chosen: Numerics | None = None) -> Any:
    """The same call of `tiled`, with the same steps."""
    n = chosen or of.spec.numerics
    step = n.kv_block or of.spec.block_sizes.forward.step
    spec = dataclasses.replace(of.spec, block_sizes=None, numerics=n.replace(kv_block=step))
    return dataclasses.replace(of, spec=spec, implementation=tiled, packed=False)


@pytest.mark.parametrize(
    ("case", "chosen", "options"),
    [
        pytest.param(GROUPED, FLASH_ATTENTION_3_FP8, {}, id="causal, grouped heads"),
        pytest.param(GROUPED, BY_TENSOR, {}, id="one scale an array"),
        pytest.param(MORE_KEYS, FLASH_ATTENTION_3_FP8, {}, id="not causal, more keys"),
        pytest.param(MORE_ROWS, FLASH_ATTENTION_3_FP8, {}, id="more rows"),
        pytest.param(WIDE, FLASH_ATTENTION_3_FP8, {}, id="head 128, scale no power of two"),
        *(
            pytest.param(
                dataclasses.replace(case, rows=192, keys=192),
                FLASH_ATTENTION_3_FP8,
                {"sizes": of_table(case.head_size, long=long), "kv_block": None},
                id=f"tiles of the table, head {case.head_size}, {'long' if long else 'short'}",
            )
            for case in (GROUPED, WIDE)
            for long in (False, True)
        ),
        pytest.param(
            dataclasses.replace(GROUPED, kv_heads=2, batch=1),
            *(FLASH_ATTENTION_3_FP8, {"packed": True}),
            id="packed",
        ),
    ],
)
def test_as_accurate_as_plain_and_equal_to_tiled(
    case: Case, chosen: Numerics, options: dict[str, Any]
) -> None:
    of = call(case, chosen, **options)
    result = check_accuracy(case, of)
    expected = run(case, in_tiles(of))
    # Another order of float32 sums tips few roundings of P̄ and of O.
    assert np.mean(result["out"] != expected["out"]) < 0.005
    np.testing.assert_allclose(result["lse"], expected["lse"], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["head", "tensor"])
def test_codes_and_scales_are_those_of_round_scaled(kind: str) -> None:
    """Of all three arrays, with amaxes that differ from head to head, NaN, infinity and zeros."""
    from pallas_kernels.gpu.hopper.forward import eight_bits

    rng = np.random.default_rng(0)
    sizes = np.array([1e-3, 1.0, 1e4, 0.0])[None, None, :, None]
    k, v = (jnp.asarray(rng.standard_normal((2, 64, 4, 64)) * sizes, jnp.bfloat16) for _ in "kv")
    k = k.at[0, 3, 1, 5].set(jnp.nan).at[1, 3, 1, 5].set(jnp.inf)
    of_heads = np.arange(1, 9)[:, None]
    q = jnp.asarray(rng.standard_normal((2, 64, 8, 64)) * of_heads, jnp.bfloat16)
    points = dict.fromkeys(("query", "key", "value"), f"float8_e4m3fn/{kind}")
    spec = call(GROUPED, FLASH_ATTENTION_3_FP8.replace(**points)).spec
    found = eight_bits.codes(q, k, v, spec)
    assert found.v.shape == (2, 4, 64, 128)
    assert not np.asarray(found.v, np.float32)[..., 64:].any()
    unit, log2_unit, of_v = (np.asarray(x, np.float64) for x in found.descales)
    rounding = get_rounding(f"float8_e4m3fn/{kind}")

    def rounded(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """The rounded numbers in the layout of x, and 1 / scale [B, K]."""
        grouped = x.astype(jnp.float32).reshape(2, 64, 4, -1, 64).transpose(0, 2, 3, 1, 4)
        whole = np.asarray(round_scaled(grouped, rounding, -1)).transpose(0, 3, 1, 2, 4)
        size = np.where(np.isnan(grouped), 0, np.abs(np.asarray(grouped, np.float64)))
        amax = size.max(axis=(2, 3, 4) if kind == "head" else None, keepdims=True)
        amax = np.broadcast_to(amax, (2, 4, 1, 1, 1))[..., 0, 0, 0]
        return whole.reshape(x.shape), np.where((amax == 0) | np.isinf(amax), 1, amax / 448)

    of_all = {name: rounded(x) for name, x in {"q": q, "k": k, "v": v}.items()}
    codes_of_v = found.v[..., :64].transpose(0, 3, 1, 2)
    for name, codes in {"q": found.q, "k": found.k, "v": codes_of_v}.items():
        assert codes.dtype == jnp.float8_e4m3fn
        whole, descale = of_all[name]
        heads = np.repeat(descale, codes.shape[2] // 4, axis=1)[:, None, :, None]
        np.testing.assert_allclose(np.asarray(codes, np.float64) * heads, whole, rtol=3e-7)
    of_q, of_k = of_all["q"][1], of_all["k"][1]
    np.testing.assert_allclose(unit, np.maximum(spec.scale * of_q * of_k, 2.0**-64), rtol=1e-6)
    np.testing.assert_allclose(log2_unit, unit * np.log2(np.e), rtol=1e-6)
    np.testing.assert_allclose(of_v, of_all["v"][1], rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"probs": "float8_e4m3fn/x128"}, id="factor of probs"),
        pytest.param({"probs": "bfloat16"}, id="probs"),
        pytest.param({"query": "bfloat16"}, id="query"),
        pytest.param({"key": "bfloat16"}, id="key"),
        pytest.param({"value": "bfloat16"}, id="value"),
    ],
)
def test_every_point_is_rounded(changes: dict[str, str]) -> None:
    """Without the point, or with another factor, most numbers of O differ; with it, few do."""
    case = dataclasses.replace(GROUPED, batch=1, heads=1, kv_heads=1, rows=128, keys=128)
    of = call(case)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 128, 1, 64))
    # Key 0 has the largest scores and a V of 0, so O consists of P̄ near the smallest codes.
    q[..., 0], k[..., 0], k[:, 0, :, 0], v[:, 0] = 4, 0, 18, 0
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]

    def out(of: Any) -> np.ndarray:
        found, _ = jax.jit(lambda *x: of.attend(Extras(), *x))(*arrays)
        return np.asarray(found, np.float32)[:, 1:]

    result = out(of)
    other = of.spec.numerics.replace(**changes)
    assert np.mean(out(in_tiles(of)) != result) < 0.02
    assert np.mean(out(in_tiles(of, other)) != result) > 0.3


def test_the_largest_scores() -> None:
    of = call(GROUPED)
    spec = dataclasses.replace(of.spec, max_logit=True)
    found, expected = (
        jax.jit(lambda *x, y=y, s=s: y.attention(*x, Extras(), s))(
            *(jnp.asarray(harness.inputs(GROUPED)[name], jnp.bfloat16) for name in "qkv")
        )[2]
        for y, s in ((hopper, spec), (tiled, dataclasses.replace(spec, block_sizes=None)))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_hidden_keys_enter_the_scale_unless_they_are_infinite() -> None:
    """With fewer causal rows than keys nothing sees the last keys. `tiled` counts them too."""
    case = dataclasses.replace(GROUPED, rows=64, keys=128, batch=1, heads=1, kv_heads=1)
    q, k, v = (jnp.asarray(harness.inputs(case)[x], jnp.bfloat16) for x in "qkv")
    k, v = (x.at[0, 100, 0, 3].set(50).at[0, 101, 0, 4].set(jnp.inf) for x in (k, v))
    found, expected = (
        dot_product_attention(
            *(q, k, v),
            is_causal=True,
            numerics=FLASH_ATTENTION_3_FP8.replace(kv_block=64),
            implementation=name,
            block_sizes=TILES if name == "hopper" else None,
        )
        for name in ("hopper", "tiled")
    )
    assert np.isfinite(np.asarray(found, np.float32)).all()
    assert np.mean(np.asarray(found) != np.asarray(expected)) < 0.02


def columns_of_registers(layout: Any, columns: int) -> np.ndarray:
    """The column of each number that a thread holds, [registers, 4 warps, 32 lanes, vector]."""
    index = np.broadcast_to(np.arange(columns), (64, columns))
    for tile in layout.tiling.tiles:
        rank, outer = len(tile), index.ndim - len(tile)
        split = [
            n for size, t in zip(index.shape[outer:], tile, strict=True) for n in (size // t, t)
        ]
        index = index.reshape(*index.shape[:outer], *split)
        order = [*range(outer), *(outer + 2 * i for i in range(rank))]
        index = index.transpose(*order, *(outer + 2 * i + 1 for i in range(rank)))
    threads = (*layout.warp_dims, *layout.lane_dims, layout.vector_dim)
    last = range(index.ndim - len(threads), index.ndim)
    vector = index.shape[layout.vector_dim]
    return np.moveaxis(index, threads, tuple(last)).reshape(-1, 4, 32, vector)


def test_a_thread_holds_the_codes_that_it_needs() -> None:
    """`as_codes` joins the registers of 8 columns to those of 16, and exchanges nothing."""
    from jax.experimental.mosaic.gpu import fragmented_array

    from pallas_kernels.gpu.hopper.machine import eight_bits

    held = columns_of_registers(fragmented_array.WGMMA_LAYOUT, 64)
    wanted = columns_of_registers(fragmented_array.WGMMA_LAYOUT_8BIT, 64)
    by_columns = held.reshape(4, 2, 2, 4, 32, 2)  # 16 columns, halves, rows apart by 8, threads
    joined = np.concatenate([by_columns[:, i] for i in (0, 1)], axis=-1).reshape(wanted.shape)
    keys = np.asarray(eight_bits.key_of_column(jnp.asarray(joined)))
    np.testing.assert_array_equal(keys, wanted)
    k = jnp.arange(64)[None, :, None, None]
    in_columns = eight_bits.in_columns(k)[0, :, 0, 0]
    np.testing.assert_array_equal(in_columns, eight_bits.key_of_column(jnp.arange(64)))


def test_only_the_order_of_keys_differs_for_registers() -> None:
    from pallas_kernels.gpu.hopper.forward import eight_bits
    from pallas_kernels.gpu.hopper.machine.eight_bits import in_columns

    arrays = [jnp.asarray(harness.inputs(WIDE)[x], jnp.bfloat16) for x in "qkv"]
    spec = call(WIDE).spec
    on_device = dataclasses.replace(TILES, interpret=False, from_memory=False)
    found, plain = (
        jax.jit(lambda *x, s=s: eight_bits.codes(*x, s))(*arrays)
        for s in (dataclasses.replace(spec, block_sizes=on_device), spec)
    )
    for x, y in zip(found, plain._replace(k=in_columns(plain.k)), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def request(chosen: Numerics = FLASH_ATTENTION_3_FP8, **options: Any) -> Request:
    of_spec = {
        "row_max": StandardMax(),
        "scale": 0.125,
        "is_causal": True,
        "block_sizes": TILES,
    }
    of_spec |= {
        name: options.pop(name)
        for name in ("row_max", "soft_cap", "window", "block_sizes")
        if name in options
    }
    shape = (1, 128, 2, options.pop("head_size", 64))
    spec = Spec(numerics=chosen, **of_spec)
    return Request(
        spec=spec, q_shape=shape, kv_shape=shape, dtype=np.dtype(jnp.bfloat16), **options
    )


WHICH = "with query=float8_e4m3fn/head"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(window=(64, 0)), f"a local window {WHICH}"),
        (request(has_segments=True), f"segments {WHICH}"),
        (request(has_lengths=True), f"lengths {WHICH}"),
        (request(soft_cap=30.0), f"logits_soft_cap=30.0 {WHICH}"),
        (request(has_sinks=True), f"sinks {WHICH}"),
        (request(has_backward_sums=True), f"backward_sums {WHICH}"),
        (request(head_size=256), f"head size 256 {WHICH} (it takes 64 or 128)"),
        (
            request(head_size=128, value_size=64),
            f"values of head size 64 with queries of 128 {WHICH}",
        ),
        (request(row_max=DynamicMax()), f"row_max=DynamicMax {WHICH} (it takes StandardMax)"),
        (
            request(block_sizes=dataclasses.replace(TILES, unordered=True)),
            f"unordered=True {WHICH}",
        ),
        (
            request(TRANSFORMER_ENGINE_FP8),
            "probs=float8_e4m3fn/x448 with query=float8_e4m3fn/tensor "
            "(it takes float8_e4m3fn/x256)",
        ),
        *(
            (request(FLASH_ATTENTION_3_FP8.replace(**{name: value})), f"{name}={value} with query=")
            for name, value in {
                "query": "float8_e4m3fn/mx",
                "key": "float8_e4m3fn/block64",
                "value": "bfloat16",
                "scores": "bfloat16",
                "output": "float32",
                "statistics": "m_and_l",
                "saved_output": "float32",
                "row_sum": "rounded",
                "exponent": "unfused",
                "kv_block": 512,
            }.items()
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_everything_else_is_refused_by_name(asked: Request, reason: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        resolve(asked, "hopper")
    assert str(raised.value).startswith(f"implementation 'hopper' does not support {reason}")
    assert "\n" not in str(raised.value)


def test_scales_of_other_points_alone_are_refused_as_before() -> None:
    chosen = FLASH_ATTENTION_3_FP8.replace(query="float32", key="float32")
    assert hopper.unsupported(request(chosen)) == "probs=float8_e4m3fn/x256 (it takes bfloat16)"


def test_it_serves_only_by_name() -> None:
    asked = request(block_sizes=None)
    on_gpu = dataclasses.replace(asked, platform="cuda")
    assert resolve(on_gpu) == "tiled"
    assert resolve(request(), "hopper") == "hopper"
    said = declined_by(request(), "tiled")
    assert "hopper serves query=float8_e4m3fn/head only if it is named" in said


def test_the_backward_pass_is_refused_in_one_line() -> None:
    of = call(dataclasses.replace(GROUPED, batch=1, rows=64, keys=64))
    case = harness.inputs(dataclasses.replace(GROUPED, batch=1, rows=64, keys=64))
    q, k, v = (jnp.asarray(case[name], jnp.bfloat16) for name in "qkv")

    def loss(q: jax.Array) -> jax.Array:
        return hopper.attention(q, k, v, Extras(), of.spec)[0].astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="the backward pass of query=float8_e4m3fn/head"):
        jax.grad(loss)(q)


def test_overlapping_tiles_are_refused() -> None:
    tile = ForwardTile(overlap_tiles=True)
    with pytest.raises(ValueError, match="does not support query=float8_e4m3fn/head"):
        tile.check(FLASH_ATTENTION_3_FP8)
