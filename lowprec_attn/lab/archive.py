"""Stores the records of an experiment in `records.jsonl.xz`: JSON lines, compressed by xz.

Each run has a header line, followed by one line per column and per signal of a layer:

    {"arm": …, "seed": …, "config": …}                     what it was; see `lab.collection`
    {"column": "loss", "steps": […], "values": […]}        a number by step; "val_loss", "grad_norm"
    {"signal": …, "layer": 1, "steps": […], "heads": [[…], […]]}   a list of values for each head

The values of one head over the steps are adjacent, because they resemble each other. The file is
thereby a third smaller than with a line per step. As in `metrics.jsonl`, NaN and infinities are
written as the texts "nan", "inf" and "-inf".
"""

import dataclasses
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lowprec_attn.errors import RunError
from lowprec_attn.files import write_atomically, writing
from lowprec_attn.lab import RECORDS
from lowprec_attn.lab.experiment import Arm, Trial

COLUMNS = ("loss", "grad_norm", "val_loss")

Number = float | str
"""A number, or one of the texts "nan", "inf" and "-inf"."""
Layer = dict[str, list[Number]]
"""The signals of a layer: by name, one value per head."""


class RecordError(RunError):
    """Records are missing, damaged, or do not hold what a report needs."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run in the form in which it is stored.

    Attributes:
      header: the run's arm, seed, config and environment, and how it ended.
      columns: by a name of `COLUMNS`, a number by step.
      signals: by step, the signals of every layer.
    """

    header: dict[str, Any]
    columns: dict[str, dict[int, Number]]
    signals: dict[int, list[Layer]]

    @property
    def arm(self) -> Arm:
        """The arm to which the run belongs."""
        return Arm(self.header["arm"], self.header["overrides"], self.header.get("control"))

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return Trial(self.arm, self.header.get("seed")).name

    @classmethod
    def from_rows(cls, header: dict[str, Any], rows: Iterable[Mapping[str, Any]]) -> Self:
        """Makes a run from records of `metrics.jsonl`; ignores all but columns and signals."""
        columns: dict[str, dict[int, Number]] = {}
        signals: dict[int, list[Layer]] = {}
        for row in rows:
            for name in COLUMNS:
                if name in row:
                    columns.setdefault(name, {})[row["step"]] = row[name]
            if "signals" in row:  # in order of number: the text has layer_10 before layer_2
                layers = row["signals"]
                signals[row["step"]] = [layers[f"layer_{i}"] for i in range(len(layers))]
        return cls(header, columns, signals)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of the run in the file."""
        yield self.header
        for name, column in self.columns.items():
            yield {"column": name, "steps": list(column), "values": list(column.values())}
        by_signal: dict[tuple[str, int], dict[int, list[Number]]] = {}
        for step, layers in self.signals.items():
            for i, layer in enumerate(layers):
                for name, values in layer.items():
                    by_signal.setdefault((name, i), {})[step] = values
        for (name, i), values_by_step in by_signal.items():
            heads = [list(head) for head in zip(*values_by_step.values(), strict=True)]
            yield {"signal": name, "layer": i, "steps": list(values_by_step), "heads": heads}

    @classmethod
    def from_lines(cls, header: dict[str, Any], lines: Iterable[Mapping[str, Any]]) -> Self:
        """Makes a run from its header line and its other lines in the file."""
        columns: dict[str, dict[int, Number]] = {}
        signals: dict[int, dict[int, Layer]] = {}
        for line in lines:
            if "column" in line:
                columns[line["column"]] = dict(zip(line["steps"], line["values"], strict=True))
                continue
            by_step = zip(*line["heads"], strict=True)
            for step, values in zip(line["steps"], by_step, strict=True):
                layer = signals.setdefault(step, {}).setdefault(line["layer"], {})
                layer[line["signal"]] = list(values)
        layers = 1 + max((i for by_layer in signals.values() for i in by_layer), default=-1)
        return cls(
            header,
            columns,
            {step: [signals[step].get(i, {}) for i in range(layers)] for step in sorted(signals)},
        )


def write(directory: Path, runs: Iterable[StoredRun]) -> Path:
    """Writes the records of an experiment, sorted by arm and seed, and returns their path.

    Raises:
      DiskError: the file cannot be written.
    """
    ordered = sorted(runs, key=lambda run: (run.header["arm"], run.header.get("seed") or 0))
    lines = (json.dumps(line, separators=(",", ":")) for run in ordered for line in run.lines())
    text = "".join(f"{line}\n" for line in lines)
    path = directory / RECORDS
    with writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _compressed(text.encode()))
    return path


def _compressed(text: bytes) -> bytes:
    """Compresses a text as `xz -9e` does, but with a window no larger than necessary.

    With a window of 64 MiB, `xz -9e` takes 0.7 GB of memory even for the smallest text.
    """
    window = min(max(len(text), 4096), 2**26)
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}
    return lzma.compress(text, filters=[best])


def read(directory: Path) -> list[StoredRun]:
    """Returns the runs of the records file in a directory; none if there is no file.

    Raises:
      RecordError: the file is damaged.
    """
    path = directory / RECORDS
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
        starts = [i for i, line in enumerate(lines) if "arm" in line]
        if starts[:1] != [0]:
            raise RecordError(f"{path} does not begin with the header of a run")
        ends = [*starts[1:], len(lines)]
        return [
            StoredRun.from_lines(lines[begin], lines[begin + 1 : end])
            for begin, end in zip(starts, ends, strict=True)
        ]
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path} does not hold records of arms ({error!r})") from error
