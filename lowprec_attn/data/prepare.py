"""Documents to token files: train.bin, val.bin and meta.json."""

import contextlib
import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowprec_attn import installation
from lowprec_attn.data.documents import Documents, Piece
from lowprec_attn.data.tokenizer import Tokenizer
from lowprec_attn.data.tokens import DataError, Meta, SplitMeta, token_dtype
from lowprec_attn.files import writing

_T = TypeVar("_T")

_BATCH = 256  # pieces handed to the tokenizer, which spreads them over all cores, at once
# Moved into place in this order: until the last one is, an old meta.json contradicts new tokens.
OUTPUTS = ("train.bin", "val.bin", "meta.json")


def prepare(
    out: Path, source: Documents, tokenizer: Tokenizer, val_fraction: float, seed: int
) -> Meta:
    """Writes the files of a corpus.

    They are written beside the old ones in `out`, which are replaced when all of them are complete.
    A failure leaves nothing behind.

    Args:
      out: the directory, made if it is not there.
      source: the text.
      tokenizer: of the ids.
      val_fraction: share of documents, or of the pieces of long ones, that is held out, in (0, 1).
      seed: of the choice of what is held out.

    Raises:
      DataError: the text cannot be read or is too short to hold a part out.
      DiskError: the disk refuses.
    """
    with (
        writing(out),
        _made(out),
        tempfile.TemporaryDirectory(prefix=".prepare-", dir=out) as temporary,
    ):
        meta = _write(Path(temporary), source, tokenizer, val_fraction, seed)
        for name in OUTPUTS:
            os.replace(Path(temporary, name), out / name)
    return meta


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Makes a directory and its parents; an error removes those that were not there, if empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something else has come to lie in one
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
            raise DataError(
                f"{split.path.name} would be empty: the text has {pieces} documents, or pieces of "
                "whole lines, and one is needed on either side; give more text, or --separator"
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
    """Every piece, and whether it is held out: evenly spaced ones, from a seeded first one.

    Even spacing, unlike a coin for each, holds something out of any text of 1/fraction pieces. Of
    fewer, two at least, the last one goes where none has gone.
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
    """Each item, and whether it is the last."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def _encoded(source: Documents, tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Every piece with its ids; shows progress."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as err:
        raise DataError(f"prepare needs tqdm: {installation.command('data')}") from err
    with tqdm(total=source.size, unit="B", unit_scale=True, desc="tokenizing") as progress:
        for batch in _batched(source.pieces, _BATCH):
            texts = [piece.text for piece in batch]
            yield from zip(batch, tokenizer.encode(texts), strict=True)
            progress.update(sum(len(text.encode()) for text in texts))


def _batched(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    iterator = iter(pieces)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
