"""Crash-safe files: atomic writes, appended lines, locks, and errors of the disk.

Nothing is written through a symbolic link or into a device, a pipe or a socket, because what lies
behind one of these does not belong to the program.
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
    """A file that should hold JSON, or a certain JSON record, holds something else."""


def writing(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an OSError while writing `path` (disk full, read-only, …) into a `DiskError`."""
    return explained(DiskError, f"write {path}", "free space there or give another place")


@contextlib.contextmanager
def explained(kind: type[RunError], action: str, mend: str) -> Iterator[None]:
    """Turns an OSError in the block into an error of one line.

    Args:
      kind: the class of the error.
      action: what cannot be done.
      mend: what to do, unless something of the wrong type stands in the place of a file or
        directory.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
            mend = f"move away what stands in the place of {error.filename}, or give another place"
        raise kind(f"cannot {action}: {error.strerror or error}; {mend}") from error


def require_output(path: Path, reads: Iterable[Path] = ()) -> None:
    """Checks that a file can be written later, in a directory that already exists.

    Args:
      path: the file.
      reads: the files and directories that the same command reads. `path` must not be one of the
        files. In one of the directories it must be a new file or an HTML page, which no command
        reads.

    Raises:
      DiskError: the file cannot be written, or the command would overwrite one of its inputs.
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


def require_outputs(options: Mapping[str, Path | None], reads: Iterable[Path]) -> None:
    """Checks the files that a command's options name, as `require_output` does.

    Args:
      options: the file of each option, or None.
      reads: as in `require_output`.

    Raises:
      DiskError: a file has no directory or cannot be written, or two options name the same file.
    """
    given = {option: path for option, path in options.items() if path is not None}
    for option, path in given.items():
        if not path.absolute().parent.is_dir():
            raise DiskError(f"{option} {path}: there is no directory {path.parent}")
        require_output(path, reads)
    if len({path.resolve() for path in given.values()}) < len(given):
        first, *_ = given.values()
        raise DiskError(f"{' and '.join(given)} both name {first}; give two files")


def _require_file_or_nothing(path: Path) -> None:
    """Raises an OSError if the path exists and is not a regular file."""
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
    """Opens a file that is written in place; follows no symbolic link and waits for no pipe.

    Raises:
      OSError: the file cannot be opened, or the path exists and is not a regular file.
    """
    _require_file_or_nothing(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def stays_inside(name: object) -> bool:
    """Whether a name read from a file is a relative path that stays in the file's own folder.

    Symbolic links are not resolved, so the path may still leave the folder through one.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def is_temporary(name: str) -> bool:
    """Whether this is the name of an unfinished file of `write_atomically`."""
    return re.fullmatch(r"\.[0-9a-f]{12}\..*\.tmp", name) is not None


# Whole files.


def write_atomically(path: Path, data: bytes) -> None:
    """Writes or replaces a file atomically.

    If the process is killed or the machine loses power at any instant, the file has either the old
    contents or the new contents, never a part. At most a hidden file named `.*.NAME.tmp` stays
    behind.

    Raises:
      OSError: the write fails, or the path exists and is not a regular file.
    """
    _require_file_or_nothing(path)
    # The temporary name is random and must be new, so nobody can plant a link under it, and it
    # never belongs to one of the user's files.
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
    sync(path.parent)  # makes the rename durable


def sync(path: Path) -> None:
    """Flushes a file's contents, or a directory's entries, to the disk with `fsync`.

    Raises:
      OSError: the path cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory and its missing parents, and flushes them to the disk.

    Raises:
      OSError: a directory cannot be made, or a file is in the way.
    """
    new = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in new:
        sync(directory.parent)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Writes or replaces a strict JSON file atomically; raises the errors of `write_atomically`."""
    text = json.dumps(strict_json(value), indent=indent, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())


def strict_json(value: Any) -> Any:
    """Returns the value with NaN and infinities as "nan", "inf" and "-inf", since JSON lacks them.

    Mappings become dicts, and tuples become lists.
    """
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
    """Returns the content of a JSON file.

    Raises:
      NotJsonError: the file is not JSON.
      OSError: the file cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: too deeply nested brackets
        raise NotJsonError(f"{path} is not JSON ({error})") from error


def read_record(path: Path, **fields: type) -> dict[str, Any]:
    """Returns the content of a JSON file that holds a mapping.

    Args:
      path: the file.
      **fields: the required fields and their types. A `float` field may hold an int, or one of the
        texts that `strict_json` writes for NaN and infinities, which is returned as a float.

    Raises:
      NotJsonError: the file is not JSON, holds no mapping, or lacks a required field of the right
        type. The message says what to do.
      OSError: the file cannot be read.
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
    """The size in bytes and the hexadecimal SHA-256 of a file, or of the beginning of one."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns the fingerprint of a whole file.

        Raises:
          OSError: the file cannot be read.
        """
        return cls(size=path.stat().st_size, sha256=sha256(path))


class Fingerprinter:
    """Maintains the fingerprint of a growing file from the bytes that are appended to it."""

    def __init__(self, begin: bytes = b"") -> None:
        self._size, self._sha256 = len(begin), hashlib.sha256(begin)

    def add(self, data: bytes) -> None:
        """Adds bytes that were appended to the file."""
        self._size += len(data)
        self._sha256.update(data)

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of all bytes so far."""
        return Fingerprint(self._size, self._sha256.hexdigest())


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path) -> str:
    """Returns `sha256(path)` and caches it in `.NAME.sha256` beside the file.

    The file is read again if its size or modification time has changed. In a directory that cannot
    be written there is no cache, so the file is read every time.

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
    """Appends to a file, one whole line per `write` call, without a buffer.

    The kernel has the line when `append` returns. kill -9 can at most cut short the line that is
    being written, and `complete_lines` leaves out such a partial line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(open_own(path, _APPEND), "ab", buffering=0)

    def append(self, text: str) -> bytes:
        """Writes a line and returns its bytes.

        Args:
          text: the line without its line end.

        Raises:
          OSError: the disk is full or not writable.
        """
        line = f"{text}\n".encode()
        written = self._file.write(line)
        if written != len(line):
            # Only a disk that has just become full, or a file size limit, cuts a write short. The
            # part is removed, because the next line would be joined to it.
            descriptor = self._file.fileno()
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return line

    def flush(self) -> None:
        """Flushes everything written so far to the disk with `fsync`."""
        os.fsync(self._file.fileno())
        sync(self._path.parent)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def append_line(path: Path, text: str) -> bytes:
    """Appends one line to a file and returns the line's bytes; creates the file if necessary.

    Raises:
      DiskError: the file cannot be written.
    """
    with writing(path), contextlib.closing(LineFile(path)) as file:
        return file.append(text)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file with their line ends; leaves out an unterminated last line.

    Raises:
      OSError: the file cannot be read.
    """
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


# Locks.


def lock(path: Path) -> IO[bytes] | None:
    """Opens a file with an exclusive lock, or returns None if another process holds the lock.

    The kernel releases the lock once this process and all children that inherited the descriptor
    have closed the file or ended, even by kill -9.

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
    """Yields the values of nested mappings by flat name, such as `('optimizer.peak_lr', 0.001)`.

    Args:
      value: nested mappings. An empty mapping counts as a value.
      separator: the text between the names of two levels.
      lists: whether to flatten lists as well, with indices as names.
      prefix: the name of `value` itself.
    """
    if lists and isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield prefix, value
        return
    for name, item in value.items():
        yield from flatten(item, separator, lists, f"{prefix}{separator}{name}" if prefix else name)
