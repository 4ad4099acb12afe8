"""The experiments on a laptop: the README's, in true bfloat16, and the enlarged one.

`test_notebooks.py` executes one seed of the enlarged experiment, cut short.
"""

import json
import os
import subprocess
import sys

import pytest
from command import ROOT

from lowprec_attn.commands.main import main
from lowprec_attn.lab import experiment, records
from lowprec_attn.lab.report import outcomes


def collected(directory, experiment, *options):
    """The records of `lab run EXPERIMENT`."""
    lab = [sys.executable, "-m", "lowprec_attn", "lab"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # As a user runs it: the unoptimized programs of the tests would be slower.
    environment.pop("XLA_FLAGS", None)
    run = [*lab, "run", experiment, f"--workdir={directory / 'runs'}", "--jobs=2", *options]
    for command in (run, [*lab, "collect", directory / "runs", directory / "records"]):
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)
    return records.read_all(directory / "records")


@pytest.mark.slow
def test_the_loss_explodes_with_every_seed_and_with_no_cure(tmp_path):
    found = {o.arm.name: o for o in outcomes.outcomes(collected(tmp_path, "failure_cpu"))}
    assert set(found["output"].words.values()) == {"exploded"}
    assert len(found["output"].words) == 3
    for cure in ("exact", "normalized"):
        assert set(found[cure].words.values()) == {"healthy"}
        best = max(max(r.val_losses.values()) for r in found[cure].records.values())
        broken = min(min(r.val_losses.values()) for r in found["output"].records.values())
        assert broken > best + 0.8
    assert outcomes.undecided(list(found.values())) == []


def largest_scores(found):
    """The largest |score| of each run over heads and steps, by arm and seed."""
    largest = {}
    for record in found:
        scores = records.largest_scores(record.signals)
        largest.setdefault(record.arm.name, {})[record.seed] = max(map(max, scores.values()))
    return largest


@pytest.mark.usefixtures("no_report")
def test_rounding_alone_moves_the_scores_of_flash_within_fifty_steps(tmp_path):
    """Trains the arms of the README's command in this process, on a quarter of their batch."""
    laptop = experiment.load(ROOT / "configs" / "laptop.toml").with_seeds([1])
    fields = {"steps": 50, "devices": 1, "batch_size": 4, "eval_batches": 1}
    laptop = laptop.with_flags([f"--config.{name}={value}" for name, value in fields.items()])
    largest = {}
    for trial in laptop.select(["flash", "exact"]).trials:
        workdir = tmp_path / trial.name
        assert main(["train", f"--workdir={workdir}", *laptop.arguments(trial)]) == 0
        lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        layers = [layer for line in lines for layer in line.get("signals", {}).values()]
        largest[trial.arm.name] = max(max(layer["score_maximum"]) for layer in layers)
    assert largest["flash"] > 10
    assert largest["exact"] < 0.5


@pytest.mark.slow
def test_rows_of_ds_that_sum_to_zero_hold_the_scores_and_the_dynamic_maximum_does_not(tmp_path):
    found = largest_scores(collected(tmp_path, "laptop"))
    for broken in ("flash", "dynamic_max"):
        assert min(found[broken].values()) > 200
    for held in ("exact", "normalized"):
        assert max(found[held].values()) < 1
