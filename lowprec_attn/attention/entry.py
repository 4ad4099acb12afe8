"""The public function: validates a call once and lets the implementations compute its heads."""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import Extras, RandomStream, Request, Spec, planes
from lowprec_attn.attention import validation
from lowprec_attn.attention.dispatch import Call, Part, compute, resolve_by_platform
from lowprec_attn.attention.tap import tapped
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax

_log = logging.getLogger(__name__)


def dot_product_attention(
    query: Float[ArrayLike, "B T N H"],
    key: Float[ArrayLike, "B S K H"] | None = None,
    value: Float[ArrayLike, "B S K V"] | None = None,
    bias: Float[ArrayLike, "#B #N #T #S"] | None = None,
    mask: Bool[ArrayLike, "#B #N #T #S"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logits_soft_cap: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: int | Int[ArrayLike, "#B"] | Literal["end"] = 0,
    query_segment_ids: Int[ArrayLike, "B T"] | None = None,
    key_value_segment_ids: Int[ArrayLike, "B S"] | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup] = FLASH,
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    rng_key: Key[Array, ""] | None = None,
    implementation: str | None = None,
    block_sizes: Hashable = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float32[Array, "B T N"]]:
    """O = softmax(q kᵀ · scale + bias) v, with the roundings of `numerics`.

    Takes the arguments of `jax.nn.dot_product_attention`, by position and by name.

    Differentiable in q, k, v, bias, sinks and a traced scale by a hand-written backward pass whose
    roundings are named in `numerics` too; reverse mode only. Works under `jit`, `vmap` and
    `checkpoint`, and in a `jax.shard_map` of your own (see `within_shard`).

    What is hidden reaches no result, be it NaN or infinity: keys beyond the lengths, of a segment
    without queries or masked for every query; q and gradients of rows that see no key. Gradients
    are 0 there. Of keys that some rows see and others do not (causality, another segment) `dense`
    and `tiled` keep the others free. The kernels do not, within a tile: give the padding of packed
    keys an id that no query has. A row that sees NaN or infinity returns it.

    Second derivatives (`jax.hessian`, `jax.jvp` or `jax.grad` of `jax.grad`) take the derivative of
    every rounding as 1. `tiled` and `dense` have them; name one of the two, because under `jit` the
    choice by platform keeps the kernels, which refuse. `jax.grad` of `jax.grad` takes memory
    quadratic in the length.

    Args:
      query: q [B, T, N, H]; the batch axis may be left out of q, k and v together. Without `key`
        and `value` all three, packed as [B, T, 3, N, H]: so one product forms them, and the GPU
        kernels read that array, and write its gradient, in place.
      key: k [B, S, K, H] of q's dtype; N a multiple of K (grouped-query attention).
      value: v [B, S, K, V], like k; its head size V, which is that of O, may be another, as in
        multi-head latent attention (DeepSeek). `gpu`, `tiled` and `dense` have that.
      bias: added to the scores.
      mask: True where a query may see a key.
      scale: factor of q kᵀ, 1/√H by default. A traced one is multiplied as float32, where a
        number is too; the kernels decline it.
      logits_soft_cap: c, such as the 50 of Gemma 2: scores are c · tanh(scale · q kᵀ / c), formed
        in float32, before a bias is added and a mask hides them; None for no cap. Positive, not
        traced. `hopper`, `gpu`, `tiled` and `dense` have it. `numerics` of `delta='after_cast'` or
        `mean_key='subtracted'` are refused beside it: rows of dS do not sum to zero.
      is_causal: row t sees the keys s <= t + query_offset; not traced.
      query_seq_lengths: valid queries per batch element, from 0 to T. Rows beyond have O = 0
        and lse = −inf, as has every row that sees no key (where a mask, segments or a negative
        query_offset hide all keys, `PublishedMax` gives lse = log(clamp) instead).
      key_value_seq_lengths: valid keys per batch element, from 0 to S.
      local_window_size: (left, right), or one int for both: row t sees the keys
        t − left <= s <= t + right, query_offset added to t; not traced. Tiles outside it are
        skipped.
      query_offset: position among the keys of query 0, for `is_causal` and the window: how many
        keys of a cache are older than the queries. One integer or one per batch element, which may
        be traced, from −2^29 to 2^29. 0 aligns the first query with the first key, as `jax.nn`
        does. `'end'` aligns the last ones: S − T, or the difference of the lengths where they are
        given. The kernels decline any but 0; `tiled` serves it.
      query_segment_ids: of packed sequences: a row sees the keys of its own segment alone. For the
        arithmetic they are a dense mask that is never formed.
      key_value_segment_ids: those of the keys; may be left out where there are as many as queries.
      sinks: a learned score per query head, as of gpt-oss: one more column for each of its rows,
        after scale, soft cap and bias, that no mask hides, without key or value. lse includes it. A
        row that sees no key has lse = the sink, and dlse is the only gradient that it passes on; a
        row beyond `query_seq_lengths` has lse = −inf. −inf is no sink. The gradient is summed in
        float32. `mean_key='subtracted'` is refused beside it. `hopper`, `gpu`, `tiled` and
        `dense` have it.
      numerics: a `Numerics`, or the name of a preset such as `'flash'`, for all heads or one per
        query head; query heads that share a key head must agree. Or `arithmetic.heads.HeadGroup`s,
        which hold the row-max rules as well. Presets name bfloat16, whatever the arrays are: for
        float16 arrays take `FLASH.with_format('float16')`. So in float32 arrays the default,
        `'flash'`, differs from `jax.nn.dot_product_attention` by up to about 8e-3 of entries of
        order 1; `'exact'` rounds nothing.
      row_max: a row-max rule, or the name of one such as `'dynamic_max'`, likewise.
      rng_key: PRNG key, needed if a point rounds stochastically. The bits depend on the key and on
        batch element, head, row and column alone (elements of a `vmap` over one key share them).
      implementation: `'hopper'`, `'gpu'`, `'tpu'` (Pallas kernels), `'tiled'`, `'dense'`, or None
        for the fastest of them that supports the request on the platform that the call is lowered
        for.
      block_sizes: tile sizes of that implementation, such as `tiled.BlockSizes`; never changes
        what is rounded where.
      return_residual: also return lse = log rowsum exp(scores), float32 [B, T, N].

    Returns:
      O in q's dtype (in float32 where q's dtype cannot hold the format of `numerics.output`), or
      (O, lse).

    Raises:
      ValueError: wrong shapes, dtypes or options, or an array is split over an explicit mesh axis;
        the message names the value.
      UnsupportedError: the implementation asked for cannot serve the request; the message names
        what, and the implementations that can. A NotImplementedError.
      NotImplementedError: the second derivative of a kernel.
      TypeError: forward-mode differentiation (`jax.jvp`) of the call itself.

    Example:
      >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 8, 2, 32), jnp.bfloat16)
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (1, 8, 2, 32)
    """
    given = locals()  # the arguments, as long as nothing else has a name
    options = Options(*(given[name] for name in Options._fields))
    call, unbatched = prepare((query, key, value, bias, mask), options)
    validation.unsharded(call.arrays, implementation)
    out, lse = compute(call)
    out = tapped(call, out)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


class Options(NamedTuple):
    """The arguments of `dot_product_attention` that a call may leave out, as the caller gave them.

    Its fields are named as they are, and have their defaults.
    """

    scale: Any = None
    logits_soft_cap: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    query_offset: Any = 0
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    sinks: Any = None
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup] = FLASH
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax()
    rng_key: Key[Array, ""] | None = None
    implementation: str | None = None
    block_sizes: Hashable = None


def prepare(arrays: tuple[Any, Any, Any, Any, Any], options: Options) -> tuple[Call, bool]:
    """Validates a call once and decides who computes which heads.

    Args:
      arrays: query, key, value, bias and mask.
      options: the other arguments.

    Returns:
      The call, and whether its arrays came without a batch axis.
    """
    operands, unbatched = validation.batched(*arrays[:3])
    q, k, v = jax.eval_shape(planes, *operands)  # no more is asked of them here
    validation.check_inputs(q, k, v, names=("query", "key", "value"), any_value_size=True)
    if options.numerics is FLASH and q.dtype == jnp.float32:
        _log_default_in_float32()
    extras, spec = _validated(arrays[3:], options, q, k, unbatched)
    parts = []
    for group in validation.head_groups(options.numerics, options.row_max, q.shape[2], k.shape[2]):
        validation.check_shift(group.numerics, group.row_max)
        validation.check_bits((group.numerics,), options.rng_key)
        part = spec(numerics=group.numerics, row_max=group.row_max)
        request = Request.of(q, k, extras, part, v)
        implementations = resolve_by_platform(request, options.implementation)
        parts.append(Part(group.heads, part, implementations))
    return Call(operands, extras, tuple(parts)), unbatched


def _validated(
    pairs: tuple[Any, Any], options: Options, q: Array, k: Array, unbatched: bool
) -> tuple[Extras, Callable[..., Spec]]:
    """The optional arrays of a call, and its `Spec` but for the arithmetic.

    pairs: bias and mask.
    """
    bias, mask = pairs
    segments = [options.query_segment_ids, options.key_value_segment_ids]
    if unbatched:
        bias, mask = (x if x is None or jnp.ndim(x) != 3 else x[None] for x in pairs)
        segments = [
            x if x is None or np.ndim(x) != 1 else (x if hasattr(x, "shape") else np.array(x))[None]
            for x in segments
        ]
    batch, rows, heads, head_size = q.shape
    keys = k.shape[1]
    lengths = (
        validation.lengths("query_seq_lengths", options.query_seq_lengths, batch, rows),
        validation.lengths("key_value_seq_lengths", options.key_value_seq_lengths, batch, keys),
    )
    is_causal = validation.causal(options.is_causal)
    offset = validation.query_offset(options.query_offset, q, k, *lengths)
    if not is_causal and options.local_window_size is None:
        offset = None  # positions do not matter
    extras = Extras(
        validation.pairs("bias", bias, q, k),
        validation.pairs("mask", mask, q, k),
        *lengths,
        None if options.rng_key is None else RandomStream.of(options.rng_key, batch, heads),
        validation.traced_scale(options.scale),
        *validation.segments(segments[0], segments[1], (batch, rows), (batch, keys)),
        offset,
        validation.sinks(options.sinks, heads),
    )
    window = options.local_window_size
    scale = 1.0 if extras.scale is not None else validation.scale(options.scale, head_size)
    spec = functools.partial(
        Spec,
        scale=scale,
        soft_cap=validation.soft_cap(options.logits_soft_cap, scale),
        is_causal=is_causal,
        window=validation.window(window, rows, keys, offset=offset is not None),
        block_sizes=options.block_sizes,
    )
    return extras, spec


@functools.cache
def _log_default_in_float32() -> None:
    """Once per process."""
    _log.warning(
        "attention: float32 arrays with numerics 'flash', the default: probabilities, output and "
        "gradients are rounded to bfloat16, up to about 8e-3 from jax.nn; numerics='exact' rounds "
        "nothing"
    )
