"""Diagnosing runs before their explosion, and a text with random bytes in it."""

import json
import sys

import numpy as np
import pytest
from records.arms import arm_record
from tiny import tiny_config

from benchmarks import bad_text, verdicts
from lowprec_attn.data import builtin_text, tokens
from lowprec_attn.errors import RunError
from lowprec_attn.lab import records
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.step import root_key


def record(arm, explosion, control=None, **fields):
    return arm_record(Arm(arm, {}, control), explosion=explosion, **fields)


def test_a_run_is_diagnosed_before_its_explosion_or_that_of_its_control():
    control = record("control", 300, "positive")
    assert verdicts.steps(record("arm", 420), control, (400, 50)) == {None: None, 50: 370}
    assert verdicts.steps(record("arm", None), control, (250, 50)) == {None: None, 250: 50, 50: 250}
    assert verdicts.steps(record("arm", None), None, (50,)) == {None: None, 50: 950}
    lost = record("arm", None, failure={"step": 420, "message": ""})
    assert verdicts.steps(lost, control, (50,)) == {None: None, 50: 370}
    lost = record("control", None, "positive", failure={"step": 300, "message": ""})
    assert verdicts.steps(record("arm", None), lost, (50,)) == {None: None, 50: 250}


def test_the_verdict_is_that_of_the_command(tmp_path, text):
    points = {"attention__points__lse": "bf16_m1", "attention__points__saved_output": "float32"}
    points["attention__implementation"] = "tiled"
    config = tiny_config(data__path=str(text), model__layers=1, devices=1, **points)
    settings = train_settings(config)
    state = make_program(settings, run_devices(settings)).init(root_key(settings))
    recorded = config | {"text_sha256": {"train": "", "val": ""}}
    with (
        RunDir.open(tmp_path / "run", recorded) as run_dir,
        Checkpoints(run_dir.checkpoints) as checkpoints,
    ):
        checkpoints.save(7, state, {})
    found = verdicts.diagnose(tmp_path / "run", 9)
    assert (found["code"], found["kind"]) == (3, "row_sums")
    assert found["layers"] == {"layer_00": ["row_sums"]}
    assert found["row_sums"] > 0.1 and found["scores"] < 512
    assert found["delta"] is None  # no head has a score of 32
    assert not found["at_batch"]
    with pytest.raises(RunError, match="cannot be diagnosed"):
        verdicts.diagnose(tmp_path / "run", 6)


def test_a_run_that_went_back_is_refused(tmp_path, monkeypatch, capsys):
    """Its metrics hold no explosion, so the steps before one would belong to another run."""
    run = tmp_path / "work" / "a-seed1"
    run.mkdir(parents=True)
    went_back = {"to": 100, "onset": 250, "detected": 300, "skipped": 201, "reason": "excess"}
    (run / "rollbacks.jsonl").write_text(f"{json.dumps(went_back)}\n")
    monkeypatch.setattr(records, "read_all", lambda _: [record("a", None)])
    monkeypatch.setattr(sys, "argv", ["verdicts", str(tmp_path / "work"), str(tmp_path)])
    assert verdicts.main() == 1
    error = capsys.readouterr().err
    assert f"{run} went back to step 100 and recorded no explosion; take an experiment" in error
    assert error.count("\n") == 1 and not (tmp_path / "verdicts.ndjson").exists()


def test_what_was_diagnosed_is_not_diagnosed_again(tmp_path, monkeypatch, capsys):
    runs = [record("a", 420), record("b", None), record("unseeded", 120, names_seed=False)]
    monkeypatch.setattr(records, "read_all", lambda _: runs)
    monkeypatch.setattr(
        verdicts, "diagnose", lambda run, step: {"code": 0, "kind": "none", "path": str(run)}
    )
    command = ["verdicts", "work", str(tmp_path), "--before", "100"]
    monkeypatch.setattr(sys, "argv", command)
    assert verdicts.main() == 0
    path = tmp_path / "verdicts.ndjson"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["run"], line["before"], line["step"]) for line in lines] == [
        *(("a-seed1", None, None), ("a-seed1", 100, 320)),
        *(("b-seed1", None, None), ("b-seed1", 100, 900)),
        ("unseeded", None, None),
    ]
    assert lines[-1]["path"] == "work/unseeded"
    assert len(capsys.readouterr().out.splitlines()) == 5
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines[:3] + lines[4:]))
    assert verdicts.main() == 0
    assert capsys.readouterr().out == "b-seed1 100 before none\n"
    assert len(path.read_text().splitlines()) == 5


def test_a_bad_text_differs_from_the_built_in_one_in_one_stretch(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bad_text", str(tmp_path / "text")])
    bad_text.main()
    written, own = tokens.load(tmp_path / "text"), builtin_text.load()
    np.testing.assert_array_equal(written.val.ids, own.val.ids)
    differ = np.flatnonzero(written.train.ids != own.train.ids)
    stretch = round(bad_text.SHARE * own.train.count)
    assert written.train.count == own.train.count
    assert 0.99 * stretch < len(differ) <= differ[-1] - differ[0] + 1 <= stretch
