"""Attention for PyTorch by this library's kernels, with rows of dS that sum to zero by default.

JAX computes on the tensors' own device, a GPU or the CPU. DLPack hands over q, k, v, dO, O and the
gradients without a copy, and orders the streams of both. Both libraries then allocate on one GPU:
this module asks JAX not to take three quarters of it at once, if it is imported before JAX is used.

Works in eager mode and under `torch.compile`, as one opaque operator each way. First derivatives
alone.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Before JAX's first computation, which makes its allocator. A user's own choice stays.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch
from jax.extend.core import Literal
from torch import Tensor

from lowprec_attn import attention as _jax_attention
from lowprec_attn import installation
from lowprec_attn.errors import UserError
from lowprec_attn.numerics import Numerics, RowMax

_DTYPES = {
    torch.bfloat16: jax.numpy.bfloat16,
    torch.float16: jax.numpy.float16,
    torch.float32: jax.numpy.float32,
}


class TorchAttentionError(UserError, ValueError):
    """A call that PyTorch's function serves and this one does not; it names the argument."""


def attention_fn(
    *,
    numerics: Numerics | str = "normalized_delta",
    row_max: RowMax | str = "standard",
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
) -> Callable[..., Tensor]:
    """A function in place of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
      numerics: a preset's name or a record, see `lowprec_attn.numerics`.
      row_max: a row-max rule.
      logits_soft_cap: c of scores c · tanh(scale · q kᵀ / c), such as the 50 of Gemma 2.
      implementation: as of `lowprec_attn.attention`; None: the fastest that serves a call.

    Returns:
      `f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
      enable_gqa=False)`: O [..., N, T, H] of query [..., N, T, H], key and value [..., K, S, H],
      all of one dtype: bfloat16, float16 or float32. Under `torch.autocast` they are cast to its
      dtype. Query t sees the keys s <= t with `is_causal`. It raises a TorchAttentionError for a
      mask, dropout, other dtypes or a device that JAX has not.
    """
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
        if query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise TorchAttentionError(
                f"query has {query.shape[-3]} heads and key {key.shape[-3]}: pass enable_gqa=True"
            )
        batch = query.shape[:-3]
        # [B, T, N, H] as our kernels have it. A model that transposes a projection before the call
        # gets a view that this one undoes: no copy.
        q, k, v = (
            x.reshape(-1, *x.shape[-3:]).transpose(1, 2).contiguous() for x in (query, key, value)
        )
        size = query.shape[-1] ** -0.5 if scale is None else scale
        out = _forward(q, k, v, which, bool(is_causal), float(size))[0]
        # A bfloat16 arithmetic hands on O of float16 inputs as float32.
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


# While a capture is open, what runs a call: of a soft cap, a function and its arguments. At most
# one.
capturing: list[Callable[..., Tensor]] = []


class _Arithmetic(NamedTuple):
    numerics: Numerics | str
    row_max: RowMax | str
    logits_soft_cap: float | None
    implementation: str | None


# An operator takes numbers and texts alone, so that it is told which of these.
_ARITHMETICS: list[_Arithmetic] = []


def _arithmetic(wanted: _Arithmetic) -> int:
    if wanted not in _ARITHMETICS:
        _ARITHMETICS.append(wanted)
    return _ARITHMETICS.index(wanted)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The two passes as compiled functions of arrays.

    Attributes:
      outputs: shapes and dtypes of O and of what the backward pass keeps beside q, k, v and O.
      forward: of q, k, v; gives `outputs`.
      backward: of q, k, v, `outputs` and dO; gives dq, dk, dv.
    """

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.lru_cache(maxsize=256)
def _program(
    shapes: tuple[jax.ShapeDtypeStruct, ...], which: int, is_causal: bool, scale: float
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
        """O, and the function of dO with all that it keeps."""
        return jax.vjp(attend, *qkv)

    traced, made = jax.make_jaxpr(both, return_shape=True)(*shapes)
    leaves, structure = jax.tree.flatten(made)
    # What is kept is often an input or O itself. An operator may return neither again: from where
    # each leaf is taken, and which are outputs.
    sources: list[tuple[bool, int]] = []
    outputs: list[int] = []
    known: dict[Any, tuple[bool, int]] = {
        var: (True, i) for i, var in enumerate(traced.jaxpr.invars)
    }
    for i, var in enumerate(traced.jaxpr.outvars):
        if isinstance(var, Literal) or var not in known:
            sources.append((False, len(outputs)))
            outputs.append(i)
            if not isinstance(var, Literal):
                known[var] = sources[-1]
        else:
            sources.append(known[var])

    def forward(*qkv: jax.Array) -> list[jax.Array]:
        found = jax.tree.leaves(both(*qkv))
        return [found[i] for i in outputs]

    def backward(qkv: Sequence[jax.Array], kept: Sequence[jax.Array], do: jax.Array) -> Any:
        of = {True: qkv, False: kept}
        _, gradient = jax.tree.unflatten(structure, [of[given][i] for given, i in sources])
        return gradient(do)

    return _Program(tuple(leaves[i] for i in outputs), jax.jit(forward), jax.jit(backward))


def _program_of(
    q: Tensor, k: Tensor, v: Tensor, which: int, is_causal: bool, scale: float
) -> _Program:
    # A length that `torch.compile` holds as a symbol becomes a number here: a program each.
    shapes = tuple(
        jax.ShapeDtypeStruct(tuple(map(int, x.shape)), _DTYPES[x.dtype]) for x in (q, k, v)
    )
    return _program(shapes, which, is_causal, scale)


@torch.library.custom_op("lowprec_attn::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, which: int, is_causal: bool, scale: float
) -> list[Tensor]:
    """O [B, T, N, H], and what the backward pass keeps."""
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
    """dQ, dK and dV, in the shapes of q, k and v."""
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
    """The same memory.

    Raises:
      TorchAttentionError: JAX has no such device.
    """
    try:
        return jax.dlpack.from_dlpack(x.detach())
    except (RuntimeError, ValueError) as error:
        raise TorchAttentionError(
            f"JAX cannot take a tensor on {x.device}: {error}; JAX for GPUs comes with "
            f"{installation.command('gpu')}"
        ) from error


def _torch_dtype(dtype: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, jax.numpy.dtype(dtype).name)
    return found


attention = attention_fn()
