"""The rules: which value of which signal warns, and of what. Thresholds are from exploded runs.

Each rule looks at one signal of one layer (`attention_signals`) and is met where a head reaches its
threshold. `lowprec-attn lab report` counts from records what a rule was worth (hits, misses, false
alarms, lead time); docs/failure.md reports it.

The first two rules name a cause, the third does not. `delta` warns only in a layer that meets
`scores` as well. Alone it is information, because half of the healthy runs of GPT-2 124M in
bfloat16 meet it.

  row_sums  Σ_j P of the backward pass is not 1, so a row statistic (m, l, lse) is rounded. The
            deviation from 1 is 1e-6 in exact arithmetic, 2e-3 with a bfloat16 normaliser, and more
            than 1 with lse in bfloat16 at scores of 1,000.
  delta     the errors of δ make up a large part of W_Q's gradient (of dQ, where W_Q's input is not
            known), so O, or the product P̄V, is rounded too coarsely for δ = rowsum(dO ∘ O). The
            rule looks only at heads with a score of 32 or more. While all scores are small a head
            hardly tells its keys apart, W_Q's gradient is near 0, and any error is a large part of
            it: healthy runs have 99 % at step 25. The rule skips heads that have almost stopped
            learning, because even in float32 what is left of their gradient is rounding.
  scores    a score is so large that neighbouring bfloat16 numbers lie 4 apart. In the runs whose
            cause is δ, scores grow before the loss does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Signals = Mapping[str, Sequence[float] | np.ndarray]
"""Signals of `attention_signals` by name, one number per head."""

Name = Literal["row_sums", "delta", "scores"]


class Rule(NamedTuple):
    """A head meets the rule where the first of `signals` that was measured is ≥ `threshold`.

    Attributes:
      name: name of the rule.
      signals: names of signals of `attention_signals`, the best first.
      threshold: the value from which on a head meets the rule. A NaN meets it too.
      meaning: the sentence for the user, with {value} for the signal.
      worth: what the rule was worth in runs that exploded and in runs that did not
        (docs/failure.md).
      least_score: a head does not meet the rule if its `score_maximum` was measured and is smaller,
        unless the signal is NaN.
      least_gradient: a head does not meet the rule if its exact gradient of W_Q
        (`query_weight_gradient_exact`) was measured and is smaller than this share of the layer's
        largest, unless the signal is NaN.
      only_with: the rule that a layer must meet too for this one to warn; None for none. A signal
        that is not finite warns by itself.
    """

    name: Name
    signals: tuple[str, ...]
    threshold: float
    meaning: str
    worth: str
    least_score: float = 0.0
    least_gradient: float = 0.0
    only_with: Name | None = None

    def value(self, signals: Signals) -> np.ndarray:
        """Returns the signal of each head [N]; −inf where none of `signals` was measured."""
        for name in self.signals:
            if name in signals:
                return np.asarray(signals[name], np.float32)
        heads = len(np.asarray(next(iter(signals.values()))))
        return np.full(heads, -np.inf, np.float32)

    def is_recorded(self, steps: Mapping[int, Sequence[Collection[str]]]) -> bool:
        """Whether one of `signals` was recorded at some step in some layer."""
        layers = (layer for layers in steps.values() for layer in layers)
        return any(name in layer for layer in layers for name in self.signals)

    def severity(self, signals: Signals) -> np.ndarray:
        """Returns the signal [N] of heads that meet the rule (inf for NaN), −inf of the others."""
        value = self.value(signals)
        is_nan = np.isnan(value)
        value = np.where(is_nan, np.float32(np.inf), value)
        met = value >= self.threshold
        if self.least_score and "score_maximum" in signals:
            # "not <" rather than "≥", so that a head whose scores are NaN still meets the rule.
            met &= ~(np.asarray(signals["score_maximum"], np.float32) < self.least_score)
        if self.least_gradient and "query_weight_gradient_exact" in signals:
            gradient = np.asarray(signals["query_weight_gradient_exact"], np.float32)
            met &= ~(gradient < self.least_gradient * np.max(gradient))
        return np.where(met | is_nan, value, np.float32(-np.inf))

    def is_met(self, signals: Signals) -> bool:
        """Whether one of a layer's heads meets the rule, whether it warns or not."""
        return bool(np.any(self.severity(signals) > -np.inf))


RULES: tuple[Rule, ...] = (
    Rule(
        "row_sums",
        ("p_row_sum_error_rms",),
        0.03,
        "rows of the backward pass's P miss a sum of 1 by {value:.2g} (RMS): a row statistic (m, l "
        "or lse) is rounded; keep them in float32",
        "where lse was rounded it came before 30 of 30 runs of fresh seeds broke "
        "(11 exploded, 19 were not finite), by a median of 225 steps, and in 0 of 10 runs without "
        "rounding; elsewhere in 0 of 124 that held; where m and l, or l alone, had two bits it "
        "came before 14 of 14 broke, and on fresh seeds was met at 15 of 15 checkpoints",
    ),
    Rule(
        "delta",
        ("query_weight_gradient_error_relative", "query_gradient_error_relative"),
        0.3,
        "errors of δ are {value:.0%} of the gradient that reaches W_Q: make rows of dS sum "
        'to zero, delta="normalized"; saved_output="float32" may keep the loss, '
        "but not the scores",
        "alone it is no warning: where rounding of O or l broke training it came before 164 of 164 "
        "explosions of fresh seeds, by 220 steps or more, but also in 85 of 209 "
        "runs that held; of GPT-2 124M in bfloat16, in 5 of 9 that held. In a layer with a score "
        "of 512 it says why: before 164 of 164, by 79 steps or more, and in 8 of 209; near the "
        "highest rate that GPT-2 124M trains at, 18 of 19 runs met it whose rows of dS did not "
        "sum to zero, and 17 held",
        least_score=32.0,
        least_gradient=1e-4,
        only_with="scores",
    ),
    Rule(
        "scores",
        ("score_maximum",),
        512.0,
        "the largest |score| is {value:.0f}, where neighbouring bfloat16 numbers lie 4 apart or "
        "more; in runs that rounding of O broke, scores grew before the loss did",
        "where rounding of O or l broke training it came before 164 of 164 explosions of fresh "
        "seeds, by 79 steps or more, and in 8 of 209 runs that did not explode; "
        "at a rate too high, in 3 of 3 without any rounding, and near the highest rate that GPT-2 "
        "124M trains at in 26 of 31 that held",
    ),
)


RUNAWAY_SCORE = 512.0
RUNAWAY_HEADS = 2


def runaway(signals: Signals) -> tuple[int, ...]:
    """Returns the heads of a layer whose scores have run away, the worst first.

    Scores have run away where `RUNAWAY_HEADS` or more heads have a largest |score| above
    `RUNAWAY_SCORE`; otherwise no head is returned. A NaN counts as above. GPT-2 124M in true
    bfloat16 ran away where FlashAttention's arithmetic made scores grow, and did not where rows of
    dS summed to zero (docs/failure.md).
    """
    scores = np.asarray(signals["score_maximum"], np.float32)
    scores = np.where(np.isnan(scores), np.float32(np.inf), scores)
    large = int(np.sum(scores > RUNAWAY_SCORE))
    order = np.argsort(-scores, kind="stable")[: large if large >= RUNAWAY_HEADS else 0]
    return tuple(order.tolist())


class Alarm(NamedTuple):
    """A rule that a layer meets, its worst head and the value of that head."""

    rule: Rule
    head: int
    value: float

    def __str__(self) -> str:
        return f"head {self.head}: {self.rule.meaning.format(value=self.value)}"


def alarms(signals: Signals) -> list[Alarm]:
    """Returns the rules that warn of one layer, in the order of `RULES`; see `Rule.only_with`.

    Args:
      signals: signals of `attention_signals` by name, one number per head.
    """
    found = met(signals)
    names = {alarm.rule.name for alarm in found}
    return [a for a in found if a.rule.only_with in {None, *names} or math.isinf(a.value)]


def met(signals: Signals) -> list[Alarm]:
    """Returns the rules that one layer meets, in the order of `RULES`, whether they warn or not."""
    found = []
    for rule in RULES:
        severity = rule.severity(signals)
        head = int(np.argmax(severity))
        if severity[head] > -np.inf:
            found.append(Alarm(rule, head, float(severity[head])))
    return found
