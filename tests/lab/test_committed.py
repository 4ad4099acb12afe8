"""The tables and figures of `results/` that texts are written from, against the records."""

import hashlib
import itertools
import shutil

import pytest
from command import ROOT
from matplotlib.figure import Figure

from lowprec_attn.commands.main import main
from lowprec_attn.data.order import SeededOrder
from lowprec_attn.lab import archive, figures, records

RESULTS = ROOT / "results"
FAILURE = RESULTS / "failure"
CONTROLS = ("--positive-control", "published_lse_bf16", "--negative-control", "exact")


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """`reported(directory, *options)`: the path of a copy of it, with tables written anew."""
    for name in ("score_figure", "loss_figure"):
        monkeypatch.setattr(figures, name, lambda *_: Figure())
    shutil.copy(RESULTS / "texts.toml", tmp_path)

    def report(directory, *options):
        kept = shutil.ignore_patterns("*.md", "*.png")
        copy = shutil.copytree(directory, tmp_path / directory.name, ignore=kept)
        assert main(["lab", "report", str(copy), *options]) == 0
        return copy

    return report


@pytest.mark.parametrize(("name", "options"), [("first_sight", ()), ("lse_rounding", CONTROLS)])
def test_the_table_is_that_of_the_records_and_stands_on_the_page(reported, name, options):
    table = (reported(RESULTS / name, *options) / "table.md").read_text()
    assert table == (RESULTS / name / "table.md").read_text()
    first = next(part for part in table.split("\n\n") if part[0] == "|")
    assert first.rstrip() in (RESULTS / name / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["delta_gpt2", "output_cpu/across_steps", "rate_gpt2_lower", "verdict_cpu"]
)
def test_the_table_of_an_experiment_is_that_of_its_records(reported, name):
    table = reported(FAILURE / name) / "table.md"
    assert table.read_text() == (FAILURE / name / "table.md").read_text()


@pytest.mark.slow
def test_every_table_of_the_failure_is_that_of_the_records(reported):
    copy = reported(FAILURE)
    pages = {path.relative_to(copy) for path in copy.rglob("*.md")}
    assert pages == {
        path.relative_to(FAILURE) for path in FAILURE.rglob("*.md") if path.name != "README.md"
    }
    for page in pages:
        assert (copy / page).read_text() == (FAILURE / page).read_text(), page


@pytest.mark.parametrize(
    ("image", "experiment"),
    [
        ("failure_cpu.png", "failure_cpu"),
        ("failure_delta.png", "delta_small"),
        ("failure_edge.png", "edge_gpt2"),
        ("failure_edge_long.png", "edge_long"),
        ("failure_output.png", "output_small"),
        ("failure_delta_value.png", "delta_size_cpu"),
        ("failure_delta_longer.png", "delta_longer_cpu"),
        ("failure_delta_size_gpt2.png", "delta_size_gpt2"),
        ("failure_row_sum.png", "row_sum_small"),
    ],
)
def test_a_page_shows_the_figure_of_the_records(image, experiment):
    shown = (ROOT / "docs" / "images" / image).read_bytes()
    assert shown == (FAILURE / experiment / "figure.png").read_bytes()


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("output_cpu", "output-seed1"),
        ("output_cpu/newest_jax", "output-seed1"),
        ("lse_small", "lse1-seed1"),
        ("output_gpt2", "o2-seed3"),
    ],
)
def test_the_recorded_batches_are_drawn_from_a_text_of_the_length_that_is_told(experiment, name):
    runs = archive.read_all(FAILURE / experiment)
    header = next(run.header for run in runs if run.name == name)
    config = header["config"]
    length = records.text_lengths(FAILURE)[config["text_sha256"]["train"]]
    draw = SeededOrder(header["seed"], config["batch_size"], length, config["model"]["context"])
    starts = itertools.chain.from_iterable(
        (",".join(map(str, draw(step).tolist())), "\n") for step in range(header["steps"])
    )
    assert hashlib.sha256("".join(starts).encode()).hexdigest() == header["data_order_sha256"]
