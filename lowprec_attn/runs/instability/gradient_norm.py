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


class GradientNormWatch:
    """Follows the norm of a gradient; call `add` for every recorded norm in the order of the steps.

    Args:
      warmup_steps: the warm-up steps of the learning rate. Norms of the warm-up count only as part
        of later medians.

    Attributes:
      median: the median of the norms of the last 100 steps; NaN while there are fewer than five.
      least: the smallest median since the warm-up and step 100; infinite before that.
      risen: the first step at which the norm had risen; None before that.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.median = math.nan
        self.least = math.inf
        self.risen: int | None = None
        self._begins = max(warmup_steps, WINDOW_STEPS)
        self._window: collections.deque[tuple[int, float]] = collections.deque()

    def add(self, step: int, norm: float) -> None:
        """Adds the norm of a step's gradient, before clipping."""
        self._window.append((step, norm if math.isfinite(norm) else math.inf))
        while self._window[0][0] <= step - WINDOW_STEPS:
            self._window.popleft()
        if len(self._window) < LEAST_NORMS:
            return
        self.median = statistics.median(norm for _, norm in self._window)
        if step < self._begins:
            return
        self.least = min(self.least, self.median)
        if self.risen is None and self.median >= RISE * self.least:
            self.risen = step


def first_rise(norms: Mapping[int, float], warmup_steps: int) -> int | None:
    """Returns the first step at which the norm had risen, or None.

    Args:
      norms: the norms by step, in any order.
      warmup_steps: the warm-up steps of the learning rate.
    """
    watch = GradientNormWatch(warmup_steps)
    for step, norm in sorted(norms.items()):
        watch.add(step, norm)
    return watch.risen
