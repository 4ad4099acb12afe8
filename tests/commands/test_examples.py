"""The programs of docs/examples, run as the pages say, and the program of docs/use.md."""

import json
import re
import runpy
from pathlib import Path

import pytest
from command import ROOT

from lowprec_attn.commands.main import main

PAGE = (ROOT / "docs" / "diagnose.md").read_text()
LINES = re.findall(r"^python (docs/examples/\S+) && lowprec-attn (.*)$", PAGE, re.MULTILINE)
USE = (ROOT / "docs" / "use.md").read_text()
PROGRAMS = [path for path, _ in LINES]
TORCH = "docs/examples/capture_hugging_face.py"
SHOWN = [
    (name, *shown)
    for name in ("diagnose.md", "exploded.md")
    for shown in re.findall(
        r"^```text\n\$ python (docs/examples/\S+) && lowprec-attn ([^\n]*)\n(.*?)^```",
        (ROOT / "docs" / name).read_text(),
        re.MULTILINE | re.DOTALL,
    )
]


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


def test_a_page_shows_a_warning_and_one_shows_none():
    shown = [(page, path.removeprefix("docs/examples/")) for page, path, _, _ in SHOWN]
    assert shown == [("diagnose.md", "paper_like.py"), ("exploded.md", "warning.py")]


@pytest.mark.parametrize(
    ("page", "path", "command", "output"), SHOWN, ids=[page for page, *_ in SHOWN]
)
def test_a_page_shows_the_output_of_its_example(
    page, path, command, output, tmp_path, monkeypatch, capsys
):
    """A line of dots stands for what the page leaves out."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / path), run_name="__main__")
    code = main(command.split())
    printed = " ".join(capsys.readouterr().out.split())
    at = 0
    for part in re.split(r"^\.\.\.$", output, flags=re.MULTILINE):
        words = " ".join(part.split())
        assert words in printed[at:], (page, words)
        at = printed.index(words, at) + len(words)
    assert code == (3 if output.startswith("Warning in ") else 0)


def test_the_example_that_warns_ends_with_the_exit_code_of_the_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs/examples/warning.py"))
    assert main(["diagnose", "warning.npz", "--json", "out.json"]) == 3
    (layer,) = json.loads(Path("out.json").read_text())["layers"]
    flash = layer["signals"]["flash"]
    healthy, ill = flash["query_gradient_error_relative"]
    assert healthy < 0.01
    assert ill > 0.5  # far from the threshold of 0.3
    assert "Exit code 3 means a warning" in (ROOT / "docs" / "exploded.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert re.search(
        r"&& lowprec-attn diagnose warning\.npz .* a warning, exit code 3$", readme, re.M
    )


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
