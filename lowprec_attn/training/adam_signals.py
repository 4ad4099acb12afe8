"""What Adam does to each layer: how far a step moves its weights, and where ε holds it back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowprec_attn.training.optimizer import learning_rate
from lowprec_attn.training.settings import OptimizerSettings

AdamValues = dict[str, dict[str, Array]]
"""By layer, a number by name."""


def make_adam_signals(
    settings: OptimizerSettings, steps: int, layers: int
) -> Callable[[Any, Any], AdamValues]:
    """(params, opt_state) -> {layer_0: {name: []}, …, outside: {name: []}}, jit-able.

    Both follow from the optimizer's state before a step, so the step itself is not changed. There
    must have been an update before it. `outside` are embeddings and the last norm.

      update_ratio   RMS of the last update over RMS of the weights: the learning rate that counts.
      below_epsilon  share of coordinates with √v̂ < ε, where v̂ is Adam's mean of squared gradients.
                     There ε, and not the gradient's size, sets the length of the step (Wortsman et
                     al., arXiv 2309.14322, section 3.4).

    Args:
      settings: of the optimizer, as `adamw` has them.
      steps: of the run.
      layers: of the model.
    """
    schedule = learning_rate(settings, steps)

    def update(weights: Array, mu: Array, nu: Array, count: Array) -> tuple[Array, Array]:
        m = mu / (1 - jnp.float32(settings.b1) ** count)
        root = jnp.sqrt(nu / (1 - jnp.float32(settings.b2) ** count))
        # As `adamw`: where ε is 0, 0/0 is 0.
        step = jnp.where(root + settings.eps > 0, m / (root + settings.eps), 0)
        lr = jnp.asarray(schedule(count - 1))
        if weights.ndim >= 2:  # decay was that of the weights before the update
            before = (weights + lr * step) / (1 - lr * settings.weight_decay)
            step += settings.weight_decay * before
        return lr * step, root < settings.eps

    def part(trees: list[Any], count: Array) -> dict[str, Array]:
        leaves = [jax.tree.leaves(tree) for tree in trees]
        updates, small = zip(
            *(update(w, mu, nu, count) for w, mu, nu in zip(*leaves, strict=True)), strict=True
        )
        total = sum(x.size for x in leaves[0])
        return {
            "update_ratio": optax.tree.norm(list(updates)) / optax.tree.norm(leaves[0]),
            "below_epsilon": sum((jnp.sum(x, dtype=jnp.float32) for x in small), jnp.float32(0))
            / total,
        }

    def measure(params: Any, opt_state: Any) -> AdamValues:
        adam = optax.tree.get(opt_state, "ScaleByAdamState")
        trees, count = (params, adam.mu, adam.nu), adam.count
        parts = {f"layer_{i}": [tree["blocks"][i] for tree in trees] for i in range(layers)}
        parts["outside"] = [[tree[name] for name in params if name != "blocks"] for tree in trees]
        with jax.numpy_dtype_promotion("standard"):
            return {name: part(trees, count) for name, trees in parts.items()}

    return measure
