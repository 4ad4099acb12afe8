"""The mean of δ's errors: its units, its standard error, and a run's checkpoint."""

import json
import sys

import numpy as np
from tiny import tiny_config

from benchmarks import delta_bias
from benchmarks.delta_bias import Errors, bias
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.program import make_program
from lowprec_attn.training.step import root_key


def test_a_mean_is_found_in_units_of_the_rms_and_zero_where_nothing_errs() -> None:
    draws, rows = 400, 64
    noise = np.random.default_rng(0).normal(
        [[0.0], [0.1], [0.0]], [[3.0], [1.0], [0.0]], (draws, 3, rows)
    )
    errors = Errors(noise.mean(-1)[:, None], np.sqrt((noise**2).mean(-1))[:, None])
    found = bias(errors)
    expected = 1 / np.sqrt(draws * rows)  # of independent rows
    np.testing.assert_allclose(found.error[0, :2], expected, rtol=0.1)
    assert abs(found.mean[0, 0]) < 3 * expected
    assert abs(found.mean[0, 1] - 0.1) < 4 * expected
    assert found.mean[0, 2] == found.error[0, 2] == 0


def test_a_run_is_measured_at_its_checkpoint(tmp_path, text, monkeypatch, capsys) -> None:
    points = {"output": "bf16_m1:stochastic", "saved_output": "same"}
    changes = {f"attention__points__{name}": value for name, value in points.items()}
    config = tiny_config(data__path=str(text), model__layers=1, devices=1, **changes)
    settings = train_settings(config)
    program = make_program(settings, run_devices(settings))
    with RunDir.open(tmp_path, config) as run_dir, Checkpoints(run_dir.checkpoints) as checkpoints:
        checkpoints.save(7, program.init(root_key(settings)), {})
    out = tmp_path / "bias.jsonl"
    command = ["delta_bias", str(tmp_path), "--draws", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert delta_bias.main() == 0
    assert "step 7, 3 sequences" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert np.shape(record["mean"]) == (1, settings.model.heads)
    assert (np.array(record["error"]) > 0).all()  # each draw has sequence and bits of its own
