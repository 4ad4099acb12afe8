"""What a run keeps when checkpoints are lost, when a start fails, and when it has ended."""

import functools
import json
import os
import shutil
import signal
import time

import pytest
from command import run_here

from lowprec_attn.runs import metrics
from lowprec_attn.runs.manifest import Manifest
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training import announcement, loop

pytestmark = pytest.mark.usefixtures("compiled_once", "no_report")


@pytest.mark.parametrize(
    ("val_loss", "words"),
    [(2.64, "0.612 below the unigram"), (5.21, "1.958 above the unigram"), (3.252, "0.000 below")],
)
def test_the_outcome_says_on_which_side_of_the_unigram_model_the_loss_is(val_loss, words):
    said = announcement.outcome(val_loss, 3.252)
    assert f"validation loss {val_loss:.3f} nats per token, {words}" in said
    assert said.endswith("model's 3.252")


@pytest.fixture(scope="module")
def run(text, compiled_once):
    """Runs 12 steps with bounded scores, with checkpoints at 4, 8 and 12."""
    small = {"attention__implementation": "tiled", "model__layers": 1, "diagnostics_every": 0}
    small |= {"optimizer__qk_clip": 0.1, "model__z_loss": 0.01}
    return functools.partial(run_here, data__path=text, **small)


@pytest.fixture(scope="module")
def ended(run, tmp_path_factory):
    """The directory of a finished run."""
    workdir = tmp_path_factory.mktemp("runs") / "ended"
    run(workdir)
    return workdir


def test_a_run_records_how_many_heads_it_clipped(ended):
    counts = [r["heads_clipped"] for r in metrics.read(ended / "metrics.jsonl") if "loss" in r]
    assert len(counts) == 12 and max(counts) > 0


@pytest.fixture
def copy(ended, tmp_path):
    shutil.copytree(ended, tmp_path / "copy")
    return tmp_path / "copy"


def remove_manifests(workdir):
    for path in (workdir / "checkpoints").glob("*.json"):
        path.unlink()


def dangle(workdir):
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").symlink_to(workdir / "another disk")


def interrupt(workdir):
    """Makes the run unfinished, without checkpoints."""
    (workdir / "summary.json").unlink()
    shutil.rmtree(workdir / "checkpoints")


LOSSES = {
    "checkpoints deleted": lambda workdir: shutil.rmtree(workdir / "checkpoints"),
    "manifests deleted": remove_manifests,
    "link to nothing": dangle,
    "before its end": interrupt,
}


def contents(workdir):
    """The contents of all files, except for the two that every start changes."""
    left_out = {"environment.json", "run.lock"}
    files = (path for path in workdir.rglob("*") if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(workdir)): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", LOSSES)
def test_a_run_whose_checkpoints_are_lost_keeps_its_records_and_is_told_two_ways_on(
    run, copy, case
):
    LOSSES[case](copy)
    before = contents(copy)
    assert "metrics.jsonl" in before
    _, err = run(copy, code=1)
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert f"{copy} has the records of a run" in line
    assert "--config.resume_from=RUN" in line and "another --workdir" in line
    assert contents(copy) == before


class KilledError(BaseException):
    """Stands for kill -9."""


@pytest.fixture
def killed(run, tmp_path, monkeypatch):
    """The directory after kill -9 at step 3, before the first checkpoint was due."""
    workdir = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(loop.Loop, "_before", kill_at(3, loop.Loop._before))
        run(workdir)
    return workdir


def kill_at(last, before):
    def killing(self, step):
        if step == last:
            raise KilledError
        before(self, step)

    return killing


@pytest.mark.parametrize("words", [{}, {"optimizer__peak_lr": 0.5}])
def test_a_start_that_fails_costs_no_record(run, killed, monkeypatch, words):
    copy = killed
    before = contents(copy)

    def fail(self):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "run", fail)
        if words:
            _, err = run(copy, code=1, **words)
            assert "belongs to a run with another config (optimizer.peak_lr:" in err
        else:
            with pytest.raises(RuntimeError, match="no memory"):
                run(copy)
    assert contents(copy) == before


def records_are_equal(workdir, other):
    names = ("metrics.jsonl", "data_order.txt")
    return all((workdir / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_run_that_was_killed_before_its_first_checkpoint_is_due_goes_on(run, ended, killed):
    assert [path.name for path in (killed / "checkpoints").glob("*.json")] == ["00000000.json"]
    assert (killed / "metrics.jsonl").stat().st_size
    out, _ = run(killed)
    assert "resuming at step 0" in out
    assert records_are_equal(killed, ended)


def test_its_checkpoint_may_be_lost_like_any_other(run, killed):
    shutil.rmtree(killed / "checkpoints")
    before = contents(killed)
    _, err = run(killed, code=1)
    assert f"{killed} has the records of a run, and no checkpoint, so it cannot go on" in err
    assert contents(killed) == before


def test_kills_around_the_first_checkpoint_leave_it_before_any_record(
    run, ended, tmp_path, monkeypatch
):
    """Resumes from before the first manifest, from after it, and from after the first record."""
    write, record = Manifest.write, MetricsWriter.write

    def snapshot(name):
        if not (tmp_path / name).exists():
            shutil.copytree(tmp_path / "run", tmp_path / name)

    def slowly(self, path):
        time.sleep(1 if path.stem == "00000000" else 0)  # longer than the run's 12 steps
        snapshot("before")
        write(self, path)
        snapshot("complete")

    def recording(self, *args):
        record(self, *args)
        snapshot("recorded")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", slowly)
        patch.setattr(MetricsWriter, "write", recording)
        run(tmp_path / "run")
    sizes = [
        (tmp_path / name / "metrics.jsonl").stat().st_size
        for name in ("before", "complete", "recorded")
    ]
    assert sizes[:2] == [0, 0] and sizes[2] > 0
    for name, resumed in (("before", False), ("complete", True), ("recorded", True)):
        out, _ = run(tmp_path / name)
        assert ("resuming at step 0" in out) == resumed
        assert records_are_equal(tmp_path / name, ended)


def test_a_start_without_a_step_may_be_repeated_with_another_config(run, tmp_path, monkeypatch):
    """For example after a batch that does not fit; its checkpoint is useless and is removed."""

    def fail(self, step):
        raise RuntimeError("no memory")

    workdir, fresh = tmp_path / "run", tmp_path / "fresh"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(loop.Loop, "_dispatch", fail)
        run(workdir)
    assert (workdir / "checkpoints" / "00000000.json").exists()
    changed = {"seed": 7, "model__width": 32}
    out, err = run(workdir, **changed)
    assert "resuming" not in out and "skipping" not in err
    run(fresh, **changed)
    assert records_are_equal(workdir, fresh)


def test_signals_to_end_save_and_are_told_from_each_other(run, tmp_path, monkeypatch):
    workdir, before = tmp_path / "run", loop.Loop._before
    for asked, code, resumed, last in ((signal.SIGTERM, 0, 0, 3), (signal.SIGINT, 130, 4, 6)):

        def signalled(self, step, asked=asked, last=last):
            before(self, step)
            if step == last:
                os.kill(os.getpid(), asked)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_before", signalled)
            out, err = run(workdir, code, checkpoint_every=0)
        name = asked.name
        assert f"{name}: ends after this step, with a checkpoint; Ctrl-C again ends at once" in out
        assert "Traceback" not in out + err
        assert f"stopped by a signal after {last + 1} steps" in out
        assert (f"resuming at step {resumed}\n" in out) == (resumed > 0)
        saved = sorted(int(path.stem) for path in (workdir / "checkpoints").glob("*.json"))
        assert saved == [resumed, last + 1]


def test_a_finished_run_says_so_and_changes_nothing(run, copy):
    before = contents(copy)
    out, _ = run(copy)
    loss = json.loads(before["summary.json"])["val_loss"]
    last = out.splitlines()[-1]
    assert last.startswith(f"finished: all 12 steps are done, validation loss {loss:.3f}; ")
    assert f"--config.resume_from={copy}" in last
    assert contents(copy) == before


def test_a_run_that_was_killed_while_it_reported_is_not_finished(run, copy):
    summary = copy / "summary.json"
    record = json.loads(summary.read_text())
    assert record["complete"]
    summary.write_text(json.dumps({**record, "complete": False}))
    out, _ = run(copy)
    assert "finished:" not in out and "validation loss" in out
    assert json.loads(summary.read_text()) == record


@pytest.mark.parametrize("complete", [True, False])
def test_as_many_checkpoints_remain_as_are_to_be_kept(run, copy, complete):
    """Also if a run was killed before it had deleted the oldest."""
    manifests = copy / "checkpoints"
    assert [path.stem for path in sorted(manifests.glob("*.json"))] == ["00000008", "00000012"]
    shutil.copytree(manifests / "00000008-0", manifests / "00000004-0")
    text = (manifests / "00000008.json").read_text()
    (manifests / "00000004.json").write_text(text.replace("00000008-0", "00000004-0"))
    if not complete:
        summary = copy / "summary.json"
        summary.write_text(summary.read_text().replace("true", "false"))
    run(copy)
    assert [path.name for path in sorted(manifests.iterdir())] == [
        "00000008-0",
        "00000008.json",
        "00000012-0",
        "00000012.json",
    ]


@pytest.mark.parametrize("name", ["summary", "failure"])
def test_the_last_file_is_written_after_the_report(tmp_path, name):
    run_dir = RunDir.open(tmp_path, {})
    path, seen = getattr(run_dir, name), []
    run_dir.end(path, {"step": 3}, lambda: seen.append(json.loads(path.read_text())))
    run_dir.close()
    assert seen == [{"step": 3, "complete": False}]
    assert json.loads(path.read_text()) == {"step": 3, "complete": True}
