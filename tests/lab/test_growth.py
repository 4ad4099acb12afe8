"""Growth of scores relative to the negative control, computed by hand."""

import dataclasses

from records.arms import arm_record

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.report.growth import growth_table

EXACT, ROUNDED = Arm("exact", {}, "negative"), Arm("rounded", {}, "positive")


def record(arm, seed, values):
    """A run with these scores in the second head of the second layer, one every 100 steps."""
    quiet = {"score_maximum": [1.0, 1.0]}
    signals = {100 * i: [quiet, {"score_maximum": [1.0, value]}] for i, value in enumerate(values)}
    return arm_record(arm, seed=seed, signals=signals)


def rows(records, steps):
    table = growth_table(records, steps)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:]]


def test_ratios_are_of_runs_with_one_seed():
    records = [
        *(record(EXACT, 1, [2, 10, 100]), record(EXACT, 2, [4, 20, 50])),
        record(ROUNDED, 1, [2, 40, 100]),  # 1, 4, 1 times the control
        record(ROUNDED, 2, [2, 20]),  # 0.5, 1; the run ended before the last step
        record(ROUNDED, 3, [2, 4000, 5000]),  # no control: in the range, in no ratio
    ]
    assert rows(records, [0, 100, 200])[2:] == [
        ["exact", "score", "2 to 4", "10 to 20", "50 to 100"],
        ["rounded", "score", "2", "20 to 4,000", "100 to 5,000"],
        ["", "over the control's", "0.71 (0 of 2)", "2 (1 of 2)", "1 (0 of 1)"],
    ]


def test_scores_that_are_not_finite_are_left_out():
    nan = float("nan")
    records = [
        *(record(EXACT, 1, [2, 2]), record(EXACT, 2, [2, 2])),
        *(record(ROUNDED, 1, [8, nan]), record(ROUNDED, 2, [2, float("inf")])),
    ]
    assert rows(records, [0, 100])[3:] == [
        ["rounded", "score", "2 to 8", "–"],
        ["", "over the control's", "2 (1 of 2)", "–"],
    ]


def test_it_takes_two_seeds_of_a_control():
    one = [record(EXACT, 1, [2]), record(ROUNDED, 1, [2]), record(ROUNDED, 2, [2])]
    assert growth_table(one, [0]) is None
    none = [dataclasses.replace(r, arm=Arm("arm", {}, None)) for r in one]
    assert growth_table([*none, record(Arm("arm", {}, None), 3, [1])], [0]) is None
