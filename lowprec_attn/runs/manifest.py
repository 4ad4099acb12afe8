"""The manifest of a checkpoint: the size and SHA-256 of its files and of the run's records."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lowprec_attn.files import Fingerprint, NotJsonError, read_json, stays_inside, sync, write_json

_SHA256 = re.compile("[0-9a-f]{64}")


class DamagedError(Exception):
    """A checkpoint is not intact; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content directory of a checkpoint and its files by relative path.

    Attributes:
      content: the name of the content directory, which lies beside the manifest.
      files: the fingerprint of every file in the content directory.
      records: by name, the fingerprints of the run's own files as they were before this step. These
        files may have grown since. Empty in checkpoints of earlier versions.
    """

    content: str
    files: dict[str, Fingerprint]
    records: dict[str, Fingerprint] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, content: Path, records: Mapping[str, Fingerprint]) -> Self:
        """Flushes a content directory to the disk and returns its manifest."""
        files = {}
        for path in sorted(content.rglob("*")):
            sync(path)
            if path.is_file():
                files[path.relative_to(content).as_posix()] = Fingerprint.of(path)
        sync(content)
        sync(content.parent)
        return cls(content=content.name, files=files, records=dict(records))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a manifest.

        Raises:
          DamagedError: the file cannot be read, is not a manifest, or names a file outside of the
            content directory.
        """
        try:
            fields = read_json(path)
            manifest = cls(
                content=fields["content"],
                files=_fingerprints(fields["files"]),
                records=_fingerprints(fields.get("records", {})),
            )
        except OSError as error:
            raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from None
        except (NotJsonError, KeyError, TypeError, ValueError, AttributeError):
            raise DamagedError(f"{path.name} is not a manifest") from None
        if not re.fullmatch(rf"{path.stem}-\d+", str(manifest.content)) or not manifest.files:
            raise DamagedError(f"{path.name} is not a manifest")
        outside = [name for name in manifest.files if not stays_inside(name)]
        if outside:
            raise DamagedError(f"{path.name} names a file outside of its content: {outside[0]!r}")
        return manifest

    def write(self, path: Path) -> None:
        """Writes or replaces a manifest atomically."""
        if path.is_symlink():  # damage: checkpoints contain no symbolic links
            path.unlink()
        write_json(path, dataclasses.asdict(self), indent=1)

    def verify(self, directory: Path) -> None:
        """Checks every content file in `directory` against its size and checksum.

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

    def paths(self, directory: Path) -> Iterator[tuple[str, Path]]:
        """Yields the name relative to `directory` and the path of every content file.

        Raises:
          DamagedError: a path leads out of the content directory through a symbolic link, or its
            links form a circle.
        """
        content = directory.resolve() / self.content
        for name in self.files:
            path = directory / self.content / name
            try:
                inside = path.resolve().is_relative_to(content)
            except (OSError, RuntimeError):  # a circle of links; the type depends on Python
                inside = False
            if not inside:
                raise DamagedError(f"{self.content}/{name} leads out of {directory}")
            yield f"{self.content}/{name}", path


def _fingerprints(fields: Any) -> dict[str, Fingerprint]:
    """Returns fingerprints by name from JSON; raises TypeError or the like if they are invalid."""
    found = {name: Fingerprint(**file) for name, file in fields.items()}
    for file in found.values():
        if type(file.size) is not int or not _SHA256.fullmatch(file.sha256):
            raise ValueError(file)
    return found
