"""The sentence that tells whether a run is healthy."""

import dataclasses
import math
from pathlib import Path

import pytest
from records.runs import QUIET

from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.instability.rollbacks import Rollback

FALLING = [5.0 - 0.01 * step for step in range(200)]
EXPLODED = [*FALLING, *[9.0] * 120]  # 7 of these losses lift the mean of 50 steps by 0.7
RECOVERED = [*EXPLODED, *[3.0] * 120]
NOT_FINITE = {"step": 200, "message": "first non-finite value in layer 1: the queries (forward)"}
STOPPED = {"step": 150, "explosion": 40, "message": "the loss exploded at step 40"}


def layer(**changes):
    return {name: [value, changes.get(name, value)] for name, value in QUIET.items()}


def of(*steps, worst=None, at=-1):
    """Signals of two layers; from step index `at` on, head 1 of layer 1 has `worst`."""
    changed = range(len(steps))[at:]
    return {
        step: [layer(), layer(**(worst or {}) if i in changed else {})]
        for i, step in enumerate(steps)
    }


def history(losses=FALLING, signals=None, failure=None, ended=True):
    return History(
        path=Path("run"),
        config={},
        starts=[],
        losses=dict(enumerate(losses)),
        val_losses={},
        signals=of(0, 100, 200) if signals is None else signals,
        rates={},
        summary={"val_loss": 3.0, "unigram_loss": 4.0} if ended and not failure else {},
        failure=failure or {},
    )


def resumed(steps, **changes):
    """A run that was resumed from another one at step 5,000."""
    found = history([3.0] * steps, of(0, 5), **changes)
    return dataclasses.replace(found, losses={5000 + s: x for s, x in found.losses.items()})


SCORES, DELTA = {"score_maximum": 600.0}, {"query_weight_gradient_error_relative": 0.4}
LARGE = "the largest |score| is 600"
CASES = {
    "healthy": (
        history(),
        "healthy",
        "Healthy: the loss has not exploded in 200 steps, and no rule was met at 3 diagnostics.",
    ),
    "resumed": (resumed(120), "healthy", "Healthy: the loss has not exploded in 120 steps, and"),
    "resumed, and too short": (
        resumed(12),
        "unknown",
        "Too little was recorded to tell: 12 steps were taken, and an explosion shows after 100.",
    ),
    "healthy so far": (history(ended=False), "healthy", "Healthy so far: "),
    "a rule could not be applied": (
        history(signals={s: [{"score_maximum": [1.0]}] for s in (0, 50)}),
        "healthy",
        "at 2 diagnostics (not applied, since not recorded: row_sums, delta).",
    ),
    "exploded": (
        history(EXPLODED),
        "broken",
        "Not healthy: the loss exploded at step 206 (its mean of 50 steps stayed more than 0.7 "
        "nats above its best); no rule was met.",
    ),
    "exploded, and came back": (history(RECOVERED), "broken", "above its best), and has since "),
    "exploded without signals": (
        history(EXPLODED, signals={}),
        "broken",
        "; there are no signals to apply rules to.",
    ),
    "stopped since it had exploded": (
        history(FALLING[:150], failure=STOPPED),
        "broken",
        "Not healthy: the loss exploded at step 40 (",
    ),
    "exploded after a warning": (
        history(EXPLODED, of(0, 100, 200, worst=SCORES, at=1)),
        "broken",
        f"; rule scores was met first at step 100 in layer 1, head 1: {LARGE}",
    ),
    "not finite": (
        history(failure=NOT_FINITE),
        "broken",
        "Not healthy: step 200 was not finite, first non-finite value in layer 1: the queries "
        "(forward); no rule was met.",
    ),
    "not finite, and nobody said where": (
        history([*FALLING, math.nan], ended=False),
        "broken",
        "Not healthy: step 200 was not finite, its loss was not; ",
    ),
    "warned": (
        history(signals=of(0, 100, 200, worst=SCORES)),
        "warned",
        "Warned: the loss has not exploded in 200 steps, but rule scores was met first at step "
        f"200 in layer 1, head 1: {LARGE}",
    ),
    "a rule that alone is no warning": (
        history(signals=of(0, 100, 200, worst=DELTA | {"score_maximum": 40.0}, at=1)),
        "healthy",
        "and no rule warned at 3 diagnostics (delta was met at 2 diagnostics, from step 100 on, "
        "which alone is no warning).",
    ),
    "exploded with it": (
        history(EXPLODED, signals=of(0, 100, worst=DELTA | {"score_maximum": 40.0})),
        "broken",
        "; no rule warned (delta was met at 1 diagnostic, from step 100 on, which alone",
    ),
    "warned twice": (
        history(signals=of(0, 100, 200, worst=SCORES | DELTA)),
        "warned",
        "(and 1 more, below).",
    ),
    "warned by what is not finite": (
        history(signals=of(0, 100, worst={"score_maximum": math.nan})),
        "warned",
        "layer 1, head 1: the largest |score| is inf",
    ),
    "in excess": (
        history([*FALLING, *[9.0] * 20]),
        "warned",
        "but it has been more than 0.7 nats above its best for the last 14 steps; an explosion "
        "takes 100.",
    ),
    "went back": (
        dataclasses.replace(history(), rollbacks=[Rollback(100, 150, 160, 61, "excess")]),
        "warned",
        "in 200 steps, but only since the run went back once to step 100.",
    ),
    "no signals": (
        history(signals={}),
        "unknown",
        "Too little was recorded to tell: no signals were recorded (diagnostics_every=0)",
    ),
    "signals once": (history(signals=of(0)), "unknown", "signals were recorded at one step only"),
    "other signals": (
        history(signals={s: [{"repeated_maxima": [0.0]}] for s in (0, 50)}),
        "unknown",
        "none of the signals that rules look at was recorded.",
    ),
    "too few steps": (
        history(FALLING[:99]),
        "unknown",
        "Too little was recorded to tell: 99 steps were taken, and an explosion shows after 100.",
    ),
    "nothing": (history([], {}), "unknown", "0 steps were taken, and an explosion shows after "),
}


@pytest.mark.parametrize(("run", "state", "words"), CASES.values(), ids=CASES)
def test_a_sentence_says_whether_a_run_is_healthy_and_why(run, state, words):
    health = judge(run)
    assert health.state == state
    assert words in health.sentence
    assert health.sentence.endswith(".")
    assert "\n" not in health.sentence


def test_a_rule_is_told_with_its_first_step_and_worst_layer():
    signals = of(0, 100, 200, 300, worst=SCORES, at=1)
    signals[100][0] = layer(score_maximum=700.0)  # the worst score at that step
    signals[300] = of(300)[300]
    (met,) = judge(history(signals=signals)).met
    assert (met.step, met.layer, met.alarm.head, met.alarm.value) == (100, 0, 1, 700.0)
    assert (met.times, met.at_last) == (2, False)
