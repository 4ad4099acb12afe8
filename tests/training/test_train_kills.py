"""Runs that are killed or stopped at random times and resumed by the same command."""

import functools
import hashlib
import os
import random
import signal
import time

import pytest
from command import finish, wait_for_steps
from processes.forks import Fork

from lowprec_attn import hosts


@pytest.fixture
def start(command, text):
    """Starts without two steps that take seconds: other platforms' kernels, gathering the text."""
    short = {"attention__implementation": "tiled", "model__layers": 1}
    return functools.partial(command, data__path=text, **short)


def checkpoints_in(workdir):
    return sorted(int(path.stem) for path in (workdir / "checkpoints").glob("*.json"))


def wait_for_changes(process, path, count):
    """Waits until the file's size has changed `count` times; a rollback shrinks the file."""
    size = None
    while count > 0 and process.poll() is None:
        now = path.stat().st_size if path.exists() else None
        count, size = count - (now != size), now
        time.sleep(0.001)


@pytest.mark.slow
def test_kills_around_a_rollback_change_nothing(start, tmp_path):
    """kill -9 at random times, in a run that goes back several times."""
    wild = {"optimizer__peak_lr": 1.0, "optimizer__warmup_steps": 4000, "steps": 5000}
    wild |= {"attention__points__scores": "float8_e4m3fn", "checkpoint_every": 5}
    wild |= {"rollback__steps": 10, "rollback__tries": 2}
    finish(start(tmp_path / "whole", **wild), code=3)
    assert (tmp_path / "whole" / "rollbacks.jsonl").read_bytes().count(b"\n") == 2
    killed, rng, kills = tmp_path / "killed", random.Random(7), 0
    while True:
        process = start(killed, **wild)
        wait_for_changes(process, killed / "throughput.jsonl", rng.randrange(1, 60))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
        assert kills < 60, "the run does not get on"
    assert process.returncode == 3
    assert kills >= 3
    names = ("metrics.jsonl", "data_order.txt", "rollbacks.jsonl", "failure.json")
    for name in (*names, "abandoned/1.jsonl", "abandoned/2.jsonl"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 10])
def test_kills_lose_no_checkpoint_and_change_no_metric(start, tmp_path, kills):
    """After kill -9 at random times, records equal those of an uninterrupted run to the byte.

    `test_lab.py` has a run that is killed once.
    """
    # More steps than fit before the last kill, even at a millisecond each.
    steps = {"steps": 40 + 80 * kills, "checkpoint_every": 10}
    steps |= {"diagnostics_every": 0, "eval_every": 0}
    finish(start(tmp_path / "whole", **steps))
    killed = tmp_path / "killed"
    throughput = killed / "throughput.jsonl"
    rng, newest = random.Random(7), 0
    for _ in range(kills):
        process = start(killed, **steps)
        wait_for_steps(process, throughput, rng.randrange(1, 30))
        time.sleep(rng.random() * 0.05)
        assert process.poll() is None, "the run ended before it could be killed: raise steps"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        saved = checkpoints_in(killed)
        assert saved[-1] >= newest
        newest = saved[-1]
    out, _ = finish(start(killed, **steps))
    assert f"resuming at step {newest}" in out
    assert newest > 0
    for name in ("metrics.jsonl", "data_order.txt"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def compile_for_seconds(hashes):
    """Mimics a loop that compiles its first step: one long call during which no handler runs."""
    with hosts.stop_requests(functools.partial(print, flush=True)) as stop_after:
        print("compiling", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", hashes)
        print("compiled", flush=True)
        return stop_after(0)


@pytest.mark.parametrize(("signals", "compiled"), [(1, True), (2, False)])
def test_an_interrupt_while_it_compiles_is_answered_at_once(signals, compiled):
    # One second of a core, or many seconds that a second interrupt cuts short.
    process = Fork(
        compile_for_seconds, 3 * 10**6 if compiled else 10**8, environment=dict(os.environ)
    )
    process.wait_for_lines(1)
    for lines in range(2, 2 + signals):
        process.send_signal(signal.SIGINT)
        process.wait_for_lines(min(lines, 2))
        assert "compiled" not in process.printed()
    out, err = process.communicate(timeout=60)
    first, answer, *rest = out.splitlines()
    assert (first, rest) == ("compiling", ["compiled"] if compiled else [])
    assert answer == "SIGINT: ends after this step, with a checkpoint; Ctrl-C again ends at once"
    assert (process.returncode, err) == (130, "")
