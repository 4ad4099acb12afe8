"""The run directory, its metrics files and its record of the environment."""

import contextlib
import errno
import itertools
import json
import math
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

import lowprec_attn
from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint
from lowprec_attn.runs import environment, metrics
from lowprec_attn.runs.metrics import MetricsError, MetricsWriter
from lowprec_attn.runs.run_dir import RunDir, RunDirError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"seed": 1, "optimizer": {"lr": 1e-3, "betas": (0.9, 0.95)}, "layers": {1: {}}}


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# Opening a run directory.


def test_a_new_directory_holds_config_and_environment(tmp_path):
    with RunDir.open(tmp_path / "runs" / "first", CONFIG) as run_dir:
        assert run_dir.path == tmp_path / "runs" / "first"
        assert names(run_dir.path) == ["config.json", "environment.json", "run.lock"]
        assert json.loads(run_dir.config.read_bytes()) == json.loads(json.dumps(CONFIG))
        (start,) = json.loads(run_dir.environment.read_bytes())
        assert start["versions"]["jax"]


def test_the_same_config_reopens_and_records_every_start(tmp_path):
    for starts in (1, 2, 3):
        with RunDir.open(tmp_path, CONFIG) as run_dir:
            (tmp_path / "metrics.jsonl").touch()
            assert len(json.loads(run_dir.environment.read_bytes())) == starts


def begin(path, config):
    """Opens a run directory and leaves one step in it."""
    with RunDir.open(path, config) as run_dir:
        run_dir.metrics.write_text('{"step": 0, "loss": 1.0}\n')


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    begin(tmp_path, CONFIG)
    before = (tmp_path / "environment.json").read_bytes()
    with pytest.raises(RunDirError) as error:
        RunDir.open(tmp_path, {"seed": 2, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}})
    assert one_line(error) == (
        f"{tmp_path} belongs to a run with another config (seed: 1 -> 2, "
        "layers.1: {} -> (absent)); choose another --workdir, or resume with "
        f"--config.resume_from={tmp_path}"
    )
    assert (tmp_path / "environment.json").read_bytes() == before
    RunDir.open(tmp_path, CONFIG).close()


def test_only_the_first_of_many_differences_are_listed(tmp_path):
    begin(tmp_path, {f"field{n}": n for n in range(9)})
    with pytest.raises(RunDirError, match=r"field4: 4 -> 0 and 4 more\)"):
        RunDir.open(tmp_path, {f"field{n}": 0 for n in range(9)})


def test_a_field_that_is_absent_there_and_unset_here_is_no_difference(tmp_path):
    """A later version adds fields, and runs of an earlier version must still go on."""
    begin(tmp_path, {"seed": 1})
    RunDir.open(tmp_path, {"seed": 1, "later": None, "more": {"points": None}}).close()
    for value in (0, False, "", {}):
        with pytest.raises(RunDirError, match=r"later: \(absent\) -> "):
            RunDir.open(tmp_path, {"seed": 1, "later": value})
    with pytest.raises(RunDirError, match="seed: 1 -> null"):
        RunDir.open(tmp_path, {"seed": None})


def test_the_changes_from_another_run_are_told(tmp_path):
    RunDir.open(tmp_path / "a", {"seed": 1, "attention": {"output": "bfloat16"}}).close()
    with RunDir.open(tmp_path / "b", {"seed": 1, "attention": {"output": "float32"}}) as run_dir:
        changes = run_dir.changes_from(RunDir(tmp_path / "a"))
        assert changes == {"attention.output": ('"bfloat16"', '"float32"')}
        with pytest.raises(RunDirError, match="No such file"):
            run_dir.changes_from(RunDir(tmp_path / "c"))


@pytest.mark.parametrize("foreign", ["thesis.tex", "environment.json.bak", ".git"])
def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path, foreign):
    (tmp_path / foreign).write_text("mine")
    with pytest.raises(RunDirError, match="not a run directory and not empty") as error:
        RunDir.open(tmp_path, CONFIG)
    assert foreign in one_line(error)
    assert names(tmp_path) == [foreign]


@pytest.mark.parametrize("contents", [b"", b"{", b"\xff", b"5", b"[" * 100_000, b"other type"])
@pytest.mark.parametrize(("name", "other"), [("config.json", b"[]"), ("environment.json", b"{}")])
def test_damage_is_refused_and_mended_by_removing_the_file(tmp_path, name, other, contents):
    contents = other if contents == b"other type" else contents
    begin(tmp_path, CONFIG)
    (tmp_path / "report.png").touch()
    (tmp_path / name).write_bytes(contents)
    words = rf"{name} (is not JSON|holds \w+, not).*; remove it"
    with pytest.raises(RunDirError, match=words) as error:
        RunDir.open(tmp_path, CONFIG)
    one_line(error)
    (tmp_path / name).unlink()
    RunDir.open(tmp_path, CONFIG).close()
    with pytest.raises(RunDirError, match="another config"):
        RunDir.open(tmp_path, CONFIG | {"seed": 2})


def test_files_like_those_of_a_run_do_not_make_a_directory_one(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunDirError, match="not a run directory and not empty"):
        RunDir.open(tmp_path, CONFIG)


@pytest.mark.parametrize("config", [json.dumps({"seed": 2}), "{", "[]"])
def test_a_directory_without_a_step_is_taken_over(tmp_path, config):
    with RunDir.open(tmp_path, {"seed": 2}) as run_dir:
        run_dir.metrics.touch()
        run_dir.origin.write_text("{}")
    run_dir.config.write_text(config)
    with RunDir.open(tmp_path, CONFIG):
        assert json.loads(run_dir.config.read_text()) == json.loads(json.dumps(CONFIG))
        assert len(json.loads(run_dir.environment.read_text())) == 1
        assert not run_dir.origin.exists()
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "00000002.json").touch()
    with pytest.raises(RunDirError, match="another config"):
        RunDir.open(tmp_path, {"seed": 2})


def test_a_creation_killed_at_any_instant_is_completed(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed_at(instant, operation):
        calls = itertools.count()

        def wrapper(*args, **kwargs):
            if next(calls) == instant:
                raise Killed
            return operation(*args, **kwargs)

        return wrapper

    operations = {"mkdir": 1, "fsync": 4, "replace": 2}  # the number of calls during a creation
    for name, count in operations.items():
        for instant in range(count):
            path = tmp_path / f"{name}{instant}"
            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(os, name, killed_at(instant, getattr(os, name)))
                RunDir.open(path, CONFIG)
            assert not (path / "config.json").exists()
            RunDir.open(path, CONFIG).close()
            assert names(path) == ["config.json", "environment.json", "run.lock"]


def test_two_processes_cannot_use_one_directory(tmp_path):
    with RunDir.open(tmp_path, CONFIG):
        with pytest.raises(RunDirError, match="in use by another process") as error:
            RunDir.open(tmp_path, CONFIG)
        one_line(error)
        RunDir(tmp_path).config.read_bytes()  # reading needs no lock
    RunDir.open(tmp_path, CONFIG).close()


def test_sigkill_releases_the_directory(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from lowprec_attn.runs.run_dir import RunDir\n"
        f"run_dir = RunDir.open({str(tmp_path)!r}, {{}})\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(RunDirError, match="in use by another process"):
            RunDir.open(tmp_path, {})
        child.kill()
        child.wait()
        RunDir.open(tmp_path, {}).close()


def refuse(code):
    def operation(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return operation


@pytest.mark.parametrize(
    ("operation", "code", "words"),
    [
        ("mkdir", errno.EROFS, "Read-only file system"),
        ("mkdir", errno.EACCES, "Permission denied"),
        ("fsync", errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_disk_that_refuses_is_told_in_one_line(tmp_path, monkeypatch, operation, code, words):
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, refuse(code))
        with pytest.raises(RunDirError) as error:
            RunDir.open(tmp_path / "run", CONFIG)
    expected = (
        f"cannot use {tmp_path / 'run'} as a run directory: {words}; choose another --workdir"
    )
    assert one_line(error) == expected
    RunDir.open(tmp_path / "run", CONFIG).close()


def test_a_directory_in_the_place_of_a_record_is_to_be_moved_away(tmp_path):
    with RunDir.open(tmp_path / "run", CONFIG) as run_dir:
        run_dir.config.unlink()
        run_dir.config.mkdir()
        run_dir.metrics.write_text('{"step": 0}\n')
    with pytest.raises(RunDirError) as error:
        RunDir.open(tmp_path / "run", CONFIG)
    assert one_line(error) == (
        f"cannot use {tmp_path / 'run'} as a run directory: Is a directory; move away what stands "
        f"in the place of {tmp_path / 'run' / 'config.json'}, or give another place"
    )


@pytest.mark.parametrize("below", [".", "run"])
def test_a_file_in_the_place_of_the_directory_is_told_in_one_line(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirError, match="cannot use") as error:
        RunDir.open(tmp_path / "file" / below, CONFIG)
    one_line(error)


def test_json_files_are_replaced_in_one_step(tmp_path, monkeypatch):
    with RunDir.open(tmp_path, CONFIG) as run_dir:
        run_dir.write_json(run_dir.summary, {"val_loss": 3.0})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse(errno.ENOSPC))
            with pytest.raises(RunDirError, match="No space left"):
                run_dir.write_json(run_dir.summary, {"val_loss": 2.0})
        assert json.loads(run_dir.summary.read_bytes()) == {"val_loss": 3.0}


# Metrics.


@pytest.fixture
def run_dir(tmp_path):
    with RunDir.open(tmp_path / "run", CONFIG) as run_dir:
        yield run_dir


def write_steps(run_dir, start, stop):
    with MetricsWriter(run_dir, start) as writer:
        for step in range(start, stop):
            writer.write(step, {"loss": np.float32(1 / (step + 1)), "layers": {"0": [step, 0.1]}})
            writer.write_throughput(step, seconds=0.5, tokens=1000 + step)


def strict(line):
    """Parses JSON by the standard, without NaN and Infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_records_are_lines_of_json_in_the_given_order(run_dir):
    with MetricsWriter(run_dir, 0) as writer:
        record = {"loss": jnp.float32(2.5), "count": np.int32(3), "done": False, "note": "x"}
        writer.write(4, record | {"none": None, "layers": {"1": (1, jnp.arange(2.0))}})
        writer.write_throughput(4, seconds=2.0, tokens=500)
    assert run_dir.metrics.read_text() == (
        '{"step": 4, "loss": 2.5, "count": 3, "done": false, "note": "x", "none": null, '
        '"layers": {"1": [1, [0.0, 1.0]]}}\n'
    )
    assert metrics.read(run_dir.throughput) == [
        {"step": 4, "seconds": 2.0, "tokens_per_second": 250.0}
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_floats_come_back_bit_for_bit(run_dir, dtype):
    rng = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    values = np.frombuffer(rng.bytes(2000 * size), dtype)
    with np.errstate(invalid="ignore"):  # for the NaNs that ml_dtypes compares
        finite = values[np.isfinite(values)]
    values = np.concatenate([finite, np.array([0.0, -0.0], dtype)])
    with MetricsWriter(run_dir, 0) as writer:
        writer.write(0, {"array": values, "scalar": values[0]})
    (record,) = metrics.read(run_dir.metrics)
    assert np.array(record["array"]).astype(dtype).tobytes() == values.tobytes()
    assert np.array(record["array"]).tolist() == values.astype(np.float64).tolist()
    assert record["scalar"] == float(values[0])


def test_values_that_are_not_finite_are_texts_in_strict_json(run_dir):
    values = [math.nan, math.inf, -math.inf]
    with MetricsWriter(run_dir, 0) as writer:
        writer.write(0, {"loss": np.float32(np.nan), "all": values, "layer": {"max": jnp.inf}})
    (line,) = run_dir.metrics.read_text().splitlines()
    assert strict(line) == {
        "step": 0,
        "loss": "nan",
        "all": ["nan", "inf", "-inf"],
        "layer": {"max": "inf"},
    }
    (record,) = metrics.read(run_dir.metrics)
    assert math.isnan(record["loss"]) and math.isnan(record["all"][0])
    assert record["all"][1:] == values[1:] and record["layer"]["max"] == math.inf


@pytest.mark.parametrize("half", [b"", b'{"step": 7, "lo', b"{", b'{"step": 7}'])
@pytest.mark.parametrize("resumed_at", [0, 5, 7])
def test_an_interrupted_run_leaves_the_bytes_of_an_uninterrupted_one(tmp_path, half, resumed_at):
    with RunDir.open(tmp_path / "a", {}) as whole, RunDir.open(tmp_path / "b", {}) as resumed:
        write_steps(whole, 0, 10)
        write_steps(resumed, 0, 7)
        for path in (resumed.metrics, resumed.throughput):
            path.write_bytes(path.read_bytes() + half)
        write_steps(resumed, resumed_at, 10)
        assert resumed.metrics.read_bytes() == whole.metrics.read_bytes()
        assert resumed.throughput.read_bytes() == whole.throughput.read_bytes()
        assert len(metrics.read(whole.metrics)) == 10


def test_the_fingerprint_is_that_of_the_records_before_a_step(run_dir):
    before = {}
    with MetricsWriter(run_dir, 0) as writer:
        for step in (0, 1, 2):
            before[step] = writer.written_before(step)
            writer.write(step, {"val_loss": 1.0})
            writer.write(step, {"loss": 1.0 + step})
            assert writer.written_before(step) == before[step]
        assert writer.written_before(3) == Fingerprint.of(run_dir.metrics)
    with MetricsWriter(run_dir, 2) as writer:
        assert writer.written_before(2) == before[2]
        writer.flush()
        assert before[2] == Fingerprint.of(run_dir.metrics)


def test_a_start_that_records_nothing_shortens_nothing(run_dir):
    write_steps(run_dir, 0, 4)
    run_dir.metrics.write_bytes(run_dir.metrics.read_bytes() + b'{"step": 4, "lo')
    before = {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}
    with MetricsWriter(run_dir, 1):
        pass
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in run_dir.path.rglob("*") if path.is_file()} == {*before}
    with MetricsWriter(run_dir, 1) as writer:
        writer.write_throughput(1, 0.5, 8)
    assert [record["step"] for record in metrics.read(run_dir.metrics)] == [0]


def test_reading_leaves_out_a_line_that_is_being_written(run_dir):
    write_steps(run_dir, 0, 2)
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 2')
    assert [record["step"] for record in metrics.read(run_dir.metrics)] == [0, 1]


@pytest.mark.parametrize("line", [b"\0\0\0\n", b"[1]\n", b'{"loss": 1}\n', b"\n", b"\xff\n"])
def test_a_line_that_is_no_record_is_named(run_dir, line):
    write_steps(run_dir, 0, 2)
    damaged = run_dir.metrics.read_bytes() + line + b'{"step": 2}\n'
    run_dir.metrics.write_bytes(damaged)
    with pytest.raises(MetricsError, match="line 3 is not a record") as error:
        MetricsWriter(run_dir, 1)
    assert str(run_dir.metrics) in one_line(error)
    assert run_dir.metrics.read_bytes() == damaged


@contextlib.contextmanager
def file_size_limit(size):
    """Makes the system refuse to extend a file beyond `size` bytes, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_told_in_one_line_and_costs_no_record(run_dir, room):
    with MetricsWriter(run_dir, 0) as writer:
        for step in range(10):
            writer.write(step, {"loss": 1.0})
        with (
            file_size_limit(run_dir.metrics.stat().st_size + room),
            pytest.raises(MetricsError) as error,
        ):
            writer.write(10, {"loss": 1.0})
    assert one_line(error).startswith(f"cannot write metrics to {run_dir.path}: ")
    assert [record["step"] for record in metrics.read(run_dir.metrics)] == list(range(10))
    with MetricsWriter(run_dir, 10) as writer:
        writer.write(10, {"loss": 1.0})
    assert len(metrics.read(run_dir.metrics)) == 11


def test_a_disk_that_refuses_events_is_told_in_one_line(run_dir, monkeypatch):
    monkeypatch.setattr(metrics, "_TENSORBOARD_FLUSH_SECONDS", 0.0)
    with MetricsWriter(run_dir, 0) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse(errno.ENOSPC))
            with pytest.raises(MetricsError, match="No space left"):
                writer.write(0, {"loss": 1.0})
            with pytest.raises(MetricsError, match="No space left"):
                writer.flush()
        writer.write(1, {"loss": 1.0})


def test_a_directory_in_the_place_of_a_file_is_named(run_dir):
    run_dir.metrics.mkdir()
    with pytest.raises(MetricsError, match=rf"in the place of {run_dir.metrics},") as error:
        MetricsWriter(run_dir, 0)
    one_line(error)


def test_a_directory_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match="Not a directory") as error:
        MetricsWriter(RunDir(tmp_path / "file"), 0)
    assert isinstance(error.value, RunError)
    one_line(error)


def events(directory):
    """Yields the events of all files in the order in which TensorBoard reads them."""
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_gets_flat_names_and_purges_what_is_repeated(run_dir):
    with MetricsWriter(run_dir, 0) as writer:
        writer.write(3, {"loss": 2.0, "layer_2": {"score_max": [1.5, np.nan]}, "note": "text"})
    write_steps(run_dir, 2, 3)
    found = list(events(run_dir.tensorboard))
    assert [event.file_version for event in found if event.file_version] == ["brain.Event:2"] * 2
    purges = [event.step for event in found if event.session_log.status == SessionLog.START]
    assert purges == [0, 2]
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in found
        for value in event.summary.value
    ]
    assert scalars[:2] == [(3, "loss", 2.0), (3, "layer_2/score_max/0", 1.5)]
    assert scalars[2][1] == "layer_2/score_max/1" and math.isnan(scalars[2][2])
    assert [tag for _, tag, _ in scalars[3:]] == [
        "loss",
        "layers/0/0",
        "layers/0/1",
        "seconds",
        "tokens_per_second",
    ]
    assert all("tfevents" in name for name in names(run_dir.tensorboard))


# The environment.


def test_the_environment_is_json_and_tells_nothing_private(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/somebody/train.py", "--config=a.py"])
    described = environment.describe()
    assert json.loads(json.dumps(described)) == described
    assert set(described) == {
        "versions",
        "platform",
        "backend",
        "device_kind",
        "device_count",
        "process_count",
        "host_cpus",
        "date",
        "command",
        "commit",
    }
    assert described["versions"]["numpy"] == np.__version__
    assert described["versions"]["lowprec_attn"] == lowprec_attn.__version__
    assert described["command"] == ["train.py", "--config=a.py"]
    assert described["date"].endswith("+00:00")
    monkeypatch.setattr(sys, "argv", ["/home/somebody/lowprec_attn/__main__.py", "train"])
    assert environment.describe()["command"] == ["python", "-m", "lowprec_attn", "train"]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
    assert environment.describe()["versions"]["no-such-package"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_this_project_only(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for package in ("lowprec_attn", "venv/lowprec_attn"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("")
    source = tmp_path / "lowprec_attn" / "__init__.py"
    monkeypatch.setattr(lowprec_attn, "__file__", str(source))
    assert environment.describe()["commit"] is None
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert environment.describe()["commit"] == commit
    source.write_text("# changed\n")
    assert environment.describe()["commit"] == f"{commit}-dirty"
    installed = tmp_path / "venv" / "lowprec_attn" / "__init__.py"
    monkeypatch.setattr(lowprec_attn, "__file__", str(installed))
    assert environment.describe()["commit"] is None


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(subprocess, "run", refuse(errno.ENOENT))
    assert environment.describe()["commit"] is None
