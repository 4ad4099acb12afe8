"""The attention of Flax's modules, Linen and NNX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from lowprec_attn.attention.entry import dot_product_attention
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax


def attention_fn(
    *,
    numerics: Numerics | str | Sequence[Numerics | str] = FLASH,
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    rng_key: Key[Array, ""] | Callable[[], Key[Array, ""]] | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """An `attention_fn` for `flax.linen` and `flax.nnx` `MultiHeadDotProductAttention` and alike.

    Masks (boolean, or 0/1 as `make_causal_mask` gives them) are passed on as dense masks, which
    `tiled` and `dense` serve. With `is_causal=True` (NNX) no mask is needed.

    Args:
      numerics: see `dot_product_attention`.
      row_max: likewise.
      rng_key: PRNG key for stochastic points, or a function called at every use that returns one.
      implementation: likewise.

    Returns:
      A function with the keyword arguments that Flax passes. It raises NotImplementedError for
      active dropout, sown weights, a `precision` and einsum overrides.
    """

    # Linen drops every keyword that is not named here, so a **kwargs would lose the mask.
    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax  # the softmax is float32 anyway
        refused = {
            f"dropout_rate={dropout_rate}": dropout_rate > 0 and not deterministic,
            "sown attention weights": module is not None,
            f"precision={precision} (set numerics instead)": precision is not None,
            "qk_attn_weights_einsum": qk_attn_weights_einsum is not None,
            "attn_weights_value_einsum": attn_weights_value_einsum is not None,
        }
        for what, is_asked_for in refused.items():
            if is_asked_for:
                raise NotImplementedError(f"lowprec_attn.attention does not support {what}")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            None if mask is None else mask.astype(jnp.bool_),
            is_causal=is_causal,
            numerics=numerics,
            row_max=row_max,
            rng_key=rng_key() if callable(rng_key) else rng_key,
            implementation=implementation,
        )
        assert isinstance(out, Array)
        return out

    return attend
