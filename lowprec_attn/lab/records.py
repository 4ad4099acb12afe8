"""Compact records of arms, small enough to be committed: one JSON-lines file each.

The first line says what the arm was and where it ran; every other line is a record of its
`metrics.jsonl`: all validation losses, every tenth training loss and the last ten, and of the
signals those named in `SIGNALS`, with four digits, per layer and head. As there, numbers that are
not finite are the texts "nan", "inf" and "-inf".
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lowprec_attn.errors import RunError
from lowprec_attn.files import complete_lines, read_json, write_atomically, writing
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.workdir import ArmRun

SIGNALS = (
    "score_maximum",
    "repeated_maxima",
    "rounded_to_one",
    "delta_error_mean",
    "delta_error_coherence",
    "ds_row_sum_mean",
    "ds_row_sum_rms",
    "ds_row_sum_coherence",
    "rounded_ds_row_sum_rms",
    "rounded_ds_row_sum_coherence",
    "p_row_sum_error_mean",
    "p_row_sum_error_rms",
    "vanished_rows",
    "query_weight_norm",
)
_LOSS_EVERY = 10


class RecordError(RunError):
    """There are no records, or a file does not hold any."""


def write(run: ArmRun, directory: Path, signals: Sequence[str] = SIGNALS) -> Path:
    """Writes the compact record of an arm, finished or not; returns its path.

    Args:
      run: the arm.
      directory: of the records.
      signals: which of them to keep.

    Raises:
      DiskError: the disk refuses.
    """
    run_dir = run.run_dir
    header = {
        "arm": run.name,
        "overrides": run.arm.overrides,
        "config": read_json(run_dir.config),
        "environment": read_json(run_dir.environment),
        "data_order_sha256": hashlib.sha256(run_dir.data_order.read_bytes()).hexdigest(),
        "failure": read_json(run_dir.failure) if run_dir.failure.exists() else None,
    }
    path = directory / f"{run.name}.jsonl"
    lines = [header, *_compact(run_dir.metrics, signals)]
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    with writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    return path


def _compact(path: Path, signals: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    records = [json.loads(line) for line in complete_lines(path)]
    last = max((record["step"] for record in records if "loss" in record), default=0)
    for record in records:
        if "signals" in record:
            yield {"step": record["step"], "signals": _selected(record["signals"], signals)}
        elif "loss" not in record or not _left_out(record["step"], last):
            yield record


def _left_out(step: int, last: int) -> bool:
    return step % _LOSS_EVERY != 0 and step <= last - _LOSS_EVERY


def _selected(
    layers: Mapping[str, Any], names: Sequence[str]
) -> dict[str, dict[str, list[float | str]]]:
    return {
        layer: {
            name: [_four_digits(value) for value in signals[name]]
            for name in names
            if name in signals  # a run of an older version may lack some
        }
        for layer, signals in layers.items()
    }


def _four_digits(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.4g}")


@dataclasses.dataclass(frozen=True)
class ArmRecord:
    """What a report needs of one arm.

    Attributes:
      arm: its name and overrides.
      val_losses: by step.
      signals: by step: of each layer, each name of `SIGNALS`, one value per head.
      failure: where a loss was not finite, or None.
    """

    arm: Arm
    val_losses: Mapping[int, float]
    signals: Mapping[int, list[Mapping[str, list[float]]]]
    failure: Mapping[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` has written.

        Raises:
          RecordError: the file is something else.
        """
        try:
            header, *records = [json.loads(line) for line in path.read_text().splitlines()]
            return cls(
                arm=Arm(header["arm"], header["overrides"]),
                val_losses={r["step"]: float(r["val_loss"]) for r in records if "val_loss" in r},
                signals={r["step"]: _layers(r["signals"]) for r in records if "signals" in r},
                failure=header["failure"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path} is not the record of an arm ({error!r})") from error

    def largest(self, name: str, step: int, layer: int) -> float:
        """The largest value over the heads of a layer (NaN if one is)."""
        values = self.signals[step][layer][name]
        return next((value for value in values if value != value), max(values))


def _layers(signals: Mapping[str, Mapping[str, list[Any]]]) -> list[Mapping[str, list[float]]]:
    """By number: `metrics.jsonl` has layer_10 before layer_2."""
    return [
        {name: [float(value) for value in values] for name, values in signals[key].items()}
        for key in (f"layer_{i}" for i in range(len(signals)))
    ]


def read_all(directory: Path) -> list[ArmRecord]:
    """All records of a directory, by name.

    Raises:
      RecordError: there are none, or a file is something else, or has no signals.
    """
    records = [ArmRecord.read(path) for path in sorted(directory.glob("*.jsonl"))]
    if not records:
        raise RecordError(f"{directory} holds no records of arms (*.jsonl)")
    for record in records:
        if not record.signals:
            raise RecordError(f"arm {record.arm.name} has no signals: diagnostics_every was 0")
    return records
