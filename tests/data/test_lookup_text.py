import numpy as np

from lowprec_attn.data import lookup_text


def test_half_of_the_tokens_repeat_the_one_two_places_before():
    ids = lookup_text.build(100_000, seed=1)
    # A fresh token repeats it by chance with probability 1 / `SYMBOLS`.
    expected = lookup_text.REPEATED + (1 - lookup_text.REPEATED) / lookup_text.SYMBOLS
    assert abs(np.mean(ids[2:] == ids[:-2]) - expected) < 0.01
    assert abs(np.mean(ids[1:] == ids[:-1]) - 1 / lookup_text.SYMBOLS) < 0.005


def test_a_token_alone_says_nothing():
    """All symbols are equally frequent, so the unigram loss is log SYMBOLS."""
    counts = np.bincount(lookup_text.build(200_000, seed=2), minlength=lookup_text.SYMBOLS)
    assert len(counts) == lookup_text.SYMBOLS
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_the_text_is_the_same_everywhere_and_held_out_text_is_another():
    corpus = lookup_text.load()
    corpus.require(context=128, vocab_size=lookup_text.SYMBOLS)
    assert corpus.train.sha256 == lookup_text.load().train.sha256
    assert corpus.train.ids[:8].tolist() == lookup_text.build(2**22, 2510)[:8].tolist()
    assert not np.array_equal(corpus.train.ids[: corpus.val.count], corpus.val.ids)
