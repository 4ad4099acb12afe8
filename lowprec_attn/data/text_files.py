"""A user's text files: which format each has, by its content, and the documents in it.

Compressed files are read as what they hold. Plain text is cut into pieces; of JSON lines and
Parquet, the column `text` has a document in every row.
"""

import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, NamedTuple

from lowprec_attn import installation
from lowprec_attn.data.tokens import DataError

Format = Literal["text", "jsonl", "parquet"]

_HEAD = 1 << 16  # bytes of a file that its format is told by
_BYTES_READ = 1 << 20  # at a time
_PACKED_READ = 1 << 16  # of zstd, which may hold a thousand times as much
_LONGEST_WINDOW = 1 << 31  # bytes, of zstd --long=31
_COLUMN = "text"

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_COMPRESSED |= {b"\xfd7zXZ\0": "xz"}
_PARQUET = b"PAR1"
# What users have tried, by how its files begin.
_REFUSED = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"%PDF": "a PDF: extract its text, for example with pdftotext",
    b"ARROW1": "an Arrow file: give it by --dataset arrow --data-files FILE",
    b"SQLite format 3": "a database: export its text",
    b"\x93NUMPY": "a NumPy array: prepare takes text",
    b"\xff\xfe": "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}


class Piece(NamedTuple):
    """A document, or one of the consecutive parts of a long one."""

    text: str
    ends_document: bool


class TextFile:
    """One file, and how far it has been read.

    Args:
      path: of the file.
      format: None to tell it by the content.

    Attributes:
      format: of what the file holds.
      done: bytes of the file that have been read so far.

    Raises:
      DataError: the file is missing, unreadable or empty, or of a format that is not read.
    """

    def __init__(self, path: Path, format: Format | None = None) -> None:
        if not path.is_file():
            why = "is no file" if path.exists() else "does not exist"
            raise DataError(f"text file {path} {why}: check the path")
        self.path, self.done = path, 0
        with self._explained():
            self.size = path.stat().st_size
            with path.open("rb") as file:
                self._compression = _compression(file.read(_HEAD))
            with self._open() as file:
                self.format = format or self._told_by(file.read(_HEAD))

    def pieces(self, length: int) -> Iterator[Piece]:
        """The documents, of plain text in pieces of about `length` characters, at line ends.

        Raises:
          DataError: the file is damaged, or a document in it cannot be read.
        """
        with self._explained():
            if self.format == "parquet":
                yield from self._rows()
            elif self.format == "jsonl":
                yield from self._lines()
            else:
                yield from self._text(length)
        self.done = self.size

    def _text(self, length: int) -> Iterator[Piece]:
        with self._decoded() as file:
            text = "".join(file.readlines(length))
            while text:
                following = "".join(file.readlines(length))
                yield Piece(text, ends_document=not following)
                text = following

    def _lines(self) -> Iterator[Piece]:
        with self._decoded() as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"text file {self.path} line {number} is not JSON ({error}), and the first "
                        "line is: mend it, or give --format text"
                    ) from error
                if not isinstance(row, dict) or _COLUMN not in row:
                    has = f"the fields {list(row)}" if isinstance(row, dict) else "no object"
                    raise DataError(
                        f"text file {self.path} line {number} has {has}, but no '{_COLUMN}': "
                        "rename the field, or give --format text"
                    )
                yield from document(row[_COLUMN], f"text file {self.path} line {number}")

    def _rows(self) -> Iterator[Piece]:
        parquet = _module("pyarrow.parquet", self.path, "Parquet")
        if self._compression:
            raise DataError(
                f"text file {self.path} is Parquet within {self._compression}: unpack it"
            )
        try:
            file = parquet.ParquetFile(self.path)
            names = file.schema_arrow.names
            if _COLUMN not in names:
                raise DataError(
                    f"text file {self.path} has the columns {names}, but no '{_COLUMN}': rename one"
                )
            done = 0
            for batch in file.iter_batches(columns=[_COLUMN]):
                for text in batch.column(0).to_pylist():
                    yield from document(text, f"text file {self.path}")
                done += batch.num_rows
                self.done = self.size * done // max(file.metadata.num_rows, 1)
        except DataError:
            raise
        except Exception as error:  # whatever pyarrow raises: its base class is Exception
            raise DataError(
                f"text file {self.path} is not a readable Parquet file ({_first_line(error)}): "
                "copy it again"
            ) from error

    @contextlib.contextmanager
    def _decoded(self) -> Iterator[IO[str]]:
        """The content as text, without a byte-order mark."""
        with (
            self._open() as binary,
            io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file,
        ):
            yield file

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        """The content, unpacked; counts in `done` what is read of the file."""
        with contextlib.ExitStack() as opened:
            raw = opened.enter_context(self.path.open("rb", buffering=0))
            counted = io.BufferedReader(_Counted(raw, self), _BYTES_READ)
            opened.enter_context(counted)
            yield opened.enter_context(_unpacked(counted, self._compression, self.path))

    def _told_by(self, head: bytes) -> Format:
        """The format of content that begins so; raises DataError if it is none that is read."""
        if head.startswith(_PARQUET):
            return "parquet"
        refused = next((what for magic, what in _REFUSED.items() if head.startswith(magic)), None)
        if refused is None and head[257:262] == b"ustar":
            refused = "a tar archive: unpack it"
        if refused is None and b"\0" in head:
            refused = "binary (it holds zero bytes): give text, or say what it is by --format"
        if refused is not None:
            raise DataError(f"text file {self.path} is {refused}")
        return self._told_by_first_line(head.removeprefix(b"\xef\xbb\xbf").lstrip())

    def _told_by_first_line(self, head: bytes) -> Format:
        line, ended, _ = head.partition(b"\n")
        # A first line longer than the head is one of JSON lines, if it begins as an object does.
        whole = bool(ended) or len(head) < _HEAD // 2
        if line.startswith(b'{"') and (not whole or _is_object(line)):
            return "jsonl"
        if line.startswith(b"[") and line[1:].lstrip()[:2] == b'{"':
            raise DataError(
                f"text file {self.path} is a JSON array: give one object a line, for example by "
                "jq -c '.[]', or --format text"
            )
        return "text"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what reading raises into a `DataError`."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(
                f"text file {self.path} is not UTF-8 (byte {error.object[error.start]:#04x}): "
                "convert it, for example with iconv -t UTF-8"
            ) from error
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, _PackedError) as error:
            raise DataError(
                f"text file {self.path} is damaged {self._compression} ({_first_line(error)}): "
                "copy it again"
            ) from error
        except OSError as error:
            if self._compression == "bzip2" and error.errno is None:  # as bz2 says "damaged"
                raise DataError(
                    f"text file {self.path} is damaged bzip2 ({error}): copy it again"
                ) from error
            reason = error.strerror or error
            raise DataError(f"cannot read text file {self.path}: {reason}") from error


class _PackedError(Exception):
    """Damaged zstd."""


class _Counted(io.RawIOBase):
    """A raw file whose progress a `TextFile` shows."""

    def __init__(self, raw: Any, of: TextFile) -> None:
        self._raw, self._of = raw, of

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._raw.readinto(buffer)
        self._of.done = min(self._of.done + count, self._of.size)
        return count


class _Zstd(io.RawIOBase):
    """Unpacks zstd. The reader of its package takes the end of a file for that of a frame."""

    def __init__(self, file: IO[bytes], zstandard: ModuleType) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None  # being read
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain and self._fill():
            pass
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _fill(self) -> bool:
        """Unpacks some more; whether there was any."""
        packed = self._packed or self._file.read(_PACKED_READ)
        if not packed:
            if self._frame is not None:
                raise _PackedError("it ends within a frame")
            return False
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor(
                max_window_size=_LONGEST_WINDOW
            ).decompressobj()
        try:
            self._plain = self._frame.decompress(packed)
        except self._zstandard.ZstdError as error:
            raise _PackedError(str(error)) from error
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True


def _unpacked(file: Any, compression: str | None, path: Path) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "bzip2":
        return bz2.BZ2File(file)
    if compression == "xz":
        return lzma.LZMAFile(file)
    if compression == "zstd":
        return io.BufferedReader(_Zstd(file, _module("zstandard", path, "zstd")), _BYTES_READ)
    return file


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


def _module(name: str, path: Path, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"text file {path} is {what}, which needs {package}: {installation.command('data')}"
        ) from error


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def document(text: object, where: str) -> Iterator[Piece]:
    """A row's text as a document; nothing where it is empty or None.

    Raises:
      DataError: it is no text.
    """
    if not isinstance(text, str | None):
        raise DataError(f"{where} has {type(text).__name__} as its '{_COLUMN}', not text: mend it")
    if text is None or not text.strip():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write
        raise DataError(f"{where} has no Unicode as its '{_COLUMN}' ({error}): mend it") from error
    yield Piece(text, ends_document=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
