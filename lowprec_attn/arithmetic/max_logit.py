"""The largest score of a row: what QK-clip compares with its bound, max logit in the papers.

S is what the softmax sees: after scale, soft cap, bias and mask, as rounded at `scores`, and before
the sink. So max S ≤ lse ≤ max S + log(number of keys) without a sink. A row that sees no key has
−inf. No gradient goes through it.

A softmax has the largest score of each step at hand, before its row-max rule: kept from step to
step it costs one maximum a row and step. Nothing but its store is paid for where m is that number.
Elsewhere m is near it at best. `LazyMax` keeps an m up to `threshold` in base 2 below it.
`DynamicMax` puts m up to `max_shift` above it, `PublishedMax` any distance, and `whole_max` up to 1
in base 2. A sink may be above all keys, and `stats` rounds m.

The largest |S| would take a minimum beside the maximum, an instruction an entry. The largest score
before the soft cap would take a second maximum an entry: what tanh has rounded to 1 is lost.
"""

from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import StandardMax


def is_running_max(spec: Spec, *, has_sinks: bool) -> bool:
    """Whether m after the last step is the largest score of the row."""
    n = spec.numerics
    rule_is_maximum = isinstance(spec.row_max, StandardMax) and n.exponent != "whole_max"
    return rule_is_maximum and n.stats.is_identity and not has_sinks


def is_tracked(spec: Spec, *, has_sinks: bool) -> bool:
    """Whether a kernel that is asked for it keeps it beside m."""
    return spec.max_logit and not is_running_max(spec, has_sinks=has_sinks)
