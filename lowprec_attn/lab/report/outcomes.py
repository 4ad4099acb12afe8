"""The outcome of an experiment: how many seeds of an arm exploded, and whether it decides anything.

The outcome of a run is the first of these words that applies:

  exploded    its loss exploded (`runs.instability.explosion`)
  not finite  it ended at a step that was withheld, since a loss, gradient or update was not finite
  censored    unknown: it ended before 1.25 times the step at which the positive control of its
              seed broke (exploded, or was not finite), or that control held or is missing
  behind      its last losses are at least 0.7 nats above the negative control's: it never learned,
              or is being lost
  growing     its scores still grow: the largest of all heads in the last quarter of its steps is
              above 100, and above 1.5 times the largest in the quarter before
  healthy     none of these

A seed whose positive control held, or whose negative control broke, decides nothing.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy.stats import binomtest

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.records import ArmRecord, largest_scores
from lowprec_attn.runs.instability.explosion import EXCESS_NATS

HEALTHY_AFTER = 1.25
GROWING_SCORE, GROWING_FACTOR = 100.0, 1.5
_LOSS_STEPS = 100

Word = Literal["exploded", "not finite", "censored", "behind", "growing", "healthy"]
_KNOWN: tuple[Word, ...] = ("exploded", "behind", "healthy")


@dataclasses.dataclass(frozen=True)
class ArmOutcome:
    """The outcome of an arm over its seeds.

    Attributes:
      arm: the arm: its name, overrides and control.
      records: the records by seed.
      words: the outcomes by seed.
      excess: by seed, the mean training loss of the last 100 steps, minus that of the negative
        control at the same steps. It exists only for runs that held, whose seed has a negative
        control, and that are not that control themselves.
    """

    arm: Arm
    records: Mapping[int, ArmRecord]
    words: Mapping[int, Word]
    excess: Mapping[int, float]

    @property
    def mechanism(self) -> str:
        """The mechanism of its runs, which all have the same arithmetic."""
        return next(iter(self.records.values())).mechanism

    def count(self, word: Word) -> int:
        """Returns the number of seeds with this outcome."""
        return sum(found == word for found in self.words.values())

    @property
    def exploded(self) -> int:
        """The number of seeds that exploded."""
        return self.count("exploded")

    @property
    def not_finite(self) -> int:
        """The number of seeds that ended at a value that was not finite without an explosion."""
        return self.count("not finite")

    def is_lost(self, seed: int) -> bool:
        """Whether a run of any length broke, or ended far above the negative control."""
        return not self.records[seed].held or _is_far_above(self.excess.get(seed))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share of runs that explode (Wilson, 1927).

        It counts the runs that exploded, are healthy or are behind. Without such runs it is None.
        """
        known = sum(word in _KNOWN for word in self.words.values())
        return wilson(self.exploded, known) if known else None

    @property
    def median_explosion(self) -> float | None:
        """The median step of explosion over the runs that exploded; None if there are none."""
        steps = [r.explosion for r in self.records.values() if r.explosion is not None]
        return statistics.median(steps) if steps else None


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Returns the 95 % interval of the share of `hits` among 1 or more `trials` (Wilson, 1927)."""
    found = binomtest(hits, trials).proportion_ci(method="wilson")
    return (float(found.low), float(found.high))


def outcomes(records: Iterable[ArmRecord]) -> list[ArmOutcome]:
    """Returns the outcomes of all arms, controls first and then sorted by name.

    Args:
      records: the records of all runs of an experiment.
    """
    by_arm: dict[str, dict[int, ArmRecord]] = {}
    for record in records:
        by_arm.setdefault(record.arm.name, {})[record.seed] = record
    positive = _control(by_arm, "positive")
    negative = _control(by_arm, "negative")
    found = []
    for runs in by_arm.values():
        arm = next(iter(runs.values())).arm
        excess = {
            seed: _loss_above(run, negative[seed])
            for seed, run in runs.items()
            if run.held and negative.get(seed, run) is not run
        }
        words = {
            seed: _word(run, positive.get(seed), excess.get(seed)) for seed, run in runs.items()
        }
        found.append(ArmOutcome(arm, runs, words, excess))
    order = {"positive": 0, "negative": 1, None: 2}
    return sorted(found, key=lambda outcome: (order[outcome.arm.control], outcome.arm.name))


def undecided(found: Sequence[ArmOutcome]) -> list[str]:
    """Returns why an experiment, or a seed of it, decides nothing, one sentence per reason."""
    controls = {outcome.arm.control: outcome for outcome in found if outcome.arm.control}
    sentences = [
        f"no arm is the {kind} control" for kind in ("positive", "negative") if kind not in controls
    ]
    failures: dict[str, list[int]] = {}
    for seed in sorted({seed for outcome in found for seed in outcome.records}):
        for control, outcome in controls.items():
            if seed not in outcome.records:
                what = "was not run"
            elif outcome.records[seed].held == (control == "negative"):
                continue
            elif control == "positive":
                what = "did not break"
            else:
                what = "was not finite" if outcome.words[seed] == "not finite" else "exploded"
            failures.setdefault(f"{outcome.arm.name} {what}", []).append(seed)
    for what, seeds in failures.items():
        sentences.append(f"{what} with seed{'s'[: len(seeds) > 1]} {', '.join(map(str, seeds))}")
    return sentences


def _control(
    by_arm: Mapping[str, Mapping[int, ArmRecord]], control: str
) -> Mapping[int, ArmRecord]:
    for runs in by_arm.values():
        if next(iter(runs.values())).arm.control == control:
            return runs
    return {}


def _word(run: ArmRecord, control: ArmRecord | None, excess: float | None) -> Word:
    if run.explosion is not None:
        return "exploded"
    if run.not_finite is not None:
        return "not finite"
    if control is None or control.broke is None:
        return "censored"
    if run.steps < HEALTHY_AFTER * control.broke:
        return "censored"
    if _is_far_above(excess):
        return "behind"
    return "growing" if still_grows(run) else "healthy"


def still_grows(run: ArmRecord) -> bool:
    """Whether the scores of a run still grow at its end; False if a quarter has no record."""
    scores = largest_scores(run.signals)
    quarters = [
        [
            of_layers
            for step, of_layers in scores.items()
            if begin < 4 * step / run.steps <= begin + 1
        ]
        for begin in (2, 3)
    ]
    if not all(quarters):
        return False
    before, last = (np.max(quarter) for quarter in quarters)
    return not last <= max(GROWING_SCORE, GROWING_FACTOR * before)  # NaN counts as growing


def _is_far_above(excess: float | None) -> bool:
    return excess is not None and excess >= EXCESS_NATS


def _loss_above(run: ArmRecord, other: ArmRecord) -> float:
    """Returns the mean difference of two runs' losses over their last 100 common steps.

    Of these 100 steps, only those that both have recorded count. It is NaN if there are none.
    """
    steps = sorted(run.losses.keys() & other.losses.keys())
    last = [step for step in steps if step > steps[-1] - _LOSS_STEPS]
    if not last:
        return float("nan")
    return float(np.mean([run.losses[s] - other.losses[s] for s in last]))
