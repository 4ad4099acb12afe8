"""Rules that say in one sentence whether one layer shows the published failure.

The first rule that any head meets, under any of the arithmetics measured, decides:

  non_finite  an error is NaN or infinite: the arithmetic broke down on this input.
  delta       the errors of δ are coherent (below): the mechanism of arXiv 2510.04212.
  output      no dO given, and the errors of Ō or O are coherent: the first half of it.
  scores      the largest |S| is at least 128, where neighbouring bfloat16 numbers are 1 apart:
              rounding S may change P by a factor exp(0.5) = 1.6. The published failure comes
              with growing spectral norms of W_Q and W_K, hence with growing scores.
  ties        at least 10 % of the rows repeat their maximum: a convention, well above the few
              per cent that random normal scores have in bfloat16.
  none        nothing of the above.

Errors over n rows are coherent if all of these hold:

  coherence ≥ 5       With random signs it exceeds 5 with a probability of at most
                      2 exp(−12.5) = 7e-6, whatever n (`signed_error`). Fewer than 25 rows can
                      never be coherent.
  coherence ≥ √n / 20 A convention: a mean below a twentieth of the RMS is not called persistent.
  RMS ≥ 1e-5          of the RMS of the exact values. This leaves out the rounding of float32.

`delta` is wrong if the coherence stays when the signs of the rows of dO are drawn at random. It is
also wrong if the coherence stays with exact O in δ: then a rounding elsewhere is to blame.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["non_finite", "delta", "output", "scores", "ties", "none"]
Signals = Mapping[str, np.ndarray]

COHERENCE = 5.0
COHERENT_SHARE = 0.05
ERROR_FLOOR = 1e-5
LARGE_SCORE = 128.0
MANY_TIES = 0.1


class Finding(NamedTuple):
    """The outcome of the rules.

    Attributes:
      kind: the rule that decided.
      sentence: for the user, without a full stop.
      arithmetic: label of the arithmetic under which it was found, None for `none`.
      heads: heads that meet the rule, worst first.
    """

    kind: Kind
    sentence: str
    arithmetic: str | None = None
    heads: tuple[int, ...] = ()


def judge(measured: Mapping[str, Signals], rows: int) -> Finding:
    """Applies the rules of this module.

    Args:
      measured: results of `attention_signals` by a label of the arithmetic, all of them with δ or
        all without.
      rows: n = B·T, the number of rows behind each signal.
    """
    for kind, rule in _RULES.items():
        worst, worst_label = -math.inf, None
        for label, signals in measured.items():
            severity = rule.severity(signals, rows)
            if np.max(severity) > worst:
                worst, worst_label, heads = np.max(severity), label, _worst_first(severity)
        if worst_label is not None:
            claim = rule.claim.format(
                label=worst_label, value=worst, bound=math.sqrt(rows), chance=COHERENCE
            )
            return Finding(kind, f"{_name(heads)}: {claim}", worst_label, heads)
    return Finding("none", _nothing(measured, rows))


def coherence_of(signals: Signals, error: str, reference: str, rows: int) -> np.ndarray:
    """Coherence [N] of an error where it is coherent in the sense of this module, else −inf."""
    coherence = np.asarray(signals[f"{error}_coherence"])
    is_coherent = (
        (coherence >= COHERENCE)
        & (coherence >= COHERENT_SHARE * math.sqrt(rows))
        & (signals[f"{error}_rms"] >= ERROR_FLOOR * signals[reference])
    )
    return np.where(is_coherent, coherence, -np.inf)


def delta_coherence(signals: Signals, rows: int) -> np.ndarray:
    """`coherence_of` δ's error; −inf where δ was not measured."""
    if "delta_error_rms" not in signals:
        return np.full_like(signals["score_maximum"], -np.inf)
    return coherence_of(signals, "delta_error", "delta_rms", rows)


def _output_coherence(signals: Signals, rows: int) -> np.ndarray:
    if "delta_error_rms" in signals:  # then δ itself has been judged
        return np.full_like(signals["score_maximum"], -np.inf)
    return np.maximum(
        coherence_of(signals, "unnormalized_error", "unnormalized_rms", rows),
        coherence_of(signals, "output_error", "output_rms", rows),
    )


def _non_finite(signals: Signals, rows: int) -> np.ndarray:
    del rows
    errors = [value for name, value in signals.items() if name.endswith("_rms")]
    is_finite = np.all(np.isfinite([*errors, signals["score_maximum"]]), axis=0)
    return np.where(is_finite, -np.inf, 1.0)


def _at_least(signal: str, threshold: float) -> Callable[[Signals, int], np.ndarray]:
    def severity(signals: Signals, rows: int) -> np.ndarray:
        del rows
        return np.where(signals[signal] >= threshold, signals[signal], -np.inf)

    return severity


class _Rule(NamedTuple):
    """`severity` per head [N], −inf where the rule is not met; what it means if any head does."""

    severity: Callable[[Signals, int], np.ndarray]
    claim: str


_PERSISTENT = (
    "add up with a persistent sign (coherence {value:.1f} of at most {bound:.1f}; random signs "
    "stay below {chance:g})"
)

_RULES: dict[Kind, _Rule] = {
    "non_finite": _Rule(_non_finite, "{label} gives NaN or infinite values on this input"),
    "delta": _Rule(delta_coherence, "under {label} the errors of δ " + _PERSISTENT),
    "output": _Rule(
        _output_coherence,
        "under {label} the errors of the output "
        + _PERSISTENT
        + "; whether they reach δ takes dO to tell",
    ),
    "scores": _Rule(
        _at_least("score_maximum", LARGE_SCORE),
        "the largest |score| is {value:.0f}; from 128 on, rounding a score to bfloat16 may "
        "change its probability by a factor 1.6, and scores grow in the published failure",
    ),
    "ties": _Rule(
        _at_least("repeated_maxima", MANY_TIES),
        "under {label} {value:.0%} of the rows repeat their maximum, a precondition of the "
        "published failure, but no error has a persistent sign",
    ),
}


def _nothing(measured: Mapping[str, Signals], rows: int) -> str:
    has_delta = any("delta_error_rms" in signals for signals in measured.values())
    error = "delta_error" if has_delta else "unnormalized_error"
    largest = max(float(np.max(signals[f"{error}_coherence"])) for signals in measured.values())
    if math.sqrt(rows) < COHERENCE:
        return (
            f"no rule applies, but {rows} rows are too few to tell a persistent sign from chance "
            f"(at least {math.ceil(COHERENCE**2)} are needed)"
        )
    judged = "δ" if has_delta else "Ō"
    sentence = (
        f"nothing here looks like the published failure: errors of {judged} have no persistent "
        f"sign (largest coherence {largest:.1f}), scores are moderate and ties are few"
    )
    return sentence if has_delta else f"{sentence}; without dO, δ was not judged"


def _worst_first(severity: np.ndarray) -> tuple[int, ...]:
    order = np.argsort(-severity, kind="stable")
    return tuple(int(head) for head in order if severity[head] > -np.inf)


def _name(heads: tuple[int, ...]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    others = len(heads) - 1
    return f"head {heads[0]} and {others} other{'s' if others > 1 else ''}"
