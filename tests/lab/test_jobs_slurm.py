"""Arms as jobs of a real Slurm of one node."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from processes.one_node import lacking, one_node
from processes.stand_in import wait_until

pytest.importorskip("submitit", reason="needs submitit")

from lowprec_attn.commands.main import EXIT_BAD_INPUT

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "Slurm is here"),
]
SLURM = ("--launcher=slurm", "--slurm", "time=5")


@pytest.fixture(autouse=True)
def slurm(monkeypatch):
    # The path of a socket may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, one_node(Path(folder)) as found:
        monkeypatch.setenv("SLURM_CONF", found["SLURM_CONF"])
        yield


def test_arms_are_jobs_that_a_user_may_cancel(lab):
    code, output = lab({"a": "finish"}, *SLURM, "partition=nowhere")
    assert code == EXIT_BAD_INPUT
    reasons = "invalid partition specified: nowhere; Invalid partition name specified"
    assert output.splitlines() == [f"error: Slurm refuses a: {reasons}"]
    process = lab.start({"a": "finish", "b": "wait"}, *SLURM)
    log = lab.out / "b.log"
    wait_until(lambda: log.exists() and "listening" in log.read_text())
    subprocess.run(["scancel", "--name=b"], check=True)
    output = "".join(process.communicate(timeout=240))
    assert process.returncode == EXIT_BAD_INPUT
    assert "a: done, validation loss 2.500" in output
    assert "error: b failed: stopped from outside, interrupted after 1 step; " in output
    (lab.out / "mended").touch()
    code, output = lab({"a": "finish", "b": "wait"}, *SLURM)
    assert code == 0 and "b: done, validation loss 2.500" in output
