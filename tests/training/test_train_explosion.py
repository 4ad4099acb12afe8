"""Runs whose loss explodes and which `stop_exploded_after` ends."""

import json
import os
import signal

import numpy as np
import pytest
from command import ROOT, flags
from tiny import tiny_config

from lowprec_attn.commands.main import main
from lowprec_attn.errors import UserError
from lowprec_attn.runs import metrics
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.loop import EXIT_BROKEN, EXIT_DONE, Loop
from lowprec_attn.training.run import train

LIMIT = 100

pytestmark = pytest.mark.usefixtures("compiled_once")


class KilledError(Exception):
    """Stands for kill -9: nothing is saved."""


@pytest.fixture(scope="module")
def run(text, compiled_once):
    """`run(workdir, **changes)` trains with a rate at which the loss explodes at once, for good."""

    def run(workdir, **changes):
        fields = {
            "optimizer__peak_lr": 3.0,
            "optimizer__end_lr": 3.0,
            "attention__implementation": "tiled",
            "data__path": str(text),
            "model__layers": 1,
            "devices": 1,
            "steps": 115,
            "diagnostics_every": 0,
            "checkpoint_every": 50,
            "eval_every": 60,
            "stop_exploded_after": LIMIT,
        }
        config = tiny_config(**(fields | changes))
        return train(train_settings(config), config, workdir)

    return run


@pytest.fixture(scope="module")
def stopped(run, tmp_path_factory):
    """The directory of a stopped run."""
    workdir = tmp_path_factory.mktemp("runs") / "stopped"
    assert run(workdir) == EXIT_BROKEN
    return workdir


def read(workdir, name):
    return json.loads((workdir / name).read_text())


def test_a_validation_loss_of_nan_is_no_success(run, tmp_path, monkeypatch, capsys):
    def without_validation(self, run=Loop.run):
        program = self.fixed.program._replace(evaluate=lambda *_: np.float32(np.nan))
        self.fixed = self.fixed._replace(program=program)
        return run(self)

    monkeypatch.setattr(Loop, "run", without_validation)
    workdir = tmp_path / "run"
    rates = {"optimizer__peak_lr": 1e-3, "optimizer__end_lr": 1e-3}
    assert run(workdir, steps=4, eval_every=2, stop_exploded_after=None, **rates) == EXIT_BROKEN
    said = capsys.readouterr().out
    assert "the validation loss of step 2 is nan" in said
    assert "not finite at step 4: the validation loss is nan, while the losses of training" in said
    assert not (workdir / "summary.json").exists()
    assert read(workdir, "failure.json")["step"] == 4
    for path in workdir.glob("*.json*"):
        for line in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


def test_a_run_that_has_exploded_is_stopped_with_its_records(stopped):
    failure = read(stopped, "failure.json")
    explosion, step = failure["explosion"], failure["step"]
    # The step under way when the limit is reached is finished, too.
    assert step == explosion + LIMIT + 1
    assert (
        failure["message"] == f"the loss exploded at step {explosion}; stopped after {step} steps"
    )
    records = metrics.read(stopped / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(step))
    assert [r["step"] for r in records if "val_loss" in r] == [60, step]
    assert max(int(path.stem) for path in (stopped / "checkpoints").glob("*.json")) == step
    page = (stopped / "report.html").read_text()
    assert f"Not healthy: the loss exploded at step {explosion:,} (" in page
    assert not (stopped / "summary.json").exists()


@pytest.mark.usefixtures("no_report")
def test_an_interrupted_run_stops_at_the_same_step(run, stopped, tmp_path, monkeypatch):
    step = read(stopped, "failure.json")["step"]
    before = Loop._before

    def interrupt(at, act):
        def patched(self, step):
            before(self, step)
            if step == at:
                act()

        monkeypatch.setattr(Loop, "_before", patched)

    def kill():
        raise KilledError

    def ask_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)

    workdir = tmp_path / "run"
    interrupt(70, kill)
    with pytest.raises(KilledError):
        run(workdir)
    interrupt(step - 2, ask_to_stop)  # saves where the records already demand the end
    assert run(workdir) == EXIT_DONE
    assert not (workdir / "failure.json").exists()
    assert max(int(path.stem) for path in (workdir / "checkpoints").glob("*.json")) == step - 1
    monkeypatch.setattr(Loop, "_before", before)
    assert run(workdir) == EXIT_BROKEN
    for name in ("metrics.jsonl", "data_order.txt", "failure.json"):
        assert (workdir / name).read_bytes() == (stopped / name).read_bytes()


@pytest.mark.usefixtures("no_report")
def test_the_same_command_on_a_stopped_run_changes_nothing(run, stopped):
    names = ("metrics.jsonl", "throughput.jsonl", "data_order.txt", "failure.json")
    before = [(stopped / name).read_bytes() for name in names]
    assert run(stopped) == EXIT_BROKEN
    assert [(stopped / name).read_bytes() for name in names] == before


@pytest.mark.usefixtures("no_report")
def test_without_a_limit_it_goes_on(run, tmp_path):
    assert run(tmp_path / "run", stop_exploded_after=None) == EXIT_DONE
    assert read(tmp_path / "run", "summary.json")["val_loss"] > 0
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.mark.parametrize("steps", [99, 0, -1])
def test_fewer_steps_than_an_explosion_takes_are_refused(tmp_path, monkeypatch, capsys, steps):
    monkeypatch.chdir(ROOT)
    workdir = tmp_path / "run"
    assert main(["train", f"--workdir={workdir}", *flags(stop_exploded_after=steps)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: config.stop_exploded_after must be at least 100, or None, got {steps}"
    assert not workdir.exists()
    with pytest.raises(UserError, match="stop_exploded_after"):
        train_settings(tiny_config(stop_exploded_after=steps))
    assert train_settings(tiny_config(stop_exploded_after=100)).stop_exploded_after == 100
