"""The run directory: the names of one training run's files, and the lock that guards them."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

from lowprec_attn import hosts
from lowprec_attn.errors import RunError
from lowprec_attn.files import (
    Fingerprint,
    Fingerprinter,
    NotJsonError,
    explained,
    flatten,
    is_temporary,
    lock,
    make_directory,
    read_json,
    write_json,
)
from lowprec_attn.runs import environment
from lowprec_attn.runs.earlier import renamed
from lowprec_attn.runs.manifest import DamagedError, Manifest

# Files that an interrupted creation may leave. config.json is written last.
_CREATED_BEFORE_CONFIG = {"run.lock", "environment.json"}
# Files and directories that earlier versions wrote.
_OF_EARLIER_VERSIONS = {"checkpointed.json", "report.png", "wandb", "wandb.json", "mlflow.json"}
_CHANGES_SHOWN = 4
_ABSENT = "(absent)"


class RunDirError(RunError):
    """A run directory cannot be used."""


class RunDir:
    """The paths inside a run directory. `RunDir.open` also creates and locks the directory.

    The constructor does not touch the disk, so a report can read a run while it trains.

    Attributes:
      path: the directory itself.
      config: `config.json`, the run's config as given to `open`.
      environment: `environment.json`, a list with one `environment.describe()` per start.
      data_order: `data_order.txt`, the start indices of every step's batch.
      metrics: `metrics.jsonl`, the metrics that are the same in every repetition of the run.
      throughput: `throughput.jsonl`, timings.
      tensorboard: the directory of TensorBoard events.
      checkpoints: the directory of checkpoints.
      page: `report.html`.
      summary: `summary.json`, the losses at the end. `summary` and `failure` are written before the
        report and, marked as complete, again after it; see `end`.
      failure: `failure.json`, the step and place of the first value that was not finite, or the
        step of an explosion that stopped the run.
      origin: `resumed_from.json`, the run from whose checkpoint this run started.
      rollbacks: `rollbacks.jsonl`, the rollbacks of the run to an earlier step.
      abandoned: the directory of the metrics that rollbacks have undone: `1.jsonl` for the first
        rollback, and so on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.data_order = self.path / "data_order.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.throughput = self.path / "throughput.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.page = self.path / "report.html"
        self.summary = self.path / "summary.json"
        self.failure = self.path / "failure.json"
        self.origin = self.path / "resumed_from.json"
        self.rollbacks = self.path / "rollbacks.jsonl"
        self.abandoned = self.path / "abandoned"
        self._lock: IO[bytes] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> Self:
        """Creates a run directory, or reopens that of an interrupted run with the same config.

        If a creation was killed at any instant, the next call completes it. If the directory's run
        has not recorded a step, the new run takes it over, whatever its config. The directory stays
        locked until `close`, or until the process ends in any way.

        In a run of several processes the first one does all this. The others fail if it fails, or
        if they do not see the directory.

        Args:
          path: the directory. Missing parents are created.
          config: everything that defines the run, in values that JSON can represent.

        Raises:
          RunDirError: `path` holds other files, belongs to another config, is in use by another
            process, or cannot be written.
        """
        run_dir = cls(path)
        hosts.from_first(lambda: run_dir._create(config))
        hosts.require_everywhere(
            run_dir.config.exists(),
            f"does not see the run directory {run_dir.path}; choose a --workdir on a file system "
            "that all processes share",
        )
        return run_dir

    def _create(self, config: Mapping[str, Any]) -> None:
        # The config in the form in which it is read back: tuples become lists, keys become strings.
        config = json.loads(json.dumps(config))
        with self._explain_errors():
            make_directory(self.path)
            self._refuse_foreign_files()
            try:
                self._acquire_lock()
                self._record_start(config)
            except BaseException:
                self.close()
                raise

    def write_json(self, path: Path, value: Any) -> None:
        """Writes or replaces one of the JSON files atomically.

        Raises:
          RunDirError: the disk is full or not writable.
        """
        with self._explain_errors():
            write_json(path, value)

    def end(self, path: Path, record: Mapping[str, Any], write_report: Callable[[], None]) -> None:
        """Writes a record, then the report, and then the record again, marked as complete.

        Args:
          path: `summary` or `failure`.
          record: the record to write there.
          write_report: writes the report.

        Raises:
          RunError: the disk is full or not writable.
        """
        self.write_json(path, {**record, "complete": False})
        write_report()
        self.write_json(path, {**record, "complete": True})

    def require_no_checkpoint_lost(self) -> None:
        """Checks that a run without a checkpoint has no records, which it could not continue.

        A run saves a checkpoint before its first record. So even after a kill, records without a
        checkpoint mean that the checkpoints were lost.

        Raises:
          RunDirError: the run has records.
        """
        if self.begun:
            dangling = self.checkpoints.is_symlink() and not self.checkpoints.exists()
            why = f"{self.checkpoints} is a link to nothing" if dangling else "no checkpoint"
            raise RunDirError(
                f"{self.path} has the records of a run, and {why}, so it cannot go on, and the "
                "records stay as they are. Restore the checkpoints from a copy. Or choose another "
                "--workdir: to start anew, or with --config.resume_from=RUN from the checkpoint of "
                "another run"
            )

    def require_records(self, step: int, records: Mapping[str, Fingerprint]) -> None:
        """Checks that the run's files still begin with the bytes that a checkpoint vouches for.

        Args:
          step: the step of the checkpoint.
          records: by name, the fingerprints of the files as they were before that step.

        Raises:
          RunDirError: a file is missing, too short or altered.
        """
        for name, expected in records.items():
            path = self.path / name
            try:
                with path.open("rb") as file:
                    data = file.read(expected.size)
            except OSError as error:
                problem = f"cannot be read ({error.strerror or error})"
            else:
                if Fingerprinter(data).fingerprint == expected:
                    continue
                problem = "has been altered"
                if len(data) < expected.size:
                    problem = f"has been cut to {len(data)} of {expected.size} bytes"
            raise RunDirError(
                f"{path}, which the run had written before checkpoint {step}, {problem}; restore "
                f"it from a copy, or remove {self.checkpoints}/{step:08d}.json to repeat the steps "
                "since the checkpoint before"
            )

    def changes_from(self, other: Self) -> dict[str, tuple[str, str]]:
        """Returns the config fields that differ from another run's, as `{name: (theirs, ours)}`.

        The values are JSON texts, or `(absent)`.

        Raises:
          RunDirError: a config cannot be read.
        """
        with other._explain_errors():
            mend = "restore it from a copy, or resume from another run"
            theirs, ours = (_read_as(dict, run.config, mend) for run in (other, self))
            return _differences(theirs, ours)

    @property
    def begun(self) -> bool:
        """Whether a step of the run is recorded, in its files or in a checkpoint's manifest."""
        recorded = (path for path in (self.metrics, self.throughput) if path.exists())
        return any(path.stat().st_size for path in recorded) or not all(
            map(self._is_of_the_start, self.checkpoints.glob("*.json"))
        )

    def _is_of_the_start(self, manifest: Path) -> bool:
        """Whether a manifest shows that its checkpoint was saved before the first record."""
        try:
            records = Manifest.read(manifest).records
        except DamagedError:
            return False
        return self.metrics.name in records and records[self.metrics.name].size == 0

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _explain_errors(self) -> contextlib.AbstractContextManager[None]:
        action = f"use {self.path} as a run directory"
        return explained(RunDirError, action, "choose another --workdir")

    def _refuse_foreign_files(self) -> None:
        if self.config.exists():
            return
        names = {e.name for e in self.path.iterdir() if not is_temporary(e.name)}
        foreign = names - _CREATED_BEFORE_CONFIG
        if {self.environment.name, "run.lock"} <= names:
            # A run's own files exist without config.json if that file was damaged and the user
            # removed it.
            paths = (path for path in vars(self).values() if isinstance(path, Path))
            foreign -= {path.name for path in paths if path.parent == self.path}
            foreign -= _OF_EARLIER_VERSIONS
        if foreign:
            raise RunDirError(
                f"{self.path} is not a run directory and not empty (it holds {min(foreign)}); "
                "choose another --workdir"
            )

    def _acquire_lock(self) -> None:
        self._lock = lock(self.path / "run.lock")
        if self._lock is None:
            raise RunDirError(
                f"{self.path} is in use by another process; wait until that run ends or "
                "choose another --workdir"
            )

    def _record_start(self, config: Mapping[str, Any]) -> None:
        if self.begun and self.config.exists():
            self._refuse_other_config(config)
        starts = [] if self._taken_over(config) else self.starts()
        write_json(self.environment, [*starts, environment.describe()])
        if not self.config.exists():
            write_json(self.config, config)

    def _taken_over(self, config: Mapping[str, Any]) -> bool:
        """Takes over the directory from a run with another config that never took a step.

        Removes that run's checkpoints, config and origin. Returns whether there was such a run.
        """
        if self.begun or not self.config.exists():
            return False
        with contextlib.suppress(NotJsonError):
            if read_json(self.config) == config:
                return False
        for manifest in self.checkpoints.glob("*.json"):
            manifest.unlink()  # before the config, which tells whose checkpoints they are
        self.config.unlink()  # without it the directory looks like an interrupted creation
        self.origin.unlink(missing_ok=True)
        return True

    def starts(self) -> list[dict[str, Any]]:
        """Returns what `environment.json` says of every start; empty if there is no such file.

        Raises:
          RunDirError: the file is damaged.
        """
        if not self.environment.exists():
            return []
        mend = "remove it, and the same command goes on (it tells where earlier starts ran)"
        starts: list[Any] = _read_as(list, self.environment, mend)
        if not all(isinstance(start, dict) and environment.is_described(start) for start in starts):
            raise RunDirError(f"{self.environment} holds other records than starts; {mend}")
        return starts

    def _refuse_other_config(self, config: Mapping[str, Any]) -> None:
        mend = (
            "remove it if this command is the run's own, which then goes on; if not, choose "
            "another --workdir"
        )
        differences = _differences(_read_as(dict, self.config, mend), config).items()
        changes = [f"{n}: {a} -> {b}" for n, (a, b) in differences]
        if not changes:
            return
        shown = ", ".join(changes[:_CHANGES_SHOWN])
        more = f" and {len(changes) - _CHANGES_SHOWN} more" if len(changes) > _CHANGES_SHOWN else ""
        raise RunDirError(
            f"{self.path} belongs to a run with another config ({shown}{more}); "
            f"choose another --workdir, or resume with --config.resume_from={self.path}"
        )


def _read_as(kind: type, path: Path, mend: str) -> Any:
    """Returns the content of a JSON file, which must be of type `kind`, dict or list.

    Raises:
      RunDirError: the file holds something else; `mend` ends the message.
    """
    try:
        value = read_json(path)
    except NotJsonError as error:
        raise RunDirError(f"{error}; {mend}") from error
    if not isinstance(value, kind):
        raise RunDirError(f"{path} holds {type(value).__name__}, not {kind.__name__}; {mend}")
    return value


def _differences(theirs: Any, ours: Any) -> dict[str, tuple[str, str]]:
    """Returns the fields in which two configs differ, with both values as JSON."""
    configs = (renamed(theirs), renamed(ours))
    a, b = ({name: json.dumps(value) for name, value in flatten(c)} for c in configs)
    pairs = {name: (a.get(name, _ABSENT), b.get(name, _ABSENT)) for name in {**a, **b}}
    # A field that a later version added does not count as long as it is unset.
    unset = {_ABSENT, "null"}
    return {name: p for name, p in pairs.items() if p[0] != p[1] and set(p) != unset}
