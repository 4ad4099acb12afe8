"""The experiment that the README begins with, as it stands there.

One seed of it, cut short, is what `test_notebooks.py` executes.
"""

import os
import subprocess
import sys

import pytest
from command import ROOT

from lowprec_attn.lab import outcomes, records


def collected(directory, *options):
    """The records of `lab run failure_cpu`, by arm and seed."""
    lab = [sys.executable, "-m", "lowprec_attn", "lab"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # As it is run by hand: what the tests compile, without optimisation, is slower.
    environment.pop("XLA_FLAGS", None)
    run = [*lab, "run", "failure_cpu", f"--workdir={directory / 'runs'}", "--jobs=2", *options]
    for command in (run, [*lab, "collect", directory / "runs", directory / "records"]):
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)
    return records.read_all(directory / "records")


@pytest.mark.slow
def test_the_loss_explodes_with_every_seed_and_with_no_cure(tmp_path):
    found = {o.arm.name: o for o in outcomes.outcomes(collected(tmp_path))}
    assert set(found["output"].words.values()) == {"exploded"}
    assert len(found["output"].words) == 3
    for cure in ("exact", "normalized"):
        assert set(found[cure].words.values()) == {"healthy"}
        best = max(max(r.val_losses.values()) for r in found[cure].records.values())
        broken = min(min(r.val_losses.values()) for r in found["output"].records.values())
        assert broken > best + 0.8
    assert outcomes.undecided(list(found.values())) == []
