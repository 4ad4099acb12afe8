"""Detects spikes of a training loss, and divergence without a spike.

The terms are from "Understanding Training Loss Patterns" in Bekman's *Machine Learning Engineering*
(github.com/stas00/ml-engineering): a spike recovers fast, or slowly, or not fully, and a loss may
also diverge without a spike. The numbers are this project's choices, not the book's:

  spike       a loss at least 6 spreads above the level of the last 100 losses. The level is their
              median. The spread is 1.4826 times their median absolute deviation, which for normal
              noise is the standard deviation, but at least 0.02 nats.
  recovery    the median of the last 5 losses is at most 3 spreads above the level before the spike.
              A recovery within 50 steps is fast, a later one is slow. If there is none within 500
              steps, the spike is given up, and the last 100 losses since it give a new level.
  divergence  an excess (`runs.instability.explosion`) that begins while no spike lasts.

Everything is a function of the losses in the order of their steps. A resumed run that adds its
recorded losses again therefore continues as if it had not been interrupted.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

from lowprec_attn.counts import many
from lowprec_attn.runs.instability.explosion import LossWatch

WINDOW = 100
LEAST_LOSSES = 20
SPIKE_SPREADS = 6.0
RECOVERED_SPREADS = 3.0
LEAST_SPREAD_NATS = 0.02
FAST_STEPS = 50
SLOW_STEPS = 500
_RECOVERED_LOSSES = 5
_MAD_OF_NORMAL = 1.4826  # standard deviations over median absolute deviations

Recovery = Literal["fast", "slow", "none"]


class Level(NamedTuple):
    """The median and spread of some losses, in nats per token."""

    median: float
    spread: float

    def score(self, loss: float) -> float:
        """Returns how many spreads a loss lies above the median; infinite if it is not finite."""
        return (loss - self.median) / self.spread if math.isfinite(loss) else math.inf


def level(losses: Iterable[float]) -> Level | None:
    """Returns the level of the last 100 finite losses; None if there are fewer than 20."""
    finite = [loss for loss in losses if math.isfinite(loss)][-WINDOW:]
    if len(finite) < LEAST_LOSSES:
        return None
    median = statistics.median(finite)
    deviation = statistics.median(abs(loss - median) for loss in finite)
    return Level(median, max(_MAD_OF_NORMAL * deviation, LEAST_SPREAD_NATS))


class Spike(NamedTuple):
    """A loss far above the losses before it."""

    step: int
    loss: float
    level: Level

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Returns the spike that a record of `metrics.jsonl` holds."""
        spike = record["spike"]
        return cls(record["step"], spike["loss"], Level(spike["median"], spike["spread"]))

    def record(self) -> dict[str, Any]:
        """Returns the values of its record in `metrics.jsonl`, without the step."""
        score = self.level.score(self.loss)
        return {"spike": {"loss": self.loss, **self.level._asdict(), "score": score}}

    def __str__(self) -> str:
        return (
            f"the loss {self.loss:.3f} is a spike, {self.level.score(self.loss):.1f} spreads of "
            f"{self.level.spread:.3f} above {self.level.median:.3f}; its batch is line "
            f"{self.step + 1:,} of data_order.txt"
        )


class SpikeEnd(NamedTuple):
    """The end of a spike: the loss has recovered, or has stayed high for too long."""

    step: int
    begin: int
    recovery: Recovery

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Returns the end of a spike that a record of `metrics.jsonl` holds."""
        return cls(record["step"], **record["spike_end"])

    def record(self) -> dict[str, Any]:
        """Returns the values of its record in `metrics.jsonl`, without the step."""
        return {"spike_end": {"begin": self.begin, "recovery": self.recovery}}

    def __str__(self) -> str:
        after = f"{many(self.step - self.begin, 'step')} after the spike of step {self.begin:,}"
        if self.recovery == "none":
            return f"the loss has not recovered {after}"
        return f"the loss has recovered {after} ({self.recovery})"


class Divergence(NamedTuple):
    """The smoothed loss rises without a spike."""

    step: int
    smoothed: float
    best: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Returns the divergence that a record of `metrics.jsonl` holds."""
        return cls(record["step"], **record["divergence"])

    def record(self) -> dict[str, Any]:
        """Returns the values of its record in `metrics.jsonl`, without the step."""
        return {"divergence": {"smoothed": self.smoothed, "best": self.best}}

    def __str__(self) -> str:
        return (
            f"the loss diverges without a spike: smoothed {self.smoothed:.3f}, "
            f"{self.smoothed - self.best:.3f} above its best"
        )


Event = Spike | SpikeEnd | Divergence


class Spikes:
    """Follows a training loss; call `add` for every recorded loss in the order of the steps.

    Attributes:
      watch: the `LossWatch` of the same losses.
    """

    def __init__(self) -> None:
        self.watch = LossWatch()
        self._window: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._spike: Spike | None = None
        self._since: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def add(self, step: int, loss: float) -> list[Event]:
        """Adds the loss of a step, in nats per token, and returns the events at this step."""
        lasted, in_excess = self._spike is not None, self.watch.excess_steps > 0
        self.watch.add(step, loss)
        loss = loss if math.isfinite(loss) else math.inf
        events: list[Event] = [*(self._follow(step, loss) if lasted else self._look(step, loss))]
        if self.watch.excess_steps and not in_excess and not lasted and self._spike is None:
            events.append(Divergence(step, self.watch.smoothed, self.watch.best))
        return events

    @property
    def onset(self) -> int | None:
        """The step at which the current spike or excess began, whichever is earlier, or None.

        The loss of an excess is a mean, so an excess begins after the spike that causes it.
        """
        begun = [self.watch.excess_since, None if self._spike is None else self._spike.step]
        return min((step for step in begun if step is not None), default=None)

    def _look(self, step: int, loss: float) -> list[Spike]:
        before = level(self._window)
        if before is None or before.score(loss) < SPIKE_SPREADS:
            self._window.append(loss)
            return []
        # The losses of a spike do not enter the level. Otherwise a long spike would become normal.
        self._spike = Spike(step, loss, before)
        self._since.append(loss)
        return [self._spike]

    def _follow(self, step: int, loss: float) -> list[SpikeEnd]:
        assert self._spike is not None
        spike, steps = self._spike, step - self._spike.step
        self._since.append(loss)
        last = statistics.median(list(self._since)[-_RECOVERED_LOSSES:])
        recovery: Recovery = "fast" if steps <= FAST_STEPS else "slow"
        if spike.level.score(last) > RECOVERED_SPREADS:
            if steps < SLOW_STEPS:
                return []
            recovery = "none"
            self._window = self._since.copy()
        self._spike = None
        self._since.clear()
        return [SpikeEnd(step, spike.step, recovery)]
