"""The soft cap on scores, c · tanh(S / c), and its derivative, in every arithmetic that it meets.

Cases in exact arithmetic stand in the harness's table, random calls in `test_fuzz.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import harness
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import slow_among
from kernel_calls import check_accuracy, compiled, kernel_call, run_plain

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import backward, products
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import comparison
from lowprec_attn.numerics import EXACT, FLASH
from pallas_kernels.gpu import backward as gpu_backward
from pallas_kernels.tpu import attention as tpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CASE = harness.Case(
    heads=4,
    is_causal=True,
    soft_cap=1.5,
    key_lengths=(20, 6),
    query_lengths=(4, 17),
    values="repeated_maxima",
)
SERVED = [
    name
    for name, n in numerics.PRESETS.items()
    if not n.normalize_probs and n.delta != "after_cast" and n.mean_key == "kept"
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


# Of every way to form exponents and δ that the kernels have.
OF_KERNELS = ["flash", "normalized_delta", "matched", "published", "flash_attention_3", "exact"]


@pytest.mark.parametrize("preset", slow_among(OF_KERNELS, ["flash", "exact"]))
def test_presets_of_kernels_are_as_accurate_as_plain(preset: str) -> None:
    check_accuracy(CASE, kernel_call("gpu", CASE, numerics.PRESETS[preset]))


def plain_attention(
    q: Any, k: Any, v: Any, bias: Any, scale: Any, *, cap: float, seen: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The formula, for JAX to differentiate in float64; lse of rows that see a key."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = cap * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * scale / cap) + bias
    s = jnp.where(seen, s, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)
    return out, jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize("implementation", ["dense", "tiled", "reference"])
def test_gradients_are_those_that_jax_derives(implementation: str) -> None:
    """Of q, k, v, a bias and a traced scale; the reference has no gradient of a scale."""
    case = harness.Case(heads=4, rows=9, keys=13, soft_cap=0.7, bias=(True, True, True))
    arrays, scale = harness.inputs(case), 0.4
    seen = np.tri(9, 13, dtype=bool)
    operands = [arrays[name].astype(np.float64) for name in ("q", "k", "v", "bias")]
    operands.append(np.float64(scale))
    do, dlse = (arrays[name].astype(np.float64) for name in ("do", "dlse"))
    with jax.enable_x64(True):
        attend = functools.partial(plain_attention, cap=0.7, seen=seen)
        out, pullback = jax.vjp(attend, *operands)
        exact = [np.asarray(x) for x in (*out, *pullback((jnp.array(do), jnp.array(dlse))))]
    if implementation == "reference":
        capped = dataclasses.replace(case, is_causal=True, scale=scale)
        options = harness.reference_options(capped, arrays)
        fwd = harness.reference.attention(*operands[:3], **options)
        bwd = harness.reference.backward(*operands[:3], do, dlse=dlse, **options)
        for x, y in zip((fwd.o, fwd.lse, bwd.dq, bwd.dk, bwd.dv, bwd.ds), exact, strict=False):
            np.testing.assert_allclose(x, y, atol=1e-12)
        return

    def ours(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
        return attention.dot_product_attention(
            q, k, v, bias,
            scale=scale, is_causal=True, logits_soft_cap=0.7, numerics=EXACT,
            implementation=implementation, return_residual=True,
        )  # fmt: skip

    def both(operands: Any) -> Any:
        out, pullback = jax.vjp(ours, *operands)
        return *out, *pullback((jnp.asarray(arrays["do"]), jnp.asarray(arrays["dlse"])))

    result = jax.jit(both)([jnp.asarray(x, jnp.float32) for x in operands])
    for x, y in zip(result, exact, strict=True):
        # Sums of up to 13 · 9 · 8 terms of order 1 (the scale): far above noise, far below a bug.
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_second_derivatives_are_those_of_the_formula(implementation: str) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 5, 1, 4)) for i in range(3))

    def ours(q: jax.Array) -> jax.Array:
        out = attention.dot_product_attention(
            q, k, v, logits_soft_cap=0.9, numerics=EXACT, implementation=implementation
        )
        return jnp.sum(jnp.sin(out))

    def plain(q: jax.Array) -> jax.Array:
        bias, seen = np.zeros((1, 1, 5, 5), np.float32), np.ones((5, 5), bool)
        scale = jnp.float32(0.5)
        return jnp.sum(jnp.sin(plain_attention(q, k, v, bias, scale, cap=0.9, seen=seen)[0]))

    a, b = (jax.jit(jax.jacrev(jax.grad(f)))(q) for f in (ours, plain))
    assert np.abs(b).max() > 0.01
    np.testing.assert_allclose(a, b, atol=1e-5)


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_shape_with_any_tiles(data: st.DataObject) -> None:
    """Causal or not, groups, one key, tiles that the end cuts; δ from O or from row sums."""
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
        soft_cap=data.draw(st.sampled_from([0.5, 2.0, 2.0**30])),
    )
    how = harness.Implementation(
        name="tiled",
        kv_block=data.draw(size),
        block_sizes=tiled.BlockSizes(query=data.draw(size), kv_bwd=data.draw(size)),
    )
    chosen = EXACT.replace(
        delta=data.draw(st.sampled_from(["do_o", "normalized", "dp_p"])),
        exponent=data.draw(st.sampled_from([None, "scale_first", "unfused"])),
    )
    arrays = harness.inputs(case)
    exact = harness.oracle(case, arrays)
    # A cap of 2^30 is none but for the rounding of 2^30 · tanh(S / 2^30).
    for name, x in harness.run(how, case, arrays, chosen).items():
        assert harness.error(x, exact[name]) < 1e-4, name


def test_a_row_of_one_key_has_no_gradient_of_its_score() -> None:
    case = harness.Case(batch=1, rows=6, keys=1, heads=1, kv_heads=1, soft_cap=1.0)
    arrays = harness.inputs(case) | {"dlse": np.zeros((1, 6, 1), np.float32)}
    for delta in ("do_o", "normalized", "dp_p"):
        how = harness.IMPLEMENTATIONS["tiled"]
        result = harness.run(how, case, arrays, EXACT.replace(delta=delta))
        assert np.abs(result["dq"]).max() < 1e-6
        assert np.abs(result["dk"]).max() < 2e-6


def without_slope_in_pk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row sums take round(P) k from dQ, as without a cap, not round(slope ∘ P) k."""
    for module, tile in ((backward, backward.BackwardTile), (gpu_backward, gpu_backward._Tile)):
        name = "row_sums" if module is backward else "_query_gradients"
        as_it_is = getattr(module, name)

        def changed(
            *args: Any, as_it_is: Callable = as_it_is, tile: Any = tile, **rest: Any
        ) -> Any:
            behind_cap = tile.behind_cap
            with pytest.MonkeyPatch.context() as patch:
                own = "p" if tile is backward.BackwardTile else "probs"
                patch.setattr(
                    tile,
                    "behind_cap",
                    lambda self, x: x if x is getattr(self, own) else behind_cap(self, x),
                )
                return as_it_is(*args, **rest)

        monkeypatch.setattr(module, name, changed)


ONE_BATCH = harness.Case(batch=1, soft_cap=2.0)


@pytest.mark.parametrize("kernels", ["gpu", "tiled"])
def test_normalized_delta_takes_the_slope_into_its_correction(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dlse of size 1 the correction is as large as dQ; a mutant without the slope fails."""
    chosen = numerics.NORMALIZED_DELTA

    def check() -> None:
        if kernels == "gpu":
            compiled.cache_clear()
            check_accuracy(ONE_BATCH, kernel_call("gpu", ONE_BATCH, chosen))
            return
        harness.compiled.cache_clear()
        jax.clear_caches()
        arrays, how = harness.inputs(ONE_BATCH), harness.IMPLEMENTATIONS["tiled_odd"]
        harness.check(
            harness.run(how, ONE_BATCH, arrays, chosen),
            harness.run_plain(ONE_BATCH, arrays, how.numerics(chosen)),
            harness.oracle(ONE_BATCH, arrays),
        )

    check()
    without_slope_in_pk(monkeypatch)
    with pytest.raises(AssertionError, match="dq"):
        check()
    harness.compiled.cache_clear()
    compiled.cache_clear()


def test_rows_of_ds_sum_to_zero_before_the_slope_and_not_after_it() -> None:
    """dbias is dS of capped scores; dQ of a common feature of all keys is what rows sum to."""
    case = harness.Case(batch=1, heads=1, kv_heads=1, soft_cap=1.0, bias=(True, True, True))
    arrays = harness.inputs(case) | {"dlse": np.zeros((1, 20, 1), np.float32)}
    arrays["k"][..., 0] = 1.0
    arrays["bias"][...] = 0
    for name in ("flash", "normalized_delta"):
        how = harness.IMPLEMENTATIONS["tiled"]
        result = harness.run(how, case, arrays, numerics.PRESETS[name])
        size = np.abs(result["dbias"]).sum(-1).max()
        of_rows = np.abs(result["dbias"].sum(-1)).max() / size
        assert of_rows < 1e-6 if name == "normalized_delta" else of_rows > 1e-4
    assert np.abs(result["dq"][..., 0]).max() > 0.01


def test_scores_count_in_the_cap_where_products_are_multiplied_once() -> None:
    """c log2 e is one factor of tanh(S / c), as scale · log2 e is of q·k without a cap."""
    first, spec = (
        EXACT.replace(exponent="scale_first"),
        functools.partial(Spec, row_max=numerics.StandardMax(), scale=-0.3),
    )
    assert products.score_unit(spec(numerics=first, soft_cap=30.0), Extras()) == 30.0
    assert products.score_unit(spec(numerics=first), Extras()) == 1.0  # of a scale below zero
    traced = Extras(scale=jnp.float32(1))
    assert products.score_unit(spec(numerics=first, soft_cap=30.0), traced) == 30.0
    for chosen, extras in (
        (EXACT, Extras()),
        (first.replace(scores="bfloat16"), Extras()),
        (first, Extras(bias=jnp.ones((1, 1, 1, 1, 1)))),
    ):
        assert products.score_unit(spec(numerics=chosen, soft_cap=30.0), extras) == 1.0


def test_heads_of_different_arithmetic_and_shards_have_it() -> None:
    case = harness.Case(batch=2, heads=4, kv_heads=4, soft_cap=1.0, is_causal=True)
    q, k, v = (jnp.asarray(harness.inputs(case)[name]) for name in "qkv")
    options = {"logits_soft_cap": 1.0, "is_causal": True, "implementation": "tiled"}
    exact = attention.dot_product_attention(q, k, v, numerics="exact", **options)
    mixed = attention.dot_product_attention(
        q, k, v, numerics=["exact", "flash", "exact", "flash"], **options
    )
    np.testing.assert_array_equal(mixed[:, :, ::2], exact[:, :, ::2])
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")
    np.testing.assert_allclose(split(q, k, v, numerics="exact", **options), exact, atol=1e-6)
    attend = attention.attention_fn(
        numerics="exact", is_causal=True, logits_soft_cap=1.0, implementation="tiled"
    )
    np.testing.assert_array_equal(attend(q, k, v), exact)
    without = attention.dot_product_attention(
        q, k, v, numerics="exact", is_causal=True, implementation="tiled"
    )
    assert np.abs(without - exact).max() > 0.01


def test_infinite_products_are_capped_and_hidden_ones_reach_nothing() -> None:
    q = np.ones((1, 2, 1, 16), np.float32)
    k = np.ones((1, 3, 1, 16), np.float32)
    k[0, 1, 0, 0], k[0, 2] = np.inf, np.nan
    v = np.arange(3, dtype=np.float32)[None, :, None, None] * np.ones((1, 3, 1, 16), np.float32)
    mask = np.array([True, True, False])[None, None, None]

    def attend(q: Any) -> jax.Array:
        return attention.dot_product_attention(
            q, k, v, mask=mask, logits_soft_cap=2.0, numerics="exact", implementation="tiled"
        )

    weight = np.exp(2.0) / (np.exp(2.0) + np.exp(2 * np.tanh(2.0)))
    np.testing.assert_allclose(attend(q), weight, rtol=1e-6)


def test_the_derivative_loses_no_digits_near_the_cap() -> None:
    t = np.float32(1) - np.float32(2.0**-24) * np.arange(1, 2**12, dtype=np.float32)
    exact = 1 - t.astype(np.float64) ** 2
    np.testing.assert_allclose(products.cap_slope(jnp.asarray(t)), exact, rtol=2**-23)
    assert np.max(np.abs((np.float32(1) - t * t) / exact - 1)) > 2**-20


def test_what_relies_on_row_sums_is_refused_by_name() -> None:
    q = jnp.ones((1, 4, 1, 16))
    for chosen, text in (
        (numerics.CORRECTED_AFTER_CAST, "delta=after_cast"),
        (FLASH.replace(mean_key="subtracted"), "mean_key=subtracted"),
    ):
        for implementation in ("tiled", "dense"):
            with pytest.raises(
                attention.UnsupportedError, match=f"{text} with logits_soft_cap=2.0"
            ):
                attention.dot_product_attention(
                    q, q, q, numerics=chosen, logits_soft_cap=2.0, implementation=implementation
                )


def test_tpu_kernels_are_without_it() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    spec = Spec(
        numerics=FLASH,
        row_max=numerics.StandardMax(),
        scale=0.1,
        is_causal=True,
        block_sizes=harness.TPU_TILES,
    )
    assert tpu.unsupported(Request.of(q, q, Extras(), spec)) is None
    capped = dataclasses.replace(spec, soft_cap=2.0)
    assert tpu.unsupported(Request.of(q, q, Extras(), capped)) == "logits_soft_cap=2.0"


def test_diagnostics_refuse_it() -> None:
    q = jnp.ones((1, 4, 1, 16))
    spec = Spec(numerics=FLASH, row_max=numerics.StandardMax(), scale=1.0, soft_cap=2.0)
    with pytest.raises(ValueError, match=r"no soft cap, got 2\.0"):
        comparison.compare(q, q, q, None, Extras(), spec)


def test_plain_has_it_too() -> None:
    """The emulation that bounds errors is told of the cap: without it the bounds are of nothing."""
    on, off = (
        run_plain(case, kernel_call("gpu", case, EXACT))
        for case in (CASE, dataclasses.replace(CASE, soft_cap=None))
    )
    assert np.abs(on["dq"] - off["dq"]).max() > 0.01
