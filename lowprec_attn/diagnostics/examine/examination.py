"""Examines layers: measures each under every arithmetic asked for, and judges what it shows."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

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
      measured: signals by the label of the arithmetic; empty where q, k or v are not finite, and
        without those of the backward pass where dO is not.
      findings: at least one, first what to look at first; of kind `none` where nothing is met.
      not_finite: names of the arrays that hold NaN or infinity.
    """

    layer: Layer
    measured: dict[str, verdict.Signals]
    findings: tuple[verdict.Finding, ...]
    not_finite: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether there is anything that warns."""
        return any(finding.warns for finding in self.findings)


class Head(NamedTuple):
    """One head under one arithmetic, a row of a table.

    Attributes:
      layer: its layer.
      head: its number.
      label: of the arithmetic.
      values: every signal by name.
      met: names of the rules that it meets, and `coherence`.
      severity: how near it is to a warning, see `verdict.nearness`.
    """

    layer: Layer
    head: int
    label: str
    values: dict[str, float]
    met: tuple[str, ...]
    severity: float


def examine(layer: Layer, arithmetics: Sequence[Arithmetic]) -> Examination:
    """Measures and judges one layer, as far as its arrays are finite.

    A layer that knows its own arithmetic is measured under that one, before those of the call.

    Args:
      layer: with `is_causal` given.
      arithmetics: to measure under; at least one, unless the layer has its own.
    """
    own = [] if layer.own is None else [Arithmetic("own numerics", layer.own)]
    chosen = [*own, *arithmetics]
    names = ("q", "k", "v", "do", "x", "w_q", "o", "lse")
    arrays = {name: getattr(layer, name) for name in names}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    bad = tuple(name for name, array in arrays.items() if not_finite(name, array))
    if not {*bad}.isdisjoint("qkv"):
        return Examination(layer, {}, tuple(lookalikes(arrays)), bad)
    measured_as = functools.partial(measure, _without(layer, bad))
    measured = {arithmetic.label: measured_as(arithmetic) for arithmetic in chosen}
    findings = lookalikes(arrays, _largest_product(layer, measured.values()))
    judged = verdict.judge(measured, layer.rows)
    if not findings or judged[0].kind != "none":
        findings += judged
    return Examination(layer, measured, tuple(findings), bad)


def _without(layer: Layer, bad: Iterable[str]) -> Layer:
    """The layer without what is not finite, and without what is of no use then."""
    left_out = {*bad} & {"do", "x", "w_q"}
    if "do" in left_out:
        left_out.add("x")  # which serves the gradient of W_Q alone
    return layer._replace(
        do=None if "do" in left_out else layer.do,
        x=None if "x" in left_out else layer.x,
        w_q=None if "w_q" in left_out else layer.w_q,
    )


def with_advice(examined: Examination, arithmetics: Sequence[Arithmetic]) -> Examination:
    """Adds to the findings about δ what each cure leaves of the error, measured."""
    findings = []
    for finding in examined.findings:
        found = next((a for a in arithmetics if a.label == finding.arithmetic), None)
        if finding.kind in CURED and found is not None and isinstance(found.numerics, Numerics):
            signals = examined.measured[found.label]
            if CURED[finding.kind] in signals:
                error = float(signals[CURED[finding.kind]][finding.heads[0]])
                finite = _without(examined.layer, examined.not_finite)
                measured_as = functools.partial(measure, finite)
                told = advice(finding, found, error, measured_as)
                finding = finding._replace(sentence=f"{finding.sentence}; {told}")
        findings.append(finding)
    return examined._replace(findings=tuple(findings))


def worst_first(examined: Iterable[Examination]) -> list[Examination]:
    """Those that warn, then by the kind of the first finding and how far a rule is exceeded."""

    def key(one: Examination) -> tuple[bool, int, float]:
        severity = max((head.severity for head in heads([one])), default=np.inf)
        return not one.found, _ORDER.index(one.findings[0].kind), -severity

    return sorted(examined, key=key)


def heads(examined: Iterable[Examination]) -> list[Head]:
    """Every head of every layer under every arithmetic, worst first."""
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
    """The largest |q·k|, infinite where a score is NaN."""
    name = "score_maximum" if layer.soft_cap is None else "score_maximum_before_cap"
    scores = np.array([s[name] for s in measured], np.float32)
    # Of finite q and k, NaN comes of products that overflow.
    return float(np.max(np.where(np.isnan(scores), np.inf, scores))) / abs(layer.factor)
