"""Coordination of a run's processes, usually one per host: output, agreement, stop requests.

Every process computes the same steps on its own devices and its own rows of each batch. Only the
first process writes records and reports. All processes together write the checkpoints. In a run of
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

# How long a process that fails waits for the others to end before it ends them.
_SHUTDOWN_SECONDS = 20
# How long a process waits for the first process to listen. JAX waits as long, and then aborts.
_COORDINATOR_SECONDS = 300.0
_CONNECT_SECONDS = 5.0  # for one attempt

_Args = ParamSpec("_Args")


def connect(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Connects this process to the others of the run, before any other use of JAX.

    `jax.distributed` determines each argument that is None, on Cloud TPU, Slurm and the other
    clusters that it supports.

    Args:
      coordinator_address: the HOST:PORT at which the first process listens.
      num_processes: the number of processes in the run.
      process_id: the number of this process, from 0.

    Raises:
      RunError: an argument is invalid, or is None and cannot be determined; JAX already uses its
        devices; or nobody listened at the address for five minutes.
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
                "--distributed: this process is in a Slurm job, but srun did not start it; start "
                "all processes by srun, as in: srun lowprec-attn train --distributed …"
            ) from error
        raise RunError(
            f"this cluster is not recognised ({error}); pass --coordinator_address=HOST:PORT, "
            "--num_processes and --process_id"
        ) from error


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= 65535:
        return False
    try:
        text.rpartition(":")[0].encode("idna")  # as `socket` encodes a name, which may not have ..
    except UnicodeError:
        return False
    return True


def _wait_for(address: str) -> None:
    """Returns once somebody listens at HOST:PORT.

    If nobody listened there, JAX would end the process with a stack trace.

    Raises:
      RunError: nobody listened there for five minutes.
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
    """Whether this is the first process, which writes; does not initialize JAX's devices."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def first_only(function: Callable[_Args, object]) -> Callable[_Args, None]:
    """Returns a function that calls `function` on the first process and does nothing on others."""

    @functools.wraps(function)
    def on_first(*args: _Args.args, **kwargs: _Args.kwargs) -> None:
        if is_first():
            function(*args, **kwargs)

    return on_first


@first_only
def say(text: str) -> None:
    """Prints a line from the first process only, and flushes it."""
    print(text, flush=True)


def from_first(function: Callable[[], Any]) -> Any:
    """Calls the function on the first process and returns its result on all processes.

    Args:
      function: returns a value that JSON can represent.

    Raises:
      RunError: the function failed on the first process. That process itself raises the function's
        own error.
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
    """A barrier at the end of a block: no process leaves the block before process 0 ends it.

    Process 0 writes the most, so the others wait for it.
    """
    yield
    from_first(lambda: None)


def require_everywhere(holds: bool, problem: str) -> None:
    """Raises an error on every process if `holds` is false on at least one of them.

    Raises:
      RunError: the message is `process N {problem}`, with the first such process.
    """
    if not jax.distributed.is_initialized():
        everywhere = np.array([holds])
    else:
        everywhere = np.ravel(multihost_utils.process_allgather(np.array(holds)))
    if not everywhere.all():
        raise RunError(f"process {int(np.argmin(everywhere))} {problem}")


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[Callable[[int], int | None]]:
    """Yields a function of the step that returns the exit code to stop with, or None to go on.

    The trainer calls the function once per step, and stops after that step if it returns a code.

    In a run of one process, SIGTERM and SIGINT request the stop, and `say` confirms it at once. A
    second SIGINT ends the process, even while JAX compiles; in an interactive interpreter, such as
    a notebook, it has its usual effect. A SIGTERM after the first signal has its usual effect.

    In a run of several processes, any of them may receive SIGTERM. All processes then stop after
    the same step, within about a second.

    Args:
      say: prints a line. It is called in another thread.
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
        # The usual handler would show a KeyboardInterrupt from whatever Python happens to run.
        if not interactive:
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
    """Confirms a stop signal at once, and ends the process at the next SIGINT if `may_end`.

    Python runs signal handlers only between two bytecode instructions, and a compilation is a
    single instruction. So a thread reads the pipe of `signal.set_wakeup_fd`, into which the number
    of every signal is written immediately.
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
                os._exit(EXIT_INTERRUPTED)  # safe, because a run's files survive a kill

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
