"""How well a rule warns over runs: alarms before an explosion, misses, false alarms."""

import dataclasses

import numpy as np
import pytest
from records.arms import arm_record

from lowprec_attn.diagnostics.rules import RULES, alarms, met
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.report import warnings
from lowprec_attn.runs.instability.gradient_norm import first_rise

SCORES = next(rule for rule in RULES if rule.name == "scores")
DELTA = next(rule for rule in RULES if rule.name == "delta")


def record(explosion, values, name="score_maximum", arm="arm", not_finite=None):
    """A run with these values in the second head of the second layer, one every 100 steps."""
    failure = None if not_finite is None else {"step": not_finite, "message": ""}
    quiet = {name: [0.0, 0.0]}
    signals = {100 * i: [quiet, {name: [0.0, value]}] for i, value in enumerate(values)}
    return arm_record(Arm(arm, {}, None), explosion=explosion, signals=signals, failure=failure)


def tally(records, reading):
    return warnings.tally([(record, reading.first(record)) for record in records])


@pytest.mark.parametrize(
    ("explosion", "values", "leads", "missed", "false", "quiet"),
    [
        (950, [1, 511, 512, 1, 600], (750,), 0, 0, 0),  # the first alarm counts
        (200, [1, 1, 512], (0,), 0, 0, 0),
        (199, [1, 1, 512], (), 1, 0, 0),  # an alarm after the explosion is no warning
        (950, [1, 1, 511], (), 1, 0, 0),
        (None, [1, 512, 1], (), 0, 1, 0),
        (None, [1, 511, 1], (), 0, 0, 1),
        (950, [1, float("nan")], (850,), 0, 0, 0),
    ],
)
def test_alarms_are_counted(explosion, values, leads, missed, false, quiet):
    counts = tally([record(explosion, values)], warnings.of_rule(SCORES, "scores", warns=True))
    assert counts == warnings.Tally(leads, missed, false, quiet)


@pytest.mark.parametrize(
    ("explosion", "not_finite", "counts"),
    [
        (None, 200, warnings.Tally((), 0, 0, 0, 1, 0)),
        (None, 199, warnings.Tally((), 0, 0, 0, 0, 1)),
        (300, 400, warnings.Tally((100,), 0, 0, 0)),
    ],
)
def test_alarms_before_a_value_that_was_not_finite_are_counted_apart(explosion, not_finite, counts):
    run = record(explosion, [1, 1, 512], not_finite=not_finite)
    assert tally([run], warnings.of_rule(SCORES, "scores", warns=True)) == counts
    text = warnings.warning_table({"one": [run, record(None, [1], arm="well")]})
    (row,) = [line for line in text.splitlines() if line.startswith("| scores")]
    apart = "–" if explosion else f"{counts.not_finite} of 1"
    assert [cell.strip() for cell in row.split("|")[4:6]] == [apart, "0 of 1"]


def test_a_signal_that_some_steps_lack_is_recorded():
    run = record(950, [600])
    later = dataclasses.replace(run, signals={0: [{"score_maximum": [1.0]}], 100: run.signals[0]})
    assert SCORES.is_recorded(later.signals)
    found = {0: [{"x": [1.0]}], 100: [{DELTA.signals[0]: [0.1]}]}
    assert DELTA.is_recorded(found)


def test_runs_without_a_rules_signal_are_not_counted_for_it():
    text = warnings.warning_table({"one": [record(950, [600]), record(None, [600], arm="well")]})
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| scores")]
    cells = [cell.strip() for cell in rows[0]]
    assert cells == ["scores ≥ 512", "1 of 1", "950, from 950 on", "–", "1 of 1", "well 1"]
    assert "delta" not in text.split("\n\n")[1]
    assert warnings.warning_table({"one": [record(950, [600], name="repeated_maxima")]}) is None


def test_delta_is_counted_where_it_is_met_and_where_it_warns():
    """It warns in a layer that also meets `scores`, in any head."""
    name = "query_weight_gradient_error_relative"
    runs = [
        (950, [(600.0, 0.1), (40.0, 0.4), (600.0, 0.4)]),  # met at step 100, warns at step 200
        (950, [(40.0, 0.4)]),  # met, without a warning
        (None, [(40.0, 0.4)]),
        (None, [(31.0, 0.4)]),
        (None, [(512.0, 0.3)]),
    ]
    found = [
        dataclasses.replace(
            record(explosion, []),
            signals={
                100 * i: [{"score_maximum": [score, 32.0], name: [0.0, share * (score >= 32)]}]
                for i, (score, share) in enumerate(values)
            },
        )
        for explosion, values in runs
    ]
    assert tally(found, warnings.of_rule(DELTA, "delta", warns=False)) == warnings.Tally(
        (850, 950), 0, 2, 1
    )
    assert tally(found, warnings.of_rule(DELTA, "delta", warns=True)) == warnings.Tally(
        (750,), 1, 1, 2
    )
    text = warnings.warning_table({"one": found})
    labels = [line.split("|")[1].strip() for line in text.splitlines() if "0.3" in line]
    assert labels == ["(delta ≥ 0.3)", "delta ≥ 0.3, with scores"]


def test_a_layer_is_named_by_its_worst_head_and_the_best_signal_that_was_measured():
    signals = {"query_gradient_error_relative": np.array([0.1, 0.7, 0.5])}
    (alarm,) = met(signals)
    assert (alarm.rule.name, alarm.head, round(alarm.value, 6)) == ("delta", 1, 0.7)
    assert str(alarm).startswith("head 1: errors of δ are 70% of the gradient")
    better = {**signals, "query_weight_gradient_error_relative": np.array([0.1, 0.1, 0.1])}
    assert met(better) == []
    assert [alarm.rule.name for alarm in alarms({"p_row_sum_error_rms": np.array([np.nan])})] == [
        "row_sums"
    ]


def test_errors_of_delta_count_in_heads_that_tell_keys_apart():
    signals = {"query_weight_gradient_error_relative": [0.9, 0.4], "score_maximum": [31.0, 32.0]}
    (alarm,) = met(signals)
    assert (alarm.head, round(alarm.value, 6)) == (1, 0.4)
    assert alarms(signals) == []
    assert met({**signals, "score_maximum": [31.0, 31.0]}) == []
    assert [alarm.rule.name for alarm in alarms({name: [np.nan] for name in signals})] == [
        *("delta", "scores")
    ]
    lost = {**signals, "query_weight_gradient_error_relative": [0.1, np.nan]}
    assert [alarm.rule.name for alarm in alarms(lost)] == ["delta"]
    broken = alarms({**signals, "score_maximum": [float("nan"), 1.0]})
    assert [alarm.rule.name for alarm in broken] == ["delta", "scores"]


@pytest.mark.parametrize(
    ("norms", "risen"),
    [
        ([4.0] * 30 + [1.0] * 30 + [1.49] * 40, None),  # a fall is no rise
        ([1.0] * 60 + [1.5] * 40, 650),  # six of ten norms in 100 steps move the median
        ([1.0] * 60 + [9.0] * 4 + [1.0] * 36, None),  # a spike is no rise
        ([1.0] * 20 + [3.0] * 80, None),  # within the warm-up
        (
            [1.0] * 60 + [float("nan")] * 40,
            640,
        ),  # NaN counts as large; the fifth enters the mean of the middle two
    ],
)
def test_a_gradients_norm_rises_where_its_median_leaves_its_least(norms, risen):
    by_step = {10 * i: norm for i, norm in enumerate(norms)}
    assert first_rise(by_step, 300) == risen


def test_the_gradients_norm_is_a_row_of_the_table_of_warnings():
    norms = {10 * i: 1.0 if i < 60 else 1.5 for i in range(100)}
    lost = dataclasses.replace(record(950, [1.0]), gradient_norms=norms)
    held = dataclasses.replace(record(None, [1.0]), gradient_norms=norms, warmup_steps=900)
    unknown = record(None, [1.0])
    text = warnings.warning_table({"one": [lost, held, unknown]})
    (row,) = [line for line in text.splitlines() if line.startswith("| gradient's norm")]
    cells = [cell.strip() for cell in row.split("|")[2:5]]
    assert cells == ["1 of 1", "300, from 300 on", "–"]
    assert row.split("|")[5].strip() == "0 of 1"


def losses(spike_at=None, rise_at=None):
    """About 3 every tenth step, with 5 at one step, or 5 from a step on."""
    return {
        step: 3.0
        + 0.01 * (step // 10 % 3)
        + (2.0 if step == spike_at or (rise_at is not None and step >= rise_at) else 0.0)
        for step in range(0, 1000, 10)
    }


def slow_rise():
    """Losses that diverge without a spike: they rise more slowly than they scatter."""
    return {s: 3.0 + 0.3 * (-1) ** (s // 10) + max(0, s - 300) * 0.002 for s in range(0, 1000, 10)}


def test_errors_of_delta_count_in_heads_that_learn():
    """A head whose gradient is only rounding errors of float32: `exact`, seed 1, step 2,750."""
    signals = {
        "query_weight_gradient_error_relative": [0.002, 0.998],
        "score_maximum": [101.0, 578.7],
        "query_weight_gradient_exact": [0.0031, 1.294e-8],
    }
    assert [alarm.rule.name for alarm in alarms(signals)] == ["scores"]
    learns = {**signals, "query_weight_gradient_exact": [0.0031, 3.2e-7]}
    assert [alarm.rule.name for alarm in alarms(learns)] == ["delta", "scores"]
    unknown = {**signals, "query_weight_gradient_exact": [float("nan"), 1.294e-8]}
    assert [alarm.rule.name for alarm in alarms(unknown)] == ["delta", "scores"]


def test_events_of_losses_are_counted_before_explosions_and_in_runs_that_held():
    runs = [
        (losses(rise_at=500), 512),  # the spike at 500 is its start
        (losses(spike_at=800), 700),  # every tenth loss misses this explosion
        (slow_rise(), 555),
        (losses(), 900),
        (losses(spike_at=300), None),
        (losses(), None),
    ]
    found = [
        dataclasses.replace(record(explosion, [1.0]), losses=values) for values, explosion in runs
    ]
    for spike in (400, 800):
        lost = record(None, [1.0], not_finite=700)
        found.append(dataclasses.replace(lost, losses=losses(spike_at=spike)))
    first, *_ = found
    events = warnings.loss_events(first)
    assert (events.spike, events.divergence) == (500, None)
    assert 500 < events.end <= 520
    text = warnings.loss_table({"one": found, "two": found[:1]})
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[-3:]]
    assert rows == [
        ["one", "1 of 4", "2 of 4", "1 of 2", "1 of 2", "1 of 2", "0 of 2"],
        ["two", "1 of 1", "1 of 1", "–", "–", "–", "–"],
        ["all", "2 of 5", "3 of 5", "1 of 2", "1 of 2", "1 of 2", "0 of 2"],
    ]
