"""The diagnostics of every layer of the model on one or a few sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention.dispatch import keys_per_step
from lowprec_attn.diagnostics import Projection, Returned, attention_signals
from lowprec_attn.gpt2 import functions
from lowprec_attn.gpt2.model import zero_taps
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.training import models
from lowprec_attn.training.settings import Model

Signals = dict[str, dict[str, Array]]
Directions = dict[str, Array]
"""The common direction [N, D, H] of the tokens of each layer; see `diagnostics.across_steps`."""


class LayerArrays(NamedTuple):
    """Arguments of `attention_signals` for a layer: q, k, v, dO [B, T, N, H], X [B, T, D], weights.

    k and v may have fewer heads, and v and dO another H. `sinks` [N] is None if heads have none.
    dO is the gradient of the mean loss of these sequences. It lacks the factor with which this loss
    enters the mean over a batch. `returned` holds what the attention of the run returned in the
    same forward pass. `projection` is None if q is a multiple of X W_Q.
    """

    q: Array
    k: Array
    v: Array
    do: Array
    x: Array
    w_q: Array
    w_k: Array
    returned: Returned
    projection: Projection | None
    sinks: Array | None


def make_layers(
    model: Model, loss: Callable[..., tuple[Array, Any]], function: str | None = None
) -> Callable[..., list[LayerArrays]]:
    """Returns a jit-able function (params, inputs, targets [B, T], key) -> arrays of every layer.

    The function runs the model forward and backward once.

    Args:
      model: settings of the model.
      loss: `Steps.loss` of the model.
      function: name of another library's attention that the loss uses. It is then asked for dQ.
    """
    other = None if function is None else functions.find(function)
    scale, _ = models.score_scale(model)
    shapes = {
        name: (model.width, heads, model.head_size)
        for name, heads in (("query", model.heads), ("key", model.kv_heads))
    }

    def layers(
        params: Any, inputs: Array, targets: Array, key: Key[Array, ""]
    ) -> list[LayerArrays]:
        d_outputs, records = jax.grad(
            lambda taps: loss(params, inputs, targets, key, taps), has_aux=True
        )(zero_taps(model, *inputs.shape))
        result = []
        for i, (record, do) in enumerate(zip(records, d_outputs, strict=True)):
            weights = params["blocks"][i]["attention"]
            w_q, w_k = (weights[n]["kernel"][...].reshape(shape) for n, shape in shapes.items())
            assert record.lse is not None  # attention with a tap returns it
            query_of = models.of(model).query_of(model, weights, inputs.shape[1])
            do = do.astype(record.o.dtype)
            dq = None
            if other is not None:
                dq = functions.query_gradient(other, record.q, record.k, record.v, do, scale)
            result.append(
                LayerArrays(
                    q=record.q,
                    k=record.k,
                    v=record.v,
                    do=do,
                    x=record.x,
                    w_q=w_q,
                    w_k=w_k,
                    returned=Returned(record.o, record.lse, dq),
                    projection=None if query_of is None else Projection(record.projected, query_of),
                    sinks=weights["sinks"][...] if model.sinks else None,
                )
            )
        return result

    return layers


def make_signals(
    model: Model, attention: AttentionSettings, loss: Callable[..., tuple[Array, Any]]
) -> Callable[..., tuple[Signals, Directions]]:
    """Returns a jit-able function (params, inputs, targets [B, T], key) -> signals of every layer.

    The function returns {layer_0: {name: [N]}, ...} and the directions of the layers. It runs the
    model forward and backward once, and compares each layer's attention with exact arithmetic. It
    uses q, k, v and dO from training on these sequences; see `LayerArrays`.

    Args:
      model, attention: settings of the run.
      loss: `Steps.loss` of the model.
    """
    layers_of = make_layers(model, loss, attention.function)
    scale, factor = models.score_scale(model)

    def of_layer(
        numerics: tuple[HeadGroup, ...], arrays: LayerArrays, key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Array]:
        """The signals of a layer, and its direction."""
        layer = attention_signals(
            **arrays._asdict(),
            numerics=numerics,
            scale=scale,
            logits_soft_cap=model.soft_cap,
            is_causal=True,
            rng_key=key,
            common_direction=True,
        )
        if arrays.projection is None:
            for name in ("query_weight_gradient_error", "query_weight_gradient_exact"):
                layer[name] *= jnp.float32(factor)
        return layer, layer.pop("common_direction")

    def signals(
        params: Any, inputs: Array, targets: Array, key: Key[Array, ""]
    ) -> tuple[Signals, Directions]:
        layers = layers_of(params, inputs, targets, key)
        alike: dict[tuple[HeadGroup, ...], list[int]] = {}
        for i, arrays in enumerate(layers):
            computed = as_computed(attention, i, arrays, model.soft_cap)
            alike.setdefault(computed, []).append(i)
        result: dict[int, tuple[dict[str, Array], Array]] = {}
        for numerics, indices in alike.items():
            # A loop over layers of one arithmetic compiles them once. Unrolled, twelve of them took
            # longer to compile than the training step.
            of = [(layers[i], jax.random.fold_in(key, i)) for i in indices]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *of)
            measured = lax.map(lambda args, n=numerics: of_layer(n, *args), stacked)
            for place, i in enumerate(indices):
                result[i] = jax.tree.map(lambda x, place=place: x[place], measured)
        found = [(f"layer_{i}", *result[i]) for i in sorted(result)]
        directions = {name: direction for name, _, direction in found}
        return {name: layer for name, layer, _ in found}, directions

    return signals


def as_computed(
    attention: AttentionSettings, layer: int, arrays: LayerArrays, soft_cap: float | None
) -> tuple[HeadGroup, ...]:
    """Returns the head groups of a layer, with `kv_block` set to the step of the implementation."""
    groups = []
    for group in attention.layers[layer]:
        spec = Spec(
            numerics=group.numerics,
            row_max=group.row_max,
            scale=1.0,
            soft_cap=soft_cap,
            is_causal=True,
        )
        request = Request.of(arrays.q, arrays.k, Extras(sinks=arrays.sinks), spec, arrays.v)
        step = keys_per_step(request, attention.implementation)
        numerics = group.numerics.replace(kv_block=step)
        groups.append(dataclasses.replace(group, numerics=numerics))
    return tuple(groups)
