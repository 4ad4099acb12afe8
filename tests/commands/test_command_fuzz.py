"""Broken inputs of every command: one line and an exit code, and nothing that was there changes.

`pytest tests/commands/test_command_fuzz.py --fuzz-seconds=600` goes on with further ones.
"""

import time

import numpy as np
import pytest
from processes import command_fuzz

# What is served computes, which takes a second; 890 in all, in about half a minute of a core.
CASES = {
    "arrays": 15,
    "npz": 200,
    "diagnose": 10,
    "report": 15,
    "run": 5,
    "collect": 70,
    "experiment": 120,
    "lab": 70,
    "train": 150,
    "prepare": 120,
    "check": 50,
    "llama": 65,
}
CHUNK = 50


# Warnings are no errors, as in a process of its own: a doubtful layout of axes is served with one.
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
    assert sum(CASES.values()) >= 850
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
