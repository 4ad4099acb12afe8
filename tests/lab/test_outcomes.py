"""What an experiment with seeds and controls reports: words, intervals, excess, table, figure."""

import dataclasses
import json
import math
import shutil

import pytest
from records.arms import arm_record

from lowprec_attn.commands.main import main
from lowprec_attn.lab import archive, collection, records
from lowprec_attn.lab.experiment import Arm
from lowprec_attn.lab.report import figures, outcomes, summary, tables
from lowprec_attn.lab.report.titles import plain_titles
from lowprec_attn.runs.instability.explosion import LargeHeads, RunawayRule
from lowprec_attn.runs.instability.rollbacks import Rollback
from lowprec_attn.runs.pages import style

CONTROLS = {"bad": "positive", "good": "negative"}


def record(name, seed, steps, explosion=None, loss=3.0, scores=lambda step: [2.0], failure=None):
    """A run of `steps` steps, with every tenth loss and the scores of every hundredth step."""
    return arm_record(
        Arm(name, {"x": name}, CONTROLS.get(name)),
        mechanism="B (pv)",
        seed=seed,
        steps=steps,
        explosion=explosion,
        failure=failure,
        losses=dict.fromkeys(range(0, steps, 10), loss),
        val_losses={steps: loss},
        signals={
            step: [{"score_maximum": scores(step), "query_weight_norm": [1.0]}] * 2
            for step in range(0, steps, 100)
        },
    )


def decided(*of_arm, seeds=(1,)):
    """The outcomes of both controls with each seed, and of the other runs, by arm."""
    controls = [
        run
        for seed in seeds
        for run in (record("bad", seed, 1200, 1000), record("good", seed, 1300))
    ]
    return {found.arm.name: found for found in outcomes.outcomes([*controls, *of_arm])}


@pytest.mark.parametrize(
    ("steps", "explosion", "word"),
    [(1249, None, "censored"), (1250, None, "healthy"), (900, 800, "exploded")],
)
def test_a_run_is_healthy_beyond_one_and_a_quarter_of_its_positive_control(steps, explosion, word):
    found = decided(record("arm", 1, steps, explosion))
    assert found["arm"].words == {1: word}
    assert found["arm"].exploded == (word == "exploded")
    assert found["good"].words == {1: "healthy"}
    assert found["bad"].words == {1: "exploded"}


@pytest.mark.parametrize(
    ("steps", "above", "word"),
    [(1300, 0.69, "healthy"), (1300, 0.71, "behind"), (1249, 0.71, "censored")],
)
def test_a_run_that_ends_far_above_the_negative_control_is_behind(steps, above, word):
    found = decided(record("arm", 1, steps, loss=3.0 + above))
    assert found["arm"].words == {1: word}
    assert found["arm"].exploded == 0


NOT_FINITE = {"step": 800, "message": "first non-finite value in layer 1: the logits"}


def test_a_run_that_a_value_ended_which_was_not_finite_has_not_exploded():
    found = decided(
        record("arm", 1, 801, failure=NOT_FINITE), record("later", 1, 801, 700, failure=NOT_FINITE)
    )
    assert found["arm"].words == {1: "not finite"}
    assert (found["arm"].exploded, found["arm"].not_finite) == (0, 1)
    assert found["arm"].interval is None
    assert found["arm"].excess == {} and found["arm"].is_lost(1)
    assert found["later"].words == {1: "exploded"}


@pytest.mark.parametrize(("steps", "word"), [(999, "censored"), (1000, "healthy")])
def test_a_positive_control_that_was_not_finite_has_broken(steps, word):
    runs = [record("bad", 1, 801, failure=NOT_FINITE), record("good", 1, steps)]
    found = outcomes.outcomes(runs)
    assert found[1].words == {1: word}
    assert outcomes.undecided(found) == []


@pytest.mark.parametrize(
    ("before", "last", "word"),
    [
        (100.0, 151.0, "growing"),
        (100.0, 150.0, "healthy"),
        (50.0, 100.0, "healthy"),
        (50.0, 101.0, "growing"),
        (400.0, 500.0, "healthy"),
        (50.0, math.nan, "growing"),
    ],
)
def test_a_run_whose_scores_still_grow_is_not_healthy(before, last, word):
    """Of 2,000 steps, the third quarter ends at step 1,500, and the first half does not count."""

    def scores(step):
        return [1.0, 1e4 if step <= 1000 else before if step <= 1500 else last]

    arm = decided(record("arm", 1, 2000, scores=scores))["arm"]
    assert arm.words == {1: word}
    assert arm.interval == (None if word == "growing" else pytest.approx(wilson(0, 1)))


def test_a_run_with_too_few_records_to_see_its_scores_grow_is_healthy():
    run = record("arm", 1, 2000, scores=lambda step: [1.0 + step])
    few = {step: run.signals[step] for step in (0, 1900)}
    assert decided(dataclasses.replace(run, signals=few))["arm"].words == {1: "healthy"}


def test_it_is_the_control_of_the_same_seed_that_counts():
    runs = [record("bad", 1, 900, 800), record("bad", 2, 5000, 4000), record("bad", 3, 5000)]
    runs += [record("arm", seed, 3000) for seed in (1, 2, 3, 4)]
    arm = outcomes.outcomes(runs)[1]
    assert arm.words == {1: "healthy", 2: "censored", 3: "censored", 4: "censored"}


def wilson(k, n, z=1.959963984540054):
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    return centre - half, centre + half


@pytest.mark.parametrize(("exploded", "healthy"), [(0, 3), (1, 2), (3, 0), (9, 1)])
def test_the_interval_is_wilsons_without_the_censored_runs(exploded, healthy):
    seeds = range(exploded + healthy + 2)
    runs = [record("arm", seed, 900, 800) for seed in seeds[:exploded]]
    runs += [record("arm", seed, 2000) for seed in seeds[exploded : exploded + healthy]]
    runs += [record("arm", seed, 10) for seed in seeds[exploded + healthy :]]
    arm = decided(*runs, seeds=seeds)["arm"]
    assert arm.interval == pytest.approx(wilson(exploded, exploded + healthy), abs=1e-9)


def test_where_all_are_censored_nothing_is_known():
    arm = decided(record("arm", 1, 10))["arm"]
    assert arm.interval is None
    assert arm.median_explosion is None


def test_the_median_is_that_of_the_runs_that_exploded():
    runs = [record("arm", seed, 900, step) for seed, step in ((1, 100), (2, 300), (3, 800))]
    found = decided(*runs, record("arm", 4, 5000), seeds=(1, 2, 3, 4))
    assert found["arm"].median_explosion == 300


def test_the_excess_is_taken_at_the_last_steps_that_both_have():
    """The control's last losses are at steps 1,200 to 1,290; the arm's losses go on."""
    run = record("arm", 1, 2000, loss=3.25)
    run.losses.update({1190: 9.0, 1200: 3.75, 1300: 9.0})
    found = decided(run, record("arm", 2, 2000, 1500), record("arm", 3, 2000))
    assert found["arm"].excess == {1: pytest.approx(0.25 + 0.5 / 10)}
    assert found["good"].excess == {}


def test_an_excess_without_common_steps_is_not_a_number():
    run = record("arm", 1, 2000)
    run.losses.clear()
    run.losses[1] = 3.0
    assert math.isnan(decided(run)["arm"].excess[1])


def test_controls_come_first():
    assert list(decided(record("a", 1, 10), record("z", 1, 10))) == ["bad", "good", "a", "z"]


def test_what_decides_nothing_is_said():
    arm = [record("arm", seed, 2000) for seed in (1, 2)]
    assert outcomes.undecided(list(decided(*arm, seeds=(1, 2)).values())) == []
    assert outcomes.undecided(outcomes.outcomes(arm)) == [
        "no arm is the positive control",
        "no arm is the negative control",
    ]
    held = [record("bad", seed, 1200) for seed in (1, 2)]
    assert outcomes.undecided(outcomes.outcomes([*held, record("good", 1, 1300)])) == [
        "bad did not break with seeds 1, 2",
        "good was not run with seed 2",
    ]
    runs = [record("bad", 1, 1200), record("good", 1, 1300, 1100), record("good", 2, 1300), *arm]
    assert outcomes.undecided(outcomes.outcomes(runs)) == [
        "bad did not break with seed 1",
        "good exploded with seed 1",
        "bad was not run with seed 2",
    ]
    lost = outcomes.outcomes([record("bad", 1, 9), record("good", 1, 801, failure=NOT_FINITE)])
    assert "good was not finite with seed 1" in outcomes.undecided(lost)


# The table.


def rows(text):
    """The cells of each row of the first table, by arm."""
    table = [line for line in text.split("\n\n")[1].splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0]: row[1:] for row in cells}


def test_the_table_has_a_row_an_arm_with_an_entry_a_seed():
    runs = [
        record("arm", 1, 900, 800),
        record("arm", 3, 2000, loss=3.25),
        record("lost", 2, 801, failure=NOT_FINITE),
    ]
    text = tables.outcome_table(list(decided(*runs, seeds=(1, 2, 3)).values()))
    found = rows(text)
    assert found["x=arm"] == [
        "B (pv)",
        "1 of 2",
        "9% to 91%",
        "800 / no run / healthy",
        "800",
        "– / no run / +0.250",
        "2 / no run / 2",
    ]
    assert found["x=lost"][1:4] == ["0 of 1", "–", "no run / not finite at 800 / no run"]
    assert found["x=bad (positive control)"][3:5] == ["1,000 / 1,000 / 1,000", "1,000"]
    assert found["x=good (negative control)"][-2] == "–"
    assert text.startswith("Seeds 1, 2, 3, in this order")
    assert "decide nothing" not in text


def test_the_table_says_whose_scores_ran_away():
    """Two layers have the heads of `scores` each. A run that exploded before is not judged."""
    large = [600.0]
    runs = [
        record("arm", 1, 2101, scores=lambda step: large),
        record("arm", 2, 2101, scores=lambda step: [511.0, 600.0 * (step != 2000)]),
        record("arm", 3, 2101, 1999, scores=lambda step: large),
        record("arm", 4, 2101, 2001, scores=lambda step: large),
    ]
    text = tables.outcome_table(list(decided(*runs, seeds=(1, 2, 3, 4)).values()))
    assert rows(text)["x=arm"][-2:] == [
        "600 / 600 / 600 / 600",
        "yes (2) / no (0) / – / yes (2)",
    ]
    assert rows(text)["x=good (negative control)"][-1] == "– / – / – / –"
    assert "above 512 at step 2,000" in " ".join(text.split())
    many = [record("arm", seed, 2101, scores=lambda step: large) for seed in range(1, 8)]
    text = tables.outcome_table(list(decided(*many, seeds=range(1, 8)).values()))
    assert rows(text)["arm: x=arm"][-2:] == ["600", "7 of 7"]
    short = [dataclasses.replace(run, runaway_rule=RunawayRule(500.0, 300)) for run in many[:1]]
    text = tables.outcome_table(list(decided(*short).values()))
    assert "above 500 at step 300" in " ".join(text.split())


def test_runs_that_were_not_finite_have_a_table_of_their_own():
    other = {"step": 820, "message": "first non-finite value outside the layers: the update"}
    runs = [record("arm", seed, 801, failure=NOT_FINITE) for seed in (1, 2)]
    runs += [record("arm", 3, 821, 700, failure=other)]
    table = tables.not_finite_table(list(decided(*runs, seeds=(1, 2, 3)).values()))
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[-2:]]
    assert cells == [
        ["x=arm", "2", "800", "in layer 1: the logits", ""],
        ["x=arm", "1", "820", "outside the layers: the update", "1"],
    ]
    assert tables.not_finite_table(list(decided().values())) is None


def test_the_table_says_how_often_runs_went_back():
    back = Rollback(to=400, onset=510, detected=600, skipped=201, reason="excess")
    runs = [
        dataclasses.replace(record("x", seed, 1300), rollbacks=[back] * n)
        for seed, n in ((1, 0), (2, 3))
    ]
    table = tables.outcome_table(list(decided(*runs, seeds=(1, 2)).values()))
    rows = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["rollbacks", "–", "–", "0 / 3"]
    assert "rollbacks" not in tables.outcome_table(list(decided().values()))


def test_the_table_of_many_seeds_counts_them():
    seeds = range(1, 21)
    runs = [record("arm", seed, 900, 790 + seed) for seed in seeds[:12]]
    runs += [record("arm", seed, 2000, loss=3 + seed / 100) for seed in seeds[12:17]]
    runs += [record("arm", seed, 100) for seed in seeds[17:19]]
    runs += [record("arm", 20, 801, failure=NOT_FINITE)]
    text = tables.outcome_table(list(decided(*runs, seeds=seeds).values()))
    assert "18, 19, 20. Mechanism" in text
    found = rows(text)
    assert found["arm: x=arm"][1:6] == [
        "12 of 20",
        "47% to 87%",
        "791 to 802 / 5 healthy / 2 censored / 1 not finite",
        "796",
        "+0.000 to +0.170",
    ]
    assert found["good: x=good (negative control)"][3:] == ["20 healthy", "–", "–", "2"]
    lines = text.splitlines()[-22:]
    heading, _, *of_seed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert heading == ["seed", "bad", "good", "arm"]
    assert of_seed[0] == ["1", "1,000", "healthy", "791"]
    assert of_seed[12] == ["13", "1,000", "healthy", "healthy"]
    assert of_seed[18] == ["19", "1,000", "healthy", "censored"]
    assert of_seed[19] == ["20", "1,000", "healthy", "not finite at 800"]


def test_a_table_that_decides_nothing_says_so():
    text = tables.outcome_table(outcomes.outcomes([record("arm", 1, 900)]))
    assert text.startswith("Seed 1. ")
    last = text.splitlines()[-1]
    assert last.startswith(
        "Explosions decide nothing where a control fails: no arm is the positive"
    )
    assert last.endswith("; no arm is the negative control.")


# The figure.


def lines(panel, color):
    return [line for line in panel.get_lines() if line.get_color() == color]


def test_the_figure_has_two_panels_an_arm_and_a_line_a_seed():
    lost = {"step": 1005, "message": ""}
    runs = [record("arm", 1, 900, 805), record("arm", 2, 2000)]
    runs += [record("lost", 1, 1005, failure=lost)]
    found = decided(*runs, seeds=(1, 2))
    figure = figures.loss_figure(list(found.values()))
    loss = {panel.get_title(): panel for panel in figure.axes if panel.get_title()}
    assert list(loss) == [
        "x=bad\n2 of 2 exploded",
        "x=good\n0 of 2 exploded",
        "x=arm\n1 of 2 exploded",
        "x=lost\n0 of 1 exploded, 1 not finite",
    ]
    (cross,) = lines(loss["x=lost\n0 of 1 exploded, 1 not finite"], "k")
    assert list(cross.get_xdata()) == [1000]
    arm = loss["x=arm\n1 of 2 exploded"]
    assert [len(line.get_xdata()) for line in lines(arm, style.ARM)] == [90, 200]
    assert [len(line.get_xdata()) for line in lines(arm, style.CONTROL)] == [130, 130]
    (mark,) = lines(arm, "red")
    assert list(mark.get_xdata()) == [800]
    assert not lines(loss["x=good\n0 of 2 exploded"], style.CONTROL)
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["a seed", "negative control: x=good", "explosion", "not finite"]
    without = figures.loss_figure(outcomes.outcomes([record("arm", 1, 900)]))
    assert len(without.legends[0].get_texts()) == 1  # neither explosion nor failure


def test_a_loss_that_was_never_finite_is_drawn_as_nothing():
    run = record("arm", 1, 10, explosion=0, loss=math.nan)
    panel = figures.loss_figure(outcomes.outcomes([run])).axes[0]
    assert [len(line.get_xdata()) for line in panel.get_lines()] == [0]


# The report.


@pytest.fixture
def collected(lab, tmp_path):
    """Records of two arms with two seeds, neither arm a control."""
    acts = {"bad": "finish", "good": "slow"}
    assert lab(acts, head="seeds = [1, 2]")[0] == 0
    for name in ("bad-seed1", "bad-seed2", "good-seed1", "good-seed2"):
        steps = range(0, 400, 10)
        rise = 1.0 if "bad" in name else 0.0
        layer = {name: [2.0] for name in collection.SIGNALS}
        found = [{"step": s, "loss": 3.0 + (rise if s >= 200 else 0.0)} for s in steps]
        found += [{"step": s, "signals": {"layer_0": layer, "layer_1": layer}} for s in (0, 300)]
        text = "".join(json.dumps(line) + "\n" for line in found)
        (lab.out / name / "metrics.jsonl").write_text(text)
    results = tmp_path / "results"
    assert main(["lab", "collect", str(lab.out), str(results)]) == 0
    return results


def test_when_scores_are_judged_travels_with_the_records(lab, tmp_path):
    head = "[runaway]\nstep = 300\nscore = 1.5"
    assert lab({"a": "finish"}, head=head)[0] == 0
    layer = {"score_maximum": [2.0, 1.0], "query_weight_norm": [1.0, 1.0]}
    signals = {"layer_0": layer, "layer_1": layer}
    lines = [{"step": step, "loss": 3.0} for step in range(400)]
    lines += [{"step": step, "signals": signals} for step in (0, 350)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (lab.out / "a" / "metrics.jsonl").write_text(text)
    assert main(["lab", "collect", str(lab.out), str(tmp_path / "results")]) == 0
    (run,) = records.read_all(tmp_path / "results")
    assert run.large_heads == LargeHeads(350, 2)


def report(results, *options):
    assert main(["lab", "report", str(results), *options]) == 0
    return (results / "table.md").read_text()


def test_the_report_of_several_seeds_has_outcomes_and_the_loss_figure(collected, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "score_figure", lambda *_: pytest.fail("not of several seeds"))
    whole = figures.loss_figure
    monkeypatch.setattr(
        figures, "loss_figure", lambda found, _: drawn.append(found) or whole(found)
    )
    text = report(collected, "--positive-control", "bad", "--negative-control", "good")
    assert "act=finish (positive control)" in text
    assert text.startswith("128 tokens a step: 0.05 million in the 391 steps of the longest run.\n")
    text = text[text.index("Seeds 1, 2") :]
    assert rows(text)["act=finish (positive control)"][3] == "230 / 230"
    assert rows(text)["act=slow (negative control)"][3] == "healthy / healthy"
    assert "nothing is decided" not in text
    assert [found.words for found in drawn[0]] == [
        {1: "exploded", 2: "exploded"},
        {1: "healthy", 2: "healthy"},
    ]
    assert "no arm is the positive control" in report(collected)
    # The signals are 2 in all layers from step 0 on, and the losses explode at step 230.
    (sums,) = [line for line in text.splitlines() if line.startswith("| row_sums")]
    assert "2 of 2" in sums and "230, from 230 on" in sums and "good 2" in sums
    assert not [
        line for line in text.splitlines() if line.startswith("| scores") and "2 of 2" in line
    ]


def test_runaways_are_counted_by_what_became_of_the_run():
    def run(name, seed, score, steps=2101, explosion=None, failure=None):
        def scores(step):
            return [score]  # one head in each of two layers

        return record(name, seed, steps, explosion, scores=scores, failure=failure)

    lost = {"step": 2100, "message": ""}
    runs = [
        run("good", 1, 512.0),
        run("good", 2, 513.0),
        run("good", 3, 513.0, steps=2000),  # the last signals are at step 1,900
        run("bad", 1, 513.0, explosion=2001),
        run("bad", 2, 512.0, explosion=2001),
        run("bad", 3, 513.0, explosion=1900),  # exploded before the signals could warn
        run("other", 1, 513.0),
        run("other", 2, 513.0, failure=lost),
    ]
    text = summary.runaway_table({"one": runs, "two": runs[:1], "three": runs[2:3]})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[-3:] == [
        ["one", "1 of 2", "1 of 1", "1 of 2", "1 of 1"],
        ["two", "0 of 1", "–", "–", "–"],
        ["all", "1 of 3", "1 of 1", "1 of 2", "1 of 1"],
    ]
    assert summary.runaway_table({"three": runs[2:3]}) is None


def test_a_summary_counts_what_became_of_the_runs():
    runs = [record("bad", 1, 900, 800), record("good", 1, 2000), record("good", 2, 2000)]
    runs += [
        record("bad", 2, 801, failure=NOT_FINITE),
        record("arm", 1, 900, 700, failure=NOT_FINITE),
    ]
    text = summary.summary({"one": runs})
    assert text.startswith(
        "Of 5 runs 2 exploded, 1 ended at a value that was not finite without an explosion before, "
        "and 2 held."
    )


def test_several_experiments_are_reported_and_summed_up(collected, tmp_path, capsys):
    both = tmp_path / "both"
    for name in ("first", "second"):
        shutil.copytree(collected, both / name)
    shutil.copytree(collected, both / "second" / "again")
    assert main(["lab", "report", str(both), "--positive-control", "bad"]) == 0
    text = (both / "summary.md").read_text()
    assert text.count("| positive control | 2 of 2") == 2  # deeper ones are not counted twice
    again, second = (both / name / "table.md" for name in ("second/again", "second"))
    assert again.read_text() == second.read_text()
    assert "- second: no arm is the negative control" in text
    assert (both / "first" / "table.md").exists() and (both / "second" / "figure.png").exists()
    capsys.readouterr()
    assert main(["lab", "report", str(both), "--figure", "x.png"]) == 1
    said = capsys.readouterr().err
    assert f"{both} holds several (first, second): name one of them, as in {both / 'first'}" in said
    (tmp_path / "empty").mkdir()
    assert main(["lab", "report", str(tmp_path / "empty")]) == 1
    assert "holds no records" in capsys.readouterr().err


def test_the_report_of_one_seed_has_outcomes_and_losses_where_there_are_controls(
    collected, capsys, monkeypatch
):
    drawn = []
    loss_figure = figures.loss_figure
    monkeypatch.setattr(
        figures, "loss_figure", lambda runs, _: drawn.append(1) or loss_figure(runs)
    )
    alone = report(collected, "--seeds", "2")
    assert "Seed" not in alone
    assert not drawn  # scores of a single layer leave nothing to compare
    controlled = report(collected, "--seeds", "2", "--negative-control", "good")
    assert drawn
    read, tables = alone.split("\n", 1)
    assert controlled.startswith(f"{read}\n\nSeed 2. ")
    assert controlled.endswith(tables)
    assert main(["lab", "report", str(collected), "--seeds", "3"]) == 1
    assert "there is no record of seed 3; seeds are 1, 2" in capsys.readouterr().err
    assert main(["lab", "report", str(collected), "--positive-control", "nobody"]) == 1
    assert "there is no arm 'nobody'; arms are bad, good" in capsys.readouterr().err
    both = ("--positive-control", "bad", "--negative-control", "bad")
    assert main(["lab", "report", str(collected), *both]) == 1
    assert "--positive-control and --negative-control both name bad" in capsys.readouterr().err


def test_a_control_that_is_named_takes_the_place_of_the_recorded_one():
    runs = [record("bad", 1, 10), record("arm", 1, 10)]
    changed = records.with_control(runs, "positive", "arm")
    assert [run.arm.control for run in changed] == [None, "positive"]
    assert [run.arm.control for run in records.with_control(runs, "negative", "arm")] == [
        "positive",
        "negative",
    ]
    assert records.with_control(runs, "positive", None) == runs


def test_records_say_arm_control_and_seed(collected, tmp_path):
    run = next(run for run in archive.read(collected) if run.name == "bad-seed2")
    header = run.header
    assert header["rollbacks"] == []
    back = Rollback(to=100, onset=200, detected=300, skipped=201, reason="excess")
    went_back = {**header, "rollbacks": [back._asdict()]}
    archive.write(tmp_path, [dataclasses.replace(run, header=went_back)])
    (found,) = records.read_all(tmp_path)
    assert found.rollbacks == [back]
    assert (found.seed, found.steps, found.explosion) == (2, 391, 230)
    assert (header["arm"], header["seed"], header["control"]) == ("bad", 2, None)
    assert (header["steps"], header["explosion"]) == (391, 230)
    assert header["runaway_rule"] == {"score": 512.0, "step": 2000}


def test_a_run_that_was_stopped_has_exploded(lab, tmp_path):
    """Even if its recorded losses do not show it, because the trainer has seen all losses."""
    assert lab({"a": "explode", "b": "nan"})[0] == 0
    assert main(["lab", "collect", str(lab.out), str(tmp_path / "results")]) == 0
    found = archive.read(tmp_path / "results")
    assert [run.header["explosion"] for run in found] == [3, None]


def test_records_are_read_in_the_order_of_their_seeds(collected):
    runs = {run.name: run for run in archive.read(collected)}
    good = runs["good-seed2"]
    for seed in (30, 4, 17, 9, 22, 5, 11, 3):
        config = {**good.header["config"], "seed": seed}
        header = {**good.header, "seed": seed, "config": config}
        runs[f"good-seed{seed}"] = dataclasses.replace(good, header=header)
    archive.write(collected, runs.values())
    found = [(run.arm.name, run.seed) for run in records.read_all(collected)]
    good = [1, 2, 3, 4, 5, 9, 11, 17, 22, 30]
    assert found == [("bad", 1), ("bad", 2), *(("good", seed) for seed in good)]


def test_records_of_the_same_arm_and_seed_are_refused(collected):
    run = next(run for run in archive.read(collected) if run.name == "bad-seed2")
    archive.write(collected, [run, run])
    with pytest.raises(records.RecordError, match="holds two records of arm bad, seed 2"):
        records.read_all(collected)


def test_where_nothing_broke_the_figure_says_what_ran_away(monkeypatch):
    held = [record("bad", 1, 2000), record("good", 1, 2000)]
    found = outcomes.outcomes(held)
    large = {"bad": LargeHeads(2000, 2), "good": None}
    monkeypatch.setattr(records.ArmRecord, "large_heads", property(lambda run: large[run.arm.name]))
    figure = figures.loss_figure(found)
    titles = [panel.get_title().split("\n")[1] for panel in figure.axes if panel.get_title()]
    assert titles == ["1 of 1 ran away", "top score 2"]
    (legend,) = figure.legends
    assert "explosion" not in [text.get_text() for text in legend.get_texts()]


def test_the_panels_of_a_figure_are_named_by_the_titles_beside_the_records(tmp_path):
    arms = [record("bad", 1, 900).arm, record("good", 1, 900).arm]
    assert plain_titles(tmp_path, arms) == {"bad": "bad", "good": "good"}
    settings = {"attention.numerics": "flash", "attention.row_max": "dynamic_max"}
    arm = Arm("flash_with_the_dynamic_maximum", settings)
    named = Arm("b", {**settings, "name": "the paper's cure"})
    assert plain_titles(tmp_path, [arm, named]) == {
        arm.name: "flash with the dynamic maximum",
        "b": "the paper's cure",
    }
    (tmp_path / "titles.toml").write_text('bad = "O in two bits"\n')
    titles = plain_titles(tmp_path, arms)
    assert titles == {"bad": "O in two bits", "good": "good"}
    figure = figures.loss_figure(outcomes.outcomes([record("bad", 1, 900)]), titles)
    assert figure.axes[0].get_title().startswith("O in two bits\n")
    (tmp_path / "titles.toml").write_text("O in two bits\n")
    with pytest.raises(records.RecordError, match=r"titles\.toml is not TOML"):
        plain_titles(tmp_path, arms)
    (tmp_path / "titles.toml").write_text("bad = 2\n")
    with pytest.raises(records.RecordError, match=r"titles\.toml: bad must be a text in quotes"):
        plain_titles(tmp_path, arms)
