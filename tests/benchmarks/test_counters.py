"""The profile of kernels: what Nsight Compute's output gives, and what it cannot give."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import counters
from lowprec_attn.errors import RunError

# The output of `ncu --csv --page raw`: notes, names, units, and one line per kernel.
NOTES = ["==PROF== Connected to process 1980 (/usr/bin/python3.12)", ""]
UNITS = {"gpu__time_duration.sum": "ns", "smsp__inst_executed.sum": "inst"}


def output(*kernels: dict[str, str]) -> list[str]:
    text = io.StringIO()
    names = ["ID", "Kernel Name", *(c.counter for c in counters._COUNTERS.values()), "another"]
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(names)
    writer.writerow([UNITS.get(name, "") for name in names])
    for i, kernel in enumerate(kernels):
        given = {"ID": str(i), "another": "no data"} | kernel
        writer.writerow([given.get(name, "50.00") for name in names])
    return NOTES + text.getvalue().splitlines()


def test_counters_are_read_in_the_units_of_records() -> None:
    lines = output(
        {"Kernel Name": "attention_forward", "gpu__time_duration.sum": "629,824"},
        {"Kernel Name": "sdpa_bprop", "smsp__inst_executed.sum": "597,714,420"},
    )
    forward, backward = counters.kernels(lines)
    assert (forward["kernel"], forward["seconds"]) == ("attention_forward", 629.8e-6)
    assert forward["products"] == forward["issue_slots"] == 0.5
    assert backward["instructions"] == 597.7e6


def test_a_counter_that_is_missing_is_named() -> None:
    lines = [line.replace("pipe_xu", "pipe_other") for line in output({"Kernel Name": "k"})]
    with pytest.raises(RunError, match="ncu did not count sm__inst_executed_pipe_xu"):
        list(counters.kernels(lines))


def test_no_kernel_is_no_record() -> None:
    assert list(counters.kernels(output())) == []
    assert list(counters.kernels(NOTES)) == []


def test_the_table_has_microseconds_and_percent() -> None:
    (record,) = counters.kernels(output({"Kernel Name": "k", "gpu__time_duration.sum": "1,500"}))
    head, line = counters.table([{"shape": "gpt2", "name": "hopper flash", **record}]).splitlines()
    assert head.split()[:4] == ["shape", "candidate", "kernel", "µs"]
    assert line.split() == ["gpt2", "hopper", "flash", "k", "2", *["50"] * 5]


def test_without_the_profiler_or_a_gpu_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["counters"])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as main would set it for good
    for found, missing in ((None, "ncu (of NVIDIA Nsight Compute)"), ("/bin/ncu", "a GPU")):
        monkeypatch.setattr(counters.shutil, "which", lambda _, found=found: found)
        assert counters.main() == 1
        error = capsys.readouterr().err
        assert error == f"error: kernels are profiled with {missing}, which is not found here\n"


def test_each_candidate_runs_in_a_process_that_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profiler's process shares the GPU with this one; also tests what the records say."""
    commands = []

    def ncu(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append((command, os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]))
        log = Path(command[command.index("--log-file") + 1])
        log.write_text("\n".join(output({"Kernel Name": "attention_forward"})))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr(counters.shutil, "which", lambda _: "/bin/ncu")
    monkeypatch.setattr(counters.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(counters.subprocess, "run", ncu)
    monkeypatch.setattr(counters, "environment", lambda program: {"command": program})
    out = tmp_path / "profile.jsonl"
    names = ["hopper flash", "torch cudnn"]
    monkeypatch.setattr(sys, "argv", ["counters", "--only", *names, "--out", str(out)])
    assert counters.main() == 0
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    assert {(command[-1], room) for command, room in commands} == {(n, "false") for n in names}
    first, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["command"] == "python -m benchmarks.counters"
    assert {r["name"] for r in records} == set(names)
    assert "attention_forward" in capsys.readouterr().out
