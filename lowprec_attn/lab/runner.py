"""Runs the arms of an experiment, each in its own process, and reports how they ended."""

import collections
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowprec_attn.data import tokens
from lowprec_attn.errors import RunError
from lowprec_attn.lab import RECORDS
from lowprec_attn.lab.comparison import unwanted_differences
from lowprec_attn.lab.experiment import Experiment, Trial
from lowprec_attn.lab.jobs import Cluster, run_jobs
from lowprec_attn.lab.processes import Event, Slot, Task, run_tasks
from lowprec_attn.lab.workdir import ArmRun, internal, locked
from lowprec_attn.tables import wrapped

# The command `lowprec-attn train`, which works wherever its script is installed.
TRAIN = (sys.executable, "-m", "lowprec_attn", "train")
_PROGRESS_SECONDS = 60.0
_LOG_LINES = 5
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# The exit codes of a stopped trainer: 0 after a checkpoint, −15 before it handled signals.
_STOPPED = (0, -signal.SIGTERM)


def run_arms(
    experiment: Experiment,
    workdir: Path,
    slots: Sequence[Slot],
    command: Sequence[str] | None = None,
    again: str = "the same command",
    cluster: Cluster | None = None,
) -> None:
    """Runs the unfinished arms of an experiment.

    A finished arm is skipped. An arm whose loss was not finite is finished too, because that is a
    result. An interrupted arm continues from its newest checkpoint. A failing arm does not stop the
    others.

    Args:
      experiment: the arms and their seeds.
      workdir: the experiment's directory; see `lab.workdir`.
      slots: the places where arms run; see `lab.processes`. Empty if there is a cluster.
      command: a command that takes the arguments of `lowprec-attn train` and replaces it.
      again: the command that continues the experiment, to be shown at the end.
      cluster: the cluster on which arms run as jobs instead; see `lab.jobs`.

    Raises:
      DataError: a text of an arm cannot be read. No arm has started then.
      RunError: an arm failed, or the arms differ in more than their overrides.
    """
    runs = {trial.name: ArmRun(workdir, trial.name) for trial in experiment.trials}
    with locked(workdir) as lock:
        left = []
        for trial in experiment.trials:
            run = runs[trial.name]
            run.define(experiment, trial)
            if run.outcome().finished:
                _say(f"{run.name}: {run.outcome().text}")
            else:
                left.append(trial)
        _require_texts(experiment, left)
        tasks = [_task(experiment, trial, runs[trial.name], command or TRAIN) for trial in left]
        environment = _environment(workdir)
        if cluster is None:
            _say_places(tasks, slots)
            following = run_tasks(tasks, slots, environment, lock)
        else:
            following = run_jobs(tasks, cluster, environment)
        with contextlib.closing(following) as events:
            failures = _watch(runs, events)
    unfinished = [run.name for run in runs.values() if not run.outcome().finished]
    if unfinished:
        _say(f"not finished: {', '.join(unfinished)}; the same command continues")
    problems = [f"{name} failed: {text}" for name, text in failures.items()]
    problems += unwanted_differences([run for run in runs.values() if run.started])
    if problems:
        raise RunError("\n".join([*problems, *([f"next: {again}"] if failures else [])]))
    print(f"next: {again if unfinished else _to_report(workdir)}", flush=True)


def _to_report(workdir: Path) -> str:
    """Returns the command that makes the tables and the figure of finished arms."""
    results = f"results/{workdir.name}"
    if Path(results, RECORDS).exists():  # perhaps the records of a checkout
        results = "results/mine"
    collect = ["lowprec-attn", "lab", "collect", str(workdir), results]
    report = ["lowprec-attn", "lab", "report", results]
    return f"{shlex.join(collect)} && {shlex.join(report)}"


def _say_places(tasks: Sequence[Task], slots: Sequence[Slot]) -> None:
    """Says which tasks wait, and for which places; prints nothing if none waits."""
    waiting = [task.name for task in tasks[len(slots) :]]
    if waiting:
        count = collections.Counter(slot.name for slot in slots)
        places = ", ".join(n if c == 1 else f"{n} ({c} at a time)" for n, c in count.items())
        _say(f"{len(waiting)} wait until one has ended on {places}: {', '.join(waiting)}")


def _require_texts(experiment: Experiment, trials: Sequence[Trial]) -> None:
    """Opens every text once, because otherwise each arm would fail for the same reason."""
    fields = [experiment.fields(trial) for trial in trials]
    for path in dict.fromkeys(of.get("data.path", "None") for of in fields):
        if path != "None":  # as a flag says it: the built-in text
            tokens.load(path)


def _task(experiment: Experiment, trial: Trial, run: ArmRun, trainer: Sequence[str]) -> Task:
    command = [*trainer, *experiment.arguments(trial), f"--workdir={run.run_dir.path}"]
    return Task(run.name, command, run.log)


def _watch(runs: Mapping[str, ArmRun], events: Iterator[Event | None]) -> dict[str, str]:
    """Prints what happens while the arms run; returns by name how the failed ones ended."""
    failures = {}
    said = time.monotonic()
    running: dict[str, None] = {}
    for event in events:
        if event is None:
            if running and time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                _say("step " + ", ".join(f"{runs[name].steps_done} of {name}" for name in running))
            continue
        name, outcome = event.task.name, runs[event.task.name].outcome()
        number = f"({event.slot.number} {event.pid})"
        if event.kind == "submitted":
            running.pop(name, None)  # a running job is queued again when its time is up
            _say(f"{name}: {outcome.text}; waits for {event.slot.name} {number}")
            continue
        if event.kind == "started":
            running[name] = None
            _say(f"{name}: {outcome.text}; starts on {event.slot.name} {number}")
            continue
        running.pop(name, None)
        if outcome.finished or (event.stopping and event.code in _STOPPED):
            _say(f"{name}: {outcome.text} ({event.seconds:.0f} s)")
        else:
            failures[name] = _failure(event, outcome.text)
            _say(f"{name}: {failures[name].splitlines()[0]}")
    return failures


def _failure(event: Event, outcome: str) -> str:
    lines = event.task.log.read_text(errors="replace").replace("\r", "\n").splitlines()
    last = [f"    {line}" for line in lines if line.strip()][-_LOG_LINES:]
    how = f"exit code {event.code}" if event.code else "stopped from outside"
    return "\n".join([f"{how}, {outcome}; {event.task.log} ends with", *last])


def _environment(workdir: Path) -> dict[str, str]:
    """Returns variables that set up a compilation cache, with which later arms start sooner."""
    if _CACHE in os.environ:
        return {}
    # By default JAX does not cache programs that compile in less than a second, which are many.
    return {_CACHE: str(internal(workdir) / "compilations"), _LEAST: os.environ.get(_LEAST, "0")}


def _say(text: str) -> None:
    """Prints a line, wrapped if it goes to a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(wrapped(text, width, subsequent_indent="    "))
    print(text, flush=True)
