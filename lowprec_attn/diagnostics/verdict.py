"""Judges what the signals and arrays of one layer show: findings, the one to trust most first.

Three kinds of finding are the rules of `diagnostics.rules`, with thresholds from exploded runs:

  row_sums    the backward pass's P does not sum to 1. It comes before `delta`, because a rounded
              row statistic makes O and δ wrong as well, and an unrounded O for δ does not help
              then.
  delta       the errors of δ are a large share of W_Q's gradient (of dQ where W_Q's input is not
              known). Without `scores` it is reported, but is no warning.
  scores      a score is 512 or more.

Other findings look like these failures but have another cause, or are failures of another kind:

  rate        a score is 512 or more while row sums and δ are as good as exact. By convention that
              means below a third of their thresholds. In the lab scores grew like this without any
              rounding where the learning rate was too high.
  non_finite  an error is NaN or infinite, so the arithmetic broke down on this input.
  The kinds of `diagnostics.lookalikes` need only the arrays and no measurement.

The last kind is a statement about a mechanism, not a warning:

  coherence   the errors of δ (of Ō or O, where no dO is given) have a persistent sign, which is the
              mechanism of arXiv 2510.04212. None of the lab's runs that exploded under a rounding
              met it; runs that were given an error of one sign did.

Errors over n rows are coherent if all of these hold:

  coherence ≥ 5       With random signs it exceeds 5 with a probability of at most
                      2 exp(−12.5) = 7e-6, whatever n (`signed_error`). Errors of fewer than 25 rows
                      are never coherent.
  coherence ≥ √n / 20 By convention, a mean below a twentieth of the RMS is not called persistent.
                      A mean of 0.3 % may do harm (docs/failure.md), but one step does not show it.
  RMS ≥ 1e-5          relative to the RMS of the exact values. This excludes float32 rounding.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from lowprec_attn.counts import many
from lowprec_attn.diagnostics.rules import RULES, Name

Kind = Literal[
    "non_finite_input",
    "non_finite_output",
    "float16",
    "lse",
    "zero_gradient",
    "non_finite",
    "row_sums",
    "delta",
    "scores",
    "rate",
    "coherence",
    "none",
]
Signals = Mapping[str, np.ndarray]

COHERENCE = 5.0
COHERENT_SHARE = 0.05
ERROR_FLOOR = 1e-5
SMALL = 1 / 3  # the share of a rule's threshold below which its signal is as good as exact
_RATE = (
    "at a rate eight times too high, without any rounding, it led at 15 of 15 checkpoints of 3 "
    "runs, and in 0 of 18 other runs"
)
NOT_MET_IN_THE_LAB = (
    "no run that exploded under a rounding met it; runs that were given an error of one sign did"
)


class Finding(NamedTuple):
    """One thing that a layer shows.

    Attributes:
      kind: its kind; the module lists them.
      sentence: the sentence for the user, without a full stop.
      arithmetic: label of the arithmetic under which it was found; None where none plays a part.
      heads: the heads that meet it, worst first.
      worth: what the rule was worth in runs of the lab; empty where none was counted.
      warns: whether it is a warning, for which `diagnose` ends with exit code 3.
    """

    kind: Kind
    sentence: str
    arithmetic: str | None = None
    heads: tuple[int, ...] = ()
    worth: str = ""
    warns: bool = True


def judge(measured: Mapping[str, Signals], rows: int) -> tuple[Finding, ...]:
    """Returns what the signals of one layer show, in the order in which to look at it.

    Args:
      measured: results of `attention_signals` by the label of their arithmetic, either all with δ
        or all without.
      rows: n = B·T, the number of rows behind each signal.

    Returns:
      At least one finding; a single one of kind `none` where nothing was found.
    """
    found = [
        _worst("non_finite", measured, _non_finite, "{label} gives NaN or infinite values here"),
        *(
            _worst(
                rule.name, measured, rule.severity, f"under {{label}} {rule.meaning}", rule.worth
            )
            for rule in RULES
        ),
        _coherence(measured, rows),
    ]
    findings = _told_apart(
        _told_alone([finding for finding in found if finding], measured), measured
    )
    return tuple(findings) or (Finding("none", nothing(measured, rows), warns=False),)


def nothing(measured: Mapping[str, Signals], rows: int) -> str:
    """Returns the sentence of the kind `none`, which says how large the largest signals are.

    Args:
      measured, rows: as in `judge`.
    """
    has_delta = _has_delta(measured)
    error = "delta_error" if has_delta else "unnormalized_error"
    largest = _maximum(signals[f"{error}_coherence"] for signals in measured.values())
    if math.sqrt(rows) < COHERENCE:
        return (
            f"no rule is met, but {many(rows, 'row')} {'is' if rows == 1 else 'are'} too few to "
            "tell a persistent sign from chance "
            f"(at least {math.ceil(COHERENCE**2)} are needed)"
        )
    sentence = f"nothing found: the largest |score| is {_largest('scores', measured):.4g}"
    if has_delta:
        sentence += (
            f", Σ_j P is off by {_largest('row_sums', measured):.1g}, errors of δ are "
            f"{_largest('delta', measured):.1%} of the gradient that reaches W_Q"
        )
    judged = "δ" if has_delta else "Ō"
    sentence += f", errors of {judged} have no persistent sign (largest coherence {largest:.1f})"
    return sentence if has_delta else f"{sentence}; without dO, neither δ nor Σ_j P was judged"


def nearness(signals: Signals) -> np.ndarray:
    """Returns how near each head is to a warning [N]: at 1 or more it has one; infinite for NaN.

    Nearness is the largest ratio of a rule's signal to its threshold. A rule that warns only
    together with another one has the smaller ratio of the two. Row sums and errors of δ below
    `SMALL` of their thresholds are as good as exact and are not counted.
    """
    ratios = {rule.name: rule.value(signals) / rule.threshold for rule in RULES}
    for rule in RULES:
        ratio = ratios[rule.name]
        if rule.name != "scores":
            ratio = np.where(ratio < SMALL, np.float32(-np.inf), ratio)
        if rule.only_with is not None:
            ratio = np.minimum(ratio, ratios[rule.only_with])
        ratios[rule.name] = ratio
    values = np.stack(list(ratios.values()))
    return np.max(np.where(np.isnan(values), np.float32(np.inf), values), axis=0)


def coherence_of(signals: Signals, error: str, reference: str, rows: int) -> np.ndarray:
    """Returns the coherence [N] of an error where this module calls it coherent, else −inf."""
    coherence = np.asarray(signals[f"{error}_coherence"])
    is_coherent = (
        (coherence >= COHERENCE)
        & (coherence >= COHERENT_SHARE * math.sqrt(rows))
        & (signals[f"{error}_rms"] >= ERROR_FLOOR * signals[reference])
    )
    return np.where(is_coherent, coherence, -np.inf)


def _worst(
    kind: Kind,
    measured: Mapping[str, Signals],
    severity_of: Callable[[Signals], np.ndarray],
    claim: str,
    worth: str = "",
) -> Finding | None:
    """Returns the finding under the arithmetic with the worst head; None where no head meets it.

    Args:
      kind: kind of the finding.
      measured: signals by the label of their arithmetic.
      severity_of: returns the severity of each head [N], −inf where a head does not meet it.
      claim: the sentence, with {label} and {value}.
      worth: what the rule was worth.
    """
    severities = {label: severity_of(signals) for label, signals in measured.items()}
    label = max(severities, key=lambda label: float(np.max(severities[label])))
    heads = _worst_first(severities[label])
    if not heads:
        return None
    sentence = f"{_name(heads)}: {claim.format(label=label, value=severities[label][heads[0]])}"
    return Finding(kind, sentence, label, heads, worth)


def _coherence(measured: Mapping[str, Signals], rows: int) -> Finding | None:
    what = "δ" if _has_delta(measured) else "the output"
    without = "" if _has_delta(measured) else "; whether they reach δ takes dO to tell"
    claim = (
        f"under {{label}} the errors of {what} have a persistent sign (coherence {{value:.1f}} of "
        f"at most {math.sqrt(rows):.1f}; random signs stay below {COHERENCE:g}), as in the "
        f"mechanism of arXiv 2510.04212{without}; this alone is no warning"
    )

    def severity(signals: Signals) -> np.ndarray:
        if "delta_error_rms" in signals:
            return coherence_of(signals, "delta_error", "delta_rms", rows)
        return np.maximum(
            coherence_of(signals, "unnormalized_error", "unnormalized_rms", rows),
            coherence_of(signals, "output_error", "output_rms", rows),
        )

    found = _worst("coherence", measured, severity, claim, NOT_MET_IN_THE_LAB)
    return None if found is None else found._replace(warns=False)


def _told_alone(findings: list[Finding], measured: Mapping[str, Signals]) -> list[Finding]:
    """Turns a rule that warns only with another one into information where the other is not met."""
    kinds = {finding.kind for finding in findings}
    for rule in RULES:
        values = [rule.value(signals) for signals in measured.values()]
        if rule.only_with in {None, *kinds} or not np.all(np.isfinite(values)):
            continue
        aside = f"; without a head that meets {rule.only_with} this is no warning"
        findings = [
            finding._replace(sentence=finding.sentence + aside, warns=False)
            if finding.kind == rule.name
            else finding
            for finding in findings
        ]
    return findings


def _told_apart(findings: list[Finding], measured: Mapping[str, Signals]) -> list[Finding]:
    """Turns `scores` into `rate` where the row sums and δ beside it are as good as exact."""
    kinds = {finding.kind for finding in findings}
    if not _has_delta(measured) or kinds & {"row_sums", "delta", "non_finite"}:
        return findings
    shares = {name: _largest(name, measured) for name in ("row_sums", "delta")}
    # "not all <" rather than "any ≥", because a NaN is not small.
    if not all(shares[r.name] < SMALL * r.threshold for r in RULES if r.name in shares):
        return findings
    return [
        finding._replace(
            kind="rate",
            worth=_RATE,
            sentence=f"{_name(finding.heads)}: the largest |score| is "
            f"{_largest('scores', measured):.0f}, but rounding is not the cause found here: Σ_j P "
            f"is off by {shares['row_sums']:.1g} and errors of δ are {shares['delta']:.1%} of the "
            "gradient that reaches W_Q; try a lower learning rate, or norms on q and k",
        )
        if finding.kind == "scores"
        else finding
        for finding in findings
    ]


def _largest(name: Name, measured: Mapping[str, Signals]) -> float:
    """Returns a rule's signal in the worst head under the worst arithmetic; NaN if any is NaN."""
    (rule,) = (rule for rule in RULES if rule.name == name)
    return _maximum(rule.value(signals) for signals in measured.values())


def _maximum(values: Iterable[np.ndarray]) -> float:
    """Returns the largest of all numbers; NaN if any is NaN, which the built-in `max` may miss."""
    return float(np.max([np.max(value) for value in values]))


def _non_finite(signals: Signals) -> np.ndarray:
    # Ō is left out, because the squares of a finite Ō may overflow in its RMS. Where Ō is infinite,
    # O is not finite either.
    errors = [
        x
        for name, x in signals.items()
        if name.endswith(("_rms", "_coherence")) and not name.startswith("unnormalized")
    ]
    is_finite = np.all(np.isfinite([*errors, signals["score_maximum"]]), axis=0)
    return np.where(is_finite, -np.inf, 1.0)


def _has_delta(measured: Mapping[str, Signals]) -> bool:
    return any("delta_error_rms" in signals for signals in measured.values())


def _worst_first(severity: np.ndarray) -> tuple[int, ...]:
    order: Sequence[int] = np.argsort(-severity, kind="stable").tolist()
    return tuple(head for head in order if severity[head] > -np.inf)


def _name(heads: tuple[int, ...]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    others = len(heads) - 1
    return f"head {heads[0]} and {others} other{'s' if others > 1 else ''}"
