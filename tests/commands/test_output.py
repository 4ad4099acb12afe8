"""After its output ends, or Ctrl-C, a command goes on to its results, with at most one line."""

import errno
import functools
import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lowprec_attn.commands import report
from lowprec_attn.commands.main import main


class Ended(io.StringIO):
    """A stream that refuses at once, or when it is flushed, as a buffered stream does."""

    def __init__(self, code, method):
        super().__init__()
        self.error, self.method, self.refused = OSError(code, os.strerror(code)), method, 0

    def refuse(self, method):
        if method == self.method:
            self.refused += 1
            raise self.error

    def write(self, text):
        self.refuse("write")
        return super().write(text)

    def flush(self):
        self.refuse("flush")


def run_with(monkeypatch, act, out, err=None):
    """The exit code of a command that performs `act`."""
    monkeypatch.setattr(report, "run", lambda args: act())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        return main(["report", "runs/mine"])


@pytest.mark.parametrize("method", ["write", "flush"])
@pytest.mark.parametrize(
    ("code", "exit_code", "line"),
    [
        (errno.EPIPE, 0, ""),
        (errno.ENOSPC, 1, "error: cannot write to standard output: No space left on device\n"),
    ],
)
def test_a_command_goes_on_when_its_output_ends(monkeypatch, method, code, exit_code, line):
    results = []

    def act():
        for i in range(3):
            print(i, flush=True)
            results.append(i)

    out, err = Ended(code, method), io.StringIO()
    assert run_with(monkeypatch, act, out, err) == exit_code
    assert results == [0, 1, 2]
    assert err.getvalue() == line
    assert out.refused == 1


def test_a_command_goes_on_when_its_errors_cannot_be_written(monkeypatch):
    out = io.StringIO()

    def act():
        print("a warning", file=sys.stderr, flush=True)
        print("result")

    run_with(monkeypatch, act, out, Ended(errno.EPIPE, "write"))
    assert out.getvalue() == "result\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_encoding_lacks_are_escaped(monkeypatch, encoding):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding)
    assert run_with(monkeypatch, lambda: print("error of Ō |"), out) == 0
    assert raw.getvalue() == b"error of \\u014c |\n"


def test_a_command_runs_without_streams(monkeypatch):
    assert run_with(monkeypatch, lambda: print("x", file=sys.stderr), None) == 0


def test_the_pipe_of_a_process_may_be_closed(monkeypatch):
    """Data left in the stream when its pipe was closed must not raise an error at Python's exit."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        assert run_with(monkeypatch, lambda: print("x"), out, io.StringIO()) == 0


def test_an_interrupt_is_an_exit_code(monkeypatch):
    err = io.StringIO()

    # Works also if the tests were started with SIGINT ignored, as by nohup.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        act = functools.partial(signal.raise_signal, signal.SIGINT)
        assert run_with(monkeypatch, act, io.StringIO(), err) == 130
        # Another Ctrl-C ends the process at once, so that Python prints no tracebacks of its
        # threads.
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert err.getvalue() == ""


def test_a_file_that_the_system_refuses_is_one_line(monkeypatch, capsys):
    assert main(["report", "x" * 300]) == 1
    assert capsys.readouterr().err.endswith(f"{'x' * 300}/metrics.jsonl: File name too long\n")
    monkeypatch.setattr(report, "run", lambda args: os.close(10**6))
    with pytest.raises(OSError, match="Bad file descriptor"):  # no file's name, so it is a bug
        main(["report", "runs/mine"])


def test_an_interrupt_while_jax_compiles_ends_the_process(tmp_path):
    """While compiler threads are at work, JAX 0.10 would crash at Python's exit."""
    rng = np.random.default_rng(0)
    shape, names = (2, 256, 4, 64), ("q", "k", "v", "do")
    arrays = {name: rng.standard_normal(shape, np.float32) for name in names}
    np.savez(tmp_path / "layer.npz", **arrays)
    with subprocess.Popen(
        [sys.executable, "-m", "lowprec_attn", "diagnose", str(tmp_path / "layer.npz")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_LOG_COMPILES": "1"},
    ) as process:
        lines = iter(process.stderr.readline, "")
        assert any("Compiling jit(_signals)" in line for line in lines)
        time.sleep(0.3)  # of the second or two that it compiles
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


DROPS_AN_INTERRUPT = """
import gc, os, signal, time
from lowprec_attn.commands import report
from lowprec_attn.commands.main import run_process

def interrupt(*_):
    gc.callbacks.remove(interrupt)
    os.kill(os.getpid(), signal.SIGINT)

def run(args):
    gc.callbacks.append(interrupt)
    gc.collect()
    print("dropped", flush=True)
    time.sleep(30)

report.run = run
run_process(["report", "x"])
"""


def test_an_interrupt_that_python_drops_comes_again():
    process = subprocess.run(
        [sys.executable, "-c", DROPS_AN_INTERRUPT], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "dropped\n", "")
