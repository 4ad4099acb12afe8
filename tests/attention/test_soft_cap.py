"""What only the soft cap on scores, c · tanh(S / c), and its derivative have.

`test_cap_sinks_values.py` tests their arithmetic, with sinks and other value sizes.
"""

import dataclasses
import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import backward, products
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.numerics import EXACT, FLASH
from pallas_kernels.tpu import attention as tpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


def test_a_row_of_one_key_has_no_gradient_of_its_score() -> None:
    case = harness.Case(batch=1, rows=6, keys=1, heads=1, kv_heads=1, soft_cap=1.0)
    arrays = harness.inputs(case) | {"dlse": np.zeros((1, 6, 1), np.float32)}
    for delta in ("do_o", "normalized", "dp_p"):
        how = harness.IMPLEMENTATIONS["tiled"]
        result = harness.run(how, case, arrays, EXACT.replace(delta=delta))
        assert np.abs(result["dq"]).max() < 1e-6
        assert np.abs(result["dk"]).max() < 2e-6


def without_slope_in_pk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes row sums subtract round(P) k from dQ, as without a cap, not round(slope ∘ P) k."""
    as_it_is, behind_cap = backward.row_sums, backward.BackwardTile.behind_cap

    def changed(*args: Any, **rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                backward.BackwardTile,
                "behind_cap",
                lambda self, x: x if x is self.p else behind_cap(self, x),
            )
            return as_it_is(*args, **rest)

    monkeypatch.setattr(backward, "row_sums", changed)


ONE_BATCH = harness.Case(batch=1, soft_cap=2.0)


def test_normalized_delta_takes_the_slope_into_its_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dlse of size 1 the correction is as large as dQ; a mutant without the slope fails."""
    chosen = numerics.NORMALIZED_DELTA

    def check() -> None:
        harness.trace_anew()
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
    harness.trace_anew()


def test_rows_of_ds_sum_to_zero_before_the_slope_and_not_after_it() -> None:
    """dbias is dS of capped scores. dQ along a feature common to all keys shows the row sums."""
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
    """tanh(S / c) is multiplied by c log2 e once, as q·k is by scale · log2 e without a cap."""
    first, spec = (
        EXACT.replace(exponent="scale_first"),
        functools.partial(Spec, row_max=numerics.StandardMax(), scale=-0.3),
    )
    assert products.score_unit(spec(numerics=first, soft_cap=30.0), Extras()) == 30.0
    assert products.score_unit(spec(numerics=first), Extras()) == 1.0  # the scale is negative
    traced = Extras(scale=jnp.float32(1))
    assert products.score_unit(spec(numerics=first, soft_cap=30.0), traced) == 30.0
    for chosen, extras in (
        (EXACT, Extras()),
        (first.replace(scores="bfloat16"), Extras()),
        (first, Extras(bias=jnp.ones((1, 1, 1, 1, 1)))),
    ):
        assert products.score_unit(spec(numerics=chosen, soft_cap=30.0), extras) == 1.0


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
