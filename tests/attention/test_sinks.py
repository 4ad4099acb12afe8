"""Attention sinks, a learned score per head without key or value, in every arithmetic they meet.

Cases in exact arithmetic stand in the harness's table, random calls in `test_fuzz.py`.
"""

import dataclasses
import functools
from typing import Any

import harness
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import slow_among
from kernel_calls import Call, check_accuracy, compiled, extras_of, kernel_call

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import backward, sinks
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import EXACT, FLASH
from pallas_kernels.tpu import attention as tpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CASE = harness.Case(
    heads=4,
    is_causal=True,
    sinks=True,
    key_lengths=(20, 6),
    query_lengths=(4, 17),
    values="repeated_maxima",
)
SERVED = [
    name for name, n in numerics.PRESETS.items() if not n.normalize_probs and n.mean_key == "kept"
]
# A rule looks at the scores of a step: it is tried where a maximum repeats.
PRESETS_AND_RULES = [
    *(("tiled_odd", preset, numerics.StandardMax()) for preset in SERVED),
    *(("dense", preset, numerics.StandardMax()) for preset in ("exact", "published", "matched")),
    ("tiled_odd", "flash", numerics.DynamicMax()),
    ("tiled_odd", "flash_attention_3", numerics.LazyMax(threshold=0.5)),
    ("tiled_odd", "published", numerics.PublishedMax()),
]


@pytest.mark.parametrize(("implementation", "preset", "rule"), PRESETS_AND_RULES)
def test_presets_are_as_accurate_as_plain(
    implementation: str, preset: str, rule: numerics.RowMax
) -> None:
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    chosen = numerics.PRESETS[preset]
    same = harness.run_plain(CASE, arrays, how.numerics(chosen.replace(output="bfloat16")), rule)
    result = harness.run(how, CASE, arrays, chosen, rule, jax.random.key(7))
    harness.check(result, same, harness.oracle(CASE, arrays), 4 if chosen.needs_bits else 2)


def test_p_may_be_normalised_before_it_is_rounded() -> None:
    how, arrays = harness.IMPLEMENTATIONS["dense"], harness.inputs(CASE)
    harness.check(
        harness.run(how, CASE, arrays, numerics.STANDARD),
        harness.run_plain(CASE, arrays, numerics.STANDARD),
        harness.oracle(CASE, arrays),
    )


# Of every way to form exponents and δ that the kernels have, and of each statistic.
OF_KERNELS = ["flash", "normalized_delta", "corrected_after_cast", "matched", "published"]
OF_KERNELS += ["flash_attention_3", "exact", "delta_dp_p"]
WITH_SINKS = dataclasses.replace(CASE, scale=0.3)


@pytest.mark.parametrize(
    "preset", slow_among(OF_KERNELS, ["published", "delta_dp_p", "normalized_delta"])
)
def test_presets_of_kernels_are_as_accurate_as_plain(preset: str) -> None:
    check_accuracy(WITH_SINKS, kernel_call("gpu", WITH_SINKS, numerics.PRESETS[preset]))


def plain_attention(
    q: Any, k: Any, v: Any, column: Any, *, seen: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The sink as a key among the others, for JAX to differentiate in float64."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(seen, s, -jnp.inf)
    column = jnp.broadcast_to(column[None, :, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, column], axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1)[..., :-1], v)
    return out, jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize("delta", ["do_o", "normalized", "after_cast", "dp_p"])
@pytest.mark.parametrize("implementation", ["dense", "tiled", "gpu", "reference"])
def test_gradients_are_those_that_jax_derives(implementation: str, delta: str) -> None:
    """Row 2 sees no key: its lse is the sink, and dlse of it reaches the sink."""
    case = harness.Case(heads=4, rows=9, keys=13, sinks=True)
    arrays = harness.inputs(case)
    seen = np.tri(9, 13, dtype=bool)
    seen[2] = False
    operands = [arrays[name].astype(np.float64) for name in ("q", "k", "v", "sinks")]
    do, dlse = (arrays[name].astype(np.float64) for name in ("do", "dlse"))
    with jax.enable_x64(True):
        out, pullback = jax.vjp(functools.partial(plain_attention, seen=seen), *operands)
        exact = [np.asarray(x) for x in (*out, *pullback((jnp.array(do), jnp.array(dlse))))]
    if implementation == "reference":
        masking = harness.reference.Masking(mask=seen[None, None], sinks=operands[3])
        fwd = harness.reference.attention(*operands[:3], masking=masking)
        bwd = harness.reference.backward(*operands[:3], do, masking=masking, dlse=dlse)
        for x, y in zip((fwd.o, fwd.lse, bwd.dq, bwd.dk, bwd.dv, bwd.dsinks), exact, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
        return

    def ours(q: Any, k: Any, v: Any, column: Any) -> Any:
        return attention.dot_product_attention(
            q, k, v,
            mask=seen[None, None], sinks=column, numerics=EXACT.replace(delta=delta),
            implementation=implementation, return_residual=True,
            block_sizes=harness.GPU_TILES if implementation == "gpu" else None,
        )  # fmt: skip

    def both(operands: Any) -> Any:
        out, pullback = jax.vjp(ours, *operands)
        return *out, *pullback((jnp.asarray(arrays["do"]), jnp.asarray(arrays["dlse"])))

    result = jax.jit(both)([jnp.asarray(x, jnp.float32) for x in operands])
    for x, y in zip(result, exact, strict=True):
        # Sums of up to 2 · 9 · 16 terms of order 1: far above noise, far below a bug.
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_second_derivatives_are_those_of_the_formula(implementation: str) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 2, 4)) for i in range(3))
    seen = np.tri(4, dtype=bool)

    def ours(column: jax.Array, q: jax.Array) -> jax.Array:
        out, lse = attention.dot_product_attention(
            q, k, v,
            is_causal=True, sinks=column, numerics=EXACT, implementation=implementation,
            return_residual=True,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def plain(column: jax.Array, q: jax.Array) -> jax.Array:
        out, lse = plain_attention(q, k, v, column, seen=seen)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    column = jnp.array([0.3, -1.0], jnp.float32)
    for argnums in ((0, 0), (0, 1)):
        a, b = (
            jax.jit(jax.jacrev(jax.grad(f, argnums[0]), argnums[1]))(column, q)
            for f in (ours, plain)
        )
        assert np.abs(b).max() > 0.01
        np.testing.assert_allclose(a, b, atol=1e-5)


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_shape_with_any_tiles(data: st.DataObject) -> None:
    """Causal or not, groups, one key, tiles that the end cuts; every δ."""
    size = st.integers(1, 12)
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    case = harness.Case(
        batch=data.draw(st.integers(1, 2)),
        rows=data.draw(size),
        keys=data.draw(size),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=data.draw(st.sampled_from([1, 4])),
        is_causal=data.draw(st.booleans()),
        mask=data.draw(st.sampled_from([None, "random"])),
        sinks=True,
    )
    how = harness.Implementation(
        name="tiled",
        kv_block=data.draw(size),
        block_sizes=tiled.BlockSizes(query=data.draw(size), kv_bwd=data.draw(size)),
    )
    chosen = EXACT.replace(
        delta=data.draw(st.sampled_from(["do_o", "normalized", "after_cast", "dp_p"])),
        exponent=data.draw(st.sampled_from([None, "scale_first", "unfused", "whole_max"])),
    )
    arrays = harness.inputs(case)
    exact = harness.oracle(case, arrays)
    for name, x in harness.run(how, case, arrays, chosen).items():
        assert harness.error(x, exact[name]) < 1e-4, name


@pytest.mark.parametrize("preset", ["flash", "matched", "normalized_delta"])
@pytest.mark.parametrize("implementation", ["dense", "tiled_odd", "gpu"])
def test_a_sink_of_minus_infinity_is_none(implementation: str, preset: str) -> None:
    case = dataclasses.replace(CASE, sinks=False)
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(case)
    without = harness.run(how, case, arrays, numerics.PRESETS[preset])
    column = np.full(4, -np.inf, np.float32)
    result = harness.run(how, case, arrays | {"sinks": column}, numerics.PRESETS[preset])
    np.testing.assert_array_equal(result.pop("dsinks"), 0)
    for name, x in without.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)


@pytest.mark.parametrize("preset", ["flash", "normalized_delta"])
@pytest.mark.parametrize("implementation", ["dense", "tiled", "gpu"])
def test_rows_without_a_key_have_the_sink_as_lse_and_rows_beyond_the_lengths_nothing(
    implementation: str, preset: str
) -> None:
    case = harness.Case(sinks=True, query_lengths=(20, 7), key_lengths=(20, 0))
    arrays = harness.inputs(case)
    arrays["do"][1], arrays["dlse"][1, 7:] = np.nan, np.nan
    how = harness.IMPLEMENTATIONS[implementation]
    result = harness.run(how, case, arrays, numerics.PRESETS[preset])
    assert (result["out"][1] == 0).all()
    np.testing.assert_allclose(result["lse"][1, :7], np.tile(arrays["sinks"], (7, 1)), rtol=3e-7)
    assert (result["lse"][1, 7:] == -np.inf).all()
    of_first = dataclasses.replace(case, batch=1, query_lengths=(20,), key_lengths=(20,))
    first = {name: x if name == "sinks" else x[:1] for name, x in arrays.items()}
    expected = harness.oracle(of_first, first)["dsinks"] + arrays["dlse"][1, :7].sum(0)
    np.testing.assert_allclose(result["dsinks"], expected, atol=0.05)  # of `flash`
    for name in ("dq", "dk", "dv"):
        assert (result[name][1] == 0).all(), name


def test_the_whole_row_sums_to_one_and_dS_to_zero_with_its_sink() -> None:
    """`normalized` forms δ of keys and sink: a bias of zeros gets the dS of the keys."""
    case = harness.Case(batch=1, sinks=True, bias=(True, True, True))
    arrays = harness.inputs(case) | {"dlse": np.zeros((1, 20, 2), np.float32)}
    arrays["bias"][...] = 0
    for name in ("flash", "normalized_delta", "matched_float32_output"):
        how = harness.IMPLEMENTATIONS["tiled"]
        result = harness.run(how, case, arrays, numerics.PRESETS[name])
        size = np.abs(result["dbias"]).sum()
        total = abs(result["dbias"].sum() + result["dsinks"].sum()) / size
        assert total > 1e-5 if name == "flash" else total < 1e-6, name


@pytest.mark.parametrize("value", [-1e6, 1e6])
@pytest.mark.parametrize("preset", ["exact", "matched", "flash_attention_3"])
def test_sinks_of_any_size(preset: str, value: float) -> None:
    """Far below all scores they change nothing, far above they take all weight."""
    case = harness.Case()
    arrays = harness.inputs(case) | {"sinks": np.full(2, value, np.float32)}
    for name in ("tiled_odd", "gpu"):
        how = harness.IMPLEMENTATIONS[name]
        result = harness.run(how, case, arrays, numerics.PRESETS[preset])
        if value > 0:
            np.testing.assert_allclose(result["lse"], value, rtol=3e-7)
            assert all(np.abs(result[x]).max() < 1e-30 for x in ("out", "dq", "dk", "dv"))
            continue
        without = {x: y for x, y in arrays.items() if x != "sinks"}
        for x, y in harness.run(how, case, without, numerics.PRESETS[preset]).items():
            np.testing.assert_allclose(result[x], y, atol=1e-5, err_msg=x)


def test_heads_of_different_arithmetic_shards_and_packed_arrays_have_them() -> None:
    case = harness.Case(batch=2, heads=4, kv_heads=4, is_causal=True, sinks=True)
    arrays = harness.inputs(case)
    q, k, v, column = (jnp.asarray(arrays[name]) for name in ("q", "k", "v", "sinks"))
    options = {"is_causal": True, "implementation": "tiled"}

    def gradients(attend: Any, column: Any, **options: Any) -> Any:
        return jax.value_and_grad(lambda s: jnp.sum(jnp.sin(attend(q, k, v, sinks=s, **options))))(
            column
        )

    attend = attention.dot_product_attention
    loss, exact = gradients(attend, column, numerics="exact", **options)
    _, flash = gradients(attend, column, numerics="flash", **options)
    _, mixed = gradients(attend, column, numerics=["exact", "flash"] * 2, **options)
    np.testing.assert_allclose(mixed[::2], exact[::2], rtol=1e-6)
    np.testing.assert_allclose(mixed[1::2], flash[1::2], rtol=1e-6)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")
    for x, y in zip(
        gradients(split, column, numerics="exact", **options), (loss, exact), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    packed = jnp.stack([q, k, v], axis=2)
    out = attend(packed, sinks=column, numerics="exact", **options)
    np.testing.assert_array_equal(out, attend(q, k, v, sinks=column, numerics="exact", **options))
    flax = attention.attention_fn(numerics="exact", is_causal=True, implementation="tiled")
    np.testing.assert_array_equal(flax(q, k, v, sinks=column), out)
    assert np.abs(flax(q, k, v) - out).max() > 0.01


def test_packed_arrays_of_the_kernels_have_them() -> None:
    case = harness.Case(heads=2, is_causal=True, sinks=True)
    extras = extras_of(case)
    call = kernel_call("gpu", case, FLASH)
    packed = Call(call.spec, packed=True)
    arrays = {name: jnp.asarray(x) for name, x in harness.inputs(case).items()}
    for x, y in zip(
        compiled(packed)(arrays, extras).items(),
        compiled(call)(arrays, extras).items(),
        strict=True,
    ):
        assert x[0] == y[0]
        np.testing.assert_array_equal(x[1], y[1], err_msg=x[0])


@pytest.mark.parametrize("implementation", ["tiled", "dense", "gpu"])
def test_vmap_over_sinks(implementation: str) -> None:
    case = harness.Case(batch=1, sinks=True, query_lengths=(13,))
    q, k, v = (jnp.asarray(harness.inputs(case)[name]) for name in "qkv")
    column = jax.random.normal(jax.random.key(3), (3, 2))
    sizes = harness.GPU_TILES if implementation == "gpu" else None

    def gradient(column: jax.Array) -> jax.Array:
        def loss(column: jax.Array) -> jax.Array:
            out = attention.dot_product_attention(
                q, k, v,
                sinks=column, query_seq_lengths=jnp.array([13]), numerics="exact",
                implementation=implementation, block_sizes=sizes,
            )  # fmt: skip
            return jnp.sum(out**2)

        return jax.grad(loss)(column)

    together = jax.jit(jax.vmap(gradient))(column)
    one = jax.jit(gradient)
    for x, y in zip(together, column, strict=True):
        np.testing.assert_allclose(x, one(y), atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 0.01


def test_the_gradient_has_the_format_of_the_sinks() -> None:
    q = jnp.ones((1, 4, 2, 16), jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        gradient = jax.grad(
            lambda s: attention.dot_product_attention(q, q, q, sinks=s).astype(jnp.float32).sum()
        )(jnp.zeros(2, dtype))
        assert gradient.dtype == dtype
        assert (gradient < -0.1).all()


@pytest.mark.parametrize("implementation", ["dense", "tiled_odd"])
@pytest.mark.parametrize("delta", ["normalized", "after_cast"])
def test_row_sums_without_the_sink_are_noticed(
    implementation: str, delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(CASE)
    chosen = FLASH.replace(delta=delta)
    same, exact = (
        harness.run_plain(CASE, arrays, how.numerics(chosen)),
        harness.oracle(CASE, arrays),
    )
    monkeypatch.setattr(backward.RowSums, "with_sink", lambda self, *_: self)
    harness.compiled.cache_clear()
    jax.clear_caches()
    with pytest.raises(AssertionError, match="dq"):
        harness.check(harness.run(how, CASE, arrays, chosen), same, exact)
    harness.compiled.cache_clear()
    jax.clear_caches()


def test_the_start_of_a_row_is_the_sink_and_one_or_a_whole_number_and_less() -> None:
    given = jnp.array([3.0, -0.25, -jnp.inf])
    spec = Spec(numerics=EXACT, row_max=numerics.StandardMax(), scale=0.5)
    m, l = sinks.start_of_rows(given, 0.5, spec)
    np.testing.assert_array_equal(m, [6.0, -0.5, -np.inf])
    np.testing.assert_array_equal(l, [1.0, 1.0, 0.0])
    whole = dataclasses.replace(spec, numerics=numerics.MATCHED)
    m, l = sinks.start_of_rows(given, 0.5, whole)
    np.testing.assert_array_equal(m, [5.0, 0.0, -np.inf])
    np.testing.assert_allclose(l, [np.exp(3) / 32, np.exp(-0.25), 0.0], rtol=1e-5)


def test_mean_key_is_refused_beside_them() -> None:
    q = jnp.ones((1, 4, 1, 16))
    for implementation in ("tiled", "dense"):
        with pytest.raises(attention.UnsupportedError, match="mean_key=subtracted with sinks"):
            attention.dot_product_attention(
                q, q, q,
                numerics=FLASH.replace(mean_key="subtracted"), sinks=jnp.zeros(1),
                implementation=implementation,
            )  # fmt: skip


def test_tpu_kernels_are_without_them() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    spec = Spec(
        numerics=FLASH,
        row_max=numerics.StandardMax(),
        scale=0.1,
        is_causal=True,
        block_sizes=harness.TPU_TILES,
    )
    given = Extras(sinks=jnp.zeros(1))
    assert tpu.unsupported(Request.of(q, q, Extras(), spec)) is None
    assert tpu.unsupported(Request.of(q, q, given, spec)) == "sinks"


def test_the_gpu_kernels_refuse_their_second_derivative_by_name() -> None:
    q = jnp.ones((1, 16, 1, 16))

    def loss(column: jax.Array) -> jax.Array:
        return attention.dot_product_attention(
            q, q, q, sinks=column, implementation="gpu", block_sizes=harness.GPU_TILES
        ).sum()

    with pytest.raises(NotImplementedError, match="second derivatives of implementation 'gpu'"):
        jax.hessian(loss)(jnp.zeros(1))
    assert jax.grad(loss)(jnp.zeros(1)) < 0


def test_the_gpu_kernels_refuse_a_scale_of_zero_beside_them() -> None:
    q = jnp.ones((1, 16, 1, 16))
    with pytest.raises(attention.UnsupportedError, match="sinks with scale=0"):
        attention.dot_product_attention(
            q, q, q,
            scale=0.0, sinks=jnp.zeros(1), implementation="gpu", block_sizes=harness.GPU_TILES,
        )  # fmt: skip
