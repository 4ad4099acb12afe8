"""Token files: what loads, and what each kind of damage is told."""

import hashlib
import json
import math

import numpy as np
import pytest

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
    corpus = tokens.load(write_prepared(tmp_path / "data", dtype), verify=True)
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


def test_changed_bytes_are_found_when_asked(tmp_path):
    directory = write_prepared(tmp_path / "data")
    with (directory / "train.bin").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    assert tokens.load(directory).train.ids[10] == 255
    with pytest.raises(DataError, match=r"train.bin has SHA-256 .* its bytes have changed"):
        tokens.load(directory, verify=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"splits": {"train": {"tokens": 100}}}',
        '{"unknown": 1, "splits": {"train": {"tokens": 1, "sha256": ""}}}',
    ],
)
def test_meta_that_prepare_did_not_write(tmp_path, text):
    directory = write_prepared(tmp_path / "data")
    (directory / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta.json is not what `lowprec-attn prepare` writes"):
        tokens.load(directory)


def test_meta_with_a_foreign_dtype(tmp_path):
    directory = write_prepared(tmp_path / "data")
    fields = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(fields | {"dtype": "float64"}))
    with pytest.raises(DataError, match=r"dtype 'float64' is not uint16 or uint32"):
        tokens.load(directory)


def test_text_shorter_than_one_sequence():
    split(range(9)).require(context=8, vocab_size=257)
    with pytest.raises(DataError, match=r"holds 8 tokens, less than one sequence of 8 \+ 1"):
        split(range(8)).require(context=8, vocab_size=257)


def test_id_beyond_the_vocabulary(monkeypatch):
    monkeypatch.setattr(tokens, "_CHUNK", 10)
    ids = np.zeros(100, np.uint16)
    ids[[57, 80]] = 256, 300
    split(ids).require(context=8, vocab_size=301)
    with pytest.raises(DataError, match=r"token id 256 at position 57, beyond .* 256:"):
        split(ids).require(context=8, vocab_size=256)


def test_a_corpus_checks_both_splits():
    corpus = tokens.Corpus(split(range(20)), split(range(5)), "test")
    corpus.require(context=4, vocab_size=20)
    with pytest.raises(DataError, match="holds 5 tokens"):
        corpus.require(context=5, vocab_size=20)
    with pytest.raises(DataError, match="token id 19 at position 19"):
        corpus.require(context=4, vocab_size=19)


def test_unigram_loss_by_hand(monkeypatch):
    # Counts 3, 1, 0 of a vocabulary of 3; add one: 4/7, 2/7, 1/7.
    train, val = split([0, 0, 1, 0], vocabulary=3), split([0, 1, 2, 2], vocabulary=3)
    expected = -(math.log(4 / 7) + math.log(2 / 7) + 2 * math.log(1 / 7)) / 4
    assert tokens.unigram_loss(train, val) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(tokens, "_CHUNK", 3)
    assert tokens.unigram_loss(train, val) == pytest.approx(expected, rel=1e-12)
