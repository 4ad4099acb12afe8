"""Arms that differ in more than their overrides."""

import pytest
from stand_in import rewrite

from lowprec_attn.commands.main import main

DIFFERENCES = {
    "config": (
        lambda run: rewrite(run / "config.json", lambda c: c.update(seed=1)),
        "a and b differ in config.seed: 42 and 1",
    ),
    "batches": (
        lambda run: (run / "data_order.txt").write_text("1,2\n3,5\n"),
        "a and b were not given the same batches",
    ),
    "versions": (
        lambda run: rewrite(run / "environment.json", lambda e: e[0].update(versions="y")),
        "versions differs: x (a), y (b)",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_arms_that_differ_in_more_than_their_overrides_are_not_compared(lab, tmp_path, case):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    change, message = DIFFERENCES[case]
    change(lab.out / "b")
    code, output = lab(acts)
    assert code == 1
    assert message in output
    assert main(["lab", "collect", str(lab.out), str(tmp_path / "results")]) == 1
    assert not (tmp_path / "results").exists()


def test_an_arm_that_ended_earlier_has_seen_the_same_batches(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    (lab.out / "b" / "data_order.txt").write_text("1,2\n3")  # the second line is half written
    assert lab(acts)[0] == 0
