"""Broken inputs of every command: one line, an exit code, and no change to existing files.

`pytest tests/commands/test_command_fuzz.py --fuzz-seconds=600` goes on with more inputs.
"""

import time

import numpy as np
import pytest
from processes import command_fuzz

# Few cases where a served input computes, for a second each.
CASES = {
    "arrays": 20,
    "npz": 200,
    "diagnose": 10,
    "report": 15,
    "run": 6,
    "collect": 100,
    "experiment": 100,
    "lab": 80,
    "train": 150,
    "prepare": 120,
    "check": 50,
    "llama": 100,
}
CHUNK = 50


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
    assert sum(CASES.values()) >= 900
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
