"""When a run has exploded, and when a layer's scores have run away: the words, as code.

*Explosion*: the smoothed training loss lies more than 0.7 nats above its best for 100 steps, or a
loss is not finite. Smoothed is the mean of what was recorded in the last 50 steps. The best of them
counts from the 10th step on: the first loss of a run resumed from another one is only noise.

*Runaway*: a layer's largest |score| is above 5 times its median of the 1,000 steps before, and
still is 500 steps later.
"""

import bisect
import collections
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

EXCESS_NATS = 0.7
LASTING_STEPS = 100
SMOOTHED_STEPS = 50
BEST_STEPS = 10

RUNAWAY_FACTOR = 5.0
RUNAWAY_BEFORE_STEPS = 1000
RUNAWAY_AFTER_STEPS = 500


class LossWatch:
    """Follows a training loss; `add` every recorded loss in the order of the steps.

    Attributes:
      explosion: first step of the first excess that lasted, or whose loss was not finite; None so
        far.
      excess_since: first step of the excess that lasts now; None where there is none.
      smoothed: mean of the finite losses recorded in the last 50 steps; infinite before the first.
      best: the smallest `smoothed` from the 10th step on; infinite before.
    """

    def __init__(self, losses: Iterable[tuple[int, float]] = ()) -> None:
        self.explosion: int | None = None
        self.smoothed = math.inf
        self._window: collections.deque[tuple[int, float]] = collections.deque()
        self.best = math.inf
        self.excess_since: int | None = None
        self._step = -1
        self._first: int | None = None
        for step, loss in losses:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        """Takes the loss of a step, in nats per token."""
        self._step = step
        self._first = step if self._first is None else self._first
        if not math.isfinite(loss):
            self.excess_since = step if self.excess_since is None else self.excess_since
            self.explosion = self.excess_since if self.explosion is None else self.explosion
            return
        self._window.append((step, loss))
        while self._window[0][0] <= step - SMOOTHED_STEPS:
            self._window.popleft()
        self.smoothed = sum(value for _, value in self._window) / len(self._window)
        if step - self._first + 1 >= BEST_STEPS:
            self.best = min(self.best, self.smoothed)
        if self.smoothed <= self.best + EXCESS_NATS:
            self.excess_since = None
        elif self.excess_since is None:
            self.excess_since = step
        if self.explosion is None and self.excess_steps >= LASTING_STEPS:
            self.explosion = self.excess_since

    @property
    def excess_steps(self) -> int:
        """For how many steps the loss has now been in excess; 0 where it is not."""
        return 0 if self.excess_since is None else self._step - self.excess_since + 1


def smoothed_losses(losses: Mapping[int, float]) -> dict[int, float]:
    """The smoothed loss at every step whose own is finite.

    Args:
      losses: by step, in any order.
    """
    watch, result = LossWatch(), {}
    for step, loss in sorted(losses.items()):
        watch.add(step, loss)
        if math.isfinite(loss):
            result[step] = watch.smoothed
    return result


class Runaway(NamedTuple):
    """The first layer whose scores ran away, counted from 0, and the step at which they did."""

    step: int
    layer: int


def first_runaway(scores: Mapping[int, list[float]]) -> Runaway | None:
    """The first runaway of a run, None where there is none.

    It needs 1,000 recorded steps before and 500 after, so shorter runs have none.

    Args:
      scores: by recorded step: the largest |score| of every layer.
    """
    steps = sorted(scores)
    for i, step in enumerate(steps):
        before = steps[bisect.bisect_left(steps, step - RUNAWAY_BEFORE_STEPS) : i]
        j = bisect.bisect_left(steps, step + RUNAWAY_AFTER_STEPS)
        if not before or step - steps[0] < RUNAWAY_BEFORE_STEPS or j == len(steps):
            continue
        limits = RUNAWAY_FACTOR * np.median([scores[s] for s in before], axis=0)
        both = (np.array(scores[step]) > limits) & (np.array(scores[steps[j]]) > limits)
        if both.any():
            return Runaway(step, int(np.argmax(both)))
    return None
