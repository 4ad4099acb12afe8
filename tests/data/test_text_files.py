"""Text files: what is read from each, and what is refused."""

import functools
import gzip
import json
import os
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import instants

from lowprec_attn.data import documents, prepare, tokens
from lowprec_attn.data.documents import Piece
from lowprec_attn.data.tokenizer import ByteTokenizer
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import DiskError

TEXTS = ["first\n", "zweiter é", "third\r\nwith lines\n"]
PLAIN = "".join(f"line {i}\n" for i in range(50)).encode()
JSONL = "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)).encode()


def parquet(texts):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts, "other": list(range(len(texts)))}), sink)
    return sink.getvalue().to_pybytes()


def zstd(data):
    return pa.Codec("zstd").compress(data).to_pybytes()


def read(tmp_path, content):
    """The documents of a file whose name does not tell its format."""
    path = tmp_path / "file"
    path.write_bytes(content)
    source = documents.text_files([path])
    found = [piece.text for piece in source.pieces]
    assert source.done() == source.size == len(content)
    return found


PACKED = {
    "as it is": lambda data: data,
    "gzip": gzip.compress,
    "gzip of two members": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    "zstd": zstd,
    "zstd of two frames": lambda data: zstd(data[:20]) + zstd(data[20:]),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte-order mark"])
def test_packed_text_is_read_as_what_it_holds(tmp_path, packed, mark):
    assert read(tmp_path, PACKED[packed](mark + PLAIN)) == [PLAIN.decode()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"])
def test_rows_are_read_as_a_data_set(tmp_path, name):
    """As the refusal of such a text advises. Empty texts do not count as documents."""
    content = parquet([*TEXTS, None, " "]) if name == "rows.parquet" else JSONL
    pack = {".gz": gzip.compress, ".zst": zstd}.get(name[name.rindex(".") :], bytes)
    (tmp_path / name).write_bytes(pack(content))
    kind = "parquet" if name == "rows.parquet" else "json"
    assert [p.text for p in documents.dataset(kind, [str(tmp_path / name)]).pieces] == TEXTS


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


AS_ROWS = "JSON: give it by --dataset json"
REFUSED = {
    "JSON lines": (JSONL, f"is {AS_ROWS}"),
    "JSON lines in gzip": (gzip.compress(b"\xef\xbb\xbf" + JSONL), f"is {AS_ROWS}"),
    "a long JSON line": (json.dumps({"text": "x" * 3 * documents._HEAD}).encode(), f"is {AS_ROWS}"),
    "a JSON array": (b'[{"text": "a"},\n{"text": "b"}]', f"is {AS_ROWS}"),
    "Parquet": (parquet(TEXTS), "is Parquet: give it by --dataset parquet"),
    "zip": (b"PK\x03\x04 and so on", "is a zip archive: unpack it"),
    "PDF": (b"%PDF-1.7 and so on", "is a PDF: extract its text"),
    "tar": (b"name".ljust(257, b"\0") + b"ustar", r"is binary \(it holds zero bytes\)"),
    "UTF-16": ("text".encode("utf-16"), "is UTF-16: convert it with iconv -f UTF-16"),
    "token ids": (np.arange(500, dtype="<u2").tobytes(), r"is binary \(it holds zero bytes\)"),
    "Latin-1": ("café".encode("latin-1"), r"is not UTF-8 \(byte 0xe9\)"),
    "half of gzip": (gzip.compress(PLAIN)[:30], "is damaged gzip"),
    "JSON lines in zstd": (zstd(JSONL), f"is {AS_ROWS}"),
    "gzip with a wrong sum": (gzip.compress(PLAIN)[:-8] + bytes(8), "is damaged gzip"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_text_is_refused_by_name(tmp_path, case):
    content, words = REFUSED[case]
    with pytest.raises(DataError, match=rf"text file .*/file {words}"):
        read(tmp_path, content)


@pytest.mark.parametrize("left", [7, -1])
def test_a_part_of_zstd_is_refused(tmp_path, left):
    with pytest.raises(DataError, match=r"cannot read text file .*/file: Truncated"):
        read(tmp_path, zstd(PLAIN)[:left])


def test_zstd_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="is zstd, which needs pyarrow: pip install"):
        read(tmp_path, zstd(PLAIN))


@pytest.mark.parametrize(
    ("text", "words"), [(3, "int as its 'text', not text"), ("\ud800", "no Unicode as its 'text'")]
)
def test_a_row_whose_text_is_none_is_refused(text, words):
    with pytest.raises(DataError, match=f"data set 'mine' has {words}"):
        list(documents._document(text, "data set 'mine'"))


# A prepared directory is complete, or it does not exist.


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
        ((GPT2 * 20).astype("<u4").tobytes(), "uint32 or int32 ids"),  # from a large vocabulary
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
