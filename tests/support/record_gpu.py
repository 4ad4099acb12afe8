"""Records what the compiled GPU kernels compute on this device, and what the sanitizers say.

    python tests/support/record_gpu.py --out results/gpu_conformance_h200.jsonl

The output is JSON lines: the environment, one line per check of `gpu.checks.CHECKS`, and one per
run of `compute-sanitizer` (memcheck, racecheck) on the kernels of attention, with every preset, and
on the kernels of the trainer. The exit code is 1 if something did not pass.
"""

import argparse
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu.checks import CHECKS, Check, Record, record_of
from gpu_launches import OTHERS
from kernel_calls import PRESETS

from benchmarks.attention.records import environment, write

LAUNCHES = Path(__file__).with_name("gpu_launches.py")
# The last line of each tool when it found nothing, and the fault that each tool must find.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
FAULTS = {"memcheck": "beyond", "racecheck": "race"}
LAUNCHED = (*PRESETS, *OTHERS)
# Racecheck must report single hazards. Its default report, an analysis, stays empty on the race of
# `FAULTS`.
REPORT = {"memcheck": [], "racecheck": ["--racecheck-report", "all"]}
# A racecheck would spend most of its time on XLA's own kernels.
ATTENTION_ALONE = {"memcheck": [], "racecheck": ["--kernel-name", "kns=attention"]}
# Several sanitizers run at once, and each talks to its target over up to ten ports.
FIRST_PORT, PORTS = 50000, 16
# Arrays are separate allocations. Without CUDA graphs, kernels are launched one by one.
SANITIZED = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
}
# The settings for many processes that share the device and the cores.
SHARED_DEVICE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1"}
SANITIZERS_AT_ONCE, SECONDS = 6, 200


def groups_of_checks(pattern: str) -> list[list[Check]]:
    """The checks that match; up to six neighbours of one case share a process and an oracle."""
    chosen = [check for check in CHECKS if re.search(pattern, repr(check))]
    by_case = [list(group) for _, group in itertools.groupby(chosen, lambda check: check.case)]
    return [group[i : i + 6] for group in by_case for i in range(0, len(group), 6)]


def check_records(workers: int, groups: list[list[Check]]) -> Iterator[Record]:
    """Yields the records of all groups, as the processes that share the device finish them."""
    context = multiprocessing.get_context("spawn")  # a fork would share the device's context
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for group in as_completed([pool.submit(records_of, group) for group in groups]):
            yield from group.result()


def records_of(checks: list[Check]) -> list[Record]:
    """The records of some checks; runs in a worker process."""
    return [record_of(check) for check in checks]


def sanitizer_records(program: str, runs: list[tuple[str, str]]) -> Iterator[Record]:
    """Yields the records of all runs, as they finish."""
    with ThreadPoolExecutor(SANITIZERS_AT_ONCE) as pool:
        for run in as_completed([pool.submit(sanitizer_record, program, run) for run in runs]):
            yield run.result()


def sanitizer_runs(pattern: str) -> list[tuple[str, str]]:
    """The matching pairs of a tool and a launch, including a launch with a fault for each tool."""
    runs = [(tool, what) for tool in CLEAN for what in (*LAUNCHED, FAULTS[tool])]
    return [run for run in runs if re.search(pattern, " ".join(run))]


def sanitizer_record(program: str, run: tuple[str, str]) -> Record:
    """The record of one run of one tool, with the end of its output if it did not pass."""
    tool, what = run
    start = time.monotonic()
    code, output = run_limited([*sanitizer_command(program, run), str(LAUNCHES), what])
    lines = output.splitlines()
    summary = [line.removeprefix("========= ") for line in lines if "SUMMARY:" in line]
    launched = [line for line in lines if line.startswith("launched ")]
    has_fault = what == FAULTS[tool]
    if has_fault:
        passed = code is not None and bool(summary) and CLEAN[tool] not in summary
    else:
        passed = code == 0 and summary == [CLEAN[tool]] and bool(launched)
    record = {
        "check": "Sanitizer",
        "tool": tool,
        "launched": launched[0].removeprefix("launched ") if launched else what,
        "has_fault": has_fault,
        "seconds": round(time.monotonic() - start, 1),
        "exit_status": code,
        "summary": summary,
        "passed": passed,
    }
    return record if passed else record | {"output": lines[-40:]}


def sanitizer_command(program: str, run: tuple[str, str]) -> list[str]:
    """The words of the command that stand before the script."""
    tool, what = run
    port = FIRST_PORT + PORTS * sanitizer_runs("").index(run)
    which = [] if what.endswith("trainer") else ATTENTION_ALONE[tool]
    where = ["--target-processes", "application-only", "--port", str(port)]
    return [program, "--tool", tool, *REPORT[tool], *which, *where, sys.executable]


def run_limited(command: list[str]) -> tuple[int | None, str]:
    """The exit status, or None if the command was killed for its run time, and its output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | SANITIZED,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        code = None
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and its target
            process.wait()
        output.seek(0)
        return code, output.read()


def main() -> None:
    """Runs everything, prints a line per record, and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--only", default="", help="run the checks that match this")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="program; '' for none")
    args = parser.parse_args()
    if args.sanitizer and shutil.which(args.sanitizer) is None:
        parser.error(f"there is no {args.sanitizer!r} on PATH; name one with --sanitizer, or ''")
    os.environ |= SHARED_DEVICE
    command = " ".join(["python tests/support/record_gpu.py", *sys.argv[1:]])
    records = [environment() | {"command": command}]
    runs = sanitizer_runs(args.only) if args.sanitizer else []
    start = time.monotonic()
    measured = itertools.chain(
        check_records(args.workers, groups_of_checks(args.only)),
        sanitizer_records(args.sanitizer, runs),
    )
    for record in measured:
        records = [records[0], *sorted([*records[1:], record], key=title)]
        write(args.out, records)  # after each record, so that an interruption loses none
        verdict = "passed" if record["passed"] else "FAILED"
        print(f"{time.monotonic() - start:6.0f} s  {verdict}  {title(record)}", flush=True)
    failed = [record for record in records[1:] if not record["passed"]]
    print(f"{len(records) - 1} checks, {len(failed)} failed")
    sys.exit(1 if failed else 0)


def title(record: Record) -> str:
    """The fields that name a record, and its main figure."""
    names = ("check", "case", "preset", "rule", "points", "dtype", "fmt", "how", "tool", "launched")
    figures = (
        "largest_error_over_bound",
        "largest_distance",
        "smallest_ratio",
        "wrong",
        "seconds",
        "summary",
    )
    words = [str(record[name]) for name in names if name in record]
    return " ".join([*words, *(f"{name}={record[name]}" for name in figures if name in record)])


if __name__ == "__main__":
    main()
