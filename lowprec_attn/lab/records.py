"""Reads the records of an experiment's runs in the form that reports need."""

import dataclasses
import itertools
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from lowprec_attn.counts import many
from lowprec_attn.lab import RECORDS, archive
from lowprec_attn.lab.archive import RecordError, StoredRun
from lowprec_attn.lab.experiment import Arm, Trial
from lowprec_attn.lab.report.mechanism import mechanism
from lowprec_attn.runs.instability.explosion import (
    RUNAWAY_HEADS,
    RUNAWAY_RULE,
    LargeHeads,
    RunawayRule,
    large_heads,
)
from lowprec_attn.runs.instability.rollbacks import Rollback


@dataclasses.dataclass(frozen=True)
class ArmRecord:
    """The part of a run's records that reports need.

    Attributes:
      arm: the arm of the run: its name, overrides and control.
      mechanism: the mechanism to which the arithmetic is open; see `lab.report.mechanism`.
      seed: the seed of the run.
      steps: the number of steps that the run took.
      step_tokens: the number of tokens in a step.
      text_tokens: the number of tokens in the whole training text, or None if it is unknown; see
        `text_lengths`.
      explosion: the step at which the loss exploded, or None; see `runs.instability.explosion`.
      runaway_rule: the step at which scores are judged, and the size above which they count.
      losses: the training losses by step; not all steps are kept.
      val_losses: the validation losses by step.
      gradient_norms: the gradient norms by step, before clipping; not all steps are kept.
      warmup_steps: the warm-up steps of the learning rate.
      names_seed: whether its experiment has seeds, so that the name of its directory has the seed.
      signals: by step and layer, the signals of `collection.SIGNALS` by name, one value per head.
      failure: the step and message of the value that was not finite, or of the explosion, that
        ended the run; None if neither did.
      rollbacks: the rollbacks of the run. All other attributes describe only the steps that were
        not undone.
      held_out: the step whose signals were measured on held-out text, which is the last step of a
        run of an earlier version. None if all were measured on training batches.
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
    names_seed: bool = True

    @classmethod
    def of(cls, run: StoredRun, lengths: Mapping[str, int], place: Path) -> Self:
        """Makes the record of a run from its stored form.

        Args:
          run: the stored run.
          lengths: the lengths of texts; see `text_lengths`.
          place: the directory of the records, for error messages.

        Raises:
          RecordError: the stored run lacks a field, or a field is invalid.
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
                names_seed=header.get("seed") is not None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{place} does not hold the record of an arm ({error!r})") from error

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return Trial(self.arm, self.seed if self.names_seed else None).name

    @property
    def not_finite(self) -> int | None:
        """The step at which the run ended because a value was not finite, or None."""
        if self.failure is None or "explosion" in self.failure:
            return None
        return int(self.failure["step"])

    @property
    def broke(self) -> int | None:
        """The step at which the run exploded, else at which a value was not finite, else None."""
        return self.not_finite if self.explosion is None else self.explosion

    @property
    def held(self) -> bool:
        """Whether the run neither exploded nor ended with a value that was not finite."""
        return self.broke is None

    @property
    def large_heads(self) -> LargeHeads | None:
        """The count of heads with large scores at the judged step.

        It is None if the run ended or broke before it recorded signals at that step.
        """
        scores = {
            step: [layer["score_maximum"] for layer in layers]
            for step, layers in self.signals.items()
        }
        found = large_heads(scores, self.runaway_rule)
        is_late = found and self.broke is not None and found.step >= self.broke
        return None if is_late else found

    def largest(self, name: str, step: int, layer: int) -> float:
        """Returns the largest value over the heads of a layer (NaN if one is NaN)."""
        return _largest(self.signals[step][layer][name])


def _largest(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))


def largest_scores(
    signals: Mapping[int, Sequence[Mapping[str, list[float]]]],
) -> dict[int, list[float]]:
    """Returns by step the largest |score| of every layer."""
    return {
        step: [_largest(layer["score_maximum"]) for layer in layers]
        for step, layers in signals.items()
    }


def ran_away(records: Iterable[ArmRecord]) -> str:
    """Returns how many of the judged runs ran away, as `2 of 3`; `–` if none was judged."""
    judged = [large for record in records if (large := record.large_heads)]
    return f"{sum(large.ran_away for large in judged)} of {len(judged)}" if judged else "–"


def runaway(rules: Iterable[RunawayRule]) -> str:
    """Says in words what the rules call a runaway."""
    limits = " or ".join(f"{rule.score:g} at step {rule.step:,}" for rule in sorted(set(rules)))
    return (
        f"Runaway: {RUNAWAY_HEADS} heads or more, of all layers, have a largest |score| above "
        f"{limits}, or at the first recorded step after it"
    )


def _finite_or_not(column: Mapping[int, Any]) -> dict[int, float]:
    return {step: float(value) for step, value in column.items()}


def text_lengths(directory: Path) -> dict[str, int]:
    """Returns the number of tokens of training texts, by the SHA-256 of the text.

    The numbers are read from `texts.toml` in the directory or its nearest parent that has one,
    because a run's record names the text but not its length.

    Raises:
      RecordError: the file is damaged.
    """
    places = (directory.absolute(), *directory.absolute().parents)
    paths = [place / "texts.toml" for place in places]
    path = next((path for path in paths if path.is_file()), paths[0])
    lengths = read_toml(path)
    for name, length in lengths.items():
        if type(length) is not int or length < 1:
            raise RecordError(
                f"{path}: {name} must be a number of tokens, 1 or more, got {length!r}"
            )
    return lengths


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file beside records; empty if there is no file.

    Raises:
      RecordError: the file is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise RecordError(f"{path} is not TOML: {error}") from error


def tokens_read(records: Iterable[ArmRecord]) -> str:
    """Returns a sentence on how many tokens and epochs the longest runs took."""
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
    """Returns all records of a directory, sorted by the name of the arm and then by seed.

    Raises:
      RecordError: there are no records, a record has no signals, two records have the same arm and
        seed, or a file is damaged.
    """
    lengths = text_lengths(directory)
    records = [ArmRecord.of(run, lengths, directory) for run in archive.read(directory)]
    records.sort(key=lambda record: (record.arm.name, record.seed))
    if not records:
        raise RecordError(f"{directory} holds no records of arms ({RECORDS})")
    for record in records:
        if not record.signals:
            raise RecordError(f"arm {record.arm.name} has no signals: diagnostics_every was 0")
    for a, b in itertools.pairwise(records):
        if (a.arm.name, a.seed) == (b.arm.name, b.seed):
            raise RecordError(f"{directory} holds two records of arm {a.arm.name}, seed {a.seed}")
    return records


def of_seeds(records: Sequence[ArmRecord], seeds: Collection[int]) -> list[ArmRecord]:
    """Returns the records of some seeds.

    Raises:
      RecordError: a seed has no record.
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
    """Returns the records with the named arm as the control; unchanged if the name is None.

    Raises:
      RecordError: there is no arm with this name.
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
