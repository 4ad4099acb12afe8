"""Draws and records the order in which a run reads windows of the training text.

An `Order` is a function of the step alone, so a resumed run continues it without knowing past
steps. The record is a text file with one line per optimizer step, line 1 for step 0. A line holds
the comma-separated start indices of the step's windows.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from lowprec_attn import hosts
from lowprec_attn.counts import many
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import Fingerprint, Fingerprinter, append_line, open_own, sync, writing

Order = Callable[[int], Int64[np.ndarray, " B"]]


def skipping(order: Order, count: int) -> Order:
    """The order without its first `count` batches."""
    return lambda step: order(step + count)


@dataclasses.dataclass(frozen=True)
class SeededOrder:
    """An order drawn from a seed, uniform over the windows 0 … token_count − context − 1.

    Windows are drawn with replacement, as nanoGPT draws them. When a run has read as many tokens as
    the text has, which its first lines call an epoch, it has seen 1 − 1/e of the text, 63 %.

    It is a pure function of the step and the fields. NumPy keeps the raw 64-bit words of Philox
    stable between versions (NEP 19), unlike `Generator.integers`. A window is the remainder of a
    word, whose bias is below token_count / 2⁶⁴.

    Attributes:
      seed: seed of the run, ≥ 0.
      batch_size: windows per step.
      token_count: tokens of the text, at least context + 1.
      context: tokens per sequence T; a window is T + 1 tokens.
    """

    seed: int
    batch_size: int
    token_count: int
    context: int

    def __call__(self, step: int) -> Int64[np.ndarray, " B"]:
        """Start indices of the windows of an optimizer step, ≥ 0."""
        seed = np.random.SeedSequence(self.seed, spawn_key=(step,))
        words = np.random.Philox(seed).random_raw(self.batch_size)
        return (words % np.uint64(self.token_count - self.context)).astype(np.int64)


class OrderRecord:
    """Writes the order of a run, line by line as the steps are taken.

    Every line is handed to the operating system before `append` returns, so it survives the
    process. A line that a crash cut off does not count; `truncate` removes it. In a run of several
    processes the first one writes; on the others these methods do nothing.

    Args:
      path: file of the record; an existing file is continued.

    Attributes:
      steps: number of complete lines.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        data = self._path.read_bytes() if self._path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        self._count(complete)
        self._cut_off = len(complete) < len(data)
        self._to_keep: int | None = None  # bytes to keep, if the file must be shortened

    def _count(self, lines: bytes) -> None:
        self.steps, self._written = lines.count(b"\n"), Fingerprinter(lines)
        self._before = self._written.fingerprint

    @hosts.first_only
    def append(self, step: int, starts: Int64[np.ndarray, " B"]) -> None:
        """Writes the line of `step`.

        Raises:
          DataError: `step` is not the next one, the last line is cut off, or the disk refuses.
        """
        if step != self.steps or self._cut_off:
            state = " and a cut-off line" if self._cut_off else ""
            raise DataError(
                f"data order {self._path} holds {many(self.steps, 'step')}{state}, so step "
                f"{step} cannot follow: truncate it to the step that the run resumes from"
            )
        self._shorten()
        line = append_line(self._path, ",".join(map(str, starts.tolist())))
        self._before = self._written.fingerprint
        self._written.add(line)
        self.steps += 1

    def written_before(self, step: int) -> Fingerprint:
        """Fingerprint of the lines before `step`, whose line is the next one or the last one."""
        return self._written.fingerprint if step == self.steps else self._before

    @hosts.first_only
    def flush(self) -> None:
        """Brings everything written so far to the disk.

        Raises:
          DiskError: the disk refuses.
        """
        self._shorten()
        with writing(self._path):
            self._path.touch()  # before the first step there may be no file
            sync(self._path)
            sync(self._path.parent)

    @hosts.first_only
    def truncate(self, steps: int) -> None:
        """Keeps the first `steps` lines.

        The file itself is shortened later, by the next `append` or `flush`, so that a start that
        fails before then loses no record. Shortening a file is one operation of the file system.

        Raises:
          DataError: there are fewer complete lines, or the file cannot be read.
        """
        if steps > self.steps:
            raise DataError(
                f"data order {self._path} holds {self.steps} complete steps, but the run resumes "
                f"from step {steps}: restore it from a copy, or remove the newest NUMBER.json in "
                "the run's checkpoints to resume from the one before"
            )
        if steps < self.steps or self._cut_off:
            with writing(self._path), self._path.open("rb") as file:
                self._count(b"".join(file.readline() for _ in range(steps)))
                self._to_keep = file.tell()
        self._cut_off = False

    def _shorten(self) -> None:
        """Shortens the file if `truncate` has put this off."""
        if self._to_keep is not None:
            with writing(self._path), open(self._path, "r+b", opener=open_own) as file:
                file.truncate(self._to_keep)
            self._to_keep = None
