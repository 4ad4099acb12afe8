"""The row sums that the Hopper kernel of dQ reports, in the interpreter."""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.product_races import check_products
from harness import Case

from lowprec_attn import attention
from lowprec_attn.attention import BackwardSums, UnsupportedError, reference
from lowprec_attn.numerics import (
    CORRECTED_AFTER_CAST,
    FLASH,
    MATCHED,
    NORMALIZED_DELTA,
    PUBLISHED,
    Numerics,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import BlockSizes

pytestmark = [
    pytest.mark.usefixtures("no_races"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

GROUPED = Case(
    batch=1, rows=192, keys=192, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
MORE_KEYS = dataclasses.replace(GROUPED, rows=64, kv_heads=2, is_causal=False)
WIDE = dataclasses.replace(GROUPED, rows=128, keys=128, heads=1, head_size=128)  # scale 2^-3.5
SEGMENTS = dataclasses.replace(GROUPED, segments=True)
SINKS = dataclasses.replace(GROUPED, sinks=True)
WITH_LSE = NORMALIZED_DELTA.replace(statistics="lse")
# Products of two steps overlap, which is the default at head size 128.
OVERLAPPED = dataclasses.replace(
    harness.HOPPER_TILES,
    query_gradients=dataclasses.replace(
        harness.HOPPER_TILES.query_gradients, overlap_steps=True, stages=2
    ),
)


def pullback(
    case: Case, arrays: harness.Arrays, chosen: Numerics, sizes: BlockSizes, *, asks: bool
) -> Any:
    """The gradients by the arrays, and by `backward_sums` if `asks`."""
    differentiated, rest, cotangents = harness.call_arrays(case, arrays)

    def attend(x: dict[str, Any], sums: BackwardSums | None) -> Any:
        return attention.dot_product_attention(
            **harness.by_argument(x),
            **rest,
            scale=case.scale,
            is_causal=case.is_causal,
            logits_soft_cap=case.soft_cap,
            numerics=chosen.replace(kv_block=64),
            implementation="hopper",
            block_sizes=sizes,
            return_residual=True,
            backward_sums=sums,
        )

    sums = BackwardSums.zeros(arrays["q"]) if asks else None
    (out, _), pull = jax.vjp(attend, differentiated, sums)
    do, dlse = cotangents
    return pull((jnp.asarray(do).astype(out.dtype), jnp.asarray(dlse)))


@pytest.mark.parametrize(
    ("case", "chosen", "sizes"),
    [
        pytest.param(GROUPED, FLASH, harness.HOPPER_TILES, id="flash, grouped heads"),
        pytest.param(MORE_KEYS, MATCHED, harness.HOPPER_TILES, id="matched, more keys"),
        pytest.param(WIDE, FLASH, OVERLAPPED, id="flash, head 128, overlapped"),
        pytest.param(GROUPED, NORMALIZED_DELTA, harness.HOPPER_TILES, id="normalized"),
        pytest.param(WIDE, WITH_LSE, harness.HOPPER_TILES, id="normalized, lse, head 128"),
        pytest.param(GROUPED, CORRECTED_AFTER_CAST, harness.HOPPER_TILES, id="after the cast"),
        pytest.param(SEGMENTS, FLASH, harness.HOPPER_TILES, id="segments"),
        pytest.param(SINKS, FLASH, harness.HOPPER_TILES, id="sinks"),
    ],
)
def test_they_are_what_the_kernel_sums(
    case: Case, chosen: Numerics, sizes: BlockSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_products(monkeypatch)
    arrays = harness.inputs(case)
    # Where k has a column of ones, dQ is Σ_j dS_ij · scale. A zero in q keeps the scores as they
    # are.
    arrays["q"][..., -1], arrays["k"][..., -1] = 0, 1
    grads, sums = pullback(case, arrays, chosen, sizes, asks=True)
    without, _ = pullback(case, arrays, chosen, sizes, asks=False)
    for x, y in zip(*map(jax.tree.leaves, (grads, without)), strict=True):
        np.testing.assert_array_equal(x, y)

    qkv = (arrays["q"], arrays["k"], arrays["v"])
    options = harness.reference_options(case, arrays)
    exact = reference.backward(*qkv, arrays["do"], dlse=arrays["dlse"], **options)
    terms = np.abs(exact.ds).sum(axis=-1).max() * (case.scale or case.head_size**-0.5)
    dq = np.asarray(grads["q"][..., -1], np.float32)
    # dQ is rounded to bfloat16, the sum is not.
    np.testing.assert_allclose(sums.ds, dq, rtol=2.0**-8, atol=2.0**-18 * terms)
    expected = reference.attention(*qkv, **options).p.sum(axis=-1).transpose(0, 2, 1)
    # lse, and the exponent's factor, err by some ulps; P̄ may be rounded.
    within = 1e-5 if chosen.recomputed_probs == "unrounded" else 2**-8
    np.testing.assert_allclose(sums.p, expected, rtol=within, atol=0)


def test_rows_that_were_corrected_sum_to_zero() -> None:
    arrays = harness.inputs(GROUPED)
    arrays["dlse"][:] = 0
    arrays["k"][..., 0] += 8  # otherwise P and dS round alike
    sizes = [
        np.sqrt(np.mean(np.square(sums.ds)))
        for chosen in (FLASH, CORRECTED_AFTER_CAST)
        for _, sums in [pullback(GROUPED, arrays, chosen, harness.HOPPER_TILES, asks=True)]
    ]
    assert sizes[1] < 1e-3 * sizes[0]


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (dataclasses.replace(GROUPED, soft_cap=30.0), {}, "logits_soft_cap=30.0"),
        (dataclasses.replace(GROUPED, head_size=256), {}, "head size 256"),
        (GROUPED, {"chosen": PUBLISHED}, "tile_grads=bfloat16"),
        (dataclasses.replace(GROUPED, query_lengths=(100,)), {}, "lengths"),
    ],
)
def test_who_lacks_them_is_named(case: Case, changes: dict[str, Any], reason: str) -> None:
    arrays = harness.inputs(case)
    with pytest.raises(UnsupportedError, match=f"backward_sums with {reason}"):
        pullback(case, arrays, changes.get("chosen", FLASH), harness.HOPPER_TILES, asks=True)
