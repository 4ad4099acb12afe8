"""Rollbacks of a run: where it went back to, and which batches it left out.

`rollbacks.jsonl` has one line per rollback, and writing it is the instant at which a rollback
happens. All that follows is done by every start of the run, the next one in the same process
included, and may be interrupted and repeated:

  - checkpoints of later steps that do not know the rollback are removed: `abandoned`;
  - metrics, timings and data order are cut off at the checkpoint that the run starts from;
  - the batch of step s is that of step s + `skipped` in the order of the run.

A checkpoint knows a rollback if its manifest's fingerprint of `rollbacks.jsonl` covers the line.
"""

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

Reason = Literal["excess", "not finite"]


class Rollback(NamedTuple):
    """One rollback.

    Attributes:
      to: the step that the run went back to, that of a checkpoint.
      onset: the step at which what was wrong began.
      detected: the last step that was taken; its loss was the last in excess, or not finite.
      skipped: batches left out: those of the steps from `to` to `detected`.
      reason: why.
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
    """The step to go back to: of the newest scheduled checkpoint that is early enough.

    Args:
      onset: where what is wrong began, or the earliest step at which it may yet begin.
      steps_back: how many steps before the onset the checkpoint has to be.
      every: period of the checkpoints.
      first: the run is never taken back beyond this step, which has a checkpoint: the first step,
        or that of the rollback before.
    """
    return max(first, (onset - steps_back) // every * every)


def read(path: Path) -> list[Rollback]:
    """The rollbacks of a run, none where there is no file.

    Raises:
      RunError: the file holds something else, or cannot be read.
    """
    try:
        lines = complete_lines(path) if path.exists() else []
        return [Rollback(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise RunError(
            f"{path} does not hold rollbacks ({error}); restore it from a copy"
        ) from error


def skipped(rollbacks: Sequence[Rollback]) -> int:
    """How many batches of the run's order lie behind those of its steps now."""
    return sum(rollback.skipped for rollback in rollbacks)


class RollbackRecord:
    """The rollbacks of a run in its directory.

    In a run of several processes the first one reads and writes; all know what it has read.

    Attributes:
      rollbacks: so far, in their order.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """Reads the rollbacks of an opened run directory; raises as `read`."""
        self._run_dir = run_dir
        known = hosts.from_first(lambda: [r._asdict() for r in read(run_dir.rollbacks)])
        self.rollbacks: list[Rollback] = [Rollback(**fields) for fields in known]

    def abandoned(self, step: int, records: Mapping[str, Fingerprint]) -> bool:
        """Whether a checkpoint belongs to steps that a rollback has undone.

        Args:
          step: of the checkpoint.
          records: fingerprints of the run's files, as its manifest has them.
        """
        path = self._run_dir.rollbacks
        size = records[path.name].size if path.name in records else 0
        lines = _lines(self.rollbacks)
        ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
        return any(
            rollback.to < step and size < end
            for rollback, end in zip(self.rollbacks, ends, strict=True)
        )

    def keep_until(self, step: int) -> None:
        """Forgets rollbacks to later steps: a run that starts at `step` repeats what led to them.

        Raises:
          DiskError: the disk refuses.
        """
        kept = [rollback for rollback in self.rollbacks if rollback.to <= step]
        if kept != self.rollbacks:
            self._write(kept)

    def add(self, rollback: Rollback) -> None:
        """Keeps the metrics that the rollback undoes, then records it, with which it has happened.

        Raises:
          DiskError: the disk refuses.
        """
        self._keep_metrics(rollback.to, len(self.rollbacks) + 1)
        self._write([*self.rollbacks, rollback])

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the file."""
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
