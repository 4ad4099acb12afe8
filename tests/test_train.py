"""The trainer from the command line: `python train.py` in a process of its own."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lowprec_attn.gpt2 import metrics

ROOT = Path(__file__).resolve().parents[1]
KILLS = 10

# Small enough that a step takes milliseconds, so that kills fall into every phase of a run.
TINY = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "model.vocab_size": 257,
    "optimizer.warmup_steps": 4,
    "batch_size": 8,
    "steps": 12,
    "diagnostics_every": 5,
    "checkpoint_every": 4,
    "eval_every": 6,
    "eval_batches": 1,
}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts `train.py` with TINY and changes; compilations are shared through a cache."""
    cache = tmp_path_factory.mktemp("compilations")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(workdir, config="configs/gpt2_bf16.py:tiny", **changes):
        fields = {**TINY, **{name.replace("__", "."): v for name, v in changes.items()}}
        flags = [f"--config.{name}={value}" for name, value in fields.items()]
        return subprocess.Popen(
            [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process, code=0):
    """Waits; returns (stdout, stderr) and checks the exit code."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory):
    """A run that ended, and what it printed."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    out, _ = finish(command(workdir))
    return workdir, out


def error_line(err):
    """The one line that begins with `error:`; there must be no traceback."""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    return line


def test_the_first_lines_say_what_was_chosen_and_why(finished):
    _, out = finished
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:6])
    assert "cpu" in lines["device"]
    assert "tiny" in lines["scale"]
    assert "full" in lines["scale"]
    assert "documentation of Python" in lines["data"]
    for word in ("published", "scores=bfloat16", "StandardMax", "`tiled`"):
        assert word in lines["attention"]
    assert "256 tokens (8 x 32)" in lines["step"]
    assert "validation loss" in out.splitlines()[-1]
    assert "below the unigram model's" in out.splitlines()[-1]


def test_a_run_directory_holds_everything(finished):
    workdir, _ = finished
    config = json.loads((workdir / "config.json").read_text())
    assert config["attention"]["numerics"] == "published"
    assert len(config["text_sha256"]["train"]) == 64
    (environment,) = json.loads((workdir / "environment.json").read_text())
    assert environment["versions"]["jax"]
    assert len((workdir / "data_order.txt").read_text().splitlines()) == 12
    assert list((workdir / "tensorboard").iterdir())
    assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (workdir / "checkpoints").glob("*.json")) == [
        "00000008.json",
        "00000012.json",
    ]
    records = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(12))
    assert [r["step"] for r in records if "val_loss" in r] == [6, 12]
    signals = {r["step"]: r["signals"] for r in records if "signals" in r}
    assert sorted(signals) == [0, 5, 10, 12]
    assert len(signals[5]["layer_1"]["score_maximum"]) == 2
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["below_unigram"] == summary["unigram_loss"] - summary["val_loss"]


def test_the_same_command_on_a_finished_run_changes_nothing(command, finished):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    out, _ = finish(command(workdir))
    assert "resuming at step 12" in out
    assert (workdir / "metrics.jsonl").read_bytes() == before


def wait_for_steps(process, path, count):
    """Waits until `count` more lines than now stand in the file, or the process has ended."""

    def lines():
        return path.read_bytes().count(b"\n") if path.exists() else 0

    target = lines() + count
    while lines() < target and process.poll() is None:
        time.sleep(0.002)


def test_ten_kills_lose_no_checkpoint_and_change_no_metric(command, tmp_path):
    """kill -9 at random times; the records equal those of an uninterrupted run, byte for byte."""
    steps = {"steps": 600, "checkpoint_every": 5, "diagnostics_every": 50, "eval_every": 100}
    finish(command(tmp_path / "whole", **steps))
    killed = tmp_path / "killed"
    throughput, manifests = killed / "throughput.jsonl", killed / "checkpoints"
    rng, newest = random.Random(7), 0
    for _ in range(KILLS):
        process = command(killed, **steps)
        wait_for_steps(process, throughput, rng.randrange(1, 30))
        time.sleep(rng.random() * 0.1)
        assert process.poll() is None, "the run ended before it could be killed: raise steps"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        saved = [int(path.stem) for path in manifests.glob("*.json")]
        assert max(saved, default=0) >= newest
        newest = max(saved, default=0)
    out, _ = finish(command(killed, **steps))
    assert f"resuming at step {newest}" in out
    assert newest > 0
    for name in ("metrics.jsonl", "data_order.txt"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_sigterm_saves_and_exits_cleanly(command, tmp_path):
    steps = {"steps": 5000, "checkpoint_every": 0}
    process = command(tmp_path / "run", **steps)
    wait_for_steps(process, tmp_path / "run" / "throughput.jsonl", 5)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process)
    assert "stopped by a signal after" in out
    done = int(out.split("stopped by a signal after ")[1].split()[0])
    assert [int(p.stem) for p in (tmp_path / "run" / "checkpoints").glob("*.json")] == [done]
    process = command(tmp_path / "run", **steps)
    wait_for_steps(process, tmp_path / "run" / "throughput.jsonl", 1)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process)
    assert f"resuming at step {done}" in out


def test_a_checkpoint_is_resumed_with_one_point_changed(command, finished, tmp_path):
    source, _ = finished
    changed = {"resume_from": source, "attention__points__saved_output": "float32", "steps": 15}
    out, _ = finish(command(tmp_path / "changed", **changed))
    assert "from step 12" in out
    origin = json.loads((tmp_path / "changed" / "resumed_from.json").read_text())
    assert origin["step"] == 12
    assert set(origin["changed"]) == {"attention.points.saved_output", "resume_from", "steps"}
    assert origin["changed"]["attention.points.saved_output"] == ["null", '"float32"']
    # The source holds the order up to there; the new run goes on with it.
    theirs = (source / "data_order.txt").read_text().splitlines()
    ours = (tmp_path / "changed" / "data_order.txt").read_text().splitlines()
    assert ours[:12] == theirs
    assert len(ours) == 15
    records = metrics.read(tmp_path / "changed" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [12, 13, 14]


def test_a_recorded_order_is_replayed(command, finished, tmp_path):
    source, _ = finished
    lines = (source / "data_order.txt").read_text().splitlines()
    order = tmp_path / "generated_indices_rank_0.txt"
    order.write_text("".join(line + "\n" for line in reversed(lines)))
    workdir = tmp_path / "replayed"
    finish(command(workdir, data__replay=order))
    assert (workdir / "data_order.txt").read_text() == order.read_text()


def test_a_loss_that_is_not_finite_stops_with_its_layer_and_the_last_good_state(command, tmp_path):
    """Scores beyond 448 are NaN in this format, and this learning rate takes them there."""
    workdir = tmp_path / "run"
    wild = {
        "optimizer__peak_lr": 0.5,
        "attention__points__scores": "float8_e4m3fn",
        "steps": 200,
    }
    out, _ = finish(command(workdir, **wild), code=3)
    last = out.splitlines()[-1]
    failure = json.loads((workdir / "failure.json").read_text())
    assert f"not finite at step {failure['step']}" in last
    assert failure["message"] in last
    assert failure["layer"] in (0, 1)
    assert failure["what"] == "the attention output"
    records = metrics.read(workdir / "metrics.jsonl")
    failed = [r for r in records if "loss" in r][-1]
    assert failed["step"] == failure["step"]
    assert not (np.isfinite(failed["loss"]) and np.isfinite(failed["grad_norm"]))
    assert any(r["step"] == failure["step"] and "signals" in r for r in records)
    saved = [int(path.stem) for path in (workdir / "checkpoints").glob("*.json")]
    assert max(saved) == failure["step"]
    # Resumed, it meets the same batch in the same state and fails in the same way.
    again, _ = finish(command(workdir, **wild), code=3)
    assert f"resuming at step {failure['step']}" in again
    assert again.splitlines()[-1] == last


def test_a_damaged_latest_checkpoint_is_skipped_saying_so(command, finished, tmp_path):
    source, _ = finished
    workdir = tmp_path / "copy"
    shutil.copytree(source, workdir)
    content = max(
        (p for p in (workdir / "checkpoints").rglob("*") if p.is_file() and "00000012-" in str(p)),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(content.read_bytes())
    data[len(data) // 2] ^= 1
    content.write_bytes(bytes(data))
    out, err = finish(command(workdir))
    assert "resuming at step 8" in out
    assert "checkpoint 12" in err
    assert "checkpoint 8 instead" in err
    assert (workdir / "metrics.jsonl").read_bytes() == (source / "metrics.jsonl").read_bytes()


def test_another_config_in_the_same_run_directory_is_refused(command, finished):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    _, err = finish(command(workdir, optimizer__peak_lr=5e-4), code=1)
    line = error_line(err)
    assert "optimizer.peak_lr: 0.002 -> 0.0005" in line
    assert "resume_from" in line
    assert (workdir / "metrics.jsonl").read_bytes() == before


BAD = {
    "unknown field": ({"optimizer__lr": 1.0}, "lr"),
    "unknown preset": ({"attention__numerics": "flahs"}, "'flahs'"),
    "wrong type": ({"batch_size": "many"}, "many"),
    "beta": ({"attention__row_max": "dynamic_max", "attention__row_max_beta": 1.0}, "beta"),
    "missing data": ({"data__path": "/nonexistent/text"}, "/nonexistent/text"),
    "vocabulary": ({"model__vocab_size": 100}, "beyond the model's vocabulary of 100"),
    "short data": ({"model__context": 100_000}, "100000 + 1"),
    "heads": ({"model__heads": 3}, "multiple of 3"),
    "replay": ({"data__replay": "/nonexistent/order.txt"}, "/nonexistent/order.txt"),
    "devices": ({"devices": 9}, "devices=9"),
    "resume_from": ({"resume_from": "/nonexistent/run"}, "/nonexistent/run"),
    "implementation": ({"attention__implementation": "gpu3"}, "'gpu3'"),
    "standard in tiles": (
        {"attention__numerics": "standard", "attention__implementation": "tiled"},
        "normalize_probs",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_before_training(command, tmp_path, case):
    changes, text = BAD[case]
    _, err = finish(command(tmp_path / "run", **changes), code=1)
    assert text in error_line(err)
    assert "step/s" not in err  # no progress bar yet


def test_a_config_file_that_is_not_there_gives_one_line(command, tmp_path):
    _, err = finish(command(tmp_path / "run", config="configs/nothing.py"), code=1)
    assert "configs/nothing.py" in error_line(err)
