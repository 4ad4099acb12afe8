"""The trainer in several processes on one machine, each with simulated devices of its own."""

import functools
import json
import signal
import time

import command
import numpy as np
import pytest
from command import wait_for_steps
from processes.ranks import free_port

from lowprec_attn import hosts
from lowprec_attn.errors import RunError
from lowprec_attn.runs import metrics

# Two micro-batches, so that the rows of each are divided among the processes.
RUN = {
    **command.TINY,
    "accumulation_steps": 2,
    "model.layers": 1,
    "attention.implementation": "tiled",
}


def start(cache, text, workdir, *, processes, devices, own=None, **changes):
    """Starts the processes of a run, with `devices` each; `own` are flags that differ."""
    fields = {**RUN, "data.path": text, **changes}
    arguments = ["--config=configs/gpt2_bf16.py:tiny", f"--workdir={workdir}"]
    arguments += [f"--config.{name}={value}" for name, value in fields.items()]
    if processes == 1:
        return [launch(cache, arguments, devices)]
    arguments += [
        "--distributed",
        f"--coordinator_address=localhost:{free_port()}",
        f"--num_processes={processes}",
    ]
    return [
        launch(cache, [*arguments, f"--process_id={i}", *(own[i] if own else ())], devices)
        for i in range(processes)
    ]


def launch(cache, arguments, devices):
    return command.launch(command.environment(cache, devices), arguments)


def finish(processes, code=0):
    """What each process printed."""
    return [command.finish(process, code) for process in processes]


def records(workdir):
    return (workdir / "metrics.jsonl").read_bytes(), (workdir / "data_order.txt").read_bytes()


def test_two_killed_stopped_and_resumed_processes_are_one_process_bit_for_bit(
    compilations, text, tmp_path
):
    """Sums over two devices have two terms, so their order does not matter.

    With a split optimizer state, each process writes its own part of the moments. Afterwards a
    single process reads all parts.
    """
    # The first measurement is by one process or by two, the last by one.
    fields = {"steps": 120, "checkpoint_every": 20, "eval_every": 60, "diagnostics_every": 1000}
    start_run = functools.partial(start, compilations, text, shard_optimizer=True, **fields)
    finish(start_run(tmp_path / "one", processes=1, devices=2))
    workdir = tmp_path / "two"
    killed = start_run(workdir, processes=2, devices=1)
    while not (workdir / "checkpoints" / "00000020.json").exists():
        assert all(process.poll() is None for process in killed)
        time.sleep(0.01)
    for process in killed:
        process.send_signal(signal.SIGKILL)
    for process in killed:
        process.communicate()
    stopped = start_run(workdir, processes=2, devices=1)
    wait_for_steps(stopped[0], workdir / "throughput.jsonl", 3)
    stopped[1].send_signal(signal.SIGTERM)
    (out, _), (silent, _) = finish(stopped)
    assert "2 x cpu in 2 processes" in out
    assert "resuming at step" in out and "resuming" not in silent
    done = int(out.split("stopped by a signal after ")[1].split()[0])
    assert "stopped by a signal" not in silent
    content = workdir / "checkpoints" / f"{done:08d}-0" / "state"
    assert {path.name for path in content.glob("ocdbt.*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    ((out, _),) = finish(start_run(workdir, processes=1, devices=2))
    assert f"resuming at step {done}\n" in out
    assert records(workdir) == records(tmp_path / "one")
    environments = json.loads((workdir / "environment.json").read_text())
    assert [e["process_count"] for e in environments] == [2, 2, 1]


@pytest.mark.slow
def test_two_devices_in_each_of_two_processes_and_a_checkpoint_that_serves_any_number(
    compilations, text, tmp_path
):
    """Each process writes its own part of the moments; afterwards one process reads all parts."""
    workdir = tmp_path / "run"
    fields = {"steps": 40, "checkpoint_every": 0, "diagnostics_every": 0, "eval_every": 0}
    stopped = start(
        compilations,
        text,
        workdir,
        processes=2,
        devices=2,
        shard_optimizer=True,
        **fields | {"steps": 4000},
    )
    wait_for_steps(stopped[0], workdir / "throughput.jsonl", 3)
    stopped[1].send_signal(signal.SIGTERM)
    (out, _), _ = finish(stopped)
    done = int(out.split("stopped by a signal after ")[1].split()[0])
    saved = sorted(int(path.stem) for path in (workdir / "checkpoints").glob("*.json"))
    assert saved == [0, done]
    content = workdir / "checkpoints" / f"{done:08d}-0" / "state"
    assert {path.name for path in content.glob("ocdbt.*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    # The learning-rate schedule depends on the length of a run, so the new runs are compared with
    # each other.
    fields |= {"steps": done + 5, "resume_from": workdir}
    finish(start(compilations, text, tmp_path / "one", processes=1, devices=4, **fields))
    finish(
        start(
            compilations,
            text,
            tmp_path / "two",
            processes=2,
            devices=2,
            shard_optimizer=True,
            **fields,
        )
    )
    one, two = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [r["step"] for r in two if "loss" in r] == list(range(done, done + 5))
    for a, b in zip(one, two, strict=True):
        for name in a:
            # Sums over four devices in another order, which bfloat16 activations amplify.
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5, err_msg=name)


def test_processes_that_were_started_differently_all_say_so(compilations, text, tmp_path):
    own = [["--config.seed=1"], ["--config.seed=2"]]
    for _, err in finish(
        start(compilations, text, tmp_path / "run", processes=2, devices=1, own=own), code=1
    ):
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert "process 1 has another config, text, --workdir or JAX than process 0" in line
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_config_that_looked_at_the_device_is_too_early(compilations):
    flags = ["--config=configs/gpt2_bf16.py", "--distributed", "--num_processes=1"]
    flags += ["--process_id=0", f"--coordinator_address=localhost:{free_port()}"]
    _, err = command.finish(launch(compilations, flags, devices=1), code=1)
    assert "name the variant: --config=FILE:full" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "address",
    [
        *("", "nohost", "foo:bar", "localhost:", ":1234", "x:0", "x:99999", "a b:1", "http://x:1"),
        *("a..b:1", ".a:1", f"{64 * 'a'}:1"),
    ],
)
def test_an_address_that_is_none_is_told_before_jax_waits_for_it(address):
    with pytest.raises(RunError, match=rf"must be HOST:PORT .*, got '{address}'"):
        hosts.connect(address, 2, 1)


def test_a_coordinator_that_does_not_listen_is_named_after_a_while(monkeypatch):
    monkeypatch.setattr(hosts, "_COORDINATOR_SECONDS", 0.1)
    address = f"localhost:{free_port()}"
    words = f"nobody listened at --coordinator_address {address} for 0.1 seconds .*refused"
    with pytest.raises(RunError, match=words):
        hosts.connect(address, 2, 1)


@pytest.mark.slow
def test_two_processes_go_back_as_one_does(compilations, text, tmp_path):
    """float8 scores overflow; after the rollback bfloat16 scores do not."""
    wild = {
        "optimizer.peak_lr": 0.5,
        "optimizer.warmup_steps": 40,
        "attention.points.scores": "float8_e4m3fn",
        "steps": 40,
        "rollback.tries": 3,
        "rollback.steps": 6,
        "rollback.points.scores": "bfloat16",
    }
    for name, processes in (("one", 1), ("two", 2)):
        split = {"processes": processes, "devices": 2 // processes}
        finish(start(compilations, text, tmp_path / name, **split, **wild))
    assert records(tmp_path / "two") == records(tmp_path / "one")
    for name in ("rollbacks.jsonl", "abandoned/1.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
