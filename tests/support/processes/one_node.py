"""A Slurm cluster of one node, this host, for the duration of a test; any user may start it."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
_SECONDS = 60.0  # the limit until the node is idle
_CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Why Slurm cannot run here; empty if it can."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    return f"needs slurm: no {', '.join(absent)} here (apt install slurm-wlm)" if absent else ""


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which `srun` and `sbatch` find the cluster.

    Args:
      folder: an empty folder for files and a socket, whose path must be short.
    """
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=host,
            controller=ports[0],
            node=ports[1],
            user=getpass.getuser(),
            folder=folder,
            cpus=os.cpu_count(),
        )
    )
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket"]
    munged += [f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    with ExitStack() as daemons:
        daemons.enter_context(_daemon(munged, environment, folder))
        _wait_for(lambda: (folder / "munge" / "socket").exists(), folder)
        for name in ("slurmctld", "slurmd"):
            command = [name, "-D", "-f", str(configuration)]
            command += ["-N", host] if name == "slurmd" else ["-i"]
            daemons.enter_context(_daemon(command, environment, folder))
        _wait_for(lambda: _state(environment) == "idle", folder)
        yield environment


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(_SECONDS)


def _state(environment: dict[str, str]) -> str:
    asked = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
    )
    return asked.stdout.strip()


def _wait_for(condition, folder: Path) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(path.read_text()[-500:] for path in sorted(folder.glob("*.log")))
            raise TimeoutError(f"no Slurm within {_SECONDS:g} seconds:\n{logs}")
        time.sleep(0.1)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
