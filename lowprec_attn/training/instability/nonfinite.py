"""Finds the layer with the first non-finite value when a loss or gradient is not finite.

The failing batch is replayed on the last good parameters. Its values are checked in the order in
which they are computed: forward through the layers, the loss, then backward from the last layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

from lowprec_attn.gpt2.model import zero_taps
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.step import Steps

_FORWARD = (
    ("x", "the normalised attention input"),
    ("q", "the queries"),
    ("k", "the keys"),
    ("v", "the values"),
    ("o", "the attention output"),
    ("residual", "the residual stream after the block"),
)


class Culprit(NamedTuple):
    """The first non-finite value: `layer` counts from 0 and is None outside the layers."""

    layer: int | None
    what: str
    direction: str

    def __str__(self) -> str:
        place = "outside the layers" if self.layer is None else f"in layer {self.layer}"
        return f"first non-finite value {place}: {self.what} ({self.direction})"


class _Flags(NamedTuple):
    """Flags that are True where all values are finite; a list has one entry per layer.

    `others` are the gradients outside the layers, and `norm` is the norm of all gradients, which
    overflows where a finite gradient has a square that float32 cannot hold.
    """

    parameters: dict[str, Array]
    forward: list[dict[str, Array]]
    loss: Array
    d_output: list[Array]
    gradients: list[Array]
    others: dict[str, Array]
    norm: Array


def find_culprit(
    settings: TrainSettings,
    steps: Steps,
    params: Any,
    batch: tuple[Int[Array, "A M T"], Int[Array, "A M T"]],
    key: Key[Array, ""],
    jit: Callable[..., Any],
) -> Culprit:
    """Returns the first non-finite value of a step.

    Args:
      settings: settings of the run.
      steps: functions of the run.
      params: the last good parameters.
      batch: inputs and targets of the failing step, by micro-batch.
      key: key of the failing step; see `step.step_key`.
      jit: jits with the compiler options of the step; see `devices.Devices.jit`.
    """
    flags_of = jit(lambda *args: _flags(settings, steps, *args))
    for i in range(batch[0].shape[0]):
        flags = jax.device_get(
            flags_of(params, batch[0][i], batch[1][i], jax.random.fold_in(key, i))
        )
        culprit = _first(flags)
        if culprit is not None:
            return culprit
    return Culprit(None, "the optimizer's update (loss and gradients are finite)", "update")


def _flags(
    settings: TrainSettings, steps: Steps, params: Any, x: Array, y: Array, key: Key[Array, ""]
) -> _Flags:
    def loss_fn(params: Any, taps: Any) -> tuple[Array, Any]:
        return steps.loss(params, x, y, key, taps)

    (loss, records), (grads, d_outputs) = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(
        params, zero_taps(settings.model, *x.shape)
    )
    layers = range(settings.model.layers)
    return _Flags(
        parameters=_by_name(params),
        forward=[
            {name: _finite(getattr(records[i], name)) for name, _ in _FORWARD} for i in layers
        ],
        loss=_finite(loss),
        d_output=[_finite(d_outputs[i]) for i in layers],
        gradients=[_finite(grads["blocks"][i]) for i in layers],
        others={n: flag for n, flag in _by_name(grads).items() if not n.startswith("blocks.")},
        norm=_finite(optax.tree.norm(grads)),
    )


def _by_name(params: Any) -> dict[str, Array]:
    """Returns a flag for each array of the parameters, or of their gradients."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _finite(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
    }


def _finite(tree: Any) -> Array:
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]).all()


def _first(flags: _Flags) -> Culprit | None:
    for name, finite in flags.parameters.items():
        if not finite:
            parts = name.split(".")
            layer = int(parts[1]) if parts[0] == "blocks" else None
            return Culprit(layer, f"the parameters {name}", "before the step")
    for i, layer_flags in enumerate(flags.forward):
        for name, what in _FORWARD:
            if not layer_flags[name]:
                return Culprit(i, what, "forward")
    if not flags.loss:
        return Culprit(None, "the loss", "forward")
    for i in reversed(range(len(flags.d_output))):
        if not flags.d_output[i]:
            return Culprit(i, "the gradient dO of the attention output", "backward")
        if not flags.gradients[i]:
            return Culprit(i, "the gradients of its weights", "backward")
    for name, finite in flags.others.items():
        if not finite:
            return Culprit(None, f"the gradients of the parameters {name}", "backward")
    if not flags.norm:
        return Culprit(None, "the norm of the gradients, each of which is finite", "backward")
    return None
