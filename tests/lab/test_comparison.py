"""Arms that differ in more than their overrides."""

import json

import pytest
from processes.stand_in import rewrite

from lowprec_attn.commands.main import main
from lowprec_attn.lab.comparison import unwanted_differences
from lowprec_attn.lab.workdir import arm_runs

DIFFERENCES = {
    "config": (
        lambda run: rewrite(run / "config.json", lambda c: c.update(seed=1)),
        "a and b differ in config.seed: 42 and 1",
    ),
    "batches": (
        lambda run: (run / "data_order.txt").write_text("42,2\n3,5\n"),
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


def test_an_arm_with_a_text_of_its_own_may_be_compared(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    rewrite(lab.out / "b" / "config.json", lambda c: c.update(text_sha256={"train": "x"}))
    code, output = lab(acts)
    assert code == 1 and "differ in config.text_sha256" in output
    rewrite(lab.out / "b.json", lambda d: d["overrides"].update({"data.path": "x"}))
    assert not unwanted_differences(arm_runs(lab.out))


def test_arms_with_the_fields_of_a_rollback_apart_may_be_compared(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    for arm, asked in {"a": None, "b": "rollback"}.items():
        rewrite(lab.out / arm / "config.json", lambda c, asked=asked: c.update(on_spike=asked))
    assert "config.rollback.tries: 0 and 3" in unwanted_differences(arm_runs(lab.out))[0]
    rewrite(lab.out / "b.json", lambda d: d["overrides"].update({"on_spike": "rollback"}))
    assert not unwanted_differences(arm_runs(lab.out))


def test_an_arm_that_ended_earlier_has_seen_the_same_batches(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    (lab.out / "b" / "data_order.txt").write_text("42,2\n3")  # the second line is incomplete
    assert lab(acts)[0] == 0


def test_batches_are_compared_up_to_where_a_run_went_back(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    lines = (lab.out / "a" / "data_order.txt").read_text().splitlines()
    rollback = {"to": 1, "onset": 1, "detected": 1, "skipped": 1, "reason": "excess"}
    (lab.out / "b" / "rollbacks.jsonl").write_text(json.dumps(rollback) + "\n")
    (lab.out / "b" / "data_order.txt").write_text(f"{lines[0]}\n7,7\n")
    assert lab(acts)[0] == 0
    (lab.out / "b" / "data_order.txt").write_text(f"7,7\n{lines[1]}\n")
    assert lab(acts)[0] == 1


def test_batches_are_compared_within_a_seed_alone(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts, head="seeds = [1, 2]")[0] == 0
    orders = [(lab.out / f"a-seed{n}" / "data_order.txt").read_bytes() for n in (1, 2)]
    assert orders[0] != orders[1]
    (lab.out / "b-seed2" / "data_order.txt").write_bytes(orders[0])
    code, output = lab(acts, head="seeds = [1, 2]")
    assert code == 1
    assert "error: a-seed2 and b-seed2 were not given the same batches" in output
    assert "seed1" not in output[output.index("error: ") :]


def test_seeds_that_are_not_those_of_the_experiment_are_a_difference(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    rewrite(lab.out / "b" / "config.json", lambda config: config.update(seed=7))
    (lab.out / "b" / "data_order.txt").write_bytes((lab.out / "a" / "data_order.txt").read_bytes())
    code, output = lab(acts)
    assert code == 1
    assert "a and b differ in config.seed: 42 and 7" in output
