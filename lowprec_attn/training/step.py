"""One optimizer step and one evaluation, as pure functions of the training state."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from lowprec_attn.gpt2.loss import cross_entropy
from lowprec_attn.gpt2.model import Attend, Decoder
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.training import models
from lowprec_attn.training.optimizer import adamw, can_overflow, learning_rate
from lowprec_attn.training.qk_clip import asks_attention, clipped, largest_scores
from lowprec_attn.training.settings import Model, TrainSettings


class TrainState(NamedTuple):
    """The training state: a step changes it, a checkpoint holds it.

    Attributes:
      params: float32 weights.
      opt_state: Optax state.
      step: number of updates made.
      failed: whether a loss, gradient or update was not finite. From then on no step changes
        anything, so that the live state is the last good one.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    failed: Bool[Array, ""]


class StepMetrics(NamedTuple):
    """Scalars of one step.

    Attributes:
      loss: mean cross-entropy in nats.
      grad_norm: norm of the gradient before clipping.
      lr: learning rate of the update.
      applied: False if the update was withheld.
      heads_clipped: number of heads whose W_Q and W_K were scaled, None without `qk_clip`.
      max_logit: largest score of all heads before the update, None without `qk_clip`.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    lr: Float[Array, ""]
    applied: Bool[Array, ""]
    heads_clipped: Int[Array, ""] | None = None
    max_logit: Float[Array, ""] | None = None


class Gathered(NamedTuple):
    """Results combined over micro-batches and devices: `mean` by mean, `largest` by maximum."""

    mean: Any
    largest: Any = None


class Steps(NamedTuple):
    """The jit-able functions of a run.

    The run's root key is an argument, so that runs with different seeds share compiled programs.

    Attributes:
      init: (root) -> TrainState.
      train: (state, inputs, targets [A, B/A, T], root) -> (state, StepMetrics), over A
        micro-batches.
      evaluate: (params, inputs, targets [A, B/A, T], root) -> mean loss, over A micro-batches.
      loss: (params, inputs, targets, key, taps) -> (loss, layer records).
    """

    init: Callable[[Key[Array, ""]], TrainState]
    train: Callable[[TrainState, Array, Array, Key[Array, ""]], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[Any, Array, Array, Key[Array, ""]], Array]
    loss: Callable[..., tuple[Array, Any]]


# Makes a function (params, inputs, targets [A, M, T], key) -> Gathered, which runs over
# micro-batches, run on several devices.
OverDevices = Callable[[Callable[..., Any]], Callable[..., Any]]


def make_steps(
    settings: TrainSettings, attend: Attend, over_devices: OverDevices = lambda function: function
) -> Steps:
    """Returns the functions of a run.

    Args:
      settings: settings of the run.
      attend: attention as the model calls it.
      over_devices: see `devices.Devices.over_devices`; the default uses one device.
    """
    optimizer = adamw(settings.optimizer, settings.steps)
    update = _make_update(settings, optimizer)
    loss_fn = make_loss(settings.model, settings.attention, attend)
    clips = settings.optimizer.qk_clip is not None
    trained_loss = loss_fn
    if clips and asks_attention(settings.model):
        asking = dataclasses.replace(attend, max_logit=True)
        trained_loss = make_loss(settings.model, settings.attention, asking)

    def loss_and_scores(*args: Any) -> tuple[Array, Array | None]:
        loss, records = trained_loss(*args)
        return loss, largest_scores(settings.model, records) if clips else None

    def init(root: Key[Array, ""]) -> TrainState:
        params = nnx.state(_model(settings.model, settings.attention, root), nnx.Param)
        opt_state = optimizer.init(params)
        return TrainState(params, opt_state, jnp.int32(0), jnp.bool_(False))

    @over_devices
    def gradients(params: Any, inputs: Array, targets: Array, key: Key[Array, ""]) -> Gathered:
        value_and_grad = jax.value_and_grad(loss_and_scores, has_aux=True)

        def part(*args: Any) -> Gathered:
            (loss, scores), grads = value_and_grad(params, *args)
            return Gathered((loss, grads), scores)

        return _gathered(part, inputs, targets, key)

    @over_devices
    def losses(params: Any, inputs: Array, targets: Array, key: Key[Array, ""]) -> Gathered:
        return _gathered(lambda *args: Gathered(loss_fn(params, *args)[0]), inputs, targets, key)

    def train(
        state: TrainState, inputs: Array, targets: Array, root: Key[Array, ""]
    ) -> tuple[TrainState, StepMetrics]:
        key = step_key(root, state.step)
        (loss, grads), scores = gradients(state.params, inputs, targets, key)
        with jax.named_scope("optimizer"):
            return update(state, loss, grads, scores)

    def evaluate(params: Any, inputs: Array, targets: Array, root: Key[Array, ""]) -> Array:
        return losses(params, inputs, targets, root).mean

    return Steps(init, train, evaluate, loss_fn)


def make_loss(
    model_settings: Model, attention: AttentionSettings, attend: Attend
) -> Callable[..., tuple[Array, Any]]:
    """Returns the function `Steps.loss` of a model."""
    graph = nnx.graphdef(
        nnx.eval_shape(lambda: _model(model_settings, attention, jax.random.key(0)))
    )
    needs_key = any(group.numerics.needs_bits for layer in attention.layers for group in layer)

    def loss_fn(
        params: Any,
        inputs: Array,
        targets: Array,
        key: Key[Array, ""] | None = None,
        taps: Any = None,
    ) -> tuple[Array, Any]:
        model = nnx.merge(graph, params)
        hidden, records = model(inputs, attend, key if needs_key else None, taps)
        with jax.named_scope("loss"):
            table, of = model.output_table, model_settings
            return cross_entropy(hidden, table, targets, of.logits_dtype, of.z_loss), records

    return loss_fn


def _make_update(
    settings: TrainSettings, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Array, Any, Array | None], tuple[TrainState, StepMetrics]]:
    """Returns a function (state, loss, gradients, scores) -> (state, metrics).

    If the loss, a gradient, an update or a score is not finite, the function withholds the update
    and sets `failed`.
    """
    schedule = learning_rate(settings.optimizer, settings.steps)
    threshold = settings.optimizer.qk_clip

    def update(
        state: TrainState, loss: Array, grads: Any, scores: Array | None
    ) -> tuple[TrainState, StepMetrics]:
        grad_norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if can_overflow(settings.optimizer):  # the check takes two passes over the state
            finite &= jnp.isfinite(optax.tree.norm(updates))
        heads_clipped = max_logit = None
        if threshold is not None and scores is not None:
            max_logit = jnp.max(scores)
            finite &= jnp.all(jnp.isfinite(scores))
            params, heads_clipped = clipped(params, scores, threshold)
        applied = finite & ~state.failed
        new = TrainState(params, opt_state, state.step + 1, state.failed)
        old = state._replace(failed=jnp.bool_(True))
        kept = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)
        lr = schedule(state.step)
        return kept, StepMetrics(loss, grad_norm, lr, applied, heads_clipped, max_logit)

    return update


def root_key(settings: TrainSettings) -> Key[Array, ""]:
    """The key from which a run draws its parameters and all stochastic rounding."""
    return jax.random.key(settings.seed)


def step_key(root: Key[Array, ""], step: Int[Array, ""]) -> Key[Array, ""]:
    """The key of all stochastic rounding in a step: a function of seed and step."""
    return jax.random.fold_in(root, step)


def _model(settings: Model, attention: AttentionSettings, key: Key[Array, ""]) -> Decoder:
    return models.decoder(settings, attention, nnx.Rngs(key))


def _gathered(
    function: Callable[..., Gathered], inputs: Array, targets: Array, key: Key[Array, ""]
) -> Gathered:
    """Combines function(inputs, targets, key) over the micro-batches; means are float32 sums."""
    count = inputs.shape[0]

    def part(i: Array | int) -> Gathered:
        return function(inputs[i], targets[i], jax.random.fold_in(key, i))

    if count == 1:
        return part(0)

    def joined(i: Array | int, before: Gathered) -> Gathered:
        new = part(i)
        largest = jax.tree.map(jnp.maximum, before.largest, new.largest)
        return Gathered(jax.tree.map(jnp.add, before.mean, new.mean), largest)

    mean, largest = jax.eval_shape(part, 0)
    start = Gathered(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), mean),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), largest),
    )
    total = lax.fori_loop(0, count, joined, start)
    return total._replace(mean=jax.tree.map(lambda x: x / jnp.float32(count), total.mean))
