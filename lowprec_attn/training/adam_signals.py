"""What Adam does to each layer: how far a step moves its weights, where ε holds it back, and
whether updates point the same way.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowprec_attn.training.optimizer import learning_rate
from lowprec_attn.training.settings import OptimizerSettings

AdamValues = dict[str, dict[str, Array]]
"""By layer, a number by name."""


class AdamDirections(NamedTuple):
    """m̂ / (√v̂ + ε) of W_Q and W_K of every layer, after so many updates.

    They take 8·d² bytes a layer while a measured step runs: 57 MB for GPT-2 124M.
    """

    of_layers: dict[str, dict[str, Array]]
    updates: Array


class AdamSignals(NamedTuple):
    """Jit-able functions of a run; see `make_adam_signals`.

    Attributes:
      measure: (params, opt_state) before a step -> what is known of the last update, and its
        directions.
      join: (values, directions, opt_state) of those and after the step -> the values with the
        autocorrelation.
    """

    measure: Callable[[Any, Any], tuple[AdamValues, AdamDirections]]
    join: Callable[[AdamValues, AdamDirections, Any], AdamValues]


def make_adam_signals(settings: OptimizerSettings, steps: int, layers: int) -> AdamSignals:
    """Signals of {layer_0: {name: []}, …, outside: {name: []}} at a step that is measured.

    All follow from the optimizer's state, so the step itself is not changed. There must have been
    an update before it. `outside` are embeddings and the last norm, which have the first two alone.

      update_ratio   RMS of the last update over RMS of the weights: the learning rate that counts.
      below_epsilon  share of coordinates with √v̂ < ε, where v̂ is Adam's mean of squared gradients.
                     There ε, and not the gradient's size, sets the length of the step (Wortsman et
                     al., arXiv 2309.14322, section 3.4).

    and of W_Q and W_K, in [−1, 1], with Adam's direction u = m̂ / (√v̂ + ε), which has neither the
    learning rate nor weight decay:

      query_update_autocorrelation, key_…  cos(u of this step, u of the last). NaN where this step
                     was withheld. Gradients that are independent from step to step give
                     about β₁, for m keeps so much of itself. Molybog et al. (arXiv 2304.09871)
                     connect divergence under Adam with gradients that are not independent.
      query_update_next_layer, key_…       cos(u, u of the next layer) of the last update, where
                     there is one of the same shape; about 0 ± 1/d for unrelated [d, d] weights.

    Args:
      settings: of the optimizer, as `adamw` has them.
      steps: of the run.
      layers: of the model.
    """
    schedule = learning_rate(settings, steps)

    def direction(mu: Array, nu: Array, count: Array) -> tuple[Array, Array]:
        m = mu / (1 - jnp.float32(settings.b1) ** count)
        root = jnp.sqrt(nu / (1 - jnp.float32(settings.b2) ** count))
        # As `adamw`: where ε is 0, 0/0 is 0.
        return jnp.where(root + settings.eps > 0, m / (root + settings.eps), 0), root

    def update(weights: Array, mu: Array, nu: Array, count: Array) -> tuple[Array, Array]:
        step, root = direction(mu, nu, count)
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

    def directions(adam: optax.ScaleByAdamState) -> AdamDirections:
        of_layers = {}
        for i in range(layers):
            mu, nu = (tree["blocks"][i]["attention"] for tree in (adam.mu, adam.nu))
            of_layers[f"layer_{i}"] = {
                name: direction(mu[name]["kernel"][...], nu[name]["kernel"][...], adam.count)[0]
                for name in ("query", "key")
            }
        return AdamDirections(of_layers, adam.count)

    def measure(params: Any, opt_state: Any) -> tuple[AdamValues, AdamDirections]:
        adam = _adam(opt_state)
        trees, count = (params, adam.mu, adam.nu), adam.count
        parts = {f"layer_{i}": [tree["blocks"][i] for tree in trees] for i in range(layers)}
        parts["outside"] = [[tree[name] for name in params if name != "blocks"] for tree in trees]
        with jax.numpy_dtype_promotion("standard"):
            values = {name: part(trees, count) for name, trees in parts.items()}
            last = directions(adam)
            for (layer, here), (_, after) in itertools.pairwise(last.of_layers.items()):
                for name in here:
                    if here[name].shape == after[name].shape:
                        values[layer][f"{name}_update_next_layer"] = _cosine(
                            here[name], after[name]
                        )
        return values, last

    def join(values: AdamValues, last: AdamDirections, opt_state: Any) -> AdamValues:
        with jax.numpy_dtype_promotion("standard"):
            now = directions(_adam(opt_state))
            return values | {
                layer: values[layer]
                | {
                    f"{name}_update_autocorrelation": jnp.where(
                        now.updates > last.updates, _cosine(u, last.of_layers[layer][name]), jnp.nan
                    )
                    for name, u in of.items()
                }
                for layer, of in now.of_layers.items()
            }

    return AdamSignals(measure, join)


def _cosine(a: Array, b: Array) -> Array:
    """⟨a, b⟩ / (‖a‖ ‖b‖), 0 where one of them is 0; no matrix product, which devices may round."""
    sizes = jnp.sqrt(jnp.sum(a * a)) * jnp.sqrt(jnp.sum(b * b))
    return jnp.sum(a * b) / jnp.where(sizes == 0, 1, sizes)


def _adam(opt_state: Any) -> optax.ScaleByAdamState:
    def is_adam(state: Any) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    (adam,) = (s for s in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(s))
    return adam
