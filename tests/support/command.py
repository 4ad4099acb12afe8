"""`python train.py` in a process of its own, on a model whose steps take milliseconds."""

import contextlib
import hashlib
import io
import logging
import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
from processes.forks import Fork

from lowprec_attn.commands.main import main
from lowprec_attn.data import tokens
from lowprec_attn.lab import runner

ROOT = Path(__file__).resolve().parents[2]

# The model is small enough that kills fall into every phase of a run.
TINY = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "model.vocab_size": 257,
    "optimizer.warmup_steps": 4,
    "batch_size": 8,
    "steps": 12,
    "diagnostics_every": 5,
    "checkpoint_every": 4,
    "eval_every": 6,
    "eval_batches": 1,
}


def write_text(directory):
    """Writes token files for `data.path`, so that a process need not gather the built-in text."""
    text = 2 * (ROOT / "LICENSE").read_bytes()  # a fixed file: some tests depend on each loss
    ids = np.frombuffer(text, np.uint8).astype("<u2")
    splits = {}
    for name, part in (("train", ids[:-2000]), ("val", ids[-2000:])):
        part.tofile(directory / f"{name}.bin")
        splits[name] = tokens.SplitMeta(len(part), hashlib.sha256(part.tobytes()).hexdigest())
    tokens.Meta("bytes", 257, "uint16", splits).write(directory / "meta.json")
    return directory


def environment(cache, devices=1):
    """The environment of a process with simulated devices; `cache` shares compilations."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def flags(config="configs/gpt2_bf16.py:tiny", **changes):
    """The arguments of `train.py` for `TINY` with some changes."""
    fields = {**TINY, **{name.replace("__", "."): v for name, v in changes.items()}}
    return [f"--config={config}", *(f"--config.{name}={v}" for name, v in fields.items())]


def start(cache, workdir, config="configs/gpt2_bf16.py:tiny", **changes):
    """Starts `train.py` with `TINY` and some changes, without the report at the end."""
    return launch(environment(cache), [f"--workdir={workdir}", *flags(config, **changes)])


def launch(environment, arguments):
    """Starts `train.py` with these arguments, without the report at the end."""
    return Fork(train_without_report, arguments, environment=environment)


@contextlib.contextmanager
def without_report():
    """Skips the figures of the report, which take longer than the steps."""
    from lowprec_attn.training import announcement

    with mock.patch.object(
        announcement, "write_run_page", lambda run_dir, efficiency: run_dir.page
    ):
        yield


def train_without_report(arguments):
    with contextlib.chdir(ROOT), without_report():
        return main(["train", *arguments])


def lab_without_reports(arguments):
    """Runs `lowprec-attn lab`, with each arm in its own process, as `train_without_report`."""
    code = "import command, sys; sys.exit(command.train_without_report(sys.argv[1:]))"
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    with mock.patch.object(runner, "TRAIN", (sys.executable, "-c", code)):
        return main(["lab", *arguments])


def run_here(workdir, code=0, devices=1, **changes):
    """What `finish(start(…))` returns, from this process, which has already imported and compiled.

    This process has eight simulated devices, so the last bits of its losses differ from those of a
    process that `start` starts.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        # As in a separate process, logs go to standard error instead of pytest.
        mock.patch.object(logging.getLogger(), "handlers", []),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        returned = main(["train", f"--workdir={workdir}", *flags(devices=devices, **changes)])
    assert returned == code, f"exit {returned}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue(), err.getvalue()


def finish(process, code=0):
    """Waits for the end of the process, checks its exit code and returns (stdout, stderr)."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


def wait_for_steps(process, path, count):
    """Waits until the file has grown by `count` lines, or until the process has ended."""

    def lines():
        return path.read_bytes().count(b"\n") if path.exists() else 0

    target = lines() + count
    while lines() < target and process.poll() is None:
        time.sleep(0.01)
