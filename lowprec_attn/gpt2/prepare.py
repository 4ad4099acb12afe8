"""`lowprec-attn prepare`: make token files for training from text files or a data set."""

import argparse
import hashlib
import itertools
import os
import random
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lowprec_attn.gpt2 import documents
from lowprec_attn.gpt2.documents import Documents, Piece
from lowprec_attn.gpt2.tokenizer import ByteTokenizer, Tokenizer, gpt2
from lowprec_attn.gpt2.tokens import DataError, Meta, SplitMeta, token_dtype, writing

_BATCH = 256  # pieces handed to the tokenizer, which spreads them over all cores, at once
# Moved into place in this order: until the last one is, an old meta.json contradicts new tokens.
_OUTPUTS = ("train.bin", "val.bin", "meta.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument(
        "out", type=Path, help="directory to write train.bin, val.bin, meta.json to"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 text files, each a document"
    )
    source.add_argument(
        "--dataset",
        metavar="NAME",
        help="Hugging Face data set, for example Skylion007/openwebtext, or a loader of local "
        "files (text, json, parquet, ...) with --data-files; column 'text', a document per row",
    )
    parser.add_argument("--separator", help="with --text: what stands between documents in a file")
    parser.add_argument("--data-files", nargs="+", metavar="FILE", help="with --dataset: its files")
    parser.add_argument("--revision", help="with --dataset: branch or commit on the Hub")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    parser.add_argument(
        "--bpe",
        type=Path,
        metavar="DIR",
        help="directory with GPT-2's encoder.json and vocab.bpe, to need no download",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.05,
        help="share of documents, or of the pieces of long ones, that is held out "
        "(default %(default)s; nanoGPT holds out 0.0005 of OpenWebText)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of what is held out")
    parser.add_argument("--overwrite", action="store_true", help="replace existing token files")


def run(args: argparse.Namespace) -> None:
    """Runs the command on arguments that `add_arguments` parsed.

    Nothing in `args.out` changes before everything is written beside it.

    Raises:
      DataError: the arguments contradict each other, the text cannot be read or is too short to
        hold a part out, outputs exist already, or the disk refuses.
    """
    _check(args)
    tokenizer = ByteTokenizer() if args.tokenizer == "bytes" else gpt2(args.bpe)
    source = (
        documents.text_files(args.text, args.separator)
        if args.text
        else documents.dataset(args.dataset, args.data_files, args.revision)
    )
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=args.out) as temporary:
            meta = _write(Path(temporary), source, tokenizer, args.val_fraction, args.seed)
            for name in _OUTPUTS:
                os.replace(Path(temporary, name), args.out / name)
    for name, split in meta.splits.items():
        print(f"wrote {args.out / name}.bin: {split.tokens:,} tokens")
    print(
        f"tokenizer {meta.tokenizer}, vocabulary {meta.vocabulary:,}; train on it with\n"
        "  python train.py --config=configs/gpt2_bf16.py "
        f"--config.data.path={shlex.quote(str(args.out))}"
    )


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction} is not between 0 and 1: give 0.05")
    for option, needed, given in (
        ("--separator", "--text", args.separator is None or args.text),
        ("--data-files", "--dataset", args.data_files is None or args.dataset),
        ("--revision", "--dataset", args.revision is None or args.dataset),
        ("--bpe", "--tokenizer gpt2", args.bpe is None or args.tokenizer == "gpt2"),
    ):
        if not given:
            raise DataError(f"{option} only goes with {needed}: remove it")
    if args.separator == "":
        raise DataError("--separator is empty: give the text that stands between documents")
    for path in (args.out / name for name in _OUTPUTS):
        if path.exists() and not args.overwrite:
            raise DataError(f"{path} exists: give another directory, or --overwrite to replace it")


def _write(
    directory: Path, source: Documents, tokenizer: Tokenizer, val_fraction: float, seed: int
) -> Meta:
    """Writes the three files; see `_held_out` for what goes where."""
    with (
        _Split(directory / "train.bin", tokenizer) as train,
        _Split(directory / "val.bin", tokenizer) as val,
    ):
        held_out = _held_out(val_fraction, seed)
        pieces = 0
        for piece, ids in _encoded(source, tokenizer):
            (val if next(held_out) else train).write(ids)
            if piece.ends_document:
                train.end_document()
                val.end_document()
            pieces += 1
    for split, better in ((train, "smaller"), (val, "larger")):
        if not split.tokens:
            raise DataError(
                f"{split.path.name} would be empty: the text has {pieces} documents or pieces of "
                f"long ones, too few for --val-fraction {val_fraction}; give more text, "
                f"--separator, or a {better} --val-fraction"
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
    """A token file being written: counts and hashes what goes through."""

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


def _held_out(fraction: float, seed: int) -> Iterator[bool]:
    """For every piece, whether it is held out: evenly spaced ones, from a seeded first one.

    Even spacing, unlike a coin for each, holds something out of any text of 1/fraction pieces.
    """
    phase = random.Random(seed).random()
    for index in itertools.count():
        yield int((index + 1) * fraction + phase) > int(index * fraction + phase)


def _encoded(source: Documents, tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Every piece with its ids; shows progress."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as err:
        raise DataError("prepare needs tqdm: pip install 'lowprec-attn[data]'") from err
    with tqdm(total=source.size, unit="B", unit_scale=True, desc="tokenizing") as progress:
        for batch in _batched(source.pieces, _BATCH):
            texts = [piece.text for piece in batch]
            yield from zip(batch, tokenizer.encode(texts), strict=True)
            progress.update(sum(len(text.encode()) for text in texts))


def _batched(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    iterator = iter(pieces)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
