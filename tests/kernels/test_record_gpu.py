"""The command that records what a GPU computes runs every check, and passes no run with a fault."""

import itertools
import sys
from pathlib import Path

import pytest
import record_gpu
from gpu import checks as gpu_checks


def test_every_check_is_run_once() -> None:
    grouped = list(itertools.chain.from_iterable(record_gpu.groups_of_checks("")))
    assert len(set(grouped)) == len(grouped) == len(gpu_checks.CHECKS)
    assert {what for _, what in record_gpu.sanitizer_runs("")} > gpu_checks.PRESETS.keys()


def sanitizer(path: Path, *lines: str, code: int = 0) -> str:
    """A program that prints `lines` in place of a sanitizer."""
    program = path / "sanitizer"
    program.write_text(
        f"#!{sys.executable}\nprint({chr(10).join(lines)!r})\nraise SystemExit({code})"
    )
    program.chmod(0o755)
    return str(program)


CLEAN = f"========= {record_gpu.CLEAN['memcheck']}"
LAUNCHED = "launched flash: 4 calls"


def test_a_clean_run_passes(tmp_path: Path) -> None:
    record = record_gpu.sanitizer_record(
        sanitizer(tmp_path, LAUNCHED, CLEAN), ("memcheck", "flash")
    )
    assert record["passed"]
    assert record["launched"] == "flash: 4 calls"


def test_a_run_that_takes_too_long_is_killed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sanitizer"
    program.write_text(f"#!{sys.executable}\nprint({CLEAN!r}, flush=True)\nwhile True: pass")
    program.chmod(0o755)
    monkeypatch.setattr(record_gpu, "SECONDS", 1)
    for what in ("flash", "beyond"):
        record = record_gpu.sanitizer_record(str(program), ("memcheck", what))
        assert not record["passed"]


@pytest.mark.parametrize(
    ("what", "lines", "code"),
    [
        ("flash", [LAUNCHED, "========= ERROR SUMMARY: 3 errors"], 0),
        ("flash", [LAUNCHED], 0),  # no verdict
        ("flash", [CLEAN], 0),  # nothing was launched
        ("flash", [LAUNCHED, CLEAN], 1),
        ("beyond", ["launched beyond: 1 calls", CLEAN], 0),  # it overlooked the fault
        ("beyond", [], 1),
    ],
)
def test_anything_else_fails(tmp_path: Path, what: str, lines: list[str], code: int) -> None:
    program = sanitizer(tmp_path, *lines, code=code)
    assert not record_gpu.sanitizer_record(program, ("memcheck", what))["passed"]
