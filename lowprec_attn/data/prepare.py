"""Writes documents as token files: meta.json, train.bin and val.bin."""

import contextlib
import fcntl
import hashlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowprec_attn import installation
from lowprec_attn.counts import many
from lowprec_attn.data.documents import Documents, Piece
from lowprec_attn.data.tokenizer import Tokenizer
from lowprec_attn.data.tokens import DataError, Meta, SplitMeta, token_dtype
from lowprec_attn.files import require_output, sync, writing

_T = TypeVar("_T")

_BATCH = 256  # pieces handed at once to the tokenizer, which spreads them over all cores
# The files are moved into place in this order. A kill between two moves leaves a meta.json that
# names tokens which are not there. Token files without a meta.json would be taken for nanoGPT's.
OUTPUTS = ("meta.json", "train.bin", "val.bin")
_PREFIX = ".prepare-"


def prepare(
    out: Path, source: Documents, tokenizer: Tokenizer, val_fraction: float, seed: int
) -> Meta:
    """Writes the files of a corpus.

    They are written into a hidden folder in `out`, and replace the old ones when all of them are
    complete. A failure leaves nothing behind. The next call removes what a kill has left.

    Args:
      out: the directory, made if it does not exist.
      source: the text.
      tokenizer: the tokenizer that makes the ids.
      val_fraction: share of documents, or of the pieces of long ones, that is held out, in (0, 1).
      seed: seed for the choice of the held-out pieces.

    Raises:
      DataError: the text cannot be read or is too short to hold a part out, or another process is
        at work in `out`.
      DiskError: the disk refuses, or a link stands in the place of a file.
    """
    with writing(out), _made(out), _locked(out):
        _remove_leftovers(out)
        for name in OUTPUTS:
            require_output(out / name)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=out) as temporary:
            meta = _write(Path(temporary), source, tokenizer, val_fraction, seed)
            for name in OUTPUTS:
                sync(Path(temporary, name))
            for name in OUTPUTS:
                os.replace(Path(temporary, name), out / name)
                sync(out)
    return meta


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other processes from preparing the same directory, until this one ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is preparing {directory}: wait for it, or give another directory"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    """Removes what killed processes have left; with the lock held, no other process is at work."""
    for path in directory.glob(f"{_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Makes a directory and its parents; an error in the block removes the new ones, if empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # one of them now holds something else
            for path in missing:
                path.rmdir()
        raise


def _write(
    directory: Path, source: Documents, tokenizer: Tokenizer, val_fraction: float, seed: int
) -> Meta:
    """Writes the three files; `_held_out` chooses the pieces of `val.bin`."""
    with (
        _Split(directory / "train.bin", tokenizer) as train,
        _Split(directory / "val.bin", tokenizer) as val,
    ):
        pieces = 0
        encoded = _encoded(source, tokenizer)
        for (piece, ids), is_held_out in _held_out(encoded, val_fraction, seed):
            (val if is_held_out else train).write(ids)
            if piece.ends_document:
                train.end_document()
                val.end_document()
            pieces += 1
    for split in (train, val):
        if not split.tokens:
            counted = many(pieces, "document or piece", "documents or pieces")
            raise DataError(
                f"{split.path.name} would be empty: the text has {counted} of whole lines, and "
                "each split needs one; give more text"
            )
    meta = Meta(
        tokenizer=tokenizer.name,
        vocabulary=tokenizer.vocabulary,
        dtype=token_dtype(tokenizer.vocabulary),
        splits={s.path.stem: SplitMeta(s.tokens, s.sha256.hexdigest()) for s in (train, val)},
    )
    meta.write(directory / "meta.json")
    return meta


class _Split:
    """A token file that is being written, with the number and SHA-256 of its tokens so far."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self.path = path
        self.tokens = 0
        self.sha256 = hashlib.sha256()
        self._dtype = np.dtype(token_dtype(tokenizer.vocabulary)).newbyteorder("<")
        self._end_of_text = np.array([tokenizer.end_of_text])
        self._in_document = False

    def __enter__(self) -> "_Split":
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, ids: np.ndarray) -> None:
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self.sha256.update(data)
        self.tokens += len(ids)
        self._in_document = True

    def end_document(self) -> None:
        """Writes the end-of-text id if this split holds any of the document."""
        if self._in_document:
            self.write(self._end_of_text)
            self._in_document = False


def _held_out(items: Iterable[_T], fraction: float, seed: int) -> Iterator[tuple[_T, bool]]:
    """Yields every piece, and whether it is held out: evenly spaced ones, from a seeded first one.

    Even spacing, unlike a random draw for each piece, holds something out of any text of 1/fraction
    pieces. Of fewer pieces, if there are at least two, the last one goes to the split that would be
    empty.
    """
    phase = random.Random(seed).random()
    chosen = set()
    for index, (item, is_last) in enumerate(_with_last(items)):
        is_held_out = int((index + 1) * fraction + phase) > int(index * fraction + phase)
        chosen.add(is_held_out)
        if is_last and index and len(chosen) == 1:
            is_held_out = not is_held_out
        yield item, is_held_out


def _with_last(items: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
    """Yields each item, and whether it is the last."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def _encoded(source: Documents, tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields every piece with its ids, and shows progress."""
    with installation.needing("data", DataError, "prepare needs tqdm"):
        from tqdm import tqdm
    with tqdm(total=source.size, unit="B", unit_scale=True, desc="tokenizing") as progress:
        for batch in _batched(source.pieces, _BATCH):
            texts = [piece.text for piece in batch]
            yield from zip(batch, tokenizer.encode(texts), strict=True)
            if source.done is None:
                progress.update(sum(len(text.encode()) for text in texts))
            else:
                progress.update(source.done() - progress.n)


def _batched(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    iterator = iter(pieces)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
