"""Files that outlive a kill: written whole, or by whole lines; locks, and a disk that refuses.

Nothing is written through a symbolic link, nor into a device, a pipe or a socket: what stands
behind one of these is not the program's.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from lowprec_attn.errors import RunError

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class DiskError(RunError):
    """A file cannot be written."""


class NotJsonError(RunError):
    """A file that should hold JSON holds something else."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError while writing `path` (disk full, read-only, …) into a `DiskError`."""
    try:
        yield
    except OSError as err:
        mend = remedy(err, "free space there or give another place")
        raise DiskError(f"cannot write {path}: {err.strerror or err}; {mend}") from err


def remedy(error: OSError, otherwise: str) -> str:
    """What to do about an error of the disk.

    Args:
      error: as the system raised it.
      otherwise: what helps, unless something of another kind stands in a file's place.
    """
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return f"move away what stands in the place of {error.filename}, or give another place"
    return otherwise


def require_output(path: Path, reads: Iterable[Path] = ()) -> None:
    """Sees that a file can be written later, in a directory that is there.

    Args:
      path: of the file.
      reads: files and directories that the same command reads. It may not be one of the files; in
        one of the directories it may be new, or an HTML page, which no command reads.

    Raises:
      DiskError: it cannot, or it is read.
    """
    with writing(path):
        if not path.name:  # "", "." or "/"
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _require_file_or_nothing(path)
        tempfile.TemporaryFile(dir=path.parent).close()
    if not path.exists():
        return
    for source in reads:
        inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
        if (source.exists() and path.samefile(source)) or (inside and path.suffix != ".html"):
            raise DiskError(
                f"cannot write {path}: it is there already, and the same command reads {source}; "
                "give another place"
            )


def _require_file_or_nothing(path: Path) -> None:
    """Raises an OSError unless a regular file stands there, or nothing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a device, pipe or socket"
        raise FileExistsError(errno.EEXIST, f"{what} stands there", str(path))


def open_own(path: str | Path, flags: int) -> int:
    """An opener for files that are written in place: no link is followed, no pipe waited for.

    Raises:
      OSError: the file cannot be opened, or something else than a file stands there.
    """
    _require_file_or_nothing(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def stays_inside(name: object) -> bool:
    """Whether a name that a file gives is a relative path to something in the file's own folder.

    Links are not followed: a link may lead out all the same.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def is_temporary(name: str) -> bool:
    """Whether `write_atomically` gives such a name to a file that it has not finished."""
    return re.fullmatch(r"\.[0-9a-f]{12}\..*\.tmp", name) is not None


# Whole files.


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces a file in one step.

    A process that is killed at any instant leaves the old contents or the new, never a part, and so
    does a machine that loses its power. At most a hidden file whose name ends in that of `path`
    and `.tmp` stays behind.

    Raises:
      OSError: the disk refuses, or something else than a file stands there.
    """
    _require_file_or_nothing(path)
    # A name that nobody can foresee, made anew: a link that was planted under it is not followed,
    # and no file of the user's has it.
    temporary = path.with_name(f".{secrets.token_hex(6)}.{path.name}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name


def sync(path: Path) -> None:
    """Brings a file to the disk, or the names in a directory.

    Raises:
      OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, where they are not there, and brings them to the disk.

    Raises:
      OSError: the disk refuses, or a file stands in the way.
    """
    new = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in new:
        sync(directory.parent)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Writes or replaces a JSON file, strictly, in one step; raises as `write_atomically`."""
    text = json.dumps(strict_json(value), indent=indent, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())


def strict_json(value: Any) -> Any:
    """The same value with NaN and infinities, which JSON has not, as "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {name: strict_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def from_strict_json(value: Any) -> Any:
    """The inverse of `strict_json`."""
    if isinstance(value, dict):
        return {name: from_strict_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_strict_json(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
      NotJsonError: it is not JSON.
      OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # the latter: brackets in brackets in …
        raise NotJsonError(f"{path} is not JSON ({error})") from error


def read_record(path: Path, **fields: type) -> dict[str, Any]:
    """The content of a JSON file that holds a mapping.

    Args:
      path: of the file.
      **fields: that it must have, with their types; an int is a float as well, and so are the
        texts that `strict_json` makes of some.

    Raises:
      NotJsonError: it holds something else; the message says what to do.
      OSError: it cannot be read.
    """
    mend = "restore it from a copy, or remove it and repeat the command that wrote it"
    try:
        record = read_json(path)
    except NotJsonError as error:
        raise NotJsonError(f"{error}; {mend}") from error
    if not isinstance(record, dict):
        raise NotJsonError(f"{path} holds {type(record).__name__}, no record; {mend}")
    for name, kind in fields.items():
        value = record.get(name)
        if kind is float and isinstance(value, str):
            value = record[name] = from_strict_json(value)
        if not isinstance(value, int | float if kind is float else kind):
            raise NotJsonError(f"{path} is no record with a {name}: it has {value!r}; {mend}")
    return record


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The size of a file, or of its beginning, in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
          OSError: it cannot be read.
        """
        return cls(size=path.stat().st_size, sha256=sha256(path))


class Fingerprinter:
    """Takes the fingerprint of a file that grows, from the bytes that are added to it."""

    def __init__(self, begin: bytes = b"") -> None:
        self._size, self._sha256 = len(begin), hashlib.sha256(begin)

    def add(self, data: bytes) -> None:
        """Counts what was appended."""
        self._size += len(data)
        self._sha256.update(data)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all bytes so far."""
        return Fingerprint(self._size, self._sha256.hexdigest())


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal.

    Raises:
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path) -> str:
    """As `sha256`, computed once: `.NAME.sha256` beside the file keeps it.

    A file of another size or time of change is read again, and so is every file in a directory
    that cannot be written.

    Raises:
      OSError: the file cannot be read.
    """
    status, kept = path.stat(), path.with_name(f".{path.name}.sha256")
    known = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    with contextlib.suppress(OSError, NotJsonError):
        found = read_json(kept)
        if isinstance(found, dict) and known.items() <= found.items() and "sha256" in found:
            return str(found["sha256"])
    digest = sha256(path)
    with contextlib.suppress(OSError):
        write_json(kept, known | {"sha256": digest})
    return digest


# Lines.


class LineFile:
    """Appends to a file, each time one whole line in one write.

    A line is on its way to the disk when `append` returns: kill -9 loses nothing but, at most, a
    part of the line being written, which `complete_lines` leaves out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(open_own(path, _APPEND), "ab", buffering=0)

    def append(self, text: str) -> bytes:
        """Writes a line and returns its bytes.

        Args:
          text: of the line, without its end.

        Raises:
          OSError: the disk is full or not writable.
        """
        line = f"{text}\n".encode()
        if self._file.write(line) != len(line):
            # Only a disk that has just become full, or a file size limit, cuts a write short.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return line

    def flush(self) -> None:
        """Brings everything written so far to the disk."""
        os.fsync(self._file.fileno())
        sync(self._path.parent)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def append_line(path: Path, text: str) -> bytes:
    """Appends one line to a file, which is made if there is none; returns its bytes.

    Raises:
      DiskError: the disk refuses.
    """
    with writing(path), contextlib.closing(LineFile(path)) as file:
        return file.append(text)


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file with their ends, without a last one that does not end yet.

    Raises:
      OSError: the file cannot be read.
    """
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


# Locks.


def lock(path: Path) -> IO[bytes] | None:
    """Opens a file that only one process at a time can open so, or None where another one has it.

    The kernel holds the lock until the file is closed, here and in every child that inherited its
    descriptor, or those processes end in whatever way: kill -9 releases it.

    Raises:
      OSError: the file cannot be made or locked.
    """
    with contextlib.ExitStack() as unless_locked:
        file = unless_locked.enter_context(os.fdopen(open_own(path, _APPEND), "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        unless_locked.pop_all()
    return file


# Contents.


def flatten(
    value: Any, separator: str = ".", lists: bool = False, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields what nested mappings hold under flat names, such as `('optimizer.peak_lr', 0.001)`.

    Args:
      value: mappings in mappings; one that is empty counts as a value.
      separator: between the names of the levels.
      lists: whether lists are taken apart as well, by index.
      prefix: name of `value` itself.
    """
    if lists and isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield prefix, value
        return
    for name, item in value.items():
        yield from flatten(item, separator, lists, f"{prefix}{separator}{name}" if prefix else name)
