"""Processes that start quickly, because they inherit imported libraries by a fork.

The server of `multiprocessing` that forks them has imported the libraries, which takes a fresh
interpreter two seconds, but nothing of this package. All else is as in a process that a shell
starts: signals, locks, standard streams, the exit code, and the work at exit.
"""

import atexit
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "flax.nnx",
        "grain",
        "jax.experimental.pallas.triton",
        "jax.experimental.pallas.tpu",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "ml_collections.config_flags",
        "optax",
        "orbax.checkpoint",
        "tensorboardX",
        "tqdm",
    ]
)


class Fork:
    """A function in its own process, with the methods of `subprocess.Popen` that tests use.

    Args:
      function: the function to run, found by its module and name; returns the exit code, or None
        for 0.
      arguments: the arguments of the function.
      environment: the environment of the process. JAX reads its options from it, as at a start.
    """

    def __init__(
        self, function: Callable[..., int | None], *arguments: Any, environment: dict[str, str]
    ) -> None:
        self._place = tempfile.TemporaryDirectory()
        streams = self._streams = [Path(self._place.name) / name for name in ("out", "err")]
        self._process = _FORKS.Process(
            target=_run,
            args=(streams, environment, function, arguments),
            daemon=True,  # so that it ends with the tests at the latest
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def printed(self) -> str:
        """The standard output of the process so far."""
        out, _ = self._streams
        return out.read_text() if out.exists() else ""

    def wait_for_lines(self, count: int) -> None:
        """Waits for `count` lines on standard output, or for the end of the process."""
        while self.printed().count("\n") < count and self.returncode is None:
            time.sleep(0.01)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end of the process; returns its standard output and error."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        with self._place:
            out, err = (path.read_text() for path in self._streams)
        return out, err


def _run(
    streams: list[Path],
    environment: dict[str, str],
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
) -> None:
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    _read_options_anew(environment)
    gc.freeze()  # spares the garbage collector the shared objects
    gc.set_threshold(50_000, 20, 20)
    try:
        code = function(*arguments)
    except SystemExit as end:
        code = end.code
    # `multiprocessing` skips these two steps.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(code)


def _read_options_anew(environment: dict[str, str]) -> None:
    """Sets JAX's options from the environment, because JAX read them before the fork."""
    import jax

    for option, kind in (
        ("jax_platforms", str),
        ("jax_num_cpu_devices", int),
        ("jax_compilation_cache_dir", str),
        ("jax_persistent_cache_min_compile_time_secs", float),
    ):
        if (value := environment.get(option.upper())) is not None:
            jax.config.update(option, kind(value))


def import_as_the_first(module: str) -> None:
    """Imports a module in a process that has imported nothing of this package before."""
    assert not {"lowprec_attn", "pallas_kernels"} & sys.modules.keys()
    importlib.import_module(module)
