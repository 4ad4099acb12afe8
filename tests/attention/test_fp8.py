"""Attention in 8 bits: every point with every kind of scale, against NumPy; the two presets."""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scales
from compiling import slow_among
from gpu.targets import mesh_of
from points import closer

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import dense, tiled
from lowprec_attn.attention.dispatch import resolve
from lowprec_attn.diagnostics import attention_signals
from lowprec_attn.diagnostics.comparison import compare
from lowprec_attn.numerics import EXACT, FLASH, Numerics, Point, StandardMax
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.tpu import attention as tpu

pytestmark = pytest.mark.usefixtures("strict_promotion")

# No length is a multiple of a block, and tiles are one or two blocks.
CASE = harness.Case(batch=2, rows=70, keys=75, heads=4, kv_heads=2, head_size=40, is_causal=True)
IMPLEMENTATIONS = {
    "dense": harness.IMPLEMENTATIONS["dense"],
    "tiled": harness.Implementation(
        name="tiled", kv_block=32, block_sizes=tiled.BlockSizes(query=32, kv_bwd=64)
    ),
}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ARRAYS = {"query": E4M3, "key": E4M3, "value": E4M3, "do": E5M2}
PROBS, SUMS = {"probs": E4M3, "probs_bwd": E4M3}, {"output_bwd": E4M3, "grads": E5M2}
OF_SCALE = {
    "x64": ARRAYS | PROBS | SUMS | {"ds": E5M2},
    "tensor": ARRAYS | SUMS | {"ds": E5M2},
    "head": ARRAYS | SUMS | {"ds": E5M2},
    "block16": ARRAYS,
    "mx": ARRAYS | PROBS | {"ds": E5M2},
    "nvfp4": ARRAYS | PROBS | {"ds": E5M2},
}
RUNS = [
    (implementation, scale, delta)
    for implementation in IMPLEMENTATIONS
    for scale in OF_SCALE
    for delta in ("do_o", "normalized")
]
FAST = [
    *(("tiled", scale, "do_o") for scale in ("tensor", "head", "mx", "nvfp4")),
    *(("dense", "block16", "do_o"), ("dense", "tensor", "normalized")),
]


def with_scale(scale: str, delta: str, *without: str) -> Numerics:
    """All points that accept the scale have it, except for `without`, which do not round."""
    points = {name: f"{fmt}/{scale}" for name, fmt in OF_SCALE[scale].items()}
    return EXACT.replace(**{k: x for k, x in points.items() if k not in without}, delta=delta)


def arrays() -> harness.Arrays:
    """Arrays whose sizes vary over rows and features, so that all scales differ."""
    found = harness.inputs(CASE)
    rng = np.random.default_rng(1)
    for name in ("q", "k", "v", "do"):
        x = found[name]
        sizes = np.exp2(rng.uniform(-3, 1, (1, x.shape[1], x.shape[2], 1)))
        found[name] = (x * sizes * np.exp2(rng.uniform(-2, 1, x.shape[-1]))).astype(x.dtype)
    return found


def plain(chosen: Numerics, implementation: str) -> harness.Arrays:
    how = IMPLEMENTATIONS[implementation]
    return harness.run_plain(CASE, arrays(), how.numerics(chosen))


def check_points(result: harness.Arrays, implementation: str, scale: str, delta: str) -> None:
    """Checks that each point rounds: leaving one out gives another result."""
    on = plain(with_scale(scale, delta), implementation)
    for point in OF_SCALE[scale]:
        off = plain(with_scale(scale, delta, point), implementation)
        assert closer(result, on, off), point
        with pytest.raises(AssertionError, match="between on and off"):
            closer(result, off, on)


@pytest.mark.parametrize("run", slow_among(RUNS, [x for x in RUNS if x not in FAST]), ids="-".join)
def test_every_point_is_there_with_its_scale(run: tuple[str, str, str]) -> None:
    implementation, scale, delta = run
    chosen = with_scale(scale, delta)
    result = harness.run(IMPLEMENTATIONS[implementation], CASE, arrays(), chosen)
    check_points(result, implementation, scale, delta)


@pytest.mark.parametrize("preset", ["flash_attention_3_fp8", "transformer_engine_fp8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_preset_is_told_from_bfloat16_and_from_one_of_its_points_put_back(
    implementation: str, preset: str
) -> None:
    chosen, how = numerics.PRESETS[preset], IMPLEMENTATIONS[implementation]
    result = harness.run(how, CASE, arrays(), chosen)
    on = plain(chosen.replace(output="bfloat16"), implementation)
    for point in numerics.POINTS:
        rounding = getattr(chosen, point)
        if rounding is not None and rounding.scaling is not None:
            off = plain(chosen.replace(**{point: "bfloat16"}), implementation)
            assert closer(result, on, off), point


def test_the_shift_of_the_maximum_by_eight_leaves_m_l_and_lse() -> None:
    """If e4m3 holds q and k exactly, FlashAttention-3 in 8 bits has the lse of 16 bits.

    The two are equal bit for bit. It also keeps a P̄ of 2^-12; a thousand of them are a fifth of
    the row.
    """
    q, k = (np.zeros((1, 1024, 1, 16)) for _ in range(2))
    q[:, :, :, 0] = k[:, 3, :, 0] = 7  # so the scales are 448 / 7 = 64
    q, k = (jnp.asarray(x[:, :rows], jnp.bfloat16) for x, rows in ((q, 4), (k, 1024)))
    v = jnp.ones((1, 1024, 1, 16), jnp.bfloat16)

    def call(chosen: Numerics) -> tuple[jax.Array, jax.Array]:
        out, lse = attention.dot_product_attention(
            q, k, v, scale=0.17, numerics=chosen, implementation="tiled", return_residual=True
        )
        return out.astype(jnp.float32), lse

    out, lse = call(numerics.FLASH_ATTENTION_3_FP8)
    _, of_16_bits = call(numerics.FLASH_ATTENTION_3)
    np.testing.assert_array_equal(lse, of_16_bits)
    # With v = 1, O is the sum of the rounded P̄ over the sum of P̄, so only rounding P̄ moves it.
    lossy, _ = call(numerics.FLASH_ATTENTION_3_FP8.replace(probs=E4M3))
    assert np.abs(np.asarray(out) - 1).max() < 0.02
    assert np.abs(np.asarray(lossy) - 1).min() > 0.15


@pytest.mark.parametrize("point", ["probs", "probs_bwd"])
def test_the_amax_of_probabilities_is_one_whatever_a_tile_holds(point: Point) -> None:
    p = np.random.default_rng(0).uniform(0, 0.3, (1, 1, 1, 32, 32)).astype(np.float32)
    chosen = EXACT.replace(**{point: "float8_e4m3fn/nvfp4"})
    place = Place(span(0, 32)[:, None], span(0, 32)[None])
    found = np.asarray(jax.jit(lambda p: Rounder(chosen, None)(p, point, place))(p))[0]
    expected, of_tile = (
        scales.round_scaled(p[0], E4M3, "nvfp4", amax=amax) for amax in (1.0, None)
    )
    np.testing.assert_allclose(found, expected, rtol=3e-7)
    assert (np.abs(found - of_tile) > 1e-3 * found).mean() > 0.5


@pytest.mark.parametrize("scale", ["x448", "nvfp4"])
def test_rows_of_what_is_matched_in_8_bits_sum_to_zero_in_one_step(scale: str) -> None:
    """Both passes use the same code for P̄, also in l, so Σ P dP = δ up to the halves of O."""
    matched = numerics.MATCHED_FLOAT32_OUTPUT.replace(
        **{name: f"{fmt}/tensor" for name, fmt in ARRAYS.items()},
        probs=f"{E4M3}/{scale}",
        kv_block="all",
    )
    shape = (1, 96, 2, 32)
    q, k, v, do = (jax.random.normal(x, shape) for x in jax.random.split(jax.random.key(2), 4))
    found = {
        name: attention_signals(8 * q, k, v, do, numerics=chosen, is_causal=True)
        for name, chosen in (
            ("matched", matched),
            ("unrounded l", matched.replace(row_sum="unrounded")),
            ("flash", FLASH.replace(**{n: f"{f}/tensor" for n, f in ARRAYS.items()})),
        )
    }
    sums = {name: float(x["ds_row_sum_max"].max()) for name, x in found.items()}
    assert sums["matched"] < 2e-5 < 1e-3 < min(sums["unrounded l"], sums["flash"])


@pytest.mark.parametrize("chosen", [
    numerics.TRANSFORMER_ENGINE_FP8,
    with_scale("mx", "do_o"),
], ids=["tensor", "mx"])  # fmt: skip
def test_diagnostics_have_the_query_gradient_of_the_run(chosen: Numerics) -> None:
    chosen = chosen.replace(grads="float32", kv_block=32, exponent="shift_first")
    q, k, v, do = (
        jax.random.normal(x, (1, 64, 2, 32)) for x in jax.random.split(jax.random.key(3), 4)
    )
    spec = Spec(numerics=chosen, row_max=StandardMax(), scale=0.25, is_causal=True)

    @jax.jit
    def run(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pullback = jax.vjp(lambda q: tiled.attention(q, k, v, Extras(), spec)[0], q)
        return out, pullback(do.astype(out.dtype))[0]

    result = jax.jit(lambda *arrays: compare(*arrays, Extras(), spec))(q, k, v, do)
    out, dq = run(q)
    assert result.gradients is not None
    close = np.isclose(0.25 * result.gradients.dq.run, dq, atol=1e-4, rtol=1e-4)
    assert close.mean() > 0.98  # a dS at a midpoint between codes may round either way
    np.testing.assert_allclose(result.outputs.output, out, atol=1e-2)
    # What q and k lose by rounding is an error of S.
    assert result.gradients.dq.scores is not None


def test_grads_reach_the_arrays_through_their_rounding() -> None:
    """Rounding passes gradients straight through; second derivatives use the same roundings."""
    chosen = numerics.TRANSFORMER_ENGINE_FP8.replace(kv_block=8)
    x = jax.random.normal(jax.random.key(4), (1, 24, 1, 16))

    def loss(x: jax.Array, implementation: str) -> jax.Array:
        out = attention.dot_product_attention(
            x, x, x, is_causal=True, numerics=chosen, implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    first = jax.grad(loss)(x, "tiled")
    assert np.isfinite(first).all() and np.abs(first).max() > 0.1
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, "tiled") ** 2))(x)
    assert np.isfinite(second).all() and np.abs(second).max() > 0.1


def request(chosen: Numerics, length: int = 100, **options: Any) -> Request:
    spec = Spec(numerics=chosen, row_max=StandardMax(), scale=0.125, **options)
    shape = (1, length, 2, 64)
    return Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=jnp.dtype("bfloat16"))


def test_tiles_that_would_cut_a_block_are_declined_by_name() -> None:
    sizes = tiled.BlockSizes(query=24, kv_bwd=48)
    for point in ("probs", "probs_bwd", "ds"):
        chosen = EXACT.replace(**{point: "float8_e4m3fn/mx"})
        assert tiled.unsupported(request(chosen)) is None
        assert dense.unsupported(request(chosen)) is None
        said = tiled.unsupported(request(chosen, block_sizes=sizes))
        assert said == f"{point}=float8_e4m3fn/mx with query=24 (it takes multiples of 32)"
        of_16 = EXACT.replace(**{point: "float8_e4m3fn/nvfp4"})
        said = tiled.unsupported(request(of_16.replace(kv_block=40)))
        assert said == f"{point}=float8_e4m3fn/nvfp4 with kv_block=40 (it takes multiples of 16)"
    one_tile = request(EXACT.replace(ds="float8_e5m2/mx"), length=20, block_sizes=sizes)
    assert tiled.unsupported(one_tile) is None


KERNELS = {gpu: harness.GPU_TILES, tpu: harness.TPU_TILES, hopper: harness.HOPPER_TILES}


@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_decline_by_name(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_available", lambda: True)  # with any version of JAX
    for point, text in (
        ("query", "bfloat16"),
        ("key", "float8_e4m3fn/head"),
        ("do", "bfloat16"),
        ("value", "float16/tensor"),
        ("ds", "float16/tensor"),
    ):
        chosen = FLASH.replace(**{point: text})
        said = kernels.unsupported(request(chosen, 128, block_sizes=KERNELS[kernels]))
        assert said is not None and said.startswith(f"{point}={text} (it")


@pytest.mark.parametrize("kind", ["head", "tensor"])
def test_on_a_hopper_gpu_tiled_serves_the_presets(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "is_available", lambda: True)  # with any version of JAX
    of = {"head": numerics.FLASH_ATTENTION_3_FP8, "tensor": numerics.TRANSFORMER_ENGINE_FP8}
    asked, in_bfloat16 = (
        dataclasses.replace(request(chosen, 128), platform="cuda") for chosen in (of[kind], FLASH)
    )
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert resolve(in_bfloat16) == "hopper"
        assert resolve(asked) == "tiled"
        with pytest.raises(NotImplementedError) as refused:
            resolve(asked, "hopper")
    assert str(refused.value) == (
        f"implementation 'hopper' does not support query={E4M3}/{kind} (it takes float32); "
        "use tiled or dense"
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scores": "float8_e4m3fn/tensor"}, "scores=float8_e4m3fn/tensor: scores takes no scale"),
        ({"probs": "float8_e4m3fn/head"}, "probs takes scales x, mx, nvfp4"),
        ({"ds": "float8_e5m2/block8"}, "ds takes scales x, tensor, head, mx, nvfp4"),
        ({"ds": "float8_e5m2/mx", "delta": "after_cast"}, "'after_cast' rounds other numbers"),
        ({"key": "float8_e5m2", "mean_key": "subtracted"}, "use mean_key='kept'"),
        (
            {"probs": E4M3, "recomputed_probs": "rounded", "statistics": "m_and_l"},
            "use probs='bfloat16' or kv_block='all'",
        ),
    ],
)  # fmt: skip
def test_records_say_what_has_no_scale(fields: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EXACT.replace(**fields)


def test_rules_of_the_maximum_know_the_range_of_a_scale() -> None:
    """e4m3 allows m to move by 4.1, times 256 by 9.7. Times 448 it has no room above 1."""
    q = jnp.zeros((1, 4, 1, 16), jnp.bfloat16)

    def call(probs: str, rule: numerics.RowMax) -> None:
        chosen = FLASH.replace(probs=probs)
        attention.dot_product_attention(q, q, q, numerics=chosen, row_max=rule)

    call(f"{E4M3}/x256", numerics.DynamicMax(max_shift=9.0))
    call(f"{E4M3}/mx", numerics.DynamicMax(max_shift=20.0))
    with pytest.raises(ValueError, match=r"use max_shift=9\.7 or less"):
        call(f"{E4M3}/x256", numerics.DynamicMax(max_shift=20.0))
    with pytest.raises(ValueError, match=r"use threshold=0\.8 or less"):
        call(f"{E4M3}/x256", numerics.LazyMax(threshold=8.0))
    call(E4M3, numerics.LazyMax(threshold=8.0))


HIDING = {
    "lengths": {"query_lengths": (20, 9), "key_lengths": (22, 13)},
    "offset": {"is_causal": True, "query_offset": (-4, 3)},
}


@pytest.mark.parametrize(
    ("implementation", "scale", "hiding"),
    [("tiled", "tensor", "lengths"), ("dense", "tensor", "offset"), ("dense", "nvfp4", "lengths")],
)
def test_no_hidden_infinity_sets_a_scale(implementation: str, scale: str, hiding: str) -> None:
    """With a scale of 1, the small values that rows do see would be rounded to 0."""
    case = harness.Case(rows=20, keys=22, heads=4, kv_heads=2, **HIDING[hiding])
    arrays = harness.inputs(case)
    arrays["v"] *= 1e-4
    seen = harness.visible(case, arrays)
    rows, keys = ~seen.any(3).swapaxes(1, 2), ~seen[:, ::2].any(2).swapaxes(1, 2)
    of_zeros, of_garbage = ({n: x.copy() for n, x in arrays.items()} for _ in range(2))
    for name, at in {"q": rows, "do": rows, "k": keys, "v": keys}.items():
        of_zeros[name][at] = 0
        of_garbage[name][at] = np.resize([np.inf, np.nan, -np.inf], of_garbage[name][at].shape)
    assert rows.any() and keys.any()
    how, chosen = IMPLEMENTATIONS[implementation], with_scale(scale, "do_o")
    expected, result = (harness.run(how, case, x, chosen) for x in (of_zeros, of_garbage))
    assert np.abs(expected["out"]).max() > 1e-5
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)
