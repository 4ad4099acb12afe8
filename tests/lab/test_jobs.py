"""Arms as jobs, run by submitit's executor for this host, with stand-ins for Slurm's output."""

import os
import signal
import sys

import pytest
from processes.stand_in import STAND_IN, wait_until

submitit = pytest.importorskip("submitit", reason="needs submitit")

from lowprec_attn.commands import lab as command  # noqa: E402
from lowprec_attn.commands.main import EXIT_BAD_INPUT  # noqa: E402
from lowprec_attn.errors import RunError  # noqa: E402
from lowprec_attn.lab import jobs  # noqa: E402
from lowprec_attn.lab.processes import Slot, Task  # noqa: E402
from lowprec_attn.lab.workdir import internal  # noqa: E402

SLURM = "--launcher=slurm"


class LocalCluster(jobs.Cluster):
    """Runs jobs as processes of this host."""

    slot = Slot("this host", {}, "job")

    def __init__(self, folder):
        self.folder, self._executor = folder, submitit.LocalExecutor(folder)
        self._executor.update_parameters(timeout_min=60)

    def submit(self, training):
        return self._executor.submit(training)

    def earlier(self, record):
        return None

    def states(self, asked):
        return {job.job_id: "gone" if job.done() else "running" for job in asked}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "_LEFT_SECONDS", 1.0)


def test_arms_run_as_jobs_and_the_same_command_continues(lab, monkeypatch):
    local = lambda args, workdir: LocalCluster(internal(workdir) / "jobs")  # noqa: E731
    monkeypatch.setattr(command, "_cluster", local)
    acts = {"good": "finish", "bad": "fail", "wild": "nan"}
    code, output = lab(acts, SLURM)
    assert code == EXIT_BAD_INPUT
    for name in acts:
        assert f"{name}: not started yet; waits for this host (job " in output
    assert "good: done, validation loss 2.500" in output
    assert "wild: not finite at step 7" in output
    error = output[output.index("error: ") :]
    assert "bad failed: exit code 1" in error and error.count("of the traceback") == 5
    (lab.out / "mended").touch()
    code, output = lab(acts, SLURM)
    assert code == 0
    assert output.count("waits for this host") == 1


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """An arm that saves on SIGTERM: its task, its cluster, and the list of submitted jobs."""
    trainer = tmp_path / "stand_in.py"
    trainer.write_text(STAND_IN)
    words = ["--config.act=wait", f"--workdir={tmp_path / 'arm'}"]
    task = Task("arm", [sys.executable, str(trainer), *words], tmp_path / "arm.log")
    cluster = LocalCluster(tmp_path / "jobs")
    submitted = []
    submit = cluster.submit
    monkeypatch.setattr(
        cluster, "submit", lambda training: submitted.append(submit(training)) or submitted[-1]
    )
    return task, cluster, submitted


def until(events, task, text):
    """Follows the jobs until the arm has printed the text."""
    wait_until(lambda: next(events, ...) is ... or text in _log(task))


def _log(task):
    return task.log.read_text() if task.log.exists() else ""


def test_a_job_that_must_end_saves_and_is_queued_again(waiting):
    task, cluster, submitted = waiting
    events = jobs.run_jobs([task], cluster, {})
    assert next(events).kind == "submitted"
    until(events, task, "listening")
    (task.log.parent / "mended").touch()
    (job,) = submitted
    for pid in _children(job._process.pid):  # as Slurm does 90 seconds before the time limit
        os.kill(pid, signal.SIGUSR2)
    *_, last = (event for event in events if event is not None)
    assert (last.kind, last.code, last.stopping) == ("ended", 0, False)
    assert _log(task).split() == ["listening", "saved"]
    assert (task.log.parent / "arm" / "summary.json").exists()
    assert len(submitted) == 1


def test_a_signal_ends_the_jobs_with_a_checkpoint(waiting):
    task, cluster, _ = waiting
    events = jobs.run_jobs([task], cluster, {})
    until(events, task, "listening")
    os.kill(os.getpid(), signal.SIGTERM)
    *_, last = (event for event in events if event is not None)
    assert (last.kind, last.code, last.stopping) == ("ended", 0, True)
    assert _log(task).split() == ["listening", "saved"]
    # The next job is not told to stop.
    (task.log.parent / "mended").touch()
    *_, last = (event for event in jobs.run_jobs([task], cluster, {}) if event is not None)
    assert (last.code, last.stopping) == (0, False)


def test_an_arm_that_others_stop_is_said_to_be_stopped(lab, monkeypatch):
    """As after `scancel`: Slurm sends SIGTERM to the trainer too, which saves and ends with 0."""
    local = lambda args, workdir: LocalCluster(internal(workdir) / "jobs")  # noqa: E731
    monkeypatch.setattr(command, "_cluster", local)
    code, output = lab({"a": "stopped"}, SLURM)
    assert code == EXIT_BAD_INPUT
    assert "error: a failed: stopped from outside, interrupted after 1 step; " in output


@pytest.mark.parametrize(
    ("states", "kinds"),
    [
        (["waiting", "running", "waiting", "running", "gone"],
         ["submitted", "started", "submitted", "started", "ended"]),
        (["waiting", "gone"], ["submitted", "ended"]),  # cancelled before it began
    ],
)  # fmt: skip
def test_what_jobs_do_is_said(states, kinds, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_LEFT_SECONDS", 0.0)
    cluster = LocalCluster(tmp_path / "jobs")
    left = iter(states)
    monkeypatch.setattr(cluster, "states", lambda asked: {job.job_id: next(left) for job in asked})
    monkeypatch.setattr(cluster, "submit", lambda _: submitit.LocalJob(tmp_path, "7"))
    task = Task("arm", ["true"], tmp_path / "arm.log")
    events = [event for event in jobs.run_jobs([task], cluster, {}) if event is not None]
    assert [event.kind for event in events] == kinds
    assert events[-1].code == -signal.SIGKILL, "no result"


def test_a_job_that_slurm_refuses_is_one_clear_line(lab, tmp_path, monkeypatch):
    login_node(tmp_path, monkeypatch)
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Memory specification can not be satisfied' >&2\n"
        "echo 'sbatch: error: Batch job submission failed: Requested node configuration is not "
        "available' >&2\nexit 1\n"
    )
    code, output = lab({"a": "finish"}, SLURM, "--slurm", "time=5", "mem=900G")
    assert code == EXIT_BAD_INPUT
    (line,) = output.splitlines()
    assert line == (
        "error: Slurm refuses a: Memory specification can not be satisfied; Requested node "
        "configuration is not available"
    )


def test_a_job_without_a_result_is_a_failure_that_says_so(waiting):
    task, cluster, submitted = waiting
    events = jobs.run_jobs([task], cluster, {})
    until(events, task, "listening")
    (job,) = submitted
    for pid in _children(job._process.pid):
        os.kill(pid, signal.SIGKILL)
    os.kill(job._process.pid, signal.SIGKILL)
    *_, last = (event for event in events if event is not None)
    assert last.code == -signal.SIGKILL
    assert f"job {job.job_id} ended without a result" in _log(task)


def _children(pid):
    """The processes below this one, the deepest first."""
    path = f"/proc/{pid}/task/{pid}/children"
    with open(path) as file:
        direct = [int(word) for word in file.read().split()]
    return [child for of in direct for child in (*_children(of), of)]


def test_what_slurm_says_of_jobs(tmp_path, monkeypatch):
    login_node(tmp_path, monkeypatch)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 7 RUNNING; echo 8 PENDING; echo 9 COMPLETING\n")
    cluster = jobs.Cluster(tmp_path, {"time": "5"})
    all_jobs = [submitit.SlurmJob(tmp_path, str(number)) for number in (7, 8, 9, 10)]
    states = {"7": "running", "8": "waiting", "9": "running", "10": "gone"}
    assert cluster.states(all_jobs) == states
    record = tmp_path / "arm.json"
    assert cluster.earlier(record) is None
    record.write_text('{"job": "8"}')
    assert cluster.earlier(record).job_id == "8"
    record.write_text('{"job": "10"}')
    assert cluster.earlier(record) is None
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert set(cluster.states(all_jobs).values()) == {"waiting"}, "a controller may be away"
    squeue.write_text("#!/bin/sh\necho slurm is being updated tonight; echo 7 RUNNING\n")
    assert set(cluster.states(all_jobs).values()) == {"waiting"}, "no list of jobs"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([SLURM], "--slurm lacks time=MINUTES"),
        ([SLURM, "--slurm", "time"], "say KEY=VALUE, as in time=240"),
        ([SLURM, "--jobs=2", "--slurm", "time=5"], "--jobs is for processes"),
        ([SLURM, "--slurm", "time=5", "partitoin=a"], "['partitoin']"),
        ([SLURM, "--slurm", "time=5", "time=6"], "--slurm time=6: time is 5 already"),
        *(
            ([SLURM, "--slurm", f"time={time}"], f"time={time}: must be a whole number, 1 or more")
            for time in ("0", "-5", "1-00:00:00", "ten", "²")
        ),
        ([SLURM, "--slurm", "time=3"], "time=3: must be 4 or more, because Slurm tells a job"),
        ([SLURM, "--slurm", "time=9", "signal_delay_s=600"], "time=9: must be 12 or more"),
        ([SLURM, "--slurm", "time=5", "signal_delay_s=x"], "signal_delay_s=x: must be a whole"),
        (["--slurm", "time=5"], "needs --launcher=slurm"),
    ],
)
def test_options_that_cannot_serve_are_one_clear_line(lab, options, says, tmp_path, monkeypatch):
    login_node(tmp_path, monkeypatch)
    code, output = lab({"a": "finish"}, *options)
    assert code == EXIT_BAD_INPUT
    (line,) = output.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_name_of_digits_reaches_slurm_as_it_is(tmp_path, monkeypatch):
    login_node(tmp_path, monkeypatch)
    given = {"time": "060", "account": "0042", "cpus_per_task": "8", "mem": "64G"}
    asked = jobs.Cluster(tmp_path, given)._executor.parameters
    assert asked == {"time": 60, "account": "0042", "cpus_per_task": 8, "mem": "64G"}


def login_node(directory, monkeypatch):
    """Stand-ins for Slurm's programs, which do nothing."""
    for name in ("srun", "sbatch", "squeue"):
        program = directory / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)


def test_what_is_absent_is_said(tmp_path, monkeypatch):
    login_node(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("squeue", "sbatch", "srun"):
        (tmp_path / name).unlink()
        with pytest.raises(RunError, match=f"there is no {name} here; run it on a login node"):
            jobs.Cluster(tmp_path, {"time": "5"})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RunError, match="needs submitit: pip install"):
        jobs.Cluster(tmp_path, {"time": "5"})
