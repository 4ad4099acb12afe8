"""QK-clip: W_Q and W_K of a head shrink where its scores are too large.

Kimi K2 (arXiv 2507.20534, algorithm 1, with α = 1/2): after the update of a step, where the largest
score of a head exceeds τ, its columns of W_Q and W_K are multiplied by √(τ / that score), and its
biases if there are any. So its scores on the same inputs are at most τ. As there, the score is
signed: what shrinks is a score that takes the weight of a row, not one that leaves it.

The largest score is that of the forward pass of the same step: all its sequences, the weights
before the update. A step's update can therefore lead beyond τ until the step after.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from lowprec_attn.gpt2.model import LayerRecord
from lowprec_attn.training.models import score_scale
from lowprec_attn.training.settings import Model


def asks_attention(settings: Model) -> bool:
    """Whether the largest scores come from attention itself, which has them at hand.

    A soft cap stands between them and W_Q and W_K: what it has rounded to the cap is lost.
    """
    return settings.soft_cap is None


def largest_scores(settings: Model, records: Sequence[LayerRecord]) -> Float32[Array, "L N"]:
    """max q_i · k_j · scale over all sequences and j ≤ i, for every head of every layer.

    Where attention has returned it, it is that one, as rounded at `scores`. Elsewhere products have
    the operands of the attention and float32 sums; `scores` does not round them, and they are taken
    before a soft cap. Cost: 2·B·N·T²·H FLOP a layer, without causal skipping; memory for N·T²
    scores.
    """
    given = [record.max_logit for record in records if record.max_logit is not None]
    if given:
        return jnp.max(jnp.stack(given), axis=1)
    scale = jnp.float32(score_scale(settings)[0])

    def of_sequence(qk: tuple[Array, Array]) -> Array:
        scores = jnp.einsum(
            "tnh,snh->nts",
            *qk,
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        seen = jnp.tri(scores.shape[1], dtype=jnp.bool_)[None]
        return jnp.max(jnp.where(seen, scores, -jnp.inf), axis=(1, 2))

    largest = [
        jnp.max(lax.map(of_sequence, lax.stop_gradient((r.q, r.k))), axis=0) for r in records
    ]
    return scale * jnp.stack(largest)


def clipped(
    params: Any, scores: Float32[Array, "L N"], threshold: float
) -> tuple[Any, Int[Array, ""]]:
    """The parameters with W_Q and W_K of the heads above the threshold multiplied by √(τ/score).

    Args:
      params: of the model.
      scores: see `largest_scores`.
      threshold: τ > 0.

    Returns:
      The parameters, and how many heads were above it.
    """
    above = scores > threshold
    factors = jnp.where(above, jnp.sqrt(threshold / jnp.where(above, scores, 1.0)), 1.0)
    layers = {
        f"blocks.{i}.attention.{name}": i
        for i in range(scores.shape[0])
        for name in ("query", "key")
    }
    found = set()

    def scaled(path: Any, weights: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        linear, _, _ = name.rpartition(".")  # its kernel [D, D], or bias [D]
        if linear not in layers:
            return weights
        found.add(name)
        of_channel = jnp.repeat(factors[layers[linear]], weights.shape[-1] // scores.shape[1])
        return weights * (of_channel if weights.ndim == 1 else of_channel[None])

    params = jax.tree_util.tree_map_with_path(scaled, params)
    assert found >= {f"{linear}.kernel" for linear in layers}, found
    return params, jnp.sum(above, dtype=jnp.int32)
