"""Writes the built-in text with a stretch of random bytes: bad data, which no rounding explains.

    python -m benchmarks.bad_text data/bad_text

The token files have the length and the held-out part of the built-in text, so that a run with
`data.path=data/bad_text` draws the same windows. One training window in 500 then holds random
bytes.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from benchmarks import program
from lowprec_attn.data import builtin_text
from lowprec_attn.data.tokens import Meta, SplitMeta

SHARE = 0.002  # the part of the training text that is random


def spoiled(ids: UInt[np.ndarray, " count"]) -> UInt[np.ndarray, " count"]:
    """Returns a copy with random bytes in the middle; the bytes are the same on every call."""
    stretch = round(SHARE * len(ids))
    begin = (len(ids) - stretch) // 2
    copy = ids.copy()
    copy[begin : begin + stretch] = np.random.default_rng(0).integers(256, size=stretch)
    return copy


@program.told
def main() -> None:
    """Writes `train.bin`, `val.bin` and `meta.json`."""
    parser = program.parser(__doc__)
    parser.add_argument("directory", type=Path, help="for the token files")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    corpus = builtin_text.load()
    texts = {"train": spoiled(corpus.train.ids), "val": corpus.val.ids}
    splits = {}
    for name, ids in texts.items():
        content = ids.tobytes()
        (directory / f"{name}.bin").write_bytes(content)
        splits[name] = SplitMeta(len(ids), hashlib.sha256(content).hexdigest())
    train = corpus.train
    Meta(train.tokenizer, train.vocabulary, "uint16", splits).write(directory / "meta.json")
    print(f"{directory}: {splits['train'].tokens:,} tokens, SHA-256 {splits['train'].sha256}")


if __name__ == "__main__":
    sys.exit(main())
