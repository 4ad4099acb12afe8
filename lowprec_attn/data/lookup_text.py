"""A synthetic text in which half of the tokens, on average, repeat the token two places before.

A model can predict a repeated token only with an attention head that looks up one key, the token
before the current one. The other half of the tokens is random. The loss, and with it the gradient
dO of the attention output, therefore stays large, however much the model learns. No download is
needed, and the text is the same on every machine.
"""

import numpy as np

from lowprec_attn.data.tokens import Corpus, Tokens

SYMBOLS = 64
REPEATED = 0.5
_TRAIN, _VAL = 2**22, 2**16
_SEED = 2510


def load() -> Corpus:
    """The text, 4.2 million tokens to train on; takes a tenth of a second."""
    kind = SYMBOLS, "lookup"
    return Corpus(
        train=Tokens.in_memory(build(_TRAIN, _SEED), *kind, "lookup text (train)"),
        val=Tokens.in_memory(build(_VAL, _SEED + 1), *kind, "lookup text (val)"),
        description=f"built-in lookup text: {SYMBOLS} symbols, half repeat the one two before",
    )


def build(count: int, seed: int) -> np.ndarray:
    """Token ids [count]: x_t = x_{t−2} with probability 1/2, else uniform over `SYMBOLS`."""
    rng = np.random.default_rng(seed)
    fresh = rng.integers(SYMBOLS, size=count, dtype=np.uint16)
    is_fresh = rng.random(count) >= REPEATED
    is_fresh[:2] = True
    # A repeated token equals the last fresh token at an even distance before it, so even and odd
    # positions are filled separately.
    for parity in (0, 1):
        own, ids = is_fresh[parity::2], fresh[parity::2]
        last = np.maximum.accumulate(np.where(own, np.arange(len(own)), 0))
        fresh[parity::2] = ids[last]
    return fresh
