"""The public function: validates a call once and lets the implementations compute its heads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import (
    BackwardSums,
    Extras,
    RandomStream,
    Request,
    Spec,
    planes,
)
from lowprec_attn.attention import validation
from lowprec_attn.attention.dispatch import Call, Part, compute, resolve_by_platform
from lowprec_attn.attention.tap import tapped
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax

_log = logging.getLogger(__name__)


# A lone axis name starts with a space, because linters would read it as the name of a type.
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
    query_seq_lengths: Int[ArrayLike, " B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: int | Int[ArrayLike, "#B"] | Literal["end"] = 0,
    query_segment_ids: Int[ArrayLike, "B T"] | None = None,
    key_value_segment_ids: Int[ArrayLike, "B S"] | None = None,
    sinks: Float[ArrayLike, " N"] | None = None,
    backward_sums: BackwardSums | None = None,
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup] = FLASH,
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax(),  # noqa: B008 (frozen)
    rng_key: Key[Array, ""] | None = None,
    implementation: str | None = None,
    block_sizes: Hashable = None,
    return_residual: bool = False,
    return_max_logit: bool = False,
) -> Float[Array, "B T N V"] | tuple[Array, ...]:
    """Computes O = softmax(q kᵀ · scale + bias) v, with the roundings of `numerics`.

    It takes the arguments of `jax.nn.dot_product_attention`, by position and by name. Both passes
    follow FlashAttention-2 (Dao, arXiv 2307.08691, Algorithms 1 and 2); `numerics.record` has the
    equations with every rounding. B is the batch, T and S are the numbers of queries and keys, N
    and K are the numbers of query heads and key heads, and H is the head size.

    The function is differentiable in q, k, v, bias, sinks and a traced scale, in reverse mode.
    `numerics` names the roundings of its hand-written backward pass too. It works under `jit`,
    `vmap` and `checkpoint`, and in your own `jax.shard_map` (see `within_shard`).

    **Hidden values.** A NaN or infinity reaches no result and has the gradient 0 if it is in a key
    that no query sees, or in the query or gradient of a row that sees no key. If only some rows see
    the key (because of causality or segments), `dense` and `tiled` protect the other rows. The
    kernels do not protect rows of the same tile, so give the padding of packed keys a segment id
    that no query has. A row that sees NaN or infinity returns it. The kernels return NaN for an
    infinity, and for float32 numbers above 3.39e38, where an operand of a product is float32.

    **Second derivatives** (`jax.hessian`, `jax.jvp`, `jax.grad` of `jax.grad`) take the derivative
    of every rounding as 1. Name `tiled` or `dense` for them, because the kernels refuse. `jax.grad`
    of `jax.grad` takes memory quadratic in the length.

    Args:
      query: q [B, T, N, H]. You may leave out the batch axis of q, k and v together. Without `key`
        and `value`, `query` holds q, k and v packed as [B, T, 3, N, H]. The GPU kernels read the
        packed array directly and write its gradient in the same layout.
      key: k [B, S, K, H] of q's dtype. N is a multiple of K (grouped-query attention).
      value: v [B, S, K, V] of q's dtype. The head size V, which O shares, may differ from H, as in
        multi-head latent attention (DeepSeek). `gpu`, `tiled` and `dense` serve V ≠ H; `hopper`
        serves V = 128 with H = 192 and 64 with 128.
      bias: added to the scores, [B, N, T, S]. Each axis may be 1.
      mask: True if a query may see a key, boolean [B, N, T, S]. Each axis may be 1.
      scale: factor of q kᵀ, by default 1/√H. It is applied in float32. The kernels decline a traced
        scale.
      logits_soft_cap: the cap c > 0 (Gemma 2 uses 50), or None for no cap; not traced. Scores are
        c · tanh(scale · q kᵀ / c) in float32, before the bias and the mask. `hopper`, `gpu`,
        `tiled` and `dense` serve it. It excludes `delta='after_cast'` and `mean_key='subtracted'`
        in `numerics`, because rows of dS no longer sum to zero.
      is_causal: row t sees the keys s <= t + query_offset; not traced.
      query_seq_lengths: number of valid queries per batch element, [B], from 0 to T. A row beyond
        it, like any row that sees no key, has O = 0 and lse = −inf. (`PublishedMax` gives
        lse = log(clamp) if a mask, segments or a negative query_offset hide all keys.)
      key_value_seq_lengths: number of valid keys per batch element, [B], from 0 to S.
      local_window_size: (left, right), or one int for both; not traced. Row t sees the keys
        t + query_offset − left <= s <= t + query_offset + right. Tiles outside the window are
        skipped.
      query_offset: position of query 0 among the keys, for `is_causal` and the window: the number
        of keys in a cache that are older than the queries. One integer or one per batch element,
        from −2^29 to 2^29; it may be traced. 0 aligns the first query with the first key, as
        `jax.nn` does. `'end'` aligns the last query with the last key: the offset is S − T, or the
        difference of the lengths if they are given. The kernels serve only 0; `tiled` and `dense`
        serve any offset.
      query_segment_ids: integer ids of packed sequences, [B, T]. A row sees only keys of its own
        segment. Results equal those of the corresponding dense mask, which is never formed.
      key_value_segment_ids: ids of the keys, [B, S]; by default the ids of the queries, if T = S.
      sinks: one learned score per query head, [N], as in gpt-oss. It is one more score in each row,
        without a key or value. It is added after scale, soft cap and bias, and no mask hides it.
        lse includes it. A row that sees no key has lse = the sink, and passes on only the gradient
        dlse. A row beyond `query_seq_lengths` has lse = −inf. A sink of −inf has no effect. The
        gradient is summed in float32. `hopper`, `gpu`, `tiled` and `dense` serve it. It excludes
        `mean_key='subtracted'`.
      backward_sums: `BackwardSums.zeros(query)`. Its gradients are the row sums of P and dS in the
        backward pass. `gpu`, `tiled` and `dense` serve it.
      numerics: a `Numerics`, or the name of a preset such as `'flash'`, for all heads, or one per
        query head. Query heads that share a key head must agree. It may also be a sequence of
        `arithmetic.heads.HeadGroup`, which hold the row-max rules as well. Presets round to
        bfloat16 whatever the dtype of the arrays: with float32 arrays `'flash'` differs from
        `jax.nn.dot_product_attention` by up to about 8e-3 for entries of order 1, and `'exact'`
        rounds nothing. For float16 arrays use `FLASH.with_format('float16')`.
      row_max: a row-max rule, or the name of one such as `'dynamic_max'`, for all heads, or one per
        query head.
      rng_key: PRNG key, needed if a point rounds stochastically. The random bits depend only on the
        key, batch element, head, row and column. Elements of a `vmap` over one key share them.
      implementation: `'hopper'`, `'gpu'`, `'tpu'` (Pallas kernels), `'tiled'` or `'dense'`. None
        selects the fastest one that serves the request on the platform for which the call is
        lowered.
      block_sizes: tile sizes of that implementation, such as `tiled.BlockSizes`. They never change
        what is rounded where.
      return_residual: whether to return lse = log rowsum exp(scores) as well, float32 [B, T, N]. As
        one float32 number it loses log l at scores near ± 1e6: exp(scores − lse) then sums to any
        value up to the number of keys. `Numerics.statistics` says which presets read it.
      return_max_logit: whether to return the largest score of every head as well, float32 [B, N].
        It is signed, and taken after scale, soft cap, bias and mask but before the sinks, as Kimi
        K2's QK-clip needs it. It is −inf if no row of the head sees a key. It has no gradient. If
        you split rows or keys over a mesh axis, reduce it with `jax.lax.pmax` over that axis.

    Returns:
      O, or the tuple (O, lse), (O, max_logit) or (O, lse, max_logit) if more is asked for. O has
      q's dtype, or float32 if q's dtype cannot hold the format of `numerics.output`.

    Raises:
      ValueError: a shape, dtype or option is wrong, or an array is split over an explicit mesh
        axis. The message names the value.
      UnsupportedError: the named implementation cannot serve the request. The message names the
        reason and the implementations that can. The error is a NotImplementedError.
      NotImplementedError: a kernel is differentiated twice.
      TypeError: the call itself is differentiated in forward mode (`jax.jvp`).

    Example:
      >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 8, 2, 32), jnp.bfloat16)
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (1, 8, 2, 32)
    """
    given = locals()  # must come first, while the arguments are the only local names
    options = Options(*(given[name] for name in Options._fields))
    call, unbatched = prepare((query, key, value, bias, mask), options)
    validation.unsharded(call.arrays, implementation)
    out, *others = compute(call)
    results = tapped(call, out), *others
    if unbatched:
        results = tuple(x[0] for x in results)
    return returned(results, return_residual=return_residual)


def returned(results: tuple[Array, ...], *, return_residual: bool) -> Array | tuple[Array, ...]:
    """Returns O alone, or a tuple of O, lse if asked for, and the max logits if `results` has them.

    Args:
      results: O, lse and, if the call asked for them, the max logits.
      return_residual: whether lse is returned.
    """
    out, lse, *max_logit = results
    residual = (lse,) if return_residual else ()
    return (out, *residual, *max_logit) if residual or max_logit else out


class Options(NamedTuple):
    """The optional arguments of `dot_product_attention`, as the caller gave them.

    The fields have the names and the defaults of these arguments. Bias, mask and `return_residual`
    are not among them.
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
    backward_sums: BackwardSums | None = None
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup] = FLASH
    row_max: RowMax | str | Sequence[RowMax | str] = StandardMax()
    rng_key: Key[Array, ""] | None = None
    implementation: str | None = None
    block_sizes: Hashable = None
    return_max_logit: bool = False


def prepare(arrays: tuple[Any, Any, Any, Any, Any], options: Options) -> tuple[Call, bool]:
    """Validates a call once and decides which implementation computes which heads.

    Args:
      arrays: query, key, value, bias and mask.
      options: the other arguments.

    Returns:
      The call, and whether its arrays came without a batch axis.
    """
    operands, unbatched = validation.batched(*arrays[:3])
    q, k, v = jax.eval_shape(planes, *operands)  # validation needs only shapes and dtypes
    validation.check_inputs(q, k, v, names=("query", "key", "value"))
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
        parts.append(Part(group.heads, part, tuple(implementations.items())))
    return Call(operands, extras, tuple(parts)), unbatched


def _validated(
    pairs: tuple[Any, Any], options: Options, q: Array, k: Array, unbatched: bool
) -> tuple[Extras, Callable[..., Spec]]:
    """Returns the optional arrays of a call, and a constructor of its `Spec`.

    The constructor still needs the arithmetic: `numerics` and `row_max`.

    Args:
      pairs: bias and mask.
      options: the other optional arguments.
      q, k: the shapes and dtypes of the queries and keys, with a batch axis.
      unbatched: whether the caller's arrays came without a batch axis.
    """
    bias, mask = pairs
    segments = [options.query_segment_ids, options.key_value_segment_ids]
    if unbatched:
        bias, mask = (None if x is None else jnp.asarray(x) for x in pairs)
        bias, mask = (x if x is None or x.ndim != 3 else x[None] for x in (bias, mask))
        segments = [None if x is None else validation.ids_as_given(x) for x in segments]
        segments = [x if x is None or x.ndim != 1 else x[None] for x in segments]
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
        validation.backward_sums(options.backward_sums, (batch, rows, heads)[int(unbatched) :]),
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
        max_logit=options.return_max_logit,
        shares_segments=options.query_segment_ids is not None
        and (
            options.key_value_segment_ids is None
            or options.key_value_segment_ids is options.query_segment_ids
        ),
    )
    return extras, spec


@functools.cache
def _log_default_in_float32() -> None:
    """Warns that the default numerics round float32 arrays, once per process."""
    _log.warning(
        "attention: float32 arrays with numerics 'flash', the default: probabilities, output and "
        "gradients are rounded to bfloat16, up to about 8e-3 from jax.nn; numerics='exact' rounds "
        "nothing"
    )
