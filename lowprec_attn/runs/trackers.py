"""Copies of a run's metrics for Weights & Biases and MLflow, through their own packages.

A tracker is a convenience: `metrics.jsonl` is the record. So a tracker never holds up or stops a
run. Its calls are made in a thread, one after the other, because a server may take minutes to
refuse. The first that fails ends that tracker, with one logged warning.

Where a tracker sends things is its own affair: `WANDB_MODE`, `MLFLOW_TRACKING_URI` and the like.
"""

import importlib.util
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

from lowprec_attn import hosts, installation
from lowprec_attn.errors import RunError
from lowprec_attn.files import flatten, read_record
from lowprec_attn.runs.run_dir import RunDir

_PROJECT = "lowprec-attn"
_ID = "id"
# After the end of a run: for what is still to be sent.
_CLOSING_SECONDS = 60.0
# Of one call of MLflow's API.
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
_LONGEST_PARAMETER = 500

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One service. Its methods are called in one thread, `start` first, `close` last.

    Attributes:
      name: as `config.loggers` has it; also of the package.
    """

    name: str

    def start(self, known: str | None, name: str, config: Mapping[str, Any], path: str) -> str:
        """Begins a run, or goes on with the one that has the id `known`; returns its id.

        Args:
          known: of an earlier start.
          name: of the run.
          config: of the run, by flat names.
          path: the run directory.
        """
        ...

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Records scalars of a step, by flat names."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


class _WandB:
    """Weights & Biases; a start after a kill repeats steps, so `step` is a metric of its own."""

    name = "wandb"

    def start(self, known: str | None, name: str, config: Mapping[str, Any], path: str) -> str:
        import wandb

        # Its own `init` would ask at the terminal, and wait for an answer.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RunError("not logged in; `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=_PROJECT,
            id=known or uuid.uuid4().hex,
            name=name,
            config=dict(config),
            dir=path,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B drops records of a step before the last one it has.
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow, without its notion of an active run, which belongs to a thread."""

    name = "mlflow"

    def start(self, known: str | None, name: str, config: Mapping[str, Any], path: str) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if known is not None:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
            return known
        experiment = self._client.get_experiment_by_name(_PROJECT)
        where = experiment.experiment_id if experiment else self._client.create_experiment(_PROJECT)
        self._id = self._client.create_run(
            where, run_name=name, tags={"run_directory": path}
        ).info.run_id
        parameters = [Param(n, str(value)[:_LONGEST_PARAMETER]) for n, value in config.items()]
        for i in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[i : i + _MOST_PARAMETERS])
        return self._id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for i in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + _MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


_TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (_WandB, _MLflow)}
NAMES = tuple(_TRACKERS)


def require(names: tuple[str, ...]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
      RunError: one is not; the line names the extra.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RunError(
                f"loggers={name} needs the package {name}: {installation.command(name)}; or leave "
                "it out"
            )


class Trackers:
    """All trackers of a run, each with a thread; on the first of several processes alone.

    Example:
      with Trackers(("wandb",), run_dir, config) as trackers:
          trackers.add({"step": 0, "loss": 5.5})
    """

    def __init__(self, names: tuple[str, ...], run_dir: RunDir, config: Mapping[str, Any]) -> None:
        """Starts the threads, which begin a run at each service or go on with this run's.

        Args:
          names: of `NAMES`.
          run_dir: an opened run directory, which keeps the ids of the services' runs.
          config: of the run.
        """
        chosen = names if hosts.is_first() else ()
        self._workers = [_Worker(_TRACKERS[name](), run_dir, config) for name in chosen]

    def add(self, record: Mapping[str, Any]) -> None:
        """Hands a record of a step to every tracker, and returns at once.

        Args:
          record: `step`, and numbers, lists and nested mappings of them; texts are left out.
        """
        for worker in self._workers:
            worker.add(record)

    def close(self) -> None:
        """Returns when all is sent, or after a minute with a warning."""
        until = time.monotonic() + _CLOSING_SECONDS
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait(until - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Worker:
    def __init__(self, tracker: Tracker, run_dir: RunDir, config: Mapping[str, Any]) -> None:
        self._tracker, self._run_dir, self._config = tracker, run_dir, config
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name=f"lowprec-attn {tracker.name}", daemon=True
        )
        self._thread.start()

    def add(self, record: Mapping[str, Any]) -> None:
        if not self._failed.is_set():  # what nobody takes out would fill the memory
            self._records.put(record)

    def end(self) -> None:
        self._records.put(None)

    def wait(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            _logger.warning(
                "%s has not taken all records in time; the rest is not sent, metrics.jsonl has it",
                self._tracker.name,
            )

    def _work(self) -> None:
        try:
            self._start()
            while (record := self._records.get()) is not None:
                values = dict(_scalars(record))
                if values:
                    self._tracker.add(record["step"], values)
            self._tracker.close()
        except Exception as error:  # whatever a service's package raises
            self._failed.set()
            reason = str(error).splitlines() or [""]
            _logger.warning(
                "%s gets no more records: %s: %s; the run goes on, and metrics.jsonl has all",
                self._tracker.name,
                type(error).__name__,
                reason[0],
            )

    def _start(self) -> None:
        path = self._run_dir.tracker(self._tracker.name)
        known = read_record(path, id=str)[_ID] if path.exists() else None
        flat = dict(flatten(self._config))
        found = self._tracker.start(known, self._run_dir.path.name, flat, str(self._run_dir.path))
        if found != known:
            self._run_dir.write_json(path, {_ID: found})


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """As TensorBoard has them: flat names such as `layer_2/score_max`."""
    for name, value in flatten(record, "/", lists=True):
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)
