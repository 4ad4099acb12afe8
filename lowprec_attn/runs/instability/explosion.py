"""When a run has exploded, and when its scores have run away: the words, as code.

*Exploded*: the smoothed training loss lies more than 0.7 nats above its best for 100 steps.
Smoothed is the mean of what was recorded in the last 50 steps. The best of them counts from the
10th step on: the first loss of a run resumed from another one is only noise.

A loss that is not finite is left out. The trainer withholds such a step, as it withholds one whose
gradient or update is not finite, so no such loss belongs to a step that was taken. A run that ends
there is *not finite*, which is no explosion.

*Runaway*: two heads or more, of all layers, have a largest |score| above 512 at step 2,000, or
where nothing was recorded then, at the first recorded step after it.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lowprec_attn.diagnostics.rules import RUNAWAY_HEADS, RUNAWAY_SCORE

EXCESS_NATS = 0.7
LASTING_STEPS = 100
SMOOTHED_STEPS = 50
BEST_STEPS = 10


class LossWatch:
    """Follows a training loss; `add` every recorded loss in the order of the steps.

    Attributes:
      explosion: first step of the first excess that lasted; None so far.
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
        """Takes the loss of a step, in nats per token; one that is not finite is left out."""
        if not math.isfinite(loss):
            return
        self._step = step
        self._first = step if self._first is None else self._first
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


class RunawayRule(NamedTuple):
    """When a run is judged, and above which |score| a head counts."""

    score: float = RUNAWAY_SCORE
    step: int = 2000


RUNAWAY_RULE = RunawayRule()


class LargeHeads(NamedTuple):
    """How many heads, of all layers, were above the score of a `RunawayRule`, and when."""

    step: int
    heads: int

    @property
    def ran_away(self) -> bool:
        """Whether the scores of the run have run away."""
        return self.heads >= RUNAWAY_HEADS


def large_heads(
    scores: Mapping[int, Sequence[Sequence[float]]], rule: RunawayRule
) -> LargeHeads | None:
    """Counts the heads with large scores; None where nothing was recorded from that step on.

    Args:
      scores: by recorded step: of every layer the largest |score| of each head. A NaN is large.
      rule: the step and the score.
    """
    step = min((step for step in scores if step >= rule.step), default=None)
    if step is None:
        return None
    large = [not score <= rule.score for layer in scores[step] for score in layer]
    return LargeHeads(step, sum(large))
