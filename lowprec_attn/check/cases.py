"""Collects the bugs that a target's runs show, each listed once, with its smallest case."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lowprec_attn.check import bugs, places, shrink
from lowprec_attn.check.dependences import BY_MORE, TWO_RUNS
from lowprec_attn.check.limits import Limits
from lowprec_attn.check.measure import EVERY, WORDS, row_errors
from lowprec_attn.check.problems import Problem
from lowprec_attn.check.report import Bug
from lowprec_attn.check.trials import Trial, Trials
from lowprec_attn.check.wrong_references import LSE_ROUNDED
from lowprec_attn.counts import many

_UNNAMED = "an error that no rounding explains"
_MOST_BUGS = 3
_MARGINAL = 4.0  # an error this many times the core problems' limit needs no closer look

# A run that shows a bug; the largest row error that rounding explains in it, by result; and the
# results that the bug spoils.
_Shown = tuple[Trial, dict[str, float], tuple[str, ...]]


class Cases:
    """Finds the bugs that a target's runs show.

    Args:
      trials: the target's runs.
      limits: the largest errors that rounding explains in these runs.
      out: folder for the smallest case of each bug and its script; None: none is written.

    Attributes:
      risks: sentences about errors that are large enough for a bug but count as risks. They are
        filled by `with_dependences`.
    """

    def __init__(self, trials: Trials, limits: Limits, out: Path | None) -> None:
        self._trials, self._limits, self._out = trials, limits, out
        self.risks: list[str] = []
        found = [trial.found for trial in trials.every if trial.found is not None]
        self._is_zero = not any(x[n].any() for x in found for n in trials.target.results)

    def with_dependences(self, dependences: Sequence[Bug]) -> list[Bug]:
        """Returns the bugs of the problems, together with those of `Dependences`.

        A bug is left out if every result that it spoils is spoilt by a bug listed before it. Bugs
        of two runs that differ come first, because no other bug can be told from such results. A
        bug of the problems comes before other dependences, because it may itself make results
        depend on other tokens.
        """
        found = [bug for bug in dependences if bug.name.startswith(TWO_RUNS)]
        for bug in (*self._bugs(), *dependences):
            if not set(bug.results) <= {name for other in found for name in other.results}:
                found.append(bug)
        return found

    def _bugs(self) -> list[Bug]:
        trials, of_core = self._trials, self._limits.of_core
        runs = [(trial, dict(of_core[i])) for i, trial in enumerate(trials.core)]
        runs += [(trial, self._limits.of_feature(trial)) for trial in trials.features]
        runs += [(trial, dict.fromkeys(EVERY, np.finfo(float).max)) for trial in trials.extremes]
        seen: dict[tuple[str, ...], list[_Shown]] = {}
        rounded: dict[str, None] = {}
        for trial, limit in runs:
            bad = _beyond(trial, limit)
            is_feature = any(trial is feature for feature in trials.features)
            if is_feature and any(trial.errors[n].max() < _MARGINAL * x for n, x in bad.items()):
                limit = self._limits.emulated(trial)
                bad = _beyond(trial, limit)
            while bad and trial.found is not None:
                name, which = self._named(trial, bad)
                spoilt = tuple(n for n in EVERY if n in which)
                if name.startswith(LSE_ROUNDED):
                    rounded[name] = None
                else:
                    key = (name, *spoilt) if name == _UNNAMED else (name,)
                    seen.setdefault(key, []).append((trial, limit, spoilt))
                bad = {n: x for n, x in bad.items() if n not in which}
        self.risks = [f"{name}: P = exp(S − lse) of it errs by as much" for name in rounded]
        return self._merged(seen)

    def _merged(self, seen: dict[tuple[str, ...], list[_Shown]]) -> list[Bug]:
        """Merges what was seen into a few bugs: named ones first, then those with most results.

        A later bug that spoils no further result is merged into an earlier one, since it may be the
        same bug seen through other inputs.
        """
        found: list[Bug] = []
        spoilt = {
            key: tuple(n for n in EVERY if any(n in results for _, _, results in shown))
            for key, shown in seen.items()
        }
        for key, shown in sorted(
            seen.items(),
            key=lambda item: (item[0][0] == _UNNAMED, -len(spoilt[item[0]]), -len(item[1])),
        ):
            same = [i for i, bug in enumerate(found) if set(spoilt[key]) <= set(bug.results)]
            if not same:
                found.append(self._bug(key[0], spoilt[key], shown, len(found)))
                continue
            bug = found[same[0]]
            names = dict.fromkeys((*bug.others, *(trial.problem.name for trial, _, _ in shown)))
            others = tuple(other for other in names if other != bug.problem)
            found[same[0]] = dataclasses.replace(bug, others=others)
        return found[:_MOST_BUGS]

    def _named(self, trial: Trial, bad: dict[str, float]) -> tuple[str, frozenset[str]]:
        assert trial.found is not None
        broken = frozenset(n for n in bad if np.isinf(trial.errors[n]).any())
        if broken:
            return bugs.not_finite(trial.problem, trial.exact, trial.errors), broken
        if self._is_zero:
            return "every result is zero", frozenset(bad)
        named = bugs.name(trial.problem, trial.exact, trial.found, bad)
        return named or self._unexplained(trial, bad)

    def _unexplained(self, trial: Trial, bad: dict[str, float]) -> tuple[str, frozenset[str]]:
        """Runs the problem again, because a race may spoil one call in many."""
        again = self._trials.run(trial.problem).found
        if again is not None:
            distances = row_errors(again, trial.exact, against=trial.found)
            changed = frozenset(n for n, limit in bad.items() if distances[n].max() > limit)
            if changed:
                return f"{TWO_RUNS}, {BY_MORE}", changed
        return _UNNAMED, frozenset(bad)

    def _bug(
        self, name: str, results: tuple[str, ...], shown: Sequence[_Shown], number: int
    ) -> Bug:
        first = max(shown, key=lambda one: len(one[2]))
        trial, limit, here = first
        smallest: str = ""
        files: tuple[str, ...] = ()
        if self._out is not None:
            smallest, files = self._reduced(self._out, first, number)
        times = max(float(trial.errors[n].max() / limit[n]) for n in here)
        where = [f"{WORDS[n]}: {places.words(n, trial.errors[n] > limit[n])}" for n in here]
        return Bug(
            name,
            results,
            trial.problem.name,
            "; ".join(where),
            tuple(dict.fromkeys(other.problem.name for other, _, _ in shown if other is not trial)),
            times,
            smallest,
            files,
        )

    def _reduced(self, out: Path, shown: _Shown, number: int) -> tuple[str, tuple[str, ...]]:
        """Returns the shape of the smallest case in words, and the files written for it."""
        trial, limit, results = shown

        def shows(problem: Problem) -> bool:
            again = self._trials.run(problem)
            return any(n in again.errors and again.errors[n].max() > limit[n] for n in results)

        smallest = shrink.smallest(trial.problem, shows)
        if "lse" in results and smallest.dlse is None:  # so that the script reports lse
            smallest = smallest.replace(dlse=np.zeros(smallest.q.shape[:3], np.float32))
        target = self._trials.target
        stem = f"{_file_name(target.name)}-bug-{number + 1}"
        files = tuple(map(str, shrink.save(smallest, target, out, stem)))
        b, t, n, _ = smallest.q.shape
        s, k = smallest.k.shape[1:3]
        of_heads = f"{n} heads on {k}" if k != n else "one head" if n == 1 else f"{n} heads"
        return f"{b} × {many(t, 'query', 'queries')}, {many(s, 'key')}, {of_heads}", files


def _beyond(trial: Trial, limit: Mapping[str, float]) -> dict[str, float]:
    """Returns the results whose error exceeds its limit, with these limits."""
    return {n: limit[n] for n, e in trial.errors.items() if e.max() > limit[n]}


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
