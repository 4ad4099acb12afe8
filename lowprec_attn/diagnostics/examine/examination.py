"""Examines layers: measures each under every requested arithmetic and judges what it shows."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from lowprec_attn.diagnostics import verdict
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.lookalikes import lookalikes, not_finite
from lowprec_attn.diagnostics.measurement import CURED, Arithmetic, advice, measure
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.numerics import Numerics

_ORDER: tuple[str, ...] = get_args(verdict.Kind)


class Examination(NamedTuple):
    """What was found in one layer.

    Attributes:
      layer: the layer.
      measured: signals by the label of the arithmetic. It is empty where q, k or v is not finite,
        and lacks the signals of the backward pass where dO is not finite.
      findings: at least one, in the order in which to look at them; of kind `none` where nothing
        was found.
      not_finite: names of the arrays that hold NaN or infinity.
    """

    layer: Layer
    measured: dict[str, verdict.Signals]
    findings: tuple[verdict.Finding, ...]
    not_finite: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether any finding is a warning."""
        return any(finding.warns for finding in self.findings)


class Head(NamedTuple):
    """One head under one arithmetic, a row of the table.

    Attributes:
      layer: the layer of the head.
      head: the number of the head.
      label: label of the arithmetic.
      values: every signal by name.
      met: names of the rules that the head meets, and `coherence` where its errors are coherent.
      severity: how near the head is to a warning; see `verdict.nearness`.
    """

    layer: Layer
    head: int
    label: str
    values: dict[str, float]
    met: tuple[str, ...]
    severity: float


def examine(layer: Layer, arithmetics: Sequence[Arithmetic]) -> Examination:
    """Measures and judges one layer, leaving out arrays that are not finite.

    A layer that knows its own arithmetic is measured under that first, then under `arithmetics`.

    Args:
      layer: the layer, with `is_causal` given.
      arithmetics: what to measure under; at least one, unless the layer has its own.
    """
    own = [] if layer.own is None else [Arithmetic("own numerics", layer.own)]
    chosen = [*own, *arithmetics]
    names = ("q", "k", "v", "do", "x", "w_q", "o", "lse")
    arrays = {name: array for name in names if (array := getattr(layer, name)) is not None}
    bad = tuple(name for name, array in arrays.items() if not_finite(name, array))
    if not {*bad}.isdisjoint("qkv"):
        return Examination(layer, {}, tuple(lookalikes(arrays)), bad)
    finite = _without(layer, bad)
    measured = {arithmetic.label: measure(finite, arithmetic) for arithmetic in chosen}
    findings = list(lookalikes(arrays, _largest_product(layer, measured.values())))
    judged = verdict.judge(measured, layer.rows)
    if not findings or judged[0].kind != "none":
        findings += judged
    return Examination(layer, measured, tuple(findings), bad)


def _without(layer: Layer, bad: Iterable[str]) -> Layer:
    """Returns the layer without the arrays that are not finite, and without x where dO goes."""
    left_out = {*bad} & {"do", "x", "w_q"}
    if "do" in left_out:
        left_out.add("x")  # x serves only the gradient of W_Q
    without: dict[str, Any] = dict.fromkeys(left_out)
    return layer._replace(**without)


def with_advice(examined: Examination, arithmetics: Sequence[Arithmetic]) -> Examination:
    """Adds to findings about δ the measured share of the error that each cure leaves."""
    findings = []
    for finding in examined.findings:
        found = next((a for a in arithmetics if a.label == finding.arithmetic), None)
        if finding.kind in CURED and found is not None and isinstance(found.numerics, Numerics):
            signals = examined.measured[found.label]
            if CURED[finding.kind] in signals:
                error = float(signals[CURED[finding.kind]][finding.heads[0]])
                finite = _without(examined.layer, examined.not_finite)
                told = advice(finite, finding, found, error)
                finding = finding._replace(sentence=f"{finding.sentence}; {told}")
        findings.append(finding)
    return examined._replace(findings=tuple(findings))


def worst_first(examined: Iterable[Examination]) -> list[Examination]:
    """Sorts layers: those that warn first, then by the kind of the first finding and severity."""

    def key(one: Examination) -> tuple[bool, int, float]:
        severity = max((head.severity for head in heads([one])), default=np.inf)
        return not one.found, _ORDER.index(one.findings[0].kind), -severity

    return sorted(examined, key=key)


def heads(examined: Iterable[Examination]) -> list[Head]:
    """Returns every head of every layer under every arithmetic, worst first."""
    rows = [
        _head(one.layer, head, label, signals)
        for one in examined
        for label, signals in one.measured.items()
        for head in range(len(signals["score_maximum"]))
    ]
    return sorted(rows, key=lambda row: (not row.met, row.met == ("coherence",), -row.severity))


def _head(layer: Layer, head: int, label: str, signals: verdict.Signals) -> Head:
    met = [rule.name for rule in RULES if rule.severity(signals)[head] > -np.inf]
    coherent = "delta" if "delta_error_rms" in signals else "output"
    coherence = verdict.coherence_of(signals, f"{coherent}_error", f"{coherent}_rms", layer.rows)
    named = (*met, "coherence") if coherence[head] > -np.inf else tuple(met)
    severity = float(verdict.nearness(signals)[head])
    values = {name: float(value[head]) for name, value in signals.items()}
    return Head(layer, head, label, values, named, severity)


def _largest_product(layer: Layer, measured: Iterable[verdict.Signals]) -> float:
    """Returns the largest |q·k|; infinite where a score is NaN."""
    name = "score_maximum" if layer.soft_cap is None else "score_maximum_before_cap"
    scores = np.array([s[name] for s in measured], np.float32)
    # q and k are finite, so a NaN comes from products that overflow.
    return float(np.max(np.where(np.isnan(scores), np.inf, scores))) / abs(layer.factor)
