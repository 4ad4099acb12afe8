"""Right, and which arithmetic; a risk; or a bug: everything that `check` finds of one target."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_attn.check import bugs, problems, shrink, training
from lowprec_attn.check.candidates import Emulation, Match, Search
from lowprec_attn.check.measure import (
    RESULTS,
    WORDS,
    Exact,
    Found,
    exact,
    relative,
    row_errors,
)
from lowprec_attn.check.problems import DTYPES, Problem
from lowprec_attn.check.report import Arithmetic, Bug, Report
from lowprec_attn.check.targets import Target, TargetError, aligned, first_line

_TIMES = 6.0  # a bug errs by more than this, times the largest row error of a plausible arithmetic
_PLAUSIBLE = 8.0  # arithmetics at most this much farther than the nearest
_EXPLAINED = 0.5  # of the distance of the nearest arithmetic to that to float64
_MOST_BUGS = 3


@dataclasses.dataclass
class _Run:
    """A problem, its exact results, the kernel's, and the row errors between them."""

    problem: Problem
    exact: Exact
    found: Found | None
    errors: Found
    refusal: str = ""


def check(
    target: Target, dtype: str = "bfloat16", *, seed: int = 0, out: Path | None = None
) -> Report:
    """Runs a target forward and backward on every problem that it can do, and judges it.

    Args:
      target: see `targets.find` and `targets.of_function`.
      dtype: of q, k, v and dO: `bfloat16`, `float16` or `float32`.
      seed: of the problems.
      out: folder for the smallest case of each bug and its script; None: none is written.

    Raises:
      TargetError: it cannot be called at all.
    """
    return _Check(target, dtype, seed, out).report()


class _Check:
    def __init__(self, target: Target, dtype: str, seed: int, out: Path | None) -> None:
        if dtype not in DTYPES:
            raise TargetError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not target.can & {"causal", "full"}:
            raise TargetError(f"{target.name} is neither causal nor full; nothing can be tried")
        self.target, self.dtype, self.out = target, dtype, out
        self.notes = list(target.notes)
        self.risks: list[str] = []
        options: dict[str, Any] = {
            "causal": target.causal,
            "head_size": target.head_size,
            "seed": seed,
        }
        sized = options | {"tokens": target.tokens}
        self.core = [self._run(p) for p in self._scaled(problems.core(dtype, **sized))]
        self._require_one()
        extremes = self._scaled(problems.extremes(dtype, **sized))
        self.features = self._features(problems.features(dtype, **options), options)
        self.extremes = [self._run(p) for p in extremes]
        self.emulation = Emulation([run.problem for run in self.core], dtype)

    def _scaled(self, made: Sequence[Problem]) -> list[Problem]:
        """With the scale that the function has by itself; q makes up for it."""
        scale = self.target.scale
        if scale is None:
            return list(made)
        return [
            p.replace(scale=scale, q=(p.q.astype(np.float32) * (p.scale / scale)).astype(p.q.dtype))
            for p in made
        ]

    def _run(self, problem: Problem) -> _Run:
        of = exact(problem)
        try:
            found = self.target.call(problem)
        except Exception as error:  # of any kind: theirs are not ours to know
            return _Run(problem, of, None, {}, first_line(error))
        for name in RESULTS:
            if found[name].shape != of.found[name].shape:
                raise TargetError(
                    f"{WORDS[name]} of {self.target.name} has the shape {found[name].shape}, not "
                    f"{of.found[name].shape} (BTNH); is it another layout (--layout)?"
                )
        return _Run(problem, of, found, row_errors(found, of))

    def _require_one(self) -> None:
        if all(run.found is None for run in self.core):
            raise TargetError(
                f"{self.target.name} refuses {self.core[0].problem.q.shape} (BTNH) {self.dtype}: "
                f"{self.core[0].refusal}"
            )

    def _features(self, made: list[Problem], options: dict[str, Any]) -> list[_Run]:
        if {"causal", "full"} <= self.target.can:
            made += problems.features(self.dtype, **(options | {"causal": False}))[1:2]
            made[-1] = made[-1].replace(name="not causal", about="203 tokens see each other")
        can = self.target.can
        self.not_tried = tuple(p.name for p in made if not p.needs <= can)
        runs = []
        for problem in self._scaled(list(problems.served(made, can))):
            is_free = "lengths" in problem.needs and problem.masking.is_causal
            if not is_free or self.target.alignment is not None:
                runs.append(self._run(aligned(problem, self.target.alignment or "start")))
                continue
            tried = [self._run(aligned(problem, corner)) for corner in ("start", "end")]
            if tried[0].found is not None:
                errors = [np.mean(run.errors["o"]) for run in tried]
                corner = int(errors[1] < errors[0])
                words = "first" if corner == 0 else "last"
                self.notes.append(
                    f"{problem.name}: the causal diagonal is aligned with the {words} row and key "
                    "(seen in O, not asked for)"
                )
                runs.append(tried[corner])
            else:
                runs.append(tried[0])
        return runs

    def report(self) -> Report:
        """Judges what was run."""
        limits, search, ranked = self._limits()
        bugs_found = self._all_bugs(limits)
        arithmetic = self._arithmetic(search, ranked)
        found = [run.found for run in self.core]
        exacts = [run.exact for run in self.core]
        effects = training.effects([run.problem for run in self.core], exacts, found)
        spoilt = any(set(bug.results) & {"o", "dq"} for bug in bugs_found)
        cures: Mapping[str, training.Effect] = {}
        if not spoilt and arithmetic is not None:
            numerics = arithmetic.match.candidate.numerics
            if training.row_sum(effects) > training.RISK:
                self.risks.insert(0, _ROW_SUMS)
                cures = training.cures(self.emulation, exacts, numerics)
            if (error := training.query_weight(effects)) > training.RISK_OF_SCORES and (
                not numerics.scores.is_identity
            ):
                self.risks.append(
                    f"S is rounded: at scores of 1e3 W_Q's gradient is {100 * error:.2g} % off, "
                    "which no cure of δ mends"
                )
        if arithmetic is not None and not arithmetic.explains and not bugs_found:
            self.notes.append("no preset explains these results: its own arithmetic is another one")
        runs = [*self.core, *self.features, *self.extremes]
        return Report(
            target=self.target.name,
            dtype=self.dtype,
            state="bug" if bugs_found else "risk" if self.risks else "right",
            arithmetic=arithmetic,
            bugs=tuple(bugs_found),
            risks=tuple(self.risks),
            notes=tuple(self.notes),
            effects={} if spoilt else effects,
            cures=cures,
            errors={
                run.problem.name: {n: relative(run.found[n], run.exact.found[n]) for n in RESULTS}
                for run in runs
                if run.found is not None
            },
            refused={run.problem.name: run.refusal for run in runs if run.found is None},
            not_tried=self.not_tried,
        )

    # What rounding explains.

    def _limits(self) -> tuple[list[dict[str, float]], Search, list[Match]]:
        """The largest row error of every core problem that rounding explains, and the search."""
        of_presets = [self.emulation.run(c.numerics) for c in self.emulation.presets()]
        widest = self._largest(of_presets)
        left_out = self._beyond(widest)
        exacts = [run.exact for run in self.core]
        found = [run.found for run in self.core]
        while True:
            search = Search(self.emulation, exacts, found, frozenset(left_out))
            ranked = search.nearest()
            near = [m for m in ranked if m.distance <= _PLAUSIBLE * ranked[0].distance]
            limits = self._largest([m.found for m in near])
            beyond = self._beyond(limits)
            unexplained = {at for at in beyond - left_out if self._grows_with_scores(at, beyond)}
            if unexplained and not left_out:
                names = sorted({self.core[i].problem.name for i, _ in unexplained})
                self.risks.append(
                    f"on {', '.join(names)} the error is larger than its arithmetic explains, as "
                    "where scores are rounded"
                )
                for i, name in unexplained:
                    limits[i][name] = widest[i][name]
            if not (beyond - unexplained) - left_out:
                return limits, search, ranked
            left_out |= beyond - unexplained

    def _largest(self, found: Sequence[Found]) -> list[dict[str, float]]:
        limits = []
        for i, run in enumerate(self.core):
            floor = _floor(run.problem)
            errors = [row_errors({n: x[n][i : i + 1] for n in RESULTS}, run.exact) for x in found]
            largest = {
                n: max(float(np.max(e[n], where=np.isfinite(e[n]), initial=0.0)) for e in errors)
                for n in RESULTS
            }
            limits.append({n: max(_TIMES * x, floor) for n, x in largest.items()})
        return limits

    def _beyond(self, limits: Sequence[Mapping[str, float]]) -> set[tuple[int, str]]:
        return {
            (i, name)
            for i, run in enumerate(self.core)
            for name, error in run.errors.items()
            if error.max() > limits[i][name]
        }

    def _grows_with_scores(self, at: tuple[int, str], beyond: set[tuple[int, str]]) -> bool:
        """Whether no problem with scores as large is free of it: then S may be rounded."""
        i, name = at
        if np.isinf(self.core[i].errors[name]).any():
            return False
        scores = [_largest_score(run) for run in self.core]
        return scores[i] > 10 and all(
            (j, name) in beyond for j, score in enumerate(scores) if score >= scores[i]
        )

    def _feature_limits(self, run: _Run, limits: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Those of the core problems with scores no larger, and of the plainest."""
        score = 2 * _largest_score(run)
        like = [i for i, core in enumerate(self.core) if i == 0 or _largest_score(core) <= score]
        return {n: max(limits[i][n] for i in like) for n in RESULTS}

    # Bugs.

    def _all_bugs(self, limits: Sequence[Mapping[str, float]]) -> list[Bug]:
        """Those of the problems, and of what a result should not depend on.

        Where two runs differ no other bug of the same results can be told; where one has a name
        already, results depend on other tokens as well.
        """
        dependences = self._dependences(limits)
        found = [bug for bug in dependences if bug.name.startswith(_TWO_RUNS)]
        for bug in (*self._bugs(limits), *dependences):
            if not set(bug.results) <= {name for other in found for name in other.results}:
                found.append(bug)
        return found

    def _bugs(self, limits: Sequence[Mapping[str, float]]) -> list[Bug]:
        runs = [(run, dict(limits[i])) for i, run in enumerate(self.core)] + [
            (run, self._feature_limits(run, limits)) for run in self.features
        ]
        runs += [(run, dict.fromkeys(RESULTS, np.finfo(float).max)) for run in self.extremes]
        seen: dict[tuple[str, tuple[str, ...]], list[tuple[_Run, dict[str, float]]]] = {}
        for run, limit in runs:
            bad = {n: limit[n] for n, e in run.errors.items() if e.max() > limit[n]}
            while bad and run.found is not None:
                name, which = self._named(run, bad)
                spoilt = tuple(n for n in RESULTS if n in which)
                seen.setdefault((name, spoilt), []).append((run, limit))
                bad = {n: x for n, x in bad.items() if n not in which}
        return self._merged(seen)

    def _merged(
        self, seen: dict[tuple[str, tuple[str, ...]], list[tuple[_Run, dict[str, float]]]]
    ) -> list[Bug]:
        """One bug for all that it spoils: what has a name first, then what most problems show.

        A later one that spoils no other result may be the same, seen through other inputs.
        """
        found: list[Bug] = []
        for (name, results), shown in sorted(
            seen.items(), key=lambda item: (item[0][0] == _UNNAMED, -len(item[0][1]), -len(item[1]))
        ):
            same = [i for i, bug in enumerate(found) if set(results) <= set(bug.results)]
            if not same:
                found.append(self._bug(name, results, shown, len(found)))
                continue
            bug = found[same[0]]
            names = dict.fromkeys((*bug.others, *(run.problem.name for run, _ in shown)))
            others = tuple(other for other in names if other != bug.problem)
            found[same[0]] = dataclasses.replace(bug, others=others)
        return found[:_MOST_BUGS]

    def _named(self, run: _Run, bad: dict[str, float]) -> tuple[str, frozenset[str]]:
        assert run.found is not None
        broken = frozenset(n for n in bad if np.isinf(run.errors[n]).any())
        if broken:
            return bugs.not_finite(run.problem, run.errors), broken
        named = bugs.name(run.problem, run.exact, run.found, bad)
        return named or (_UNNAMED, frozenset(bad))

    def _bug(
        self,
        name: str,
        results: tuple[str, ...],
        shown: Sequence[tuple[_Run, dict[str, float]]],
        number: int,
    ) -> Bug:
        run, limit = shown[0]

        smallest: str = ""
        files: tuple[str, ...] = ()
        if self.out is not None:
            smallest, files = self._reduced(self.out, run, results, limit, number)
        times = max(float(run.errors[n].max() / limit[n]) for n in results)
        return Bug(
            name,
            results,
            run.problem.name,
            "; ".join(
                f"{WORDS[n]}: {_where(run.errors[n] > limit[n], 'rows' if n in 'odq' else 'keys')}"
                for n in results
            ),
            tuple(other.problem.name for other, _ in shown[1:]),
            times,
            smallest,
            files,
        )

    def _reduced(
        self,
        out: Path,
        run: _Run,
        results: Sequence[str],
        limit: Mapping[str, float],
        number: int,
    ) -> tuple[str, tuple[str, ...]]:
        """The shape of the smallest case in words, and its files."""

        def shows(problem: Problem) -> bool:
            again = self._run(problem)
            return any(n in again.errors and again.errors[n].max() > limit[n] for n in results)

        smallest = shrink.smallest(run.problem, shows)
        stem = f"{_file_name(self.target.name)}-bug-{number + 1}"
        files = tuple(map(str, shrink.save(smallest, self.target, out, stem)))
        b, t, n, _ = smallest.q.shape
        s, k = smallest.k.shape[1:3]
        of_heads = f"{n} heads on {k}" if k != n else "one head" if n == 1 else f"{n} heads"
        return f"{b} × {t} queries, {s} keys, {of_heads}", files

    # Two runs, other sequences, later tokens.

    def _dependences(self, limits: Sequence[Mapping[str, float]]) -> list[Bug]:
        found = []
        for words, problem_of, again in (
            (_TWO_RUNS, self._batch, self._twice),
            ("a sequence depends on the others of its batch", self._batch, self._alone),
            ("rows depend on tokens behind them", self._long, self._shortened),
        ):
            run = problem_of()
            if run is None or run.found is None:
                continue
            other = again(run)
            if other is None:
                continue
            same = {n: run.found[n][:, : other[n].shape[1]] for n in RESULTS}
            limit = self._feature_limits(run, limits)
            bad, differ = {}, []
            for n in RESULTS:
                unit = run.exact.units[n][:, : other[n].shape[1]]
                with np.errstate(invalid="ignore"):
                    distance = np.linalg.norm(same[n] - other[n], axis=-1) / unit
                if not np.array_equal(same[n], other[n], equal_nan=True):
                    differ.append(n)
                if not (distance <= limit[n]).all():
                    bad[n] = distance
            if bad:
                where = "; ".join(
                    f"{WORDS[n]}: {_where(~(d <= limit[n]), 'rows' if n in 'odq' else 'keys')}"
                    for n, d in bad.items()
                )
                times = max(float(np.nanmax(d) / limit[n]) for n, d in bad.items())
                found.append(
                    Bug(
                        f"{words}, by more than rounding",
                        tuple(bad),
                        run.problem.name,
                        where,
                        (),
                        times,
                        "",
                        (),
                    )
                )
            elif differ:
                names = ", ".join(WORDS[n] for n in differ)
                sentence = f"{words}, within rounding: {names}"
                (self.risks if again == self._twice else self.notes).append(sentence)
        return found

    def _named_feature(self, name: str) -> _Run | None:
        return next((run for run in self.features if run.problem.name == name), None)

    def _batch(self) -> _Run | None:
        return self._named_feature("a batch")

    def _long(self) -> _Run | None:
        """Of a causal kernel, with no gradient from the last tokens."""
        run = self._named_feature("long")
        if run is None or not run.problem.masking.is_causal:
            return None
        do = np.array(run.problem.do)
        do[:, _KEPT:] = 0
        return self._run(run.problem.replace(do=do))

    def _twice(self, run: _Run) -> Found | None:
        return self._run(run.problem).found

    def _alone(self, run: _Run) -> Found | None:
        p = run.problem
        parts = []
        for b in range(p.q.shape[0]):
            one = slice(b, b + 1)
            part = self._run(p.replace(q=p.q[one], k=p.k[one], v=p.v[one], do=p.do[one])).found
            if part is None:
                return None
            parts.append(part)
        return {n: np.concatenate([part[n] for part in parts]) for n in RESULTS}

    def _shortened(self, run: _Run) -> Found | None:
        p, kept = run.problem, slice(_KEPT)
        short = p.replace(q=p.q[:, kept], k=p.k[:, kept], v=p.v[:, kept], do=p.do[:, kept])
        return self._run(short).found

    # The arithmetic.

    def _arithmetic(self, search: Search, ranked: Sequence[Match]) -> Arithmetic | None:
        best = ranked[0]
        if not best.distances:
            return None
        alike = [m for m in ranked if search.is_alike(m, best)]
        own = {m.candidate.preset for m in alike if not m.candidate.changes}
        others = [m for m in ranked if not m.candidate.changes and m.candidate.preset not in own]

        def farther(match: Match) -> float:
            return max(x / best.distances[n] for n, x in match.distances.items())

        following = min(others, key=farther, default=None)
        to_exact = search.distances(self._float64(), None)
        size = float(np.exp(np.mean([np.log(d) for d in to_exact.values()])))
        names = dict.fromkeys(str(m.candidate) for m in alike)
        return Arithmetic(
            str(best.candidate),
            best.distances,
            tuple(name for name in names if name != str(best.candidate)),
            None if following is None else (str(following.candidate), farther(following)),
            best.distance < _EXPLAINED * size,
            best,
        )

    def _float64(self) -> Found:
        return {n: np.concatenate([run.exact.found[n] for run in self.core]) for n in RESULTS}


_ROW_SUMS = (
    "rows of dS do not sum to zero, by more than its cast explains; in trainings with such rows "
    "scores ran away"
)
_TWO_RUNS = "two runs of the same call differ"
_UNNAMED = "an error that no rounding explains"
_KEPT = 150  # tokens of the long problem that later ones must not reach


def _largest_score(run: _Run) -> float:
    q, k = (x.astype(np.float64) for x in (run.problem.q, run.problem.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return float(np.abs(np.einsum("btnh,bsnh->bnts", q, k)).max() * run.problem.scale)


def _floor(problem: Problem) -> float:
    """A quarter of the dtype's spacing, and what the order of sums in S does to P."""
    q, k = (np.abs(x.astype(np.float64)) for x in (problem.q, problem.k))
    products = np.einsum("btnh,bsnh->bnts", q, k).max() * problem.scale
    spacing = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(problem.q.dtype.name, 2.0**-18)
    return spacing / 4 + 4 * 2.0**-24 * float(products)


def _where(bad: np.ndarray, axis: str) -> str:
    """Words for the places of an array [B, T or S, heads]."""
    sequences, rows, heads = (np.flatnonzero(bad.any(axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    parts = [f"{axis} {_range(rows, bad.shape[1])}", f"heads {_range(heads, bad.shape[2])}"]
    if bad.shape[0] > 1:
        parts.append(f"sequences {_range(sequences, bad.shape[0])}")
    return ", ".join(parts)


def _range(places: np.ndarray, count: int) -> str:
    if len(places) == count:
        return f"all {count}"
    first, last = int(places[0]), int(places[-1])
    if len(places) == 1:
        return f"{first} of {count}"
    if len(places) == last - first + 1:
        return f"{first} to {last} of {count}"
    return f"{len(places)} of {count}, from {first} to {last}"


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
