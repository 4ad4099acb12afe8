"""Warns when the gradient's norm rises above its least; the cheapest warning: it needs no signals.

*Risen*: the median of the gradient norms of the last 100 steps is at least 1.5 times its least
since the warm-up ended (and since step 100). Medians of fewer than five norms do not count. A norm
that is not finite counts as large.

The value of this warning depends on the model (docs/failure.md). In GPT-2 124M the norm rose before
every explosion and in few of the runs that held. In small models that train for long it rises in
most runs.
"""

import collections
import math
import statistics
from collections.abc import Mapping

RISE = 1.5
WINDOW_STEPS = 100
LEAST_NORMS = 5


def first_rise(norms: Mapping[int, float], warmup_steps: int) -> int | None:
    """Returns the first step at which the norm had risen, or None.

    Args:
      norms: the norms by step before clipping, in any order.
      warmup_steps: the warm-up steps of the learning rate. Norms of the warm-up count only as part
        of later medians.
    """
    least = math.inf
    window: collections.deque[tuple[int, float]] = collections.deque()
    for step, norm in sorted(norms.items()):
        window.append((step, norm if math.isfinite(norm) else math.inf))
        while window[0][0] <= step - WINDOW_STEPS:
            window.popleft()
        if len(window) < LEAST_NORMS or step < max(warmup_steps, WINDOW_STEPS):
            continue
        median = statistics.median(norm for _, norm in window)
        least = min(least, median)
        if median >= RISE * least:
            return step
    return None
