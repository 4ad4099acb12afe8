"""The notebooks of `colab/`, executed on a CPU at reduced size, and rules for their form."""

import ast
import base64
import io
import json
import os
import re
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
STATEMENTS_PER_CELL = 12
FIGURE_BYTES = 400_000


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    """The syntax trees of the code cells, with magics translated as IPython does."""
    to_python = TransformerManager().transform_cell
    return [ast.parse(to_python(c.source)) for c in read(path).cells if c.cell_type == "code"]


def tagged(notebook, tag):
    (cell,) = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return cell


def execute(name, directory, parameters, result, without=None):
    """Runs a notebook with some parameters changed; returns figures and the expression `result`.

    Cells with the tag `without` are left out.
    """
    notebook = read(ROOT / "colab" / name)
    notebook.cells = [c for c in notebook.cells if without not in c.metadata.get("tags", [])]
    cell = tagged(notebook, "parameters")
    known = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
    assert set(parameters) <= known
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    show = f"import json\nprint(json.dumps({result}, default=float))"
    notebook.cells.append(nbformat.v4.new_code_cell(show))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(directory / "ipython"),
    }
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": directory}}
    )
    client.execute(env=environment)
    outputs = [output for c in notebook.cells for output in c.get("outputs", [])]
    pngs = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return [base64.b64decode(png) for png in pngs], json.loads(outputs[-1]["text"])


def check_figures(figures, count):
    """Checks the number of figures, and that each draws something, because axes have no colour."""
    assert len(figures) == count
    for figure in figures:
        assert len(figure) < FIGURE_BYTES
        red, green, blue = np.moveaxis(matplotlib.image.imread(io.BytesIO(figure))[..., :3], -1, 0)
        spread = np.maximum(red, np.maximum(green, blue)) - np.minimum(red, np.minimum(green, blue))
        assert np.sum(spread > 0.3) > 200


@pytest.mark.notebooks
def test_the_failure_in_one_row(tmp_path):
    length = 128
    figures, result = execute(
        "failure_in_one_row.ipynb",
        tmp_path,
        {"LENGTH": length, "PAIRS": 20_000},
        "{'rounded': rounded, 'means': [e.mean() for e in errors.values()], 'same_row': same_row,"
        " 'walks': [w.sum() for w in walks.values()],"
        " 'coherence': {n: s['delta_error_coherence'][0] for n, s in signals.items()}}",
        without="training",
    )
    check_figures(figures, 6)
    assert result["rounded"] == -4.71875
    biased, random_residue, below_one = result["means"]
    assert 0.8 * 2**-7 < biased < 2**-7  # half a spacing in every second sum, minus the residue
    assert max(abs(random_residue), abs(below_one)) < 2**-7 / 10
    assert result["same_row"] == 1.0
    probe, *others = map(abs, result["walks"])
    assert probe > 4 * max(others)
    coherence = result["coherence"]
    persistent = {"probe, standard", "probe: O of δ float32, standard", "published, standard"}
    assert {name for name, value in coherence.items() if value > 4} == persistent
    assert coherence["probe, standard"] > 0.8 * length**0.5


@pytest.mark.slow
def test_what_the_row_does_to_training(tmp_path):
    """One seed, cut short when scores have left; the loss would follow 160 to 470 steps later."""
    figures, result = execute(
        "failure_in_one_row.ipynb",
        tmp_path,
        {"LENGTH": 128, "PAIRS": 20_000, "TRAINING_STEPS": 1200, "TRAINING_SEEDS": [1]},
        "{o.arm.name: [o.records[1].largest('score_maximum', 1200, i) for i in (0, 1)]"
        " for o in runs}",
    )
    check_figures(figures, 7)
    scores = {name: max(by_layer) for name, by_layer in result.items()}
    assert scores["output"] > 5 * scores["exact"]
    assert scores["normalized"] < 2 * scores["exact"]


@pytest.mark.notebooks
def test_train_gpt2(tmp_path, text):
    steps = 6
    small = {"layers": 2, "heads": 2, "width": 32, "context": 32, "vocab_size": 257}
    changes = {f"model.{name}": size for name, size in small.items()}
    changes |= {"optimizer.warmup_steps": 2, "steps": steps}
    changes |= {"diagnostics_every": 3, "eval_batches": 1, "attention.implementation": "tiled"}
    parameters = {"CHANGES": changes, "TEXT": str(text), "BACKUP": str(tmp_path / "drive")}
    figures, result = execute(
        "train_gpt2.ipynb",
        tmp_path,
        {**parameters, "SECONDS_PER_PLOT": 2},
        "[{'losses': series(run_dir, lambda record: record.get('loss')).tolist(),"
        " 'scores': series(run_dir, largest_score).tolist(),"
        " 'rule': json.loads(run_dir.config.read_text())['attention']['row_max']}"
        " for run_dir in (standard, fixed)]",
    )
    check_figures(figures, 3)
    standard, fixed = result
    assert (standard["rule"], fixed["rule"]) == ("standard", "dynamic_max")
    for steps_seen, losses in (standard["losses"], fixed["losses"]):
        assert steps_seen == list(range(steps))
        assert losses[-1] < losses[0]
    first, first_fixed = standard["losses"][1][0], fixed["losses"][1][0]
    assert first == pytest.approx(first_fixed, rel=1e-3)  # with the same parameters and batch
    assert standard["scores"][0] == [0, 3, 6]
    assert min(standard["scores"][1]) > 0
    for name in ("standard", "dynamic_max"):
        assert (tmp_path / "drive" / name / "checkpoints" / "00000006.json").exists()
        kept = tmp_path / "drive" / name / "metrics.jsonl"
        assert kept.read_bytes() == (tmp_path / "runs" / name / "metrics.jsonl").read_bytes()


@pytest.mark.notebooks
def test_own_flax_model(tmp_path):
    figures, result = execute(
        "own_flax_model.ipynb",
        tmp_path,
        {"STEPS": 12},
        "{'off': off, 'losses': [float(loss) for loss in losses], 'healthy': healthy,"
        " 'before': before, 'after': after, 'cured': cured}",
    )
    check_figures(figures, 3)
    off = result["off"]
    assert off["exact"] == 0 < off["flash"] < off["published"]
    assert 0 < off["head 0 exact,\nhead 1 published"] < off["published"]
    assert result["losses"][-1] < result["losses"][0]
    assert np.isfinite(result["cured"])
    assert result["healthy"] == 0
    healthy, ill = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("healthy", "ill")
    )
    assert healthy["verdict"]["kind"] == "none"
    assert (ill["verdict"]["kind"], ill["verdict"]["heads"]) == ("coherence", [2])
    assert "delta=normalized would leave" in ill["verdict"]["sentence"]
    assert (result["before"][0], result["before"][3]) == ("coherence", [2])
    assert result["after"][0] == "none"


def is_logic(statement):
    """Whether a statement is no import, head of a function or class, or docstring."""
    named = isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not (named or text)


def test_there_are_three_notebooks_with_one_install_cell():
    assert len(NOTEBOOKS) == 3
    assert len({tagged(read(path), "install").source for path in NOTEBOOKS}) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_asks_first_and_says_last_what_to_try_next(path):
    first, *_, last = (cell.source for cell in read(path).cells)
    assert re.search(r"^# .+\n\n\*\*.+\?\*\*", first)
    assert "What to try next:\n\n- " in last


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pages_of_the_repository_that_a_notebook_names_exist(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    linked = re.findall(r"\(https://github\.com/lowprec-attn/lowprec-attn/blob/main/(.+?)\)", text)
    others = re.findall(r"`(\w+\.ipynb)`", text)
    assert linked and others
    assert [name for name in linked if not (ROOT / name).is_file()] == []
    assert [name for name in others if not (ROOT / "colab" / name).is_file()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_no_output(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short(path):
    for tree in code(path):
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert sum(map(is_logic, statements)) <= STATEMENTS_PER_CELL, ast.unparse(tree)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_public_names_are_used(path):
    names = set()
    for node in (node for tree in code(path) for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names.update([*node.module.split("."), *(alias.name for alias in node.names)])
    assert not [n for n in names if n.startswith("_") and not n.endswith("__")]
