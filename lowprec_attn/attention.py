"""The public entry: attention in which every rounding is a named choice.

from lowprec_attn import attention, numerics

out = attention.dot_product_attention(
    q, k, v, is_causal=True, numerics=numerics.FLASH, row_max=numerics.DynamicMax()
)
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Key

from lowprec_attn import validation
from lowprec_attn.dispatch import (
    IMPLEMENTATIONS,
    Call,
    Part,
    compute,
    resolve,
    resolve_by_platform,
)
from lowprec_attn.numerics import FLASH, Numerics, RowMax, StandardMax
from lowprec_attn.request import Extras, RandomStream, Request, Spec, planes

__all__ = [
    "IMPLEMENTATIONS",
    "attention_fn",
    "dot_product_attention",
    "resolve",
    "sharded",
    "within_shard",
]


def dot_product_attention(
    q: Float[ArrayLike, "B T N H"],
    k: Float[ArrayLike, "B S K H"] | None = None,
    v: Float[ArrayLike, "B S K H"] | None = None,
    bias: Float[ArrayLike, "#B #N #T #S"] | None = None,
    mask: Bool[ArrayLike, "#B #N #T #S"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "B"] | None = None,
    numerics: Numerics | Sequence[Numerics] = FLASH,
    row_max: RowMax | Sequence[RowMax] = StandardMax(),  # noqa: B008 (frozen)
    key: Key[Array, ""] | None = None,
    implementation: str | None = None,
    block_sizes: Hashable = None,
    return_residual: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float32[Array, "B T N"]]:
    """O = softmax(q kᵀ · scale + bias) v, with the roundings of `numerics`.

    Differentiable in q, k, v, bias and a traced scale by a hand-written backward pass whose
    roundings are named in `numerics` too; reverse mode only. Works under `jit`, `vmap` and
    `checkpoint`, and in a `jax.shard_map` of your own (see `within_shard`).

    Second derivatives (`jax.hessian`, `jax.jvp` or `jax.grad` of `jax.grad`) take the derivative of
    every rounding as 1. `tiled` and `dense` have them; name one of the two, because under `jit` the
    choice by platform keeps the kernels, which refuse. `jax.grad` of `jax.grad` takes memory
    quadratic in the length.

    Args:
      q: queries [B, T, N, H]; the batch axis may be left out of q, k and v together. Without k and
        v all three, packed as [B, T, 3, N, H]: so one product forms them, and the GPU kernels read
        that array, and write its gradient, in place.
      k: keys [B, S, K, H] of q's dtype; N a multiple of K (grouped-query attention).
      v: values, like k.
      bias: added to the scores.
      mask: True where a query may see a key.
      scale: factor of q kᵀ, 1/√H by default. A traced one is multiplied as float32, where a
        number is too; the kernels decline it.
      is_causal: row t sees the keys s <= t; not traced.
      query_seq_lengths: valid queries per batch element. Rows beyond have O = 0 and lse = −inf,
        as has every row that sees no key (where a dense mask hides all keys, `PublishedMax`
        gives lse = log(clamp) instead).
      key_value_seq_lengths: valid keys per batch element.
      numerics: a `Numerics` for all heads or one per query head; query heads that share a key
        head must agree.
      row_max: a row-max rule, likewise.
      key: PRNG key, needed if a point rounds stochastically. The bits depend on the key and on
        batch element, head, row and column alone (elements of a `vmap` over one key share them).
      implementation: `'gpu'`, `'tpu'` (Pallas kernels), `'tiled'`, `'dense'`, or None for the
        fastest that supports the request on the platform that the call is lowered for.
      block_sizes: tile sizes of that implementation, such as `tiled.BlockSizes`; never changes
        what is rounded where.
      return_residual: also return lse = log rowsum exp(scores), float32 [B, T, N].

    Returns:
      O in q's dtype (in float32 where q's dtype cannot hold the format of `numerics.output`), or
      (O, lse).

    Raises:
      ValueError: wrong shapes, dtypes or options; the message names the value.
      NotImplementedError: the implementation asked for cannot serve the request; the message
        names what, and the implementations that can. Also at the second derivative of a kernel.
      TypeError: forward-mode differentiation (`jax.jvp`) of the call itself.

    Example:
      >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 8, 2, 32), jnp.bfloat16)
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (1, 8, 2, 32)
    """
    call, unbatched = _prepare(
        (q, k, v, bias, mask),
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        numerics=numerics,
        row_max=row_max,
        key=key,
        implementation=implementation,
        block_sizes=block_sizes,
    )
    out, lse = compute(call)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _prepare(
    arrays: tuple[Any, Any, Any, Any, Any],
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    numerics: Numerics | Sequence[Numerics] = FLASH,
    row_max: RowMax | Sequence[RowMax] = StandardMax(),  # noqa: B008 (frozen)
    key: Key[Array, ""] | None = None,
    implementation: str | None = None,
    block_sizes: Hashable = None,
) -> tuple[Call, bool]:
    """Validates a call once and decides who computes which heads.

    Returns:
      The call, and whether its arrays came without a batch axis.
    """
    operands, unbatched = validation.batched(*arrays[:3])
    bias, mask = arrays[3:]
    if unbatched:
        bias, mask = (x if x is None or jnp.ndim(x) != 3 else x[None] for x in (bias, mask))
    q, k, v = jax.eval_shape(planes, *operands)  # no more is asked of them here
    validation.check_inputs(q, k, v)
    batch, _, heads, head_size = q.shape
    extras = Extras(
        validation.pairs("bias", bias, q, k),
        validation.pairs("mask", mask, q, k),
        validation.lengths("query_seq_lengths", query_seq_lengths, batch),
        validation.lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        None if key is None else RandomStream.of(key, batch, heads),
        validation.traced_scale(scale),
    )
    spec = functools.partial(
        Spec,
        scale=1.0 if extras.scale is not None else validation.scale(scale, head_size),
        is_causal=validation.causal(is_causal),
        block_sizes=block_sizes,
    )
    arithmetic = validation.per_head(numerics, row_max, heads, k.shape[2])
    parts = []
    for numerics_, row_max_ in dict.fromkeys(arithmetic):
        validation.check_shift(numerics_, row_max_)
        if numerics_.needs_bits and key is None:
            raise ValueError(f"{numerics_} draws random bits; pass key=jax.random.key(...)")
        which = tuple(i for i, a in enumerate(arithmetic) if a == (numerics_, row_max_))
        part = spec(numerics=numerics_, row_max=row_max_)
        request = Request.of(q, k, extras, part)
        parts.append(Part(which, part, resolve_by_platform(request, implementation)))
    return Call(operands, extras, tuple(parts)), unbatched


def sharded(
    mesh: Mesh, *, batch_axis: str | None = None, head_axis: str | None = None
) -> Callable[..., Any]:
    """`dot_product_attention` under `jax.shard_map`: XLA does not partition a Pallas call.

    The result is that of the unsharded call up to float32 summation order; random bits are the
    same.

    Args:
      mesh: the device mesh.
      batch_axis: mesh axis over which the batch is split, None for not.
      head_axis: mesh axis over which heads are split (whole key heads), None for not. Heads must
        then share their arithmetic.

    Returns:
      A function with the arguments and errors of `dot_product_attention`; q, k, v need the batch
      axis. It raises ValueError where an axis does not divide.
    """
    for axis in (batch_axis, head_axis):
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {axis!r}; its axes are {mesh.axis_names}")

    def attend(
        q: Any, k: Any = None, v: Any = None, bias: Any = None, mask: Any = None, **options: Any
    ) -> Array | tuple[Array, Array]:
        return_residual = options.pop("return_residual", False)
        call = _batched(*_prepare((q, k, v, bias, mask), **options))
        _check_divides(mesh, batch_axis, head_axis, call)
        heads = PartitionSpec(batch_axis, None, head_axis, None)
        packed = PartitionSpec(batch_axis, None, None, head_axis, None)
        in_specs = (
            (packed,) if len(call.arrays) == 1 else (heads,) * 3,
            _extras_specs(call.extras, batch_axis, head_axis),
        )
        run = jax.shard_map(
            lambda arrays, extras: compute(Call(arrays, extras, call.parts)),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(heads, PartitionSpec(batch_axis, None, head_axis)),
            check_vma=False,  # Pallas calls carry no varying-axes types
        )
        arrays = (call.arrays, call.extras)
        if AxisType.Explicit in mesh.axis_types:  # the default of `jax.make_mesh`
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
            arrays = jax.sharding.reshard(arrays, shardings)
        out, lse = run(*arrays)
        return (out, lse) if return_residual else out

    return attend


def within_shard(*, batch_axis: str) -> Callable[..., Array | tuple[Array, Array]]:
    """`dot_product_attention` for code that runs under `jax.shard_map` already.

    The kernels need a `jax.shard_map` with `check_vma=False`. Under its default, `check_vma=True`,
    they decline, so that without a choice `tiled` serves the call; the gradient of an array that
    does not vary over a mesh axis is then summed over it.

    Args:
      batch_axis: mesh axis over which that code's batch is split, in equal parts. Random bits are
        those of the whole batch.

    Returns:
      A function with the arguments and errors of `dot_product_attention`; q, k, v need the batch
      axis.
    """

    def attend(
        q: Any, k: Any = None, v: Any = None, bias: Any = None, mask: Any = None, **options: Any
    ) -> Array | tuple[Array, Array]:
        return_residual = options.pop("return_residual", False)
        call = _batched(*_prepare((q, k, v, bias, mask), **options))
        stream = call.extras.stream
        if stream is not None:
            start = jax.lax.axis_index(batch_axis) * jnp.int32(stream.batch.size)
            stream = stream._replace(batch=stream.batch + start)
            call = call._replace(extras=call.extras._replace(stream=stream))
        out, lse = compute(call)
        return (out, lse) if return_residual else out

    return attend


def _batched(call: Call, unbatched: bool) -> Call:
    if unbatched:
        packed = "3, " if len(call.arrays) == 1 else ""
        raise ValueError(
            f"q must be [batch, length, {packed}heads, head size], "
            f"got shape {call.arrays[0].shape[1:]}"
        )
    return call


def _check_divides(mesh: Mesh, batch_axis: str | None, head_axis: str | None, call: Call) -> None:
    q, k, _ = jax.eval_shape(planes, *call.arrays)
    if batch_axis is not None and q.shape[0] % mesh.shape[batch_axis]:
        raise ValueError(
            f"batch {q.shape[0]} does not divide over {mesh.shape[batch_axis]} devices "
            f"of mesh axis {batch_axis!r}"
        )
    if head_axis is None:
        return
    if k.shape[2] % mesh.shape[head_axis]:
        raise ValueError(
            f"{k.shape[2]} key heads do not divide over {mesh.shape[head_axis]} devices "
            f"of mesh axis {head_axis!r}"
        )
    if len(call.parts) > 1:
        raise ValueError(
            f"heads of different arithmetic cannot be split over mesh axis {head_axis!r}; "
            "split the batch instead"
        )


def _extras_specs(extras: Extras, batch_axis: str | None, head_axis: str | None) -> Extras:
    def pairs(x: Array | None) -> PartitionSpec | None:
        if x is None:
            return None
        batch = batch_axis if x.shape[0] > 1 else None
        return PartitionSpec(batch, head_axis if x.shape[1] > 1 else None, None, None)

    def lengths(x: Array | None) -> PartitionSpec | None:
        return None if x is None else PartitionSpec(batch_axis)

    stream = None
    if extras.stream is not None:
        # The indices in the stream are global, so each shard draws the bits of its own elements.
        stream = RandomStream(
            PartitionSpec(),  # type: ignore[arg-type]
            PartitionSpec(batch_axis),  # type: ignore[arg-type]
            PartitionSpec(head_axis),  # type: ignore[arg-type]
        )
    return Extras(
        pairs(extras.bias),  # type: ignore[arg-type]
        pairs(extras.mask),  # type: ignore[arg-type]
        lengths(extras.query_lengths),  # type: ignore[arg-type]
        lengths(extras.key_lengths),  # type: ignore[arg-type]
        stream,
        None if extras.scale is None else PartitionSpec(),  # type: ignore[arg-type]
    )


def attention_fn(
    *,
    numerics: Numerics | Sequence[Numerics] = FLASH,
    row_max: RowMax | Sequence[RowMax] = StandardMax(),  # noqa: B008 (frozen)
    key: Key[Array, ""] | Callable[[], Key[Array, ""]] | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """An `attention_fn` for `flax.linen` and `flax.nnx` `MultiHeadDotProductAttention` and alike.

    Masks (boolean, or 0/1 as `make_causal_mask` gives them) are passed on as dense masks, which
    `tiled` and `dense` serve. With `is_causal=True` (NNX) no mask is needed.

    Args:
      numerics: see `dot_product_attention`.
      row_max: likewise.
      key: PRNG key for stochastic points, or a function called at every use that returns one.
      implementation: likewise.

    Returns:
      A function with the keyword arguments that Flax passes. It raises NotImplementedError for
      active dropout, sown weights, a `precision` and einsum overrides.
    """

    # Linen drops every keyword that is not named here, so a **kwargs would lose the mask.
    def attend(
        query: Array,
        key_: Array,
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
            query, key_, value = (x.astype(dtype) for x in (query, key_, value))
        out = dot_product_attention(
            query,
            key_,
            value,
            bias,
            None if mask is None else mask.astype(jnp.bool_),
            is_causal=is_causal,
            numerics=numerics,
            row_max=row_max,
            key=key() if callable(key) else key,
            implementation=implementation,
        )
        assert isinstance(out, Array)
        return out

    return attend
