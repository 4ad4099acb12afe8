"""Tokenizers, which turn text into token ids: GPT-2's byte-pair encoding, or plain bytes."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lowprec_attn import installation
from lowprec_attn.data.tokens import DataError, token_dtype


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
    """GPT-2's byte-pair encoding, computed by tiktoken on all cores."""

    name = "gpt2"

    def __init__(self, encoding: Any):
        self._encoding = encoding
        self.vocabulary: int = encoding.n_vocab
        self.end_of_text: int = encoding.eot_token

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text; a literal `<|endoftext|>` in it is ordinary text."""
        ids = self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.asarray(i, token_dtype(self.vocabulary)) for i in ids]


def gpt2() -> Gpt2Tokenizer:
    """The GPT-2 tokenizer, whose vocabulary tiktoken downloads and keeps.

    Raises:
      DataError: tiktoken is not installed, or the download fails.
    """
    with installation.needing("data", DataError, "the gpt2 tokenizer needs tiktoken"):
        import tiktoken
    try:
        return Gpt2Tokenizer(tiktoken.get_encoding("gpt2"))
    except (OSError, ValueError) as err:  # no network, a proxy's error page, a broken download
        raise DataError(
            f"cannot download the GPT-2 vocabulary ({type(err).__name__}): set TIKTOKEN_CACHE_DIR "
            "to a directory that has it from another machine, or give --tokenizer bytes"
        ) from err
