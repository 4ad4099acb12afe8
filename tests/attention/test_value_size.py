"""Values of another head size than queries and keys, as in multi-head latent attention.

Cases in exact arithmetic stand in the harness's table, random calls in `test_fuzz.py`.
"""

import dataclasses
from typing import Any

import harness
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import check_accuracy, kernel_call, run
from points import KERNEL_POINTS

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import attention_signals
from lowprec_attn.numerics import EXACT, FLASH
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.tpu import attention as tpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CASE = harness.Case(
    heads=4,
    head_size=48,
    value_size=20,
    is_causal=True,
    key_lengths=(20, 6),
    query_lengths=(4, 17),
    values="repeated_maxima",
)
# One of each O that is saved, each operand of dV, and of products rounded tile by tile.
SLOW = ("flash", "published")
PRESETS = ["flash", "halves_output", "auxiliary_output", "normalized_delta", "matched", "published"]
WIDE = dataclasses.replace(CASE, head_size=20, value_size=48)


@pytest.mark.parametrize("case", [CASE, WIDE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("implementation", "preset"),
    [
        *(("tiled_odd", preset) for preset in PRESETS),
        *(
            pytest.param("gpu", preset, marks=[pytest.mark.slow] * (preset in SLOW))
            for preset in PRESETS
        ),
    ],
)
def test_presets_are_as_accurate_as_plain(
    implementation: str, preset: str, case: harness.Case
) -> None:
    chosen = numerics.PRESETS[preset]
    if implementation == "gpu":
        check_accuracy(case, kernel_call("gpu", case, chosen))
        return
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(case)
    harness.check(
        harness.run(how, case, arrays, chosen),
        harness.run_plain(case, arrays, how.numerics(chosen.replace(output="bfloat16"))),
        harness.oracle(case, arrays),
    )


def test_random_bits_are_those_of_tiled() -> None:
    case = dataclasses.replace(CASE, query_lengths=None, key_lengths=None, values="normal")
    chosen = EXACT.replace(**dict.fromkeys(KERNEL_POINTS, "bfloat16:stochastic"))
    ours = run(case, kernel_call("gpu", case, chosen))
    sizes = tiled.BlockSizes(query=5, kv_bwd=9)
    theirs = run(case, kernel_call("gpu", case, chosen, sizes=sizes, implementation=tiled))
    for name, x in theirs.items():
        assert harness.share_of_other_roundings(ours[name], x) < 0.05, name


@pytest.mark.parametrize("implementation", ["dense", "tiled", "gpu"])
def test_gradients_are_those_that_jax_derives(implementation: str) -> None:
    case = harness.Case(heads=4, rows=9, keys=13, head_size=16, value_size=24)
    arrays = harness.inputs(case)

    def plain(q: Any, k: Any, v: Any) -> jax.Array:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)

    operands = [arrays[name].astype(np.float64) for name in "qkv"]
    with jax.enable_x64(True):
        out, pullback = jax.vjp(plain, *operands)
        exact = [np.asarray(x) for x in (out, *pullback(jnp.array(arrays["do"], np.float64)))]

    def ours(*qkv: jax.Array) -> jax.Array:
        sizes = harness.GPU_TILES if implementation == "gpu" else None
        return attention.dot_product_attention(
            *qkv, numerics="exact", implementation=implementation, block_sizes=sizes
        )

    out, pullback = jax.vjp(ours, *(jnp.asarray(arrays[name]) for name in "qkv"))
    assert out.shape == (2, 9, 4, 24)
    for x, y in zip((out, *pullback(jnp.asarray(arrays["do"]))), exact, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@hypothesis.settings(deadline=None, max_examples=10, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_shape_with_any_tiles(data: st.DataObject) -> None:
    size = st.integers(1, 12)
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    case = harness.Case(
        rows=data.draw(size),
        keys=data.draw(size),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=data.draw(st.sampled_from([1, 4])),
        value_size=data.draw(st.sampled_from([1, 3, 5])),
        is_causal=data.draw(st.booleans()),
        mask=data.draw(st.sampled_from([None, "random"])),
    )
    how = harness.Implementation(
        name="tiled",
        kv_block=data.draw(size),
        block_sizes=tiled.BlockSizes(query=data.draw(size), kv_bwd=data.draw(size)),
    )
    arrays = harness.inputs(case)
    delta = data.draw(st.sampled_from(["do_o", "normalized", "after_cast", "dp_p"]))
    exact = harness.oracle(case, arrays)
    for name, x in harness.run(how, case, arrays, EXACT.replace(delta=delta)).items():
        assert harness.error(x, exact[name]) < 1e-4, name


def test_heads_of_different_arithmetic_and_shards_have_it() -> None:
    case = harness.Case(heads=4, kv_heads=4, value_size=24, is_causal=True)
    q, k, v = (jnp.asarray(harness.inputs(case)[name]) for name in "qkv")
    options = {"is_causal": True, "implementation": "tiled"}
    exact = attention.dot_product_attention(q, k, v, numerics="exact", **options)
    mixed = attention.dot_product_attention(q, k, v, numerics=["exact", "flash"] * 2, **options)
    np.testing.assert_array_equal(mixed[:, :, ::2], exact[:, :, ::2])
    split = attention.sharded(
        jax.make_mesh((2, 4), ("data", "model")), batch_axis="data", head_axis="model"
    )
    np.testing.assert_allclose(split(q, k, v, numerics="exact", **options), exact, atol=1e-6)
    one = attention.dot_product_attention(q[0], k[0], v[0], numerics="exact", **options)
    np.testing.assert_allclose(one, exact[0], atol=1e-6)


@pytest.mark.parametrize("module", [hopper, tpu], ids=["hopper", "tpu"])
def test_kernels_without_it_say_so(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_unsupported_machine", lambda request: None)
    q, v = (jax.ShapeDtypeStruct((1, 256, 1, size), jnp.bfloat16) for size in (128, 64))
    sizes = {hopper: harness.HOPPER_TILES, tpu: harness.TPU_TILES}[module]
    spec = Spec(
        numerics=FLASH, row_max=numerics.StandardMax(), scale=0.1, is_causal=True, block_sizes=sizes
    )
    assert module.unsupported(Request.of(q, q, Extras(), spec, q)) is None
    told = "values of head size 64 with queries of 128"
    assert module.unsupported(Request.of(q, q, Extras(), spec, v)) == told


def test_the_tiles_are_those_of_the_larger_head_and_sizes_have_the_bounds_of_all() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    spec = Spec(numerics=FLASH, row_max=numerics.StandardMax(), scale=0.1)
    assert gpu.block_sizes(q, spec, 192) == gpu.block_sizes(q.update(shape=(1, 256, 1, 192)), spec)
    assert gpu.block_sizes(q, spec, 192) != gpu.block_sizes(q, spec)
    request = Request.of(q, q, Extras(), spec, q.update(shape=(1, 256, 1, 8)))
    request = dataclasses.replace(request, platform="cuda")
    assert str(gpu.unsupported(request)).startswith("head size 8 (it takes 16 to 256)")


def test_diagnostics_refuse_it() -> None:
    q, v = jnp.ones((1, 4, 1, 16)), jnp.ones((1, 4, 1, 8))
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        attention_signals(q, q, v, numerics=FLASH)
