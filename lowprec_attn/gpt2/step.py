"""One optimizer step and one evaluation, as pure functions of the training state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from lowprec_attn.gpt2.model import GPT2, Attend, cross_entropy
from lowprec_attn.gpt2.optimizer import adamw, learning_rate
from lowprec_attn.gpt2.settings import TrainSettings


class TrainState(NamedTuple):
    """What a checkpoint holds and a step changes.

    Attributes:
      params: float32 weights.
      opt_state: Optax state.
      step: number of updates made.
      failed: a loss, gradient or update was not finite. From then on no step changes anything,
        so that the live state is the last good one.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    failed: Bool[Array, ""]


class StepMetrics(NamedTuple):
    """Scalars of one step; `applied` is False if the update was withheld."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    lr: Float[Array, ""]
    applied: Bool[Array, ""]


class Steps(NamedTuple):
    """The jit-able functions of a run.

    Attributes:
      init: () -> TrainState.
      train: (state, inputs, targets [A, B/A, T]) -> (state, StepMetrics), over A micro-batches.
      evaluate: (params, inputs, targets [B, T]) -> mean loss.
      loss: (params, inputs, targets, key, taps) -> (loss, layer records).
    """

    init: Callable[[], TrainState]
    train: Callable[[TrainState, Array, Array], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[Any, Array, Array], Array]
    loss: Callable[..., tuple[Array, Any]]


def make_steps(settings: TrainSettings, attend: Attend) -> Steps:
    """The functions of a run with these settings."""
    optimizer = adamw(settings.optimizer, settings.steps)
    schedule = learning_rate(settings.optimizer, settings.steps)
    root = jax.random.key(settings.seed)
    graph = nnx.graphdef(nnx.eval_shape(lambda: _model(settings, root)))
    needs_key = any(
        head.numerics.needs_bits for layer in settings.attention.heads for head in layer
    )

    def loss_fn(
        params: Any,
        inputs: Array,
        targets: Array,
        key: Key[Array, ""] | None = None,
        taps: Any = None,
    ) -> tuple[Array, Any]:
        model = nnx.merge(graph, params)
        hidden, records = model(inputs, attend, key if needs_key else None, taps)
        return cross_entropy(hidden, model.tokens.embedding[...], targets), records

    def init() -> TrainState:
        params = nnx.state(_model(settings, root), nnx.Param)
        opt_state = optimizer.init(params)
        return TrainState(params, opt_state, jnp.int32(0), jnp.bool_(False))

    def train(state: TrainState, inputs: Array, targets: Array) -> tuple[TrainState, StepMetrics]:
        key = step_key(root, state.step)
        loss, grads = _accumulate(loss_fn, state.params, inputs, targets, key)
        grad_norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        finite &= jnp.isfinite(optax.tree.norm(updates))
        applied = finite & ~state.failed
        new = TrainState(params, opt_state, state.step + 1, state.failed)
        old = state._replace(failed=jnp.bool_(True))
        kept = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)
        return kept, StepMetrics(loss, grad_norm, schedule(state.step), applied)

    def evaluate(params: Any, inputs: Array, targets: Array) -> Array:
        return loss_fn(params, inputs, targets, root)[0]

    return Steps(init, train, evaluate, loss_fn)


def step_key(root: Key[Array, ""], step: Int[Array, ""]) -> Key[Array, ""]:
    """The key of all stochastic rounding in a step: a function of seed and step."""
    return jax.random.fold_in(root, step)


def _model(settings: TrainSettings, key: Key[Array, ""]) -> GPT2:
    return GPT2(settings.model, settings.attention, nnx.Rngs(key))


def _accumulate(
    loss_fn: Callable[..., tuple[Array, Any]],
    params: Any,
    inputs: Array,
    targets: Array,
    key: Key[Array, ""],
) -> tuple[Array, Any]:
    """Mean loss and gradient over the micro-batches, summed in float32 one after the other."""
    count = inputs.shape[0]
    value_and_grad = jax.value_and_grad(lambda p, x, y, k: loss_fn(p, x, y, k)[0])

    def micro_batch(total: tuple[Array, Any], xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
        i, x, y = xs
        result = value_and_grad(params, x, y, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    if count == 1:
        return value_and_grad(params, inputs[0], targets[0], jax.random.fold_in(key, 0))
    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    indices = jnp.arange(count, dtype=jnp.int32)
    total, _ = lax.scan(micro_batch, zeros, (indices, inputs, targets))
    return jax.tree.map(lambda x: x / jnp.float32(count), total)
