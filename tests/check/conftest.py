"""Fixtures that the tests of `check` share."""

import functools
import os
import pickle
import subprocess
import sys

import pytest

from lowprec_attn.check import candidates, measure, problems, trials

_FOUND = {}


@functools.lru_cache(maxsize=256)
def _exact(pickled):
    return measure.exact(pickle.loads(pickled))


@pytest.fixture(autouse=True)
def computed_once(monkeypatch):
    """Caches exact results and emulations, as many kernels are checked on the same problems."""
    run = candidates.Emulation.run

    def remembered(emulation, numerics, tile=None):
        key = (emulation.dtype, numerics, tile, *map(pickle.dumps, emulation.problems))
        if key not in _FOUND:
            _FOUND[key] = run(emulation, numerics, tile)
        return _FOUND[key]

    monkeypatch.setattr(candidates.Emulation, "run", remembered)
    monkeypatch.setattr(trials, "exact", lambda problem: _exact(pickle.dumps(problem)))


@pytest.fixture
def shown(tmp_path):
    """Runs the script of a bug in another folder; returns the largest errors by result."""

    def run(script):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, os.path.abspath(script)],
            cwd=tmp_path.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        return {words[0]: float(words[3]) for words in lines}

    return run


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


@pytest.fixture
def few_features(monkeypatch):
    """Leaves out problems of other lengths, heads and masks, each of which is compiled anew.

    Other tests have these in functions that are right and in planted bugs.
    """
    made, variants = problems.features, {"window", "soft_cap", "sinks", "bias", "lse"}
    monkeypatch.setattr(
        problems,
        "features",
        lambda *args, **options: [
            p for p in made(*args, **options) if p.needs & variants or p.name == "a batch"
        ],
    )
