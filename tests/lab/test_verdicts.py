"""The tables of what `benchmarks.verdicts` diagnosed in the runs of an experiment."""

import json

import pytest
from records.arms import arm_record

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.records import RecordError
from lowprec_attn.lab.report.outcomes import outcomes, wilson
from lowprec_attn.lab.report.verdicts import verdict_table


def record(arm, seed, mechanism="–", control=None, explosion=None, loss=2.0):
    """A run of 1,000 steps with a constant loss."""
    losses = dict.fromkeys(range(900, 1000, 10), loss)
    return arm_record(
        Arm(arm, {"x": arm}, control),
        mechanism=mechanism,
        seed=seed,
        explosion=explosion,
        losses=losses,
    )


RUNS = [
    record("o", 1, "B (output)", "positive", explosion=700),
    record("o", 2, "B (output)", "positive", explosion=700),
    record("both", 1, "A (normalizer), B (pv, output)", explosion=700),
    record("exact", 1, control="negative"),
    record("exact", 2, control="negative"),
    record("rate", 1, loss=2.8),  # lost, although its loss never rose
    record("rate", 2, loss=2.6),
]
LINES = [
    ("o-seed1", 100, "delta"),
    ("o-seed2", 100, "none"),
    ("o-seed1", None, "delta"),
    ("o-seed2", None, "scores"),
    ("both-seed1", None, "row_sums"),
    ("exact-seed1", 100, "none"),
    ("exact-seed1", None, "none"),
    ("exact-seed2", None, "scores"),
    ("rate-seed1", None, "rate"),
    ("rate-seed2", None, "none"),
    ("other-seed1", None, "rate"),
]


def write(directory, lines):
    fields = [
        {"run": run, "before": before, "code": 3 * (kind != "none"), "kind": kind}
        | {"at_batch": run == "exact-seed1"}
        for run, before, kind in lines
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in fields)
    (directory / "verdicts.ndjson").write_text(text)


def tables(text):
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
        for part in text.split("\n\n")
        if part.startswith("|")
    ]


def test_verdicts_are_counted_by_what_a_run_was_lost_to(tmp_path):
    assert verdict_table(tmp_path, outcomes(RUNS)) is None
    write(tmp_path, LINES)
    by_arm, counts = tables(verdict_table(tmp_path, outcomes(RUNS)))
    assert by_arm[0] == ["arm", "runs", "names the cause", "100 before", "newest", "batch"]
    assert by_arm[2:] == [
        ["o", "2 lost", "delta", "1 delta, 1 –", "1 delta, 1 scores", "0"],
        ["exact", "2 not lost", "–", "1 –", "1 –, 1 scores", "1"],
        ["both", "1 lost", "row_sums or delta", "no checkpoint", "1 row_sums", "0"],
        ["rate", "1 lost", "rate", "no checkpoint", "1 rate", "0"],
        ["rate", "1 not lost", "–", "no checkpoint", "1 –", "0"],
    ]
    assert counts[0] == ["checkpoint", "lost, warned", "lost, cause named", "not lost, warned"]
    shares = [[cell.partition(" (")[0] for cell in row] for row in counts[2:]]
    assert shares == [
        ["100 before", "1 of 2", "1 of 2", "0 of 1"],
        ["newest", "4 of 4", "3 of 4", "1 of 3"],
    ]
    assert counts[3][1] == "4 of 4 ({:.0%} to 100%)".format(*wilson(4, 4))


def test_lines_that_are_no_diagnoses_are_refused(tmp_path):
    (tmp_path / "verdicts.ndjson").write_text('{"run": "o-seed1"}\n')
    with pytest.raises(RecordError, match=r"verdicts\.ndjson does not hold diagnoses"):
        verdict_table(tmp_path, outcomes(RUNS))
