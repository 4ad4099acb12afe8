"""Files that are written whole or not at all, and a disk that refuses."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lowprec_attn.errors import RunError


class DiskError(RunError):
    """A file cannot be written."""


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces a file in one step.

    A process that is killed at any instant leaves the old contents or the new, never a part; at
    most `path` with `.tmp` appended stays behind, and the next call overwrites it.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError while writing `path` (disk full, read-only, …) into a `DiskError`."""
    try:
        yield
    except OSError as err:
        raise DiskError(
            f"cannot write {path}: {err.strerror or err}; free space there or give another place"
        ) from err
