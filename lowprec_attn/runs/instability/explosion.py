"""Defines when a run has exploded, and when its scores have run away.

*Exploded*: the smoothed training loss lies more than 0.7 nats above its best for 100 steps. The
smoothed loss is the mean of the losses recorded in the last 50 steps. Its best counts only from the
10th step on, because the first loss of a run resumed from another one is mere noise.

A loss that is not finite is left out. The trainer withholds a step whose loss, gradient or update
is not finite, so such a loss never belongs to a step that was taken. A run that ends there is *not
finite*, which does not count as an explosion.

*Runaway*: at least two heads, over all layers, have a largest |score| above 512 at step 2,000. If
nothing was recorded at that step, the first recorded step after it counts.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lowprec_attn.diagnostics.rules import RUNAWAY_HEADS, RUNAWAY_SCORE

EXCESS_NATS = 0.7
LASTING_STEPS = 100
SMOOTHED_STEPS = 50
BEST_STEPS = 10


class LossWatch:
    """Follows a training loss; call `add` for every recorded loss in the order of the steps.

    An excess is a period in which the smoothed loss lies more than 0.7 nats above its best.

    Attributes:
      explosion: the first step of the first excess that lasted 100 steps; None before that.
      excess_since: the first step of the current excess, or None.
      smoothed: the mean of the finite losses of the last 50 steps; infinite before the first loss.
      best: the smallest `smoothed` from the 10th step on; infinite before that.
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
        """Adds the loss of a step, in nats per token; ignores a loss that is not finite."""
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
        """The number of steps of the current excess; 0 if there is none."""
        return 0 if self.excess_since is None else self._step - self.excess_since + 1


def explosion(watch: LossWatch, failure: Mapping[str, Any]) -> int | None:
    """Returns the step at which the loss exploded, or None.

    Args:
      watch: the watch of all losses that are known.
      failure: the run's own record of its failure, which decides if these losses show no explosion.
        Empty if there is none.
    """
    return failure.get("explosion") if watch.explosion is None else watch.explosion


def failure_in_words(failure: Mapping[str, Any]) -> str:
    """Returns the content of `failure.json` as words."""
    message = str(failure["message"])
    is_said = "explosion" in failure
    return message if is_said else f"not finite at step {failure['step']}: {message}"


def smoothed_losses(losses: Mapping[int, float]) -> dict[int, float]:
    """Returns the smoothed loss at every step whose own loss is finite.

    Args:
      losses: the losses by step, in any order.
    """
    watch, result = LossWatch(), {}
    for step, loss in sorted(losses.items()):
        watch.add(step, loss)
        if math.isfinite(loss):
            result[step] = watch.smoothed
    return result


class RunawayRule(NamedTuple):
    """The step at which a run is judged, and the |score| above which a head counts as large."""

    score: float = RUNAWAY_SCORE
    step: int = 2000


RUNAWAY_RULE = RunawayRule()


class LargeHeads(NamedTuple):
    """The number of heads, over all layers, above the score of a `RunawayRule`, and the step."""

    step: int
    heads: int

    @property
    def ran_away(self) -> bool:
        """Whether the scores of the run have run away."""
        return self.heads >= RUNAWAY_HEADS


def large_heads(
    scores: Mapping[int, Sequence[Sequence[float]]], rule: RunawayRule
) -> LargeHeads | None:
    """Counts the heads with large scores; returns None if nothing was recorded from that step on.

    Args:
      scores: by recorded step, for every layer, the largest |score| of each head. A NaN is large.
      rule: the step and the score.
    """
    step = min((step for step in scores if step >= rule.step), default=None)
    if step is None:
        return None
    large = [not score <= rule.score for layer in scores[step] for score in layer]
    return LargeHeads(step, sum(large))
