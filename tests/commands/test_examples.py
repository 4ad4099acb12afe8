"""The programs of docs/examples, run as docs/diagnose.md says, and the program of docs/use.md."""

import re
import runpy

import pytest
from command import ROOT

from lowprec_attn.commands.main import main

PAGE = (ROOT / "docs" / "diagnose.md").read_text()
LINES = re.findall(r"^python (docs/examples/\S+) && lowprec-attn (.*)$", PAGE, re.MULTILINE)
USE = (ROOT / "docs" / "use.md").read_text()
PROGRAMS = [path for path, _ in LINES]
TORCH = "docs/examples/capture_hugging_face.py"


def test_there_is_one_for_each_framework():
    frameworks = ("nnx", "linen", "hugging_face")
    assert [f"docs/examples/capture_{name}.py" for name in frameworks] == PROGRAMS
    for path, command in LINES:
        assert f"python {path} && lowprec-attn {command}\n" in (ROOT / path).read_text()


def test_that_of_hugging_face_holds_the_recipe():
    (recipe,) = re.findall(r"^from lowprec_attn.torch .*?^```", PAGE, re.MULTILINE | re.DOTALL)
    _, steps = recipe.removesuffix("```").split("\n\n")
    assert (ROOT / TORCH).read_text().endswith(steps)


@pytest.mark.parametrize(
    ("path", "command"),
    LINES,
)
def test_a_program_and_its_diagnosis_run(path, command, tmp_path, monkeypatch, capsys):
    if path == TORCH:
        pytest.importorskip("torch", reason="needs torch")
        pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / path))
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "2 layers, each q" in out
    assert "bfloat16, causal" in out
    assert out.startswith("Nothing found in 8 heads of 2 layers: ")
    assert out.endswith("Verdict: nothing found.\n")
    assert "not kept" not in out


def test_the_programs_of_the_page_run():
    programs = re.findall(r"^```python\n(.*?)^```", USE, re.DOTALL | re.MULTILINE)
    made = {}
    for program in programs:
        if "torch" not in program:
            exec(compile(program, "docs/use.md", "exec"), made)
    assert made["out"].shape == made["q"].shape
    assert made["y"].shape == made["z"].shape == made["x"].shape
    (batch, rows, heads, _), sums = made["q"].shape, made["sums"]
    assert made["max_logit"].shape == (batch, heads)
    assert sums.p.shape == sums.ds.shape == (batch, rows, heads)
    assert abs(sums.p - 1).max() < 1e-5
