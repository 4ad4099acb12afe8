"""Streams of documents to tokenize, from text files or from a Hugging Face data set."""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from lowprec_attn import installation
from lowprec_attn.data.tokens import DataError

_PIECE = 1 << 16  # approximate number of characters that are tokenized at a time
_FINER = 8  # times more pieces than requested, because the lengths of files and lines vary
_HEAD = 1 << 16  # bytes at the start of a file that tell its kind
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# Formats that users have tried, by the first bytes of their files.
_REFUSED = {
    b"PAR1": "Parquet: give it by --dataset parquet --data-files FILE",
    b"BZh": "bzip2: unpack it",
    b"\xfd7zXZ\0": "xz: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"%PDF": "a PDF: extract its text, for example with pdftotext",
    b"\xff\xfe": "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}


class Piece(NamedTuple):
    """A document, or one of the consecutive parts of a long one."""

    text: str
    ends_document: bool


class Documents(NamedTuple):
    """A stream of documents.

    Attributes:
      pieces: the stream.
      size: size of the whole source in bytes, None if it is not known.
      done: returns the bytes of the source read so far. None if the reader has to count the UTF-8
        bytes of the pieces instead.
    """

    pieces: Iterable[Piece]
    size: int | None
    done: Callable[[], int] | None = None


def text_files(paths: Sequence[Path], least_pieces: float = 1) -> Documents:
    """Returns a stream of text files, each of which is a document.

    A file is cut at line ends into pieces of about 65,536 characters, so that a file of any size
    fits in memory.

    Args:
      paths: files of UTF-8 text, with or without a byte-order mark, plain or packed by gzip or
        zstd.
      least_pieces: number of pieces wanted. Fewer files are cut into shorter pieces to reach this
        number, which works if lines are short enough.

    Raises:
      DataError: a file is missing or does not hold text (raised at once), or is not UTF-8, damaged
        or unreadable (raised when its turn comes).
    """
    files = [_TextFile(path) for path in paths]
    size, length = sum(file.size for file in files), _PIECE
    if len(files) < least_pieces:
        length = min(length, max(1, int(size / (_FINER * least_pieces))))
    return Documents(
        pieces=(piece for file in files for piece in file.pieces(length)),
        size=size,
        done=lambda: sum(file.done for file in files),
    )


class _TextFile:
    """A text file, and the number of its bytes that have been read so far.

    Raises:
      DataError: the file is missing or unreadable, or does not hold text.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            why = "is no file" if path.exists() else "does not exist"
            pattern = ", and no file matches this pattern" if "*" in path.name else ""
            raise DataError(f"text file {path} {why}{pattern}: check the path")
        self.path, self.size, self.done = path, path.stat().st_size, 0
        with self._opened() as (_, file):
            _require_text(path, file.read(_HEAD))

    def pieces(self, length: int) -> Iterator[Piece]:
        """Yields the text in pieces of about `length` characters, cut at line ends.

        Raises:
          DataError: the file is damaged or not UTF-8.
        """
        with self._opened() as (raw, file):
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            text = "".join(lines.readlines(length))
            while text:
                following = "".join(lines.readlines(length))
                self.done = raw.tell()
                yield Piece(text, ends_document=not following)
                text = following
        self.done = self.size

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], Any]]:
        """Opens the raw file and its unpacked content; errors of reading become a `DataError`."""
        try:
            with self.path.open("rb") as raw:
                head = raw.read(len(_ZSTD))
                raw.seek(0)
                if head.startswith(_GZIP):
                    yield raw, gzip.GzipFile(fileobj=raw)
                else:
                    yield raw, self._of_zstd(raw) if head == _ZSTD else raw
        except UnicodeDecodeError as error:
            raise DataError(
                f"text file {self.path} is not UTF-8 (byte {error.object[error.start]:#04x}): "
                "convert it, for example with iconv -t UTF-8"
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"text file {self.path} is damaged gzip ({error}): copy it again"
            ) from error
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"cannot read text file {self.path}: {reason}") from error

    def _of_zstd(self, raw: IO[bytes]) -> Any:
        # zstandard's own reader would end at a cut without an error.
        what = f"text file {self.path} is zstd, which needs pyarrow"
        with installation.needing("data", DataError, what, "; or unpack it"):
            import pyarrow
        return pyarrow.CompressedInputStream(raw, "zstd")


def _require_text(path: Path, head: bytes) -> None:
    """Raises DataError if a file that begins with `head` is not plain text."""
    what = next((what for magic, what in _REFUSED.items() if head.startswith(magic)), None)
    if what is None and b"\0" in head:
        what = "binary (it holds zero bytes): give text"
    if what is None and _is_json(head.removeprefix(b"\xef\xbb\xbf").lstrip()):
        what = "JSON: give it by --dataset json --data-files FILE"
    if what is not None:
        raise DataError(f"text file {path} is {what}")


def _is_json(head: bytes) -> bool:
    """Whether content that begins with `head` is JSON objects, one a line, or an array of them."""
    if head.startswith(b"["):
        return head[1:].lstrip()[:2] == b'{"'
    line, ended, _ = head.partition(b"\n")
    if not line.startswith(b'{"'):
        return False
    if not ended and len(head) > _HEAD // 2:  # an object that is longer than the head
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def dataset(
    name: str, data_files: Sequence[str] | None = None, revision: str | None = None
) -> Documents:
    """The column `text` of the split `train` of a Hugging Face data set, one document a row.

    The data set is streamed: memory and disk hold only the rows in flight.

    Args:
      name: name of the data set on the Hub, or of a loader for local files: `text` or `json`, for
        example.
      data_files: files that the loader reads.
      revision: branch, tag or commit on the Hub.

    Raises:
      DataError: `datasets` is not installed or cannot load the data set, or the data set has no
        column `text`.
    """
    with installation.needing("data", DataError, "--dataset needs datasets"):
        import datasets
    try:
        rows = datasets.load_dataset(
            name,
            data_files=list(data_files) if data_files else None,
            revision=revision,
            split="train",
            streaming=True,
        )
        columns = list(next(iter(rows), {}))
    except Exception as err:  # a loader may raise anything, and `datasets` raises Exception itself
        reason = next(iter(str(err).splitlines()), type(err).__name__)
        # `datasets` 4 refuses repositories with a loading script, openwebtext's among them.
        hint = (
            "try --revision refs/convert/parquet, where the Hub keeps a Parquet copy"
            if "scripts are no longer supported" in reason
            else "check its name, its files and the network"
        )
        raise DataError(f"cannot load the data set {name!r} ({reason}): {hint}") from err
    if "text" not in columns:
        raise DataError(
            f"data set {name!r} has the columns {columns}, but no 'text': give one that has"
        )
    splits = rows.info.splits
    return Documents(_texts(rows, name), splits["train"].num_bytes if splits else None)


def _texts(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[Piece]:
    try:
        for row in rows:
            yield from _document(row["text"], f"data set {name!r}")
    except DataError:
        raise
    except Exception as err:  # a loader may raise anything
        raise DataError(f"reading the data set {name!r} failed ({err}): start again") from err


def _document(text: object, where: str) -> Iterator[Piece]:
    """Yields a row's text as a document, or nothing if the text is empty or None.

    Raises:
      DataError: `text` is not a string, or not valid Unicode.
    """
    if not isinstance(text, str | None):
        raise DataError(f"{where} has {type(text).__name__} as its 'text', not text: mend it")
    if text is None or not text.strip():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write
        raise DataError(f"{where} has no Unicode as its 'text' ({error}): mend it") from error
    yield Piece(text, ends_document=True)
