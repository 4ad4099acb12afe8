"""How far results lie from float64, row by row, in units that rounding errors have.

The unit of a row is the sum of the absolute values that make it: ‖Σ_j P_ij |v_j|‖ for O, and for
dQ scale · ‖Σ_j P_ij (|dO|·|v_j| + …) |k_j|‖, whose small difference the true gradient may be. Every
rounding of a factor changes a row by some 2⁻⁹ of that, whatever the problem; a bug by about 1.
"""

import dataclasses

import numpy as np

from lowprec_attn.attention import reference
from lowprec_attn.check.problems import Problem

RESULTS = ("o", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")
WORDS = {"o": "O", "lse": "lse", "dq": "dQ", "dk": "dK", "dv": "dV"}

Found = dict[str, np.ndarray]
_FLOOR = 1e-3  # of the RMS unit of a head: rows that hardly anything reaches


@dataclasses.dataclass(frozen=True)
class Exact:
    """float64: o, lse, dq, dk, dv; the units of their rows; rows that see a key [B, 1, T]."""

    found: Found
    units: Found
    p: np.ndarray
    dp: np.ndarray
    sees: np.ndarray


def exact(problem: Problem) -> Exact:
    """Float64 results of a problem and the units of their errors."""
    options = {"scale": problem.scale, "masking": problem.masking}
    q, k, v, do = problem.arrays
    forward = reference.attention(q, k, v, **options)  # type: ignore[arg-type]
    backward = reference.backward(q, k, v, do, **options)  # type: ignore[arg-type]
    found = {"o": forward.o, "dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    return Exact(
        found | {"lse": forward.lse},
        _units(problem, forward.p),
        forward.p,
        backward.dp,
        np.isfinite(forward.lse),
    )


def _units(problem: Problem, p: np.ndarray) -> Found:
    heads = problem.q.shape[2]
    q, k, v, do = (np.abs(x.astype(np.float64)) for x in problem.arrays)
    kv_heads = k.shape[2]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    dp = np.einsum("btnh,bsnh->bnts", do, v)
    ds = p * (dp + np.sum(p * dp, -1, keepdims=True)) * problem.scale
    units = {
        "o": np.einsum("bnts,bsnh->btnh", p, v),
        "dq": np.einsum("bnts,bsnh->btnh", ds, k),
        "dk": np.einsum("bnts,btnh->bsnh", ds, q),
        "dv": np.einsum("bnts,btnh->bsnh", p, do),
    }
    for name in ("dk", "dv"):
        b, s, _, h = units[name].shape
        units[name] = units[name].reshape(b, s, kv_heads, -1, h).sum(3)
    sizes = {name: np.linalg.norm(x, axis=-1) for name, x in units.items()}
    return {
        name: np.maximum(x, _FLOOR * np.sqrt((x**2).mean(1, keepdims=True)) + 1e-300)
        for name, x in sizes.items()
    }


def row_errors(found: Found, of: Exact, against: Found | None = None) -> Found:
    """‖x − x64‖ / unit of every row [B, T or S, heads]; inf where a row is not finite.

    Rows of O that see no key are left out (0): what stands there is a convention, if it is finite.

    Args:
      found: o, dq, dk, dv in float64, or some of them.
      of: the exact results and units.
      against: other results in the place of the exact ones.
    """
    errors = {}
    for name in RESULTS:
        if name not in found:
            continue
        x, y = found[name], (against or of.found)[name]
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.linalg.norm(x - y, axis=-1) / of.units[name]
        error = np.where(np.isfinite(x).all(-1), error, np.inf)
        if name == "o":
            error = np.where(of.sees | np.isinf(error), error, 0.0)
        errors[name] = error
    return errors


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """‖found − exact‖ / ‖exact‖ of the whole array."""
    size = float(np.linalg.norm(exact))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.linalg.norm(found - exact)) / max(size, 1e-300)
