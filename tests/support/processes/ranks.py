"""A program in two processes, which find each other at a port of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def in_two_ranks(program: str, arguments: Sequence[str], **environment: str) -> list[str]:
    """Runs a program as rank 0 and rank 1, which must both succeed; returns what each printed.

    Args:
      program: Python source that takes its rank, then `arguments`.
      environment: variables in addition to those of this process.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    return [out for out, _ in printed]
