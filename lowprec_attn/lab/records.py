"""The runs of an experiment as a report needs them, read from their records."""

import dataclasses
import itertools
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from lowprec_attn.counts import many
from lowprec_attn.lab import archive
from lowprec_attn.lab.archive import RecordError, StoredRun
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.report.mechanism import mechanism
from lowprec_attn.runs.instability.explosion import (
    RUNAWAY_RULE,
    LargeHeads,
    RunawayRule,
    large_heads,
)
from lowprec_attn.runs.instability.rollbacks import Rollback


@dataclasses.dataclass(frozen=True)
class ArmRecord:
    """What a report needs of one run.

    Attributes:
      arm: its name and overrides.
      mechanism: that its arithmetic is open to; see `lab.report.mechanism`.
      seed: of the run.
      steps: that it took.
      step_tokens: that each of them took.
      text_tokens: of the whole training text, None where that is not known; see `text_lengths`.
      explosion: the step at which the loss exploded, or None; see `runs.instability.explosion`.
      runaway_rule: when its scores are judged, and by which size.
      losses: of training, by step; not all steps are kept.
      val_losses: by step.
      gradient_norms: by step, before clipping; not all steps are kept.
      warmup_steps: of the learning rate.
      signals: by step: of each layer, names of `collection.SIGNALS`, one value per head.
      failure: where a value was not finite, or the run stopped because it had exploded, or None.
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
    losses: Mapping[int, float]
    val_losses: Mapping[int, float]
    signals: Mapping[int, list[Mapping[str, list[float]]]]
    failure: Mapping[str, Any] | None
    rollbacks: Sequence[Rollback] = ()
    held_out: int | None = None
    runaway_rule: RunawayRule = RUNAWAY_RULE
    gradient_norms: Mapping[int, float] = dataclasses.field(default_factory=dict)
    warmup_steps: int = 0

    @classmethod
    def of(cls, run: StoredRun, lengths: Mapping[str, int], place: Path) -> Self:
        """What a report needs of what is stored.

        Args:
          run: as it is stored.
          lengths: of texts; see `text_lengths`.
          place: where it is stored, for errors.

        Raises:
          RecordError: it is no run.
        """
        try:
            header, config = run.header, run.header["config"]
            return cls(
                arm=run.arm,
                mechanism=mechanism(config),
                seed=config["seed"],
                steps=header["steps"],
                step_tokens=config["batch_size"] * config["model"]["context"],
                text_tokens=lengths.get(config.get("text_sha256", {}).get("train")),
                explosion=header["explosion"],
                losses=_finite_or_not(run.columns["loss"]),
                val_losses=_finite_or_not(run.columns.get("val_loss", {})),
                signals={
                    step: [
                        {name: [float(x) for x in values] for name, values in layer.items()}
                        for layer in layers
                    ]
                    for step, layers in run.signals.items()
                },
                failure=header["failure"],
                rollbacks=[Rollback(**fields) for fields in header["rollbacks"]],
                held_out=header.get("held_out"),
                runaway_rule=RunawayRule(**header.get("runaway_rule", {})),
                gradient_norms=_finite_or_not(run.columns.get("grad_norm", {})),
                warmup_steps=config["optimizer"]["warmup_steps"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{place} does not hold the record of an arm ({error!r})") from error

    @property
    def not_finite(self) -> int | None:
        """The step that was withheld because a value was not finite, at which the run ended."""
        if self.failure is None or "explosion" in self.failure:
            return None
        return int(self.failure["step"])

    @property
    def broke(self) -> int | None:
        """Where it exploded, else where a value was not finite; None where it held."""
        return self.not_finite if self.explosion is None else self.explosion

    @property
    def held(self) -> bool:
        """Whether the run neither exploded nor ended with a value that was not finite."""
        return self.broke is None

    @property
    def large_heads(self) -> LargeHeads | None:
        """How many heads had large scores when that is judged; None for a run that ended before."""
        scores = {
            step: [layer["score_maximum"] for layer in layers]
            for step, layers in self.signals.items()
        }
        found = large_heads(scores, self.runaway_rule)
        is_late = found and self.broke is not None and found.step >= self.broke
        return None if is_late else found

    def largest(self, name: str, step: int, layer: int) -> float:
        """The largest value over the heads of a layer (NaN if one is)."""
        return _largest(self.signals[step][layer][name])


def _largest(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))


def largest_scores(
    signals: Mapping[int, Sequence[Mapping[str, list[float]]]],
) -> dict[int, list[float]]:
    """By step, the largest |score| of every layer."""
    return {
        step: [_largest(layer["score_maximum"]) for layer in layers]
        for step, layers in signals.items()
    }


def _finite_or_not(column: Mapping[int, Any]) -> dict[int, float]:
    return {step: float(value) for step, value in column.items()}


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
            f"{many(longest, 'step')} of the longest run"
        )
    return "; ".join(texts) + "."


def read_all(directory: Path) -> list[ArmRecord]:
    """All records of a directory, by name: of an arm, those of its seeds in their order.

    Raises:
      RecordError: there are none, two are of one arm and seed, or a file is something else.
    """
    lengths = text_lengths(directory)
    records = [ArmRecord.of(run, lengths, directory) for run in archive.read(directory)]
    records.sort(key=lambda record: (record.arm.name, record.seed))
    if not records:
        raise RecordError(f"{directory} holds no records of arms ({archive.FILE})")
    for record in records:
        if not record.signals:
            raise RecordError(f"arm {record.arm.name} has no signals: diagnostics_every was 0")
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
