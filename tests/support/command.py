"""`python train.py` in a process of its own, on a model whose steps take milliseconds."""

import os
import subprocess
import sys
import time
from pathlib import Path

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


def start(cache, workdir, config="configs/gpt2_bf16.py:tiny", **changes):
    """Starts `train.py` with TINY and changes; compilations are shared through `cache`."""
    fields = {**TINY, **{name.replace("__", "."): v for name, v in changes.items()}}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}", *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
