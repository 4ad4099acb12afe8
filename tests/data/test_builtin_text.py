"""The built-in text is real and always the same, and nothing held out is trained on."""

import hashlib
import sys
import sysconfig

import numpy as np
import pytest

from lowprec_attn.data import builtin_text
from lowprec_attn.data.tokens import DataError, unigram_loss


def text_of(tokens):
    return bytes(tokens.ids[tokens.ids < 256].astype(np.uint8)).decode()


@pytest.fixture(scope="module")
def corpus():
    return builtin_text.load()


def test_it_is_a_megabyte_of_english(corpus):
    assert corpus.train.count > 1_000_000
    assert 0.02 < corpus.val.count / corpus.train.count < 0.08
    words = text_of(corpus.val).lower().split()
    assert words.count("the") > len(words) / 50
    corpus.require(context=1024, vocab_size=257)
    with pytest.raises(DataError, match="token id 256"):
        corpus.require(context=1024, vocab_size=256)


def test_it_is_the_same_every_time(corpus):
    again = builtin_text.load()
    assert (again.train.sha256, again.val.sha256) == (corpus.train.sha256, corpus.val.sha256)
    assert corpus.train.sha256 == hashlib.sha256(corpus.train.ids.tobytes()).hexdigest()
    assert corpus.train.sha256 != corpus.val.sha256


def test_a_unigram_model_leaves_much_to_learn(corpus):
    assert 2.8 < unigram_loss(corpus.train, corpus.val) < 3.8


def test_nothing_held_out_is_trained_on(corpus):
    trained_on = set(text_of(corpus.train).split("\n\n"))
    held_out = [p for p in text_of(corpus.val).split("\n\n") if len(p) > 40]
    assert len(held_out) > 500
    assert not trained_on.intersection(held_out)


def test_documents_end_with_256_and_repeats_are_dropped():
    documents = {f"m{i:02}": f"only in {i}\n\nin every one" for i in range(40)}
    corpus = builtin_text.build(documents)
    ids = np.concatenate([corpus.train.ids, corpus.val.ids])
    assert (ids == 256).sum() == 40
    assert corpus.train.ids[-1] == corpus.val.ids[-1] == 256
    text = text_of(corpus.train) + text_of(corpus.val)
    assert text.count("in every one") == 1
    assert all(f"only in {i}\n" in text for i in range(40))


def test_what_is_held_out_does_not_depend_on_the_other_documents():
    names = [f"m{i:02}" for i in range(60)]
    held_out = {n for n in names if builtin_text.build({n: "text"}).val.count}
    assert held_out == {"m04", "m20", "m28"}  # the same in every process on every machine
    together = builtin_text.build({n: f"text of {n}" for n in names})
    assert {n for n in names if f"text of {n}\n" in text_of(together.val)} == held_out


def test_docstrings_are_found_and_code_is_not(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Module text."""\ncode = """no docstring\n"""\n\nclass A:\n    r"""Class text.\n\n'
        '    More.\n    """\n    value = 1\n'
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text('"""A test."""\n')
    (tmp_path / "latin.py").write_bytes(b'"""Caf\xe9"""\n')
    (tmp_path / "none.py").write_text("x = 1\n")
    assert builtin_text.docstrings(tmp_path) == {
        "a.py": "Module text.\n\nClass text.\n\nMore.",
        "latin.py": "Caf�",
    }


def test_a_python_without_topics_still_has_docstrings(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    smaller = builtin_text.load()
    assert 500_000 < smaller.train.count < corpus.train.count


def test_a_python_without_any_text_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no documentation or source in .*lowprec-attn prepare"):
        builtin_text.load()
