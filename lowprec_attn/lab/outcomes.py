"""What an experiment says: how many seeds of an arm exploded, and whether that decides anything.

A run that did not explode is *healthy* only if it went on to 1.25 times the step at which the
positive control of its seed exploded; otherwise it is *censored*: nobody knows. One that went on so
far, but ends with a loss as far above the negative control's as an excess is, is *behind*: it never
learned, or is being lost. A seed whose positive control did not explode, or whose negative control
did, decides nothing.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy.stats import binomtest

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.runs.explosion import EXCESS_NATS

HEALTHY_AFTER = 1.25
_LOSS_STEPS = 100

Word = Literal["exploded", "behind", "healthy", "censored"]


@dataclasses.dataclass(frozen=True)
class ArmOutcome:
    """An arm over its seeds.

    Attributes:
      arm: its name, overrides and role.
      records: by seed.
      words: by seed: what became of it.
      excess: by seed: the mean training loss of its last 100 steps, minus that of the negative
        control at the same steps; only of runs that did not explode, and are not that control.
    """

    arm: Arm
    records: Mapping[int, ArmRecord]
    words: Mapping[int, Word]
    excess: Mapping[int, float]

    @property
    def mechanism(self) -> str:
        """That of its runs, whose arithmetic is one."""
        return next(iter(self.records.values())).mechanism

    @property
    def exploded(self) -> int:
        """How many seeds exploded."""
        return sum(word == "exploded" for word in self.words.values())

    def is_lost(self, seed: int) -> bool:
        """Whether a run exploded, or ends far above the negative control, however long it is."""
        return self.words[seed] == "exploded" or _is_far_above(self.excess.get(seed))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share that explodes (Wilson, 1927), censored runs left out.

        0 to 1 where every run is censored.
        """
        return wilson(self.exploded, sum(word != "censored" for word in self.words.values()))

    @property
    def median_explosion(self) -> float | None:
        """The median step of explosion, of the runs that exploded."""
        steps = [r.explosion for r in self.records.values() if r.explosion is not None]
        return statistics.median(steps) if steps else None


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927); 0 to 1 where nothing was tried."""
    if trials == 0:
        return (0.0, 1.0)
    found = binomtest(hits, trials).proportion_ci(method="wilson")
    return (float(found.low), float(found.high))


def outcomes(records: Iterable[ArmRecord]) -> list[ArmOutcome]:
    """By arm, controls first.

    Args:
      records: of all runs of an experiment.
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
            if run.explosion is None and negative.get(seed, run) is not run
        }
        words = {
            seed: _word(run, positive.get(seed), excess.get(seed)) for seed, run in runs.items()
        }
        found.append(ArmOutcome(arm, runs, words, excess))
    order = {"positive": 0, "negative": 1, None: 2}
    return sorted(found, key=lambda outcome: (order[outcome.arm.control], outcome.arm.name))


def undecided(found: Sequence[ArmOutcome]) -> list[str]:
    """Why an experiment, or a seed of it, decides nothing; one sentence each."""
    controls = {outcome.arm.control: outcome for outcome in found if outcome.arm.control}
    sentences = [
        f"no arm is the {kind} control" for kind in ("positive", "negative") if kind not in controls
    ]
    for seed in sorted({seed for outcome in found for seed in outcome.records}):
        for control, word in (("positive", "did not explode"), ("negative", "exploded")):
            if control not in controls:
                continue
            outcome = controls[control]
            if seed not in outcome.records:
                sentences.append(f"seed {seed} has no {control} control")
            elif (outcome.words[seed] == "exploded") != (control == "positive"):
                sentences.append(f"{outcome.arm.name} {word} with seed {seed}")
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
    if control is None or control.explosion is None:
        return "censored"
    if run.steps < HEALTHY_AFTER * control.explosion:
        return "censored"
    return "behind" if _is_far_above(excess) else "healthy"


def _is_far_above(excess: float | None) -> bool:
    return excess is not None and excess >= EXCESS_NATS


def _loss_above(run: ArmRecord, other: ArmRecord) -> float:
    """The mean over the last 100 steps of those recorded of both; NaN where there are none."""
    steps = sorted(run.losses.keys() & other.losses.keys())
    last = [step for step in steps if step > steps[-1] - _LOSS_STEPS]
    if not last:
        return float("nan")
    return float(np.mean([run.losses[s] - other.losses[s] for s in last]))
