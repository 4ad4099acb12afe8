"""The order in which windows of the training text are read: drawn, recorded, replayed.

An `Order` is a function of the step alone, so a resumed run continues it without its past steps.
The record is a text file with one line per optimizer step: the comma-separated start indices of
the step's windows, line 1 for step 0. The public code of Qiu & Yao (arXiv 2510.04212) writes the
same, per process, as `generated_indices_rank_0.txt`; `paste -d, generated_indices_rank_*.txt`
makes one file of several ranks.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from lowprec_attn import hosts
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import Fingerprint, Fingerprinter, append_line, open_own, sync, writing

Order = Callable[[int], Int64[np.ndarray, " B"]]


def skipping(order: Order, count: int) -> Order:
    """The order without its first `count` batches."""
    return lambda step: order(step + count)


def followed_by(order: Order, steps: int, other: Order) -> Order:
    """The order's batches of the first `steps` steps, and those of another order from there on."""
    return lambda step: (order if step < steps else other)(step)


@dataclasses.dataclass(frozen=True)
class SeededOrder:
    """The order drawn from a seed, uniform over the windows 0 … token_count − context − 1.

    A pure function of step and fields: NumPy keeps the raw 64-bit words of Philox stable between
    versions (NEP 19), unlike `Generator.integers`. The remainder's bias is below token_count / 2⁶⁴.

    Attributes:
      seed: of the run, ≥ 0.
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


class Replay:
    """The order that a record holds, read and checked in full when made.

    The record is held as one int64 array (8 bytes per window).

    Args:
      path: a record as `OrderRecord` or the paper's public code writes it.
      batch_size, token_count, context: of the run that replays it; see `SeededOrder`.

    Raises:
      DataError: the file is missing, no file, empty or cut off, or a line has another number of
        indices than `batch_size`, something that is no integer, or a window outside the text.
    """

    def __init__(self, path: str | Path, batch_size: int, token_count: int, context: int):
        self._path = Path(path)
        self._batch_size = batch_size
        self._last_start = token_count - context - 1
        if not self._path.is_file():
            why = "is no file" if self._path.exists() else "does not exist"
            raise DataError(f"data order {path} {why}: give the path of a record")
        lines = [self._parse(where, line) for where, line in _numbered_lines(self._path)]
        if not lines:
            raise DataError(f"data order {path} is empty: give a record with one line per step")
        self._starts = np.stack(lines)

    def __len__(self) -> int:
        """Number of recorded steps."""
        return len(self._starts)

    def __call__(self, step: int) -> Int64[np.ndarray, " B"]:
        """Start indices of `step`.

        Raises:
          DataError: the record ends before `step`.
        """
        if step >= len(self):
            raise DataError(
                f"data order {self._path} ends after {len(self)} steps, step {step} is not in it: "
                f"train at most {len(self)} steps or give a longer record"
            )
        return self._starts[step]

    def _parse(self, where: str, line: str) -> Int64[np.ndarray, " B"]:
        try:
            indices = np.array([int(field) for field in line.split(",")], np.int64)
        except (ValueError, OverflowError) as err:
            raise DataError(f"{where} is not comma-separated start indices: {err}") from err
        if len(indices) != self._batch_size:
            raise DataError(
                f"{where} has {len(indices)} start indices, but a step reads {self._batch_size} "
                f"sequences: set batch_size={len(indices)} or give another record"
            )
        outside = indices[(indices < 0) | (indices > self._last_start)]
        if len(outside):
            raise DataError(
                f"{where} starts a window at {outside[0]}, outside the text, whose last window "
                f"starts at {self._last_start}: the record belongs to other data or context"
            )
        return indices


class OrderRecord:
    """Writes the order of a run, line by line as the steps are taken.

    Every line is handed to the operating system before `append` returns, so it survives the
    process. A line that a crash cut off does not count; `truncate` removes it. In a run of several
    processes the first one writes; on the others these methods do nothing.

    Args:
      path: the record; continued if it exists.

    Attributes:
      steps: number of complete lines.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        data = self._path.read_bytes() if self._path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        self._count(complete)
        self._cut_off = len(complete) < len(data)
        self._to_keep: int | None = None  # bytes, where the file is to be shortened first

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
                f"data order {self._path} holds {self.steps} steps{state}, so step {step} cannot "
                "follow: truncate it to the step that the run resumes from"
            )
        self._shorten()
        line = append_line(self._path, ",".join(map(str, starts.tolist())))
        self._before = self._written.fingerprint
        self._written.add(line)
        self.steps += 1

    def written_before(self, step: int) -> Fingerprint:
        """Of the lines before that of `step`, which is the next one or the last of all."""
        return self._written.fingerprint if step == self.steps else self._before

    @hosts.first_only
    def flush(self) -> None:
        """Brings everything written so far to the disk.

        Raises:
          DiskError: the disk refuses.
        """
        self._shorten()
        with writing(self._path):
            self._path.touch()  # before the first step there may be none
            sync(self._path)
            sync(self._path.parent)

    @hosts.first_only
    def truncate(self, steps: int) -> None:
        """Keeps the first `steps` lines.

        The file stays as it is until a line is to follow, or `flush`: a start that fails before
        costs no record. Shortening a file is one operation of the file system.

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
        """What `truncate` has put off."""
        if self._to_keep is not None:
            with writing(self._path), open(self._path, "r+b", opener=open_own) as file:
                file.truncate(self._to_keep)
            self._to_keep = None


def _numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines with a name for messages ("FILE line 3"), each checked to be complete."""
    try:
        with path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    raise DataError(
                        f"{path} line {number} is cut off (no newline at its end): delete that "
                        "line, or add the newline if it is complete"
                    )
                yield f"{path} line {number}", line
    except UnicodeDecodeError as err:
        raise DataError(f"{path} is not a text file of start indices: {err}") from err
