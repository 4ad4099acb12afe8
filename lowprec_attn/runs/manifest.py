"""The manifest of a checkpoint: its files, each with size and SHA-256."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Self

from lowprec_attn.files import NotJsonError, read_json, sha256, write_json

_SHA256 = re.compile("[0-9a-f]{64}")


class DamagedError(Exception):
    """A checkpoint is not intact; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The size of a file in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads a file."""
        return cls(size=path.stat().st_size, sha256=sha256(path))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content directory of a checkpoint and its files by relative path.

    Attributes:
      content: name of the content directory, which lies beside the manifest.
      files: the fingerprint of every file in it.
    """

    content: str
    files: dict[str, Fingerprint]

    @classmethod
    def of(cls, content: Path) -> Self:
        """The manifest of a content directory, whose files are brought to the disk first."""
        files = {}
        for path in sorted(path for path in content.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.relative_to(content).as_posix()] = Fingerprint.of(path)
        return cls(content=content.name, files=files)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a manifest.

        Raises:
          DamagedError: the file cannot be read, is not a manifest, or names a file elsewhere.
        """
        try:
            fields = read_json(path)
            files = {name: _fingerprint(file) for name, file in fields["files"].items()}
            manifest = cls(content=fields["content"], files=files)
        except OSError as error:
            raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from None
        except (NotJsonError, KeyError, TypeError, ValueError, AttributeError):
            raise DamagedError(f"{path.name} is not a manifest") from None
        if not re.fullmatch(rf"{path.stem}-\d+", str(manifest.content)) or not manifest.files:
            raise DamagedError(f"{path.name} is not a manifest")
        outside = [name for name in manifest.files if not _stays_inside(name)]
        if outside:
            raise DamagedError(f"{path.name} names a file outside of its content: {outside[0]!r}")
        return manifest

    def write(self, path: Path) -> None:
        """Writes or replaces a manifest in one step."""
        write_json(path, dataclasses.asdict(self), indent=1)

    def verify(self, directory: Path) -> Path:
        """Reads all files of the content in `directory` and returns the content's path.

        Raises:
          DamagedError: a file is missing, cannot be read, or has another size or checksum.
        """
        for name, path in self.paths(directory):
            expected = self.files[name.removeprefix(f"{self.content}/")]
            try:
                found = Fingerprint.of(path)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedError(f"{name} is missing") from None
            except OSError as error:
                raise DamagedError(f"{name} cannot be read ({error.strerror or error})") from None
            if found.size != expected.size:
                raise DamagedError(f"{name} has {found.size} bytes instead of {expected.size}")
            if found.sha256 != expected.sha256:
                raise DamagedError(f"{name} differs from its SHA-256")
        return directory / self.content

    def paths(self, directory: Path) -> Iterator[tuple[str, Path]]:
        """The files of the content in `directory`, with their names relative to that.

        Raises:
          DamagedError: a symbolic link leads out of the content, or nowhere.
        """
        content = directory.resolve() / self.content
        for name in self.files:
            path = directory / self.content / name
            try:
                inside = path.resolve().is_relative_to(content)
            except (OSError, RuntimeError):  # links in a circle, by version of Python
                inside = False
            if not inside:
                raise DamagedError(f"{self.content}/{name} leads out of {directory}")
            yield f"{self.content}/{name}", path


def _fingerprint(fields: Any) -> Fingerprint:
    """A fingerprint from JSON; raises TypeError or ValueError where it is none."""
    found = Fingerprint(**fields)
    if type(found.size) is not int or not _SHA256.fullmatch(found.sha256):
        raise ValueError(fields)
    return found


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
