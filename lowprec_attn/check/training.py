"""Measures what an arithmetic does to training: the errors of dQ if keys have a common part.

Rows of dS must sum to zero. A nonzero sum moves q along ± the mean of the keys that the row sees,
and these errors add up in W_Q. They matter most in saturated heads, whose true gradient is small.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lowprec_attn import attention
from lowprec_attn.check.candidates import Emulation
from lowprec_attn.check.measure import Exact, Found, both_passes, relative
from lowprec_attn.check.problems import CLUSTERED, Problem, up_to
from lowprec_attn.numerics import PRESETS, Numerics

# A larger row sum of dS, on clustered keys with scores of 10 and 100, is a risk. If δ is computed
# from O, the row sum is 4e-4 to 2e-3 in bfloat16, and trainings with it ran away. If rows of dS sum
# to zero before their cast, the cast leaves 1e-4, and no training ran away (docs/failure.md).
RISK = 2.5e-4
# Row sums up to this many times `row_sum_of_casts` are no risk. The ratio was 0.78 to 1.25 for
# arithmetics whose rows sum to zero before the cast (ten seeds and two sizes, with each of window,
# soft cap, sinks and bias, and with all of them). For `flash` it was at least 5.6 without sinks,
# 1.4 with sinks, and 1.2 with everything.
_CASTS = 1.3
# A larger relative error of W_Q's gradient with scores up to 1e3 is a risk. A bfloat16 dS alone
# causes 1 %.
RISK_OF_SCORES = 0.05
# A row counts if more than this part of its weight lies on keys and passes a gradient: a sink takes
# weight from the keys, and a saturated soft cap passes no gradient.
_REACHED = 0.01
CURES = (
    "float32_output",
    "halves_output",
    "delta_dp_p",
    "normalized_delta",
    "corrected_after_cast",
    "matched",
)


_FIELDS_OF_CURES = (
    "saved_output",
    "delta",
    "exponent",
    "statistics",
    "row_sum",
    "recomputed_probs",
)
_NAMES = tuple(map(up_to, CLUSTERED))


@dataclasses.dataclass(frozen=True)
class Effect:
    """The errors on one clustered problem.

    Attributes:
      dq: ‖dQ − dQ64‖ / ‖dQ64‖.
      row_sum: the RMS over rows of Σ_j dS, inferred from dQ, divided by the RMS of Σ_j |P dP|.
      query_weight: ‖X^T (dQ − dQ64)‖ / ‖X^T dQ64‖ of the worst head, with q itself in place of X.
    """

    dq: float
    row_sum: float
    query_weight: float


def effect(problem: Problem, exact: Exact, dq: np.ndarray) -> Effect:
    """Returns the effect of a dQ; the problem must have equal numbers of key and query heads."""
    q = problem.q.astype(np.float64)
    error = dq - exact.found["dq"]
    _, pk = _leak(problem, exact)
    sums = np.sum(error * pk, -1) / _square(pk)
    wrong, right = (
        np.linalg.norm(np.einsum("btnd,btnh->ndh", q, x), axis=(1, 2))
        for x in (error, exact.found["dq"])
    )
    return Effect(
        relative(dq, exact.found["dq"]),
        _relative_to_rows(sums**2, exact),
        float((wrong / np.maximum(right, 1e-300)).max()),
    )


def _leak(problem: Problem, exact: Exact) -> tuple[np.ndarray, np.ndarray]:
    """Returns k [B, S, N, H], and the error [B, T, N, H] of dQ if δ is wrong by 1, up to the sign.

    This error is scale · Σ_j P_j k_j, because dS is wrong by P. With a soft cap P_j is multiplied
    by the cap's slope.
    """
    k = problem.k.astype(np.float64)
    return k, problem.scale * np.einsum("bnts,bsnh->btnh", exact.p * exact.slope, k)


def _square(rows: np.ndarray) -> np.ndarray:
    return np.maximum(np.sum(rows * rows, -1), 1e-300)


def _relative_to_rows(squares: np.ndarray, exact: Exact) -> float:
    """Returns the RMS of row sums, given their squares [B, T, N], divided by that of Σ_j |P dP|."""
    sizes = np.sum(np.abs(exact.p * exact.dp), -1).swapaxes(1, 2)
    reached = (exact.p * exact.slope).sum(-1).swapaxes(1, 2) > _REACHED
    squares, sizes = (np.where(reached, x, 0.0) for x in (squares, sizes))
    return float(np.sqrt(squares.mean() / max((sizes**2).mean(), 1e-300)))


def row_sum_of_casts(problem: Problem, exact: Exact) -> float:
    """Returns the `Effect.row_sum` to expect of a kernel that rounds only dS and dQ.

    Rounding adds to every value an independent error whose RMS is ε times the value. Let e be the
    error of a row's dQ, and g = scale · Σ_j P_j k_j. The row's inferred sum Σ_h e_h g_h / ‖g‖² then
    has the variance ε² (scale² Σ_j dS_j² (k_j·g)² + Σ_h dQ_h² g_h²) / ‖g‖⁴.
    """
    k, leak = _leak(problem, exact)
    _, backward = both_passes(problem)
    ds = problem.scale * backward.ds * exact.slope
    along = np.einsum("bsnh,btnh->bnts", k, leak)
    of_ds = np.sum((ds * along) ** 2, -1).swapaxes(1, 2)
    of_dq = np.sum((exact.found["dq"] * leak) ** 2, -1)
    variance = (of_ds + of_dq) / _square(leak) ** 2
    return _rounding(problem.q.dtype) * _relative_to_rows(variance, exact)


def _rounding(dtype: np.dtype) -> float:
    """Returns the RMS relative error of rounding values with log-uniform significands.

    The error is uniform within ± half a spacing, so its RMS is 1/√3 of half a spacing. The mean of
    1/m² over significands m from 1 to 2 is 3 / (8 ln 2).
    """
    half = float(ml_dtypes.finfo(dtype).eps) / 2
    return half / 3**0.5 * (3 / (8 * np.log(2))) ** 0.5


def effects(
    problems: Sequence[Problem], exact: Sequence[Exact], found: Sequence[Found | None]
) -> dict[str, Effect]:
    """Returns the effect on every clustered problem, by name.

    Problems that the kernel refused, or whose dQ is not finite, are left out.
    """
    return {
        problem.name: effect(problem, of, x["dq"])
        for problem, of, x in zip(problems, exact, found, strict=True)
        if problem.name in _NAMES and x is not None and np.isfinite(x["dq"]).all()
    }


def row_sum(found: Mapping[str, Effect]) -> float:
    """Returns the larger `row_sum` of the problems with scores of 10 and 100."""
    return max((found[name].row_sum for name in _NAMES[:2] if name in found), default=0.0)


def query_weight(found: Mapping[str, Effect]) -> float:
    """Returns the largest `query_weight` of the problems with scores up to 1e3."""
    return max((found[name].query_weight for name in _NAMES[:3] if name in found), default=0.0)


def allowed(problems: Sequence[Problem], exact: Sequence[Exact]) -> float:
    """Returns the largest row sum that is no risk: `RISK`, or what the casts of dS and dQ explain.

    The casts explain more than `RISK` with sinks: rows of dS then do not sum to zero over the keys,
    and are large.
    """
    casts = [
        row_sum_of_casts(problem, of)
        for problem, of in zip(problems, exact, strict=True)
        if problem.name in _NAMES[:2]
    ]
    return max([RISK, *(_CASTS * x for x in casts)])


def cures(emulation: Emulation, exact: Sequence[Exact], numerics: Numerics) -> dict[str, Effect]:
    """Returns what each cure leaves of the errors of dQ, the row sums and W_Q's gradient.

    Args:
      emulation: the emulation of the core problems.
      exact: the exact results of the same problems.
      numerics: the kernel's arithmetic, to which each cure is applied.
    """
    left = {}
    for name in CURES:
        changes: Any = {field: getattr(PRESETS[name], field) for field in _FIELDS_OF_CURES}
        try:
            cured = numerics.replace(**changes)
            found = emulation.run(cured)
        except (ValueError, attention.UnsupportedError):  # excluded by the arithmetic or a soft cap
            continue
        of = [{"dq": found["dq"][i : i + 1]} for i in range(len(exact))]
        after = effects(emulation.problems, exact, of)
        left[name] = Effect(max(e.dq for e in after.values()), row_sum(after), query_weight(after))
    return left
