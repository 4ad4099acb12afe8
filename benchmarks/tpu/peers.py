"""JAX's own attention kernels for TPUs, causal and with one tile, to compare schedules with."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array

Attend = Callable[[Array, Array, Array], Array]


def _heads_first(attend: Attend) -> Attend:
    """Makes a peer, which takes [B, N, T, H], take [B, T, N, H]."""

    def transposed(q: Array, k: Array, v: Array) -> Array:
        return attend(*(x.transpose(0, 2, 1, 3) for x in (q, k, v))).transpose(0, 2, 1, 3)

    return transposed


def splash(length: int, heads: int, scale: float, tile: tuple[int, int]) -> Attend:
    """Returns causal splash attention of [B, T, N, H]; q is scaled outside the kernel.

    Args:
      length: T.
      heads: N.
      scale: the factor of q kᵀ.
      tile: the query rows and keys of the tiles of all three kernels.
    """
    q, kv = tile
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    causal = splash_attention_mask.CausalMask((length, length))
    mask = splash_attention_mask.MultiHeadMask([causal] * heads)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)
    factor = np.float32(scale)
    return _heads_first(lambda q, k, v: jax.vmap(kernel)(q * factor.astype(q.dtype), k, v))


def flash(scale: float, tile: tuple[int, int]) -> Attend:
    """Returns causal `flash_attention` of [B, T, N, H]; `splash` explains the arguments."""
    q, kv = tile
    sizes = flash_attention.BlockSizes(
        block_q=q,
        block_k_major=kv,
        block_k=kv,
        block_b=1,
        block_q_major_dkv=q,
        block_k_major_dkv=kv,
        block_k_dkv=kv,
        block_q_dkv=q,
        block_k_major_dq=kv,
        block_k_dq=kv,
        block_q_dq=q,
    )
    return _heads_first(
        functools.partial(
            flash_attention.flash_attention,
            causal=True,
            sm_scale=scale,
            block_sizes=sizes,
        )
    )
