"""Determines from a run's arithmetic which of the mechanisms of docs/failure.md it is open to.

A: a row statistic is rounded, so Σ_j P of the backward pass is not 1. This includes `shift`, which
rounds the exponents S − m of the P̄ that l sums. It also includes a difference between `row_sum`
and `recomputed_probs`: l sums P̄ as rounded by `probs` and the backward pass recomputes P without
that rounding, or the other way round.

B: O, or the product P̄V from which it is made, is rounded, and δ reads it. A rounded operand P̄ does
not count.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowprec_attn.numerics import Numerics, Point
from lowprec_attn.training.config import attention_settings
from lowprec_attn.training.settings import recorded_model

NEITHER = "–"

_STATISTICS: tuple[Point, ...] = ("shift", "stats", "normalizer", "lse")
_PRODUCTS: tuple[Point, ...] = ("pv", "rescale", "accumulator")
# Fields that configs of earlier versions lack, which do not belong to attention.
_LATER_FIELDS = {"logits_dtype": "float32", "qk_norm": False, "z_loss": 0.0}


def mechanism(config: Mapping[str, Any]) -> str:
    """Returns the mechanisms and the points at fault, over all heads, or `–` if there are none.

    Examples are `A (lse)` and `A (normalizer), B (pv, output)`.

    Args:
      config: the run's recorded config. What a rollback changes later does not count.

    Raises:
      KeyError, TypeError, ConfigError: the config is invalid.
    """
    model = recorded_model({**_LATER_FIELDS, **config["model"]})
    dtype = jnp.dtype(model.activation_dtype)
    layers = attention_settings(config["attention"], model).layers
    arithmetic = {group.numerics for layer in layers for group in layer}
    parts = [
        f"{name} ({', '.join(points)})"
        for name, found in (("A", _of_statistics), ("B", _of_output))
        if (points := dict.fromkeys(p for numerics in arithmetic for p in found(numerics, dtype)))
    ]
    return ", ".join(parts) or NEITHER


def _of_statistics(numerics: Numerics, dtype: np.dtype) -> Iterator[str]:
    yield from _rounded(numerics, _STATISTICS, dtype)
    choices = ("row_sum", "recomputed_probs")
    rounded = [name for name in choices if getattr(numerics, name) == "rounded"]
    if len(rounded) == 1 and not numerics.probs.is_identity:
        yield rounded[0]


def _of_output(numerics: Numerics, dtype: np.dtype) -> Iterator[str]:
    if numerics.delta in ("normalized", "after_cast"):  # rows of dS sum to zero whatever δ is
        return
    yield from _rounded(numerics, ("delta_value",), dtype)
    if numerics.delta == "dp_p":
        return
    # The two halves of O together hold O as it is before its rounding to 16 bits.
    read = {"same": (*_PRODUCTS, "output"), "auxiliary": ()}
    read |= dict.fromkeys(("float32", "halves"), _PRODUCTS)
    yield from _rounded(numerics, (*read[numerics.saved_output], "output_bwd"), dtype)
    if numerics.saved_output == "auxiliary":
        yield "saved_output"  # O′ is kept in bfloat16


def _rounded(numerics: Numerics, points: tuple[Point, ...], dtype: np.dtype) -> Iterator[str]:
    return (point for point in points if not numerics.rounding_at(point, dtype).is_identity)
