"""Tokenizers: text to token ids. GPT-2's byte-pair encoding, or plain bytes."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lowprec_attn import installation
from lowprec_attn.data.tokens import DataError, token_dtype
from lowprec_attn.files import sha256

_END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Turns text into ids.

    Attributes:
      name: `gpt2` or `bytes`.
      vocabulary: number of ids, `end_of_text` included.
      end_of_text: the id that follows every document.
    """

    name: str
    vocabulary: int
    end_of_text: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without `end_of_text`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    name = "bytes"
    vocabulary = 257
    end_of_text = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken, on all cores."""

    name = "gpt2"

    def __init__(self, encoding: Any):
        self._encoding = encoding
        self.vocabulary: int = encoding.n_vocab
        self.end_of_text: int = encoding.eot_token

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text; a literal `<|endoftext|>` in it is ordinary text."""
        ids = self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.asarray(i, token_dtype(self.vocabulary)) for i in ids]


def gpt2(bpe: Path | None = None) -> Gpt2Tokenizer:
    """The GPT-2 tokenizer.

    Args:
      bpe: directory with GPT-2's `encoder.json` and `vocab.bpe`, for machines without network;
        None lets tiktoken download them.

    Raises:
      DataError: tiktoken is not installed, the download fails, or the files are not a vocabulary.
    """
    try:
        import tiktoken
    except ModuleNotFoundError as err:
        raise DataError(
            f"the gpt2 tokenizer needs tiktoken: {installation.command('data')}"
        ) from err
    if bpe is not None:
        return Gpt2Tokenizer(_local_encoding(bpe))
    try:
        return Gpt2Tokenizer(tiktoken.get_encoding("gpt2"))
    except (OSError, ValueError) as err:  # no network, a proxy's error page, a broken download
        raise DataError(
            f"cannot download the GPT-2 vocabulary ({type(err).__name__}): give --bpe DIR with "
            "encoder.json and vocab.bpe, or --tokenizer bytes"
        ) from err


def _local_encoding(bpe: Path) -> Any:
    from tiktoken import Encoding
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    merges, encoder = bpe / "vocab.bpe", bpe / "encoder.json"
    for path in (merges, encoder):
        if not path.is_file():
            raise DataError(f"{path} is missing: --bpe needs encoder.json and vocab.bpe in {bpe}")
    try:
        # tiktoken caches what it reads by path alone; the hashes keep a changed file from being
        # read from that cache.
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(merges), str(encoder), sha256(merges), sha256(encoder)
        )
        end_of_text = json.loads(encoder.read_text("utf-8"))[_END_OF_TEXT]
    except (AssertionError, KeyError, ValueError) as err:
        raise DataError(
            f"{encoder} and vocab.bpe beside it are not a GPT-2 vocabulary "
            f"({type(err).__name__}: {err}): copy both again"
        ) from err
    return Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={_END_OF_TEXT: end_of_text},
    )
