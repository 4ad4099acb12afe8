"""The tokenizers, with a vocabulary of 256 bytes and two merges."""

import argparse
import re
import sys

import pytest
import tiktoken
import tiktoken_ext.openai_public

from lowprec_attn import installation
from lowprec_attn.commands import prepare
from lowprec_attn.data import tokenizer, tokens
from lowprec_attn.data.tokens import DataError


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    """Stands in for tiktoken's download: all bytes, then "t"+"h" and "th"+"e"."""
    symbols = [*(bytes([b]) for b in range(256)), b"th", b"the"]
    ranks = {symbol: rank for rank, symbol in enumerate(symbols)}
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=tiktoken_ext.openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 258},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)


def test_bytes_are_utf8():
    bytes_ = tokenizer.ByteTokenizer()
    assert [ids.tolist() for ids in bytes_.encode(["aé", ""])] == [[97, 0xC3, 0xA9], []]
    assert (bytes_.end_of_text, bytes_.vocabulary) == (256, 257)


def test_words_are_merged():
    gpt2 = tokenizer.gpt2()
    assert (gpt2.name, gpt2.end_of_text, gpt2.vocabulary) == ("gpt2", 258, 259)
    the, t = gpt2.encode(["the", "t"])
    assert the.tolist() == [257]
    assert t.tolist() == [ord("t")]
    assert the.dtype == "uint16"


def test_prepare_writes_its_ids_and_end_of_text(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(20)]
    for path in paths:
        path.write_text("the the")
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    arguments = [tmp_path / "out", "--text", *paths]
    prepare.run(parser.parse_args([*map(str, arguments), "--val-fraction=0.5"]))
    corpus = tokens.load(tmp_path / "out")
    # "the", then " the", in which the space does not merge.
    assert corpus.train.ids.tolist() == corpus.val.ids.tolist() == [257, 32, 257, 258] * 10
    assert (corpus.train.tokenizer, corpus.train.vocabulary) == ("gpt2", 259)


def test_the_end_of_text_mark_in_a_text_is_ordinary_text():
    (ids,) = tokenizer.gpt2().encode(["<|endoftext|>"])
    assert len(ids) == len("<|endoftext|>")


def test_without_network(monkeypatch):
    def refuse(name):
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(DataError, match=r"cannot download .* \(ConnectionError\): set TIK"):
        tokenizer.gpt2()


def test_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=re.escape(f"tiktoken: {installation.command('data')}")):
        tokenizer.gpt2()
