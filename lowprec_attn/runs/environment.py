"""Describes a run's environment: versions, devices, command line, commit; nothing private."""

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

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_dtypes")


def describe() -> dict[str, Any]:
    """Describes this process and its machine as a dict that JSON can represent.

    The dict holds no host name, user name or environment variable. The command line has the
    program's name without its directory, and no credentials (see `without_credentials`).

    Returns:
      `versions` by package (None if not installed), `platform`, `backend`, `device_kind`,
      `device_count` and `process_count` of the whole run, `host_cpus`, `date` (UTC, ISO 8601),
      `command`, and `commit`. The last is the git commit of this project's working tree, with
      `-dirty` if tracked files have changed, or None outside of a checkout.
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
    """Whether the `command` of a recorded start is a list of words; a missing one counts as one."""
    words = start.get("command", [])
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


_HIDDEN = "***"
# The name of an option, of a variable or of a part of an address is secret if it ends in one of
# these words.
_SECRET = (
    r"(?:pass(?:word|wd|phrase)?|secret|token|credentials?|signature|sig"
    r"|(?:api|access|private|secret|account)[_-]?key)"
)
# Keys of AWS may contain a slash, which a port before a path is told from.
_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/\s:]*:(?!\d+/).*|[^/\s]*)@")
_GIVEN = re.compile(rf"(?i)((?:^|[-_.?&;])(?:[\w-]*[-_.])?{_SECRET}=)[^&;]+")
_OPTION = re.compile(rf"(?i)--?(?:[\w.-]*[-_.])?{_SECRET}")


def without_credentials(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line, with `***` in place of whatever looks secret.

    These are the user and password in an address (`s3://user:password@host`), and the value of an
    option, of a variable or of a part of an address whose name suggests a secret (`--api-key=…`,
    `?token=…`).
    """
    found = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = _OPTION.fullmatch(before) is not None and not word.startswith("-")
        cleaned = _IN_ADDRESS.sub(f"{_HIDDEN}@", word)
        found.append(_HIDDEN if is_value else _GIVEN.sub(rf"\g<1>{_HIDDEN}", cleaned))
    return found


def _program() -> list[str]:
    """Returns the words that call the program, `python -m PACKAGE` if it was run as a package."""
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
    """Returns the commit of this project's checkout, or None if there is no checkout.

    A checkout of another project that merely contains this installation does not count.
    """
    root = Path(lowprec_attn.__file__).resolve().parents[1]
    toplevel = _git(root, "rev-parse", "--show-toplevel")
    if toplevel is None or Path(toplevel).resolve() != root:
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None without git, outside a checkout, or on an error."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
