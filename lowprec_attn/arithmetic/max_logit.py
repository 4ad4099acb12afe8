"""The largest score of a row, which papers call the max logit; QK-clip compares it with a bound.

The score S is the one that the softmax sees: after scale, soft cap, bias and mask, as rounded at
`scores`, and before the sink. Without a sink, max S ≤ lse ≤ max S + log(number of keys). A row that
sees no key has −inf. The largest score has no gradient.

The softmax computes the largest score of each step anyway, before it applies its row-max rule. To
keep the largest score from step to step costs one maximum per row and step. Where m after the last
step is the largest score, only the store costs anything. In all other cases m may differ from it:
`LazyMax` keeps an m up to `threshold` in base 2 below it, `DynamicMax` puts m up to `max_shift`
above it, `PublishedMax` any distance above it, and `whole_max` up to 1 in base 2 above it. A sink
may exceed the scores of all keys, and `stats` rounds m.

The largest |S| would need a minimum as well as the maximum: one more instruction per entry. The
largest score before the soft cap would need a second maximum per entry, because tanh rounds
different scores to 1.
"""

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import StandardMax


def is_running_max(spec: Spec, *, has_sinks: bool) -> bool:
    """Whether m after the last step is the largest score of the row."""
    n = spec.numerics
    rule_is_maximum = isinstance(spec.row_max, StandardMax) and n.exponent != "whole_max"
    return rule_is_maximum and n.stats.is_identity and not has_sinks


def is_tracked(spec: Spec, *, has_sinks: bool) -> bool:
    """Whether a kernel must keep the largest score next to m, because m does not provide it."""
    return spec.max_logit and not is_running_max(spec, has_sinks=has_sinks)


def maximum(x: Array, axis: int | tuple[int, ...]) -> Array:
    """The maximum over axes, NaN if any entry is NaN. XLA's on a CPU may leave NaN out."""
    is_nan = jnp.any(jnp.isnan(x), axis=axis)
    return jnp.where(is_nan, jnp.float32(jnp.nan), jnp.max(x, axis=axis))
