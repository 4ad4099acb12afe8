"""Numbers in front of nouns."""

import pytest

from lowprec_attn.counts import many


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
        ((1200, "step"), "1,200 steps"),
        ((1, "batch", "batches"), "1 batch"),
        ((2, "batch", "batches"), "2 batches"),
    ],
)
def test_a_noun_is_plural_beside_all_but_one(given, words):
    assert many(*given) == words
