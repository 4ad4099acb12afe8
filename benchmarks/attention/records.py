"""Records as JSON lines: the environment first, then one per measurement; and ratios of times."""

import datetime
import fnmatch
import json
import lzma
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowprec_attn.errors import RunError
from lowprec_attn.files import make_directory, write_atomically, writing

Record = dict[str, Any]

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "tokamax")


def environment(program: str = "python -m benchmarks.attention") -> Record:
    """Returns device, driver, versions, date, and the command, without anything private."""
    device = jax.devices()[0]
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    return {
        "kind": "environment",
        "device": device.device_kind,
        "cores": cores(),
        "driver": _driver() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join([program, *sys.argv[1:]]),
    }


def cores() -> int:
    """Returns the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0]


def reason(error: Exception) -> str:
    """Returns in one line why a candidate declined."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:200]


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes the records to a file, one JSON object per line.

    Raises:
      DiskError: the disk refuses. What the file held before is then still there.
    """
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with writing(path):
        make_directory(path.parent)
        write_atomically(path, text.encode())


def read(path: Path) -> list[Record]:
    """Reads the records that `write` wrote, or such a file compressed as `.xz`.

    Raises:
      RunError: there is no such file, or it holds something else.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        records = [json.loads(line) for line in content.decode("utf-8").splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise RunError(f"cannot read records from {path}: {error}") from error
    if not all(isinstance(record, dict) and "kind" in record for record in records):
        raise RunError(f"{path} does not hold records of this benchmark")
    return records


def problems(records: Iterable[Record]) -> Iterator[tuple[Record, list[Record]]]:
    """Yields each problem {shape, dtype, pass}, with the records of its candidates."""
    keys = ("shape", "dtype", "pass")
    candidates = [r for r in records if "shape" in r]
    for key, group in groupby(candidates, lambda record: [record[k] for k in keys]):
        yield dict(zip(keys, key, strict=True)), list(group)


def fastest(records: Iterable[Record], pattern: str) -> Record | None:
    """Returns the timed candidate with the least median whose name matches, or None."""
    matching = [
        r for r in records if r["kind"] == "time" and fnmatch.fnmatchcase(r["name"], pattern)
    ]
    return min(matching, key=lambda record: record["seconds"], default=None)


def ratio(record: Record, other: Record) -> tuple[float, float, float]:
    """Divides a candidate's time by another's on the same problem, round by round.

    Returns:
      The median, the 25th and the 75th percentile over the rounds.
    """
    quotients = np.divide(record["samples"], other["samples"])
    low, median, high = np.percentile(quotients, [25, 50, 75])
    return float(median), float(low), float(high)


def add_ratios(records: Sequence[Record], baseline: str) -> None:
    """Adds `ratio`, and the baseline's name as `baseline`, to the timed records of one problem."""
    chosen = fastest(records, baseline)
    for record in records:
        if chosen is not None and record["kind"] == "time":
            record["baseline"] = chosen["name"]
            record["ratio"] = ratio(record, chosen)[0]
