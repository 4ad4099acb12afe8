"""The oracle: dense attention in float64 NumPy, with both passes written out and no rounding.

The legend of all letters in this library (axes B T S N H as in `jax.nn.dot_product_attention`):

  q k v        queries [B, T, N, H], keys [B, S, K, H] and values [B, S, K, V]; N / K query heads
               per key head; V equals H unless stated otherwise
  s  (S)       scores q kᵀ · scale + bias, or                 [B, N, T, S]
               c tanh(q kᵀ · scale / c) + bias with a soft cap c
  m            the number that the softmax subtracts from a row of S: the row maximum, or the value
               that a row-max rule derives from it
  P̄            exp(S − m), the probabilities before division
  l            row sum of P̄
  acc (Ō)      P̄ v, the output before division
  p  (P)       P̄ / l = exp(S − lse), the probabilities
  o  (O)       Ō / l                                          [B, T, N, V]
  lse          m + log l                                      [B, T, N]
  do dp ds     gradients of the loss with respect to O, P and S
  delta (δ)    rowsum(dO ∘ O) = rowsum(dP ∘ P)                [B, T, N]
  dq dk dv     gradients of the loss with respect to q, k and v
"""

import dataclasses

import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Float64, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Which keys a row sees, the bias added to its scores, and their sinks; see `attention`."""

    is_causal: bool = False
    window: tuple[int, int] | None = None
    mask: Bool[np.ndarray, "..."] | None = None
    bias: Float[np.ndarray, "..."] | None = None
    query_lengths: Int[np.ndarray, "B"] | None = None
    key_lengths: Int[np.ndarray, "B"] | None = None
    query_segments: Int[np.ndarray, "B T"] | None = None
    key_segments: Int[np.ndarray, "B S"] | None = None
    query_offset: int | Int[np.ndarray, "B"] = 0
    sinks: Float[np.ndarray, "N"] | None = None


@dataclasses.dataclass(frozen=True)
class Forward:
    """All that the forward pass computes, in float64; scores of unseen keys are −inf."""

    s: Float64[np.ndarray, "B N T S"]
    p: Float64[np.ndarray, "B N T S"]
    o: Float64[np.ndarray, "B T N V"]
    lse: Float64[np.ndarray, "B T N"]

    @property
    def max_logit(self) -> Float64[np.ndarray, "B N"]:
        """The largest score of every head; −inf where no row sees a key."""
        return self.s.max(axis=(2, 3))


@dataclasses.dataclass(frozen=True)
class Backward:
    """The gradients, their intermediates dP, δ and dS, and the forward pass; all float64."""

    dq: Float64[np.ndarray, "B T N H"]
    dk: Float64[np.ndarray, "B S K H"]
    dv: Float64[np.ndarray, "B S K V"]
    dp: Float64[np.ndarray, "B N T S"]
    delta: Float64[np.ndarray, "B T N"]
    ds: Float64[np.ndarray, "B N T S"]
    dsinks: Float64[np.ndarray, "N"]
    forward: Forward


def attention(
    q: Float[ArrayLike, "B T N H"],
    k: Float[ArrayLike, "B S K H"],
    v: Float[ArrayLike, "B S K V"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    masking: Masking | None = None,
) -> Forward:
    """Computes O = softmax(q kᵀ · scale + bias) v in float64.

    A row that sees no key has O = 0. Its lse is its sink, or −inf without a sink or beyond the
    query lengths.

    Args:
      q, k, v: arrays of any float dtype.
      scale: factor of q kᵀ, 1/√H by default.
      soft_cap: the c of c tanh(q kᵀ · scale / c), which replaces q kᵀ · scale; None for no cap.
      masking: which keys each row sees (all by default), the bias and the sinks.
    """
    q, k, v = _float64(q), _float64(k), _float64(v)
    k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    masking = masking or Masking()
    s = pairs(q, k) * scale
    if soft_cap is not None:
        s = soft_cap * np.tanh(s / soft_cap)
    if masking.bias is not None:
        s = s + np.asarray(masking.bias).astype(np.float64)
    s = np.where(_visible(masking, s.shape), s, -np.inf)
    sink = _sink_column(masking, s.shape)
    m = np.maximum(np.max(s, axis=-1, keepdims=True), sink)
    m = np.where(m == -np.inf, 0.0, m)
    p_bar = np.exp(s - m)
    l = np.sum(p_bar, axis=-1, keepdims=True) + np.exp(sink - m)
    with np.errstate(divide="ignore"):
        lse = m + np.log(l)
    p = p_bar / np.where(l == 0, 1.0, l)
    o = over_keys(p, v)
    return Forward(s, p, o, lse[..., 0].transpose(0, 2, 1))


def backward(
    q: Float[ArrayLike, "B T N H"],
    k: Float[ArrayLike, "B S K H"],
    v: Float[ArrayLike, "B S K V"],
    do: Float[ArrayLike, "B T N V"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    masking: Masking | None = None,
    dlse: Float[ArrayLike, "B T N"] | None = None,
) -> Backward:
    """Computes the gradients of sum(dO ∘ O) with respect to q, k, v and the sinks in float64.

    dV = Pᵀ dO, dP = dO vᵀ, δ = rowsum(dP ∘ P), dS = P ∘ (dP − δ), dQ = dS k · scale and
    dK = dSᵀ q · scale. dV and dK are summed over the query heads of a key head. dS is also the
    gradient of the bias. With a soft cap, dQ and dK use dS times the derivative of the cap,
    1 − tanh²(q kᵀ · scale / c). The gradient of a sink is −Σ exp(sink − lse) δ over the rows of its
    head. With `dlse` the loss also contains sum(dlse ∘ lse), so δ − dlse replaces δ in all of these
    formulas.
    """
    q, k, v, do = _float64(q), _float64(k), _float64(v), _float64(do)
    kv_heads = k.shape[2]
    forward = attention(q, k, v, scale=scale, soft_cap=soft_cap, masking=masking)
    p = forward.p
    k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dv = over_rows(p, do)
    dp = pairs(do, v)
    delta = np.sum(dp * p, axis=-1, keepdims=True)
    of_lse = 0.0 if dlse is None else _float64(dlse).transpose(0, 2, 1)[..., None]
    ds = p * (dp - delta + of_lse)
    dx = ds
    if soft_cap is not None:
        dx = ds * (1 - np.tanh(pairs(q, k) * scale / soft_cap) ** 2)
    dq = over_keys(dx, k) * scale
    dk = over_rows(dx, q) * scale
    dk, dv = _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)
    less = (delta - of_lse)[..., 0].transpose(0, 2, 1)
    dsinks = -np.sum(sink_probabilities(forward, masking or Masking()) * less, axis=(0, 1))
    delta = delta[..., 0].transpose(0, 2, 1)
    return Backward(dq, dk, dv, dp, delta, ds, dsinks, forward)


def sink_probabilities(forward: Forward, masking: Masking) -> Float64[np.ndarray, "B T N"]:
    """P_sink = exp(sink − lse), the weight that a row gives to its sink; 0 without a sink."""
    b, n, t, s = forward.s.shape
    sink = _sink_column(masking, (b, n, t, s))[..., 0].transpose(0, 2, 1)
    exists = sink > -np.inf
    return np.where(exists, np.exp(sink - np.where(exists, forward.lse, 0.0)), 0.0)


def pairs(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The product q kᵀ [B, N, T, S] of q [B, T, N, H] and k [B, S, N, H]."""
    return _product(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1))


def over_keys(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The product p v [B, T, N, H] of p [B, N, T, S] and v [B, S, N, H], summed over keys."""
    return _product(p, v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def over_rows(p: np.ndarray, do: np.ndarray) -> np.ndarray:
    """The product pᵀ do [B, S, N, H] of p [B, N, T, S] and do [B, T, N, H], summed over rows."""
    return over_keys(p.swapaxes(2, 3), do)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # `np.matmul` uses BLAS; `np.einsum` would not, and takes ten times as long.
    with np.errstate(invalid="ignore"):
        return np.matmul(a, b)


def _float64(x: ArrayLike) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sink_column(masking: Masking, shape: tuple[int, ...]) -> np.ndarray:
    """The sinks as a column of scores [B, N, T, 1]; −inf without sinks and beyond the lengths."""
    b, n, t, _ = shape
    if masking.sinks is None:
        return np.full((b, n, t, 1), -np.inf)
    sink = np.broadcast_to(_float64(masking.sinks)[:, None, None], (b, n, t, 1))
    if masking.query_lengths is None:
        return sink
    exists = np.arange(t)[:, None] < np.asarray(masking.query_lengths)[:, None, None, None]
    return np.where(exists, sink, -np.inf)


def _visible(masking: Masking, shape: tuple[int, ...]) -> np.ndarray:
    b, _, t, s = shape
    seen = np.ones((b, 1, t, s), bool)
    rows, cols = np.arange(t)[:, None], np.arange(s)[None]
    at = rows + np.reshape(masking.query_offset, (-1, 1, 1, 1))
    if masking.is_causal:
        seen = seen & (cols <= at)
    if masking.window is not None:
        left, right = masking.window
        seen = seen & (at - left <= cols) & (cols <= at + right)
    if masking.query_lengths is not None:
        seen = seen & (rows < np.asarray(masking.query_lengths)[:, None, None, None])
    if masking.key_lengths is not None:
        seen = seen & (cols < np.asarray(masking.key_lengths)[:, None, None, None])
    if masking.query_segments is not None and masking.key_segments is not None:
        of_rows, of_keys = masking.query_segments, masking.key_segments
        seen = seen & (of_rows[:, None, :, None] == of_keys[:, None, None])
    return seen if masking.mask is None else seen & np.asarray(masking.mask, bool)


def _repeat_heads(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x, heads // x.shape[2], axis=2)


def _sum_groups(x: np.ndarray, kv_heads: int) -> np.ndarray:
    b, s, n, h = x.shape
    return x.reshape(b, s, kv_heads, n // kv_heads, h).sum(axis=3)
