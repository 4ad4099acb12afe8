"""Compact records of arms, small enough to be committed: one JSON-lines file each.

The first line says what the run was, where it ran, and whether it exploded. Every other line is a
record of its `metrics.jsonl`: all validation losses, every tenth training loss and the last ten,
and of the signals those named in `SIGNALS`, with four digits, per layer and head. As there, numbers
that are not finite are the texts "nan", "inf" and "-inf".
"""

import dataclasses
import itertools
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from lowprec_attn.errors import RunError
from lowprec_attn.files import read_record, sha256, write_atomically, writing
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.mechanism import mechanism
from lowprec_attn.lab.workdir import ArmRun
from lowprec_attn.runs import metrics, rollbacks
from lowprec_attn.runs.explosion import LossWatch, Runaway, first_runaway
from lowprec_attn.runs.rollbacks import Rollback

SIGNALS = (
    "score_maximum",
    "score_level_rms",
    "score_spread_mean",
    "score_spread_max",
    "repeated_maxima",
    "rounded_to_one",
    "delta_error_mean",
    "delta_error_coherence",
    "delta_error_cumulative",
    "ds_row_sum_mean",
    "ds_row_sum_rms",
    "ds_row_sum_coherence",
    "rounded_ds_row_sum_rms",
    "rounded_ds_row_sum_coherence",
    "p_row_sum_error_mean",
    "p_row_sum_error_rms",
    "vanished_rows",
    "query_gradient_error_relative",
    "query_weight_gradient_exact",
    "query_weight_gradient_error_relative",
    "query_weight_gradient_error_from_scores",
    "query_weight_gradient_error_from_lse",
    "query_weight_gradient_error_from_exponent",
    "query_weight_gradient_error_from_p",
    "query_weight_gradient_error_from_dp",
    "query_weight_gradient_error_from_delta",
    "query_weight_gradient_error_from_ds",
    "query_weight_gradient_error_from_total",
    "query_weight_gradient_error_first_share",
    "outer_product_similarity",
    "outer_product_similarity_across_steps",
    "common_direction_across_steps",
    "query_weight_norm",
)
_REPORTED = ("score_maximum", "query_weight_norm")  # what table and figure are made of
_LOSS_EVERY = 10


class RecordError(RunError):
    """There are no records, or a file does not hold any."""


def write(run: ArmRun, directory: Path, signals: Sequence[str] = SIGNALS) -> Path:
    """Writes the compact record of a run, finished or not; returns its path.

    Args:
      run: the arm.
      directory: of the records.
      signals: which of them to keep.

    Raises:
      RunError: a file of the run is damaged.
      DiskError: the disk refuses.
    """
    run_dir, trial = run.run_dir, run.trial
    lines = list(metrics.read_encoded(run_dir.metrics)) if run_dir.metrics.exists() else []
    losses = {line["step"]: float(line["loss"]) for line in lines if "loss" in line}
    if not losses:
        raise RecordError(f"{run_dir.metrics} holds no step; restore it, or remove {run_dir.path}")
    runaway = first_runaway(largest_scores(_by_step(lines)))
    failure = run.failure
    header = {
        "arm": trial.arm.name,
        "control": trial.arm.control,
        "seed": trial.seed,
        "overrides": trial.arm.overrides,
        "steps": max(losses) + 1,
        "explosion": _explosion(losses, failure),
        "runaway": runaway and runaway._asdict(),
        "held_out": _held_out(lines, failure),
        "config": read_record(run_dir.config),
        "environment": run_dir.starts(),
        "data_order_sha256": sha256(run_dir.data_order),
        "failure": failure,
        "rollbacks": [rollback._asdict() for rollback in rollbacks.read(run_dir.rollbacks)],
    }
    path = directory / f"{run.name}.jsonl"
    kept = [header, *_compact(lines, signals)]
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in kept)
    with writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    return path


def _compact(
    records: Sequence[Mapping[str, Any]], signals: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
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
    """What a report needs of one run.

    Attributes:
      arm: its name and overrides.
      mechanism: that its arithmetic is open to; see `lab.mechanism`.
      seed: of the run.
      steps: that it took.
      step_tokens: that each of them took.
      text_tokens: of the whole training text, None where that is not known; see `text_lengths`.
      explosion: the step at which the loss exploded, or None; see `runs.explosion`.
      runaway: where a layer's scores ran away first, or None.
      losses: of training, by step; not all steps are kept.
      val_losses: by step.
      signals: by step: of each layer, each name of `SIGNALS`, one value per head.
      failure: where a loss was not finite, or the run stopped because it had exploded, or None.
      rollbacks: of the run; all else is of the steps that counted in the end.
      held_out: the step whose signals are of held-out text, all others being of training batches:
        the last of a run of an earlier version; None where all are of training batches.
    """

    arm: Arm
    mechanism: str
    seed: int
    steps: int
    step_tokens: int
    text_tokens: int | None
    explosion: int | None
    runaway: Runaway | None
    losses: Mapping[int, float]
    val_losses: Mapping[int, float]
    signals: Mapping[int, list[Mapping[str, list[float]]]]
    failure: Mapping[str, Any] | None
    rollbacks: Sequence[Rollback] = ()
    held_out: int | None = None

    @classmethod
    def read(cls, path: Path, lengths: Mapping[str, int] = MappingProxyType({})) -> Self:
        """Reads what `write` has written.

        Args:
          path: of the record.
          lengths: of texts; see `text_lengths`.

        Raises:
          RecordError: the file is something else.
        """
        try:
            header, *records = [json.loads(line) for line in path.read_text().splitlines()]
            losses = {r["step"]: float(r["loss"]) for r in records if "loss" in r}
            signals = _by_step(records)
            config = header["config"]
            # Records of earlier versions say neither; then what they kept has to do.
            if "explosion" not in header:
                header["explosion"] = _explosion(losses, header["failure"])
                runaway = first_runaway(largest_scores(signals))
                header["runaway"] = runaway and runaway._asdict()
            if "held_out" not in header:
                header["held_out"] = _held_out(records, header["failure"])
            return cls(
                arm=Arm(header["arm"], header["overrides"], header.get("control")),
                mechanism=mechanism(config),
                seed=config["seed"],
                steps=header.get("steps", max(losses, default=-1) + 1),
                step_tokens=config["batch_size"] * config["model"]["context"],
                text_tokens=lengths.get(config.get("text_sha256", {}).get("train")),
                explosion=header["explosion"],
                runaway=header["runaway"] and Runaway(**header["runaway"]),
                losses=losses,
                val_losses={r["step"]: float(r["val_loss"]) for r in records if "val_loss" in r},
                signals=signals,
                failure=header["failure"],
                rollbacks=[Rollback(**fields) for fields in header.get("rollbacks", ())],
                held_out=header["held_out"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"{path} is not the record of an arm ({error!r})") from error

    def largest(self, name: str, step: int, layer: int) -> float:
        """The largest value over the heads of a layer (NaN if one is)."""
        return _largest(self.signals[step][layer][name])


def _largest(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))


def largest_scores(
    signals: Mapping[int, Sequence[Mapping[str, list[float]]]],
) -> dict[int, list[float]]:
    """By step, the largest |score| of every layer; empty where it was not kept."""
    return {
        step: [_largest(layer["score_maximum"]) for layer in layers]
        for step, layers in signals.items()
        if all("score_maximum" in layer for layer in layers)
    }


def _explosion(losses: Mapping[int, float], failure: Mapping[str, Any] | None) -> int | None:
    """Where the loss exploded; a step that was withheld, whatever was not finite, is one too."""
    explosion = LossWatch(losses.items()).explosion
    if explosion is None and failure is not None:
        return int(failure.get("explosion", failure["step"]))
    return explosion


def _held_out(
    records: Sequence[Mapping[str, Any]], failure: Mapping[str, Any] | None
) -> int | None:
    """The end of a run of an earlier version, which measured that on held-out text.

    It is the one step with signals beyond all losses. A run that failed was measured on its last
    batch. Later versions record the signal named here, and measure the end on a training batch.
    """
    last = max((record["step"] for record in records if "loss" in record), default=-1)
    for record in records:
        if failure is None and record["step"] > last and "signals" in record:
            layers = record["signals"].values()
            return None if any("delta_error_cumulative" in s for s in layers) else record["step"]
    return None


def _by_step(
    records: Sequence[Mapping[str, Any]],
) -> dict[int, list[Mapping[str, list[float]]]]:
    return {r["step"]: _layers(r["signals"]) for r in records if "signals" in r}


def _layers(signals: Mapping[str, Mapping[str, list[Any]]]) -> list[Mapping[str, list[float]]]:
    """By number: `metrics.jsonl` has layer_10 before layer_2."""
    return [
        {name: [float(value) for value in values] for name, values in signals[key].items()}
        for key in (f"layer_{i}" for i in range(len(signals)))
    ]


def text_lengths(directory: Path) -> dict[str, int]:
    """Tokens by the SHA-256 of a training text, from the nearest `texts.toml`: here or above.

    A record says which text a run read and not how long it is.

    Raises:
      RecordError: the file is damaged.
    """
    for place in (directory.absolute(), *directory.absolute().parents):
        path = place / "texts.toml"
        if path.is_file():
            try:
                return tomllib.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise RecordError(f"{path} is not TOML: {error}") from error
    return {}


def tokens_read(records: Iterable[ArmRecord]) -> str:
    """A sentence: how many tokens the longest run took, and how many epochs that is."""
    steps: dict[tuple[int, int | None], int] = {}
    for record in records:
        kind = (record.step_tokens, record.text_tokens)
        steps[kind] = max(steps.get(kind, 0), record.steps)
    texts = []
    for (step_tokens, text_tokens), longest in steps.items():
        tokens = longest * step_tokens
        epochs = "" if text_tokens is None else f" or {tokens / text_tokens:.2g} epochs"
        texts.append(
            f"{step_tokens:,} tokens a step: {tokens / 1e6:.3g} million{epochs} in the "
            f"{longest:,} steps of the longest run"
        )
    return "; ".join(texts) + "."


def paths(directory: Path) -> list[Path]:
    """The files of records in a directory."""
    return sorted(directory.glob("*.jsonl"))


def read_all(directory: Path) -> list[ArmRecord]:
    """All records of a directory, by name: of an arm, those of its seeds in their order.

    Raises:
      RecordError: there are none, two are of one arm and seed, or a file is something else or has
        not the signals that a report needs.
    """
    lengths = text_lengths(directory)
    records = [ArmRecord.read(path, lengths) for path in paths(directory)]
    records.sort(key=lambda record: (record.arm.name, record.seed))
    if not records:
        raise RecordError(f"{directory} holds no records of arms (*.jsonl)")
    for record in records:
        if not record.signals:
            raise RecordError(f"arm {record.arm.name} has no signals: diagnostics_every was 0")
        kept = set.intersection(
            *(set(layer) for layers in record.signals.values() for layer in layers)
        )
        if lacking := [name for name in _REPORTED if name not in kept]:
            raise RecordError(
                f"arm {record.arm.name} has no {' and no '.join(lacking)}: a report needs them; "
                "`lab collect --signals` left them out"
            )
    for a, b in itertools.pairwise(records):
        if (a.arm.name, a.seed) == (b.arm.name, b.seed):
            raise RecordError(f"{directory} holds two records of arm {a.arm.name}, seed {a.seed}")
    return records


def of_seeds(records: Sequence[ArmRecord], seeds: Collection[int]) -> list[ArmRecord]:
    """The records of some seeds.

    Raises:
      RecordError: a seed has none.
    """
    known = sorted({record.seed for record in records})
    for seed in seeds:
        if seed not in known:
            listed = ", ".join(map(str, known))
            raise RecordError(f"there is no record of seed {seed}; seeds are {listed}")
    return [record for record in records if record.seed in seeds]


def with_control(
    records: Sequence[ArmRecord], control: Literal["positive", "negative"], name: str | None
) -> list[ArmRecord]:
    """The records, with the arm of a name as a control (None: as they are).

    Raises:
      RecordError: there is no such arm.
    """
    if name is None:
        return list(records)
    if name not in {record.arm.name for record in records}:
        known = ", ".join(sorted({record.arm.name for record in records}))
        raise RecordError(f"there is no arm {name!r}; arms are {known}")

    def role(arm: Arm) -> Arm:
        was = None if arm.control == control else arm.control
        return dataclasses.replace(arm, control=control if arm.name == name else was)

    return [dataclasses.replace(record, arm=role(record.arm)) for record in records]
