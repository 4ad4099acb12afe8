"""Attention in which every rounding is a named choice: the public name of the library.

    from lowprec_attn import attention, numerics

    out = attention.dot_product_attention(
        q, k, v, is_causal=True, numerics=numerics.FLASH, row_max=numerics.DynamicMax()
    )

This package holds the public functions, the validation of a call, the choice of an implementation,
and the implementations in plain JAX: `tiled`, `dense`, and the textbook formula, `reference`.
`tiled` and `dense` compute with `arithmetic`. Only `dispatch` calls the kernels of
`pallas_kernels`.
"""

from lowprec_attn.arithmetic.request import BackwardSums
from lowprec_attn.arithmetic.transforms import CHECKPOINT_NAME
from lowprec_attn.attention.dispatch import IMPLEMENTATIONS, UnsupportedError, exponent_of, resolve
from lowprec_attn.attention.entry import dot_product_attention
from lowprec_attn.attention.flax_modules import attention_fn
from lowprec_attn.attention.sharding import sharded, within_shard
from lowprec_attn.attention.target import compiled_for, explanation

__all__ = [
    "CHECKPOINT_NAME",
    "IMPLEMENTATIONS",
    "BackwardSums",
    "UnsupportedError",
    "attention_fn",
    "compiled_for",
    "dot_product_attention",
    "explanation",
    "exponent_of",
    "resolve",
    "sharded",
    "within_shard",
]
