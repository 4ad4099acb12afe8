"""Streams of documents to tokenize, from text files or from a Hugging Face data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn import installation
from lowprec_attn.data.text_files import Format, Piece, TextFile, document
from lowprec_attn.data.tokens import DataError

_PIECE = 1 << 16  # characters of a text file read and tokenized at a time, at most
_FINER = 8  # more pieces than asked for, since files and lines are of any length


class Documents(NamedTuple):
    """A stream of documents.

    Attributes:
      pieces: the stream.
      size: of the whole source in bytes, None where it is not known.
      done: bytes of the source read so far; None: to be counted as UTF-8 of the pieces.
    """

    pieces: Iterable[Piece]
    size: int | None
    done: Callable[[], int] | None = None


def text_files(
    paths: Sequence[Path],
    separator: str | None = None,
    least_pieces: float = 1,
    format: Format | None = None,
) -> Documents:
    """Streams text files: each is one document, or several with a `separator` between them.

    Files may be compressed (gzip, zstd, bzip2, xz). Of JSON lines and Parquet, every row is a
    document. Of plain text without a separator, a file is cut at line ends into pieces of about
    65,536 characters, so that a file of any size fits in memory. With one, a whole document is
    held at a time.

    Args:
      paths: UTF-8 text, with a byte-order mark or without; JSON lines or Parquet with a `text`.
      separator: removed where it occurs; what stands around it stays.
      least_pieces: fewer files than these are cut into shorter pieces, so that there are as many,
        if lines are short enough.
      format: of all files; None to tell it by the content of each.

    Raises:
      DataError: a file is missing or of another format (at once), or not UTF-8, damaged or
        unreadable (when its turn comes).
    """
    files = [TextFile(path, format) for path in paths]
    for file in files:
        if separator is not None and file.format != "text":
            raise DataError(
                f"--separator goes with plain text, and {file.path} is {file.format}: leave it "
                "out, or give --format text"
            )
    size, length = sum(file.size for file in files), _PIECE
    if len(files) < least_pieces and separator is None:
        length = min(length, max(1, int(size / (_FINER * least_pieces))))
    pieces = (piece for file in files for piece in file.pieces(length))
    return Documents(
        pieces=pieces if separator is None else _split(pieces, separator),
        size=size,
        done=lambda: sum(file.done for file in files),
    )


def _split(pieces: Iterable[Piece], separator: str) -> Iterator[Piece]:
    """The documents between separators, which may lie across pieces.

    Each piece is searched once, whatever the length of the documents: only the last characters of
    what came before, in which a separator may have begun, are searched with it.
    """
    held: list[str] = []  # of the document, without a separator
    tail = ""
    for piece in pieces:
        first, *others = (tail + piece.text).split(separator)
        documents = []
        if others:
            documents = ["".join([*held, first]), *others[:-1]]
            held, first = [], others[-1]
        cut = len(first) - min(len(separator) - 1, len(first))
        held.append(first[:cut])
        tail = first[cut:]
        if piece.ends_document:
            documents.append("".join([*held, tail]))
            held, tail = [], ""
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
            yield from document(row["text"], f"data set {name!r}")
    except DataError:
        raise
    except Exception as err:  # likewise
        raise DataError(f"reading the data set {name!r} failed ({err}): start again") from err
