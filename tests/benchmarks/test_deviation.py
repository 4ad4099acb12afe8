"""How far attention is from float64: the measurement, and the reading of its records."""

import math
import sys

import numpy as np
import pytest
from command import ROOT
from scipy.stats import wasserstein_distance
from tiny import tiny_config

from benchmarks import deviation
from benchmarks.deviation import Case
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.step import root_key


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["deviation", *map(str, words)])
    return deviation.main()


def test_every_format_length_and_tile_has_a_case():
    plain, crossed = deviation.cases(), deviation.cases(crossed=True)
    assert len(plain) == len(set(plain)) and len(crossed) == len(set(crossed))
    places = {(f, t) for f in deviation.FORMATS for t in deviation.LENGTHS}
    assert {case[1:] for case in plain if case.arm == "flash"} == {
        *((*place, deviation.TILE) for place in places),
        *(("bfloat16", deviation.LENGTH, tile) for tile in deviation.TILES),
    }
    assert {case[1:] for case in crossed if case.arm == "flash"} == {
        (*place, tile) for place in places for tile in deviation.TILES
    }
    # An implementation without tiles of this project is measured once per length.
    assert {case[1:] for case in crossed if case.arm == "xla"} == {(*p, None) for p in places}


def test_a_deviation_is_that_of_the_arithmetic():
    """The error of each format is its own last digits; one measurement has one row per tensor."""
    low = Case("flash", "bfloat16", 32, (8, 8))
    found = [deviation.measure(case, 1) for case in (low, low._replace(format="float32"))]
    assert [r["tensor"] for r in found[0]] == list(deviation.TENSORS)
    for of_low, of_float32 in zip(*found, strict=True):
        assert 2**-12 < of_low["rms"] / of_low["size"] < 2**-7
        assert 0 < of_float32["rms"] / of_float32["size"] < 2**-21
        assert abs(of_low["mean"]) <= of_low["rms"] <= of_low["max"]
        assert 0 < of_low["coherence"] <= math.sqrt(32)


def test_keys_of_a_tile_are_arithmetic_and_queries_are_not():
    base = Case("flash", "bfloat16", 32, (8, 8))
    same, swapped = base._replace(tile=(32, 8)), base._replace(tile=(8, 32))
    a, b, c = (deviation.measure(case, 1)[0]["rms"] for case in (base, same, swapped))
    assert a == pytest.approx(b, rel=1e-3)
    assert a != pytest.approx(c, rel=1e-3)


@pytest.mark.parametrize(
    ("place", "row"),
    [
        ("deviation_cpu", "bfloat16 flash 512 64 x 64 6.14e-03 3.16e-04 1.94e-03"),
        ("deviation_cpu/crossed", "float16 eager 1024 256 x 256 "),
        ("deviation_gpu", "bfloat16 hopper 512 – "),
    ],
)
def test_table_and_figure_come_from_the_records(tmp_path, monkeypatch, capsys, place, row):
    """The table and figure that results/deviation_cpu/README.md shows."""
    (tmp_path / "attention.jsonl").symlink_to(ROOT / "results" / place / "attention.jsonl")
    assert run(monkeypatch, tmp_path, "--read") == 0
    assert row in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "formats.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """Four runs of initial parameters: one, another seed, one weight moved by 1, a later step."""
    directory = tmp_path_factory.mktemp("runs")
    states = {}
    for name, seed, step in (("base", 1, 4), ("other", 2, 4), ("moved", 1, 4), ("longer", 1, 6)):
        config = tiny_config(data__path=str(text), model__layers=1, devices=1, seed=seed)
        settings = train_settings(config)
        state = make_program(settings, run_devices(settings)).init(root_key(settings))
        if name == "moved":
            scale = state.params["norm"]["scale"]
            scale[...] = scale[...].at[3].add(1.0)
        states[name] = state.params
        with (
            RunDir.open(directory / name, config) as run_dir,
            Checkpoints(run_dir.checkpoints) as checkpoints,
        ):
            checkpoints.save(step, state, {})
    return directory, states


def test_weights_of_runs_are_compared_at_their_newest_step(runs):
    directory, states = runs
    step, largest, moved = deviation.apart(directory / "base", directory / "moved")
    count = sum(x.size for x in deviation._weights(directory / "base")[1].values())
    assert (step, largest) == (4, 1.0)
    assert moved == pytest.approx(1 / count)  # one of all values moved by 1
    a, b = (np.asarray(states[name]["tokens"]["embedding"][...]) for name in ("base", "other"))
    _, largest, moved = deviation.apart(directory / "base", directory / "other")
    assert largest >= np.abs(a - b).max()
    # Two draws of one distribution differ entry by entry, but not as sets of values.
    assert 0 < moved < largest / 5
    assert moved == pytest.approx(wasserstein_distance(a.ravel(), b.ravel()), rel=0.5)


def test_runs_that_cannot_be_compared_are_one_line(runs, monkeypatch, capsys):
    directory, _ = runs
    assert run(monkeypatch, "--weights", directory / "base", directory / "longer") == 1
    error = capsys.readouterr().err
    assert "is at step 4 and" in error and error.count("\n") == 1
