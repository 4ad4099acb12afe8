"""Attention sinks outside of the kernels: m and l before the first key, and the gradient.

See `lowprec_attn.arithmetic.sinks`. A sink costs no instruction of the mainloop: a row loads the
two numbers with which it begins, instead of taking constants.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowprec_attn.arithmetic import sinks
from lowprec_attn.arithmetic.fused import multiply_add
from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.powers import exp2
from lowprec_attn.arithmetic.request import Extras
from lowprec_attn.numerics import MASKED
from pallas_kernels.gpu.hopper import powers
from pallas_kernels.gpu.hopper.block_sizes import ROWS
from pallas_kernels.gpu.hopper.problem import Problem


def start_of_rows(given: Float[Array, "N"], problem: Problem) -> Array:
    """Returns the first m and l of the rows of every head, [2, N, 64], in the kernels' units."""
    m, l = sinks.start_of_rows(given, problem.unit, problem.spec)
    if problem.whole_max:
        l = l * np.float32(2.0**powers.UNIT)
    start = jnp.stack([jnp.maximum(m, jnp.float32(MASKED)), l])
    return jnp.broadcast_to(start[..., None], (*start.shape, ROWS))


def without_beyond(lse: Float[Array, "B T N"], extras: Extras) -> Float[Array, "B T N"]:
    """Returns lse, set to −inf in rows beyond the lengths, which have no sink."""
    if extras.sinks is None or extras.query_lengths is None:
        return lse
    exists = _exists(extras.query_lengths, lse.shape[1])
    return jnp.where(exists[..., None], lse, jnp.float32(-jnp.inf))


def _exists(lengths: Array, rows: int) -> Array:
    """Which rows are within the lengths, [B, T]."""
    return span(0, rows)[None] < lengths[:, None]


def gradient(
    extras: Extras,
    offset: Array,
    inverse_l: Array | None,
    dp_offset: Array,
    problem: Problem,
) -> Float[Array, "N"]:
    """Returns the gradient of the sinks, Σ P_sink (dlse − δ), in their dtype.

    Args:
      extras: the sinks, and the lengths; rows beyond these have no sink.
      offset, inverse_l: what P of every row is formed from, [B, N, `vector_rows`].
      dp_offset: −δ + dlse, times scale unless `scales_last`, [B, N, `vector_rows`].
      problem: the kernels' problem.
    """
    given = extras.sinks
    assert given is not None
    offset, added = (x[..., : problem.rows] for x in (offset, dp_offset))
    s = (given.astype(jnp.float32) / np.float32(problem.unit))[None, :, None]
    # P is formed as the kernels form P of a key. It is 0 in empty rows, whose offset is −inf.
    log2_p = multiply_add(jnp.broadcast_to(s, offset.shape), problem.log2_unit, offset)
    p = exp2(log2_p)
    if inverse_l is not None:
        p = p * inverse_l[..., : problem.rows]
    if extras.query_lengths is not None:
        exists = _exists(extras.query_lengths, problem.rows)
        p = jnp.where(exists[:, None], p, jnp.float32(0))
    total = jnp.where(p == 0, jnp.float32(0), p * added).sum(axis=(0, 2))
    if not problem.scales_last:
        total = total / np.float32(problem.spec.scale)
    return total.astype(given.dtype)
