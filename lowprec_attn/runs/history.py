"""Reads everything that a run has recorded so far from its directory."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lowprec_attn.errors import RunError
from lowprec_attn.files import read_record
from lowprec_attn.runs import metrics
from lowprec_attn.runs.earlier import renamed
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.instability.incidents import Incident, incidents
from lowprec_attn.runs.instability.rollbacks import Rollback
from lowprec_attn.runs.run_dir import RunDir

Layer = Mapping[str, Sequence[float]]
"""The signals of one layer from `attention_signals`: by name, one number per head."""


class HistoryError(RunError):
    """A directory is not a run directory, or one of its records is damaged."""


@dataclasses.dataclass(frozen=True)
class History:
    """The records of a run, finished or not; NaN and infinities are floats.

    Attributes:
      path: the run directory.
      config: the content of `config.json`, with the fields of this version.
      starts: one `environment.describe()` per start.
      losses: the training loss by step, nats per token.
      val_losses: the validation loss by step, nats per token.
      signals: by step, the signals of every layer.
      rates: tokens per second by step.
      summary: the summary of a run that has ended, with `val_loss` and `unigram_loss`; else empty.
      failure: the step and message of the first value that was not finite, or of the explosion
        that stopped the run; else empty.
      incidents: warnings, spikes, rollbacks and divergences, in the order of their steps.
      rollbacks: the rollbacks of the run to an earlier step.
      abandoned: for each rollback, the training losses by step that it has undone.
    """

    path: Path
    config: Mapping[str, Any]
    starts: Sequence[Mapping[str, Any]]
    losses: Mapping[int, float]
    val_losses: Mapping[int, float]
    signals: Mapping[int, Sequence[Layer]]
    rates: Mapping[int, float]
    summary: Mapping[str, Any]
    failure: Mapping[str, Any]
    incidents: Sequence[Incident] = ()
    rollbacks: Sequence[Rollback] = ()
    abandoned: Sequence[Mapping[int, float]] = ()

    @classmethod
    def read(cls, run_dir: RunDir) -> Self:
        """Reads a run directory, even while the run is writing it.

        Raises:
          HistoryError: the path is not a run directory, or no run wrote its metrics.
          RunError, OSError: another record of the run cannot be read.
        """
        if not run_dir.metrics.exists():
            raise HistoryError(f"{run_dir.path} is not a run directory: it has no metrics.jsonl")
        records = metrics.read(run_dir.metrics)
        went_back = rollbacks.read(run_dir.rollbacks)
        numbers = range(1, len(went_back) + 1)  # files of rollbacks that were forgotten may remain
        kept = (run_dir.abandoned / f"{number}.jsonl" for number in numbers)
        undone = [metrics.read(path) for path in kept if path.exists()]
        timings = metrics.read(run_dir.throughput) if run_dir.throughput.exists() else []
        try:
            return cls(
                path=run_dir.path,
                config=load_config(run_dir.config),
                starts=run_dir.starts(),
                losses=_series(records, "loss"),
                val_losses=_series(records, "val_loss"),
                signals={r["step"]: _layers(r["signals"]) for r in records if "signals" in r},
                rates=_series(timings, "tokens_per_second"),
                summary=_load(run_dir.summary, val_loss=float, unigram_loss=float),
                failure=_load(run_dir.failure, step=int, message=str),
                incidents=incidents(records, went_back),
                rollbacks=went_back,
                abandoned=[_series(losses, "loss") for losses in undone],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HistoryError(
                f"{run_dir.path} holds metrics that no run wrote ({error!r}); restore "
                "metrics.jsonl and throughput.jsonl from a copy"
            ) from error

    @property
    def steps(self) -> int:
        """The number of steps up to the last one, with those of a run that it was resumed from."""
        return max(self.losses, default=-1) + 1

    @property
    def own_steps(self) -> int:
        """The number of steps that the run itself has taken."""
        return self.steps - min(self.losses, default=0)

    @property
    def layers(self) -> int:
        """The number of layers that have signals."""
        return max(map(len, self.signals.values()), default=0)

    @property
    def ended(self) -> bool:
        """Whether the run has ended, with a summary or with a failure."""
        return bool(self.summary or self.failure)


def _series(records: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    return {record["step"]: float(record[name]) for record in records if name in record}


def _layers(signals: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Layer]:
    """Returns the layers by number; `metrics.jsonl` has layer_10 before layer_2."""
    return [
        {name: [float(value) for value in values] for name, values in signals[key].items()}
        for key in (f"layer_{i}" for i in range(len(signals)))
    ]


def load_config(path: Path) -> dict[str, Any]:
    """Returns the config of a run with the fields of this version; empty if there is no file yet.

    Raises:
      RunError, OSError: the file holds no config, or cannot be read.
    """
    config = renamed(_load(path))
    for name in ("attention", "model", "optimizer", "data"):
        if not isinstance(config.get(name, {}), dict):
            raise HistoryError(f"{path} has {config[name]!r} as {name}; restore it from a copy")
    return config


def _load(path: Path, **fields: type) -> dict[str, Any]:
    return read_record(path, **fields) if path.exists() else {}
