"""Names bugs: a bug is named after the wrong reference that explains the results."""

import numpy as np

from lowprec_attn.check import wrong_references
from lowprec_attn.check.measure import WORDS, Exact, Found, row_errors
from lowprec_attn.check.problems import Problem, scores

_EXPLAINED = 0.15  # a wrong reference explains a result if less than this part of its error is left
_ROUNDED = 0.01  # about the part of an error that rounding alone leaves


def name(
    problem: Problem, exact: Exact, found: Found, bad: dict[str, float]
) -> tuple[str, frozenset[str]] | None:
    """Returns the name of a bug and the bad results that it explains, or None if no name fits.

    A name is ranked by the product, over the results that it explains, of the part of the error
    that it leaves. So it may win by explaining many results, or a few of them far better. Counting
    the explained results would not do: "is zero" explains most of the error of every result that is
    far too small.

    Args:
      problem: the problem on which the results are bad.
      exact: the exact results of the problem.
      found: the kernel's results.
      bad: the names of the bad results, each with the largest row error that rounding explains.
    """
    best: tuple[float, str, frozenset[str]] | None = None
    errors = row_errors({n: found[n] for n in bad}, exact)
    for words, wrong in wrong_references.of(problem, exact, bad):
        left = row_errors({n: found[n] for n in bad if n in wrong}, exact, wrong)
        ratios = {n: _rms(left[n]) / _rms(errors[n]) for n in left}
        explained = {n: ratio for n, ratio in ratios.items() if ratio < _EXPLAINED}
        if explained:
            left_over = float(np.prod([max(ratio, _ROUNDED) for ratio in explained.values()]))
            if best is None or left_over < best[0]:
                best = left_over, words, frozenset(explained)
    if best is None:
        return None
    _, words, which = best
    *others, last = (WORDS[n] for n in exact.found if n in which)
    named = f"each of {', '.join(others)} and {last}" if others else last
    return words.replace("{}", named), which


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2))) if np.isfinite(errors).all() else np.inf


def not_finite(problem: Problem, exact: Exact, errors: Found) -> str:
    """Returns words for a bug that makes results NaN or infinite."""
    if problem.masking.mask is not None or problem.masking.window is not None:
        hidden = ~exact.sees
        o = np.isinf(errors["o"]) if "o" in errors else None
        if hidden.any():
            if o is not None and o.any() and not (o & ~hidden).any():
                return "NaN behind a mask: in rows that see no key"
            return "NaN behind a mask: rows that see no key reach the gradients"
        return "NaN behind a mask"
    s = np.abs(scores(problem)).max()
    if s > 80:
        return (
            f"NaN or infinity at scores of {s:.0e}: exp overflows, or a whole row underflows "
            "(which maximum is subtracted?)"
        )
    return "NaN or infinity at moderate scores"
