"""The mean error of δ: its units, its standard error, and the checkpoints of runs."""

import json
import sys

import numpy as np
import pytest
from tiny import tiny_config

from benchmarks import delta_bias
from benchmarks.delta_bias import Errors, bias
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.step import root_key


def test_a_mean_is_found_in_units_of_the_rms_and_zero_where_nothing_errs() -> None:
    draws, rows = 400, 64
    noise = np.random.default_rng(0).normal(
        [[0.0], [0.1], [0.0]], [[3.0], [1.0], [0.0]], (draws, 3, rows)
    )
    errors = Errors(noise.mean(-1)[:, None], np.sqrt((noise**2).mean(-1))[:, None])
    found = bias(errors)
    expected = 1 / np.sqrt(draws * rows)  # for independent rows
    np.testing.assert_allclose(found.error[0, :2], expected, rtol=0.1)
    assert abs(found.mean[0, 0]) < 3 * expected
    assert abs(found.mean[0, 1] - 0.1) < 4 * expected
    assert found.mean[0, 2] == found.error[0, 2] == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """Runs of one layer with a checkpoint of step 7, one of step 9, and no checkpoint."""
    directory = tmp_path_factory.mktemp("runs")
    points = {"output": "bf16_m1:stochastic", "saved_output": "same"}
    changes = {f"attention__points__{name}": value for name, value in points.items()}
    changes["attention__implementation"] = "tiled"
    for seed, step in ((1, 7), (2, 9), (3, None)):
        config = tiny_config(data__path=str(text), model__layers=1, devices=1, seed=seed, **changes)
        settings = train_settings(config)
        program = make_program(settings, run_devices(settings))
        recorded = config | {"text_sha256": {"train": "", "val": ""}}
        with (
            RunDir.open(directory / f"seed{seed}", recorded) as run_dir,
            Checkpoints(run_dir.checkpoints) as checkpoints,
        ):
            if step is not None:
                checkpoints.save(step, program.initial_state(root_key(settings)), {})
    return directory


def measured(monkeypatch, capsys, *argv):
    """The exit code, output and errors of the command."""
    monkeypatch.setattr(sys, "argv", ["delta_bias", "--draws", "3", *map(str, argv)])
    return delta_bias.main(), *capsys.readouterr()


def test_runs_are_measured_at_their_checkpoints(runs, tmp_path, monkeypatch, capsys) -> None:
    paths, out = [runs / "seed1", runs / "seed2"], tmp_path / "bias.jsonl"
    code, printed, _ = measured(monkeypatch, capsys, *paths, "--out", out)
    assert code == 0
    for path, step in zip(paths, (7, 9), strict=True):
        assert f"{path}, step {step}, 3 sequences" in printed
    first, second = records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["run"], r["step"], r["draws"]) for r in records] == [
        ("seed1", 7, 3),
        ("seed2", 9, 3),
    ]
    for record in records:
        assert np.shape(record["mean"]) == (1, tiny_config()["model"]["heads"])
        assert (np.array(record["error"]) > 0).all()  # each draw has its own sequence and bits
    assert first["mean"] != second["mean"]


def test_what_was_measured_before_a_run_that_cannot_be_is_kept(
    runs, tmp_path, monkeypatch, capsys
) -> None:
    names, out = ("seed1", "seed3", "seed2"), tmp_path / "bias.jsonl"
    code, _, errors = measured(monkeypatch, capsys, *(runs / n for n in names), "--out", out)
    assert code == 1
    assert errors == (
        f"error: {runs}/seed3: holds no complete checkpoint; train with checkpoint_every > 0\n"
    )
    assert json.loads(out.read_text())["run"] == "seed1"


def test_a_mistyped_path_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    code, _, errors = measured(monkeypatch, capsys, tmp_path / "seed1")
    assert code == 1
    assert errors == f"error: {tmp_path}/seed1 is not a run directory: it has no config.json\n"


def test_a_damaged_config_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text('{"seed": 1}')
    code, _, errors = measured(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert str(tmp_path / "config.json") in errors and errors.count("\n") == 1
