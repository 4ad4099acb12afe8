"""Token files: the text of a run, as one long array of token ids per split."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from lowprec_attn.errors import UserError
from lowprec_attn.files import sha256, write_json

GPT2_VOCABULARY = 50257
_CHUNK = 1 << 24  # ids looked at in one go: bounds the memory of a pass over billions of tokens


class DataError(UserError, ValueError):
    """Data that cannot be used; the message is one line with the value and what to do."""


@dataclasses.dataclass(frozen=True)
class SplitMeta:
    """Length and SHA-256 (hex, of the file's bytes) of one split."""

    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Meta:
    """The content of `meta.json`, which describes the token files beside it.

    Attributes:
      tokenizer: `gpt2` or `bytes`.
      vocabulary: number of different ids; every id is smaller.
      dtype: `uint16` or `uint32`, little-endian on disk.
      splits: the files, by the names `train` and `val`.
    """

    tokenizer: str
    vocabulary: int
    dtype: str
    splits: dict[str, SplitMeta]

    def write(self, path: Path) -> None:
        """Writes the record as JSON."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Meta":
        """Reads a record that `write` wrote.

        Raises:
          DataError: the file is not such a record.
        """
        try:
            fields = json.loads(path.read_text())
            splits = {name: SplitMeta(**fields["splits"][name]) for name in ("train", "val")}
            meta = cls(**fields | {"splits": splits})
        except (ValueError, TypeError, KeyError) as err:
            raise DataError(
                f"{path} is not what `lowprec-attn prepare` writes ({err}): prepare again, or "
                "delete it if the .bin files are nanoGPT's"
            ) from err
        if meta.dtype not in ("uint16", "uint32"):
            raise DataError(f"{path}: dtype {meta.dtype!r} is not uint16 or uint32: prepare again")
        return meta


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """One split.

    Attributes:
      ids: the token ids, one document after the other, each followed by the end-of-text id;
        memory-mapped and read-only when they come from a file.
      sha256: of the bytes of `ids`, in hex: the identity of the data.
      vocabulary: number of different ids the tokenizer knows.
      tokenizer: `gpt2` or `bytes`.
      source: where the ids come from, for messages and the record of a run.
    """

    ids: UInt[np.ndarray, " count"]
    sha256: str
    vocabulary: int
    tokenizer: str
    source: str

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def require(self, *, context: int, vocab_size: int) -> None:
        """Checks that a model can train on these tokens; reads all of them once.

        Args:
          context: tokens per sequence T; one window is T + 1 tokens.
          vocab_size: rows of the model's embedding table.

        Raises:
          DataError: fewer than T + 1 tokens, or an id ≥ `vocab_size`.
        """
        if self.count < context + 1:
            raise DataError(
                f"{self.source} holds {self.count} tokens, less than one sequence of "
                f"{context} + 1: give more text or a smaller context"
            )
        for start in range(0, self.count, _CHUNK):
            chunk = self.ids[start : start + _CHUNK]
            if chunk.max() >= vocab_size:
                at = int(np.argmax(chunk >= vocab_size))
                raise DataError(
                    f"{self.source} holds token id {chunk[at]} at position {start + at}, beyond "
                    f"the model's vocabulary of {vocab_size}: raise the model's vocab_size or "
                    "prepare the text with a smaller tokenizer"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out tokens of one text, and a line that says what it is."""

    train: Tokens
    val: Tokens
    description: str

    def require(self, *, context: int, vocab_size: int) -> None:
        """`Tokens.require` for both splits."""
        self.train.require(context=context, vocab_size=vocab_size)
        self.val.require(context=context, vocab_size=vocab_size)


def token_dtype(vocabulary: int) -> str:
    """Name of the smallest dtype of token files that holds every id below `vocabulary`."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def load(directory: str | Path, *, verify: bool = False) -> Corpus:
    """Opens `train.bin` and `val.bin` of a directory.

    With a `meta.json` beside them the files are as `lowprec-attn prepare` writes them. Without one
    they are nanoGPT's: uint16 ids of the GPT-2 tokenizer. Their SHA-256 is then computed here,
    which takes seconds per 10 GB.

    Args:
      directory: where the files are.
      verify: also compare the files' SHA-256 with `meta.json`.

    Raises:
      DataError: a file is missing, truncated, of a length that is not whole ids, or (with
        `verify`) has other bytes than `meta.json` says.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(
            f"data directory {directory} does not exist: make it with `lowprec-attn prepare "
            f"{directory} --text FILE...`, or leave data.path unset for the built-in text"
        )
    meta_path = directory / "meta.json"
    meta = Meta.read(meta_path) if meta_path.exists() else None
    train = _open_split(directory / "train.bin", meta, verify)
    val = _open_split(directory / "val.bin", meta, verify)
    return Corpus(train, val, f"{directory} ({train.tokenizer} tokens)")


def _open_split(path: Path, meta: Meta | None, verify: bool) -> Tokens:
    split = meta.splits[path.stem] if meta else None
    dtype = np.dtype(meta.dtype if meta else "uint16").newbyteorder("<")
    if not path.is_file():
        raise DataError(f"token file {path} is missing: write it with `lowprec-attn prepare`")
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        raise DataError(
            f"{path} has {size} bytes, not whole {dtype.name} ids: it is truncated or no token "
            "file; prepare or copy it again"
        )
    if split and size != split.tokens * dtype.itemsize:
        raise DataError(
            f"{path} holds {size // dtype.itemsize} tokens, but meta.json says {split.tokens}: "
            "it is truncated or belongs to other data; prepare or copy it again"
        )
    digest = split.sha256 if split and not verify else sha256(path)
    if split and digest != split.sha256:
        raise DataError(
            f"{path} has SHA-256 {digest}, but meta.json says {split.sha256}: its bytes have "
            "changed; prepare or copy it again"
        )
    return Tokens(
        ids=np.memmap(path, dtype, mode="r"),
        sha256=digest,
        vocabulary=meta.vocabulary if meta else GPT2_VOCABULARY,
        tokenizer=meta.tokenizer if meta else "gpt2",
        source=str(path),
    )


def unigram_loss(train: Tokens, val: Tokens) -> float:
    """Cross-entropy of the training text's token frequencies on the validation text.

    −(1/|val|) Σ_t log((n_t + 1) / (|train| + V)), with n_t the occurrences of token t in `train`
    and V its vocabulary. A model that ignores all context reaches this loss. Every token is read
    once, which takes about 10 s per billion.

    Returns:
      The loss in nats per token.
    """
    seen = _occurrences(train)
    log_p = np.log(seen + 1) - math.log(train.count + len(seen))
    return float(-(_occurrences(val) @ log_p) / val.count)


def _occurrences(tokens: Tokens) -> np.ndarray:
    total = np.zeros(tokens.vocabulary, np.int64)
    for start in range(0, tokens.count, _CHUNK):
        total += np.bincount(tokens.ids[start : start + _CHUNK], minlength=len(total))
    return total
