"""Broken inputs of every command: one line, an exit code, and no change to existing files.

`pytest tests/commands/test_command_fuzz.py --fuzz-seconds=600` goes on with more inputs.
"""

import time

import numpy as np
import pytest
from processes import command_fuzz

from lowprec_attn.lab import processes as lab_processes

# Few cases where a served input computes, for a second each.
CASES = {
    "arrays": 20,
    "npz": 350,
    "diagnose": 10,
    "report": 15,
    "run": 6,
    "collect": 150,
    "experiment": 250,
    "lab": 150,
    "train": 300,
    "prepare": 250,
    "check": 100,
    "llama": 150,
}
CHUNK = 50


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """`lab run` looks for GPUs in a process of its own, for a second; `test_lab.py` tests that."""
    monkeypatch.setattr(lab_processes, "_visible_gpus", list)


# Warnings are not errors, as in a separate process: a doubtful layout of axes only gives a warning.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("command", "first"),
    [
        pytest.param(name, first, id=f"{name}-{first}")
        for name, count in CASES.items()
        for first in range(0, count, CHUNK)
    ],
)
def test_cases(command, first, tmp_path):
    found = []
    for number in range(first, min(first + CHUNK, CASES[command])):
        directory = tmp_path / str(number)
        directory.mkdir()
        found.append(command_fuzz.check(command, number, directory))
    assert "refused" in found


def test_there_are_enough_of_them_and_some_are_served():
    assert sum(CASES.values()) >= 1500
    assert CASES.keys() == command_fuzz.COMMANDS.keys()


@pytest.mark.filterwarnings("default")
def test_further_cases(request, tmp_path):
    seconds = request.config.getoption("--fuzz-seconds")
    if not seconds:
        pytest.skip("--fuzz-seconds=N goes on for N seconds")
    end, rng = time.monotonic() + seconds, np.random.default_rng()
    count = 0
    while time.monotonic() < end:
        command, number = str(rng.choice([*CASES])), int(rng.integers(1000, 2**31))
        directory = tmp_path / f"{command}-{number}"
        directory.mkdir()
        command_fuzz.check(command, number, directory)
        count += 1
    print(f"{count} further cases")
