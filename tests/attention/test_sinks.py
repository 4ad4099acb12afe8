"""What only attention sinks have; a sink is a learned score per head, without key or value.

`test_cap_sinks_values.py` tests their arithmetic, with a soft cap and other value sizes.
"""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import backward, sinks
from lowprec_attn.arithmetic.request import Extras, Request, Spec
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
SIZES = [
    ("dense", "flash_attention_3"),
    *(("tiled_odd", name) for name in ("matched", "normalized_delta")),
    ("gpu", "normalized_delta"),
]


@pytest.mark.parametrize(("implementation", "preset"), SIZES)
def test_a_sink_of_minus_infinity_is_none_and_others_may_be_of_any_size(
    implementation: str, preset: str
) -> None:
    """Far below all scores they change nothing; far above they take all weight."""
    case = dataclasses.replace(CASE, sinks=False)
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(case)
    without, none, small, large = (
        harness.run(how, case, arrays | given, numerics.PRESETS[preset])
        for given in (
            {},
            *({"sinks": np.full(4, x, np.float32)} for x in (-np.inf, -1e6, 1e6)),
        )
    )
    np.testing.assert_array_equal(none["dsinks"], 0)
    for name, x in without.items():
        np.testing.assert_array_equal(none[name], x, err_msg=name)
        within = {"lse": without["lse"] > -np.inf}.get(name, ...)  # otherwise lse is the sink
        np.testing.assert_allclose(small[name][within], x[within], atol=1e-5, err_msg=name)
        if name != "lse":
            assert np.abs(large[name]).max() < 1e-30, name
    rows = np.arange(case.rows)[:, None] < np.array(case.query_lengths)[:, None, None]
    of_sinks = np.broadcast_to(np.where(rows, 1e6, -np.inf), large["lse"].shape)
    np.testing.assert_allclose(large["lse"], of_sinks, rtol=3e-7)


@pytest.mark.parametrize(
    ("implementation", "preset"),
    [
        ("tiled", "flash"),
        *((name, "normalized_delta") for name in ("dense", "gpu")),
    ],
)
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
    np.testing.assert_allclose(result["dsinks"], expected, atol=0.05)  # the errors of `flash`
    for name in ("dq", "dk", "dv"):
        assert (result[name][1] == 0).all(), name


def test_rows_without_a_key_add_to_the_gradient_in_float32_and_only_to_sinks_that_exist() -> None:
    """The halves of dlse all but cancel. PublishedMax has an lse of its own without a sink."""
    q = jnp.ones((1, 16, 2, 16), jnp.bfloat16)
    ids = np.arange(16)[None] // 8  # no key has the id of the last 8 rows
    dlse = np.broadcast_to(np.where(ids, -37.3, 37.4)[..., None], (1, 16, 2)).astype(np.float32)

    def lse(sinks: jax.Array, implementation: str, sizes: object) -> jax.Array:
        return attention.dot_product_attention(
            q, q, q,
            query_segment_ids=ids, key_value_segment_ids=0 * ids, sinks=sinks, numerics="exact",
            row_max="published", implementation=implementation, block_sizes=sizes,
            return_residual=True,
        )[1]  # fmt: skip

    sinks = jnp.array([-jnp.inf, 60], jnp.bfloat16)
    for implementation, sizes in (("tiled", None), ("gpu", harness.GPU_TILES)):
        result, pullback = jax.vjp(lambda x, how=(implementation, sizes): lse(x, *how), sinks)
        np.testing.assert_allclose(result[0, -1], (np.log(1e-10), 60), rtol=1e-5)
        (gradient,) = pullback(jnp.asarray(dlse))
        np.testing.assert_allclose(gradient.astype(np.float32), (0, 0.8), rtol=2**-8)


def test_the_whole_row_sums_to_one_and_dS_to_zero_with_its_sink() -> None:
    """`normalized` forms δ from the keys and the sink. A zero bias gets the dS of the keys."""
    case = harness.Case(batch=1, sinks=True, bias=(True, True, True))
    arrays = harness.inputs(case) | {"dlse": np.zeros((1, 20, 2), np.float32)}
    arrays["bias"][...] = 0
    for name in ("flash", "normalized_delta", "matched_float32_output"):
        how = harness.IMPLEMENTATIONS["tiled"]
        result = harness.run(how, case, arrays, numerics.PRESETS[name])
        size = np.abs(result["dbias"]).sum()
        total = abs(result["dbias"].sum() + result["dsinks"].sum()) / size
        assert total > 1e-5 if name == "flash" else total < 1e-6, name


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
        attend = functools.partial(attention.dot_product_attention, implementation="dense")
        gradient = jax.jit(
            jax.grad(lambda s, attend=attend: attend(q, q, q, sinks=s).astype(jnp.float32).sum())
        )(jnp.zeros(2, dtype))
        assert gradient.dtype == dtype
        assert (gradient < -0.1).all()


@pytest.mark.parametrize(
    ("implementation", "delta"), [("dense", "after_cast"), ("tiled_odd", "normalized")]
)
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
    harness.trace_anew()
    with pytest.raises(AssertionError, match="dq"):
        harness.check(harness.run(how, CASE, arrays, chosen), same, exact)
    harness.trace_anew()


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
