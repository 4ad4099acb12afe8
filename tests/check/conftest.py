"""What tests of `check` share."""

import pytest

from lowprec_attn.check import candidates


@pytest.fixture
def few_candidates(monkeypatch):
    """No tile, exponent or change of a preset is tried: these arithmetics are presets."""
    presets = candidates.Emulation.presets
    names = ("exact", "flash", "jax_nn", "eager")
    monkeypatch.setattr(
        candidates.Emulation, "presets", lambda e: [c for c in presets(e) if c.preset in names]
    )
    monkeypatch.setattr(candidates, "_changed", lambda *_: iter(()))
    monkeypatch.setattr(candidates, "_tiles_and_exponents", lambda *_: iter(()))
