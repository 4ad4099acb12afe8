"""The manifest of a checkpoint: its files, each with size and SHA-256."""

import dataclasses
import os
from pathlib import Path
from typing import Self

from lowprec_attn.files import NotJsonError, read_json, sha256, write_json


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
          DamagedError: the file is not a manifest.
        """
        try:
            fields = read_json(path)
            files = {name: Fingerprint(**file) for name, file in fields["files"].items()}
            return cls(content=fields["content"], files=files)
        except (NotJsonError, KeyError, TypeError, AttributeError):
            raise DamagedError(f"{path.name} is not a manifest") from None

    def write(self, path: Path) -> None:
        """Writes or replaces a manifest in one step."""
        write_json(path, dataclasses.asdict(self), indent=1)

    def verify(self, directory: Path) -> Path:
        """Reads all files of the content in `directory` and returns the content's path.

        Raises:
          DamagedError: a file is missing or has another size or checksum.
        """
        for name, expected in self.files.items():
            path = directory / self.content / name
            try:
                found = Fingerprint.of(path)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedError(f"{self.content}/{name} is missing") from None
            if found.size != expected.size:
                raise DamagedError(
                    f"{self.content}/{name} has {found.size} bytes instead of {expected.size}"
                )
            if found.sha256 != expected.sha256:
                raise DamagedError(f"{self.content}/{name} differs from its SHA-256")
        return directory / self.content
