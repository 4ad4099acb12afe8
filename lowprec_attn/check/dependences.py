"""Finds results that change with a second run, other sequences of the batch, or later tokens."""

from collections.abc import Iterator

import numpy as np

from lowprec_attn.check import places
from lowprec_attn.check.limits import Limits
from lowprec_attn.check.measure import WORDS, Found
from lowprec_attn.check.problems import part_of
from lowprec_attn.check.report import Bug
from lowprec_attn.check.trials import Trial, Trials

TWO_RUNS = "two runs of the same call differ"
BY_MORE = "by more than rounding"
_OTHERS = "a sequence depends on the others of its batch"
_LATER = "rows depend on later tokens"
_KEPT = 150  # the first tokens of the long problem, whose results must not depend on later tokens


class Dependences:
    """The dependences of one target's results that should not be there.

    Attributes:
      bugs: differences that are larger than rounding explains.
      risks: sentences about smaller differences between two runs of the same call.
      notes: sentences about other smaller differences.
    """

    def __init__(self, trials: Trials, limits: Limits) -> None:
        self._limits, self._names = limits, trials.target.results
        self.bugs: list[Bug] = []
        self.risks: list[str] = []
        self.notes: list[str] = []
        for words, trial, other in _pairs(trials):
            if other is not None:
                self._compare(words, trial, other)

    def _compare(self, words: str, trial: Trial, other: Found) -> None:
        assert trial.found is not None
        same = {n: trial.found[n][:, : other[n].shape[1]] for n in self._names}
        limit = self._limits.of_feature(trial)
        bad, differ = {}, []
        for n in self._names:
            unit = trial.exact.units[n][:, : other[n].shape[1]]
            with np.errstate(invalid="ignore"):
                distance = np.linalg.norm(same[n] - other[n], axis=-1) / unit
            # Rows that are NaN in both count as equal; they are found elsewhere, as another bug.
            alike = np.all((same[n] == other[n]) | (np.isnan(same[n]) & np.isnan(other[n])), -1)
            distance = np.where(alike, 0.0, np.where(np.isnan(distance), np.inf, distance))
            if not np.array_equal(same[n], other[n], equal_nan=True):
                differ.append(n)
            if not (distance <= limit[n]).all():
                bad[n] = distance
        if bad:
            where = "; ".join(
                f"{WORDS[n]}: {places.words(n, ~(d <= limit[n]))}" for n, d in bad.items()
            )
            times = max(float(d.max() / limit[n]) for n, d in bad.items())
            name = f"{words}, {BY_MORE}"
            self.bugs.append(Bug(name, tuple(bad), trial.problem.name, where, (), times, "", ()))
        elif differ:
            names = ", ".join(WORDS[n] for n in differ)
            sentences = self.risks if words == TWO_RUNS else self.notes
            sentences.append(f"{words}, within rounding: {names}")


def _pairs(trials: Trials) -> Iterator[tuple[str, Trial, Found | None]]:
    """Yields words for a dependence, a run, and other results that should equal the run's.

    The other results are None where the kernel refused the other problem.
    """
    batch = _feature(trials, "a batch")
    if batch is not None:
        yield TWO_RUNS, batch, trials.run(batch.problem).found
        yield _OTHERS, batch, _alone(trials, batch)
    long = _long(trials)
    if long is not None:
        kept = slice(_KEPT)
        yield _LATER, long, trials.run(part_of(long.problem, rows=kept, keys=kept)).found


def _feature(trials: Trials, name: str) -> Trial | None:
    found = next((trial for trial in trials.features if trial.problem.name == name), None)
    return None if found is None or found.found is None else found


def _long(trials: Trials) -> Trial | None:
    """Runs the long problem with dO = 0 after `_KEPT` tokens; None if it is not causal or fails."""
    trial = _feature(trials, "long")
    if trial is None or not trial.problem.masking.is_causal:
        return None
    do = np.array(trial.problem.do)
    do[:, _KEPT:] = 0
    again = trials.run(trial.problem.replace(do=do))
    return None if again.found is None else again


def _alone(trials: Trials, trial: Trial) -> Found | None:
    parts = []
    for b in range(trial.problem.q.shape[0]):
        part = trials.run(part_of(trial.problem, batch=slice(b, b + 1))).found
        if part is None:
            return None
        parts.append(part)
    return {n: np.concatenate([part[n] for part in parts]) for n in trials.target.results}
