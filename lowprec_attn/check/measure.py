"""Measures how far results lie from float64, row by row, in units that suit rounding errors.

The unit of a row is the norm of the sum of the absolute values that make it. It is
‖Σ_j P_ij |v_j|‖ for O, and scale · ‖Σ_j P_ij (|dO|·|v_j| + …) |k_j|‖ for dQ. The true gradient may
be a small difference of such terms. On any problem, rounding a factor changes a row by about 2⁻⁹
units, and a bug changes it by about 1. The unit of lse is 1, because an error of lse is a relative
error of P.

Every result is an array of rows [B, rows, heads, values]. lse has one value per row. The gradient
of the bias, [1, T, N, S], has one row per query, and the gradient of the sinks, [1, 1, N, 1], has
one row in all.
"""

import dataclasses

import numpy as np

from lowprec_attn.attention import reference
from lowprec_attn.check.problems import Problem, products

RESULTS = ("o", "dq", "dk", "dv")  # what every kernel with a backward pass returns
EVERY = (*RESULTS, "lse", "dsinks", "dbias")
WORDS = {"o": "O", "lse": "lse", "dq": "dQ", "dk": "dK", "dv": "dV"} | {
    name: name for name in ("dsinks", "dbias")
}

Found = dict[str, np.ndarray]
_FLOOR = 1e-3  # the least unit of a row, as a part of its head's RMS unit


@dataclasses.dataclass(frozen=True)
class Exact:
    """The float64 results of a problem, and the units of their errors.

    Attributes:
      found: the results, by name.
      units: the unit of every row [B, rows, heads], by result.
      p, dp: P and dP [B, N, T, S].
      slope: the derivative of the soft cap [B, N, T, S]; [1, 1, 1, 1] of ones without a cap.
      sees: whether a row sees a key [B, T, N].
    """

    found: Found
    units: Found
    p: np.ndarray
    dp: np.ndarray
    slope: np.ndarray
    sees: np.ndarray


def exact(problem: Problem) -> Exact:
    """Computes the float64 results of a problem and the units of their errors."""
    forward, backward = both_passes(problem)
    return Exact(
        results(problem, forward, backward),
        _units(problem, forward),
        forward.p,
        backward.dp,
        slope(problem),
        np.any(forward.s > -np.inf, axis=-1).swapaxes(1, 2),
    )


def both_passes(problem: Problem) -> tuple[reference.Forward, reference.Backward]:
    """Runs the forward and backward passes of the float64 reference."""
    backward = reference.backward(*problem.arrays, dlse=problem.dlse, **problem.settings)
    return backward.forward, backward


def results(problem: Problem, forward: reference.Forward, backward: reference.Backward) -> Found:
    """Returns the results that a problem has, as arrays of rows."""
    found = {
        "o": forward.o,
        "dq": backward.dq,
        "dk": backward.dk,
        "dv": backward.dv,
        "lse": forward.lse,
    }
    if problem.masking.sinks is not None:
        found["dsinks"] = backward.dsinks
    if problem.masking.bias is not None:
        found["dbias"] = backward.ds.sum(0, keepdims=True)
    return as_rows(found)


def as_rows(found: Found) -> Found:
    """Turns results with lse [B, T, N], dsinks [N] and dbias [1, N, T, S] into arrays of rows."""
    turns = {
        "lse": lambda x: x[..., None],
        "dsinks": lambda x: x[None, None, :, None],
        "dbias": lambda x: x.swapaxes(1, 2),
    }
    return {n: turns.get(n, np.asarray)(x) for n, x in found.items()}


def as_given(found: Found) -> Found:
    """The inverse of `as_rows`."""
    turns = {
        "lse": lambda x: x[..., 0],
        "dsinks": lambda x: x[0, 0, :, 0],
        "dbias": lambda x: x.swapaxes(1, 2),
    }
    return {n: turns.get(n, np.asarray)(x) for n, x in found.items()}


def slope(problem: Problem) -> np.ndarray:
    """The soft cap's slope 1 − tanh²(q kᵀ · scale / c) [B, N, T, S]; [1, 1, 1, 1] without a cap."""
    if problem.soft_cap is None:
        return np.ones((1, 1, 1, 1))
    return 1 - np.tanh(products(problem) / problem.soft_cap) ** 2


def _units(problem: Problem, forward: reference.Forward) -> Found:
    p, heads = forward.p, problem.q.shape[2]
    q, k, v, do = (np.abs(x.astype(np.float64)) for x in problem.arrays)
    kv_heads = k.shape[2]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    dp = reference.pairs(do, v)
    dlse = np.zeros(q.shape[:3]) if problem.dlse is None else np.abs(problem.dlse)
    less = np.sum(p * dp, -1, keepdims=True) + dlse.transpose(0, 2, 1)[..., None]
    ds = p * (dp + less)
    # The slope is itself a difference, 1 − tanh², so its terms are summed in absolute value.
    dx = ds * (2 - slope(problem)) * problem.scale
    units = {
        "o": reference.over_keys(p, v),
        "dq": reference.over_keys(dx, k),
        "dk": reference.over_rows(dx, q),
        "dv": reference.over_rows(p, do),
        "lse": np.ones((*q.shape[:3], 1)),
    }
    for name in ("dk", "dv"):
        units[name] = by_key_head(units[name], kv_heads)
    if problem.masking.sinks is not None:
        weights = reference.sink_probabilities(forward, problem.masking)
        of_sinks = (weights * less[..., 0].swapaxes(1, 2)).sum((0, 1))
        units["dsinks"] = of_sinks[None, None, :, None]
    if problem.masking.bias is not None:
        units["dbias"] = ds.sum(0, keepdims=True).swapaxes(1, 2)
    sizes = {name: np.linalg.norm(x, axis=-1) for name, x in units.items()}
    return {
        name: np.maximum(x, _FLOOR * np.sqrt((x**2).mean(1, keepdims=True)) + 1e-300)
        for name, x in sizes.items()
    }


def by_key_head(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """Sums over the query heads of each key head: [B, S, N, H] to [B, S, K, H]."""
    b, s, _, h = x.shape
    return x.reshape(b, s, kv_heads, -1, h).sum(3)


def row_errors(found: Found, of: Exact, against: Found | None = None) -> Found:
    """Returns ‖x − x64‖ / unit of every row [B, rows, heads]; inf where a row is not finite.

    Rows that see no key have the error 0. Any finite O is allowed in such a row, and any lse if
    there is no sink either, because both are conventions.

    Args:
      found: some of the results `EVERY`, in float64.
      of: the exact results and units.
      against: results to measure from in place of the exact ones.
    """
    errors = {}
    for name in EVERY:
        if name not in found:
            continue
        x, y = found[name], (against or of.found)[name]
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.linalg.norm(x - y, axis=-1) / of.units[name]
        error = np.where(np.isfinite(x).all(-1), error, np.inf)
        if name == "o":
            error = np.where(of.sees | np.isinf(error), error, 0.0)
        if name == "lse":
            error = np.where(np.isfinite(of.found["lse"][..., 0]), error, 0.0)
        errors[name] = error
    return errors


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns ‖found − exact‖ / ‖exact‖ over the values that are finite in `exact`."""
    counted = np.isfinite(exact)
    size = float(np.linalg.norm(exact[counted]))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.linalg.norm((found - exact)[counted])) / max(size, 1e-300)
