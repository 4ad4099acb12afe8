"""Rollbacks of a run: the step that it went back to, and the batches that it left out.

`rollbacks.jsonl` has one line per rollback. A rollback happens at the instant at which its line is
written. Every start of the run, including the next one in the same process, then carries out the
rest, which may be interrupted and repeated:

  - It removes the checkpoints of later steps that do not know the rollback (`abandoned`).
  - It cuts off metrics, timings and data order at the checkpoint that the run starts from.
  - It gives step s the batch of step s + `skipped` in the run's order.

A run that is resumed from another run leaves out the batches that the other one has left out.

A checkpoint knows a rollback if its manifest's fingerprint of `rollbacks.jsonl` covers the line.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lowprec_attn import hosts
from lowprec_attn.counts import many
from lowprec_attn.errors import RunError
from lowprec_attn.files import (
    Fingerprint,
    Fingerprinter,
    complete_lines,
    make_directory,
    write_atomically,
    writing,
)
from lowprec_attn.runs import metrics
from lowprec_attn.runs.run_dir import RunDir

_FILE = "rollbacks.jsonl"

Reason = Literal["excess", "not finite"]


class Rollback(NamedTuple):
    """One rollback.

    Attributes:
      to: the step that the run went back to, which has a checkpoint.
      onset: the step at which the problem began.
      detected: the last step before the rollback, whose loss was in excess or not finite.
      skipped: the number of batches left out, those of the steps from `to` to `detected`.
      reason: the reason for the rollback.
    """

    to: int
    onset: int
    detected: int
    skipped: int
    reason: Reason

    def __str__(self) -> str:
        why = {"excess": "the loss was in excess", "not finite": "the loss was not finite"}
        return (
            f"{why[self.reason]} at step {self.detected:,} (onset: step {self.onset:,}), so the "
            f"run went back to step {self.to:,} and leaves out "
            f"{many(self.skipped, 'batch', 'batches')}"
        )


def target(onset: int, steps_back: int, every: int, first: int) -> int:
    """Returns the step to go back to, that of the newest scheduled checkpoint early enough.

    Args:
      onset: the step at which the problem began, or the earliest step at which it may yet begin.
      steps_back: how many steps before the onset the checkpoint must be, at least.
      every: the number of steps between checkpoints.
      first: the earliest step to go back to, which has a checkpoint: the run's first step, or the
        step that the previous rollback went back to.
    """
    return max(first, (onset - steps_back) // every * every)


def read(path: Path) -> list[Rollback]:
    """Returns the rollbacks of a run; none if there is no file.

    Raises:
      RunError: the file does not hold rollbacks.
      OSError: the file cannot be read.
    """
    try:
        lines = complete_lines(path) if path.exists() else []
        return [Rollback(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise RunError(
            f"{path} does not hold rollbacks ({error}); restore it from a copy"
        ) from error


def skipped(rollbacks: Sequence[Rollback]) -> int:
    """Returns the total number of batches that the rollbacks have left out."""
    return sum(rollback.skipped for rollback in rollbacks)


def undone(rollbacks: Sequence[Rollback], step: int, records: Mapping[str, Fingerprint]) -> bool:
    """Whether a checkpoint belongs to steps that one of the rollbacks has undone.

    Args:
      rollbacks: the rollbacks of the run.
      step: the step of the checkpoint.
      records: the fingerprints of the run's files in the checkpoint's manifest.
    """
    size = records[_FILE].size if _FILE in records else 0
    ends = itertools.accumulate(map(len, _lines(rollbacks)))
    pairs = zip(rollbacks, ends, strict=True)
    return any(rollback.to < step and size < end for rollback, end in pairs)


class RollbackRecord:
    """The rollbacks recorded in a run directory.

    In a run of several processes only the first one reads and writes the file. All processes know
    the rollbacks.

    Attributes:
      rollbacks: the rollbacks so far, in their order.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """Reads the rollbacks of an opened run directory; raises the errors of `read`."""
        self._run_dir = run_dir
        known = hosts.from_first(lambda: [r._asdict() for r in read(run_dir.rollbacks)])
        self.rollbacks: list[Rollback] = [Rollback(**fields) for fields in known]

    def abandoned(self, step: int, records: Mapping[str, Fingerprint]) -> bool:
        """Whether a checkpoint belongs to steps that a rollback has undone; see `undone`."""
        return undone(self.rollbacks, step, records)

    def keep_until(self, step: int) -> None:
        """Forgets rollbacks to later steps: a run that starts at `step` repeats what led to them.

        Raises:
          DiskError: the file cannot be written.
        """
        kept = [rollback for rollback in self.rollbacks if rollback.to <= step]
        if kept != self.rollbacks:
            self._write(kept)

    def add(self, rollback: Rollback) -> None:
        """Saves the metrics that the rollback undoes, and then records the rollback.

        Raises:
          DiskError: a file cannot be written.
        """
        self._keep_metrics(rollback.to, len(self.rollbacks) + 1)
        self._write([*self.rollbacks, rollback])

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of `rollbacks.jsonl`."""
        return Fingerprinter(b"".join(_lines(self.rollbacks))).fingerprint

    @hosts.first_only
    def _keep_metrics(self, step: int, number: int) -> None:
        path = self._run_dir.abandoned / f"{number}.jsonl"
        with writing(path):
            make_directory(path.parent)
            write_atomically(path, metrics.lines_from(self._run_dir.metrics, step))

    def _write(self, rollbacks: list[Rollback]) -> None:
        path = self._run_dir.rollbacks

        def write() -> None:
            with writing(path):
                write_atomically(path, b"".join(_lines(rollbacks)))

        hosts.from_first(write)
        self.rollbacks = rollbacks


def _lines(rollbacks: Sequence[Rollback]) -> list[bytes]:
    return [f"{json.dumps(rollback._asdict())}\n".encode() for rollback in rollbacks]
