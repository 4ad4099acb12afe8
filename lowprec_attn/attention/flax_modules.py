"""The `attention_fn` of Flax modules, for Linen and NNX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Key

from lowprec_attn.attention import validation
from lowprec_attn.attention.dispatch import check_name
from lowprec_attn.attention.entry import dot_product_attention
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax, get_preset, get_row_max


def attention_fn(
    *,
    numerics: Numerics | str | Sequence[Numerics | str] = FLASH,
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    rng_key: Key[Array, ""] | Callable[[], Key[Array, ""]] | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """Returns the `attention_fn` of a Flax layer, such as `nnx.MultiHeadAttention`.

    The kernels skip tiles above the diagonal if they know that attention is causal. Pass
    `is_causal=True`, here or in the call of an NNX module. Linen's modules pass only a mask. A
    causal mask whose values are known when the call is traced (a NumPy array, or one made outside
    `jit`) therefore counts as `is_causal=True`. Any other mask, including one made inside `jit`,
    stays a dense mask, and tiles that it hides are not skipped.

    Masks are boolean, or 0/1 as `make_causal_mask` returns them. If a mask and `is_causal=True` are
    both given, a row sees only the keys that both allow, as in Flax.

    A call with one query, a mask and more than one key is a decoding step (`decode=True`). Flax's
    mask hides the part of the cache that is not yet written, so the query stands at the last key
    that the mask shows. A window is counted from there. Causality hides no further key.

    Other calls with equally many queries and keys count both from 0. With unequal numbers, as in
    cross-attention, positions cannot be compared, so `is_causal` and `local_window_size` are
    refused unless the call passes a `query_offset`.

    Args:
      numerics: see `dot_product_attention`.
      row_max: see `dot_product_attention`.
      is_causal: whether row t sees only the keys s <= t in every call; False leaves the choice to
        the call.
      local_window_size, logits_soft_cap: see `dot_product_attention`.
      rng_key: PRNG key for stochastic points, or a function that returns one and is called at every
        use.
      implementation: see `dot_product_attention`.

    Returns:
      A function with the keyword arguments that Flax passes. For your own modules it also takes
      `query_offset` and `sinks`, see `dot_product_attention`. It raises NotImplementedError for
      active dropout, sown weights, a `precision` and einsum overrides, and ValueError for positions
      that cannot be compared. (Flax draws one dropout mask over all pairs of a row and a key. A
      kernel that does not hold this mask in memory cannot reproduce Flax's result for a PRNG key.)

    Raises:
      ValueError: an option is wrong for every call.
    """

    always_causal = validation.causal(is_causal)
    _check_made(numerics, row_max, local_window_size, rng_key, implementation)
    validation.soft_cap(logits_soft_cap, 1.0)

    # Linen passes only keywords that the signature names, so with **kwargs the mask would be lost.
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
        query_offset: Any = None,
        sinks: Any = None,
    ) -> Array:
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax  # the softmax is float32 anyway
        refused = {
            f"dropout_rate={dropout_rate} (pass 0, or deterministic=True)": dropout_rate > 0
            and not deterministic,
            "sown attention weights (pass sow_weights=False)": module is not None,
            f"precision={precision} (set numerics instead)": precision is not None,
            "qk_attn_weights_einsum (leave it out)": qk_attn_weights_einsum is not None,
            "attn_weights_value_einsum (leave it out)": attn_weights_value_einsum is not None,
        }
        for what, is_asked_for in refused.items():
            if is_asked_for:
                raise NotImplementedError(f"lowprec_attn.attention does not support {what}")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        by_position = validation.causal(is_causal) or always_causal
        rows, keys = query.shape[-3], key.shape[-3]
        if query_offset is None and rows == 1 < keys and mask is not None:
            by_position = False  # the mask already hides the unwritten part of the cache
            if local_window_size is not None:
                query_offset = _last_shown(mask, query.shape[:-3])
        elif mask is not None and query_offset is None and _is_causal_mask(mask, rows, keys):
            by_position, mask = True, None
        elif query_offset is None and rows != keys:
            _check_has_no_positions(by_position, local_window_size, rows, keys)
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            None if mask is None else mask.astype(jnp.bool_),
            is_causal=by_position,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            query_offset=0 if query_offset is None else query_offset,
            numerics=numerics,
            row_max=row_max,
            rng_key=rng_key() if callable(rng_key) else rng_key,
            implementation=implementation,
        )
        assert isinstance(out, Array)
        return out

    return attend


def _check_made(
    numerics: object, row_max: object, window: object, rng_key: object, implementation: object
) -> None:
    """Raises ValueError for options that are wrong whatever the arrays are."""
    groups = validation.given_groups(numerics)
    chosen = [group.numerics for group in groups]
    if not groups:
        chosen = validation.entries_of("numerics", numerics, Numerics, get_preset)
    validation.entries_of("row_max", row_max, RowMax, get_row_max)
    validation.check_bits(chosen, rng_key)
    validation.check_window(window)
    check_name(implementation)


def _last_shown(mask: ArrayLike, batch: tuple[int, ...]) -> Array:
    """The index of the last key that the mask [..., 1, S] shows to its one query; −1 if none."""
    shown = jnp.asarray(mask).astype(jnp.bool_)
    if shown.ndim != len(batch) + 3:
        raise ValueError(f"mask must be [batch, heads, 1, keys], got shape {shown.shape}")
    over = tuple(range(len(batch), shown.ndim - 1))  # heads, and the query
    shown = jnp.any(shown, axis=over)
    last = jnp.max(jnp.where(shown, jnp.arange(shown.shape[-1]), -1), axis=-1)
    return jnp.broadcast_to(last, batch)


def _check_has_no_positions(is_causal: bool, window: object, rows: int, keys: int) -> None:
    given = "is_causal=True" if is_causal else f"local_window_size={window!r}"
    if is_causal or window is not None:
        raise ValueError(
            f"{given} with {rows} queries and {keys} keys: cross-attention has no positions to "
            "compare; give it an attention_fn without that, or pass query_offset in the call"
        )


def _is_causal_mask(mask: ArrayLike, rows: int, keys: int) -> bool:
    """Whether the values of the mask are known now and row t sees exactly the keys s <= t.

    A mask with an axis of length 1 for many rows or keys is not causal, whatever it holds.
    """
    if isinstance(mask, jax.core.Tracer) or np.shape(mask)[-2:] != (rows, keys):
        return False
    if isinstance(mask, jax.Array) and not mask.is_fully_addressable:
        return False  # part of the mask lies on devices of other processes
    values = jax.device_get(mask).astype(bool)
    return bool(np.all(values == np.tri(rows, keys, dtype=np.bool_)))
