"""Runs a target on every problem that it can do."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowprec_attn.check import problems
from lowprec_attn.check.calls import ResultError, TargetError
from lowprec_attn.check.functions import refusal_of
from lowprec_attn.check.measure import WORDS, Exact, Found, exact, row_errors
from lowprec_attn.check.problems import DTYPES, Problem
from lowprec_attn.check.target import Target, aligned
from lowprec_attn.errors import lacks_its_platform


@dataclasses.dataclass
class Trial:
    """A problem, its exact results, the kernel's results, and the row errors of the kernel's.

    If the kernel refused the problem, `found` is None and `refusal` says why.
    """

    problem: Problem
    exact: Exact
    found: Found | None
    errors: Found
    refusal: str = ""

    @functools.cached_property
    def largest_score(self) -> float:
        """The largest |S|, including the scores of hidden keys."""
        return float(np.abs(problems.scores(self.problem)).max())


_SEEDS = 2**32


class Trials:
    """The runs of a target on the core, feature and extreme problems.

    Attributes:
      core, features, extremes: the runs.
      notes: sentences about what was observed in these runs.
      not_tried: the names of problems that need what the target cannot do.

    Raises:
      TargetError: the target cannot be called at all, or not in the way that the options say.
    """

    def __init__(self, target: Target, dtype: str, seed: int) -> None:
        if dtype not in DTYPES:
            raise TargetError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not 0 <= seed < _SEEDS:
            raise TargetError(f"--seed must be 0 or more and below {_SEEDS}, got {seed}")
        if not target.can & {"causal", "full"}:
            raise TargetError(
                f"{target.name} serves neither causal nor full attention, so nothing can be tried"
            )
        self.target, self.dtype, self._seed = target, dtype, seed
        self.notes = list(target.notes)
        options: dict[str, Any] = {
            "causal": target.causal,
            "head_size": target.head_size,
            "seed": seed,
        }
        sized = options | {"tokens": target.tokens}
        self._passed_on: set[tuple[Any, ...]] = set()
        self.core = [self.run(p) for p in self._set(problems.core(dtype, **sized))]
        if all(trial.found is None for trial in self.core):
            first = self.core[0]
            others = ["another device", *(["--no-backward"] if target.backward else [])]
            raise TargetError(
                f"{target.name} refuses {first.problem.q.shape} (BTNH) {dtype}: "
                f"{first.refusal.rstrip('.')}; try another --tokens, --dtype or --head-size, or "
                f"{' or '.join(others)}"
            )
        extremes = self._set(problems.extremes(dtype, **sized))
        self.features = self._features(problems.features(dtype, **options), options)
        self.extremes = [self.run(p) for p in extremes]

    @property
    def every(self) -> list[Trial]:
        """All runs."""
        return [*self.core, *self.features, *self.extremes]

    def run(self, problem: Problem) -> Trial:
        """Runs one problem."""
        of = exact(problem)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = self.target.call(problem)
            except ResultError:  # no refusal: the function has run
                raise
            except (Exception, SystemExit) as error:  # a library may raise anything
                if lacks_its_platform(error):  # no fault of the library
                    raise
                return Trial(problem, of, None, {}, refusal_of(error, said))
        self._pass_on(said)
        for name in self.target.results:
            if found[name].shape != of.found[name].shape:
                raise TargetError(
                    f"{WORDS[name]} of {self.target.name} has the shape {found[name].shape}, not "
                    f"{of.found[name].shape} (BTNH); is it another layout (--layout)?"
                )
        return Trial(problem, of, found, row_errors(found, of))

    def _pass_on(self, said: Sequence[warnings.WarningMessage]) -> None:
        """Gives the warnings of a call, each once: `catch_warnings` forgets what was given."""
        for warning in said:
            place = (warning.category, warning.filename, warning.lineno)
            if (str(warning.message), *place) not in self._passed_on:
                self._passed_on.add((str(warning.message), *place))
                warnings.warn_explicit(warning.message, *place)

    def _set(self, made: Sequence[Problem]) -> list[Problem]:
        return [self.target.setting.applied(p, self._seed) for p in made]

    def _can(self) -> frozenset[str]:
        """Returns the target's abilities, including `lse` if its core results have an lse."""
        can = self.target.can
        if any(trial.found is not None and "lse" in trial.found for trial in self.core):
            can |= {"lse"}
        return can if self.target.lse_gradient else can - {"lse"}

    def _features(self, made: list[Problem], options: dict[str, Any]) -> list[Trial]:
        if {"causal", "full"} <= self.target.can:
            made += problems.features(self.dtype, **(options | {"causal": False}))[1:2]
            made[-1] = made[-1].replace(name="not causal", about="203 tokens see each other")
        # A feature that every problem has needs no problem of its own.
        made = [p for p in made if not p.needs & self.target.setting.names]
        can = self._can()
        self.not_tried = tuple(p.name for p in made if not p.needs <= can)
        runs = []
        for problem in self._set([p for p in made if p.needs <= can]):
            masking = problem.masking
            has_positions = masking.is_causal or masking.window is not None
            is_free = "lengths" in problem.needs and has_positions
            if not is_free or self.target.alignment is not None:
                runs.append(self.run(aligned(problem, self.target.alignment or "start")))
                continue
            runs.append(self._aligned_as_seen(problem))
        return runs

    def _aligned_as_seen(self, problem: Problem) -> Trial:
        tried = [self.run(aligned(problem, corner)) for corner in ("start", "end")]
        if any(trial.found is None for trial in tried):
            return tried[0]
        errors = [np.mean(trial.errors["o"]) for trial in tried]
        corner = int(errors[1] < errors[0])
        what = "causal diagonal" if problem.masking.is_causal else "window"
        self.notes.append(
            f"{problem.name}: the {what} is aligned with the {('first', 'last')[corner]} row and "
            "key (seen in O, not asked for)"
        )
        return tried[corner]
