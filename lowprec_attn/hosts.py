"""A run in several processes, usually one per host: who writes, what all agree on, when they stop.

Every process computes the same steps on its own devices and its own rows of each batch. The first
one alone writes records and reports; checkpoints are written by all of them together. In a run of
one process everything here is trivial.
"""

import functools
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import jax
import numpy as np
from jax.experimental import multihost_utils

from lowprec_attn.errors import EXIT_INTERRUPTED, RunError

# A process that fails waits so long for the others to end as well, then ends them.
_SHUTDOWN_SECONDS = 20
# So long a process waits for the first one to listen, as JAX does, which then aborts.
_COORDINATOR_SECONDS = 300.0
_CONNECT_SECONDS = 5.0  # for one attempt

_Args = ParamSpec("_Args")


def connect(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Makes this process one of several; before anything else of JAX is used.

    Args:
      coordinator_address: HOST:PORT at which the first process listens.
      num_processes: of the run.
      process_id: of this one, from 0. What is None is found out on Cloud TPU, SLURM and the other
        clusters that `jax.distributed` knows.

    Raises:
      RunError: too late, or not known and not given, or a number or the address is none, or nobody
        has listened there for five minutes.
    """
    if coordinator_address is not None and not _is_address(coordinator_address):
        raise RunError(
            "--coordinator_address must be HOST:PORT with a port from 1 to 65535, such as "
            f"10.0.0.1:1234, got {coordinator_address!r}"
        )
    if num_processes is not None and num_processes < 1:
        raise RunError(f"--num_processes must be at least 1, got {num_processes}")
    most = "" if num_processes is None else f" and below --num_processes {num_processes}"
    if process_id is not None and not 0 <= process_id < (num_processes or math.inf):
        raise RunError(f"--process_id must be 0 or more{most}, got {process_id}")
    if coordinator_address is not None and process_id:
        _wait_for(coordinator_address)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RunError(
            "this process uses its devices already, so it cannot join others; if the config chose "
            "its variant by the device, name the variant: --config=FILE:full"
        ) from error
    except ValueError as error:
        if "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NODELIST" not in os.environ:
            raise RunError(
                "--distributed: this is a job of Slurm, but no step of it that has processes; "
                "start them by srun, as in: srun lowprec-attn train --distributed …"
            ) from error
        raise RunError(
            f"this cluster is not recognised ({error}); pass --coordinator_address=HOST:PORT, "
            "--num_processes and --process_id"
        ) from error


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
    return match is not None and 1 <= int(match[1]) <= 65535


def _wait_for(address: str) -> None:
    """Returns once somebody listens at HOST:PORT.

    JAX would end the process with a stack trace where nobody does.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _COORDINATOR_SECONDS
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"nobody listened at --coordinator_address {address} for "
                    f"{_COORDINATOR_SECONDS:g} seconds ({error}); start process 0 there, and check "
                    "the address and the firewall"
                ) from error
            time.sleep(min(1.0, _COORDINATOR_SECONDS))


def is_first() -> bool:
    """Whether this is the process that writes; asking starts no device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def first_only(function: Callable[_Args, object]) -> Callable[_Args, None]:
    """The function on the first process, nothing on the others."""

    @functools.wraps(function)
    def on_first(*args: _Args.args, **kwargs: _Args.kwargs) -> None:
        if is_first():
            function(*args, **kwargs)

    return on_first


@first_only
def say(text: str) -> None:
    """Prints a line, once for all processes; at once, also into a pipe."""
    print(text, flush=True)


def from_first(function: Callable[[], Any]) -> Any:
    """What the function returns on the first process, JSON-able, on all of them.

    Raises:
      RunError: it failed on the first process, where its own error is raised.
    """
    if not jax.distributed.is_initialized():
        return function()
    answer: dict[str, Any] = {}
    failure: BaseException | None = None
    if is_first():
        try:
            answer = {"value": function()}
        except BaseException as error:
            failure = error
    text = json.dumps(answer).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.array(len(text))))
    padded = np.frombuffer(text.ljust(length)[:length], np.uint8)
    answer = json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if failure is not None:
        raise failure
    if "value" not in answer:
        raise RunError("the first process failed; its own output says why")
    return answer["value"]


@contextmanager
def ending_together() -> Iterator[None]:
    """A barrier: no process leaves the block before process 0, which writes the most."""
    yield
    from_first(lambda: None)


def require_everywhere(holds: bool, problem: str) -> None:
    """Fails on every process if something does not hold on one.

    Raises:
      RunError: `process N {problem}`.
    """
    if not jax.distributed.is_initialized():
        everywhere = np.array([holds])
    else:
        everywhere = np.ravel(multihost_utils.process_allgather(np.array(holds)))
    if not everywhere.all():
        raise RunError(f"process {int(np.argmin(everywhere))} {problem}")


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[Callable[[int], int | None]]:
    """A function of the step, asked once in each: the exit code to stop with after it, or None.

    In a single process SIGTERM and SIGINT ask for it, which is answered at once by a line. A second
    SIGINT ends the process, also while it compiles; in a notebook it acts as usual, as a second
    SIGTERM does. Of several processes any may get SIGTERM, and all stop after the same step (within
    about a second).

    Args:
      say: prints a line; called in a thread.
    """
    if jax.process_count() > 1:
        reached = multihost_utils.reached_preemption_sync_point
        yield lambda step: 0 if reached(step) else None
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: None  # only the main thread may handle signals
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    codes: list[int] = []

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def request(number: int, _: object) -> None:
        codes.append(EXIT_INTERRUPTED if number == signal.SIGINT else 0)
        restore()
        if not interactive:  # else a KeyboardInterrupt, in whatever Python is about, is shown
            signal.signal(signal.SIGINT, request)

    interactive = hasattr(sys, "ps1")
    with _answering(say, may_end=not interactive):
        for number in usual:
            signal.signal(number, request)
        try:
            yield lambda step: codes[0] if codes else None
        finally:
            restore()


@contextmanager
def _answering(say: Callable[[str], None], may_end: bool) -> Iterator[None]:
    """Says at once that a signal has come, and if it may, ends the process at the next SIGINT.

    Python calls its handlers between two of its own instructions, and a compilation is a single
    one. The system, however, writes the number of a signal into a pipe at once.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def answer() -> None:
        count = 0
        while number := os.read(read, 1)[0]:
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            count += 1
            if count == 1:
                say(
                    f"{signal.Signals(number).name}: ends after this step, with a checkpoint; "
                    "Ctrl-C again ends at once"
                )
            elif number == signal.SIGINT and may_end:
                os._exit(EXIT_INTERRUPTED)  # what a run has written survives being killed

    thread = threading.Thread(target=answer, name="lowprec-attn signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)
