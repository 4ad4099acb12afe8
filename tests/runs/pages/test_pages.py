"""The page of a run: complete HTML that needs no network and shows what was recorded."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest
from records.runs import HEADS, layers, record_run

from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.pages import figures, style
from lowprec_attn.runs.pages.run import write_run_page

VOID = {"meta"}
HOSTILE = "<script>alert('1')</script> & \"quoted\""
FALLING = [5.0 - 0.01 * step for step in range(150)]
LARGE = {"score_maximum": [600.0, 5.0]}
SUMMARY = {"val_loss": 3.5, "unigram_loss": 4.0}
FAILURE = {"step": 150, "message": f"first non-finite value: {HOSTILE}"}


class Page(HTMLParser):
    """A parsed page: its elements, all of which must be closed, and its text."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)

    def check(self):
        """Checks that nothing is loaded, ids are unique, and every reference has its id."""
        assert self.tags[:2] == ["html", "head"]
        assert not {"script", "link", "img", "iframe"} & set(self.tags)
        assert "http://" not in self.source
        assert "https://" not in self.source
        ids = [value for name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        used = [value for name, value in self.attributes if name in ("href", "src")]
        used += re.findall(r"url\(([^)]*)\)", self.source)
        assert all(reference.startswith("#") for reference in used)
        assert {reference[1:] for reference in used} <= set(ids)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories by name: good, bad (it explodes and has hostile names), short and empty."""
    path = tmp_path_factory.mktemp("runs")
    quiet = {s: layers({}, {}) for s in (0, 50, 100)}
    return {
        "good": record_run(path / "good", FALLING, quiet, {100: 4.0, 150: 3.5}, SUMMARY, steps=150),
        "bad": record_run(
            path / "bad",
            [*FALLING, *[9.0] * 120, math.nan],
            quiet | {150: layers({}, LARGE), 200: layers({}, {"score_maximum": [math.nan, 5.0]})},
            failure=FAILURE,
            name=HOSTILE,
            steps=400,
        ),
        "short": record_run(path / "short", FALLING[:3], {}, steps=150),
        "empty": record_run(path / "empty", [], {}, steps=150),
    }


WORDS = {
    "good": ["Healthy: ", "layer 1", "score_maximum", "head 1", "No share", "512 tokens a second"],
    "bad": ["Not healthy: ", HOSTILE, "exploded at step", "Rules met", "600", "head 0"],
    "short": ["Too little was recorded to tell", "none were recorded"],
    "empty": ["0 steps were taken", "no timing was recorded"],
}


@pytest.mark.parametrize("name", WORDS)
def test_the_page_of_a_run_is_whole_and_says_what_was_recorded(runs, name, tmp_path):
    page = Page(write_run_page(runs[name], lambda *_: "No share.", tmp_path / "page.html"))
    page.check()
    for words in WORDS[name]:
        assert words in page.text
    # Every page has the config, the environment and the command.
    assert "optimizer.peak_lr" in page.text
    assert "versions.jax" in page.text
    assert json.loads(runs[name].environment.read_text())[0]["device_kind"] in page.text
    # The figures: the loss, three rules, W_Q, and tokens per second.
    drawn = {"good": 6, "bad": 6, "short": 2, "empty": 1}[name]
    assert page.tags.count("figure") == drawn
    folded = {"good": 2, "bad": 2}.get(name, 0) + len(["environment", "config"])
    assert page.tags.count("details") == folded


@pytest.mark.parametrize(
    ("name", "explosions", "alarms"), [("good", 0, []), ("bad", 10, ["scores"]), ("short", 0, [])]
)
def test_thresholds_explosions_and_first_alarms_are_drawn(runs, name, explosions, alarms, tmp_path):
    page = Page(write_run_page(runs[name], lambda *_: "", tmp_path / "page.html"))
    drawn = re.findall(r"<figure>.*?</figure>", page.source)
    # Five figures mark the step of the explosion and the step of the non-finite value.
    assert sum(figure.count(f"stroke: {style.EXPLOSION}") for figure in drawn) == explosions
    loss, *rules = drawn[:4]
    assert re.findall(r">(row_sums|delta|scores)</text>", loss) == alarms
    assert loss.count(f"stroke: {style.ALARM}") == len(alarms)
    # The losses of all steps. For the bad run also a cross, which counts as a shape and as its use.
    assert loss.count(f"stroke: {style.RAW}") == (3 if name == "bad" else 1)
    if name != "short":
        dashed = [figure.count(f"stroke: {style.THRESHOLD}") for figure in rules]
        assert dashed == [1] * len(RULES)
        assert [
            f"rule {rule}: ≥" in figure
            for rule, figure in zip(("scores", "row_sums", "delta"), rules, strict=True)
        ] == [True] * len(RULES)
    assert "DejaVu" not in page.source  # the reader's fonts are used


def test_signals_across_steps_are_drawn_where_they_are_recorded(tmp_path):
    """Sums of errors have signs: the figure shows the head with the largest absolute value."""
    sums = {0: [1.0, 0.0], 50: [2.0, -50.0], 100: [3.0, -900.0]}
    signals = {s: layers({"delta_error_cumulative": value}, {}) for s, value in sums.items()}
    run_dir = record_run(tmp_path / "run", FALLING, signals)
    page = Page(write_run_page(run_dir, lambda *_: "", tmp_path / "page.html"))
    page.check()
    assert "Σ (δ_lp − δ_hp) over the tokens of all measurements so far" in page.text
    assert page.tags.count("figure") == 7
    drawn = re.findall(r"<figure>.*?</figure>", page.source)
    (figure,) = (figure for figure in drawn if "Σ (δ_lp − δ_hp)" in figure)
    labels = [text.replace("−", "-") for text in re.findall(r"<text[^>]*>([^<]*)</text>", figure)]
    assert "-800" in labels
    assert "layer 0" in labels


def test_spikes_and_rollbacks_are_told_and_drawn(tmp_path):
    run_dir = record_run(tmp_path / "run", FALLING, {})
    spike = {"loss": 9.0, "median": 4.0, "spread": 0.1, "score": 50.0}
    with run_dir.metrics.open("a") as file:
        file.writelines(json.dumps({"step": 149, "spike": spike}) + "\n" for _ in range(9))
    back = {"to": 100, "onset": 120, "detected": 130, "skipped": 31, "reason": "excess"}
    run_dir.rollbacks.write_text(json.dumps(back) + "\n")
    health = judge(history := History.read(run_dir))
    twice = dataclasses.replace(history, rollbacks=[*history.rollbacks] * 2)
    names = figures.loss(twice, health).axes[0].texts
    assert len({name.xy[1] for name in names}) == 2  # one below the other
    run_dir.abandoned.mkdir()
    undone = [{"step": step, "loss": 8.0} for step in range(100, 131)]
    (run_dir.abandoned / "1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in undone))
    page = Page(write_run_page(run_dir, lambda *_: ""))
    page.check()
    for words in (
        "10, from step 100 on",
        "rollback: the loss was in excess",
        "the loss 9.000 is a spike",
    ):
        assert words in page.text
    assert "but only since the run went back once to step 100" in page.text
    loss = re.findall(r"<figure>.*?</figure>", page.source)[0]
    assert ">rollback</text>" in loss
    assert f"stroke: {style.THRESHOLD}" in loss  # without a unigram model, it marks undone steps
    # A line at step 100 and nine crosses, which count once as a shape and once per use.
    assert loss.count(f"stroke: {style.ALARM}") == 1 + 1 + 9


def test_what_was_abandoned_is_in_the_order_of_the_rollbacks(tmp_path):
    run_dir = record_run(tmp_path / "run", FALLING, {})
    back = {"to": 100, "onset": 120, "detected": 130, "skipped": 31, "reason": "excess"}
    run_dir.rollbacks.write_text(f"{json.dumps(back)}\n" * 10)
    run_dir.abandoned.mkdir()
    for number in range(1, 12):  # the 11th was forgotten
        text = json.dumps({"step": number, "loss": 8.0})
        (run_dir.abandoned / f"{number}.jsonl").write_text(f"{text}\n")
    assert [*map(list, History.read(run_dir).abandoned)] == [[n] for n in range(1, 11)]


def test_a_peak_between_the_points_of_a_long_series_is_drawn(tmp_path):
    signals = {step: layers({"score_maximum": [1.0, 1.0]}) for step in range(900)}
    signals[301] = layers({"score_maximum": [600.0, 1.0]})
    signals[602] = layers({"score_maximum": [math.nan, 1.0]})
    history = History.read(record_run(tmp_path / "run", [3.0] * 900, signals))
    rule = next(rule for rule in RULES if rule.name == "scores")
    figure = figures.by_layer(history, rule.value, judge(history), rule.threshold)
    line = figure.axes[0].lines[0]
    assert len(line.get_xdata()) <= 400
    assert (301, 600.0) in zip(line.get_xdata(), line.get_ydata(), strict=True)


def test_the_figures_of_a_page_reach_over_the_same_steps(tmp_path):
    # δ was measured at the first step only, and losses go on after the last diagnostics.
    signals = {0: layers({"query_gradient_error_relative": [0.1, 0.2]}, {}), 100: layers({}, {})}
    history = History.read(record_run(tmp_path / "run", FALLING, signals))
    health = judge(history)
    drawn = [figures.loss(history, health)]
    drawn += [figures.by_layer(history, rule.value, health, rule.threshold) for rule in RULES]
    assert {figure.axes[0].get_xlim() for figure in drawn} == {(-4.5, 154.5)}


def test_every_head_of_every_signal_has_its_last_value_and_a_curve(runs, tmp_path):
    page = Page(write_run_page(runs["bad"], lambda *_: "", tmp_path / "page.html"))
    curves = [value for name, value in page.attributes if name == "d" and "M0 " in value]
    row = re.compile(r"score_maximum</code></td><td><svg.*?</svg></td><td>nan</td><td>5</td>")
    assert len(row.findall(page.source)) == 1
    # One curve per head, which begins at the left edge and has a gap at a non-finite value.
    assert sum(value.startswith("M0 ") and value.count("M0 ") == HEADS for value in curves) >= 8


def test_the_command_writes_the_page_of_every_run(runs, capsys):
    good, bad = (str(runs[name].path) for name in ("good", "bad"))
    assert main(["report", good, bad]) == 0
    assert capsys.readouterr().out.split() == [f"{good}/report.html", f"{bad}/report.html"]
    Page(runs["good"].page).check()
    assert main(["report", good, bad, "--html", "both.html"]) == 1
    assert "--html both.html takes the page of one run" in capsys.readouterr().err


def test_the_title_names_what_differs_from_the_preset(tmp_path):
    def heading(name, **changes):
        page = write_run_page(record_run(tmp_path / name, FALLING, {}, **changes), lambda *_: "")
        return re.search("<h1>(.*?)</h1>", page.read_text())[1]

    preset = heading("preset", attention__numerics="exact")
    assert "numerics exact, row max standard" in preset
    changed = {"attention__points__output": "bfloat16", "attention__layers": {1: {}}}
    custom = heading("custom", attention__numerics="exact", **changed)
    assert "numerics exact with output=bfloat16, other layers, row max standard" in custom
