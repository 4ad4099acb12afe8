"""The work directory of an experiment, which holds the files of all its runs.

NAME/           the run directory of an arm, or of an arm with a seed: ARM-seedN
NAME.json       the definition of the run
NAME.log        the output of the run's processes
.lab/           the lock, and compiled programs for continued runs
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.counts import many
from lowprec_attn.errors import RunError
from lowprec_attn.files import lock, read_record, write_json, writing
from lowprec_attn.lab.experiment import Arm, Experiment, Trial
from lowprec_attn.runs import metrics
from lowprec_attn.runs.instability.explosion import RunawayRule, failure_in_words
from lowprec_attn.runs.run_dir import RunDir


class WorkdirError(RunError):
    """A work directory cannot be used."""


class Outcome(NamedTuple):
    """The progress of an arm.

    Attributes:
      finished: whether nothing is left to do. The report is then written too.
      text: the progress in words.
    """

    finished: bool
    text: str


@dataclasses.dataclass(frozen=True)
class ArmRun:
    """The files of one run: an arm with a seed.

    Attributes:
      workdir: the directory of the experiment.
      name: the name of the run; see `experiment.Trial.name`.
    """

    workdir: Path
    name: str

    @property
    def run_dir(self) -> RunDir:
        """The run directory."""
        return RunDir(self.workdir / self.name)

    @property
    def definition(self) -> Path:
        """`NAME.json`."""
        return self.workdir / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """`NAME.log`."""
        return self.workdir / f"{self.name}.log"

    @property
    def trial(self) -> Trial:
        """The arm and seed that `NAME.json` defines."""
        definition = self._definition()
        arm = Arm(
            definition.get("arm") or self.name, definition["overrides"], definition.get("control")
        )
        return Trial(arm, definition.get("seed"))

    @property
    def runaway(self) -> RunawayRule:
        """The runaway rule of its experiment."""
        return RunawayRule(**self._definition().get("runaway", {}))

    @property
    def started(self) -> bool:
        """Whether the trainer has accepted its config."""
        return self.run_dir.config.exists()

    @property
    def steps_done(self) -> int:
        """The number of steps recorded so far."""
        path = self.run_dir.throughput
        records = metrics.read(path) if path.exists() else []
        return records[-1]["step"] + 1 if records else 0

    @property
    def failure(self) -> dict[str, Any] | None:
        """The recorded failure (a value that was not finite, or an explosion), or None."""
        path = self.run_dir.failure
        if not path.exists():
            return None
        failure = dict(read_record(path, step=int, message=str))
        failure.pop("complete", None)
        return failure

    def outcome(self) -> Outcome:
        """Returns the progress: done, not finite (a result too), interrupted, or not started."""
        run_dir, failure = self.run_dir, self.failure
        end = run_dir.summary if failure is None else run_dir.failure
        # Runs of earlier versions did not record `complete`, and count as complete.
        if end.exists() and not read_record(end).get("complete", True):
            return Outcome(False, f"interrupted at its end, after {many(self.steps_done, 'step')}")
        if failure is not None:
            return Outcome(True, failure_in_words(failure))
        if end.exists():
            loss = read_record(end, val_loss=float)["val_loss"]
            return Outcome(True, f"done, validation loss {loss:.3f}")
        if self.started:
            return Outcome(False, f"interrupted after {many(self.steps_done, 'step')}")
        return Outcome(False, "not started yet")

    def define(self, experiment: Experiment, trial: Trial) -> None:
        """Writes `NAME.json`.

        Raises:
          WorkdirError: the arm has taken steps with another definition.
          NotJsonError: its existing definition is damaged.
          DiskError: the file cannot be written.
        """
        wanted = {
            "arm": trial.arm.name,
            "control": trial.arm.control,
            "seed": trial.seed,
            "runaway": experiment.runaway._asdict(),
            "config": experiment.config,
            "shared": dict(experiment.shared),
            "overrides": dict(trial.arm.overrides),
        }
        if self.run_dir.begun and self.definition.exists():
            changed = _changes(self._definition(), wanted)
            if changed:
                raise WorkdirError(
                    f"arm {self.name} in {self.workdir} was started with another definition "
                    f"({changed}); choose another --workdir or remove {self.run_dir.path}"
                )
        with writing(self.definition):
            write_json(self.definition, wanted)

    def _definition(self) -> dict[str, Any]:
        path = self.definition
        definition = read_record(path, config=str, shared=dict, overrides=dict)
        wrong = [n for n, kind in _MAY_HAVE.items() if not isinstance(definition.get(n), kind)]
        wrong += [] if _is_rule(definition.get("runaway", {})) else ["runaway"]
        for name in wrong:
            raise WorkdirError(
                f"{path} is no definition with a {name}: it has {definition[name]!r}; restore it "
                "from a copy, or remove it and repeat `lowprec-attn lab run`"
            )
        return definition


_MAY_HAVE = {"arm": str | None, "control": str | None, "seed": int | None}


def _is_rule(value: Any) -> bool:
    """Whether the value is a dict of fields of a `RunawayRule`, possibly not all of them."""
    if not isinstance(value, dict) or not value.keys() <= RunawayRule._field_defaults.keys():
        return False
    return all(isinstance(number, int | float) for number in value.values())


def arm_runs(workdir: Path) -> list[ArmRun]:
    """Returns the runs that have taken a step, sorted by name.

    Raises:
      WorkdirError: no run has taken a step.
    """
    runs = [ArmRun(workdir, path.stem) for path in sorted(workdir.glob("*.json"))]
    begun = [run for run in runs if run.steps_done]
    if not begun:
        raise WorkdirError(f"{workdir} holds no arm of `lowprec-attn lab run` with a step done")
    return begun


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[int]:
    """Locks the directory against other lab processes; yields the lock's file descriptor.

    A child that inherits the descriptor holds the lock too. Arms that continue after their lab
    process was killed are thus noticed, and no second process is started on their GPU.

    Raises:
      WorkdirError: the directory is in use, or cannot be made.
    """
    try:
        internal(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkdirError(f"cannot use {workdir} as --workdir: {error.strerror}") from error
    file = lock(internal(workdir) / "lock")
    if file is None:
        raise WorkdirError(
            f"{workdir} is in use by another `lab run`, or by arms that go on after one was "
            "killed; wait for them, or stop them with SIGTERM (they save a checkpoint)"
        )
    with file:
        yield file.fileno()


def internal(workdir: Path) -> Path:
    """Returns the directory of internal files; no arm's name can begin with a dot."""
    return workdir / ".lab"


def _changes(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Returns the fields in which two definitions differ, as text; empty if there are none."""
    if theirs["config"] != ours["config"]:
        return f"config: {theirs['config']} -> {ours['config']}"
    a = {**theirs["shared"], **theirs["overrides"]}
    b = {**ours["shared"], **ours["overrides"]}
    return ", ".join(
        f"{name}: {a.get(name, '(absent)')} -> {b.get(name, '(absent)')}"
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    )
