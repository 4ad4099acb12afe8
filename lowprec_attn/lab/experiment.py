"""Defines an experiment: one config, and arms that each change a few of its fields.

The definition is a TOML file, so the whole difference between two arms can be read in one place:

    config = "configs/gpt2_bf16.py:full"   # what `train.py --config` takes

    [shared]                               # fields of the config, set in every arm
    steps = 3500

    [arms.flash]                           # fields set in this arm alone
    attention.numerics = "flash"

Every arm runs once for each of `seeds`, and all arms of a seed get the same batches. In the value
of a field, `{seed}` stands for the seed, so that an arm can resume from a run of the same seed.
`positive_control` names the arm that must break, and `negative_control` the arm that must not. If
either does otherwise, the experiment decides nothing. `[runaway]` sets the step at which scores are
judged and the size above which they count (`runs.instability.explosion.RunawayRule`).
"""

import dataclasses
import math
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from lowprec_attn.errors import RunError, unknown_field
from lowprec_attn.files import flatten
from lowprec_attn.runs.instability.explosion import RUNAWAY_RULE, RunawayRule
from lowprec_attn.training.settings import SEEDS

Fields = Mapping[str, str]
"""Config fields by dotted name, with their values in the spelling of flags."""

Control = Literal["positive", "negative"] | None

_KEYS = ("config", "seeds", "positive_control", "negative_control", "runaway", "shared", "arms")
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FLAG = re.compile(r"--config\.([^=]+)=(.*)", re.DOTALL)


class ExperimentError(RunError):
    """A definition of an experiment is unusable; the message names the field."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """The part of an experiment's definition that distinguishes one arm from the others.

    Attributes:
      name: the name of the arm.
      overrides: the fields that the arm sets in addition to the shared ones.
      control: `positive` if the arm must break, `negative` if it must not, else None.
    """

    name: str
    overrides: Fields
    control: Control = None

    @property
    def title(self) -> str:
        """Its `name` field if it sets one, else its overrides: `probe, saved_output=float32`."""
        if "name" in self.overrides:
            return self.overrides["name"]
        words = [
            value if name == "attention.numerics" else f"{name.rpartition('.')[2]}={value}"
            for name, value in self.overrides.items()
            if name != "resume_from"  # a path, which says less than `resume_step`
        ]
        return ", ".join(words) or self.name


PANEL_WIDTH = 30  # characters per line of a panel's title
_PANEL_LINES = 4


def panel_titles(arms: Iterable[Arm]) -> dict[str, str]:
    """Returns by name the texts above the panels of arms: all their titles, or all their names.

    The texts are the names if any title would take more than four lines or would break a word.
    """
    titles = {arm.name: arm.title for arm in arms}
    lines = {name: textwrap.wrap(title, PANEL_WIDTH) for name, title in titles.items()}
    is_long = max(map(len, lines.values()), default=0) > _PANEL_LINES or any(
        len(word) > PANEL_WIDTH for title in titles.values() for word in title.split()
    )
    return {name: name if is_long else "\n".join(wrapped) for name, wrapped in lines.items()}


class Trial(NamedTuple):
    """One run: an arm with a seed. A seed of None stands for the config's own seed."""

    arm: Arm
    seed: int | None

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return self.arm.name if self.seed is None else f"{self.arm.name}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A set of arms over one config.

    Attributes:
      config: the config's file and variant, in the form that `train.py --config` takes.
      shared: the fields that have the same value in every arm.
      arms: the arms in the order in which they start.
      seeds: the seeds with which every arm runs; empty for the config's own seed.
      runaway: the step at which scores are judged, and the size above which they count.

    Raises:
      ExperimentError: a seed is out of range or given twice, or both `seeds` and the field `seed`
        are set.
    """

    config: str
    shared: Fields
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = ()
    runaway: RunawayRule = RUNAWAY_RULE

    def __post_init__(self) -> None:
        in_range = all(0 <= seed < SEEDS for seed in self.seeds)
        if len(set(self.seeds)) < len(self.seeds) or not in_range:
            raise ExperimentError(
                f"seeds must be different whole numbers from 0 to {SEEDS - 1}, "
                f"got {list(self.seeds)}"
            )
        if self.seeds and "seed" in self.shared:
            raise ExperimentError(
                "seed is set in every arm (shared, --config.seed), and seeds as well; give one"
            )
        for arm in self.arms:
            if self.seeds and "seed" in arm.overrides:
                raise ExperimentError(f"arm {arm.name} sets seed, and the file seeds; give one")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All runs, seed by seed, so an interrupted experiment has complete seeds to compare."""
        return tuple(Trial(arm, seed) for seed in self.seeds or (None,) for arm in self.arms)

    def with_flags(self, flags: Iterable[str]) -> Self:
        """Returns a copy with `--config.NAME=VALUE` flags set in every arm.

        Raises:
          ExperimentError: a flag has another form, or an arm overrides its field.
        """
        fields = {}
        for flag in flags:
            match = _FLAG.fullmatch(flag)
            if match is None:
                raise ExperimentError(f"{flag!r} is not of the form --config.NAME=VALUE")
            fields[match[1]] = match[2]
        for arm in self.arms:
            for name in arm.overrides.keys() & fields:
                raise ExperimentError(
                    f"--config.{name} would be the same in every arm, but arm {arm.name} sets it; "
                    "change the definition instead"
                )
        return dataclasses.replace(self, shared={**self.shared, **fields})

    def with_seeds(self, seeds: Iterable[int]) -> Self:
        """Returns a copy with other seeds.

        Raises:
          ExperimentError: a seed is out of range or given twice, or the field `seed` is set.
        """
        return dataclasses.replace(self, seeds=tuple(seeds))

    def select(self, names: Iterable[str]) -> Self:
        """Returns a copy with only the arms of these names, in the order of the definition.

        Raises:
          ExperimentError: there is no arm with one of the names.
        """
        chosen = set(names)
        unknown = chosen - {arm.name for arm in self.arms}
        if unknown:
            known = ", ".join(arm.name for arm in self.arms)
            raise ExperimentError(f"there is no arm {min(unknown)!r}; arms are {known}")
        arms = tuple(arm for arm in self.arms if arm.name in chosen)
        return dataclasses.replace(self, arms=arms)

    def fields(self, trial: Trial) -> Fields:
        """Returns all fields that are set for a run."""
        fields = {**self.shared, **trial.arm.overrides}
        if trial.seed is None:
            return fields
        fields["seed"] = seed = str(trial.seed)
        return {name: value.replace("{seed}", seed) for name, value in fields.items()}

    def arguments(self, trial: Trial) -> list[str]:
        """Returns the arguments of `train.py` for a run, without `--workdir`."""
        set_fields = (f"--config.{name}={value}" for name, value in self.fields(trial).items())
        return [f"--config={self.config}", *set_fields]


def load(path: Path) -> Experiment:
    """Reads an experiment's definition.

    Raises:
      ExperimentError: the file is missing or not TOML, or a field is missing, unknown or wrong.
    """
    try:
        definition = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # RecursionError: too deeply nested tables
        raise ExperimentError(f"{path} is not TOML: {error}") from error
    try:
        return _experiment(definition)
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error


def _experiment(definition: Mapping[str, Any]) -> Experiment:
    """Returns the experiment of a definition; the message of an error does not name the file."""
    unknown = definition.keys() - set(_KEYS)
    if unknown:
        raise ExperimentError(unknown_field(min(unknown), _KEYS))
    config, arms = definition.get("config"), _table(definition, "arms")
    if not isinstance(config, str):
        raise ExperimentError(f"config must name a file, got {config!r}")
    if not arms:
        raise ExperimentError("there are no arms; write [arms.NAME] and what it sets")
    for name in arms:
        if not _ARM_NAME.fullmatch(name):
            raise ExperimentError(
                f"arm {name!r} cannot name a directory; use letters, digits, _ and -"
            )
    controls = _controls(definition)
    shared = _fields(_table(definition, "shared"), "shared")
    defined = tuple(
        Arm(name, _fields(_table(arms, name), f"arms.{name}"), controls.get(name)) for name in arms
    )
    return Experiment(config, shared, defined, _seeds(definition), _runaway(definition))


def _controls(definition: Mapping[str, Any]) -> dict[str, Control]:
    """Returns the controls by the names of their arms."""
    controls: dict[str, Control] = {}
    kinds: tuple[Literal["positive", "negative"], ...] = ("positive", "negative")
    for control in kinds:
        name = definition.get(f"{control}_control")
        if name is None:
            continue
        if not isinstance(name, str) or name not in definition["arms"]:
            known = ", ".join(definition["arms"])
            raise ExperimentError(f"{control}_control must be an arm ({known}), got {name!r}")
        if name in controls:
            raise ExperimentError(f"arm {name} cannot be both controls")
        controls[name] = control
    return controls


def _seeds(definition: Mapping[str, Any]) -> tuple[int, ...]:
    seeds = definition.get("seeds", [])
    # `type` instead of `isinstance`, because a boolean is an int in Python.
    if not isinstance(seeds, list) or any(type(seed) is not int for seed in seeds):
        raise ExperimentError(f"seeds must be a list of whole numbers, got {seeds!r}")
    return tuple(seeds)


def _runaway(definition: Mapping[str, Any]) -> RunawayRule:
    table = _table(definition, "runaway")
    unknown = table.keys() - set(RunawayRule._fields)
    if unknown:
        raise ExperimentError(unknown_field(min(unknown), RunawayRule._fields))
    for name, value in table.items():
        kinds = (int,) if name == "step" else (int, float)
        if type(value) not in kinds or not 0 <= value < math.inf:
            what = "a whole number" if name == "step" else "a number"
            raise ExperimentError(f"runaway.{name} must be {what}, 0 or more, got {value!r}")
    return RunawayRule(**table)


def _table(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = parent.get(name, {})
    if not isinstance(table, Mapping):
        raise ExperimentError(f"{name} must be a table of fields, got {table!r}")
    return table


def _fields(table: Mapping[str, Any], section: str) -> Fields:
    """Returns the fields of a table by dotted name, with their values in the spelling of flags."""
    try:
        # An empty table sets nothing.
        fields = {n: value for n, value in flatten(table) if not isinstance(value, Mapping)}
    except RecursionError as error:
        raise ExperimentError(f"{section} has too many tables in tables") from error
    for name, value in fields.items():
        if not isinstance(value, str | int | float):
            raise ExperimentError(
                f"{section}.{name} must be a text, number or boolean, got {value!r}"
            )
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in fields.items()
    }
