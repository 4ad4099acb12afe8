"""Files that version 0.1.0 wrote open with the same numbers (tests/fixtures/README.md)."""

import json
import shutil
from pathlib import Path

import pytest
from command import ROOT

from lowprec_attn import numerics
from lowprec_attn.commands.config import load
from lowprec_attn.commands.main import main
from lowprec_attn.commands.train import _default_workdir
from lowprec_attn.runs import metrics
from lowprec_attn.training.config import train_settings

FIXTURES = ROOT / "tests" / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(FIXTURES / "run", tmp_path / "run")


@pytest.mark.parametrize("name", ["run", "arrays"])
def test_diagnose_says_the_same(tmp_path, run, name):
    source = run if name == "run" else FIXTURES / "arrays.npz"
    assert main(["diagnose", str(source), "--json", str(tmp_path / "said.json")]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["verdict"]["kind"] == EXPECTED[name]["kind"]
    (layer,) = said["layers"]
    assert layer["signals"].keys() == EXPECTED[name]["signals"].keys()
    for arithmetic, signals in EXPECTED[name]["signals"].items():
        found = layer["signals"][arithmetic]
        for signal, heads in signals.items():
            assert found[signal] == pytest.approx(heads, rel=1e-3, abs=1e-6), signal


@pytest.mark.usefixtures("no_report")
def test_a_run_goes_on_by_its_own_command(run, capsys):
    before = metrics.read(run / "metrics.jsonl")
    (start,) = json.loads((run / "environment.json").read_text())
    words = [word for word in start["command"][1:] if not word.startswith("--workdir")]
    # The tests below check that such flags are refused by name.
    words = [word.replace("on_spike=rollback", "rollback.tries=3") for word in words]
    words = [word.replace("config.rollback_", "config.rollback.") for word in words]
    words.remove("--config.loggers=None")
    assert main([*words, f"--workdir={run}"]) == 0
    assert "resuming at step 3" in capsys.readouterr().out
    after = metrics.read(run / "metrics.jsonl")
    for name in ("loss", "grad_norm", "val_loss"):
        was, now = ({r["step"]: r[name] for r in x if name in r} for x in (before, after))
        assert now == pytest.approx(was, rel=1e-4), name
    ended = json.loads((run / "summary.json").read_text())
    assert ended["val_loss"] == pytest.approx(EXPECTED["val_loss"], rel=1e-4)


COMPILE = ["compile", "--topology=v5e:2x2", "--config=gpt2_bf16:tiny"]
GONE = {
    "deviation": (["deviation", "out", "--crossed"], "python -m benchmarks.deviation"),
    "--profile": (["train", "--config=gpt2_bf16:tiny", "--profile", "out"], "jax.profiler.trace"),
    "--quick": ([*COMPILE, "--quick"], "leave it out"),
    "--record": ([*COMPILE, "--record=out.jsonl"], "leave it out"),
}


@pytest.mark.parametrize("word", GONE)
def test_what_is_gone_says_what_replaced_it(word, capsys):
    words, instead = GONE[word]
    assert main(words) == 1
    assert f"error: {word} is gone: {instead}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("on_spike=rollback", "config.rollback.tries=3"),
        ("rollback_points.scores=float32", "config.rollback.points"),
        ("loggers=wandb", "`wandb sync RUN/tensorboard` copies the curves of a run"),
        ("data.replay=order.txt", "the order of the batches follows from config.seed"),
    ],
)
def test_a_field_that_is_gone_says_what_replaced_it(flag, instead, capsys):
    assert main(["train", "--config=gpt2_bf16:tiny", f"--config.{flag}"]) == 1
    assert f"no longer exists: {instead}\n" in capsys.readouterr().err


def test_a_config_with_the_fields_of_a_rollback_apart_means_the_same():
    old = json.loads((FIXTURES / "run" / "config.json").read_text())
    old.pop("text_sha256")
    rollback = train_settings(old).rollback
    assert (rollback.tries, rollback.steps, rollback.after) == (3, 50, 20)
    (head,) = rollback.attention.layers[0]
    assert head.numerics == numerics.FLASH.replace(saved_output="float32", kv_block=32)
    assert train_settings(old | {"on_spike": None}).rollback is None


def test_a_command_without_a_workdir_finds_the_run_it_had():
    config = load("gpt2_bf16:tiny")
    had = Path("runs/gpt2_bf16-tiny-bf0b7c78")
    assert _default_workdir(train_settings(config), config) == had
    # A point that 0.1.0 did not have changes the directory only where it is set.
    config["attention"]["points"]["statistics"] = "m_and_l"
    without = _default_workdir(train_settings(config), config)
    config["attention"]["points"]["recomputed_probs"] = "rounded"
    assert len({had, without, _default_workdir(train_settings(config), config)}) == 3


def test_a_run_is_reported(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "loss" in (run / "report.html").read_text()
