"""The attention of Flax's modules, Linen and NNX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Key

from lowprec_attn.attention.entry import dot_product_attention
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax


def attention_fn(
    *,
    numerics: Numerics | str | Sequence[Numerics | str] = FLASH,
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    rng_key: Key[Array, ""] | Callable[[], Key[Array, ""]] | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """An `attention_fn` for `flax.linen` and `flax.nnx` `MultiHeadDotProductAttention` and alike.

    Causality reaches the kernels without a mask: by `is_causal=True`, here or in the call of an NNX
    module, or by a causal mask whose values are known when the call is traced (NumPy, or made
    outside `jit`), which is taken as `is_causal=True`. Linen's modules pass a mask alone. Any other
    mask, one made inside `jit` included, stays a dense mask: tiles that it hides are not skipped.

    Masks are boolean, or 0/1 as `make_causal_mask` gives them. A mask beside `is_causal=True`
    narrows it: a row sees the keys that both let it see, as in Flax.

    Args:
      numerics: see `dot_product_attention`.
      row_max: likewise.
      is_causal: row t sees the keys s <= t in every call; False leaves it to the call.
      local_window_size: see `dot_product_attention`.
      rng_key: PRNG key for stochastic points, or a function called at every use that returns one.
      implementation: likewise.

    Returns:
      A function with the keyword arguments that Flax passes. It raises NotImplementedError for
      active dropout (Flax draws one mask over all pairs of a row and a key; without it in memory
      no kernel gives the results of the same key), sown weights, a `precision` and einsum
      overrides.
    """

    always_causal = is_causal

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
        by_position = is_causal or always_causal
        if mask is not None and _is_causal_mask(mask):
            by_position, mask = True, None
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            None if mask is None else mask.astype(jnp.bool_),
            is_causal=by_position,
            local_window_size=local_window_size,
            numerics=numerics,
            row_max=row_max,
            rng_key=rng_key() if callable(rng_key) else rng_key,
            implementation=implementation,
        )
        assert isinstance(out, Array)
        return out

    return attend


def _is_causal_mask(mask: ArrayLike) -> bool:
    """Whether the mask is known here and lets every row t see the keys s <= t, and no other."""
    if isinstance(mask, jax.core.Tracer):
        return False
    if isinstance(mask, jax.Array) and not mask.is_fully_addressable:
        return False  # a part of it lies on devices of other processes
    values = jax.device_get(mask).astype(bool)
    return values.ndim >= 2 and bool(np.all(values == np.tri(*values.shape[-2:], dtype=np.bool_)))
