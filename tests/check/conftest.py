"""Fixtures that the tests of `check` share."""

import pickle

import pytest

from lowprec_attn.check import candidates

_FOUND = {}


@pytest.fixture(autouse=True)
def emulated_once(monkeypatch):
    """Caches emulations, because many kernels are checked on the same problems."""
    run = candidates.Emulation.run

    def remembered(emulation, numerics, tile=None):
        key = (emulation.dtype, numerics, tile, *map(pickle.dumps, emulation.problems))
        if key not in _FOUND:
            _FOUND[key] = run(emulation, numerics, tile)
        return _FOUND[key]

    monkeypatch.setattr(candidates.Emulation, "run", remembered)


@pytest.fixture
def few_candidates(monkeypatch):
    """Tries four presets only, and no tile, exponent or change of a preset."""
    presets = candidates.Emulation.presets
    names = ("exact", "flash", "jax_nn", "eager")
    monkeypatch.setattr(
        candidates.Emulation, "presets", lambda e: [c for c in presets(e) if c.preset in names]
    )
    monkeypatch.setattr(candidates, "_changed", lambda *_: iter(()))
    monkeypatch.setattr(candidates, "_tiles_and_exponents", lambda *_: iter(()))
