"""The largest scores of a case: from a call, in float64, and the allowed difference."""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
from compiling import UNOPTIMIZED

from lowprec_attn import attention
from lowprec_attn.attention import reference
from lowprec_attn.numerics import Numerics, RowMax


def calls(
    how: harness.Implementation,
    case: harness.Case,
    arrays: harness.Arrays,
    numerics_: Numerics,
    row_max: RowMax,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """The results of a call for the case, with residuals."""
    operands = harness.call_arrays(case, arrays)
    attend = functools.partial(
        attention.dot_product_attention,
        scale=case.scale,
        is_causal=case.is_causal,
        local_window_size=case.window,
        logits_soft_cap=case.soft_cap,
        numerics=how.numerics(numerics_),
        row_max=row_max,
        implementation=how.name,
        block_sizes=how.block_sizes,
        return_residual=True,
        **options,
    )
    compiler_options = UNOPTIMIZED if how.name in (*harness.KERNELS, "hopper") else None
    given = harness.by_argument(operands.differentiated) | operands.rest
    return jax.jit(attend, compiler_options=compiler_options)(**given)


def exact(case: harness.Case, arrays: harness.Arrays) -> np.ndarray:
    """The largest scores in float64, [B, N]."""
    options = harness.reference_options(case, arrays)
    return reference.attention(arrays["q"], arrays["k"], arrays["v"], **options).max_logit


def tolerance(case: harness.Case, arrays: harness.Arrays) -> float:
    """How far a float32 score may be from the exact one.

    A sum of H products has an error of at most H ε/2 times the sum of their sizes. The scale, the
    rounding of its square root, tanh (whose slope is at most 1) and the bias each add a few ε times
    the value that they produce.
    """
    q, k = (np.abs(arrays[name].astype(np.float64)) for name in ("q", "k"))
    sizes = np.einsum("btnh,bsnh->bnts", q, k.repeat(case.heads // case.kv_heads, 2))
    largest = sizes.max() * (case.scale or case.head_size**-0.5)
    bias = 0.0 if "bias" not in arrays else np.abs(arrays["bias"]).max()
    return plain.EPS32 * ((case.head_size / 2 + 2) * largest + bias + 4 * (case.soft_cap or 0))


def check(found: jax.Array | np.ndarray, expected: np.ndarray, within: float) -> None:
    assert found.dtype == jnp.float32
    assert found.shape == expected.shape
    sees = np.isfinite(expected)
    np.testing.assert_array_equal(np.isneginf(found), ~sees)
    np.testing.assert_allclose(np.asarray(found)[sees], expected[sees], rtol=0, atol=within)
