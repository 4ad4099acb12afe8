"""What a report lists as incidents of a run."""

import json

import pytest

from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.instability.incidents import AT_ITS_BATCH, incidents
from lowprec_attn.runs.pages import figures
from lowprec_attn.runs.run_dir import RunDir

SPIKE = {"spike": {"loss": 6.5, "median": 3.0, "spread": 0.25, "score": 14.0}}
ALARM = {"head": 1, "value": 1500.0}

QUIET, LOUD = ({"layer_0": {"score_maximum": [3.0, value]}} for value in (4.0, 600.0))

CASES = {
    "warnings": (
        [{"step": 1200, "warnings": {"layer_10": {"delta": ALARM}, "layer_2": {"scores": ALARM}}}],
        [
            "step 1,200: layer 2, head 1: scores 1.5e+03",
            "step 1,200: layer 10, head 1: delta 1.5e+03",
        ],
    ),
    "spike": (
        [{"step": 2, **SPIKE}],
        [
            "step 2: the loss 6.500 is a spike, 14.0 spreads of 0.250 above 3.000; its batch is "
            "line 3 of data_order.txt; it is not over yet"
        ],
    ),
    "recovered": (
        [
            {"step": 1, **SPIKE},
            {"step": 5, "spike_end": {"begin": 1, "recovery": "fast"}},
        ],
        [
            "step 1: the loss 6.500 is a spike, 14.0 spreads of 0.250 above 3.000; its batch is "
            "line 2 of data_order.txt; the loss has recovered 4 steps after the spike of step 1 "
            "(fast)"
        ],
    ),
    "at its batch": (
        [
            {"step": 0, "signals": LOUD},  # long before
            {"step": 1, "signals": QUIET},
            {"step": 2, **SPIKE},
            {"step": 4, "signals": QUIET},
            {"step": 5, "spike_end": {"begin": 2, "recovery": "fast"}},
            {"step": 6, "signals": LOUD},
        ],
        [
            "step 2: the loss 6.500 is a spike, 14.0 spreads of 0.250 above 3.000; its batch is "
            "line 3 of data_order.txt; the loss has recovered 3 steps after the spike of step 2 "
            "(fast); no rule was met, which points at its batch rather than at arithmetic"
        ],
    ),
    "divergence": (
        [{"step": 9, "divergence": {"smoothed": 3.75, "best": 3.0}}],
        ["step 9: the loss diverges without a spike: smoothed 3.750, 0.750 above its best"],
    ),
    "nothing": ([{"step": 0, "loss": 3.0}], []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_record_is_told_in_a_line(case):
    records, lines = CASES[case]
    assert [str(incident) for incident in incidents(records)] == lines


@pytest.mark.parametrize(
    ("signals", "recovery", "at_batch"),
    [
        ({}, "fast", False),  # no measurement
        ({1: QUIET}, "fast", True),
        ({1: QUIET}, "slow", False),
        ({1: LOUD}, "fast", False),
        ({1: QUIET, 12: LOUD, 20: QUIET}, "fast", False),
        # Errors of δ alone are a matter of the arithmetic and no warning.
        ({1: {"layer_0": {"query_gradient_error_relative": [0.5]}}}, "fast", False),
        ({30: QUIET}, "fast", False),  # after the spike
    ],
)
def test_a_fast_spike_without_a_rule_met_points_at_its_batch(signals, recovery, at_batch):
    records = [{"step": step, "signals": found} for step, found in signals.items()]
    records += [{"step": 10, **SPIKE}]
    records += [{"step": 25, "spike_end": {"begin": 10, "recovery": recovery}}]
    (spike,) = (i for i in incidents(records) if i.loss is not None)
    assert spike.at_batch is at_batch
    assert (AT_ITS_BATCH in spike.text) is at_batch


def test_the_page_marks_spikes(tmp_path):
    run_dir = RunDir(tmp_path)
    records = [{"step": s, "loss": 3.0} for s in range(9)]
    records += [{"step": s, **SPIKE} for s in range(3, 7)]
    run_dir.metrics.write_text("".join(f"{json.dumps(r)}\n" for r in records))
    history = History.read(run_dir)
    (axis,) = figures.loss(history, judge(history)).axes
    (spikes,) = [line for line in axis.lines if line.get_marker() == "x"]
    assert list(spikes.get_xdata()) == [3, 4, 5, 6]
