"""Finds the largest row error of each result of a problem that rounding explains."""

from collections.abc import Mapping, Sequence

import numpy as np

from lowprec_attn import attention
from lowprec_attn.check.candidates import Emulation, Match, Search
from lowprec_attn.check.measure import Found, row_errors
from lowprec_attn.check.problems import Problem, padded
from lowprec_attn.check.trials import Trial
from lowprec_attn.numerics import Numerics

_TIMES = 6.0  # a bug errs by more than this times the largest row error of plausible arithmetics
_PLAUSIBLE = 8.0  # plausible arithmetics are at most this many times farther than the nearest
_MULTIPLE = 256  # emulated problems have their rows and keys padded to a multiple of this
_EMULATED = 3  # number of nearest arithmetics emulated on a problem that seems to show a bug


class Limits:
    """The largest errors that rounding explains, according to arithmetics near to the kernel.

    Attributes:
      of_core: the limit of each result of each core problem.
      search: the search for the nearest arithmetics, without the results that a bug has spoilt.
      ranked: the arithmetics that it tried, nearest first.
      risks: sentences about errors that grow with the scores.
    """

    def __init__(self, emulation: Emulation, core: Sequence[Trial]) -> None:
        self._core, self._dtype = core, emulation.dtype
        self.risks: list[str] = []
        of_presets = [self._found(emulation, c.numerics) for c in emulation.presets()]
        widest = self._largest([found for found in of_presets if found is not None])
        left_out = self._beyond(widest)
        exacts = [trial.exact for trial in core]
        found = [trial.found for trial in core]
        while True:
            self.search = Search(emulation, exacts, found, frozenset(left_out))
            self.ranked: list[Match] = self.search.nearest()
            nearest = _PLAUSIBLE * self.ranked[0].distance
            near = [m for m in self.ranked if m.distance <= nearest]
            self.of_core = self._largest([m.found for m in near])
            beyond = self._beyond(self.of_core)
            unexplained = {at for at in beyond - left_out if self._grows_with_scores(at, beyond)}
            if unexplained and not left_out:
                names = sorted({core[i].problem.name for i, _ in unexplained})
                self.risks.append(
                    f"on {'; '.join(names)} the error is larger than its arithmetic explains, as "
                    "where scores are rounded"
                )
                for i, name in unexplained:
                    self.of_core[i][name] = widest[i][name]
            if not (beyond - unexplained) - left_out:
                return
            left_out |= beyond - unexplained

    @staticmethod
    def _found(emulation: Emulation, numerics: Numerics) -> Found | None:
        try:
            return emulation.run(numerics)
        except attention.UnsupportedError:
            return None

    def of_feature(self, trial: Trial) -> dict[str, float]:
        """Returns the limits of a feature problem, by result.

        They are the largest limits of the first core problem, which is the plainest, and of the
        core problems with scores at most twice this problem's. A result that no core problem has
        gets the largest limit of the others.
        """
        score = 2 * trial.largest_score
        core = enumerate(self._core)
        like = [i for i, other in core if i == 0 or other.largest_score <= score]
        limits = {n: max(self.of_core[i][n] for i in like) for n in self.of_core[0]}
        limits = dict.fromkeys(trial.exact.found, max(limits.values())) | limits
        return limits | _of_sinks(trial.problem, limits)

    def emulated(self, trial: Trial) -> dict[str, float]:
        """Returns the limits of `of_feature`, raised where the nearest arithmetics err by more.

        These arithmetics are emulated on the problem itself.
        """
        # Padding gives most problems one shape, so that most operations are compiled only once.
        emulation = Emulation([padded(trial.problem, _MULTIPLE)], self._dtype)
        tried = (self._found(emulation, m.candidate.numerics) for m in self.ranked[:_EMULATED])
        cropped = (without_padding(x, trial.exact.found) for x in tried if x is not None)
        found = [row_errors(x, trial.exact) for x in cropped]
        limits = self.of_feature(trial)
        return {
            n: max([limits[n], *(_TIMES * _largest_row(e[n]) for e in found)]) for n in trial.errors
        }

    def _largest(self, found: Sequence[Found]) -> list[dict[str, float]]:
        limits = []
        names = {n for trial in self._core for n in trial.errors}
        for i, trial in enumerate(self._core):
            floor = _floor(trial.problem)
            errors = [row_errors({n: x[n][i : i + 1] for n in names}, trial.exact) for x in found]
            of_rows = {n: max(floor, *(_TIMES * _largest_row(e[n]) for e in errors)) for n in names}
            least = _of_sinks(trial.problem, {n: of_rows[n] for n in of_rows if n != "dsinks"})
            limits.append(
                of_rows | {n: max(x, of_rows[n]) for n, x in least.items() if n in of_rows}
            )
        return limits

    def _beyond(self, limits: Sequence[Mapping[str, float]]) -> set[tuple[int, str]]:
        return {
            (i, name)
            for i, trial in enumerate(self._core)
            for name, error in trial.errors.items()
            if error.max() > limits[i][name]
        }

    def _grows_with_scores(self, at: tuple[int, str], beyond: set[tuple[int, str]]) -> bool:
        """Whether every problem with equal or larger scores shows the error, so S may be rounded.

        A rounded S spoils O as well. If lse alone errs, lse itself is rounded.
        """
        i, name = at
        if np.isinf(self._core[i].errors[name]).any() or (name == "lse" and (i, "o") not in beyond):
            return False
        scores = [trial.largest_score for trial in self._core]
        return scores[i] > 10 and all(
            (j, name) in beyond for j, score in enumerate(scores) if score >= scores[i]
        )


def _largest_row(errors: np.ndarray) -> float:
    """Returns the largest finite error of a row, or 0 if there is none."""
    return float(np.max(errors, where=np.isfinite(errors), initial=0.0))


def without_padding(found: Found, exact: Found) -> Found:
    """Removes the padding from the results of a padded problem."""
    cropped = {n: x[:, : exact[n].shape[1]] for n, x in found.items() if n in exact}
    if "dbias" in cropped:
        cropped["dbias"] = cropped["dbias"][..., : exact["dbias"].shape[-1]]
    return cropped


def _of_sinks(problem: Problem, limits: Mapping[str, float]) -> dict[str, float]:
    """Returns the limit of the sinks' gradient, a sum over all rows whose errors average out."""
    if problem.masking.sinks is None:
        return {}
    rows = problem.q.shape[0] * problem.q.shape[1]
    return {"dsinks": max(max(limits.values()) / rows**0.5, _floor(problem))}


def _floor(problem: Problem) -> float:
    """Returns the least limit: a quarter of the dtype's spacing, and the error of P from S's sums.

    The order of the sums in S changes S in float32, and P with it.
    """
    q, k = (np.abs(x.astype(np.float64)) for x in (problem.q, problem.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    products = np.einsum("btnh,bsnh->bnts", q, k).max() * problem.scale
    spacing = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(problem.q.dtype.name, 2.0**-18)
    return spacing / 4 + 4 * 2.0**-24 * float(products)
