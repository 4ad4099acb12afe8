"""The table of what `benchmarks.delta_bias` measured in the runs of an experiment."""

import json

import pytest
from records.arms import arm_record

from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.records import RecordError
from lowprec_attn.lab.report.bias import bias_table


def record(seed, scores):
    """A run with two layers of two heads each, with scores at step 600."""
    signals = {600: [{"score_maximum": heads} for heads in scores]}
    return arm_record(Arm("arm", {"x": "arm"}), seed=seed, steps=700, signals=signals)


RUNS = [record(1, [[3.0, 40.0], [20.0, 1.0]]), record(2, [[1.0, 2.0], [5.0, 1000.0]])]
LINE = {"step": 600, "draws": 1500, "error": [[0.003, 0.004], [0.0, 0.0]]}


def write(directory, *lines):
    text = "".join(json.dumps({**LINE, **line}) + "\n" for line in lines)
    (directory / "bias.ndjson").write_text(text)


def test_a_layer_has_its_heads_by_seed_and_the_largest_score(tmp_path):
    assert bias_table(tmp_path, RUNS) is None
    write(
        tmp_path,
        {"run": "arm-seed1", "mean": [[0.02, -0.01], [0.0, 0.01]]},
        {"run": "arm-seed2", "mean": [[0.0, 0.0], [0.03, 0.01]]},
        {"run": "other-seed2", "mean": []},
    )
    legend, table = bias_table(tmp_path, RUNS).split("\n\n")
    assert "at step 600, over 1,500 sequences" in legend.replace("\n", " ")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert cells[0] == ["arm", "layer", "seed 1", "seed 2"]
    assert cells[2:] == [
        ["x=arm", "0", "-0.0100 to +0.0200 (40)", "+0.0000"],
        ["x=arm", "1", "+0.0000 to +0.0100", "+0.0100 to +0.0300 (1,000)"],
        # 0.005 / 4 is the standard error of the mean of four heads
        ["x=arm", "all", "+0.0050 ± 0.0013", "+0.0100 ± 0.0013"],
    ]
    assert "seed 2" not in bias_table(tmp_path, RUNS[:1])


@pytest.mark.parametrize("line", [{"step": 500, "mean": [[0.0]]}, {}, {"mean": 3}])
def test_a_measurement_that_does_not_fit_is_refused(tmp_path, line):
    write(tmp_path, {"run": "arm-seed1", **line})
    with pytest.raises(RecordError, match=r"bias\.ndjson does not belong to the records beside it"):
        bias_table(tmp_path, RUNS)
