"""`lowprec-attn prepare`: makes token files for training from text files or a data set."""

import argparse
import math
import shlex
import sys
from pathlib import Path

from lowprec_attn.counts import many
from lowprec_attn.data import documents
from lowprec_attn.data.prepare import OUTPUTS, prepare
from lowprec_attn.data.tokenizer import ByteTokenizer, gpt2
from lowprec_attn.data.tokens import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add = parser.add_argument
    add("out", type=Path, help="directory for train.bin, val.bin and meta.json")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="UTF-8 text, each file a document; may be gzip or zstd",
    )
    source.add_argument(
        "--dataset",
        metavar="NAME",
        help="Hugging Face data set, for example Skylion007/openwebtext, or a loader of local "
        "files (json, parquet, ...) with --data-files; column 'text', a document per row",
    )
    add(
        "--data-files",
        nargs="+",
        metavar="FILE",
        help="local files that the loader of --dataset reads",
    )
    add("--revision", help="with --dataset: branch or commit on the Hub")
    add(
        "--tokenizer",
        choices=("gpt2", "bytes"),
        default="gpt2",
        help="gpt2 (default) downloads a vocabulary, bytes needs none",
    )
    add(
        "--val-fraction",
        type=float,
        default=0.05,
        help="share that is held out: documents, or pieces of whole lines if these are few or long "
        "(default %(default)s; nanoGPT holds out 0.0005 of OpenWebText)",
    )
    add("--seed", type=int, default=0, help="seed that draws the held-out share")
    add("--overwrite", action="store_true", help="replace existing token files")


def run(args: argparse.Namespace) -> None:
    """Writes the token files and prints what was written.

    Raises:
      DataError, DiskError: an argument is out of range, the arguments contradict each other, or an
        output exists already; see also `data.prepare.prepare`.
    """
    _check(args)
    tokenizer = ByteTokenizer() if args.tokenizer == "bytes" else gpt2()
    source = (
        documents.text_files(args.text, _least_pieces(args.val_fraction))
        if args.text
        else documents.dataset(args.dataset, args.data_files, args.revision)
    )
    meta = prepare(args.out, source, tokenizer, args.val_fraction, args.seed)
    for name, split in meta.splits.items():
        print(f"wrote {args.out / name}.bin: {many(split.tokens, 'token')}")
    print(
        f"tokenizer {meta.tokenizer}, vocabulary {meta.vocabulary:,}; train on it with\n"
        "  lowprec-attn train --config=gpt2_bf16 "
        f"--config.data.path={shlex.quote(str(args.out))}"
    )


def _least_pieces(val_fraction: float) -> float:
    """Returns how many pieces give each split at least one; infinite for the smallest shares."""
    least = min(val_fraction, 1 - val_fraction)
    return math.inf if least < sys.float_info.min else 1 / least


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction} is not between 0 and 1: give 0.05")
    if args.seed < 0:  # Python's `random` ignores the sign of a seed
        raise DataError(f"--seed {args.seed} is negative: give 0 or more")
    for option, given in (("--data-files", args.data_files), ("--revision", args.revision)):
        if given is not None and args.dataset is None:
            raise DataError(f"{option} only goes with --dataset: remove it")
    for path in (args.out / name for name in OUTPUTS):
        if path.exists() and not args.overwrite:
            raise DataError(f"{path} exists: give another directory, or --overwrite to replace it")
        for read in args.text or map(Path, args.data_files or ()):
            if path.exists() and read.exists() and path.samefile(read):
                raise DataError(f"{read} is read and would be replaced: give another directory")
