"""A run's metrics: bit-for-bit reproducible JSON lines, timings, TensorBoard events.

`metrics.jsonl` holds only values that the run's config determines, so an interrupted and resumed
run has the same file, byte for byte, as an uninterrupted one. Timings go to `throughput.jsonl`.

Every line is strict JSON. Floats have enough digits to be read back exactly. JSON has no NaN and no
infinities, so these are written as the texts "nan", "inf" and "-inf", which `read` returns as
floats.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from lowprec_attn import hosts
from lowprec_attn.errors import RunError
from lowprec_attn.files import (
    Fingerprint,
    Fingerprinter,
    LineFile,
    complete_lines,
    explained,
    flatten,
    from_strict_json,
    strict_json,
    write_atomically,
)
from lowprec_attn.runs.run_dir import RunDir

_TENSORBOARD_FLUSH_SECONDS = 5.0


class MetricsError(RunError):
    """Metrics cannot be written or read."""


class MetricsWriter:
    """Appends records to `metrics.jsonl`, `throughput.jsonl` and TensorBoard.

    In a run of several processes only the first one writes. On the others the methods that write
    do nothing.

    The kernel has a record when `write` returns. kill -9 can at most cut short the line that is
    being written, and the next writer removes such a partial line.

    Before a checkpoint of step s is saved, write the records of all steps below s and call `flush`,
    because a run that resumes from the checkpoint does not write them again.
    """

    def __init__(self, run_dir: RunDir, start_step: int) -> None:
        """Prepares the files for a run that starts, or resumes, at `start_step`.

        Args:
          run_dir: an opened run directory.
          start_step: the first step that this writer will record. A process that was killed after
            its last checkpoint may have left records of this and later steps. They are removed
            (atomically in each file), and TensorBoard is told to hide its own. This happens only
            at the first record or `flush`, so a start that fails before then removes nothing.

        Raises:
          MetricsError: a file cannot be written, or holds lines that are not records.
        """
        self._where = run_dir.path
        self._open(run_dir, start_step)

    @hosts.first_only
    def _open(self, run_dir: RunDir, start_step: int) -> None:
        self._run_dir, self._start_step = run_dir, start_step
        self._files: _Files | None = None
        with self._explain_errors():
            self._written = Fingerprinter(_kept(run_dir.metrics, start_step))
            self._last_step, self._before = start_step - 1, self._written.fingerprint
            # Raises now if a line is not a record or a file cannot be written.
            _kept(run_dir.throughput, start_step)
            for path in (run_dir.metrics, run_dir.throughput):
                path.touch()
            run_dir.tensorboard.mkdir(exist_ok=True)

    @property
    def _open_files(self) -> "_Files":
        """The files, which are truncated and opened at the first access."""
        if self._files is None:
            run_dir, start = self._run_dir, self._start_step
            for path in (run_dir.metrics, run_dir.throughput):
                kept = _kept(path, start)
                if path.exists() and len(kept) != path.stat().st_size:
                    write_atomically(path, kept)
            events = _EventFile(run_dir.tensorboard, start)
            self._files = _Files(LineFile(run_dir.metrics), LineFile(run_dir.throughput), events)
        return self._files

    @hosts.first_only
    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a record about a step.

        Args:
          step: the index of the step. Several records may share a step.
          values: numbers, texts, None, and nested dicts, lists and arrays of these.

        Raises:
          MetricsError: the disk is full or not writable.
        """
        if step > self._last_step:
            self._last_step, self._before = step, self._written.fingerprint
        self._written.add(self._append("metrics", step, values))

    def written_before(self, step: int) -> Fingerprint:
        """Returns the fingerprint of `metrics.jsonl` before the records of a step.

        Args:
          step: the last step that has records, or a later one.
        """
        return self._written.fingerprint if step > self._last_step else self._before

    @hosts.first_only
    def write_throughput(self, step: int, seconds: float, tokens: int) -> None:
        """Records that the steps since the last timing took `seconds` for `tokens` tokens.

        Raises:
          MetricsError: the disk is full or not writable.
        """
        rate = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        self._append("throughput", step, rate)

    @hosts.first_only
    def flush(self) -> None:
        """Flushes everything written so far to the disk."""
        with self._explain_errors():
            for file in self._open_files:
                file.flush()

    @hosts.first_only
    def close(self) -> None:
        """Flushes and closes the files."""
        with self._explain_errors():
            for file in self._files or ():
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, name: str, step: int, values: Mapping[str, Any]) -> bytes:
        """Appends a record to the file with this name and to TensorBoard; returns its line."""
        record = {"step": int(step), **_plain(values)}
        with self._explain_errors():
            files = self._open_files
            file: LineFile = getattr(files, name)
            line = file.append(json.dumps(strict_json(record), allow_nan=False))
            files.events.add(record)
        return line

    def _explain_errors(self) -> contextlib.AbstractContextManager[None]:
        mend = "make the disk writable and repeat the command to resume"
        return explained(MetricsError, f"write metrics to {self._where}", mend)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl` or `throughput.jsonl`, even while a run writes it.

    Floats are read back bit for bit, and the texts "nan", "inf" and "-inf" become floats. An
    unterminated last line is left out.

    Raises:
      MetricsError: a line is not a record.
      OSError: the file cannot be read.
    """
    return [from_strict_json(record) for _, record in _records(path)]


def read_encoded(path: Path) -> Iterator[dict[str, Any]]:
    """Returns an iterator over the records as in `read`, with "nan", "inf" and "-inf" as texts."""
    return (record for _, record in _records(path))


def lines_from(path: Path, step: int) -> bytes:
    """Returns the lines of `metrics.jsonl` from a step on; raises the errors of `read`."""
    return b"".join(line for line, record in _records(path) if record["step"] >= step)


class _Files(NamedTuple):
    metrics: LineFile
    throughput: LineFile
    events: "_EventFile"


class _EventFile:
    """A TensorBoard event file, written in the calling thread.

    tensorboardX's SummaryWriter is unsuitable for two reasons. On a full disk its thread dies, and
    its queue then blocks the training loop for ever. It also puts the host's name into the file's
    name.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        # TensorBoard reads the files of a directory in the order of their names.
        self._records = RecordWriter(str(directory / f"events.out.tfevents.{time.time_ns()}"))
        try:
            self._write(Event(file_version="brain.Event:2"))
            # Tells TensorBoard to hide what earlier files say about this step and later ones.
            self._write(Event(step=start_step, session_log=SessionLog(status=SessionLog.START)))
            self.flush()
        except OSError:
            self._records.close()
            raise

    def add(self, record: Mapping[str, Any]) -> None:
        scalars = [
            # Tags are flat names, such as `layer_2/score_max` or `layer_2/heads/0`.
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in flatten(record, "/", lists=True)
            if tag != "step" and isinstance(value, int | float)
        ]
        self._write(Event(step=record["step"], summary=Summary(value=scalars)))
        if time.monotonic() - self._flushed > _TENSORBOARD_FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._records.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self.flush()
        self._records.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def _plain(value: Any) -> Any:
    """Converts arrays and NumPy or JAX scalars to Python numbers of the same value, recursively."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":  # bfloat16 and similar dtypes, which are exact in float64
        array = array.astype(np.float64)
    return array.tolist()


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields every complete line of a file, including its line end, and the record in it."""
    for number, line in enumerate(complete_lines(path), 1):
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise MetricsError(f"{path} line {number} is not a record; repair or remove that line")
        yield line, record


def _kept(path: Path, start_step: int) -> bytes:
    """Returns the lines of the records before `start_step`, without an unterminated last line."""
    if not path.exists():
        return b""
    return b"".join(line for line, record in _records(path) if record["step"] < start_step)
