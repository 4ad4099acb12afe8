"""Runs arms as Slurm jobs through submitit: one job per arm, which trains in its own process.

Slurm sends SIGUSR2 to a job whose time is almost up or that is preempted. The job then ends its
trainer, which saves a checkpoint, and queues itself again under the same number. Jobs outlive the
`lab run` that submitted them. The same command finds the jobs that are still queued or running.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowprec_attn import installation
from lowprec_attn.errors import RunError
from lowprec_attn.files import read_record, write_atomically, write_json
from lowprec_attn.lab.processes import Event, Kind, Slot, Task, stop_requests

_POLL_SECONDS = 2.0
_LEFT_SECONDS = 10.0  # how long a job's result may take to appear after the job has left the queue
_REQUEUES = 1000  # most requeues after a time limit; after preemptions there is no limit
_LOG_LINES = 3
_SIGNAL_SECONDS = 90  # submitit's `signal_delay_s`: how long before its limit a job is told to end
_EARLY_SECONDS = 60  # Slurm may tell it so much earlier: `sbatch --signal`
_WHOLE = {"time", "signal_delay_s"}
_SBATCH = re.compile(r"^(sbatch: error: )?(Batch job submission failed: )?")  # before a reason
_RUNNING, _WAITING, _GONE = "running", "waiting", "gone"


class Training:
    """The work of a job: runs an arm's command, and queues it again when the job must end.

    Args:
      task: the command and its log.
      environment: variables to add to the job's own environment.
      stop: the path of a file. When it appears, the trainer saves a checkpoint and the job ends.
    """

    def __init__(self, task: Task, environment: Mapping[str, str], stop: Path) -> None:
        self.task, self.environment, self.stop = task, dict(environment), stop
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Runs the command and returns its exit code."""
        if self.stop.exists():
            return -signal.SIGTERM
        with self.task.log.open("ab") as log:
            self._process = process = subprocess.Popen(
                self.task.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Slurm sends SIGUSR2 to every process of a job, and its default action is to kill.
                preexec_fn=_ignore_usr2,
            )
        is_told = False
        while process.poll() is None:
            if self.stop.exists() and not is_told:
                process.terminate()
                is_told = True
            time.sleep(_POLL_SECONDS / 10)
        return process.returncode

    def checkpoint(self) -> Any:
        """Ends the trainer and returns what to queue again; submitit calls this upon SIGUSR2."""
        import submitit

        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        return submitit.helpers.DelayedSubmission(self)


def _ignore_usr2() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class Cluster:
    """The Slurm cluster to which jobs are submitted.

    Args:
      folder: the directory for submitit's files, which all nodes must share.
      options: options of `sbatch` under submitit's names: `partition`, `time` (minutes), `mem`, …

    Raises:
      RunError: submitit or Slurm is absent, or an option is unknown, invalid or missing.
    """

    slot = Slot("Slurm", {}, "job")

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        with installation.needing("slurm", RunError, "--launcher=slurm needs submitit"):
            import submitit
        self.folder = folder
        if "time" not in options:
            raise RunError("--slurm lacks time=MINUTES, after which a job is queued again")
        for name in _WHOLE & options.keys():
            # submitit would fail on another value only when it requeues a job, which is too late.
            if not (options[name].isascii() and options[name].isdecimal() and int(options[name])):
                raise RunError(
                    f"--slurm {name}={options[name]}: must be a whole number, 1 or more, as in "
                    f"{name}=240"
                )
        early = int(options.get("signal_delay_s", _SIGNAL_SECONDS)) + _EARLY_SECONDS
        least = -(-early // 60) + 1
        if int(options["time"]) < least:
            raise RunError(
                f"--slurm time={options['time']}: must be {least} or more, because Slurm tells a "
                f"job to end up to {early} seconds before its limit"
            )
        for program in ("srun", "sbatch", "squeue"):
            if shutil.which(program) is None:
                raise RunError(
                    f"--launcher=slurm: there is no {program} here; run it on a login node"
                )
        try:
            self._executor: Any = submitit.SlurmExecutor(folder, max_num_timeout=_REQUEUES)
        except RuntimeError as error:
            raise RunError(f"--launcher=slurm: {str(error).splitlines()[0]}") from error
        try:
            self._executor.update_parameters(**{n: _value(n, x) for n, x in options.items()})
        except ValueError as error:
            raise RunError(f"--slurm: {str(error).splitlines()[0]}") from error

    def submit(self, training: Training) -> Any:
        """Submits a job and returns it.

        Raises:
          RunError: Slurm refuses the job.
        """
        import submitit

        self._executor.update_parameters(job_name=training.task.name)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
                return self._executor.submit(training)
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            lines = [_SBATCH.sub("", line).strip() for line in str(error).splitlines()]
            reasons = "; ".join(line for line in lines if line)
            raise RunError(f"Slurm refuses {training.task.name}: {reasons}") from error

    def earlier(self, record: Path) -> Any | None:
        """Returns the job that a record file names if it is still queued or running, else None."""
        if not record.exists():
            return None
        import submitit

        job: Any = submitit.SlurmJob(self.folder, str(read_record(record, job=str)["job"]))
        return None if self.states([job])[job.job_id] == _GONE else job

    def states(self, jobs: Sequence[Any]) -> dict[str, str]:
        """Returns `waiting`, `running` or `gone` for each job number; needs no Slurm accounting."""
        asked = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%A %T"], capture_output=True, text=True
        )
        if asked.returncode:  # the controller may be down for a while, so the states are unknown
            return {job.job_id: _WAITING for job in jobs}
        lines = [line.split() for line in asked.stdout.splitlines() if line.strip()]
        if any(len(words) != 2 for words in lines):  # the output is not a list of jobs
            return {job.job_id: _WAITING for job in jobs}
        found: dict[str, str] = dict(lines)
        return {
            job.job_id: (_RUNNING if found[job.job_id] in ("RUNNING", "COMPLETING") else _WAITING)
            if job.job_id in found
            else _GONE
            for job in jobs
        }


def _value(name: str, word: str) -> int | str:
    """Returns a number, unless that is written otherwise: `account=0042` names an account."""
    is_number = name in _WHOLE or (word.isdecimal() and str(int(word)) == word)
    return int(word) if is_number else word


def run_jobs(
    tasks: Sequence[Task], cluster: Cluster, environment: Mapping[str, str]
) -> Generator[Event | None, None, None]:
    """Submits a job for every task that has none yet, and follows all jobs until they end.

    SIGTERM and SIGINT end the jobs. Jobs that train save a checkpoint, and jobs that wait leave the
    queue.

    Args:
      tasks: the tasks. All are submitted at once, and Slurm decides when each starts.
      cluster: the cluster to which they are submitted.
      environment: variables to add to the trainers' environment.

    Yields:
      Events as they happen, and None after each poll of the queue.
    """
    stop = cluster.folder / "stop"
    cluster.folder.mkdir(parents=True, exist_ok=True)
    stop.unlink(missing_ok=True)
    with stop_requests() as requests:

        def event(kind: Kind, task: Task, job: Any, code: int = 0, seconds: float = 0.0) -> Event:
            number = int(job.job_id)
            return Event(kind, task, cluster.slot, number, code, seconds, bool(requests))

        jobs: dict[str, tuple[Task, Any]] = {}
        for task in tasks:
            record = cluster.folder / f"{task.name}.json"
            job = cluster.earlier(record)
            if job is None:
                job = cluster.submit(Training(task, environment, stop))
                write_json(record, {"job": job.job_id})
            jobs[job.job_id] = task, job
            yield event("submitted", task, job)
        began: dict[str, float] = {}
        while jobs:
            states = cluster.states([job for _, job in jobs.values()])
            if requests and not stop.exists():
                write_atomically(stop, b"")
                for number, (_, job) in jobs.items():
                    if states[number] == _WAITING:
                        job.cancel(check=False)
            for number, (task, job) in list(jobs.items()):
                if states[number] == _RUNNING and number not in began:
                    began[number] = time.monotonic()
                    yield event("started", task, job)
                if states[number] == _WAITING and number in began:  # the job was queued again
                    del began[number]
                    yield event("submitted", task, job)
                if states[number] == _GONE:
                    del jobs[number]
                    code = _exit_code(task, job, requests)
                    now = time.monotonic()  # a job that was cancelled while it waited never began
                    yield event("ended", task, job, code, now - began.get(number, now))
            yield None
            time.sleep(_POLL_SECONDS)


def _exit_code(task: Task, job: Any, requests: Sequence[int]) -> int:
    """Returns the exit code of a job's trainer.

    If the job left no result, the code is −15 after a stop request. Otherwise it is −9, and the
    end of what the job printed to standard error goes to the arm's log.
    """
    result = job.paths.result_pickle
    end = time.monotonic() + _LEFT_SECONDS
    while not result.exists() and not requests and time.monotonic() < end:
        time.sleep(_POLL_SECONDS / 10)  # the file system may be slow
    if result.exists():
        outcome, value = job._get_outcome_and_result()
        if outcome == "success":
            return int(value)
    if requests:
        return -signal.SIGTERM
    printed = (job.stderr() or "").strip().splitlines()[-_LOG_LINES:]
    with task.log.open("a") as log:
        log.write("\n".join([*printed, f"job {job.job_id} ended without a result"]) + "\n")
    return -signal.SIGKILL
