"""GELU in its tanh form, and its gradient: elementwise kernels with loads of 16 bytes.

XLA's own loops read 8 bytes per thread of a 16-bit array. That leaves too few bytes in flight to
saturate the memory bandwidth. The floor for 65,536 × 3,072 bfloat16 numbers on one H200 at
4.3 TB/s, and the measured times:

  value     moves 0.81 GB: 0.19 ms    XLA takes 0.27 ms, this kernel 0.19 ms
  gradient  moves 1.21 GB: 0.28 ms    XLA takes 0.35 ms, this kernel 0.27 ms
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.places import span
from pallas_kernels.gpu.instructions import exp2
from pallas_kernels.gpu.problem import LOG2E
from pallas_kernels.gpu.triton import plt

Function = Callable[[Array], Array]

_TILE = 4096
_WARPS = 8
# (1 + tanh(u)) / 2 = sigmoid(2u) with 2u = h · (A + B h²).
_A = 2 * math.sqrt(2 / math.pi)
_B = 0.044715 * _A


def _one_over(x: Array) -> Array:
    return 1 / x


def value(h: Array, power: Function = jnp.exp2, one_over: Function = _one_over) -> Array:
    """h · sigmoid(2u) of float32 numbers; `power` computes 2^x, and `one_over` 1 / x."""
    return h * _sigmoid(h, power, one_over)


def slope(h: Array, power: Function = jnp.exp2, one_over: Function = _one_over) -> Array:
    """The derivative of `value`, σ + h σ (1 − σ) d(2u)/dh, of float32 numbers."""
    sigma = _sigmoid(h, power, one_over)
    return sigma + sigma * (1 - sigma) * h * (jnp.float32(_A) + jnp.float32(3 * _B) * (h * h))


def _sigmoid(h: Array, power: Function, one_over: Function) -> Array:
    log2 = h * (jnp.float32(-_A * LOG2E) + jnp.float32(-_B * LOG2E) * (h * h))
    return one_over(1 + power(log2))


def is_served(x: Float[Array, "*n"]) -> bool:
    """Whether the kernels serve an array of this size. They count its numbers in int32."""
    return x.size < 2**31


def gelu(x: Float[Array, "*n"], *, interpret: bool = False) -> Float[Array, "*n"]:
    """`value` of x, rounded to x's dtype."""
    return _call(_value, x, interpret=interpret)


def gelu_gradient(
    x: Float[Array, "*n"], d_y: Float[Array, "*n"], *, interpret: bool = False
) -> Float[Array, "*n"]:
    """d_y times `slope` of x, rounded to x's dtype."""
    return _call(_gradient, x, d_y, interpret=interpret)


def _value(x_ref: Any, y_ref: Any, *, size: int, interpret: bool) -> None:
    mask = _inside(size)
    y = value(_load(x_ref, mask), partial(exp2, interpret=interpret))
    plt.store(y_ref, y.astype(y_ref.dtype), mask=mask)


def _gradient(x_ref: Any, d_y_ref: Any, d_x_ref: Any, *, size: int, interpret: bool) -> None:
    mask = _inside(size)
    d_x = _load(d_y_ref, mask) * slope(_load(x_ref, mask), partial(exp2, interpret=interpret))
    plt.store(d_x_ref, d_x.astype(d_x_ref.dtype), mask=mask)


def _inside(size: int) -> Array | None:
    return None if size % _TILE == 0 else span(pl.program_id(0) * _TILE, _TILE) < size


def _load(ref: Any, mask: Array | None) -> Array:
    x = ref[...] if mask is None else plt.load(ref, mask=mask, other=0)
    return x.astype(jnp.float32)


def _call(body: Callable[..., None], *arrays: Array, interpret: bool) -> Array:
    x = arrays[0]
    tile = pl.BlockSpec((_TILE,), lambda i: (i,))
    return pl.pallas_call(
        partial(body, size=x.size, interpret=interpret),
        grid=(-(-x.size // _TILE),),
        in_specs=[tile] * len(arrays),
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct((x.size,), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name=f"gelu{body.__name__}",
    )(*(array.reshape(-1) for array in arrays)).reshape(x.shape)
