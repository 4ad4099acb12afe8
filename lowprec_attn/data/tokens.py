"""Token files: the text of a run, as one long array of token ids per split."""

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import UInt

from lowprec_attn.counts import many
from lowprec_attn.errors import OneLineError
from lowprec_attn.files import NotJsonError, cached_sha256, read_json, sha256, write_json

GPT2_VOCABULARY = 50257
_SHA256 = re.compile("[0-9a-f]{64}")
_LOOKED_AT = 1 << 20  # bytes at the start of a file that tell its kind
_FEW_IDS = 64
_FOREIGN = {
    b"\x93NUMPY": "a NumPy file (.npy)",
    b"PK\x03\x04": "a zip archive or npz",
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    (20240520).to_bytes(4, "little"): "a file of llm.c, with a header of 1,024 bytes",
    (20240801).to_bytes(4, "little"): "a file of llm.c of uint32 ids, with a header",
}
_CHUNK = 1 << 24  # ids read at a time, to bound the memory of a pass over billions of tokens


class DataError(OneLineError, ValueError):
    """Data that cannot be used; the message is one line with the value and what to do."""


@dataclasses.dataclass(frozen=True)
class SplitMeta:
    """Number of tokens of one split, and SHA-256 of its file's bytes in hex."""

    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Meta:
    """The content of `meta.json`, which describes the token files beside it.

    Attributes:
      tokenizer: `gpt2` or `bytes`.
      vocabulary: number of different ids; every id is below this number.
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
            with _explained(path):
                fields = read_json(path)
            splits = {name: SplitMeta(**fields["splits"][name]) for name in ("train", "val")}
            meta = cls(**fields | {"splits": splits})
            _check_meta(meta)
        except (NotJsonError, ValueError, TypeError, KeyError) as err:
            if isinstance(err, DataError):
                raise
            raise DataError(
                f"{path} is not what `lowprec-attn prepare` writes ({err}): prepare again, or "
                "delete it if the .bin files are nanoGPT's"
            ) from err
        return meta


def _check_meta(meta: Meta) -> None:
    """Raises ValueError unless every field has the type and range that `prepare` gives it."""

    def require(holds: bool, name: str, value: Any, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} {value!r} is not {what}")

    require(meta.dtype in ("uint16", "uint32"), "dtype", meta.dtype, "uint16 or uint32")
    require(isinstance(meta.tokenizer, str), "tokenizer", meta.tokenizer, "a name")
    most = np.iinfo(meta.dtype).max + 1
    ids = _is_count(meta.vocabulary) and meta.vocabulary <= most
    require(ids, "vocabulary", meta.vocabulary, f"a whole number from 1 to {most}")
    for name, split in meta.splits.items():
        require(_is_count(split.tokens), f"tokens of {name}", split.tokens, "a positive number")
        hexadecimal = isinstance(split.sha256, str) and _SHA256.fullmatch(split.sha256)
        require(bool(hexadecimal), f"sha256 of {name}", split.sha256, "64 hexadecimal digits")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an OSError while reading `path` into a `DataError`."""
    try:
        yield
    except OSError as err:
        raise DataError(
            f"cannot read {path}: {err.strerror or err}; make it readable or copy it again"
        ) from err


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one split.

    Attributes:
      ids: the token ids, one document after the other, each followed by the end-of-text id;
        memory-mapped and read-only when they come from a file.
      sha256: SHA-256 of the bytes of `ids`, in hex; it identifies the data.
      vocabulary: number of different ids that the tokenizer knows.
      tokenizer: `gpt2` or `bytes`, or `lookup` for the built-in text of that name.
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
          DataError: there are fewer than T + 1 tokens, or an id is beyond the vocabulary of the
            model or of the tokenizer.
        """
        if self.count < context + 1:
            raise DataError(
                f"{self.source} holds {many(self.count, 'token')}, less than one sequence of "
                f"{context} + 1: give more text or a smaller context"
            )
        limit = min(vocab_size, self.vocabulary)
        for start in range(0, self.count, _CHUNK):
            chunk = self.ids[start : start + _CHUNK]
            if chunk.max() >= limit:
                at = int(np.argmax(chunk >= limit))
                reason = (
                    f"the {self.vocabulary} of its tokenizer ({self.tokenizer}): describe the "
                    "files by a meta.json as `lowprec-attn prepare` writes it, or prepare the "
                    "text again"
                    if self.vocabulary < vocab_size
                    else f"the model's vocabulary of {vocab_size}: raise the model's vocab_size or "
                    "prepare the text with a smaller tokenizer"
                )
                raise DataError(
                    f"{self.source} holds token id {chunk[at]} at position {start + at}, beyond "
                    f"{reason}"
                )

    @classmethod
    def in_memory(cls, ids: np.ndarray, vocabulary: int, tokenizer: str, source: str) -> Self:
        """Returns ids, which fit 16 bits, as tokens with the digest of their bytes."""
        ids = ids.astype("<u2")
        return cls(ids, hashlib.sha256(ids.tobytes()).hexdigest(), vocabulary, tokenizer, source)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out tokens of one text, and a line that says what it is."""

    train: Tokens
    val: Tokens
    description: str

    def require(self, *, context: int, vocab_size: int) -> None:
        """Calls `Tokens.require` for both splits."""
        self.train.require(context=context, vocab_size=vocab_size)
        self.val.require(context=context, vocab_size=vocab_size)


def token_dtype(vocabulary: int) -> str:
    """The name of the smallest dtype of token files that holds every id below `vocabulary`."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def load(directory: str | Path) -> Corpus:
    """Opens `train.bin` and `val.bin` of a directory.

    With a `meta.json` beside them, the files are read as `lowprec-attn prepare` writes them.
    Without it they are read as nanoGPT's: uint16 ids of the GPT-2 tokenizer. The SHA-256 of each
    file is computed, which takes seconds per 10 GB. It is kept beside the file, in
    `.train.bin.sha256` and `.val.bin.sha256`, until the file's size or time of change differs.

    Args:
      directory: where the files are.

    Raises:
      DataError: a file is missing, unreadable, truncated, of a length that is not whole ids, or
        has other bytes than `meta.json` says; or `meta.json` is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        why = "is no directory" if directory.exists() else "does not exist"
        raise DataError(
            f"data directory {directory} {why}: make it with `lowprec-attn prepare "
            f"{directory} --text FILE...`, or leave data.path unset for the built-in text"
        )
    meta_path = directory / "meta.json"
    meta = Meta.read(meta_path) if meta_path.exists() else None
    train = _open_split(directory / "train.bin", meta)
    val = _open_split(directory / "val.bin", meta)
    return Corpus(train, val, f"{directory} ({train.tokenizer} tokens)")


def require_bare_ids(path: Path) -> None:
    """Checks that a file without a `meta.json` can hold what nanoGPT writes: bare uint16 ids.

    Raises:
      DataError: the file begins like a file of another kind, or its ids look wider than 16 bits.
    """
    with _explained(path), path.open("rb") as file:
        head = file.read(_LOOKED_AT)
    what = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
    width = _width_of(head)
    if what is None and width > 2:
        what = f"uint{8 * width} or int{8 * width} ids: what lies above the lowest 16 bits is empty"
    if what is not None:
        raise DataError(
            f"{path} looks like {what}; a token file without a meta.json beside it must hold "
            "uint16 ids of GPT-2, as nanoGPT writes them: write such a file, or prepare the "
            "text again"
        )


def _width_of(head: bytes) -> int:
    """Returns the bytes per id, 2, 4 or 8, that a file of ids appears to have by its first bytes.

    The width is above 2 only if the bits above the lowest 16 are nearly empty in all ids.
    """
    ids = np.frombuffer(head[: len(head) // 8 * 8], "<u2")
    # Ids below 2²⁰, which every known vocabulary has, are below 16 in their upper half. A text of
    # GPT-2 does not have one of the first 16 ids, which are punctuation, at every other place.
    if len(ids) < _FEW_IDS or ids[::2].max() < 16 or ids[1::2].max() >= 16:
        return 2
    return 8 if ids[2::4].max() == 0 and ids[3::4].max() == 0 else 4


def _open_split(path: Path, meta: Meta | None) -> Tokens:
    split = meta.splits[path.stem] if meta else None
    dtype = np.dtype(meta.dtype if meta else "uint16").newbyteorder("<")
    if not path.is_file():
        wrong = "is no file" if path.exists() else "is missing"
        raise DataError(f"token file {path} {wrong}: write it with `lowprec-attn prepare`")
    size = path.stat().st_size
    if meta is None:
        require_bare_ids(path)
    if size % dtype.itemsize or not size:
        raise DataError(
            f"{path} has {size} bytes, not whole {dtype.name} ids: it is truncated or no token "
            "file; prepare or copy it again"
        )
    if split and size != split.tokens * dtype.itemsize:
        raise DataError(
            f"{path} holds {many(size // dtype.itemsize, 'token')}, but meta.json says "
            f"{split.tokens:,}: "
            "it is truncated or belongs to other data; prepare or copy it again"
        )
    with _explained(path):
        digest = cached_sha256(path)
        if split and digest != split.sha256:
            digest = sha256(path)  # the kept digest may be the damaged one
        ids = np.memmap(path, dtype, mode="r")
    if split and digest != split.sha256:
        raise DataError(
            f"{path} has SHA-256 {digest}, but meta.json says {split.sha256}: its bytes have "
            "changed; prepare or copy it again"
        )
    return Tokens(
        ids=ids,
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
    # Ids above the largest held-out one add nothing, and a vocabulary may have billions of them.
    held_out = _occurrences(val)
    seen = _occurrences(train, at_least=len(held_out))[: len(held_out)]
    log_p = np.log(seen + 1) - math.log(train.count + train.vocabulary)
    return float(-(held_out @ log_p) / val.count)


def _occurrences(tokens: Tokens, at_least: int = 0) -> np.ndarray:
    """Returns how often each id occurs, in an array of at least `at_least` entries."""
    total = np.zeros(at_least, np.int64)
    for start in range(0, tokens.count, _CHUNK):
        found = np.bincount(tokens.ids[start : start + _CHUNK], minlength=len(total))
        found[: len(total)] += total
        total = found
    return total
