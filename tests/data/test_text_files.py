"""Text files of every format that is told by content: what is read of each, and what is refused."""

import bz2
import functools
import gzip
import itertools
import json
import lzma
import os
import random
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from processes import instants

from lowprec_attn.data import documents, prepare, text_files, tokens
from lowprec_attn.data.documents import Piece
from lowprec_attn.data.tokenizer import ByteTokenizer
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import DiskError

TEXTS = ["first\n", "zweiter é", "third\r\nwith lines\n"]
PLAIN = "".join(f"line {i}\n" for i in range(50)).encode()
LONG = "".join(f"{random.Random(i).random()}\n" for i in range(20_000)).encode()
JSONL = "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)).encode()


def parquet(texts, column="text"):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({column: texts, "other": list(range(len(texts)))}), sink)
    return sink.getvalue().to_pybytes()


def read(tmp_path, content, **options):
    """The documents of a file without a telling name."""
    path = tmp_path / "file"
    path.write_bytes(content)
    source = documents.text_files([path], **options)
    found = [piece.text for piece in source.pieces]
    assert source.done() == source.size == len(content)
    return found


PACKED = {
    "as it is": lambda data: data,
    "gzip": gzip.compress,
    "gzip of two members": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    "zstd": zstandard.compress,
    "zstd of two frames": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte-order mark"])
@pytest.mark.parametrize("content", ["text", "JSON lines"])
def test_packed_text_is_read_as_what_it_holds(tmp_path, packed, mark, content):
    plain = PLAIN if content == "text" else JSONL
    found = read(tmp_path, PACKED[packed](mark + plain))
    assert found == ([PLAIN.decode()] if content == "text" else TEXTS)


def test_parquet_is_read_by_its_column_text(tmp_path):
    assert read(tmp_path, parquet([*TEXTS, None, " "])) == TEXTS
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "file"), split="train")
    assert loaded["text"][:3] == TEXTS


def test_of_json_lines_empty_texts_are_no_documents(tmp_path):
    assert read(tmp_path, b'{"text": ""}\n\n{"text": null}\n{"text": "a"}') == ["a"]


@pytest.mark.parametrize(
    "content",
    [
        b"{not JSON}\n{\n",
        b"[1, 2] is where it begins\n",
        b'{"a": 1} and more on the line\n',
        b'{\n "text": "of a file over several lines"\n}\n',
    ],
)
def test_what_merely_begins_like_json_is_text(tmp_path, content):
    assert read(tmp_path, content) == [content.decode()]


def test_a_format_that_is_named_is_not_told(tmp_path):
    assert read(tmp_path, JSONL, format="text") == [JSONL.decode()]


def test_a_long_first_line_of_json_lines_is_recognised(tmp_path):
    text = "x" * 3 * text_files._HEAD
    assert read(tmp_path, json.dumps({"text": text}).encode() + b"\n" + JSONL) == [text, *TEXTS]


REFUSED = {
    "no text in JSON lines": (b'{"body": "x"}\n', r"line 1 has the fields \['body'\], but no 'te"),
    "a number as text": (b'{"text": 3}\n', "line 1 has int as its 'text', not text"),
    "a line that is not JSON": (JSONL + b"oops\n", "line 4 is not JSON .*, and the first line is"),
    "a line that is no object": (JSONL + b"[]\n", "line 4 has no object, but no 'text'"),
    "half a surrogate pair": (b'{"text": "\\ud800"}\n', "line 1 has no Unicode as its 'text'"),
    "brackets without end": (JSONL + b"[" * 100_000, "line 4 is not JSON"),
    "a JSON array": (b'[{"text": "a"},\n{"text": "b"}]', "is a JSON array: give one object a line"),
    "Parquet without text": (parquet(TEXTS, "body"), r"has the columns \['body', 'other'\], but"),
    "Parquet of numbers": (parquet([1, 2]), "has int as its 'text', not text"),
    "damaged Parquet": (parquet(TEXTS)[:80], "is not a readable Parquet file"),
    "Parquet in gzip": (gzip.compress(parquet(TEXTS)), "is Parquet within gzip: unpack it"),
    "zip": (b"PK\x03\x04 and so on", "is a zip archive: unpack it"),
    "PDF": (b"%PDF-1.7 and so on", "is a PDF: extract its text"),
    "tar": (b"name".ljust(257, b"\0") + b"ustar", "is a tar archive: unpack it"),
    "tar in gzip": (gzip.compress(b"name".ljust(257, b"\0") + b"ustar"), "is a tar archive"),
    "UTF-16": ("text".encode("utf-16"), "is UTF-16: convert it with iconv -f UTF-16"),
    "token ids": (np.arange(500, dtype="<u2").tobytes(), r"is binary \(it holds zero bytes\)"),
    "Latin-1": ("café".encode("latin-1"), r"is not UTF-8 \(byte 0xe9\)"),
    "half of gzip": (gzip.compress(PLAIN)[:30], "is damaged gzip"),
    "gzip with a wrong sum": (gzip.compress(PLAIN)[:-8] + bytes(8), "is damaged gzip"),
    "half of zstd": (zstandard.compress(PLAIN)[:60], "is damaged zstd"),
    "half of a long zstd": (zstandard.compress(LONG)[:-9000], "is damaged zstd"),
    "zstd with a wrong byte": (zstandard.compress(PLAIN)[:30] + b"x" * 40, "is damaged zstd"),
    "damaged bzip2": (bz2.compress(PLAIN)[:20] + bytes(30), "is damaged bzip2"),
    "half of xz": (lzma.compress(PLAIN)[:40], "is damaged xz"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_text_is_refused_by_name(tmp_path, case):
    content, words = REFUSED[case]
    with pytest.raises(DataError, match=rf"text file .*/file {words}"):
        read(tmp_path, content)


def test_a_separator_goes_with_plain_text(tmp_path):
    with pytest.raises(DataError, match=r"--separator goes with plain text, and .*file is jsonl"):
        read(tmp_path, JSONL, separator="\n")


def split(text, separator, sizes):
    """The documents of a text that comes in pieces."""
    cuts = [0, *itertools.accumulate(sizes), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts) if a < b]
    stream = [Piece(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return [piece.text for piece in documents._split(stream, separator)]


@pytest.mark.parametrize("seed", range(50))
def test_a_text_is_split_alike_however_it_is_cut(seed):
    draw = random.Random(seed)
    separator = "".join(draw.choices("ab", k=draw.randint(1, 4)))
    text = "".join(draw.choices("abc", k=60))
    whole = [part for part in text.split(separator) if part]
    sizes = [draw.randint(1, 4) for _ in range(15)]
    assert split(text, separator, sizes) == whole


class Counted(str):
    """A text that counts how many characters are searched for a separator."""

    searched = 0

    def __radd__(self, before):
        return Counted(str.__add__(before, self))

    def split(self, separator):
        Counted.searched += len(self)
        return str.split(self, separator)


def test_a_long_document_is_searched_for_the_separator_once():
    piece = Counted("some words " * 10)
    stream = [Piece(piece, ends_document=i == 999) for i in range(1_000)]
    (found,) = documents._split(stream, "<|endoftext|>")
    assert found.text == piece * 1_000
    assert len(found.text) <= Counted.searched <= 2 * len(found.text)


# Whole, or not there.


def prepared(out, texts, seed=0):
    pieces = [Piece(text, ends_document=True) for text in texts]
    prepare.prepare(out, documents.Documents(pieces, None), ByteTokenizer(), 0.3, seed)
    return tokens.load(out)


def test_a_kill_leaves_no_tokens_that_the_trainer_takes_for_whole(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for before in ("nothing", "of this command", "nanoGPT's"):
        shutil.rmtree(out, ignore_errors=True)
        known = set()
        if before != "nothing":
            known.add(prepared(out, ["old"] * 10).train.sha256)
        if before == "nanoGPT's":
            (out / "meta.json").unlink()
        change = functools.partial(prepared, out, ["new text"] * 10)
        copy_to = functools.partial(_copy_if_there, out)
        copies = instants.snapshots_of(monkeypatch, out, tmp_path / before, change, copy_to=copy_to)
        whole = known | {tokens.load(out).train.sha256}
        assert len(copies) > 8
        found = []
        for copy in copies:
            try:
                found.append(tokens.load(copy))
            except DataError:
                continue
            assert found[-1].train.sha256 in whole
            of_old = before == "nanoGPT's" and found[-1].train.sha256 in known
            assert found[-1].train.tokenizer == ("gpt2" if of_old else "bytes")
        assert len({corpus.train.sha256 for corpus in found}) == len(whole)


def _copy_if_there(out, target):
    if out.exists():
        shutil.copytree(out, target)
    else:
        target.mkdir(parents=True)


def test_what_a_kill_has_left_is_removed_by_the_next_call(tmp_path):
    out = tmp_path / "out"
    (out / ".prepare-killed").mkdir(parents=True)
    (out / ".prepare-killed" / "train.bin").write_bytes(bytes(100))
    (tmp_path / "elsewhere").mkdir()
    (out / ".prepare-link").symlink_to(tmp_path / "elsewhere")
    prepared(out, ["a"] * 10)
    assert sorted(p.name for p in out.iterdir()) == [
        ".prepare-link", ".train.bin.sha256", ".val.bin.sha256", "meta.json", "train.bin", "val.bin"
    ]  # fmt: skip
    assert (tmp_path / "elsewhere").is_dir()


def test_two_processes_do_not_prepare_one_directory(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with (
        prepare._locked(out),
        pytest.raises(DataError, match=f"another process is preparing {out}: wait for it"),
    ):
        prepared(out, ["a"] * 10)


@pytest.mark.parametrize("name", prepare.OUTPUTS)
def test_no_link_is_replaced(tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "mine").write_text("mine")
    (out / name).symlink_to(tmp_path / "mine")
    with pytest.raises(DiskError, match=f"cannot write {out}/{name}: a symbolic link stands there"):
        prepared(out, ["a"] * 10)
    assert (tmp_path / "mine").read_text() == "mine"
    assert os.listdir(out) == [name]


# Token files without a meta.json.

GPT2 = np.random.default_rng(0).integers(0, 50257, 4000)


def bare(tmp_path, content):
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(content)
    return tokens.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GPT2.astype("<u4").tobytes(), "uint32 or int32 ids"),
        (2 * GPT2.astype("<u4").tobytes()[:400], "uint32 or int32 ids"),
        ((GPT2 * 20).astype("<u4").tobytes(), "uint32 or int32 ids"),  # of a large vocabulary
        (GPT2.astype("<i8").tobytes(), "uint64 or int64 ids"),
        (b"\x93NUMPY" + bytes(122) + GPT2.astype("<u2").tobytes(), r"a NumPy file \(.npy\)"),
        (gzip.compress(GPT2.astype("<u2").tobytes(), mtime=0), "gzip"),
        (parquet(TEXTS * 9), "Parquet"),
        ((20240520).to_bytes(4, "little") + bytes(1020) + GPT2.astype("<u2").tobytes(), "llm.c"),
    ],
)
def test_bare_token_files_of_other_kinds_are_refused(tmp_path, content, words):
    content += bytes(len(content) % 2)
    with pytest.raises(DataError, match=rf"train.bin looks like .*{words}.*; a token file without"):
        bare(tmp_path, content)


def test_bare_token_files_of_nanogpt_are_read(tmp_path):
    assert bare(tmp_path, GPT2.astype("<u2").tobytes()).train.count == 4000
    assert bare(tmp_path, np.arange(6, dtype="<u2").tobytes()).train.count == 6
