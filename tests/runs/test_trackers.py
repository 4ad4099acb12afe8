"""Copies of metrics for Weights & Biases and MLflow: their packages are stand-ins here."""

import logging
import sys
import threading
import types

import pytest
from tiny import tiny_config, tiny_settings

from lowprec_attn.errors import RunError
from lowprec_attn.runs import metrics, trackers
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.runs.trackers import Trackers
from lowprec_attn.training.config import ConfigError, train_settings
from lowprec_attn.training.run import train

CONFIG = {"seed": 3, "model": {"layers": 2}}
RECORD = {"step": 4, "loss": 2.5, "note": "text", "layer_0": {"score_max": [1.0, 2.0]}}
SCALARS = {"loss": 2.5, "layer_0/score_max/0": 1.0, "layer_0/score_max/1": 2.0}


class WandB(types.ModuleType):
    """Of the package: what `trackers` calls, with the calls kept."""

    Settings = dict

    def __init__(self, mode="offline", logged_in=False):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()
        self.calls, self.mode, self.logged_in = [], mode, logged_in

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self, *, prompt):
        assert not prompt
        return self.logged_in

    def init(self, **options):
        self.calls.append(options)
        return types.SimpleNamespace(
            id=options["id"],
            define_metric=lambda name, step_metric: self.calls.append((name, step_metric)),
            log=self.log,
            finish=lambda: self.calls.append("finish"),
        )

    def log(self, values):
        self.calls.append(values)


@pytest.fixture
def wandb(monkeypatch):
    def install(**options):
        module = WandB(**options)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


class Client:
    """MLflow's, of one store."""

    calls: list
    experiments: dict

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment, **options):
        self.calls.append((experiment, options))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="its-id"))

    def update_run(self, run_id, status):
        self.calls.append((run_id, status))

    def log_batch(self, run_id, metrics=(), params=()):
        self.calls.append((run_id, [*metrics], [*params]))

    def set_terminated(self, run_id):
        self.calls.append((run_id, "terminated"))


@pytest.fixture
def mlflow(monkeypatch):
    client = type("MlflowClient", (Client,), {"calls": [], "experiments": {}})
    package, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    package.MlflowClient = client
    entities.Param = lambda name, value: (name, value)
    entities.Metric = lambda name, value, time, step: (name, value, step)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


@pytest.fixture
def run_dir(tmp_path):
    with RunDir.open(tmp_path / "run", CONFIG) as run_dir:
        yield run_dir


def send(names, run_dir, *records):
    with Trackers(names, run_dir, CONFIG) as copies:
        for record in records:
            copies.add(record)


def test_wandb_gets_records_and_config_and_goes_on_with_its_run(run_dir, wandb):
    module = wandb()
    send(("wandb",), run_dir, RECORD, {"step": 5, "note": "no number"})
    begun, defined, *logged = module.calls
    assert (begun["name"], begun["dir"]) == ("run", str(run_dir.path))
    assert begun["config"] == {"seed": 3, "model.layers": 2}
    assert defined == ("*", "step")
    assert logged == [{"step": 4, **SCALARS}, "finish"]
    module.calls.clear()
    send(("wandb",), run_dir, RECORD)  # as after a kill, from an earlier step
    assert (module.calls[0]["id"], module.calls[0]["resume"]) == (begun["id"], "allow")
    assert module.calls[2:] == logged


def test_mlflow_gets_records_and_config_and_goes_on_with_its_run(run_dir, mlflow):
    send(("mlflow",), run_dir, RECORD)
    (experiment, options), running, parameters, logged, ended = mlflow.calls
    assert running == ("its-id", "RUNNING")
    assert experiment == "7" and options["run_name"] == "run"
    assert parameters == ("its-id", [], [("seed", "3"), ("model.layers", "2")])
    assert logged == ("its-id", [(name, value, 4) for name, value in SCALARS.items()], [])
    assert ended == ("its-id", "terminated")
    mlflow.calls.clear()
    send(("mlflow",), run_dir, RECORD)
    assert mlflow.calls == [running, parameters, logged, ended]


def test_calls_of_mlflow_are_no_larger_than_it_takes(run_dir, mlflow):
    many = {f"field{i}": i for i in range(101)}
    with Trackers(("mlflow",), run_dir, many) as copies:
        copies.add({"step": 0, "of": list(range(1001))})
    sizes = [(len(call[1]), len(call[2])) for call in mlflow.calls[2:-1]]
    assert sizes == [(0, 100), (0, 1), (1000, 0), (1, 0)]


def refuse(*_, **__):
    raise OSError("no route to host\nand a second line")


@pytest.mark.parametrize("method", ["init", "log"])
def test_a_tracker_that_fails_ends_alone_with_one_warning(run_dir, wandb, mlflow, method, caplog):
    module = wandb()
    setattr(module, method, refuse)
    send(("wandb", "mlflow"), run_dir, RECORD, RECORD | {"step": 5})
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "wandb gets no more records: OSError: no route to host; the run" in warning.getMessage()
    assert len(mlflow.calls) == 6  # a run, its state, its parameters, two records, its end


def test_nothing_is_asked_at_a_terminal(run_dir, wandb, caplog):
    module = wandb(mode="online")
    send(("wandb",), run_dir, RECORD)
    assert module.calls == []
    assert "not logged in; `wandb login`, or set WANDB_MODE=offline" in caplog.text
    wandb(mode="online", logged_in=True)
    send(("wandb",), run_dir, RECORD)
    assert run_dir.tracker("wandb").is_file()


def test_a_tracker_that_hangs_does_not_hold_up_the_end(run_dir, wandb, monkeypatch, caplog):
    module, answered = wandb(), threading.Event()
    module.log = lambda values: answered.wait(60)
    monkeypatch.setattr(trackers, "_CLOSING_SECONDS", 0.05)
    send(("wandb",), run_dir, RECORD)
    answered.set()
    assert "wandb has not taken all records in time; the rest is not sent" in caplog.text


def test_a_package_that_is_missing_is_told_before_a_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"loggers=wandb needs the package wandb: pip .*\[wandb\]"):
        train(tiny_settings(loggers="wandb"), {}, None)


def test_names_of_loggers():
    assert tiny_settings().loggers == ()
    assert tiny_settings(loggers="wandb, mlflow").loggers == ("wandb", "mlflow")
    for wrong in ("tensorboard", "wandb,wandb", ""):
        with pytest.raises(ConfigError, match="loggers must be one of wandb, mlflow, or several"):
            tiny_settings(loggers=wrong)


def test_a_run_tells_its_trackers(tmp_path, text, mlflow, monkeypatch):
    monkeypatch.setattr(trackers, "require", lambda names: None)  # a stand-in has no spec
    changes = {"devices": 1, "model__layers": 1, "steps": 1, "diagnostics_every": 0}
    config = tiny_config(loggers="mlflow", data__path=str(text), eval_every=0, **changes)
    assert train(train_settings(config), config, tmp_path / "run") == 0
    written = metrics.read(tmp_path / "run" / "metrics.jsonl")
    losses = [x for call in mlflow.calls[2:-1] for x in call[1] if x[0] == "loss"]
    assert losses == [("loss", r["loss"], r["step"]) for r in written if "loss" in r]


def test_a_run_goes_on_with_other_trackers(tmp_path):
    with RunDir.open(tmp_path, CONFIG) as run_dir, MetricsWriter(run_dir, 0) as writer:
        writer.write(0, {"loss": 2.5})
    with RunDir.open(tmp_path, CONFIG | {"loggers": "wandb"}) as run_dir:
        assert run_dir.begun
    with pytest.raises(RunError, match="with another config"):
        RunDir.open(tmp_path, CONFIG | {"loggers": "wandb", "seed": 4})


def test_metrics_are_handed_on_as_they_are_written(run_dir, wandb):
    module = wandb()
    with (
        Trackers(("wandb",), run_dir, CONFIG) as copies,
        MetricsWriter(run_dir, 0, copies) as writer,
    ):
        writer.write(0, {"loss": 2.5})
        writer.write_throughput(0, seconds=2.0, tokens=500)
    assert module.calls[2:-1] == [
        {"step": 0, "loss": 2.5},
        {"step": 0, "seconds": 2.0, "tokens_per_second": 250.0},
    ]
