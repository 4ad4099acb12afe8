"""Judges a target: it is right and computes a named arithmetic, or it has a risk or a bug."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lowprec_attn.check import training
from lowprec_attn.check.calls import TargetError
from lowprec_attn.check.candidates import Emulation, Match
from lowprec_attn.check.cases import Cases
from lowprec_attn.check.dependences import Dependences
from lowprec_attn.check.limits import Limits
from lowprec_attn.check.measure import RESULTS, relative
from lowprec_attn.check.report import Arithmetic, Report
from lowprec_attn.check.target import Target
from lowprec_attn.check.trials import Trial, Trials

# An arithmetic explains the results if its distance is less than this part of float64's.
_EXPLAINED = 0.5
_ROW_SUMS = (
    "rows of dS do not sum to zero, by more than its cast explains; in trainings with such rows "
    "scores ran away"
)


def check(
    target: Target, dtype: str = "bfloat16", *, seed: int = 0, out: Path | None = None
) -> Report:
    """Runs a target forward and backward on every problem that it serves, and judges it.

    O, dQ, dK, dV and a returned lse are compared with float64 and with emulations of the presets;
    of a target without a backward pass, O and lse alone.
    With the default sizes this takes ten seconds to a minute on a CPU.

    Args:
      target: see `targets.find` and `functions.of_function`.
      dtype: the dtype of q, k, v, dO, sinks and bias: `bfloat16`, `float16` or `float32`.
      seed: the seed of the problems.
      out: folder for the smallest case of each bug and its script; None: none is written.

    Returns:
      The report, whose `state` is `right`, `risk` or `bug`.

    Raises:
      TargetError: the target cannot be called at all, or a script for `out` cannot import it.
    """
    if out is not None and target.script is None:
        raise TargetError(
            f"no script can import the function checked as {target.name}: for out={str(out)!r} "
            "give it a name at the top of a module and pass that, or leave out `out`"
        )
    trials = Trials(target, dtype, seed)
    emulation = Emulation([trial.problem for trial in trials.core], dtype)
    limits = Limits(emulation, trials.core)
    dependences = Dependences(trials, limits)
    cases = Cases(trials, limits, out)
    bugs = cases.with_dependences(dependences.bugs)
    arithmetic = _arithmetic(trials.core, limits)
    exacts = [trial.exact for trial in trials.core]
    found = [trial.found for trial in trials.core]
    effects = training.effects(emulation.problems, exacts, found) if target.backward else {}
    spoilt = any(set(bug.results) & {"o", "dq"} for bug in bugs)
    risks = [*limits.risks, *dependences.risks, *cases.risks]
    notes = [*trials.notes, *target.seen, *dependences.notes]
    cures: Mapping[str, training.Effect] = {}
    allowed = training.allowed(emulation.problems, exacts)
    if effects and not spoilt and arithmetic is not None:
        numerics = arithmetic.match.candidate.numerics
        if training.row_sum(effects) > allowed:
            risks.insert(0, _ROW_SUMS)
            cures = training.cures(emulation, exacts, numerics)
        error = training.query_weight(effects)
        if error > training.RISK_OF_SCORES and not numerics.scores.is_identity:
            risks.append(
                f"S is rounded: at scores of 1e3 W_Q's gradient is {100 * error:.2g} % off, "
                "which no cure of δ mends"
            )
    if arithmetic is not None and not arithmetic.explains and not bugs:
        notes.append("no preset explains these results: its own arithmetic is another one")
    return Report(
        target=target.name,
        dtype=dtype,
        setting=target.setting,
        backward=target.backward,
        state="bug" if bugs else "risk" if risks else "right",
        arithmetic=arithmetic,
        bugs=tuple(bugs),
        risks=tuple(risks),
        notes=tuple(notes),
        effects={} if spoilt else effects,
        cures=cures,
        allowed=allowed,
        errors={
            trial.problem.name: {
                n: relative(x, trial.exact.found[n]) for n, x in trial.found.items()
            }
            for trial in trials.every
            if trial.found is not None
        },
        refused={
            trial.problem.name: trial.refusal for trial in trials.every if trial.found is None
        },
        not_tried=trials.not_tried,
    )


def _arithmetic(core: list[Trial], limits: Limits) -> Arithmetic | None:
    search, ranked = limits.search, limits.ranked
    best = ranked[0]
    if not best.distances:
        return None
    alike = [m for m in ranked if search.is_alike(m, best)]
    own = {m.candidate.preset for m in alike if not m.candidate.changes}
    others = [m for m in ranked if not m.candidate.changes and m.candidate.preset not in own]

    def farther(match: Match) -> float:
        return max(x / best.distances[n] for n, x in match.distances.items())

    following = min(others, key=farther, default=None)
    float64 = {n: np.concatenate([trial.exact.found[n] for trial in core]) for n in RESULTS}
    to_exact = search.distances(float64, None)
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
