"""The sequence that `diagnose` runs a model on: a user's text, or token ids."""

import codecs
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from lowprec_attn import installation
from lowprec_attn.counts import many
from lowprec_attn.data.tokenizer import ByteTokenizer, gpt2
from lowprec_attn.data.tokens import Meta, require_bare_ids
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError

# A function that returns the token ids of a text.
Encode = Callable[[str], np.ndarray]

_ID_SUFFIXES = (".npy", ".bin")
# A bound on the bytes to read for one context: hardly any text has longer tokens on average.
_BYTES_PER_TOKEN = 32


def load(
    path: Path, context: int, vocab_size: int, encode: Callable[[], Encode]
) -> Int32[np.ndarray, "1 ids"]:
    """Returns the first context + 1 token ids of a file, or all of them where it holds fewer.

    Args:
      path: a `.npy` file of whole numbers [n] or [1, n], a `.bin` file as `lowprec-attn prepare`
        and nanoGPT write it, or else a file of UTF-8 text.
      context: tokens per sequence T of the model.
      vocab_size: rows of the model's embedding table.
      encode: returns the function that encodes text; called only where the file is text.

    Raises:
      UserError: the file or the tokenizer is unusable, there are fewer than 2 ids, or an id is
        outside the vocabulary.
    """
    if path.exists() and not path.is_file():  # merely opening a pipe may wait for ever
        raise DiagnoseError(f"--text {path}: is not a file; give a file")
    try:
        if path.suffix in _ID_SUFFIXES:
            ids = _ids(path, context + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(min(_BYTES_PER_TOKEN * (context + 1), path.stat().st_size))
            # The decoder is incremental, because the cut may fall within a character.
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(raw)
            ids = encode()(text)
    except OSError as error:
        raise DiagnoseError(f"--text {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DiagnoseError(
            f"--text {path}: is not UTF-8 at byte {error.start}; token ids are read from .npy and "
            ".bin"
        ) from error
    ids = ids[: context + 1]
    if len(ids) < 2:
        raise DiagnoseError(f"--text {path}: holds {many(len(ids), 'token')}; give at least 2")
    if ids.min() < 0 or ids.max() >= vocab_size:
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise DiagnoseError(
            f"--text {path}: token id {ids[at]} at position {at} is outside the model's "
            f"vocabulary of {vocab_size}; use the tokenizer that the model was trained with"
        )
    return ids.astype(np.int32)[None]


def of_run(tokenizer: str) -> Encode:
    """Returns the tokenizer of a run's text.

    Raises:
      UserError: the trainer does not know the tokenizer, or it cannot be loaded.
    """
    if tokenizer not in ("bytes", "gpt2"):
        raise DiagnoseError(
            f"the run's text has the tokenizer {tokenizer!r}, which is unknown here; give --text a "
            ".npy or .bin of token ids"
        )
    encoding = ByteTokenizer() if tokenizer == "bytes" else gpt2()
    return lambda text: encoding.encode([text])[0]


def of_folder(folder: Path) -> Encode:
    """Returns the tokenizer of a Hugging Face folder.

    Raises:
      DiagnoseError: the folder has no `tokenizer.json`, the file is damaged, or the package
        tokenizers is not installed.
    """
    path = folder / "tokenizer.json"
    instead = "give --text a .npy or .bin of token ids"
    if not path.is_file():
        raise DiagnoseError(
            f"{folder} has no tokenizer.json; save it there with "
            f"AutoTokenizer.from_pretrained(NAME).save_pretrained, or {instead}"
        )
    what = f"{path} needs the package tokenizers"
    with installation.needing("diagnose", DiagnoseError, what, f"; or {instead}"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise DiagnoseError(f"{path} is no tokenizer ({error}); copy it again") from error
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def _ids(path: Path, count: int) -> np.ndarray:
    if path.suffix == ".npy":
        try:
            ids = np.load(path, allow_pickle=False)
        # MemoryError: the header of a damaged or made-up file may claim any shape.
        except (ValueError, EOFError, MemoryError, OverflowError) as error:
            raise DiagnoseError(f"--text {path}: not a readable npy file ({error})") from error
        if ids.dtype.kind not in "iu" or ids.shape[-1:] != (ids.size,):
            raise DiagnoseError(
                f"--text {path}: must hold whole numbers [n] or [1, n], got "
                f"{ids.dtype}{list(ids.shape)}"
            )
        return ids.reshape(-1)
    meta = path.with_name("meta.json")
    if not meta.exists():
        require_bare_ids(path)
    dtype = np.dtype(Meta.read(meta).dtype if meta.exists() else "uint16").newbyteorder("<")
    return np.fromfile(path, dtype, count)
