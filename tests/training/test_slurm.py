"""A run of two processes that Slurm starts and that learn their ranks from Slurm's variables."""

import subprocess
import sys
import tempfile
from pathlib import Path

import command
import pytest
from processes.one_node import lacking, one_node

from lowprec_attn.runs import metrics

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "Slurm is here"),
]
FIELDS = {
    **command.TINY,
    "accumulation_steps": 1,
    "model.layers": 1,
    "attention.implementation": "tiled",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    # The path of a socket may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, one_node(Path(folder)) as found:
        yield found


def arguments(text, workdir):
    fields = {**FIELDS, "data.path": text}
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/gpt2_bf16.py:tiny", f"--workdir={workdir}", *words]


def run(slurm, cache, words, *, devices, launcher=()):
    own = {n: slurm[n] for n in ("SLURM_CONF",)}
    environment = command.environment(cache, devices) | own
    return subprocess.run(
        [*launcher, sys.executable, "train.py", *words],
        env=environment,
        cwd=command.ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_two_processes_of_srun_are_one_process_bit_for_bit(slurm, compilations, text, tmp_path):
    """Sums over two devices have two terms, so their order does not matter."""
    one, two = tmp_path / "one", tmp_path / "two"
    done = run(slurm, compilations, arguments(text, one), devices=2)
    assert done.returncode == 0, done.stderr
    words = [*arguments(text, two), "--distributed"]
    srun = ["srun", "--ntasks=2", "--overcommit"]
    done = run(slurm, compilations, words, devices=1, launcher=srun)
    assert done.returncode == 0, done.stderr
    assert "2 x cpu in 2 processes" in done.stdout
    assert done.stdout.count("validation loss") == 1, "the second process is silent"
    assert metrics.read(two / "metrics.jsonl") == metrics.read(one / "metrics.jsonl")


def test_without_srun_a_job_says_what_is_missing(slurm, compilations, text, tmp_path):
    """In the batch script itself, Slurm's variables name the job but no step."""
    words = [*arguments(text, tmp_path / "run"), "--distributed"]
    launcher = ["salloc", "--quiet", "--ntasks=2", "--overcommit"]
    done = run(slurm, compilations, words, devices=1, launcher=launcher)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "srun" in line
