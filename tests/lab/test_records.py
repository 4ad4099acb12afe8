"""The records of arms, and the table and figures that are made from them."""

import json
import lzma
import shutil

import pytest
from processes.stand_in import rewrite

from lowprec_attn.commands.main import main
from lowprec_attn.lab import archive, collection, records
from lowprec_attn.lab.report import figures, tables
from lowprec_attn.lab.report.bias import bias_table
from lowprec_attn.lab.report.outcomes import outcomes
from lowprec_attn.lab.report.verdicts import verdict_table

LAYERS = 12
STEPS = range(0, 101, 10)


def score(step, layer):
    """A score that differs for each step and layer; layer 1 grows most."""
    return (step + 1.0) * (10.0 if layer == 1 else 1.0) + layer


def metrics_lines(last, failed=False):
    """Lines as the trainer writes them: sorted keys, and texts for non-finite values."""
    for step in range(last):
        loss = "nan" if failed and step == last - 1 else 3.0
        yield {"step": step, "loss": loss, "lr": 0.1, "grad_norm": 0.123456}
    for step in [s for s in STEPS if s <= last]:
        layers = {
            f"layer_{i}": {name: [0.123456, "-inf"] for name in (*collection.SIGNALS, "delta_rms")}
            | {"score_maximum": [score(step, i), 0.0], "query_weight_norm": [1.0, 2.0 + i]}
            for i in range(LAYERS)
        }
        yield {"step": step, "signals": dict(sorted(layers.items()))}
    yield from ({"step": step, "val_loss": loss} for step, loss in val_losses(last).items())


def val_losses(last):
    """Validation losses. In the arm that ends at step 57 they rise by 0.75 and fall again."""
    return {20: 3.0, 40: 3.75, last: 2.25} if last == 57 else {50: 3.0, last: 2.25}


@pytest.fixture
def collected(lab, tmp_path):
    """Records of an arm with 12 layers, and of an arm whose loss was not finite at step 57."""
    lab({"calm": "finish", "wild": "nan"})
    for name, last in (("calm", 100), ("wild", 57)):
        lines = [json.dumps(line) + "\n" for line in metrics_lines(last, name == "wild")]
        (lab.out / name / "metrics.jsonl").write_text("".join(lines))
    rewrite(lab.out / "wild" / "failure.json", lambda failure: failure.update(step=57))
    results = tmp_path / "results"
    assert main(["lab", "collect", str(lab.out), str(results)]) == 0
    return results


def stored(results):
    return {run.header["arm"]: run for run in archive.read(results)}


def test_records_keep_what_a_reader_needs(collected):
    run = stored(collected)["wild"]
    assert run.header["overrides"] == {"act": "nan"}
    assert run.header["config"]["act"] == "nan"
    assert run.header["environment"][0]["versions"] == "x"
    assert run.header["failure"]["step"] == 57
    assert list(run.columns["loss"]) == [0, 10, 20, 30, 40, *range(47, 57)]
    assert run.columns["loss"][56] == "nan"
    assert run.columns["grad_norm"][10] == 0.1235
    assert run.columns["val_loss"] == val_losses(57)
    layer = run.signals[50][3]
    assert set(layer) == set(collection.SIGNALS)
    assert layer["repeated_maxima"] == [0.1235, "-inf"]
    assert layer["score_maximum"] == [score(50, 3), 0.0]


def test_measurements_beside_the_records_of_an_experiment_without_seeds_are_found(collected):
    """Its run directories are named by the arm alone, although every config has a seed."""
    found = records.read_all(collected)
    assert [(record.name, record.seed) for record in found] == [("calm", 42), ("wild", 42)]
    mean = [[0.0, 0.0]] * LAYERS
    measured = {"run": "calm", "step": 50, "draws": 2, "mean": mean, "error": mean}
    diagnosed = {"run": "calm", "before": None, "code": 0, "kind": "none", "at_batch": False}
    (collected / "bias.ndjson").write_text(json.dumps(measured))
    (collected / "verdicts.ndjson").write_text(json.dumps(diagnosed))
    assert "act=finish" in bias_table(collected, found)
    assert "calm" in verdict_table(collected, outcomes(found))


def test_records_of_an_experiment_are_one_file_of_columns(collected):
    assert [path.name for path in collected.iterdir()] == ["records.jsonl.xz"]
    text = lzma.decompress((collected / "records.jsonl.xz").read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["arm"] for line in lines if "arm" in line] == ["calm", "wild"]
    line = next(line for line in lines if (line.get("signal"), line.get("layer")) == FOLLOWED)
    assert line["steps"] == list(STEPS)
    assert line["heads"] == [[score(step, 10) for step in STEPS], [0.0] * len(STEPS)]


FOLLOWED = ("score_maximum", 10)


def test_a_run_is_read_as_it_was_written(tmp_path, collected):
    runs = archive.read(collected)
    for run in runs:
        del run.signals[50][2]["repeated_maxima"]  # some steps and layers lack it
        run.signals[50][4].clear()
    archive.write(tmp_path / "again", runs)
    assert archive.read(tmp_path / "again") == runs


def test_what_is_collected_again_replaces_its_run_and_leaves_the_others(lab, collected):
    """If a run has gone on, or only some arms are collected, from any workdir: equal results."""
    before = stored(collected)
    assert main(["lab", "collect", str(lab.out), str(collected)]) == 0
    assert stored(collected) == before
    shutil.rmtree(lab.out / "wild")
    lines = (lab.out / "calm" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (lab.out / "calm" / "metrics.jsonl").write_text("".join(lines[:91]))
    assert main(["lab", "collect", str(lab.out), str(collected)]) == 0
    after = stored(collected)
    assert list(after) == ["calm", "wild"]
    assert after["wild"] == before["wild"]
    assert (before["calm"].header["steps"], after["calm"].header["steps"]) == (100, 91)


@pytest.mark.parametrize("damage", ["cut", "text", "no header", "no columns"])
def test_damaged_records_are_one_line(collected, capsys, damage):
    path = collected / "records.jsonl.xz"
    whole = path.read_bytes()
    lines = lzma.decompress(whole).splitlines(keepends=True)
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "text": b"nothing",
            "no header": lzma.compress(b"".join(lines[1:])),
            "no columns": lzma.compress(lines[0] + b'{"signal": "x"}\n'),
        }[damage]
    )
    assert main(["lab", "report", str(collected)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1


def cells(text):
    """The cells of each row of a table except the rule, by first cell."""
    table = [line.strip("|").split("|") for line in text.splitlines() if line[:2] == "| "]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table}


def test_the_table_reads_the_layers_by_their_number(collected):
    text = tables.score_table(records.read_all(collected), layer=10, steps=[50, 100])
    found = cells(text)
    assert list(found) == ["arm", "act=finish", "act=nan"]
    assert found["arm"][:2] == ["50", "100"]
    at_50, at_100 = score(50, 10), score(100, 10)
    others = score(100, 1)
    calm = [f"{at_50:,.0f}", f"{at_100:,.0f}", f"{others:,.0f}", "12.0", "2.250", "none", "no"]
    assert found["act=finish"] == calm
    others = score(50, 1)
    wild = [f"{at_50:,.0f}", "–", f"{others:,.0f}", "12.0", "2.250", "0.75 at 40", "57"]
    assert found["act=nan"] == wild


def test_what_earlier_versions_measured_on_held_out_text_is_marked(collected):
    def is_marked():
        arms = records.read_all(collected)
        text = tables.score_table(arms, layer=10, steps=[50, 100])
        marks = {name: [cell[-1:] == "*" for cell in row] for name, row in cells(text).items()}
        return [arm.held_out for arm in arms], "on held-out text" in text, marks["act=finish"][:3]

    assert is_marked() == ([None, None], False, [False] * 3)
    runs = archive.read(collected)
    for run in runs:  # the other arm failed, so its last signals belong to the batch at fault
        run.header["held_out"] = 100 if run.name == "calm" else None
    archive.write(collected, runs)
    assert is_marked() == ([100, None], True, [False, True, True])


def test_the_table_across_steps_has_the_value_of_largest_size_and_its_layer(collected):
    arms = records.read_all(collected)
    for layers in (record.signals[max(record.signals)] for record in arms):
        for i, layer in enumerate(layers):
            layer["delta_error_cumulative"] = [0.5 * i, -3.25 if i == 2 else 0.0]
            layer["common_direction_across_steps"] = [0.25, float("nan") if i == 3 else 0.5]
            layer["outer_product_similarity"] = [0.125, 0.0625]
            del layer["outer_product_similarity_across_steps"]
    found = cells(tables.across_steps_table(arms))
    seed = str(arms[0].seed)
    assert found["act=finish"] == [seed, "0.12 in 0", "–", "nan in 3", "5.5 in 11"]
    for record in arms:  # as in records of earlier versions
        for layer in record.signals[max(record.signals)]:
            del layer["delta_error_cumulative"]
    assert tables.across_steps_table(arms) is None


def test_the_figure_has_a_panel_an_arm_and_a_line_a_layer(collected):
    arms = records.read_all(collected)
    panels = figures.score_figure(arms, layer=1).axes
    assert [panel.get_title() for panel in panels] == ["act=finish", "act=nan"]
    calm, wild = (panel.get_lines() for panel in panels)
    assert (len(calm), len(wild)) == (LAYERS, LAYERS + 1)
    for i, line in enumerate(calm):
        assert list(line.get_ydata()) == [score(step, i) for step in STEPS]
        assert (line.get_color() == "red") == (i == 1)
    assert set(wild[-1].get_xdata()) == {57}


def test_report_writes_table_and_figure(collected, tmp_path, capsys):
    picture = tmp_path / "picture.png"
    assert main(["lab", "report", str(collected), "--figure", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = (collected / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert cells(text)["arm"][:7] == ["10", "30", "40", "60", "70", "90", "100"]
    assert main(["lab", "report", str(collected), "--layer", "12"]) == 1
    assert "--layer must be 0 to 11, got 12" in capsys.readouterr().err
    assert main(["lab", "report", str(collected), "--steps", "-3"]) == 1
    assert "--steps -3: no run of" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere" / "a.png"
    assert main(["lab", "report", str(collected), "--figure", str(nowhere)]) == 1
    assert f"cannot write {nowhere}" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["lab", "report", str(empty)]) == 1
    said = capsys.readouterr().err
    assert "empty holds no records" in said
    assert f"lowprec-attn lab collect WORKDIR {empty}" in " ".join(said.split())


def test_a_value_that_is_not_a_number_is_the_largest(collected):
    (record,) = [r for r in records.read_all(collected) if r.arm.name == "calm"]
    record.signals[10][0]["score_maximum"][:] = [1.0, float("nan")]
    assert record.largest("score_maximum", 10, 0) != record.largest("score_maximum", 10, 0)


@pytest.mark.parametrize("length", ["0", "2.5", "true", '"many"'])
def test_the_length_of_a_text_is_a_number_of_tokens(tmp_path, length):
    (tmp_path / "texts.toml").write_text(f"{64 * 'a'} = {length}\n")
    with pytest.raises(records.RecordError, match=r"texts\.toml: a+ must be a number of tokens"):
        records.text_lengths(tmp_path)
