"""QK-clip: shrinks W_Q and W_K of a head whose scores are too large.

The rule is algorithm 1 of Kimi K2 (arXiv 2507.20534) with α = 1/2. After the update of a step, each
head whose largest score exceeds τ has its columns of W_Q and W_K, and its biases if it has any,
multiplied by √(τ / score). Without the update, the head's scores on the same inputs would then be
at most τ. As in Kimi K2, the score is signed: a large positive score, which attracts the weight of
its row, is clipped, and a large negative score is not.

The largest score comes from the forward pass of the same step, over all its sequences and with the
weights before the update. The update of a step can therefore lift scores above τ until the next
step.
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
    """Whether attention itself returns the largest scores, which it has at hand.

    With a soft cap it returns scores behind the cap. A score that is rounded to the cap no longer
    tells how large q · k was.
    """
    return settings.soft_cap is None


def largest_scores(settings: Model, records: Sequence[LayerRecord]) -> Float32[Array, "L N"]:
    """Returns max q_i · k_j · scale over all sequences and j ≤ i, for every head of every layer.

    If attention has returned these maxima, they are taken as they are, rounded at `scores`.
    Otherwise the scores are computed here from the operands of the attention, with float32 sums.
    They are then neither rounded at `scores` nor soft-capped. This costs 2·B·N·T²·H FLOP a layer,
    without causal skipping, and memory for N·T² scores.
    """
    given = [record.max_logit for record in records if record.max_logit is not None]
    if given:
        return jnp.max(jnp.stack(given), axis=1)
    scale = jnp.float32(score_scale(settings)[0])

    def of_sequence(qk: tuple[Array, Array]) -> Array:
        scores = jnp.einsum(
            "tnh,snh->nts", *qk, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
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
    """Multiplies W_Q and W_K of the heads above the threshold by √(τ/score).

    Args:
      params: parameters of the model.
      scores: see `largest_scores`.
      threshold: τ > 0.

    Returns:
      The new parameters, and the number of heads above the threshold.
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
        linear, _, _ = name.rpartition(".")  # `weights`: its kernel [D, D] or bias [D]
        if linear not in layers:
            return weights
        found.add(name)
        of_channel = jnp.repeat(factors[layers[linear]], weights.shape[-1] // scores.shape[1])
        return weights * (of_channel if weights.ndim == 1 else of_channel[None])

    params = jax.tree_util.tree_map_with_path(scaled, params)
    assert found >= {f"{linear}.kernel" for linear in layers}, found
    return params, jnp.sum(above, dtype=jnp.int32)
