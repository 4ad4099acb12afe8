"""What runs alongside training: repeated actions, and the copy that outlives the machine."""

import contextlib
import itertools
import shutil
import threading

import fsspec
import numpy as np
import pytest
from command import without_report
from tiny import tiny_config

from lowprec_attn.files import Fingerprint, append_line
from lowprec_attn.runs import live, mirror
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.manifest import Manifest
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.run import train

pytestmark = pytest.mark.usefixtures("text_read_once")


def trained(path, **changes):
    fields = {"devices": 1, "model__layers": 1, "attention__implementation": "tiled"}
    config = tiny_config(**fields, **{"diagnostics_every": 0} | changes)
    with without_report():
        assert train(train_settings(config), config, path) == 0
    return RunDir(path)


@pytest.fixture(scope="module")
def finished(text_read_once, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run")


def records(run_dir):
    return run_dir.metrics.read_bytes(), run_dir.data_order.read_bytes()


@pytest.fixture(params=["directory", "memory"])
def url(request, tmp_path):
    """A mounted drive, and a store without directories."""
    if request.param == "directory":
        return str(tmp_path / "drive" / "run")
    return f"memory://bucket/{tmp_path.name}/run"


def test_an_action_is_repeated_and_made_once_more_at_the_end():
    calls = []
    twice = threading.Event()

    def action():
        calls.append(threading.current_thread())
        if len(calls) == 2:
            twice.set()

    with live.every(0.001, action):
        assert twice.wait(10)
    assert calls[-1] is threading.main_thread()
    assert all(thread is not threading.main_thread() for thread in calls[:-1])


def test_an_error_is_logged_and_tried_again_and_raised_at_last(caplog):
    failed = threading.Event()

    def action():
        failed.set()
        raise OSError("the drive is full")

    with pytest.raises(OSError, match="full"), live.every(0.001, action):
        assert failed.wait(10)
    assert "OSError: the drive is full; trying again" in caplog.text


def test_an_interrupted_body_is_what_is_raised(caplog):
    def action():
        raise OSError("the drive is full")

    with pytest.raises(KeyboardInterrupt), live.every(60, action):
        raise KeyboardInterrupt
    assert "the drive is full" in caplog.text
    with pytest.raises(ValueError, match="got 0"), live.every(0, action):
        pass


def test_a_copy_continues_the_run_on_another_machine(tmp_path, finished):
    stopped = tmp_path / "stopped"
    shutil.copytree(finished.path, stopped)
    (stopped / "checkpoints" / "00000006.json").unlink()  # as if killed before its last checkpoint
    mirror.push(RunDir(stopped), str(tmp_path / "drive"))
    assert mirror.pull(str(tmp_path / "drive"), tmp_path / "continued")
    assert records(trained(tmp_path / "continued")) == records(finished)


def test_a_run_without_a_checkpoint_is_not_copied(tmp_path, finished):
    """Its copy could not go on, because the records would be ahead of every checkpoint."""
    begun = tmp_path / "begun"
    shutil.copytree(finished.path, begun)
    for manifest in (begun / "checkpoints").glob("*.json"):
        manifest.unlink()
    mirror.push(RunDir(begun), str(tmp_path / "drive"))
    assert not mirror.pull(str(tmp_path / "drive"), tmp_path / "back")


def test_a_copy_follows_the_run(tmp_path, url, finished):
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    newest = run / "checkpoints" / "00000006.json"
    hidden = newest.rename(tmp_path / "hidden")
    mirror.push(RunDir(run), url)
    hidden.rename(newest)
    mirror.push(RunDir(run), url)
    assert mirror.pull(url, tmp_path / "back")
    back = tmp_path / "back"
    assert [path.name for path in sorted((back / "checkpoints").iterdir())] == [
        "00000006-0",
        "00000006.json",
    ]
    Manifest.read(back / "checkpoints" / "00000006.json").verify(back / "checkpoints")
    names = {path.name for path in finished.path.iterdir()} - {"run.lock"}
    assert {path.name for path in back.iterdir()} == names
    with pytest.raises(mirror.MirrorError, match="back"):
        mirror.pull(url, back)


def test_a_copy_cut_short_leaves_the_checkpoint_before(tmp_path, monkeypatch, finished):
    url, run = str(tmp_path / "drive"), tmp_path / "run"
    shutil.copytree(finished.path, run)
    newest = run / "checkpoints" / "00000006.json"
    hidden = newest.rename(tmp_path / "hidden")
    mirror.push(RunDir(run), url)
    hidden.rename(newest)
    put = mirror._put

    def put_some(path, name, target):
        if name.endswith(".json"):
            raise OSError("connection lost")
        put(path, name, target)

    monkeypatch.setattr(mirror, "_put", put_some)
    with pytest.raises(mirror.MirrorError, match="connection lost"):
        mirror.push(RunDir(run), url)
    assert mirror.pull(url, tmp_path / "back")
    (manifest,) = (tmp_path / "back" / "checkpoints").glob("*.json")
    assert manifest.name == "00000004.json"
    Manifest.read(manifest).verify(manifest.parent)


def test_a_step_that_is_taken_again_leaves_its_first_copy_intact_until_the_second(
    tmp_path, url, monkeypatch
):
    """A rollback takes back a checkpoint, and the run saves the same step under the same names."""
    with RunDir.open(tmp_path / "run", {"seed": 0}) as run:
        pass

    def push(value, limit=99):
        with Checkpoints(run.checkpoints) as checkpoints:
            checkpoints.discard(lambda step, records: True)
            checkpoints.save(3, {"w": np.full(2, value, np.float32)}, {})
        puts = itertools.count()

        def put_some(path, name, target):
            if next(puts) >= limit:
                raise OSError("connection lost")
            put(path, name, target)

        monkeypatch.setattr(mirror, "_put", put_some)
        mirror.push(run, url)

    def pulled(name):
        assert mirror.pull(url, tmp_path / name)
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            return checkpoints.restore({"w": np.zeros(2, np.float32)}).state["w"][0]

    put = mirror._put
    push(1)
    with pytest.raises(mirror.MirrorError, match="connection lost"):
        push(2, limit=2)
    assert pulled("cut") == 1
    for value in (3, 4):
        push(value)
        assert pulled(f"back{value}") == value
        assert len(list((tmp_path / f"back{value}" / "checkpoints").iterdir())) == 2
    sent = []

    def put_and_tell(path, name, target):
        sent.append(name)
        put(path, name, target)

    monkeypatch.setattr(mirror, "_put", put_and_tell)
    mirror.push(run, url)
    assert not [name for name in sent if name.startswith("checkpoints/")]


def gone_back(run):
    """Changes a run as a rollback from step 6 to step 4 does, and the steps that follow it."""
    (run / "checkpoints" / "00000006.json").unlink()
    kept = Manifest.read(run / "checkpoints" / "00000004.json").records
    line = '{"to": 4, "onset": 5, "detected": 5, "skipped": 2, "reason": "excess"}\n'
    (run / "rollbacks.jsonl").write_text(line)
    for name, file in kept.items():
        (run / name).write_bytes((run / name).read_bytes()[: file.size] + b"other steps\n")


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_copy_cut_short_at_any_instant_can_go_on(tmp_path, monkeypatch, goes_back):
    """The records fit the checkpoint from which the run would start."""
    url = f"memory://bucket/{tmp_path.name}"
    with RunDir.open(tmp_path / "run", {"seed": 0}) as run, Checkpoints(run.checkpoints) as kept:
        for step in (2, 4, 6):
            paths = (run.metrics, run.data_order)
            for path in paths:
                append_line(path, f"up to step {step}")
            kept.save(step, {"w": np.zeros(1)}, {}, {p.name: Fingerprint.of(p) for p in paths})
            if step == (6 if goes_back else 4):
                kept.wait()
                mirror.push(run, f"{url}/full")
    for path in paths:
        append_line(path, "and after it")
    if goes_back:
        gone_back(run.path)
    left, found, files = 0, [], mirror.DirFileSystem

    def limited(method):
        def call(target, *names, **options):
            nonlocal left
            if not left:
                raise OSError("connection lost")
            left -= 1
            return method(target, *names, **options)

        return call

    methods = ("put_file", "pipe_file", "mv", "rm_file")
    cut = {name: limited(getattr(files, name)) for name in methods}
    memory = fsspec.filesystem("memory")
    for calls in itertools.count():
        memory.copy(f"{url}/full", f"{url}/cut{calls}", recursive=True)
        left, back = calls, tmp_path / f"back{calls}"
        with monkeypatch.context() as patched, contextlib.suppress(mirror.MirrorError):
            for name, method in cut.items():
                patched.setattr(files, name, method)
            mirror.push(run, f"{url}/cut{calls}")
        assert mirror.pull(f"{url}/cut{calls}", back)
        undone = rollbacks.read(back / "rollbacks.jsonl")
        manifests = {int(p.stem): Manifest.read(p) for p in back.glob("checkpoints/*.json")}
        step = max(s for s, m in manifests.items() if not rollbacks.undone(undone, s, m.records))
        manifests[step].verify(back / "checkpoints")
        RunDir(back).require_records(step, manifests[step].records)
        found.append(step)
        if left:
            break
    assert found == sorted(found, reverse=goes_back)
    assert set(found) == {4, 6}
    mirror.push(run, f"{url}/cut{calls - 20}")  # completes what was cut short
    names = [memory.find(f"{url}/cut{n}") for n in (calls - 20, calls)]
    assert [n.split("/cut")[1].partition("/")[2] for n in names[0]] == [
        n.split("/cut")[1].partition("/")[2] for n in names[1]
    ]
    assert not [n for n in names[1] if ".records/" in n or n.endswith(".tmp")]


def test_a_damaged_checkpoint_does_not_replace_the_copy(tmp_path, finished):
    url, run = tmp_path / "drive", tmp_path / "run"
    shutil.copytree(finished.path, run)
    newest = run / "checkpoints" / "00000006.json"
    hidden = newest.rename(tmp_path / "hidden")
    mirror.push(RunDir(run), str(url))
    hidden.rename(newest)
    name = max(Manifest.read(newest).files)
    (run / "checkpoints" / "00000006-0" / name).write_bytes(b"damaged")
    with pytest.raises(mirror.MirrorError, match=r"00000006-0/.* has 7 bytes instead of"):
        mirror.push(RunDir(run), str(url))
    (manifest,) = (url / "checkpoints").glob("*.json")
    Manifest.read(manifest).verify(url / "checkpoints")


def test_a_rollback_during_a_copy_leaves_the_copy_as_it_was(tmp_path, monkeypatch, finished):
    url, run = tmp_path / "drive", tmp_path / "run"
    shutil.copytree(finished.path, run)
    hidden = (run / "checkpoints" / "00000006.json").rename(tmp_path / "hidden")
    mirror.push(RunDir(run), str(url))
    hidden.rename(run / "checkpoints" / "00000006.json")
    put = mirror._put

    def put_as_the_run_goes_back(path, name, target):
        if not (run / "rollbacks.jsonl").exists():
            gone_back(run)
        put(path, name, target)

    monkeypatch.setattr(mirror, "_put", put_as_the_run_goes_back)
    with pytest.raises(mirror.MirrorError, match="went back from checkpoint 6 while it was copied"):
        mirror.push(RunDir(run), str(url))
    assert [path.name for path in (url / "checkpoints").glob("*.json")] == ["00000004.json"]
    assert not (url / "rollbacks.jsonl").exists()
    mirror.push(RunDir(run), str(url))
    assert (url / "rollbacks.jsonl").exists()


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path):
    with RunDir.open(tmp_path / "run", {"seed": 0}) as run, Checkpoints(run.checkpoints) as kept:
        for step in (99_999_999, 100_000_000):
            kept.save(step, {"w": np.zeros(2, np.float32)}, {})
    mirror.push(run, str(tmp_path / "drive"))
    (manifest,) = (tmp_path / "drive" / "checkpoints").glob("*.json")
    assert manifest.name == "100000000.json"


def test_a_failure_that_the_run_has_left_behind_leaves_the_copy_too(tmp_path, url, finished):
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    (run / "failure.json").write_text('{"step": 3, "message": "not finite"}')
    mirror.push(RunDir(run), url)
    (run / "failure.json").unlink()
    mirror.push(RunDir(run), url)
    assert mirror.pull(url, tmp_path / "back")
    assert not (tmp_path / "back" / "failure.json").exists()
    assert (tmp_path / "back" / "summary.json").exists()


def test_an_address_of_an_unknown_protocol_is_refused(tmp_path):
    for use in (mirror.push, mirror.pull):
        arguments = (RunDir(tmp_path), "nope://x") if use is mirror.push else ("nope://x", tmp_path)
        with pytest.raises(mirror.MirrorError, match="nope://x is no path and no address"):
            use(*arguments)


def test_nothing_is_pulled_where_there_is_nothing(tmp_path, url):
    assert not mirror.pull(url, tmp_path / "run")
    assert not (tmp_path / "run").exists()
