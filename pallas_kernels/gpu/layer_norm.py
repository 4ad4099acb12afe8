"""Residual addition and LayerNorm in one kernel, and their gradients in another.

The formulas, `normalize` and `residual_gradient`, are plain JAX on rows and serve other platforms
as well. The backward pass recomputes the statistics from the float32 residual. That costs
arithmetic, which is plentiful, and no memory traffic.

The floor for 65,536 rows of 768 columns, bfloat16 beside the float32 residual, on one H200 at
4.3 TB/s, and the measured times:

  forward   moves 0.60 GB: 0.14 ms    the kernel takes 0.15 ms
  backward  moves 0.81 GB: 0.19 ms    the kernel takes 0.22 ms
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32

from lowprec_attn.arithmetic.places import span
from pallas_kernels.gpu.triton import plt

EPSILON = 1e-5
# Rows of a program of the backward kernel, which sums their part of the scale's gradient.
ROWS_PER_PROGRAM = 32


def normalize(
    residual: Float32[Array, "n D"], width: int, inside: Bool[Array, "n D"] | None = None
) -> tuple[Float32[Array, "n D"], Float32[Array, "n 1"]]:
    """x̂ = (r − mean r) · ρ and ρ = 1 / √(var r + ε) of every row.

    Args:
      residual: rows, 0 in columns beyond the width.
      width: the number of columns that count.
      inside: True in the columns that count; None if all do.
    """
    one_of = jnp.float32(1 / width)
    centred = residual - jnp.sum(residual, axis=-1, keepdims=True) * one_of
    if inside is not None:
        centred = jnp.where(inside, centred, jnp.float32(0))
    variance = jnp.sum(centred * centred, axis=-1, keepdims=True) * one_of
    rho = lax.rsqrt(variance + jnp.float32(EPSILON))
    return centred * rho, rho


def residual_gradient(
    x_hat: Float32[Array, "n D"],
    rho: Float32[Array, "n 1"],
    d_x_hat: Float32[Array, "n D"],
    width: int,
) -> Float32[Array, "n D"]:
    """dr = ρ · (dx̂ − mean dx̂ − x̂ · mean(dx̂ ∘ x̂)) of every row."""
    one_of = jnp.float32(1 / width)
    mean = jnp.sum(d_x_hat, axis=-1, keepdims=True) * one_of
    along = jnp.sum(d_x_hat * x_hat, axis=-1, keepdims=True) * one_of
    return rho * (d_x_hat - mean - x_hat * along)


def add_norm(
    residual: Float32[Array, "n d"],
    y: Float[Array, "n d"] | None,
    scale: Float32[Array, "d"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> tuple[Float32[Array, "n d"], Float[Array, "n d"]]:
    """residual + y, and its normalised rows times scale, rounded to `dtype`.

    Without y, the residual stands for the sum.
    """
    n, width = residual.shape
    padded = _padded(width)
    row, whole = (
        pl.BlockSpec((1, padded), index) for index in (lambda i: (i, 0), lambda i: (0, 0))
    )
    added = () if y is None else (y,)
    x_shape = jax.ShapeDtypeStruct((n, width), dtype)
    sums = (jax.ShapeDtypeStruct((n, width), jnp.float32),) if added else ()
    *sums, x = _call(
        partial(_forward, width=width),
        grid=(n,),
        in_specs=(row, whole, *(row for _ in added)),
        out_specs=(*(row for _ in sums), row),
        out_shape=(*sums, x_shape),
        warps=padded // 256,
        interpret=interpret,
    )(residual, scale[None], *added)
    return (sums[0] if sums else residual), x


def _forward(residual_ref: Any, scale_ref: Any, *refs: Any, width: int) -> None:
    *added, x_ref = refs
    inside = _inside(scale_ref, width)
    residual = _load(residual_ref, inside)
    if added:
        y_ref, sum_ref = added
        residual = residual + _load(y_ref, inside).astype(jnp.float32)
        plt.store(sum_ref, residual, mask=inside)
    x_hat, _ = normalize(residual, width, inside)
    plt.store(x_ref, (x_hat * _load(scale_ref, inside)).astype(x_ref.dtype), mask=inside)


def add_norm_gradients(
    residual: Float32[Array, "n d"],
    scale: Float32[Array, "d"],
    d_residual: Float32[Array, "n d"] | None,
    d_x: Float[Array, "n d"],
    *,
    adds: bool,
    interpret: bool = False,
) -> tuple[Float32[Array, "n d"], Float[Array, "n d"] | None, Float32[Array, "d"]]:
    """The gradients of `add_norm` by the residual, by y and by the scale.

    Args:
      residual: the sum, as `add_norm` returned it.
      scale: the scale, as given to `add_norm`.
      d_residual, d_x: gradients of what `add_norm` returned; d_residual is None if the residual has
        no gradient.
      adds: whether there was a y. Its gradient is the residual's gradient in d_x's dtype.
      interpret: run in the interpreter.
    """
    n, width = residual.shape
    padded, programs = _padded(width), -(-n // ROWS_PER_PROGRAM)
    rows, part, whole = (
        pl.BlockSpec((size, padded), index)
        for size, index in (
            (ROWS_PER_PROGRAM, lambda i: (i, 0)),
            (1, lambda i: (i, 0)),
            (1, lambda i: (0, 0)),
        )
    )
    dtypes = (jnp.float32, d_x.dtype) if adds else (jnp.float32,)
    given = () if d_residual is None else (d_residual,)
    *gradients, parts = _call(
        partial(_backward, count=n, width=width, inputs=len(given)),
        grid=(programs,),
        in_specs=(rows, whole, rows, *(rows for _ in given)),
        out_specs=(*(rows for _ in dtypes), part),
        out_shape=(
            *(jax.ShapeDtypeStruct((n, width), dtype) for dtype in dtypes),
            jax.ShapeDtypeStruct((programs, width), jnp.float32),
        ),
        warps=padded // 512,
        interpret=interpret,
    )(residual, scale[None], d_x, *given)
    return gradients[0], (gradients[1] if adds else None), jnp.sum(parts, axis=0)


def _backward(
    residual_ref: Any, scale_ref: Any, d_x_ref: Any, *refs: Any, count: int, width: int, inputs: int
) -> None:
    """`refs` are d_residual if `inputs` is 1, the gradients, and this program's part of d_scale."""
    *rest, d_scale_ref = refs
    d_residual_refs, gradient_refs = rest[:inputs], rest[inputs:]
    inside = _inside(scale_ref, width)
    scale = _load(scale_ref, inside)

    def add_row(i: Array, d_scale: Array) -> Array:
        residual, d_x, *d_residual = (
            _load(ref.at[pl.ds(i, 1)], inside) for ref in (residual_ref, d_x_ref, *d_residual_refs)
        )
        x_hat, rho = normalize(residual, width, inside)
        d_x = d_x.astype(jnp.float32)
        total = sum(d_residual, residual_gradient(x_hat, rho, d_x * scale, width))
        for ref in gradient_refs:
            plt.store(ref.at[pl.ds(i, 1)], total.astype(ref.dtype), mask=inside)
        return d_scale + d_x * x_hat

    rows = jnp.minimum(count - pl.program_id(0) * ROWS_PER_PROGRAM, ROWS_PER_PROGRAM)
    d_scale = lax.fori_loop(0, rows, add_row, jnp.zeros(scale.shape, jnp.float32))
    plt.store(d_scale_ref, d_scale, mask=inside)


def _padded(width: int) -> int:
    """The width rounded up to a power of two, as the compiler requires of tiles."""
    return 1 << (width - 1).bit_length()


def _inside(ref: Any, width: int) -> Array | None:
    """True where a row [1, D] holds columns below the width; None if all columns are."""
    return None if ref.shape[-1] == width else span(0, ref.shape[-1])[None] < width


def _load(ref: Any, inside: Array | None) -> Array:
    return ref[...] if inside is None else plt.load(ref, mask=inside, other=0)


def _call(body: partial[None], *, warps: int, **options: Any) -> Callable[..., Any]:
    """`pl.pallas_call`, named after the body, with `warps` limited to the 1 to 16 that exist."""
    return pl.pallas_call(
        body,
        compiler_params=plt.CompilerParams(num_warps=min(max(warps, 1), 16), num_stages=1),
        name=f"layer_norm{body.func.__name__}",
        **options,
    )
