"""The environment of a run: versions, devices, command line and commit, and nothing private."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import lowprec_attn

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "ml_dtypes",
)


def describe() -> dict[str, Any]:
    """Describes this process and its machine as a JSON-able dict.

    It holds no host name, no user name and no environment variable; of the command line the
    program's name is kept without its directory, and no credentials (`without_credentials`).

    Returns:
      `versions` by package (None: not installed), `platform`, `backend`, `device_kind`,
      `device_count` and `process_count` (of the whole run), `host_cpus`, `date` (UTC, ISO 8601),
      `command`, and `commit`: the git commit of this project's working tree, with `-dirty` where
      tracked files are changed, or None outside of a checkout.
    """
    devices = jax.devices()
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
            "lowprec_attn": lowprec_attn.__version__,
        },
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_count": jax.process_count(),
        "host_cpus": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*_program(), *without_credentials(sys.argv[1:])],
        "commit": _commit(),
    }


def is_described(start: Mapping[str, Any]) -> bool:
    """Whether the command that a file gives for a start can be one."""
    words = start.get("command", [])
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


_HIDDEN = "***"
# Names that end in one of these, of an option, a variable or a part of an address.
_SECRET = (
    r"(?:pass(?:word|wd|phrase)?|secret|token|credentials?|signature|sig"
    r"|(?:api|access|private|secret|account)[_-]?key)"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]*@")
_GIVEN = re.compile(rf"(?i)((?:^|[-_.?&;])(?:[\w-]*[-_.])?{_SECRET}=)[^&;\s]+")
_OPTION = re.compile(rf"(?i)--?(?:[\w.-]*[-_.])?{_SECRET}")


def without_credentials(words: Sequence[str]) -> list[str]:
    """The words of a command line, with `***` for what looks secret.

    That is the user and password of an address (`s3://user:password@host`), and the value of an
    option, a variable or a part of an address with a telling name (`--api-key=…`, `?token=…`).
    """
    found = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = _OPTION.fullmatch(before) is not None and not word.startswith("-")
        cleaned = _IN_ADDRESS.sub(f"{_HIDDEN}@", word)
        found.append(_HIDDEN if is_value else _GIVEN.sub(rf"\g<1>{_HIDDEN}", cleaned))
    return found


def _program() -> list[str]:
    """The program as it is called, `python -m PACKAGE` where a package is."""
    name = Path(sys.argv[0]).name
    if name != "__main__.py":
        return [name]
    package = Path(sys.argv[0]).parent.name
    return ["python", "-m", package]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this project's checkout, not of one that merely contains its installation."""
    root = Path(lowprec_attn.__file__).resolve().parents[1]
    toplevel = _git(root, "rev-parse", "--show-toplevel")
    if toplevel is None or Path(toplevel).resolve() != root:
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    """The output of a git command, or None without git, outside of a checkout, or on an error."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
