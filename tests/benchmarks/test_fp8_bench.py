"""The cost of 8 bits: the program on a small problem, and its records and pages."""

import itertools
import json
import lzma
import sys

import pytest
from command import ROOT

from benchmarks import check_confusion, fp8

FOLDER = ROOT / "results" / "fp8"


def records():
    _, *lines = (json.loads(line) for line in (FOLDER / "cpu.jsonl").read_text().splitlines())
    return {(line["arm"], line["problem"].split()[1]): line for line in lines}


def test_an_arm_is_measured_and_tabled(tmp_path, monkeypatch, capsys):
    out = tmp_path / "fp8.jsonl"
    chosen = {"flash", "transformer_engine_fp8", "… delta normalized"}
    arms = [(name, n) for name, n in fp8.arms() if name in chosen]
    monkeypatch.setattr(fp8, "arms", lambda: iter(arms))
    small = ["--scores=30", "--tokens=96", "--heads=1", "--head_size=16"]
    monkeypatch.setattr(sys, "argv", ["fp8", f"--out={out}", *small])
    fp8.main()
    _, *lines = (json.loads(line) for line in out.read_text().splitlines())
    of = {line["arm"]: line for line in lines}
    flash, te = of["flash"], of["transformer_engine_fp8"]
    assert te["ds"] > 1.5 * flash["ds"] and te["dq"] > 2 * flash["dq"]
    normalized = of["transformer_engine_fp8, delta normalized"]
    assert normalized["ds"] < 1e-6 < 1e-4 < normalized["cast"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["fp8", f"--read={out}"])
    assert fp8.main() == 0
    assert "| transformer_engine_fp8, delta normalized" in capsys.readouterr().out


def test_a_file_of_several_calls_is_read_packed_or_not_and_no_other(tmp_path, monkeypatch, capsys):
    lines, packed = (FOLDER / "cpu.jsonl").read_bytes(), tmp_path / "twice.jsonl.xz"
    (tmp_path / "bad.jsonl").write_bytes(b"no records\n")
    packed.write_bytes(lzma.compress(2 * lines, preset=0))
    assert len(list(fp8.tables(packed))) == len(fp8.SCORES)
    packed.write_bytes(lzma.compress((ROOT / "results" / "check" / "confusion.jsonl").read_bytes()))
    monkeypatch.setattr(sys, "argv", ["check_confusion", f"--read={packed}"])
    assert check_confusion.main() == 0
    assert "| bug (" in capsys.readouterr().out
    for program in (fp8, check_confusion):
        for name in ("bad.jsonl", "none.jsonl"):
            monkeypatch.setattr(sys, "argv", ["program", f"--read={tmp_path / name}"])
            assert program.main() == 1
            assert f"{name} holds no records of this program" in capsys.readouterr().err


def test_the_records_are_those_of_the_arms_and_of_the_page():
    names, under = [], ""
    for name, _ in fp8.arms():
        under = under if name.startswith("…") else name
        names.append(name.replace("…", f"{under},"))
    scores = [f"{score:.0e}" for score in fp8.SCORES]
    assert list(records()) == list(itertools.product(names, scores))
    page = (FOLDER / "README.md").read_text()
    assert page.endswith("\n".join(fp8.tables(FOLDER / "cpu.jsonl")))


@pytest.mark.parametrize("score", ["1e+01", "1e+02"])
def test_the_records_say_what_the_page_on_rounding_does(score):
    te = "transformer_engine_fp8"
    of = {arm: line for (arm, at), line in records().items() if at == score}
    assert 0.0015 < of["flash"]["cast"] < 0.0025 < 0.0075 <= of[te]["cast"] < 0.0085
    assert 0.0015 < of[f"{te}, probs bfloat16"]["ds"] < 0.0025
    assert 2e-8 < of[f"{te}, delta normalized"]["ds"] < 3.5e-8
    assert 2e-6 < of[f"{te}, matched, one step"]["ds"] < 3.5e-6
    assert 0.0035 < of[f"{te}, delta normalized"]["cast"] < 0.005
    assert of["flash_attention_3_fp8, delta normalized"]["cast"] < 0.00016
    assert 0.045 < of[f"{te}, mx"]["ds"] < 0.055


@pytest.mark.parametrize("score", ["1e+03", "1e+04"])
def test_at_large_scores_queries_and_keys_decide(score):
    of = {arm: line for (arm, at), line in records().items() if at == score}
    assert of["transformer_engine_fp8"]["dq"] > 1
    assert 0.3 < of["transformer_engine_fp8, query, key bfloat16"]["dq"] < 0.36
