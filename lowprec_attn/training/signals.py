"""The diagnostics of every layer of the model on one or a few sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention.dispatch import keys_per_step
from lowprec_attn.diagnostics import attention_signals
from lowprec_attn.gpt2.model import LayerRecord, zero_taps
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.step import Steps

Signals = dict[str, dict[str, Array]]


def make_signals(settings: TrainSettings, steps: Steps) -> Callable[..., Signals]:
    """A jit-able function (params, inputs, targets [B, T], key) -> {layer_0: {name: [N]}, ...}.

    It runs the model forward and backward once, and compares each layer's attention with exact
    arithmetic. q, k, v and dO are those of training on these sequences; dO lacks the factor by
    which their loss enters the mean over a batch.
    """
    model = settings.model
    head_size = model.width // model.heads
    scale, factor = head_size**-0.5, 1.0
    if model.scale_placement == "qk":  # q is factor · X W_Q, and carries the scale already
        scale, factor = 1.0, head_size**-0.25

    def signals(params: Any, inputs: Array, targets: Array, key: Key[Array, ""]) -> Signals:
        d_outputs, records = jax.grad(
            lambda taps: steps.loss(params, inputs, targets, key, taps), has_aux=True
        )(zero_taps(model, *inputs.shape))
        result = {}
        for i, (groups, record) in enumerate(zip(settings.attention.layers, records, strict=True)):
            weights = params["blocks"][i]["attention"]
            w_q, w_k = (
                weights[name]["kernel"][...].reshape(model.width, model.heads, head_size)
                for name in ("query", "key")
            )
            layer = attention_signals(
                record.q,
                record.k,
                record.v,
                d_outputs[i].astype(record.o.dtype),
                numerics=[_as_computed(group, record, settings.attention) for group in groups],
                scale=scale,
                is_causal=True,
                x=record.x,
                w_q=w_q,
                w_k=w_k,
                rng_key=jax.random.fold_in(key, i),
            )
            layer["query_weight_gradient_error"] *= jnp.float32(factor)
            result[f"layer_{i}"] = layer
        return result

    return signals


def _as_computed(group: HeadGroup, record: LayerRecord, attention: AttentionSettings) -> HeadGroup:
    """The group, in the softmax steps of the implementation that computes it."""
    spec = Spec(numerics=group.numerics, row_max=group.row_max, scale=1.0, is_causal=True)
    request = Request.of(record.q, record.k, Extras(), spec)
    step = keys_per_step(request, attention.implementation)
    return dataclasses.replace(group, numerics=group.numerics.replace(kv_block=step))
