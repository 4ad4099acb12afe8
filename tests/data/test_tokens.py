"""Token files: what loads, and the message for each kind of damage."""

import errno
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from lowprec_attn import files
from lowprec_attn.data import tokens
from lowprec_attn.data.tokens import DataError, Tokens


def split(ids, vocabulary=257):
    ids = np.asarray(ids, np.uint16)
    return Tokens(ids, hashlib.sha256(ids.tobytes()).hexdigest(), vocabulary, "bytes", "test")


def write_nanogpt(directory, train=range(100), val=range(50)):
    directory.mkdir(exist_ok=True)
    np.asarray(train, "<u2").tofile(directory / "train.bin")
    np.asarray(val, "<u2").tofile(directory / "val.bin")
    return directory


def write_prepared(directory, dtype="uint16", vocabulary=300):
    arrays = {"train": np.arange(100, dtype=dtype), "val": np.arange(50, dtype=dtype)}
    directory.mkdir()
    splits = {}
    for name, ids in arrays.items():
        ids.tofile(directory / f"{name}.bin")
        splits[name] = tokens.SplitMeta(len(ids), hashlib.sha256(ids.tobytes()).hexdigest())
    tokens.Meta("bytes", vocabulary, dtype, splits).write(directory / "meta.json")
    return directory


def test_nanogpt_files_load_as_they_are(tmp_path):
    corpus = tokens.load(write_nanogpt(tmp_path / "data", train=[5, 50256, 7]))
    assert corpus.train.ids.tolist() == [5, 50256, 7]
    assert corpus.val.count == 50
    assert (corpus.train.tokenizer, corpus.train.vocabulary) == ("gpt2", 50257)
    assert corpus.train.sha256 == hashlib.sha256(bytes([5, 0, 0x50, 0xC4, 7, 0])).hexdigest()
    assert isinstance(corpus.train.ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.ids[0] = 1


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_prepared_files_follow_their_meta(tmp_path, dtype):
    corpus = tokens.load(write_prepared(tmp_path / "data", dtype))
    assert corpus.train.ids.tolist() == list(range(100))
    assert corpus.val.ids.tolist() == list(range(50))
    assert (corpus.val.tokenizer, corpus.val.vocabulary) == ("bytes", 300)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_dtype_holds_the_vocabulary(vocabulary, dtype):
    assert tokens.token_dtype(vocabulary) == dtype
    assert np.iinfo(dtype).max >= vocabulary - 1


def test_missing_directory(tmp_path):
    with pytest.raises(DataError, match=r"data directory .*nowhere does not exist.*prepare"):
        tokens.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data directory .*file is no directory: make it with"):
        tokens.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_missing_file(tmp_path, name):
    directory = write_nanogpt(tmp_path / "data")
    (directory / name).unlink()
    with pytest.raises(DataError, match=rf"token file .*{name} is missing"):
        tokens.load(directory)


@pytest.mark.parametrize("size", [0, 199])
def test_file_that_is_not_whole_ids(tmp_path, size):
    directory = write_nanogpt(tmp_path / "data")
    with (directory / "train.bin").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=rf"train.bin has {size} bytes, not whole uint16"):
        tokens.load(directory)


def test_file_shorter_than_its_meta(tmp_path):
    directory = write_prepared(tmp_path / "data")
    with (directory / "val.bin").open("r+b") as file:
        file.truncate(60)
    with pytest.raises(DataError, match=r"val.bin holds 30 tokens, but meta.json says 50"):
        tokens.load(directory)


@pytest.mark.parametrize("seen_before", [False, True])
def test_changed_bytes_are_found(tmp_path, seen_before):
    directory = write_prepared(tmp_path / "data")
    if seen_before:
        tokens.load(directory)
    with (directory / "train.bin").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    with pytest.raises(DataError, match=r"train.bin has SHA-256 .* its bytes have changed"):
        tokens.load(directory)


def test_a_file_is_hashed_once(tmp_path, monkeypatch):
    directory = write_prepared(tmp_path / "data")
    known = tokens.load(directory).train.sha256
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", lambda path: pytest.fail(f"{path} is read again"))
        assert tokens.load(directory).train.sha256 == known
    kept = directory / ".train.bin.sha256"
    for damaged in ("", "[]", "{}", kept.read_text().replace(known, "0" * 64)):
        kept.write_text(damaged)
        assert tokens.load(directory).train.sha256 == known


def test_a_directory_that_cannot_be_written_is_hashed_every_time(tmp_path):
    directory = write_prepared(tmp_path / "data")
    (directory / ".train.bin.sha256").mkdir()  # not even root can write over a directory
    assert tokens.load(directory).train.sha256 == tokens.load(directory).train.sha256


@pytest.mark.parametrize("name", ["train.bin", "meta.json"])
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, name):
    directory, intact = write_prepared(tmp_path / "data"), Path.open

    def refuse(path, *args, **kwargs):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return intact(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"cannot read .*{name}: Permission denied; make it"):
        tokens.load(directory)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"splits": {"train": {"tokens": 100}}}',
        '{"unknown": 1, "splits": {"train": {"tokens": 1, "sha256": ""}}}',
    ],
)
def test_meta_that_prepare_did_not_write(tmp_path, text):
    directory = write_prepared(tmp_path / "data")
    (directory / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta.json is not what `lowprec-attn prepare` writes"):
        tokens.load(directory)


def same_splits(**fields):
    return {name: {"tokens": 9, "sha256": "0" * 64} | fields for name in ("train", "val")}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", "float64", "dtype 'float64' is not uint16 or uint32"),
        ("dtype", [], "dtype [] is not"),
        ("tokenizer", None, "tokenizer None is not a name"),
        ("vocabulary", "x", "vocabulary 'x' is not a whole number from 1 to 65536"),
        ("vocabulary", -5, "vocabulary -5 is not"),
        ("vocabulary", True, "vocabulary True is not"),
        ("vocabulary", 65537, "vocabulary 65537 is not"),
        ("splits", {"train": {"tokens": "9", "sha256": ""}}, "'val'"),
        ("splits", same_splits(tokens="9"), "tokens of train '9' is not a positive"),
        ("splits", same_splits(sha256="x"), "sha256 of train 'x' is not 64 hex"),
    ],
)
def test_meta_with_a_wrong_value(tmp_path, field, value, words):
    directory = write_prepared(tmp_path / "data")
    fields = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(DataError, match=re.escape(words)):
        tokens.load(directory)


def test_a_vocabulary_that_the_tokens_exceed_is_told_before_training(tmp_path):
    corpus = tokens.load(write_prepared(tmp_path / "data", vocabulary=10))
    with pytest.raises(DataError, match=r"train.bin holds token id 10 at position 10, beyond the"):
        corpus.require(context=8, vocab_size=320)


def test_text_shorter_than_one_sequence():
    split(range(9)).require(context=8, vocab_size=257)
    with pytest.raises(DataError, match=r"holds 8 tokens, less than one sequence of 8 \+ 1"):
        split(range(8)).require(context=8, vocab_size=257)


def test_id_beyond_the_vocabulary(monkeypatch):
    monkeypatch.setattr(tokens, "_CHUNK", 10)
    ids = np.zeros(100, np.uint16)
    ids[[57, 80]] = 256, 300
    split(ids, vocabulary=301).require(context=8, vocab_size=301)
    with pytest.raises(DataError, match=r"token id 256 at position 57, beyond the model's .* 256:"):
        split(ids, vocabulary=301).require(context=8, vocab_size=256)
    # If only the count of the unigram model noticed it, a whole training would be lost.
    with pytest.raises(DataError, match=r"token id 300 at position 80, beyond the 300 of its tok"):
        split(ids, vocabulary=300).require(context=8, vocab_size=400)


def test_a_corpus_checks_both_splits():
    corpus = tokens.Corpus(split(range(20)), split(range(5)), "test")
    corpus.require(context=4, vocab_size=20)
    with pytest.raises(DataError, match="holds 5 tokens"):
        corpus.require(context=5, vocab_size=20)
    with pytest.raises(DataError, match="token id 19 at position 19"):
        corpus.require(context=4, vocab_size=19)


def test_unigram_loss_by_hand(monkeypatch):
    # Counts 3, 1, 0 for a vocabulary of 3. Adding one gives 4/7, 2/7, 1/7.
    train, val = split([0, 0, 1, 0], vocabulary=3), split([0, 1, 2, 2], vocabulary=3)
    expected = -(math.log(4 / 7) + math.log(2 / 7) + 2 * math.log(1 / 7)) / 4
    assert tokens.unigram_loss(train, val) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(tokens, "_CHUNK", 3)
    assert tokens.unigram_loss(train, val) == pytest.approx(expected, rel=1e-12)
