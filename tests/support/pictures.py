"""Compares the pictures that pages show with those that their program draws today."""

import sys
from types import ModuleType

import numpy as np
from command import ROOT
from PIL import Image


def check(program: ModuleType, out: str, names: list[str], monkeypatch, tmp_path) -> None:
    """Draws anew and compares; `out` is what the program is told to write, below docs/images."""
    monkeypatch.setattr(sys, "argv", [program.__name__, str(tmp_path / out)])
    program.main()
    for name in names:
        shown, drawn = (
            np.asarray(Image.open(folder / name).convert("L"), np.int32)
            for folder in (ROOT / "docs" / "images", tmp_path)
        )
        assert shown.shape == drawn.shape, name
        assert np.mean(np.abs(shown - drawn) > 32) < 1e-3, name
