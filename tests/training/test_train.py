"""The trainer from the command line, `python train.py`, mostly in this process."""

import functools
import gc
import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from command import ROOT, flags, run_here
from tiny import tiny_config

from lowprec_attn.commands.main import main
from lowprec_attn.runs import metrics
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.run import train
from lowprec_attn.training.saved_model import settings_of

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def run(text, compiled_once):
    """Runs without two things that take seconds: other platforms' kernels, the built-in text."""
    return functools.partial(run_here, attention__implementation="tiled", data__path=text)


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """The directory of a finished run."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    run(workdir)
    return workdir


def error_line(err):
    """The single line that begins with `error:`; checks that there is no traceback."""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.usefixtures("no_report", "text_read_once")
def test_the_first_lines_say_what_was_chosen_and_why(tmp_path):
    out, _ = run_here(tmp_path / "run", steps=4, model__layers=1, diagnostics_every=0)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:6])
    assert "cpu" in lines["device"]
    assert "tiny" in lines["scale"]
    assert "full" in lines["scale"]
    assert "documentation of Python" in lines["data"]
    for word in ("published", "scores=bfloat16", "StandardMax", "`tiled`"):
        assert word in lines["attention"]
    assert "256 tokens (8 x 32)" in lines["step"]
    assert "note: warmup_steps 4 is not below steps 4" in out
    *_, page, curves, outcome = out.splitlines()
    assert page.split() == ["page", str(tmp_path / "run" / "report.html")]
    assert curves.endswith(f"tensorboard --logdir={tmp_path / 'run' / 'tensorboard'}")
    assert "validation loss" in outcome
    assert "above the unigram model's" in outcome  # after only four steps


def test_a_run_directory_holds_everything(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["attention"]["numerics"] == "published"
    assert len(config["text_sha256"]["train"]) == 64
    (environment,) = json.loads((finished / "environment.json").read_text())
    assert environment["versions"]["jax"]
    assert len((finished / "data_order.txt").read_text().splitlines()) == 12
    assert list((finished / "tensorboard").iterdir())
    assert "12 steps" in (finished / "report.html").read_text()
    assert sorted(path.name for path in (finished / "checkpoints").glob("*.json")) == [
        "00000008.json",
        "00000012.json",
    ]
    records = metrics.read(finished / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(12))
    assert [r["step"] for r in records if "val_loss" in r] == [6, 12]
    signals = {r["step"]: r["signals"] for r in records if "signals" in r}
    assert sorted(signals) == [0, 5, 10, 12]
    assert len(signals[5]["layer_1"]["score_maximum"]) == 2
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["below_unigram"] == summary["unigram_loss"] - summary["val_loss"]


@pytest.mark.usefixtures("no_report")
def test_signals_are_of_the_parameters_before_the_step(text, tmp_path):
    """They depend neither on what the step does to the parameters nor on whether it happens."""
    found = []
    for steps in (1, 2):
        workdir = tmp_path / str(steps)
        config = tiny_config(
            optimizer__peak_lr=0.1,
            optimizer__warmup_steps=0,
            attention__implementation="tiled",
            data__path=str(text),
            model__layers=1,
            devices=1,
            steps=steps,
            diagnostics_every=1,
        )
        assert train(train_settings(config), config, workdir) == 0
        records = metrics.read(workdir / "metrics.jsonl")
        found.append({r["step"]: r["signals"] for r in records if "signals" in r})
    # The first run ended before step 1, and was measured on the batch that it would have taken.
    ended, longer = found
    assert ended[1]["layer_0"].keys() == longer[1]["layer_0"].keys()
    for name in ("score_maximum", "delta_rms", "output_rms"):
        np.testing.assert_allclose(ended[1]["layer_0"][name], longer[1]["layer_0"][name], rtol=1e-5)
        assert ended[0]["layer_0"][name] != ended[1]["layer_0"][name]


@pytest.mark.usefixtures("no_report", "settled_heap")
def test_no_step_but_the_first_waits_for_a_full_garbage_collection(run, tmp_path):
    seen = []

    def count(phase, info):
        if phase == "stop" and info["generation"] == 2:
            seen.append(gc.get_freeze_count())

    thresholds = gc.get_threshold()
    gc.callbacks.append(count)
    try:
        run(tmp_path / "run")
    finally:
        gc.callbacks.remove(count)
    assert len(seen) == 1
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_the_same_command_on_a_finished_run_removes_a_failure_alone(run, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    (finished / "failure.json").write_text("{}")  # for example, from a start on other devices
    out, _ = run(finished)
    assert "resuming at step 12" in out
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert not (finished / "failure.json").exists()


@pytest.mark.usefixtures("no_report")
def test_a_run_that_goes_on_after_a_failure_no_longer_has_failed(
    run, finished, tmp_path, monkeypatch
):
    """For example, the same command with another version, or on other devices."""
    workdir, seen = tmp_path / "copy", []
    shutil.copytree(finished, workdir)
    (workdir / "checkpoints" / "00000012.json").unlink()
    (workdir / "summary.json").unlink()
    (workdir / "failure.json").write_text('{"step": 8, "message": "not finite"}')
    write = MetricsWriter.write

    def observed(self, step, values):
        seen.append((step, (workdir / "failure.json").exists()))
        write(self, step, values)

    monkeypatch.setattr(MetricsWriter, "write", observed)
    run(workdir)
    assert seen[0] == (8, True)
    assert {failed for step, failed in seen if step > 8} == {False}


@pytest.mark.usefixtures("no_report")
def test_a_checkpoint_is_resumed_with_one_point_changed(run, finished, tmp_path):
    changed = {"attention__points__saved_output": "float32", "steps": 11}
    # The run wrote checkpoints 4, 8 and 12, and kept the last two.
    changed |= {"resume_from": finished, "resume_step": 11, "diagnostics_every": 0}
    out, _ = run(tmp_path / "changed", **changed)
    assert "from step 8" in out
    origin = json.loads((tmp_path / "changed" / "resumed_from.json").read_text())
    assert origin["step"] == 8
    assert {"attention.points.saved_output", "resume_from", "steps"} < set(origin["changed"])
    assert origin["changed"]["attention.points.saved_output"] == ["null", '"float32"']
    # The finished run holds the order up to there, and the new run continues it.
    theirs = (finished / "data_order.txt").read_text().splitlines()
    ours = (tmp_path / "changed" / "data_order.txt").read_text().splitlines()
    assert ours == theirs[:11]
    records = metrics.read(tmp_path / "changed" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [8, 9, 10]


@pytest.mark.usefixtures("no_report")
def test_a_checkpoint_is_resumed_with_clipping_and_decay_switched(run, finished, tmp_path):
    """The moments and the step of the rate then have other places in the optimizer's state."""
    changed = {"optimizer__clip_norm": None, "optimizer__weight_decay": 0.1}
    changed["diagnostics_every"] = 0
    workdir = tmp_path / "run"
    out, _ = run(workdir, resume_from=finished, steps=13, **changed)
    assert "from step 12" in out
    settings = settings_of(workdir)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        restored = checkpoints.restore(make_program(settings, run_devices(settings)).state)
    leaves = jax.tree.leaves_with_path(restored.state.opt_state)
    counts = [int(leaf) for path, leaf in leaves if "count" in jax.tree_util.keystr(path)]
    assert counts == [13, 13]


@pytest.mark.parametrize(
    ("changes", "text_of_error"),
    [
        ({}, "at step 12 and this run ends at step 12: set --config.steps above 12"),
        ({"resume_step": 7}, "at or before resume_step=7; it holds those of steps 8, 12"),
        ({"model__qk_norm": True}, "attention/key_norm/norm/scale"),
    ],
    ids=["no step left", "no such step", "parameters that were not trained"],
)
@pytest.mark.usefixtures("text_read_once")
def test_a_checkpoint_that_cannot_serve_is_refused(
    finished, text, tmp_path, monkeypatch, capsys, changes, text_of_error
):
    monkeypatch.chdir(ROOT)
    changes |= {"resume_from": finished, "data__path": text, "attention__implementation": "tiled"}
    assert main(["train", f"--workdir={tmp_path / 'run'}", *flags(devices=1, **changes)]) == 1
    assert text_of_error in error_line(capsys.readouterr().err)


@pytest.mark.usefixtures("no_report")
def test_a_loss_that_is_not_finite_stops_with_its_layer_and_the_last_good_state(run, tmp_path):
    """In this format scores beyond 448 are NaN, and this learning rate reaches them."""
    workdir = tmp_path / "run"
    wild = {
        "optimizer__peak_lr": 0.5,
        "attention__points__scores": "float8_e4m3fn",
        "model__layers": 1,
        "steps": 200,
    }
    out, _ = run(workdir, code=3, **wild)
    last = out.splitlines()[-1]
    failure = json.loads((workdir / "failure.json").read_text())
    assert f"not finite at step {failure['step']}" in last
    assert failure["message"] in last
    assert failure["layer"] == 0
    assert failure["what"] == "the attention output"
    records = metrics.read(workdir / "metrics.jsonl")
    failed = [r for r in records if "loss" in r][-1]
    assert failed["step"] == failure["step"]
    assert not (np.isfinite(failed["loss"]) and np.isfinite(failed["grad_norm"]))
    assert any(r["step"] == failure["step"] and "signals" in r for r in records)
    saved = [int(path.stem) for path in (workdir / "checkpoints").glob("*.json")]
    assert max(saved) == failure["step"]
    # After a resume it meets the same batch in the same state, and fails in the same way.
    again, _ = run(workdir, code=3, **wild)
    assert f"resuming at step {failure['step']}" in again
    assert again.splitlines()[-1] == last


@pytest.mark.usefixtures("no_report")
def test_a_damaged_latest_checkpoint_is_skipped_saying_so(run, finished, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(finished, workdir)
    content = max(
        (p for p in (workdir / "checkpoints").rglob("*") if p.is_file() and "00000012-" in str(p)),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(content.read_bytes())
    data[len(data) // 2] ^= 1
    content.write_bytes(bytes(data))
    out, err = run(workdir)
    assert "resuming at step 8" in out
    assert "checkpoint 12" in err
    assert "checkpoint 8 instead" in err
    assert (workdir / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


RECORDS = {
    "metrics deleted": ("metrics.jsonl", lambda data: None, r"cannot be read \(No such file"),
    "metrics cut": ("metrics.jsonl", lambda data: data[:500], r"has been cut to 500 of \d+ bytes"),
    "metrics altered": (
        "metrics.jsonl",
        lambda data: data.replace(b'"step": 3, "loss": ', b'"step": 3, "loss": 1'),
        "has been altered",
    ),
    "order deleted": ("data_order.txt", lambda data: None, r"cannot be read \(No such file"),
    "order cut": ("data_order.txt", lambda data: data[:-1], r"has been cut to \d+ of \d+ bytes"),
    "order altered": (
        "data_order.txt",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        "has been altered",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_records_that_changed_under_a_checkpoint_are_noticed(
    text, finished, tmp_path, capsys, monkeypatch, case
):
    name, change, words = RECORDS[case]
    monkeypatch.chdir(ROOT)
    workdir = tmp_path / "copy"
    shutil.copytree(finished, workdir)
    changed = change((workdir / name).read_bytes())
    if changed is None:
        (workdir / name).unlink()
    else:
        (workdir / name).write_bytes(changed)
    command = flags(attention__implementation="tiled", data__path=text, devices=1)
    assert main(["train", f"--workdir={workdir}", *command]) == 1
    line = error_line(capsys.readouterr().err)
    assert re.search(rf"{workdir}/{name}, .* before checkpoint 12, {words}", line)
    assert f"remove {workdir}/checkpoints/00000012.json to repeat the steps" in line
    if changed is not None:
        assert (workdir / name).read_bytes() == changed
    if name == "data_order.txt":  # a run that resumes from it begins with its order
        command += [f"--config.resume_from={workdir}", "--config.steps=13"]
        command += [f"--workdir={tmp_path / 'next'}"]
        assert main(["train", *command]) == 1
        assert re.search(rf"{workdir}/{name}, .*{words}", error_line(capsys.readouterr().err))


def test_another_config_in_the_same_run_directory_is_refused(run, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    _, err = run(finished, code=1, optimizer__peak_lr=5e-4)
    line = error_line(err)
    assert "optimizer.peak_lr: 0.002 -> 0.0005" in line
    assert "resume_from" in line
    assert (finished / "metrics.jsonl").read_bytes() == before


# NOWHERE is a directory that does not exist.
BAD = {
    "unknown field": ({"optimizer__lr": 1.0}, "lr"),
    "unknown preset": ({"attention__numerics": "flahs"}, "'flahs'"),
    "wrong type": ({"batch_size": "many"}, "many"),
    "beta": ({"attention__row_max": "dynamic_max", "attention__row_max_beta": 1.0}, "beta"),
    "missing data": ({"data__path": "NOWHERE/text"}, "NOWHERE/text"),
    "vocabulary": ({"model__vocab_size": 100}, "beyond the model's vocabulary of 100"),
    "short data": ({"model__context": 100_000}, "100000 + 1"),
    "heads": ({"model__heads": 3}, "multiple of 3"),
    "devices": ({"devices": 9}, "devices=9"),
    "resume_from": ({"resume_from": "NOWHERE/run"}, "NOWHERE/run"),
    "resume_step": ({"resume_step": 100}, "beside resume_from"),
    "implementation": ({"attention__implementation": "gpu3"}, "'gpu3'"),
    "standard in tiles": (
        {"attention__numerics": "standard", "attention__implementation": "tiled"},
        "normalize_probs",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("text_read_once")
def test_bad_input_gives_one_line_before_training(tmp_path, monkeypatch, capsys, case):
    changes, text = BAD[case]
    nowhere = str(tmp_path / "nowhere")
    changes = {
        n: v.replace("NOWHERE", nowhere) if isinstance(v, str) else v for n, v in changes.items()
    }
    text = text.replace("NOWHERE", nowhere)
    monkeypatch.chdir(ROOT)
    assert main(["train", f"--workdir={tmp_path / 'run'}", *flags(**changes)]) == 1
    err = capsys.readouterr().err
    assert text in error_line(err)
    assert "step/s" not in err  # before any progress bar


def test_a_process_ends_with_that_line_too(tmp_path):
    words = ["train.py", f"--workdir={tmp_path / 'run'}", *flags(model__vocab_size=100)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "beyond the model's vocabulary of 100" in error_line(done.stderr)
    assert "step/s" not in done.stderr


def test_a_config_file_that_is_not_there_gives_one_line(run, tmp_path):
    _, err = run(tmp_path / "run", code=1, config="configs/nothing.py")
    assert "configs/nothing.py" in error_line(err)
