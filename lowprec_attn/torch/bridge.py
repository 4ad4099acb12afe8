"""Attention for PyTorch by this library's kernels, with rows of dS that sum to zero by default.

JAX computes on the device that holds the tensors, a GPU or the CPU. DLPack hands over q, k, v, dO,
O and the gradients without a copy, and orders the streams of the two libraries. Both libraries then
allocate memory on the same GPU. If this module is imported before JAX is used, it asks JAX not to
take three quarters of that memory at once.

It works in eager mode and under `torch.compile`, with one opaque operator for the forward pass and
one for the backward pass. Only first derivatives are supported.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Set before JAX's first computation, which creates its allocator. It keeps a user's own choice.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch
from jax.extend.core import Jaxpr, Literal, Var
from jax.extend.core.primitives import custom_jvp_call_p, jit_p
from torch import Tensor

from lowprec_attn import attention as _jax_attention
from lowprec_attn import installation
from lowprec_attn.attention.dispatch import traced_for
from lowprec_attn.errors import UserError
from lowprec_attn.numerics import Numerics, RowMax, get_preset

_DTYPES = {
    torch.bfloat16: jax.numpy.bfloat16,
    torch.float16: jax.numpy.float16,
    torch.float32: jax.numpy.float32,
}


class TorchAttentionError(UserError, ValueError):
    """A call that PyTorch supports is not supported here; the message names the argument."""


def attention_fn(
    *,
    numerics: Numerics | str = "normalized_delta",
    row_max: RowMax | str = "standard",
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Callable[..., Tensor]:
    """Makes a replacement for `torch.nn.functional.scaled_dot_product_attention`.

    Args:
      numerics: the name of a preset or a record; see `lowprec_attn.numerics`.
      row_max: a row-max rule or its name; see `lowprec_attn.numerics`.
      logits_soft_cap: c of scores c · tanh(scale · q kᵀ / c), for example 50 in Gemma 2.
      implementation: an implementation of `lowprec_attn.attention`; None: the fastest that serves
        the call.

    Returns:
      `f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
      enable_gqa=False)`. It takes query [..., N, T, H], key and value [..., K, S, H], all of one
      dtype (bfloat16, float16 or float32), and returns O [..., N, T, H]. Under `torch.autocast`
      the inputs are cast to its dtype. With `is_causal`, query t sees the keys s <= t. It raises a
      TorchAttentionError for a mask, for dropout, for other dtypes, for axes before the heads that
      differ, and for a device that JAX lacks.

    Raises:
      TorchAttentionError: the numerics round stochastically.
    """
    chosen = get_preset(numerics) if isinstance(numerics, str) else numerics
    if chosen.needs_bits:
        raise TorchAttentionError(
            f"numerics={numerics} draws random bits, for which PyTorch's function has no key: take "
            "numerics without stochastic rounding"
        )
    which = _arithmetic(_Arithmetic(numerics, row_max, logits_soft_cap, implementation))

    def compute(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise TorchAttentionError(
                "attn_mask and dropout_p are not served: pass is_causal, no mask, and dropout_p=0.0"
            )
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
            raise TorchAttentionError(
                "query, key and value must all be bfloat16, float16 or float32, got "
                f"{query.dtype}, {key.dtype}, {value.dtype}"
            )
        shapes = [tuple(x.shape) for x in (query, key, value)]
        if min(map(len, shapes)) < 3 or len({shape[:-3] for shape in shapes}) > 1:
            raise TorchAttentionError(
                "query, key and value must be [..., heads, length, head size] with the same axes "
                f"before the heads, got {', '.join(map(str, shapes))}: expand or unsqueeze them"
            )
        if query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise TorchAttentionError(
                f"query has {query.shape[-3]} heads and key {key.shape[-3]}: pass enable_gqa=True"
            )
        batch = query.shape[:-3]
        # Our kernels take [B, T, N, H]. Models often pass a transposed view of a projection. This
        # transpose undoes it, and nothing is copied.
        q, k, v = (
            x.reshape(math.prod(batch), *x.shape[-3:]).transpose(1, 2).contiguous()
            for x in (query, key, value)
        )
        size = query.shape[-1] ** -0.5 if scale is None else scale
        out = _forward(q, k, v, which, bool(is_causal), float(size))[0]
        # With float16 inputs, a bfloat16 arithmetic returns O in float32.
        out = out.to(query.dtype).transpose(1, 2)
        return out.reshape(*batch, *query.shape[-3:-1], value.shape[-1])

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        for attend in capturing:
            return attend(logits_soft_cap, compute, *given)
        return compute(*given)

    return scaled_dot_product_attention


# Holds one function while a capture is open, and none otherwise. The function runs each call in
# place of `compute`; it takes the soft cap, `compute` and the arguments of the call.
capturing: list[Callable[..., Tensor]] = []


class _Arithmetic(NamedTuple):
    numerics: Numerics | str
    row_max: RowMax | str
    logits_soft_cap: float | None
    implementation: str | None


# Besides tensors, an operator takes only numbers and strings. So a call passes the index of its
# arithmetic in this list.
_ARITHMETICS: list[_Arithmetic] = []


def _arithmetic(wanted: _Arithmetic) -> int:
    if wanted not in _ARITHMETICS:
        _ARITHMETICS.append(wanted)
    return _ARITHMETICS.index(wanted)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The forward and backward passes as compiled functions of arrays.

    Attributes:
      outputs: the shapes and dtypes of O and of the residuals, the arrays beside q, k, v and O that
        the backward pass needs.
      forward: takes q, k and v; returns O and the residuals.
      backward: takes (q, k, v), O with the residuals, and dO; returns dq, dk and dv.
    """

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.lru_cache(maxsize=256)
def _program(
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    platform: str,
    which: int,
    is_causal: bool,
    scale: float,
) -> _Program:
    numerics, row_max, logits_soft_cap, implementation = _ARITHMETICS[which]
    attend = functools.partial(
        _jax_attention.dot_product_attention,
        is_causal=is_causal,
        scale=scale,
        numerics=numerics,
        row_max=row_max,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )

    def both(*qkv: jax.Array) -> Any:
        """Returns O, and the function of dO, whose leaves are the arrays that it keeps."""
        # Traced for every platform, a call would keep what the kernels of each of them need.
        with traced_for(platform):
            return jax.vjp(attend, *qkv)

    traced, made = jax.make_jaxpr(both, return_shape=True)(*shapes)
    leaves, structure = jax.tree.flatten(made)
    # A kept array is often an input or O itself, and an operator must not return either again. For
    # each leaf, `sources` says whether it is an input, and its index in the inputs or the outputs.
    # `outputs` lists the leaves that the operator returns.
    sources: list[tuple[bool, int]] = []
    outputs: list[int] = []
    known = {var: (True, i) for i, var in enumerate(traced.jaxpr.invars)}
    for i, var in enumerate(_origins(traced.jaxpr)):
        if var is None or var not in known:
            source = (False, len(outputs))
            outputs.append(i)
            if var is not None:
                known[var] = source
        else:
            source = known[var]
        sources.append(source)

    def forward(*qkv: jax.Array) -> list[jax.Array]:
        found = jax.tree.leaves(both(*qkv))
        return [found[i] for i in outputs]

    def backward(qkv: Sequence[jax.Array], kept: Sequence[jax.Array], do: jax.Array) -> Any:
        of = {True: qkv, False: kept}
        _, gradient = jax.tree.unflatten(structure, [of[given][i] for given, i in sources])
        return gradient(do)

    return _Program(tuple(leaves[i] for i in outputs), jax.jit(forward), jax.jit(backward))


# The functions that a program calls, by the primitive of the call.
_CALLED = {jit_p: "jaxpr", custom_jvp_call_p: "call_jaxpr"}


def _origins(jaxpr: Jaxpr) -> list[Var | None]:
    """Returns for each output of a program the variable that first held it, None for a literal.

    A function that a program calls gives variables of its own to inputs that it returns, and to an
    output that it returns twice.
    """
    first: dict[Var, Var] = {}
    for call in jaxpr.eqns:
        if call.primitive not in _CALLED:
            continue
        inner = call.params[_CALLED[call.primitive]].jaxpr
        outer: dict[Var, Any] = dict(zip(inner.invars, call.invars, strict=True))
        for var, returned in zip(_origins(inner), call.outvars, strict=True):
            if var is None:
                continue
            origin = outer.setdefault(var, returned)
            if not isinstance(origin, Literal):
                first[returned] = first.get(origin, origin)
    return [None if isinstance(var, Literal) else first.get(var, var) for var in jaxpr.outvars]


def _program_of(
    q: Tensor, k: Tensor, v: Tensor, which: int, is_causal: bool, scale: float
) -> _Program:
    # `torch.compile` may hold a length as a symbol. It becomes a number here, so that each length
    # has its own program.
    shapes = tuple(
        jax.ShapeDtypeStruct(tuple(map(int, x.shape)), _DTYPES[x.dtype]) for x in (q, k, v)
    )
    # PyTorch calls AMD's GPUs `cuda` as well; no kernel of ours serves them.
    platform = "cuda" if q.is_cuda and torch.version.cuda else "default"
    return _program(shapes, platform, which, is_causal, scale)


@torch.library.custom_op("lowprec_attn::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, which: int, is_causal: bool, scale: float
) -> list[Tensor]:
    """Returns O [B, T, N, H] and the residuals of the backward pass."""
    program = _program_of(q, k, v, which, is_causal, scale)
    return [torch.from_dlpack(x) for x in program.forward(*map(_to_jax, (q, k, v)))]


@torch.library.custom_op("lowprec_attn::backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: list[Tensor],
    do: Tensor,
    which: int,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    """Returns dQ, dK and dV, in the shapes of q, k and v."""
    program = _program_of(q, k, v, which, is_causal, scale)
    qkv, of_forward = [[_to_jax(x) for x in of] for of in ((q, k, v), kept)]
    return [torch.from_dlpack(x) for x in program.backward(qkv, of_forward, _to_jax(do))]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, which: int, is_causal: bool, scale: float) -> list[Tensor]:
    program = _program_of(q, k, v, which, is_causal, scale)
    return [q.new_empty(x.shape, dtype=_torch_dtype(x.dtype)) for x in program.outputs]


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, *kept = ctx.saved_tensors
    do = gradients[0]
    if do is None:
        do = torch.zeros_like(kept[0])
    return *_backward(q, k, v, kept, do.contiguous(), *ctx.options), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _to_jax(x: Tensor) -> jax.Array:
    """Returns a JAX array that shares the tensor's memory.

    Raises:
      TorchAttentionError: JAX does not have the tensor's device.
    """
    try:
        return jax.dlpack.from_dlpack(x.detach())
    except (RuntimeError, ValueError) as error:
        raise TorchAttentionError(
            f"JAX cannot take a tensor on {x.device}: {error}; JAX for GPUs comes with "
            f"{installation.command('gpu')}"
        ) from error


def _torch_dtype(dtype: Any) -> torch.dtype:
    return getattr(torch, jax.numpy.dtype(dtype).name)


attention = attention_fn()
