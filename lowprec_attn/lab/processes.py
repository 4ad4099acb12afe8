"""Runs child processes, at most one per slot. A slot is one or more GPUs, or a share of the CPU.

SIGTERM and SIGINT are passed on to the children as SIGTERM. The trainer then saves a checkpoint and
ends, and no further task starts. A second signal is passed on too, and ends the children at once.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lowprec_attn.errors import RunError, missing_platform

_POLL_SECONDS = 0.1


class Task(NamedTuple):
    """A command whose output is appended to `log`."""

    name: str
    command: list[str]
    log: Path


class Slot(NamedTuple):
    """A place for one child at a time.

    Attributes:
      name: the name of the place.
      environment: variables to add to a child's environment.
      number: what the number of a child identifies: `process` or `job`.
    """

    name: str
    environment: Mapping[str, str]
    number: str = "process"


Kind = Literal["submitted", "started", "ended"]


class Event(NamedTuple):
    """A child was submitted to a queue, has started or has ended.

    Attributes:
      kind: which of these has happened.
      task: the task of the child.
      slot: the slot of the child.
      pid: the process id of the child, or the number of the job.
      code: the exit code of the child, or minus the signal that ended it; 0 if it has not ended.
      seconds: how long the child has run.
      stopping: whether a signal has asked this process to end.
    """

    kind: Kind
    task: Task
    slot: Slot
    pid: int
    code: int
    seconds: float
    stopping: bool


class _Child(NamedTuple):
    task: Task
    slot: Slot
    process: subprocess.Popen[bytes]
    start: float

    def event(self, kind: Kind, stopping: bool) -> Event:
        seconds, code = time.monotonic() - self.start, self.process.returncode or 0
        return Event(kind, self.task, self.slot, self.process.pid, code, seconds, stopping)


def gpu_slots(devices: Sequence[str] | None = None) -> list[Slot]:
    """Returns one slot per GPU, or per group of GPUs.

    Args:
      devices: the names of the GPUs as in CUDA_VISIBLE_DEVICES, with several GPUs of one slot
        joined as in 0+1. None makes one slot for each GPU that JAX finds.

    Raises:
      RunError: a name is invalid, or JAX cannot list the devices.
    """
    for name in devices or ():
        if not all(re.fullmatch(r"\d{1,4}|(GPU|MIG)-[\w/-]+", of) for of in name.split("+")):
            raise RunError(
                f"--devices {name!r}: name GPUs as CUDA_VISIBLE_DEVICES does, as in 0,1; several "
                "of one arm as 0+1,2+3"
            )
    if devices is None:
        devices = _visible_gpus()
    return [
        Slot(f"GPU {name}", {"CUDA_VISIBLE_DEVICES": name.replace("+", ",")}) for name in devices
    ]


def cpu_slots(count: int) -> list[Slot]:
    """Returns slots that are bound to no device."""
    return [Slot("CPU" if count == 1 else f"job {i}", {}) for i in range(count)]


def run_tasks(
    tasks: Sequence[Task], slots: Sequence[Slot], environment: Mapping[str, str], inherited: int
) -> Generator[Event | None, None, None]:
    """Runs all tasks. The next task starts as soon as a slot is free.

    Args:
      tasks: the tasks in the order in which they start.
      slots: the slots, at least one.
      environment: variables to add to the children's environment.
      inherited: a file descriptor that the children keep open.

    Yields:
      Events as they happen, and None after each poll of the children.
    """
    waiting, free = list(tasks), list(slots)
    children: list[_Child] = []
    with stop_requests() as requests:
        passed_on = 0
        try:
            while children or (waiting and not requests):
                while waiting and free and not requests:
                    children.append(_start(waiting.pop(0), free.pop(0), environment, inherited))
                    yield children[-1].event("started", stopping=False)
                for child in [c for c in children if c.process.poll() is not None]:
                    children.remove(child)
                    free.append(child.slot)
                    yield child.event("ended", stopping=bool(requests))
                if len(requests) > passed_on:
                    passed_on = len(requests)
                    _terminate(children)
                if children:
                    yield None
                    time.sleep(_POLL_SECONDS)
        finally:  # children are left only after an error here or in the consumer of the events
            _terminate(children)
            for child in children:
                child.process.wait()


def _start(task: Task, slot: Slot, environment: Mapping[str, str], inherited: int) -> _Child:
    with task.log.open("ab") as log:
        process = subprocess.Popen(
            task.command,
            env={**os.environ, **environment, **slot.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(inherited,),
            process_group=0,  # so that Ctrl-C reaches the child only once, through this process
        )
    return _Child(task, slot, process, time.monotonic())


def _terminate(children: Sequence[_Child]) -> None:
    for child in children:
        child.process.send_signal(signal.SIGTERM)  # does nothing if the child has ended


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Catches SIGTERM and SIGINT in the body; yields a list to which each signal is appended."""
    requests: list[int] = []
    usual = {
        number: signal.signal(number, lambda received, _: requests.append(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield requests
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _visible_gpus() -> list[str]:
    """Returns the names of the GPUs that JAX finds.

    A separate process asks JAX, because asking allocates memory on every GPU.
    """
    code = (
        "import jax; devices = jax.local_devices(); "
        "print(len(devices) if devices[0].platform == 'gpu' else 0)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        if os.environ.get("JAX_PLATFORMS"):
            raise RunError(missing_platform(reason))
        raise RunError(f"JAX cannot list the devices: {reason}")
    count = int(asked.stdout.split()[-1])
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(i) for i in range(count)]
