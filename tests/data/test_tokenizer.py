"""The tokenizers, on a vocabulary of 256 bytes and two merges."""

import argparse
import json
import re
import sys

import pytest

from lowprec_attn import installation
from lowprec_attn.commands import prepare
from lowprec_attn.data import tokenizer, tokens
from lowprec_attn.data.tokens import DataError


@pytest.fixture(autouse=True)
def tiktoken_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def bpe(tmp_path):
    """GPT-2's file format: printable stand-ins for all bytes, then "t"+"h" and "th"+"e"."""
    directory = tmp_path / "bpe"
    directory.mkdir()
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    encoder = {s: i for i, s in enumerate([*symbols, "th", "the", "<|endoftext|>"])}
    (directory / "encoder.json").write_text(json.dumps(encoder))
    (directory / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    return directory


def test_bytes_are_utf8():
    bytes_ = tokenizer.ByteTokenizer()
    assert [ids.tolist() for ids in bytes_.encode(["aé", ""])] == [[97, 0xC3, 0xA9], []]
    assert (bytes_.end_of_text, bytes_.vocabulary) == (256, 257)


def test_local_files_merge(bpe):
    gpt2 = tokenizer.gpt2(bpe)
    assert (gpt2.name, gpt2.end_of_text, gpt2.vocabulary) == ("gpt2", 258, 259)
    the, t = gpt2.encode(["the", "t"])
    assert the.tolist() == [257]
    assert t.tolist() == [ord("t") - ord("!")]
    assert the.dtype == "uint16"


def test_prepare_writes_its_ids_and_end_of_text(bpe, tmp_path):
    (tmp_path / "a.txt").write_text("the the|" * 20)
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    arguments = [tmp_path / "out", "--text", tmp_path / "a.txt", "--separator=|", "--bpe", bpe]
    prepare.run(parser.parse_args([*map(str, arguments), "--val-fraction=0.5"]))
    corpus = tokens.load(tmp_path / "out", verify=True)
    # "the", then " the", whose space (220 in GPT-2's order of bytes) does not merge here.
    assert corpus.train.ids.tolist() == corpus.val.ids.tolist() == [257, 220, 257, 258] * 10
    assert (corpus.train.tokenizer, corpus.train.vocabulary) == ("gpt2", 259)


def test_the_end_of_text_mark_in_a_text_is_ordinary_text(bpe):
    (ids,) = tokenizer.gpt2(bpe).encode(["<|endoftext|>"])
    assert len(ids) == len("<|endoftext|>")


def test_changed_files_are_read_anew(bpe):
    assert len(tokenizer.gpt2(bpe).encode(["an"])[0]) == 2
    encoder = json.loads((bpe / "encoder.json").read_text())
    (bpe / "encoder.json").write_text(json.dumps(encoder | {"an": 258, "<|endoftext|>": 259}))
    (bpe / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\na n\n")
    assert tokenizer.gpt2(bpe).encode(["an"])[0].tolist() == [258]


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_missing_bpe_file(bpe, name):
    (bpe / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing: --bpe needs"):
        tokenizer.gpt2(bpe)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("encoder.json", "{"),
        ("encoder.json", '{"a": 0}'),
        ("vocab.bpe", "#version: 0.2\nt h\n"),
        ("vocab.bpe", "#version: 0.2\nt h\nth e\nthree in line\n"),
    ],
)
def test_files_that_are_no_vocabulary(bpe, name, text):
    (bpe / name).write_text(text)
    with pytest.raises(DataError, match=r"are not a GPT-2 vocabulary"):
        tokenizer.gpt2(bpe)


def test_a_vocabulary_without_an_end_of_text(bpe):
    encoder = json.loads((bpe / "encoder.json").read_text())
    del encoder["<|endoftext|>"]
    (bpe / "encoder.json").write_text(json.dumps(encoder))
    with pytest.raises(DataError, match=r"not a GPT-2 vocabulary \(KeyError: '<\|endoftext\|>'"):
        tokenizer.gpt2(bpe)


def test_without_network(monkeypatch):
    import tiktoken

    def refuse(name):
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(DataError, match=r"cannot download .* \(ConnectionError\): give --bpe DIR"):
        tokenizer.gpt2()


def test_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=re.escape(f"tiktoken: {installation.command('data')}")):
        tokenizer.gpt2()
