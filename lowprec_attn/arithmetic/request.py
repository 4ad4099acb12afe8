"""The interface of an implementation of attention: what it receives, and how it declines.

An implementation is a module with the first four of these functions, and may have the last three:

  attention(q, k, v, extras, spec) -> (out, lse)     has its own `custom_vjp`; with
                                                     `Spec.max_logit` a third array, [B, T, N]
  unsupported(request) -> str | None                 names a feature that it cannot serve
  keys_per_step(request) -> int                      keys of one step of its softmax
  exponent_of(request) -> str                        how it forms exponents, see `Numerics`
  packed_attention(qkv, extras, spec) -> (out, lse)  reads q, k and v from one array
                                                     [B, T, 3, N, H], and writes their gradients
                                                     into one array of this shape
  faster_elsewhere(request) -> (name, what) | None   a faster implementation, and the feature of
                                                     the request with which it is faster

An implementation without `packed_attention` receives the three planes of a packed array. The
implementation that `faster_elsewhere` names is chosen instead if it serves the request and the
caller has named none.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, UInt32

from lowprec_attn.arithmetic.transforms import checks_varying_types
from lowprec_attn.numerics import Numerics, RowMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The static part of a call: the arithmetic, the mask and the tile sizes.

    Attributes:
      numerics, row_max: the arithmetic.
      scale: factor of q kᵀ; 1 if `Extras.scale` is the factor.
      is_causal: whether row t sees only the keys s <= t + `Extras.query_offset`.
      soft_cap: the c of S = c · tanh(scale · q kᵀ / c); None for no cap.
      window: (left, right), if a row at position t (including `query_offset`) sees only the keys
        t − left <= s <= t + right; None for no window.
      block_sizes: the implementation's own record of tile sizes; None for its default. It never
        changes what is rounded where.
      max_logit: whether the largest score of every row is returned as well, see `max_logit`.
      shares_segments: whether queries and keys have the same array of segments, so that a row has
        the segment of the key with the same index.
    """

    numerics: Numerics
    row_max: RowMax
    scale: float
    soft_cap: float | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None
    block_sizes: Hashable = None
    max_logit: bool = False
    shares_segments: bool = False

    @property
    def scale_is_power_of_two(self) -> bool:
        """Whether multiplying by the scale commutes with rounding."""
        return math.frexp(self.scale)[0] == 0.5


class RandomStream(NamedTuple):
    """The source of the random bits of stochastic rounding.

    Attributes:
      seed: two words drawn from a PRNG key.
      batch, head: global index of each batch element [B] and query head [N] of this call. Because
        these indices are global, the bits depend neither on sharding nor on the grouping of heads
        into calls.
    """

    seed: UInt32[Array, "2"]
    batch: Int32[Array, "B"]
    head: Int32[Array, "N"]

    @classmethod
    def of(cls, key: Key[Array, ""], batch: int, heads: int) -> "RandomStream":
        """Returns the stream of a PRNG key of any kind, for a whole call."""
        return cls(
            jax.random.bits(key, (2,), jnp.uint32),
            jnp.arange(batch, dtype=jnp.int32),
            jnp.arange(heads, dtype=jnp.int32),
        )


class BackwardSums(NamedTuple):
    """Sums over the keys of each row in the backward pass, float32 [B, T, N].

    A call takes zeros. The gradients with respect to these zeros are the sums, whatever the loss
    is. If several calls take the same zeros, their sums add up.

    Attributes:
      p: Σ P, where P is recomputed by the backward pass and unrounded. In exact arithmetic it is 1,
        less the P of a sink, and 0 in a row that sees no key.
      ds: Σ dS · scale, where dS · scale is the operand of dQ: rounded at `ds`, corrected as `delta`
        says, and taken behind a soft cap. In exact arithmetic it is scale · dlse · Σ P, plus
        scale · P_sink · δ with sinks. With a soft cap it can have any value.
    """

    p: Float32[Array, "B T N"]
    ds: Float32[Array, "B T N"]

    @classmethod
    def zeros(cls, query: Any) -> "BackwardSums":
        """Returns the zeros for a call with these queries: float32 [B, T, N] for each sum.

        Args:
          query: an array of the shape of q, [B, T, N, H]. Only its shape is read. For a packed
            array [B, T, 3, N, H] pass its part of q.
        """
        zeros = jnp.zeros(jnp.shape(query)[:-1], jnp.float32)
        return cls(zeros, zeros)


# An array of which only the shape and dtype are used.
Shaped = Array | jax.ShapeDtypeStruct


class Extras(NamedTuple):
    """The optional arrays of a call; None where absent.

    Attributes:
      bias: added to q kᵀ · scale.
      mask: True where a query may see a key.
      query_lengths, key_lengths: number of valid positions per batch element.
      stream: source of random bits, which only stochastic points need.
      scale: traced factor of q kᵀ, which is not known before the call runs.
      query_segments, key_segments: segment ids; a row sees only keys of its own segment. Both are
        given, or neither.
      query_offset: position of row 0 among the keys, for causality and the window; None for 0.
      sinks: scores of one more column for every row of a head, without a key and with v = 0.
      backward_sums: zeros whose gradients are the sums of the backward pass.
    """

    bias: Float[Array, "#B #N T S"] | None = None
    mask: Bool[Array, "#B #N T S"] | None = None
    query_lengths: Int32[Array, "B"] | None = None
    key_lengths: Int32[Array, "B"] | None = None
    stream: RandomStream | None = None
    scale: Float32[Array, ""] | None = None
    query_segments: Int32[Array, "B T"] | None = None
    key_segments: Int32[Array, "B S"] | None = None
    query_offset: Int32[Array, "B"] | None = None
    sinks: Float[Array, "N"] | None = None
    backward_sums: BackwardSums | None = None


def planes(*arrays: Array) -> tuple[Array, Array, Array]:
    """Returns q, k and v, which are given as three arrays or packed as [B, T, 3, N, H]."""
    if len(arrays) == 1:
        packed = arrays[0]
        return packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    q, k, v = arrays
    return q, k, v


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The properties of a call by which `unsupported(request)` decides whether it can be served.

    Attributes:
      spec: the static part of the call.
      q_shape, kv_shape: shapes of q and k.
      dtype: dtype of q.
      mask_shape: shape of the mask; None without one.
      value_size: head size of the values; None if it is the head size of q.
      checks_vma: whether the call is traced under a `jax.shard_map` with `check_vma=True`.
      platform: the platform that the call is lowered for, such as `cuda`; None for the platform of
        this process's devices.
    """

    spec: Spec
    q_shape: tuple[Any, ...]  # int, or symbolic in `jax.export`
    kv_shape: tuple[Any, ...]
    dtype: np.dtype
    has_bias: bool = False
    mask_shape: tuple[Any, ...] | None = None
    has_lengths: bool = False
    has_segments: bool = False
    has_traced_scale: bool = False
    has_query_offset: bool = False
    has_sinks: bool = False
    has_backward_sums: bool = False
    value_size: int | None = None
    checks_vma: bool = False
    platform: str | None = None

    @classmethod
    def of(
        cls, q: Shaped, k: Shaped, extras: Extras, spec: Spec, v: Shaped | None = None
    ) -> "Request":
        """The request that a call with these arrays makes."""
        return cls(
            spec=spec,
            q_shape=q.shape,
            kv_shape=k.shape,
            dtype=jnp.dtype(q.dtype),
            has_bias=extras.bias is not None,
            mask_shape=None if extras.mask is None else extras.mask.shape,
            has_lengths=extras.query_lengths is not None or extras.key_lengths is not None,
            has_segments=extras.query_segments is not None,
            has_traced_scale=extras.scale is not None,
            has_query_offset=extras.query_offset is not None,
            has_sinks=extras.sinks is not None,
            has_backward_sums=extras.backward_sums is not None,
            value_size=None if v is None else v.shape[-1],
            checks_vma=checks_varying_types(),
        )


def unsupported_symbolic_batch(request: Request) -> str | None:
    """Names a symbolic batch of `jax.export`, on which no kernel for GPUs can depend, or None."""
    if isinstance(request.q_shape[0], int):
        return None
    return "a symbolic batch (its kernels are compiled for one number of programs)"


# The head sizes that the kernels serve.
HEAD_SIZES = range(16, 257)


def unsupported_in_tiles(request: Request, block_sizes: type) -> str | None:
    """Names a feature of the request that no implementation in tiles can serve, or None.

    Args:
      request: the request.
      block_sizes: the class of the implementation's record of tile sizes.
    """
    given = request.spec.block_sizes
    if given is not None and not isinstance(given, block_sizes):
        taken = f"{block_sizes.__module__}.{block_sizes.__qualname__}"
        return f"block_sizes of type {type(given).__name__} (it takes {taken})"
    if request.spec.numerics.normalize_probs:
        return "normalize_probs (P is normalised before rounding, which needs whole rows)"
    return unsupported_row_sums(request)


def unsupported_row_sums(request: Request) -> str | None:
    """Names a choice that needs rows of dS to sum to zero in a request where they do not, or None.

    No implementation serves such a request. With a soft cap, rows of dS sum to zero before they are
    multiplied by its derivative, and to something else afterwards. `delta='after_cast'` and
    `mean_key='subtracted'` assume that they sum to zero afterwards.
    """
    numerics, cap = request.spec.numerics, request.spec.soft_cap
    if cap is not None:
        for name, choice in (("delta", "after_cast"), ("mean_key", "subtracted")):
            if getattr(numerics, name) == choice:
                return f"{name}={choice} with logits_soft_cap={cap} (rows of dS do not sum to zero)"
    return _unsupported_mean_key(request)


def unsupported_variants(request: Request) -> str | None:
    """Names the first extra feature of the request that a basic implementation lacks, or None.

    The features are sums of the backward pass, a soft cap, values of another head size, and sinks.
    """
    if request.has_backward_sums:
        return "backward_sums"
    if (cap := request.spec.soft_cap) is not None:
        return f"logits_soft_cap={cap}"
    if request.value_size not in (None, request.q_shape[-1]):
        return f"values of head size {request.value_size} with queries of {request.q_shape[-1]}"
    return "sinks" if request.has_sinks else None


def _unsupported_mean_key(request: Request) -> str | None:
    """Names the features that `mean_key='subtracted'` cannot be combined with, or None.

    Most of them can hide a key from all rows, or all keys from a row. A hidden key would enter the
    mean, whatever it holds. With sinks, rows of dS do not sum to zero.
    """
    hidden = {
        "a bias": request.has_bias,
        "sinks": request.has_sinks,
        "a mask": request.mask_shape is not None,
        "lengths": request.has_lengths,
        "segments": request.has_segments,
        "query_offset": request.has_query_offset,
        "a local window": request.spec.window is not None,
        "causality of unequal lengths": request.spec.is_causal
        and request.q_shape[1] != request.kv_shape[1],
    }
    given = [name for name, is_given in hidden.items() if is_given]
    if request.spec.numerics.mean_key == "kept" or not given:
        return None
    return f"mean_key=subtracted with {', '.join(given)} (all keys enter the mean)"


def unsupported_by_kernels(request: Request) -> str | None:
    """Names a feature of the request that no Pallas kernel can serve, or None."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # set at run time
        return "jax_enable_x64=True (its kernels count in int32)"
    if request.has_traced_scale:
        return "a traced scale (its kernels are compiled for one; pass a Python number)"
    if request.checks_vma:
        return (
            "jax.shard_map with check_vma=True "
            "(pass check_vma=False to it, and call attention.within_shard inside)"
        )
    if request.has_bias:
        return "a dense bias"
    if request.has_query_offset:
        return "query_offset other than 0 with is_causal=True or a local window"
    if not isinstance(request.q_shape[1] + request.kv_shape[1], int):
        return "symbolic lengths"
    for size in (request.q_shape[-1], request.value_size):
        if size is not None and size not in HEAD_SIZES:
            return f"head size {size} (it takes {HEAD_SIZES[0]} to {HEAD_SIZES[-1]})"
    return None
