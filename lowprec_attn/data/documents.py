"""Streams of documents to tokenize, from text files or from a Hugging Face data set."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn import installation
from lowprec_attn.data.tokens import DataError

_PIECE = 1 << 16  # characters of a text file read and tokenized at a time, at most
_FINER = 8  # more pieces than asked for, since files and lines are of any length


class Piece(NamedTuple):
    """A document, or one of the consecutive parts of a long one."""

    text: str
    ends_document: bool


class Documents(NamedTuple):
    """A stream of documents and, if known, its size in bytes of UTF-8."""

    pieces: Iterable[Piece]
    size: int | None


def text_files(
    paths: Sequence[Path], separator: str | None = None, least_pieces: int = 1
) -> Documents:
    """Streams text files: each is one document, or several with a `separator` between them.

    Without a separator a file is cut at line ends into pieces of about 65,536 characters, so that
    a file of any size fits in memory. With one, a whole document is held at a time.

    Args:
      paths: UTF-8 text files.
      separator: removed where it occurs; what stands around it stays.
      least_pieces: fewer files than these are cut into shorter pieces, so that there are as many,
        if lines are short enough.

    Raises:
      DataError: a file is missing (at once), or not UTF-8 or unreadable (when its turn comes).
    """
    for path in paths:
        if not path.is_file():
            why = "is no file" if path.exists() else "does not exist"
            raise DataError(f"text file {path} {why}: check the path")
    size = sum(path.stat().st_size for path in paths)
    length = _PIECE
    if len(paths) < least_pieces:
        length = min(length, max(1, size // (_FINER * least_pieces)))
    pieces = (piece for path in paths for piece in _read(path, length))
    return Documents(
        pieces=pieces if separator is None else _split(pieces, separator),
        size=size,
    )


def _read(path: Path, length: int) -> Iterator[Piece]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = "".join(file.readlines(length))
            while text:
                following = "".join(file.readlines(length))
                yield Piece(text, ends_document=not following)
                text = following
    except UnicodeDecodeError as err:
        raise DataError(
            f"text file {path} is not UTF-8 (byte {err.object[err.start]:#04x}): convert it, for "
            "example with iconv -t UTF-8"
        ) from err
    except OSError as err:
        raise DataError(f"cannot read text file {path}: {err.strerror or err}") from err


def _split(pieces: Iterable[Piece], separator: str) -> Iterator[Piece]:
    rest = ""
    for piece in pieces:
        *documents, rest = (rest + piece.text).split(separator)
        if piece.ends_document:
            documents.append(rest)
            rest = ""
        yield from (Piece(text, ends_document=True) for text in documents if text.strip())


def dataset(
    name: str, data_files: Sequence[str] | None = None, revision: str | None = None
) -> Documents:
    """The column `text` of the split `train` of a Hugging Face data set, a document per row.

    It is streamed: nothing but the rows in flight is held in memory or stored on disk.

    Args:
      name: of the data set on the Hub, or a loader for local files such as `text` or `json`.
      data_files: what the loader reads.
      revision: branch, tag or commit on the Hub.

    Raises:
      DataError: `datasets` is not installed, cannot load the data set, or it has no `text`.
    """
    try:
        import datasets
    except ModuleNotFoundError as err:
        raise DataError(f"--dataset needs datasets: {installation.command('data')}") from err
    try:
        rows = datasets.load_dataset(
            name,
            data_files=list(data_files) if data_files else None,
            revision=revision,
            split="train",
            streaming=True,
        )
        columns = list(next(iter(rows), {}))
    except (OSError, ValueError, RuntimeError) as err:
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
            if row["text"] and row["text"].strip():
                yield Piece(row["text"], ends_document=True)
    except OSError as err:
        raise DataError(f"reading the data set {name!r} failed ({err}): start again") from err
