"""What an arithmetic does to training: the errors of dQ where keys have a common part.

Rows of dS must sum to zero. What is left of the sum moves q along ± the mean of the keys that the
row sees, and adds up in W_Q. It shows most in saturated heads, where the true gradient has faded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowprec_attn import attention
from lowprec_attn.check.candidates import Emulation
from lowprec_attn.check.measure import Exact, Found, relative
from lowprec_attn.check.problems import CLUSTERED, Problem
from lowprec_attn.numerics import PRESETS, Numerics

# Of a row sum, on clustered keys with scores of 10 and 100. Where δ is formed of O it is 4e-4 to
# 2e-3 in bfloat16, and trainings with it ran away; where rows of dS sum to zero before their cast,
# the cast leaves 1e-4, and none ran away (docs/failure.md).
RISK = 2.5e-4
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
_NAMES = tuple(f"clustered {score:.0e}" for score in CLUSTERED)


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
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    error = dq - exact.found["dq"]
    # What δ adds to dS by mistake, P times a number, passes through the soft cap's slope.
    p = exact.p * exact.slope
    pk = problem.scale * np.einsum("bnts,bsnh->btnh", p, k)
    sums = np.sum(error * pk, -1) / np.maximum(np.sum(pk * pk, -1), 1e-300)
    sizes = np.sum(np.abs(exact.p * exact.dp), -1).swapaxes(1, 2)
    reached = p.sum(-1).swapaxes(1, 2) > _REACHED
    sums, sizes = (np.where(reached, x, 0.0) for x in (sums, sizes))
    wrong, right = (
        np.linalg.norm(np.einsum("btnd,btnh->ndh", q, x), axis=(1, 2))
        for x in (error, exact.found["dq"])
    )
    return Effect(
        relative(dq, exact.found["dq"]),
        float(np.sqrt((sums**2).mean() / max((sizes**2).mean(), 1e-300))),
        float((wrong / np.maximum(right, 1e-300)).max()),
    )


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


def allowed(emulation: Emulation, exact: Sequence[Exact], numerics: Numerics) -> float:
    """The largest row sum that the cast of dS explains: `RISK`, which holds of causal problems.

    A window, a soft cap, sinks or a bias leave a row fewer keys to average over. There it is twice
    what the arithmetic leaves whose rows sum to zero before the cast.
    """
    problem = emulation.problems[0]
    masking = problem.masking
    others = (problem.soft_cap, masking.window, masking.sinks, masking.bias)
    if all(x is None for x in others):
        return RISK
    of_cast = cures(emulation, exact, numerics, ("normalized_delta",))
    return max([RISK, *(2 * effect.row_sum for effect in of_cast.values())])


def cures(
    emulation: Emulation,
    exact: Sequence[Exact],
    numerics: Numerics,
    names: Sequence[str] = CURES,
) -> dict[str, Effect]:
    """What is left under each cure: of the row sums, and of the errors of dQ and W_Q's gradient.

    Args:
      emulation: of the core problems.
      exact: of the same.
      numerics: of the kernel, which the cure is applied to.
      names: of the cures.
    """
    left = {}
    for name in names:
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
