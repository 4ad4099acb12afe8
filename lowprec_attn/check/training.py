"""What an arithmetic does to training: the errors of dQ where keys have a common part.

Rows of dS must sum to zero. What is left of the sum moves q along ± the mean of the keys that the
row sees, and adds up in W_Q. It shows most in saturated heads, where the true gradient has faded.
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

# Of a row sum, on clustered keys with scores of 10 and 100. Where δ is formed of O it is 4e-4 to
# 2e-3 in bfloat16, and trainings with it ran away; where rows of dS sum to zero before their cast,
# the cast leaves 1e-4, and none ran away (docs/failure.md).
RISK = 2.5e-4
# Of what the casts of dS and dQ leave. Arithmetics whose rows sum to zero before the cast had 0.78
# to 1.25 of it (ten seeds, two sizes, with each of window, soft cap, sinks, bias and with all);
# `flash` 5.6 and more without sinks, 1.4 and more with them, 1.2 and more with everything.
_CASTS = 1.3
# Of W_Q's gradient with scores up to 1e3. A bfloat16 dS alone makes 1 %.
RISK_OF_SCORES = 0.05
_REACHED = 0.01  # of a row's weight, on keys that a sink or a flat soft cap leaves a gradient
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
    """On one clustered problem.

    Attributes:
      dq: ‖dQ − dQ64‖ / ‖dQ64‖.
      row_sum: RMS over the rows of Σ_j dS, over that of Σ_j |P dP|; inferred from dQ.
      query_weight: ‖X^T (dQ − dQ64)‖ / ‖X^T dQ64‖ of the worst head, where q itself stands for X.
    """

    dq: float
    row_sum: float
    query_weight: float


def effect(problem: Problem, exact: Exact, dq: np.ndarray) -> Effect:
    """Of a dQ on a problem with as many key heads as query heads."""
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
    """k [B, S, N, H] and what a row's δ, wrong by 1, adds to its dQ: scale · Σ_j P_j k_j.

    P times a number passes through the soft cap's slope.
    """
    k = problem.k.astype(np.float64)
    return k, problem.scale * np.einsum("bnts,bsnh->btnh", exact.p * exact.slope, k)


def _square(rows: np.ndarray) -> np.ndarray:
    return np.maximum(np.sum(rows * rows, -1), 1e-300)


def _relative_to_rows(squares: np.ndarray, exact: Exact) -> float:
    """RMS of row sums, given their squares [B, T, N], over that of Σ_j |P dP|."""
    sizes = np.sum(np.abs(exact.p * exact.dp), -1).swapaxes(1, 2)
    reached = (exact.p * exact.slope).sum(-1).swapaxes(1, 2) > _REACHED
    squares, sizes = (np.where(reached, x, 0.0) for x in (squares, sizes))
    return float(np.sqrt(squares.mean() / max((sizes**2).mean(), 1e-300)))


def row_sum_of_casts(problem: Problem, exact: Exact) -> float:
    """The `Effect.row_sum` to expect of a kernel that rounds nothing but dS and dQ.

    Rounding changes every value by an independent error, of RMS ε times the value. So a row's
    inferred sum Σ_h e_h g_h / ‖g‖², of e the error of dQ and g = scale · Σ_j P_j k_j, has the
    variance ε² (scale² Σ_j dS_j² (k_j·g)² + Σ_h dQ_h² g_h²) / ‖g‖⁴.
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
    """RMS of the relative error of rounding a value whose significand is spread log-uniformly.

    An error is uniform within half a spacing, of RMS 1/√3 of that; the mean of 1/m² over
    significands m from 1 to 2 is 3 / (8 ln 2).
    """
    half = float(ml_dtypes.finfo(dtype).eps) / 2
    return half / 3**0.5 * (3 / (8 * np.log(2))) ** 0.5


def effects(
    problems: Sequence[Problem], exact: Sequence[Exact], found: Sequence[Found | None]
) -> dict[str, Effect]:
    """Of every clustered problem, by name; without those that were refused or are not finite."""
    return {
        problem.name: effect(problem, of, x["dq"])
        for problem, of, x in zip(problems, exact, found, strict=True)
        if problem.name in _NAMES and x is not None and np.isfinite(x["dq"]).all()
    }


def row_sum(found: Mapping[str, Effect]) -> float:
    """The larger one with scores of 10 and 100."""
    return max((found[name].row_sum for name in _NAMES[:2] if name in found), default=0.0)


def query_weight(found: Mapping[str, Effect]) -> float:
    """The largest error with scores up to 1e3."""
    return max((found[name].query_weight for name in _NAMES[:3] if name in found), default=0.0)


def allowed(problems: Sequence[Problem], exact: Sequence[Exact]) -> float:
    """The largest row sum that is no risk: `RISK`, or what the casts of dS and dQ explain.

    They explain more than `RISK` with sinks, beside which rows of dS do not sum to zero and are
    large.
    """
    casts = [
        row_sum_of_casts(problem, of)
        for problem, of in zip(problems, exact, strict=True)
        if problem.name in _NAMES[:2]
    ]
    return max([RISK, *(_CASTS * x for x in casts)])


def cures(
    emulation: Emulation,
    exact: Sequence[Exact],
    numerics: Numerics,
) -> dict[str, Effect]:
    """What is left under each cure: of the row sums, and of the errors of dQ and W_Q's gradient.

    Args:
      emulation: of the core problems.
      exact: of the same.
      numerics: of the kernel, which the cure is applied to.
    """
    left = {}
    for name in CURES:
        changes: Any = {field: getattr(PRESETS[name], field) for field in _FIELDS_OF_CURES}
        try:
            cured = numerics.replace(**changes)
            found = emulation.run(cured)
        except (ValueError, attention.UnsupportedError):  # not with this arithmetic, or a soft cap
            continue
        of = [{"dq": found["dq"][i : i + 1]} for i in range(len(exact))]
        after = effects(emulation.problems, exact, of)
        left[name] = Effect(max(e.dq for e in after.values()), row_sum(after), query_weight(after))
    return left
