"""The default text: the documentation that comes with the running Python, without a download.

It consists of the language reference (`pydoc_data.topics`) and the docstrings of the standard
library: about 2 MB of English prose with examples, as bytes. Python versions differ a little, so a
run records the SHA-256 and the description of its text.
"""

import hashlib
import importlib
import inspect
import platform
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lowprec_attn.data.tokenizer import ByteTokenizer
from lowprec_attn.data.tokens import Corpus, DataError, Tokens

# Folders that are not the library itself. `pydoc_data` is skipped because it is read as `topics`.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
_VAL_ONE_IN = 20
_BLANK_LINES = re.compile(r"\n\s*\n")
# All triple-quoted strings are consumed in order, so that a closing quote is never taken for an
# opening one. Strings that begin a line (group 1) are docstrings. Parsing with `ast` finds the same
# text and takes five times longer.
_TRIPLE_QUOTED = re.compile(r'(^[ \t]*)?[rRbBuUfF]*"""(.*?)"""', re.DOTALL | re.MULTILINE)


def load() -> Corpus:
    """The documentation of the running interpreter as byte tokens; takes about a second.

    Raises:
      DataError: this Python carries neither documentation nor sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    topics = _topics()
    modules = docstrings(root)
    if not topics and not modules:
        raise DataError(
            f"this Python has no documentation or source in {root}: make token files with "
            "`lowprec-attn prepare OUT --text FILE...` and set data.path=OUT"
        )
    return build({f"topics/{name}": text for name, text in topics.items()} | modules)


def build(documents: Mapping[str, str]) -> Corpus:
    """Returns byte tokens of documents, split by a hash of each document's name.

    A paragraph is kept where it occurs first and dropped everywhere else, so that no held-out
    paragraph is also trained on.

    Args:
      documents: text by name; about one in 20 is held out, the same ones for the same names.
    """
    seen: set[str] = set()
    splits: dict[str, list[str]] = {"train": [], "val": []}
    for name in sorted(documents):
        paragraphs = _BLANK_LINES.split(documents[name].strip())
        fresh = [p for p in paragraphs if p not in seen]
        seen.update(fresh)
        if fresh:
            splits[_split_of(name)].append("\n\n".join(fresh) + "\n")
    description = (
        f"built-in text: documentation of Python {platform.python_version()} "
        f"({len(splits['train'])} documents to train on, {len(splits['val'])} held out, bytes)"
    )
    return Corpus(
        train=_tokens(splits["train"], "built-in text (train)"),
        val=_tokens(splits["val"], "built-in text (val)"),
        description=description,
    )


def docstrings(root: Path) -> dict[str, str]:
    """Docstrings of every module below `root`, by path; tests and installed packages excluded."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.isdisjoint(name.parts):
            source = path.read_text("utf-8", errors="replace")
            texts = [m[2] for m in _TRIPLE_QUOTED.finditer(source) if m[1] is not None]
            if texts:
                found[name.as_posix()] = "\n\n".join(map(inspect.cleandoc, texts))
    return found


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:  # some distributions leave it out; the docstrings are enough
        return {}


def _split_of(name: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _VAL_ONE_IN
    return "train" if bucket else "val"


def _tokens(texts: list[str], source: str) -> Tokens:
    tokenizer = ByteTokenizer()
    end = np.array([tokenizer.end_of_text], np.uint16)
    pieces = [piece for ids in tokenizer.encode(texts) for piece in (ids, end)]
    ids = np.concatenate([np.array([], np.uint16), *pieces])
    return Tokens.in_memory(ids, tokenizer.vocabulary, tokenizer.name, source)
