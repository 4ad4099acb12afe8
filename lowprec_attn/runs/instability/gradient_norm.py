"""A gradient's norm that leaves its least: the cheapest warning, for it needs no signals.

*Risen*: the median of the gradient norms of the last 100 steps is 1.5 times its least since the
warm-up ended, or more. Medians of fewer than five norms count for nothing. A norm that is not
finite is large.

What it was worth depends on the model (docs/failure.md): of GPT-2 124M it rose before every
explosion and in few runs that held; of small models that train for long it rises in most.
"""

import collections
import math
import statistics
from collections.abc import Mapping

RISE = 1.5
WINDOW_STEPS = 100
LEAST_NORMS = 5


class GradientNormWatch:
    """Follows the norm of a gradient; `add` every recorded norm in the order of the steps.

    Args:
      warmup_steps: of the learning rate; norms before count only in medians after.

    Attributes:
      median: of the norms recorded in the last 100 steps; NaN while there are fewer than five.
      least: the smallest median since the warm-up; infinite before.
      risen: the first step at which it had risen; None so far.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.median = math.nan
        self.least = math.inf
        self.risen: int | None = None
        self._begins = max(warmup_steps, WINDOW_STEPS)
        self._window: collections.deque[tuple[int, float]] = collections.deque()

    def add(self, step: int, norm: float) -> None:
        """Takes the norm of a step's gradient, before clipping."""
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
    """The first step at which the norm had risen; None where it had not.

    Args:
      norms: by step, in any order.
      warmup_steps: of the learning rate.
    """
    watch = GradientNormWatch(warmup_steps)
    for step, norm in sorted(norms.items()):
        watch.add(step, norm)
    return watch.risen
