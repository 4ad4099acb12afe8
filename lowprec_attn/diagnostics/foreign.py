"""Captures attention that is not this library's: jax.nn's, Flax's, and a user's own functions.

Within a capture every module's name for jax.nn's or Linen's attention function refers to a wrapped
one. A Linen module holds its function in a field, which Linen's own method interceptor reaches.
Flax NNX calls jax.nn, unless it forms attention weights for dropout; that is refused.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn.attention import tap, validation
from lowprec_attn.diagnostics.names import replaced
from lowprec_attn.errors import UserError

_SPELLINGS = {
    "q": ("query", "q"),
    "k": ("key", "k"),
    "v": ("value", "v"),
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "window": ("local_window_size",),
    "soft_cap": ("logits_soft_cap", "softcap", "soft_cap", "attn_logits_soft_cap"),
    "sinks": ("sinks", "s_aux"),
}
_KEPT = ("mask", "bias", "query_seq_lengths", "key_value_seq_lengths")
_ARRAYS = (np.ndarray, np.generic, jax.Array)
# Arguments that say how attention is computed, not what.
_HARMLESS = (
    *("implementation", "precision", "dtype", "module", "return_residual", "promote_dtype"),
    *("force_fp32_for_softmax", "einsum_dot_general", "qk_attn_weights_einsum"),
    *("attn_weights_value_einsum", "broadcast_dropout", "dropout_rng", "deterministic"),
    *("interpret", "block_sizes", "config"),
)


class CaptureError(UserError, RuntimeError):
    """A layer was not captured or cannot be captured; the message says what to do."""


def captured(function: Callable[..., Any], *, layout: str = "BTNH") -> Callable[..., Any]:
    """Wraps an attention function so that `diagnostics.capture` and `watch` see it.

    Use it for kernels of other libraries and of your own; jax.nn's function and Flax's modules do
    not need it. The wrapper changes no value, and outside of a capture it adds nothing to a
    program.

    Args:
      function: takes q, k, v (or query, key, value) and any other arguments; returns O, or a tuple
        or list that begins with O. Of the other arguments these are recorded, with their meaning in
        jax.nn: is_causal (causal), scale (softmax_scale, sm_scale), mask, bias, query_seq_lengths,
        key_value_seq_lengths and local_window_size. Recorded as well are the soft cap c of scores c
        · tanh(scale · q kᵀ / c) (logits_soft_cap, softcap, soft_cap, attn_logits_soft_cap; 0 is
        none) and sinks [N] (s_aux), one more score of each head. Where one of them is not passed, a
        default that is a number, a truth value, a pair or an array is recorded. What a
        `functools.partial` holds counts as passed. Any other argument that may change the result is
        named in `ignored`.
      layout: axes of q, k, v and O: BTNH, or BNTH for heads first. The batch axis may be missing.

    Raises:
      ValueError: `layout` is another one, or the function has no argument for q, k or v.

    Example:
      >>> attend = diagnostics.captured(my_kernel, layout="BNTH")
    """
    if layout not in ("BTNH", "BNTH"):
        raise ValueError(f"layout must be BTNH or BNTH, got {layout!r}")
    # The signature of a partial shows what it holds as defaults, which nobody passed.
    whole = inspect.unwrap(function)
    held = whole if isinstance(whole, functools.partial) else functools.partial(function)
    signature = inspect.signature(held.func)
    for name in "qkv":
        if not {*_SPELLINGS[name]} & signature.parameters.keys():
            raise ValueError(
                f"{getattr(function, '__name__', type(function).__name__)} has no argument "
                f"{' or '.join(_SPELLINGS[name])}; wrap a function that has, and calls it"
            )

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        if not tap.is_open():
            return function(*args, **kwargs)
        with tap.closed():  # any attention that the function calls in turn is the same attention
            out = function(*args, **kwargs)
        given = signature.bind(*held.args, *args, **(held.keywords | kwargs)).arguments
        o, *others = out if isinstance(out, tuple | list) else (out,)
        if not hasattr(o, "ndim"):
            raise CaptureError(
                f"{getattr(function, '__name__', type(function).__name__)} returned "
                f"{type(out).__name__}; wrap a function that returns O, or a tuple or list that "
                "begins with O"
            )
        o = _tapped(given, signature, o, layout)
        if not isinstance(out, tuple | list):
            return o
        return out._make((o, *others)) if hasattr(out, "_make") else type(out)((o, *others))

    return attend


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """Opens a block in which jax.nn's and Flax's attention functions are wrapped by `captured`."""
    with contextlib.ExitStack() as stack:
        usual = jax.nn.dot_product_attention
        stack.enter_context(replaced(usual, captured(usual), keeps=__name__))
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            of_linen = linen.dot_product_attention
            attend = captured(of_linen)
            stack.enter_context(replaced(of_linen, attend, keeps=__name__))
            stack.enter_context(linen.intercept_methods(_with_attention(of_linen, attend)))
        for name in ("flax.linen.attention", "flax.nnx.nn.attention"):
            weights = getattr(sys.modules.get(name), "dot_product_attention_weights", None)
            if weights is not None:
                stack.enter_context(replaced(weights, _refusing(weights), keeps=__name__))
        yield


def _with_attention(function: Any, replacement: Any) -> Callable[..., Any]:
    """Returns a Linen interceptor: modules with `attention_fn=function` call `replacement`."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if vars(module).get("attention_fn") is not function:
            return call(*args, **kwargs)
        object.__setattr__(module, "attention_fn", replacement)  # a module is frozen
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", function)

    return intercept


def _refusing(weights: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(weights)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if tap.is_open():
            raise CaptureError(
                "Flax computes attention weights here, for dropout of attention or to sow them, "
                "and capture does not see them: pass deterministic=True or dropout_rate=0"
            )
        return weights(*args, **kwargs)

    return refuse


def _tapped(
    given: Mapping[str, Any], signature: inspect.Signature, out: jax.Array, layout: str
) -> jax.Array:
    def of(which: str) -> Any:
        names = [name for name in _SPELLINGS[which] if name in signature.parameters]
        if not names:
            return None
        default = signature.parameters[names[0]].default
        default = default if isinstance(default, (bool, int, float, tuple, *_ARRAYS)) else None
        return next((given[name] for name in names if name in given), default)

    def kept(name: str) -> Any:
        default = getattr(signature.parameters.get(name), "default", None)
        return given.get(name, default if isinstance(default, _ARRAYS) else None)

    def rows_first(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        x = x[None] if x.ndim == 3 else x.reshape(-1, *x.shape[-3:])
        return x.swapaxes(1, 2) if layout == "BNTH" else x

    # Flax casts q, k and v to the dtype of O within its function, so these are what it computes on.
    arrays = {which: rows_first(of(which)).astype(out.dtype) for which in "qkv"}
    batch = jnp.shape(of("q"))[:-3]
    arrays |= {name: _kept(x, batch) for name in _KEPT if (x := kept(name)) is not None}
    ignored = [name for name in given if _is_other(name, given, signature)]
    scale = of("scale")
    if isinstance(scale, jax.core.Tracer):
        ignored.append("scale")
        scale = None
    elif scale is None:
        scale = arrays["q"].shape[-1] ** -0.5
    soft_cap, sinks = of("soft_cap"), of("sinks")
    if isinstance(soft_cap, jax.core.Tracer):
        ignored.append("logits_soft_cap")
        soft_cap = None
    if sinks is not None:
        arrays["sinks"] = jnp.asarray(sinks).reshape(1, -1)
    rows, keys = arrays["q"].shape[1], arrays["k"].shape[1]
    o = tap.handed_over(
        arrays,
        rows_first(out),
        is_causal=bool(of("is_causal")),
        scale=None if scale is None else float(scale),
        window=validation.window(of("window"), rows, keys),
        soft_cap=float(soft_cap) if soft_cap else None,
        ignored=tuple(ignored),
    )
    return (o.swapaxes(1, 2) if layout == "BNTH" else o).reshape(out.shape)


def _kept(x: Any, batch: tuple[int, ...]) -> jax.Array:
    """Returns a mask, a bias or lengths; an array with a query and a key axis gets four axes.

    Args:
      x: the array.
      batch: the axes of q before [T, N, H]. Where there are several, they become one, as q's do, so
        those of the array are broadcast to them before.
    """
    x = jnp.asarray(x)
    if x.ndim < 2:
        return x
    x = x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x
    whole = (*batch, *x.shape[-3:]) if len(batch) > 1 else x.shape
    return jnp.broadcast_to(x, whole).reshape(-1, *x.shape[-3:])


def _is_other(name: str, given: Mapping[str, Any], signature: inspect.Signature) -> bool:
    """Whether an argument may change what is computed but is not recorded."""
    if name == "dropout_rate":
        return bool(given[name]) and not given.get("deterministic")
    known = {*_KEPT, *_HARMLESS, *(word for words in _SPELLINGS.values() for word in words)}
    if name in known:
        return False
    default = signature.parameters[name].default
    value = given[name]
    are_scalars = np.isscalar(value) and np.isscalar(default)  # a comparison of arrays has no truth
    if value is default or (are_scalars and value == default):
        return False
    return value is not None and not (isinstance(value, (tuple, dict)) and not value)
