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
from lowprec_attn.diagnostics import Returned, attention_signals
from lowprec_attn.gpt2.model import score_scale, zero_taps
from lowprec_attn.gpt2.settings import AttentionSettings, ModelSettings
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.step import Steps

Signals = dict[str, dict[str, Array]]
Directions = dict[str, Array]
"""By layer, the common direction [N, D, H] of its tokens; see `diagnostics.across_steps`."""


class LayerArrays(NamedTuple):
    """What `attention_signals` takes of one layer: q, k, v, dO [B, T, N, H], X [B, T, D], weights.

    dO lacks the factor by which the loss of these sequences enters the mean over a batch. X is None
    where q is no linear function of it (`qk_norm`): W_Q's gradient does not follow from dQ then.
    `returned` is what the attention of the run gave in the same forward pass.
    """

    q: Array
    k: Array
    v: Array
    do: Array
    x: Array | None
    w_q: Array
    w_k: Array
    returned: Returned


def make_layers(
    model: ModelSettings, loss: Callable[..., tuple[Array, Any]]
) -> Callable[..., list[LayerArrays]]:
    """A jit-able function (params, inputs, targets [B, T], key) -> the arrays of every layer.

    It runs the model forward and backward once.

    Args:
      model: its shape.
      loss: `Steps.loss` of the model.
    """
    shape = (model.width, model.heads, model.width // model.heads)

    def layers(
        params: Any, inputs: Array, targets: Array, key: Key[Array, ""]
    ) -> list[LayerArrays]:
        d_outputs, records = jax.grad(
            lambda taps: loss(params, inputs, targets, key, taps), has_aux=True
        )(zero_taps(model, *inputs.shape))
        result = []
        for i, (record, do) in enumerate(zip(records, d_outputs, strict=True)):
            weights = params["blocks"][i]["attention"]
            w_q, w_k = (weights[name]["kernel"][...].reshape(shape) for name in ("query", "key"))
            do = do.astype(record.o.dtype)
            x = None if model.qk_norm else record.x
            assert record.lse is not None  # there is a tap
            returned = Returned(record.o, record.lse)
            result.append(LayerArrays(record.q, record.k, record.v, do, x, w_q, w_k, returned))
        return result

    return layers


def make_signals(
    settings: TrainSettings, steps: Steps
) -> Callable[..., tuple[Signals, Directions]]:
    """A jit-able function (params, inputs, targets [B, T], key) -> the signals of every layer.

    They are {layer_0: {name: [N]}, ...}, and the layers' directions, which are empty with
    `qk_norm`. It runs the model forward and backward once, and compares each layer's attention
    with exact arithmetic. q, k, v and dO are those of training on these sequences; see
    `LayerArrays`.
    """
    layers_of = make_layers(settings.model, steps.loss)
    scale, factor = score_scale(settings.model)

    def of_layer(
        numerics: tuple[HeadGroup, ...], arrays: LayerArrays, key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Array | None]:
        """The signals of a layer, and its direction."""
        layer = attention_signals(
            **arrays._asdict(),
            numerics=numerics,
            scale=scale,
            is_causal=True,
            rng_key=key,
            common_direction=arrays.x is not None,
        )
        if arrays.x is None:
            return layer, None
        for name in ("query_weight_gradient_error", "query_weight_gradient_exact"):
            layer[name] *= jnp.float32(factor)
        return layer, layer.pop("common_direction")

    def signals(
        params: Any, inputs: Array, targets: Array, key: Key[Array, ""]
    ) -> tuple[Signals, Directions]:
        layers = layers_of(params, inputs, targets, key)
        alike: dict[tuple[HeadGroup, ...], list[int]] = {}
        for i, arrays in enumerate(layers):
            alike.setdefault(as_computed(settings.attention, i, arrays), []).append(i)
        result: dict[int, tuple[dict[str, Array], Array | None]] = {}
        for numerics, indices in alike.items():
            # A loop over layers of one arithmetic compiles them once. Unrolled, twelve of them took
            # longer to compile than the training step.
            of = [(layers[i], jax.random.fold_in(key, i)) for i in indices]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *of)
            measured = lax.map(lambda args, n=numerics: of_layer(n, *args), stacked)
            for place, i in enumerate(indices):
                result[i] = jax.tree.map(lambda x, place=place: x[place], measured)
        found = [(f"layer_{i}", *result[i]) for i in sorted(result)]
        directions = {name: direction for name, _, direction in found if direction is not None}
        return {name: layer for name, layer, _ in found}, directions

    return signals


def as_computed(
    attention: AttentionSettings, layer: int, arrays: LayerArrays
) -> tuple[HeadGroup, ...]:
    """The groups of heads of a layer, in the softmax steps of what computes them."""
    groups = []
    for group in attention.layers[layer]:
        spec = Spec(numerics=group.numerics, row_max=group.row_max, scale=1.0, is_causal=True)
        request = Request.of(arrays.q, arrays.k, Extras(), spec)
        step = keys_per_step(request, attention.implementation)
        numerics = group.numerics.replace(kv_block=step)
        groups.append(dataclasses.replace(group, numerics=numerics))
    return tuple(groups)
