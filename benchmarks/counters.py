"""Shows what limits the attention kernels: Nsight Compute's counters, kernel by kernel.

    python -m benchmarks.counters --shapes long64 --only 'hopper flash' 'torch cudnn' --out FILE

It needs NVIDIA's `ncu`, and a GPU whose counters this user may read. Each candidate of
`benchmarks.attention` runs one forward and backward pass in its own process, under `ncu`, which
runs every kernel several times. The clock is not fixed. A single kernel runs at a higher clock than
a loop of kernels, so times are shorter than those of `benchmarks.attention`. Shares are of what a
multiprocessor can do in the cycles in which it works.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks import program
from benchmarks.attention.candidates import candidates, select
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, environment, write
from benchmarks.shapes import SHAPES
from lowprec_attn.errors import RunError
from lowprec_attn.tables import columns

# Matches the attention kernels, ours and others', but not those that XLA or PyTorch add to them.
_KERNELS = "regex:attention|sdpa|flash|mha"
_SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "InstructionStats",
    "SchedulerStats",
    "MemoryWorkloadAnalysis",
    "LaunchStats",
)


class _Counter(NamedTuple):
    """A counter of `ncu`, the unit that multiplies it in a record, and its heading in the table."""

    counter: str
    unit: float
    heading: str = ""


_COUNTERS = {
    "seconds": _Counter("gpu__time_duration.sum", 1e-9, "µs"),
    "cycles": _Counter("gpc__cycles_elapsed.max", 1),
    "products": _Counter(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 0.01, "products"
    ),
    "exponentials": _Counter(
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 0.01, "exponentials"
    ),
    "issue_slots": _Counter(
        "smsp__issue_active.avg.pct_of_peak_sustained_active", 0.01, "issue slots"
    ),
    "shared_memory": _Counter(
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 0.01, "shared memory"
    ),
    "memory": _Counter("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 0.01, "memory"),
    "instructions": _Counter("smsp__inst_executed.sum", 1),
    "spilling_instructions": _Counter("sass__inst_executed_register_spilling", 1),
}


@program.told
def main() -> None:
    """Profiles the candidates, prints the table and writes the records."""
    args = _arguments()
    # This process shares the GPU with the process under `ncu`.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.run:
        _run(args.run, args.only)
    else:
        _profile(args)


def _arguments() -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["long64"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--only", nargs="+", default=["hopper flash"], metavar="PATTERN")
    parser.add_argument("--out", type=Path, help="JSON lines file to write")
    parser.add_argument("--run", help=argparse.SUPPRESS, choices=SHAPES)
    return parser.parse_args()


def _profile(args: argparse.Namespace) -> None:
    ncu = shutil.which("ncu")
    if ncu is None or jax.default_backend() != "gpu":
        missing = "ncu (of NVIDIA Nsight Compute)" if ncu is None else "a GPU"
        raise RunError(f"kernels are profiled with {missing}, which is not found here")
    found = select(candidates("gpu"), args.only)
    if not found:
        raise RunError(f"no candidate matches {' '.join(args.only)}")
    records: list[Record] = [environment(program.name())]
    for shape in args.shapes:
        for candidate in found:
            records += _counted(ncu, shape, candidate.name)
            print(table(records[1:]), flush=True)
            if args.out:
                write(args.out, records)  # a run that is stopped leaves what it has measured


def _counted(ncu: str, shape: str, name: str) -> Iterator[Record]:
    """Runs one candidate under `ncu`, and yields a record for each of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = ["--csv", "--page", "raw", "--clock-control", "none", "--log-file", str(log)]
        options += ["--kernel-name", _KERNELS]
        options += [part for section in _SECTIONS for part in ("--section", section)]
        run = [sys.executable, "-m", "benchmarks.counters", "--run", shape, "--only", name]
        done = subprocess.run([ncu, *options, *run], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise RunError(f"{name} at {shape}: ncu failed: {' '.join(last)}")
        for record in kernels(log.read_text(encoding="utf-8").splitlines()):
            yield {"kind": "kernel", "shape": shape, "name": name, **record}


def _run(shape: str, names: Sequence[str]) -> None:
    """Runs one forward and backward pass of each candidate, for `ncu` to watch."""
    problem = Problem(shape, SHAPES[shape], "bfloat16", backward=True)
    inputs = problem.inputs()
    for candidate in select(candidates("gpu"), names):
        jax.block_until_ready(candidate.prepare(problem, inputs, 1).results())


def kernels(lines: Iterable[str]) -> Iterator[Record]:
    """Yields a record for each kernel in the output of `ncu --csv --page raw`, in running order.

    Raises:
      RunError: a counter is missing.
    """
    rows = [row for row in csv.reader(lines) if row]
    begin = next((i for i, row in enumerate(rows) if row[0] == "ID"), len(rows))
    for row in rows[begin + 2 :]:  # the row below the names has the units
        counted = dict(zip(rows[begin], row, strict=True))
        record: Record = {"kernel": counted["Kernel Name"]}
        for name, (counter, unit, _) in _COUNTERS.items():
            try:
                record[name] = float(f"{float(counted[counter].replace(',', '')) * unit:.4g}")
            except (KeyError, ValueError) as error:
                raise RunError(f"ncu did not count {counter}, but {error}") from error
        yield record


def table(records: Sequence[Record]) -> str:
    """Returns a table with one line per kernel; shares are in percent."""
    shown = {name: c.heading for name, c in _COUNTERS.items() if c.heading}
    rows = [("shape", "candidate", "kernel", *shown.values())]
    for record in records:
        cells = (f"{record[n] * (1e6 if n == 'seconds' else 100):.0f}" for n in shown)
        rows.append((record["shape"], record["name"], record["kernel"][:40], *cells))
    return columns(rows, "<<<" + ">" * len(shown))


if __name__ == "__main__":
    sys.exit(main())
