"""`lowprec-attn diagnose` on a run directory, with its checkpoint, text and arithmetic."""

import argparse
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from terminal import sentences
from tiny import tiny_config

from lowprec_attn import attention
from lowprec_attn.commands import diagnose
from lowprec_attn.diagnostics.examine import run_layers
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError
from lowprec_attn.errors import UserError
from lowprec_attn.files import DiskError
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.run import open_corpus
from lowprec_attn.training.signals import make_signals
from lowprec_attn.training.step import make_steps, root_key, step_key

pytestmark = pytest.mark.usefixtures("text_read_once")

STEP = 7
CHANGES = {"model__layers": 1, "attention__numerics": "published", "devices": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory, text):
    """A run directory with a checkpoint of its initial parameters, its settings and that state."""
    config = tiny_config(data__path=str(text), **CHANGES)
    settings = train_settings(config)
    program = make_program(settings, run_devices(settings))
    state = program.initial_state(root_key(settings))
    path = tmp_path_factory.mktemp("run")
    recorded = config | {"text_sha256": {"train": "", "val": "another"}}
    with RunDir.open(path, recorded) as run_dir, Checkpoints(run_dir.checkpoints) as checkpoints:
        checkpoints.save(STEP, state, {})
    return path, settings, state


def run(*argv):
    parser = argparse.ArgumentParser()
    diagnose.add_arguments(parser)
    return diagnose.run(parser.parse_args([str(arg) for arg in argv]))


def test_nothing_is_written_over_the_text_that_a_run_is_measured_on(made, text):
    path, *_ = made
    before = (text / "val.bin").read_bytes()
    for name, reads in (("val.bin", (path,)), ("meta.json", (path, "--text", text / "val.bin"))):
        with pytest.raises(DiskError, match=f"{name}: it is there already, and the same command"):
            run(*reads, "--json", text / name)
    assert (text / "val.bin").read_bytes() == before


def test_a_run_is_measured_as_its_signals_are(made, tmp_path, capsys):
    path, settings, state = made
    assert run(path, "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    assert f"note: parameters of step {STEP}, the first sequence of the held-out text" in printed
    assert "note: the text is not that of the run" in printed
    assert "δ share is of dQ" not in printed  # because X is known
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    ids = open_corpus(settings.data).val.ids[: settings.model.context + 1].astype(np.int32)[None]
    steps = make_steps(settings, Attend(attention.dot_product_attention))
    key = step_key(root_key(settings), jnp.int32(STEP))
    # Compiled as in a run, because other options keep fewer roundings.
    of_run = run_devices(settings).jit(make_signals(settings.model, settings.attention, steps.loss))
    signals, _ = of_run(state.params, ids[:, :-1], ids[:, 1:], key)
    measured = layer["signals"]["own numerics"]
    for name in ("score_maximum", "query_weight_gradient_error_relative", "p_row_sum_error_rms"):
        np.testing.assert_allclose(measured[name], signals["layer_0"][name], rtol=1e-3)


def test_a_run_has_a_trend_of_what_it_recorded(made, tmp_path, capsys):
    path, *_ = made
    copy = RunDir(tmp_path / "run")
    shutil.copytree(path, copy.path)
    assert run_layers.series(copy.path) is None  # the run recorded nothing
    scores = {step: [5.0, 6.0, 7.0] for step in (0, 100, 200, 300, 1400)}
    scores[1400] = [5.0, "nan", 700.0]
    lines = [
        {"step": step, "signals": {
            f"layer_{i}": {"score_maximum": [1.0, score], "query_weight_norm": [1.0]}
            for i, score in enumerate(of_layers)
        }}
        for step, of_layers in scores.items()
    ]  # fmt: skip
    copy.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    series = run_layers.series(copy.path)
    assert series.layers == ("layer_00", "layer_01", "layer_02")
    np.testing.assert_array_equal(
        series.values["score_maximum"], np.array([*scores.values()], float)
    )
    assert run(copy.path) == 0  # only the checkpoint counts
    text = sentences(capsys.readouterr().out)
    assert f"Trend over 5 measurements of {copy.path}, step 0 to step 1,400; this is no" in text
    assert (
        "largest |score|: layer_02 outgrew the other layers at step 1,400 (700, 140.0 times" in text
    )
    assert "norm of a head's W_Q: no layer outgrew its past or the other layers." in text
    copy.metrics.write_text("no record\n")
    assert run(copy.path) == 0
    assert "note: no trend: " in capsys.readouterr().out


def test_a_spike_of_the_run_that_points_at_its_batch_is_noted(made, tmp_path):
    path, *_ = made
    copy = shutil.copytree(path, tmp_path / "run")
    spike = {"loss": 6.5, "median": 3.0, "spread": 0.25, "score": 14.0}
    records = [
        {"step": 1, "signals": {"layer_0": {"score_maximum": [3.0, 4.0]}}},
        {"step": 2, "spike": spike},
        {"step": 5, "spike_end": {"begin": 2, "recovery": "fast"}},
    ]
    metrics = RunDir(copy).metrics
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    *_, note = run_layers.load(copy)[0].notes
    assert note.startswith("of the run's training: step 2: the loss 6.500 is a spike")
    assert "no rule was met, which points at its batch rather than at arithmetic" in note
    metrics.write_text("damaged\n")
    assert not any("spike" in note for note in run_layers.load(copy)[0].notes)


def test_a_run_is_diagnosed_as_it_was_at_an_earlier_step(made, tmp_path, capsys):
    path, _, state = made
    copy = RunDir(shutil.copytree(path, tmp_path / "run"))
    with Checkpoints(copy.checkpoints, keep=2) as checkpoints:
        checkpoints.save(STEP + 5, state, {})
    spike = {"step": 9, "spike": {"loss": 6.5, "median": 3.0, "spread": 0.25, "score": 14.0}}
    records = [
        *({"step": step, "signals": {"layer_0": {"score_maximum": [1.0]}}} for step in (0, 8)),
        spike,
        {"step": 10, "spike_end": {"begin": 9, "recovery": "fast"}},
        {"step": 12, "signals": {"layer_0": {"score_maximum": [2.0]}}},
    ]
    copy.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert run(copy.path) == 0
    newest = capsys.readouterr().out
    assert (
        f"parameters of step {STEP + 5}," in newest
        and "step 9: the loss 6.500 is a spike" in newest
    )
    assert "Trend over 3 measurements" in newest
    assert run(copy.path, "--step", STEP + 1) == 0
    earlier = capsys.readouterr().out
    assert f"parameters of step {STEP}," in earlier and "spike" not in earlier
    assert "Trend over 2 measurements" in earlier
    with pytest.raises(
        DiagnoseError, match=f"no checkpoint up to step 3; its first is of .* {STEP}"
    ):
        run(copy.path, "--step", 3)
    with pytest.raises(DiagnoseError, match=r"--step must be 0 or more, got -1"):
        run(copy.path, "--step", -1)
    with pytest.raises(DiagnoseError, match=r"--step needs a run directory, and .* is not one"):
        run(copy.metrics, "--step", 7)


def test_a_run_is_measured_on_another_text(made, text, tmp_path):
    path, *_ = made
    own = run_layers.load(path)
    (val,) = run_layers.load(path, text / "val.bin")  # the same text, by name
    assert val.notes == (f"parameters of step {STEP}, the first 33 tokens of {text}/val.bin",)
    np.testing.assert_array_equal(val.q, own[0].q)
    np.testing.assert_array_equal(val.do, own[0].do)
    words = tmp_path / "words.txt"
    words.write_text("é" * 20)
    (other,) = run_layers.load(path, words)
    assert other.q.shape[1] == 32 and np.any(other.q != val.q)
    with pytest.raises(DiagnoseError, match="--text needs a run directory or a model's folder"):
        run(words, "--text", words)


def test_what_does_not_fit_a_run_is_one_line(made, tmp_path):
    path, *_ = made
    with pytest.raises(DiagnoseError, match=r"own arithmetic; --row-max and --kv-block need"):
        run(path, "--row-max", "dynamic_max")
    for option in (("--full",), ("--scale", "0"), ("--layout", "BNTH")):
        with pytest.raises(DiagnoseError, match=f"{option[0]} describes arrays of a file, and"):
            run(path, *option)
    copy = RunDir(tmp_path / "run")
    shutil.copytree(path, copy.path)
    forced = json.loads(copy.config.read_text())
    forced["attention"]["implementation"] = "gpu"
    forced["attention"]["points"] = {"probs": "float8_e4m3fn"}
    copy.config.write_text(json.dumps(forced))
    with pytest.raises(DiagnoseError, match="names the implementation gpu: diagnose it on a"):
        run_layers.load(copy.path)
    for manifest in copy.checkpoints.glob("*.json"):
        manifest.unlink()
    with pytest.raises(DiagnoseError, match="holds no complete checkpoint"):
        run_layers.load(copy.path)
    copy.config.write_text(json.dumps(forced | {"model": forced["model"] | {"experts": 8}}))
    with pytest.raises(
        UserError, match=r"config\.json: unknown field .*experts .*; .* by another ver"
    ):
        run_layers.load(copy.path)
    copy.config.write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json holds list, no record; restore it from a"):
        run_layers.load(copy.path)


def test_a_config_without_the_text_it_trained_on(made, tmp_path):
    """Edited by hand. A run without a digest to compare is measured on the text that is there."""
    path, *_ = made
    copy = RunDir(tmp_path / "run")
    shutil.copytree(path, copy.path)
    config = json.loads(copy.config.read_text())
    copy.config.write_text(json.dumps(config | {"text_sha256": "x"}))
    (layer,) = run_layers.load(copy.path)
    assert not any("is not that of the run" in note for note in layer.notes)
