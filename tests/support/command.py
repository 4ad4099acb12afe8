"""`python train.py` in a process of its own, on a model whose steps take milliseconds."""

import contextlib
import hashlib
import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

from lowprec_attn.commands.main import main
from lowprec_attn.data import tokens

ROOT = Path(__file__).resolve().parents[2]

# Small enough that kills fall into every phase of a run.
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
    """Token files for `data.path`: a process that reads them need not gather the built-in text."""
    ids = np.frombuffer((ROOT / "README.md").read_bytes(), np.uint8).astype("<u2")
    splits = {}
    for name, part in (("train", ids[:-2000]), ("val", ids[-2000:])):
        part.tofile(directory / f"{name}.bin")
        splits[name] = tokens.SplitMeta(len(part), hashlib.sha256(part.tobytes()).hexdigest())
    tokens.Meta("bytes", 257, "uint16", splits).write(directory / "meta.json")
    return directory


def environment(cache, devices=1):
    """Of a process on simulated devices; compilations are shared through `cache`."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def flags(config="configs/gpt2_bf16.py:tiny", **changes):
    """The arguments of `train.py` for TINY and changes."""
    fields = {**TINY, **{name.replace("__", "."): v for name, v in changes.items()}}
    return [f"--config={config}", *(f"--config.{name}={v}" for name, v in fields.items())]


def start(cache, workdir, config="configs/gpt2_bf16.py:tiny", **changes):
    """Starts `train.py` with TINY and changes."""
    return subprocess.Popen(
        [sys.executable, "train.py", f"--workdir={workdir}", *flags(config, **changes)],
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(workdir, code=0, devices=1, **changes):
    """What `finish(start(…))` does, in this process, which has imported and compiled already.

    It has eight simulated devices, so the last bits of its losses are not those of a process.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        # As in a process of its own: what is logged goes to the standard error, not to pytest.
        mock.patch.object(logging.getLogger(), "handlers", []),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        returned = main(["train", f"--workdir={workdir}", *flags(devices=devices, **changes)])
    assert returned == code, f"exit {returned}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue(), err.getvalue()


def finish(process, code=0):
    """Waits; returns (stdout, stderr) and checks the exit code."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


def wait_for_steps(process, path, count):
    """Waits until `count` more lines than now stand in the file, or the process has ended."""

    def lines():
        return path.read_bytes().count(b"\n") if path.exists() else 0

    target = lines() + count
    while lines() < target and process.poll() is None:
        time.sleep(0.002)
