"""Attention functions of other libraries, as the model calls attention.

A run that computes its attention with one shows whether scores run away under that function, with
no account of its roundings between. Its diagnostics take O and dQ from the function. They form lse
in float32, and split dQ's error by the roundings that `config.attention.numerics` names. On a GPU
such a run need not repeat its bits; see `training.devices`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from lowprec_attn import attention
from lowprec_attn.attention.named import function_named
from lowprec_attn.errors import UserError, printable
from lowprec_attn.numerics import EXACT

KNOWN = "jax.nn, jax.nn:xla, jax.nn:cudnn or MODULE:FUNCTION"
_OF_JAX_NN = {"jax.nn": None, "jax.nn:xla": "xla", "jax.nn:cudnn": "cudnn"}


def is_name(name: str) -> bool:
    """Whether the text has the form of a name that `find` takes."""
    module, _, function = name.partition(":")
    return name in _OF_JAX_NN or (module != "jax.nn" and bool(module) and bool(function))


def find(name: str) -> Callable[..., Array]:
    """Returns the function with this name.

    Args:
      name: one of `KNOWN`. A function takes q, k and v [B, T, N, H], and by name `scale` and
        `is_causal`, as `jax.nn.dot_product_attention` does. It returns O [B, T, N, H].

    Raises:
      UserError: the module cannot be imported, or has no such function.
    """
    if name in _OF_JAX_NN:
        return functools.partial(_of_jax_nn, name)
    try:
        return function_named(name)
    except UserError as error:
        raise UserError(f"config.attention.function={name}: {error}") from error


def _of_jax_nn(name: str, *qkv: Array, **options: Any) -> Array:
    implementation: Any = _OF_JAX_NN[name]
    try:
        return jax.nn.dot_product_attention(*qkv, implementation=implementation, **options)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # such as a missing cuDNN
        raise UserError(f"config.attention.function={name}: {printable(str(error))}") from error


def as_attention(function: Callable[..., Array]) -> Callable[..., Any]:
    """Returns the function with the parameters with which the model calls attention.

    lse, where it is requested, comes from float32 attention and has no gradient.
    """

    def attend(
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        is_causal: bool,
        return_residual: bool = False,
        logits_soft_cap: None = None,
        sinks: None = None,
        **unused: Any,  # numerics and random bits, which belong to our own attention
    ) -> Any:
        del unused
        assert logits_soft_cap is None and sinks is None  # the config refuses them
        o = function(q, k, v, scale=scale, is_causal=is_causal)
        if not return_residual:
            return o
        _, lse = attention.dot_product_attention(
            *map(lax.stop_gradient, (q, k, v)),
            scale=scale,
            is_causal=is_causal,
            numerics=EXACT,
            return_residual=True,
        )
        return o, lse

    return attend


def query_gradient(
    function: Callable[..., Array], q: Array, k: Array, v: Array, do: Array, scale: float
) -> Array:
    """Returns the dQ [B, T, N, H] that the function computes for dO under the causal mask."""
    _, pullback = jax.vjp(lambda q: function(q, k, v, scale=scale, is_causal=True), q)
    (dq,) = pullback(do)
    return dq
