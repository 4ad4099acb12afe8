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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

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

_logger = logging.getLogger(__name__)


class _Service(NamedTuple):
    """A run at a service: its id there, what records a step's scalars, and what ends it."""

    id: str
    add: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def _wandb(known: str | None, name: str, config: Mapping[str, Any], path: str) -> _Service:
    import wandb

    # Its own `init` would ask at the terminal, and wait for an answer.
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RunError("not logged in; `wandb login`, or set WANDB_MODE=offline")
    run = wandb.init(
        project=_PROJECT,
        id=known or uuid.uuid4().hex,
        name=name,
        config=dict(config),
        dir=path,
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )
    # W&B drops records of a step before the last one it has, and a resumed run repeats steps.
    run.define_metric("*", step_metric="step")
    return _Service(run.id, lambda step, values: run.log({"step": step, **values}), run.finish)


def _mlflow(known: str | None, name: str, config: Mapping[str, Any], path: str) -> _Service:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()  # not the active run of `mlflow.start_run`, which belongs to a thread
    found = client.get_experiment_by_name(_PROJECT)
    where = found.experiment_id if found else client.create_experiment(_PROJECT)
    run = known or client.create_run(where, run_name=name).info.run_id
    client.update_run(run, status="RUNNING")
    parameters = [Param(field, str(value)) for field, value in config.items()]
    for part in _parts(parameters, _MOST_PARAMETERS):  # the same again are no error
        client.log_batch(run, params=part)

    def add(step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for part in _parts(metrics, _MOST_METRICS):
            client.log_batch(run, metrics=part)

    return _Service(run, add, lambda: client.set_terminated(run))


def _parts(values: list[Any], most: int) -> Iterator[list[Any]]:
    return (values[i : i + most] for i in range(0, len(values), most))


_SERVICES = {"wandb": _wandb, "mlflow": _mlflow}
NAMES = tuple(_SERVICES)


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
        self._workers = [_Worker(name, run_dir, config) for name in chosen]

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
            worker.add(None)
        for worker in self._workers:
            worker.wait(until - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Worker:
    def __init__(self, name: str, run_dir: RunDir, config: Mapping[str, Any]) -> None:
        self._name, self._run_dir, self._config = name, run_dir, config
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"lowprec-attn {name}", daemon=True)
        self._thread.start()

    def add(self, record: Mapping[str, Any] | None) -> None:
        if not self._failed.is_set():  # what nobody takes out would fill the memory
            self._records.put(record)

    def wait(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            _logger.warning(
                "%s has not taken all records in time; the rest is not sent, metrics.jsonl has it",
                self._name,
            )

    def _work(self) -> None:
        try:
            service = self._start()
            while (record := self._records.get()) is not None:
                if values := dict(_scalars(record)):
                    service.add(record["step"], values)
            service.close()
        except Exception as error:  # whatever a service's package raises
            self._failed.set()
            reason = str(error).splitlines() or [""]
            _logger.warning(
                "%s gets no more records: %s: %s; the run goes on, and metrics.jsonl has all",
                self._name,
                type(error).__name__,
                reason[0],
            )

    def _start(self) -> _Service:
        path, run_path = self._run_dir.tracker(self._name), self._run_dir.path
        known = read_record(path, id=str)[_ID] if path.exists() else None
        flat = dict(flatten(self._config))
        service = _SERVICES[self._name](known, run_path.name, flat, str(run_path))
        if service.id != known:
            self._run_dir.write_json(path, {_ID: service.id})
        return service


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """As TensorBoard has them: flat names such as `layer_2/score_max`."""
    for name, value in flatten(record, "/", lists=True):
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)
