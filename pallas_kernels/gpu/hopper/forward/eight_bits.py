"""The forward pass in FP8, as FlashAttention-3 has it: e4m3 codes of q, k, V and P̄.

q, k and V are multiplied by their scales and rounded before the kernel, by XLA. The kernel
multiplies the codes, and undoes the scales of q and k in the unit of its scores, that of V in the
epilogue. P̄ is formed times 2^8, which l and Ō have in common. Products of 8-bit operands take both
with the axis of their sum last, so V is transposed to [B, K, V, S] where it is rounded.

The machine adds products of FP8 operands with fewer bits than float32 has, in every kernel.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.request import Spec, planes
from lowprec_attn.arithmetic.transforms import forward_only
from lowprec_attn.numerics import Rounding, largest, magnitude, scaled_codes
from pallas_kernels.gpu.hopper.block_sizes import block_sizes
from pallas_kernels.gpu.hopper.forward.kernel import forward
from pallas_kernels.gpu.hopper.machine.eight_bits import in_columns
from pallas_kernels.gpu.hopper.problem import LOG2E, Descales, Problem

# Masked scores stay far below all others in units from here on, and scores in smaller units are 0.
_LEAST_UNIT = 2.0**-64


class Codes(NamedTuple):
    """What the kernel takes.

    Attributes:
      q, k: codes [B, T, N, H] and [B, S, K, H], the keys as `Problem.permutes_keys` says.
      v: codes [B, K, V, S], S rounded up to a multiple of 128.
      descales: `Descales`, [3, B, K].
    """

    q: Array
    k: Array
    v: Array
    descales: Array


@partial(jax.jit, static_argnums=1)
def attend(arrays: tuple[Array, ...], spec: Spec) -> tuple[Array, ...]:
    """Returns O, lse and, with `spec.max_logit`, the largest scores [B, T, N].

    arrays: q, k and v, or the one packed array.
    """
    q, k, v = planes(*forward_only(arrays, "hopper", f"query={spec.numerics.query}"))
    return attend_codes(codes(q, k, v, spec), spec)


def codes(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K V"], spec: Spec
) -> Codes:
    """Rounds q, k and v at `query`, `key` and `value`, to the codes that `round_scaled` forms."""
    n, kv_heads, sizes = spec.numerics, k.shape[2], block_sizes(q.shape, spec)
    q, of_q = _codes(q, n.query, kv_heads)
    k, of_k = _codes(k, n.key, kv_heads, permutes=not sizes.from_memory)
    v, of_v = _codes(v, n.value, kv_heads)
    unit = jnp.maximum(np.float32(spec.scale) / of_q / of_k, np.float32(_LEAST_UNIT))
    descales = jnp.stack(Descales(unit, unit * np.float32(LOG2E), 1 / of_v))
    # Mosaic divides V's last axis into lines of 128. The codes added are 0.
    padded = jnp.pad(v.transpose(0, 2, 3, 1), [(0, 0)] * 3 + [(0, -v.shape[1] % 128)])
    return Codes(q, k, padded, descales)


def attend_codes(given: Codes, spec: Spec) -> tuple[Array, ...]:
    """`attend` for arrays that are codes already."""
    q, k, v, descales = given
    problem = Problem.of(q, k, spec, block_sizes(q.shape, spec))
    out = forward(q, k, v, problem, descales=descales)
    vectors = (
        x[..., : q.shape[1]].transpose(0, 2, 1) for x in (out.lse, out.max_logit) if x is not None
    )
    return out.o, *vectors


def _codes(
    x: Float[Array, "B L N H"], rounding: Rounding, kv_heads: int, *, permutes: bool = False
) -> tuple[Array, Float[Array, "B K"]]:
    """Returns the codes of q, k or v, and the scale of every batch element and key head.

    permutes: whether the keys are put `in_columns`.
    """
    assert rounding.scaling is not None
    batch, length, heads, features = x.shape
    rows = (batch, length, kv_heads, heads // kv_heads)
    # Row by row first: of the whole array XLA would write a transposed copy.
    of_rows = jnp.max(magnitude(x.astype(jnp.float32)), axis=-1)
    by_group = of_rows.reshape(*rows, 1).transpose(0, 2, 3, 1, 4)
    amax = largest(by_group, rounding.scaling).transpose(0, 3, 1, 2, 4)
    ordered = (in_columns(x) if permutes else x).astype(jnp.float32).reshape(*rows, features)
    found, scale = scaled_codes(ordered, rounding, amax)
    of_heads = jnp.broadcast_to(scale[:, 0, :, 0, 0], (batch, kv_heads))
    # XLA would otherwise round transposed numbers, in several kernels with copies in between.
    in_order = Layout(major_to_minor=tuple(range(x.ndim)))
    found = with_layout_constraint(found.astype(rounding.format.dtype).reshape(x.shape), in_order)
    return lax.optimization_barrier(found), of_heads
