"""`lowprec-attn deviation`: what is measured, what is recorded, what is drawn."""

import json
import math

import numpy as np
import pytest
from scipy.stats import wasserstein_distance
from tiny import tiny_config

from lowprec_attn.commands.main import main
from lowprec_attn.errors import RunError
from lowprec_attn.lab import deviation, weight_drift
from lowprec_attn.lab.deviation import ARMS, Case, Grid
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.program import make_program
from lowprec_attn.training.step import root_key

GRID = Grid(
    formats=("float32", "bfloat16"),
    lengths=(32,),
    tiles=((8, 32), (32, 8)),
    length=32,
    tile=(8, 8),
    seeds=1,
    heads=1,
    head_size=16,
)


def test_every_format_length_and_tile_has_a_case():
    found = deviation.cases(GRID._replace(lengths=(16, 32)))
    assert len(found) == len(set(found))
    of_flash = {case[1:] for case in found if case.arm == "flash"}
    assert of_flash == {
        *((f, t, (8, 8)) for f in GRID.formats for t in (16, 32)),
        ("bfloat16", 32, (8, 32)),
        ("bfloat16", 32, (32, 8)),
    }
    # What has no tiles of ours is measured once a length.
    assert len([case for case in found if case.arm == "xla"]) == 4


def test_a_crossed_grid_has_every_tile_in_every_format_at_every_length():
    grid = GRID._replace(lengths=(16, 32), crossed=True)
    found = deviation.cases(grid)
    assert len(found) == len(set(found))
    tiles = (grid.tile, *grid.tiles)
    assert {case[1:] for case in found if case.arm == "flash"} == {
        (f, t, tile) for f in grid.formats for t in (16, 32) for tile in tiles
    }
    assert len([case for case in found if case.arm == "xla"]) == 4


def test_a_deviation_is_that_of_the_arithmetic():
    """float32 errs by its own last digits, bfloat16 by its; a row has one of them per tensor."""
    low = Case("flash", "bfloat16", 32, (8, 8))
    found = list(deviation.measure(GRID, [low, low._replace(format="float32")]))
    assert [r["tensor"] for r in found[0]] == list(deviation.TENSORS)
    for of_low, of_float32 in zip(*found, strict=True):
        assert 2**-12 < of_low["rms"] / of_low["size"] < 2**-7
        assert 0 < of_float32["rms"] / of_float32["size"] < 2**-21
        assert abs(of_low["mean"]) <= of_low["rms"] <= of_low["max"]
        assert 0 < of_low["coherence"] <= math.sqrt(32)


def test_keys_of_a_tile_are_arithmetic_and_queries_are_not():
    base = Case("flash", "bfloat16", 32, (8, 8))
    found = list(
        deviation.measure(GRID, [base, base._replace(tile=(32, 8)), base._replace(tile=(8, 32))])
    )
    of_output = [records[0] for records in found]
    assert of_output[0]["rms"] == pytest.approx(of_output[1]["rms"], rel=1e-3)
    assert of_output[0]["rms"] != pytest.approx(of_output[2]["rms"], rel=1e-3)


def test_what_a_library_lacks_is_left_out_and_ours_is_raised(monkeypatch):
    def lacking(*_):
        def function(*_):
            raise ValueError("no such precision\nand more")

        return function

    monkeypatch.setattr(deviation, "_compiled", lacking)
    (line,) = deviation.measure(GRID, [Case("xla", "bfloat16", 32, None)])
    assert line == "xla in bfloat16 is left out: no such precision"
    with pytest.raises(ValueError, match="no such precision"):
        list(deviation.measure(GRID, [Case("dense", "bfloat16", 32, None)]))


@pytest.mark.parametrize(
    ("options", "seeds"), [([], 3), (["--crossed"], 1), (["--crossed", "--seeds", "2"], 2)]
)
def test_a_crossed_grid_has_one_draw_unless_more_are_asked_for(
    tmp_path, monkeypatch, options, seeds
):
    grids = []
    monkeypatch.setattr(deviation, "cases", lambda grid: grids.append(grid) or [])
    assert main(["deviation", str(tmp_path), *options]) == 1  # there is nothing to draw
    assert [grid.seeds for grid in grids] == [seeds]


def words(directory, *more):
    sizes = ["--lengths", "32", "--length", "32", "--seeds", "1", "--heads", "1"]
    tiles = ["--head-size", "16", "--tile", "8x8", "--tiles", "8x16", "16x8"]
    return ["deviation", str(directory), "--formats", "bfloat16", *sizes, *tiles, *more]


def test_one_command_measures_and_draws_and_a_report_redraws(tmp_path, monkeypatch, capsys):
    for name in ("dense", "eager"):
        monkeypatch.setitem(ARMS, name, ARMS[name]._replace(platform="nowhere"))
    assert main(words(tmp_path / "made")) == 0
    figures = {path.name for path in (tmp_path / "made").glob("*.png")}
    assert figures == {"formats.png", "lengths.png", "tiles.png"}
    first = capsys.readouterr().out
    lines = (tmp_path / "made" / "attention.jsonl").read_text().splitlines()
    assert {json.loads(line)["arm"] for line in lines} == {"flash", "xla"}
    record = json.loads((tmp_path / "made" / "measured.json").read_text())
    assert record["grid"]["tiles"] == [[8, 16], [16, 8]] and "date" in record["environment"]
    for name in figures:
        (tmp_path / "made" / name).unlink()
    monkeypatch.setattr(deviation, "measure", None)
    assert main(["deviation", str(tmp_path / "made"), "--report"]) == 0
    assert capsys.readouterr().out == first
    assert {path.name for path in (tmp_path / "made").glob("*.png")} == figures


REFUSED = [
    (["--formats", "float8_e4m3fn"], "unknown format 'float8_e4m3fn'; formats are bfloat16,"),
    (["--lengths", "0"], "--lengths must be at least 1, got 0"),
    (["--tiles", "0x4"], "--tiles must be at least 1, got 0"),
    (["--report", "--runs", "a", "b"], "--report draws what is in DIR, and --runs measures"),
    (["--report"], "holds no records; measure them with `lowprec-attn deviation"),
    (["--runs", "a"], "--runs a is one run; name others to compare it with"),
    (["--runs", "a", "b"], "a is not a run directory: it has no config.json"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_measured_is_one_line(tmp_path, options, words, capsys):
    assert main(["deviation", str(tmp_path / "made"), *options]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """Three runs of initial parameters: two seeds, and the first with one weight moved by 1."""
    directory = tmp_path_factory.mktemp("runs")
    states = {}
    for name, seed, steps in (("base", 1, (2, 4)), ("other", 2, (4, 6)), ("moved", 1, (2, 4))):
        config = tiny_config(data__path=str(text), model__layers=1, devices=1, seed=seed)
        settings = train_settings(config)
        state = make_program(settings, run_devices(settings)).init(root_key(settings))
        if name == "moved":
            scale = state.params["norm"]["scale"]
            scale[...] = scale[...].at[3].add(1.0)
        states[name] = state.params
        with (
            RunDir.open(directory / name, config) as run_dir,
            Checkpoints(run_dir.checkpoints, keep=9) as checkpoints,
        ):
            for step in steps:
                checkpoints.save(step, state, {})
    return directory, states


def test_weights_of_runs_are_compared_at_their_common_steps(runs):
    directory, states = runs
    found = list(
        weight_drift.compare(directory / "base", [directory / "other", directory / "moved"])
    )
    assert [(r["other"], r["step"]) for r in found] == [("other", 4), ("moved", 2), ("moved", 4)]
    assert {r["seed"] for r in found} == {1}
    moved = found[1]
    assert (moved["max"], moved["tensor"]) == (1.0, "norm/scale")
    assert moved["wasserstein_max"] == pytest.approx(1 / 32)  # one of 32 values by 1
    a, b = (np.asarray(states[name]["tokens"]["embedding"][...]) for name in ("base", "other"))
    other = found[0]
    assert set(other["changed"]) == {"seed"}
    assert other["max"] >= np.abs(a - b).max()
    # Of one distribution: far apart one by one, not as sets of values.
    assert 0 < other["wasserstein"] < other["rms"] / 5
    assert other["wasserstein_max"] >= wasserstein_distance(a.ravel(), b.ravel())


def test_runs_that_cannot_be_compared(runs, tmp_path):
    directory, _ = runs
    with (
        pytest.raises(RunError, match=r"the steps 2, 4 and .* of none; compare runs with the same"),
        RunDir.open(tmp_path / "new", tiny_config()),
    ):
        list(weight_drift.compare(directory / "base", [tmp_path / "new"]))


def test_weights_that_are_not_finite_have_no_distance(runs, tmp_path, text):
    directory, _ = runs
    config = tiny_config(data__path=str(text), model__layers=1, devices=1, seed=1)
    settings = train_settings(config)
    state = make_program(settings, run_devices(settings)).init(root_key(settings))
    scale = state.params["norm"]["scale"]
    scale[...] = scale[...].at[3].set(np.nan)
    with (
        RunDir.open(tmp_path / "exploded", config) as run_dir,
        Checkpoints(run_dir.checkpoints) as checkpoints,
    ):
        checkpoints.save(4, state, {})
    with pytest.raises(RunError, match=r"norm/scale of checkpoint 4 is not finite"):
        list(weight_drift.compare(directory / "base", [tmp_path / "exploded"]))


def test_weights_are_drawn_beside_what_was_measured(runs, tmp_path, capsys):
    directory, _ = runs
    options = ["--runs", *(str(directory / name) for name in ("base", "moved", "other"))]
    assert main(["deviation", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert "weights beside those of base at the last common step" in printed
    assert "moved" in printed and (tmp_path / "weights.png").is_file()


def test_each_seed_has_its_own_base(runs, tmp_path, capsys):
    directory, _ = runs
    second = tmp_path / "second"  # another seed, under the names of the first
    second.mkdir()
    for name, source in (("base", "other"), ("other", "moved")):
        (second / name).symlink_to(directory / source)
    first = ["--runs", str(directory / "base"), str(directory / "other")]
    options = [*first, "--runs", str(second / "base"), str(second / "other")]
    assert main(["deviation", str(tmp_path / "made"), *options]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert rows[-2:] == [["other", "1", "4"], ["other", "2", "4"]]

    assert main(["deviation", str(tmp_path / "made"), *first, *first]) == 1
    assert "both have seed 1; give each seed once" in capsys.readouterr().err
    options = [*first, "--runs", str(second / "base"), str(directory / "moved")]
    assert main(["deviation", str(tmp_path / "made"), *options]) == 1
    assert "--runs has base moved beside base other" in capsys.readouterr().err


def test_records_without_a_seed_are_of_another_version(tmp_path, capsys):
    (tmp_path / "weights.jsonl").write_text('{"base": "a", "other": "b", "step": 2}\n')
    assert main(["deviation", str(tmp_path), "--report"]) == 1
    assert "weights.jsonl is of another version; measure again" in capsys.readouterr().err
