"""Child processes, at most one per slot: a GPU, or a share of the CPU.

SIGTERM and SIGINT are passed on to the children as SIGTERM, upon which the trainer saves a
checkpoint and ends; no further task is then started. A second signal is passed on as well, and
ends them at once.
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

from lowprec_attn.errors import RunError

_POLL_SECONDS = 0.1


class Task(NamedTuple):
    """A command whose output is appended to `log`."""

    name: str
    command: list[str]
    log: Path


class Slot(NamedTuple):
    """A place for one child at a time: its name, and what it adds to the environment.

    number: of what its children have one, `process` or `job`.
    """

    name: str
    environment: Mapping[str, str]
    number: str = "process"


Kind = Literal["submitted", "started", "ended"]


class Event(NamedTuple):
    """A child was submitted to a queue, has started or ended.

    Attributes:
      kind: which of these.
      task, slot, pid: of the child; of a job its number.
      code: its exit code, or minus the signal that ended it; 0 when it starts.
      seconds: that it has run.
      stopping: a signal has asked this process to end.
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
    """One slot per GPU, or per GPUs that are joined.

    Args:
      devices: as CUDA_VISIBLE_DEVICES names them, several of one slot as 0+1; None for all that
        JAX finds, a slot each.

    Raises:
      RunError: a name is none, or JAX cannot start.
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
    """Slots that are bound to no device."""
    return [Slot("CPU" if count == 1 else f"job {i}", {}) for i in range(count)]


def run_tasks(
    tasks: Sequence[Task], slots: Sequence[Slot], environment: Mapping[str, str], inherited: int
) -> Generator[Event | None, None, None]:
    """Runs all tasks; the next one starts when a slot is free.

    Args:
      tasks: in the order in which they start.
      slots: at least one.
      environment: added to the children's environment.
      inherited: a file descriptor that the children keep open.

    Yields:
      Events as they happen, and None whenever nothing has happened for a moment.
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
        finally:  # reached with children only if something failed here or in the consumer
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
            process_group=0,  # Ctrl-C reaches them through this process only, and only once
        )
    return _Child(task, slot, process, time.monotonic())


def _terminate(children: Sequence[_Child]) -> None:
    for child in children:
        child.process.send_signal(signal.SIGTERM)  # does nothing where it has ended


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that grows by each SIGTERM and SIGINT."""
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
    """The GPUs that JAX finds, asked in a process of its own: asking takes memory on each."""
    code = (
        "import jax; devices = jax.local_devices(); "
        "print(len(devices) if devices[0].platform == 'gpu' else 0)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"JAX cannot list the devices: {reason}")
    count = int(asked.stdout.split()[-1])
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(i) for i in range(count)]
