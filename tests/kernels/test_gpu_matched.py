"""`matched` in the GPU kernels: one P̄ in both passes, whatever their tiles, steps and products.

The kernel of dK and dV forms S transposed. If a feature is 1 in all keys, dQ along it is the sum of
a row of dS: before the cast, if `ds` is float32.
"""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiling import UNOPTIMIZED

from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import reference
from lowprec_attn.numerics import FLASH, MATCHED, Numerics, StandardMax
from pallas_kernels.gpu import attention as gpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

ROWS, SIZE = 70, 16


def inputs(largest: float) -> tuple[np.ndarray, ...]:
    """q k v do, bfloat16 [1, T, 2, H]; the first feature of k is 1 and adds nothing to scores."""
    r = np.random.default_rng(0)
    q, k, v, do = (r.standard_normal((1, ROWS, 2, SIZE)) for _ in range(4))
    q[..., 0], k[..., 0] = 0, 0
    q *= largest / np.abs(np.einsum("btnh,bsnh->bnts", q, k)).max() * SIZE**0.5
    k[..., 0] = 1
    return tuple(x.astype(ml_dtypes.bfloat16) for x in (q, k, v, do))


@functools.partial(jax.jit, static_argnames="spec", compiler_options=UNOPTIMIZED)
def query_gradient(q: Any, k: Any, v: Any, do: Any, *, spec: Spec) -> jax.Array:
    (out, lse), pullback = jax.vjp(lambda *x: gpu.attention(*x, Extras(), spec), q, k, v)
    return pullback((do.astype(out.dtype), jnp.zeros_like(lse)))[0]


def row_sums(largest: float, num: Numerics, sizes: Any) -> tuple[float, float]:
    """The RMS over rows of Σ dS, and of Σ P |dO v|, which bounds what rounding may leave of it."""

    spec = Spec(
        numerics=num.replace(ds="float32", kv_block=16),
        row_max=StandardMax(),
        scale=SIZE**-0.5,
        is_causal=True,
        block_sizes=sizes,
    )
    q, k, v, do = map(jnp.asarray, inputs(largest))
    sums = np.asarray(query_gradient(q, k, v, do, spec=spec), np.float64)[..., 0] / spec.scale
    p = reference.attention(q, k, v, masking=reference.Masking(is_causal=True)).p
    terms = np.einsum("btnh,bsnh->bnts", *(np.abs(np.asarray(x, np.float64)) for x in (do, v)))
    size = (p * terms).sum(-1)
    return tuple(float(np.sqrt(np.mean(x**2))) for x in (sums, size))


@pytest.mark.parametrize("largest", [1.0, 30.0, 1e3, 1e5, 1e7])
def test_rows_of_ds_sum_to_zero(largest: float) -> None:
    for sizes in (harness.GPU_TILES, harness.GPU_TALL):
        found, size = row_sums(largest, MATCHED, sizes)
        assert found <= 1e-5 * size


def test_they_do_not_in_flash() -> None:
    found, size = row_sums(30.0, FLASH, harness.GPU_TALL)
    assert found > 1e-4 * size
