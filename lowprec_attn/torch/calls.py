"""Reads the arguments of an attention call: q, k, v, and what hides keys or changes scores.

Each function that `capture` knows has a reader here, which takes the arguments of the function.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowprec_attn.diagnostics import CaptureError


class Call(NamedTuple):
    """A call of attention.

    Attributes:
      q: [B, T, N, H].
      k, v: [B, S, K, H].
      mask: [B or 1, N or 1, T or 1, S] or None. Either boolean, true where a key is seen, or
        numbers that are added to the scores.
      facts: further facts under the names of `diagnostics.Capture.layers`. Anything else that
        changes scores has a name that `diagnose` refuses.
      heads_first: whether O and dO are [..., N, T, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    facts: dict[str, Any]
    heads_first: bool


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    soft_cap: float | None = None,
) -> Call:
    """Reads a call of PyTorch's scaled_dot_product_attention, or of `bridge`'s with a soft cap."""
    if query.is_nested:
        raise CaptureError(
            "a nested tensor reached scaled_dot_product_attention, which capture does not read; "
            "take a batch of one length, as a plain tensor"
        )
    facts: dict[str, Any] = {"is_causal": bool(is_causal), "scale": _scale(query, scale)}
    if soft_cap is not None:
        facts["logits_soft_cap"] = float(soft_cap)
    if dropout_p:
        facts["ignored"] = np.array(["dropout_p"])
    q, k, v = (rows_first(x) for x in (query, key, value))
    mask = attn_mask
    if mask is not None:
        if query.dim() > 4:
            mask = mask.expand(*query.shape[:-3], *_four(mask).shape[-3:]).flatten(0, -4)
        mask = _four(mask)
    return Call(q, k, v, mask, facts, heads_first=True)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> Call:
    """Reads a call of the operator behind `torch.nn.attention.flex_attention.flex_attention`."""
    from torch.nn.attention import flex_attention as module

    facts: dict[str, Any] = {"is_causal": False, "scale": float(scale)}
    if score_mod is not module._identity:
        facts["score_mod"] = np.array(getattr(score_mod, "__name__", "score_mod"))
    mask = None
    mask_mod = block_mask[-1]
    if mask_mod is not module.noop_mask:
        batch, heads = block_mask[2].shape[:2]  # kv_num_blocks
        sizes = (batch, heads, query.shape[-2], key.shape[-2])
        mask = module.create_mask(mask_mod, *sizes, device=query.device)
    q, k, v = (rows_first(x) for x in (query, key, value))
    return Call(q, k, v, mask, facts, heads_first=True)


def flash(function: Callable[..., Any]) -> Callable[..., Call]:
    """Makes the reader of a `flash_attn_func`, from flash_attn or flash_attn_interface."""
    signature = inspect.signature(function)

    def read(*args: Any, **kwargs: Any) -> Call:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        q, k, v = (given[name] for name in "qkv")
        is_causal = bool(given.get("causal"))
        scale = _scale(q, given.get("softmax_scale"))
        facts: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
        rows, keys = q.shape[1], k.shape[1]
        left, right = given.get("window_size") or (-1, -1)
        mask = None
        if rows == keys and (left, right) != (-1, -1):
            right = 0 if is_causal else right
            facts["window"] = np.array([keys if x < 0 else x for x in (left, right)])
        elif rows != keys and (is_causal or (left, right) != (-1, -1)):
            mask = _from_the_end(rows, keys, left, 0 if is_causal else right)
            facts["is_causal"] = False
        if given.get("softcap"):
            facts["logits_soft_cap"] = float(given["softcap"])
        for name in ("alibi_slopes", "qv", "attention_chunk"):
            value = given.get(name)
            if value is not None and not (isinstance(value, int | float) and value == 0):
                facts[name] = np.array(value if isinstance(value, int | float) else name)
        if given.get("dropout_p"):
            facts["ignored"] = np.array(["dropout_p"])
        return Call(q, k, v, mask, facts, heads_first=False)

    return read


def rows_first(x: Tensor) -> Tensor:
    """Returns [..., N, T, H] as [B, T, N, H]; without a batch axis, B is 1."""
    return _four(x).flatten(0, -4).transpose(1, 2)


def _four(x: Tensor) -> Tensor:
    """Adds axes of size 1 in front until the tensor has at least four axes."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _from_the_end(rows: int, keys: int, left: int, right: int) -> Tensor:
    """Returns the window's mask [1, 1, T, S] with the last query at the last key.

    A negative `left` or `right` leaves that side open.
    """
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen[None, None]
