"""The pages of one run and of several: whole HTML that needs no network, with what was recorded."""

import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from records.runs import HEADS, layers, record_run

from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.pages import figures, style
from lowprec_attn.runs.pages.markup import element, write_page
from lowprec_attn.runs.pages.run import write_run_page

VOID = {"meta"}
HOSTILE = "<script>alert('1')</script> & \"quoted\""
FALLING = [5.0 - 0.01 * step for step in range(150)]
LARGE = {"score_maximum": [600.0, 5.0]}
SUMMARY = {"val_loss": 3.5, "unigram_loss": 4.0}
FAILURE = {"step": 150, "message": f"first non-finite value: {HOSTILE}"}


class Page(HTMLParser):
    """A page that was read: its elements, which must all be closed, and its text."""

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
        """Nothing is loaded, no id is there twice, and every reference has its id."""
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
    """Run directories by name: good, bad (exploding, its names hostile), short and empty."""
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
    # Config, environment and command are there in every case.
    assert "optimizer.peak_lr" in page.text
    assert "versions.jax" in page.text
    assert json.loads(runs[name].environment.read_text())[0]["device_kind"] in page.text
    # Loss; three rules and W_Q; tokens per second.
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
    # Five figures, each with the step of the explosion and that of the value that is not finite.
    assert sum(figure.count(f"stroke: {style.EXPLOSION}") for figure in drawn) == explosions
    loss, *rules = drawn[:4]
    assert re.findall(r">(row_sums|delta|scores)</text>", loss) == alarms
    assert loss.count(f"stroke: {style.ALARM}") == len(alarms)
    # The losses of all steps; of the bad run also a cross, as a shape and where it is used.
    assert loss.count(f"stroke: {style.RAW}") == (3 if name == "bad" else 1)
    if name != "short":
        dashed = [figure.count(f"stroke: {style.THRESHOLD}") for figure in rules]
        assert dashed == [1] * len(RULES)
        assert [
            f"rule {rule}: ≥" in figure
            for rule, figure in zip(("scores", "row_sums", "delta"), rules, strict=True)
        ] == [True] * len(RULES)
    assert "DejaVu" not in page.source  # the reader's own fonts


def test_signals_across_steps_are_drawn_where_they_are_recorded(tmp_path):
    """Σ of the errors is signed: the line is that of the head where it is largest in size."""
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


def test_what_adam_did_is_drawn_where_it_is_recorded(tmp_path):
    run_dir = record_run(tmp_path / "run", FALLING, {50: layers({}, {}), 100: layers({}, {})})
    with run_dir.metrics.open("a") as file:
        for step, share in ((50, 0.9), (100, 0.25), (149, "nan")):
            values = {"update_ratio": 0.01}
            adam = {
                "layer_0": values | {"below_epsilon": share},
                # Of earlier checkouts, and drawn no more.
                "layer_1": values | {"query_update_next_layer": 0.0625},
                "outside": {"update_ratio": 0.02},
            }
            file.write(json.dumps({"step": step, "adam": adam}) + "\n")
    history = History.read(run_dir)
    assert history.adam[100][0]["below_epsilon"] == [0.25]
    assert len(history.adam[100]) == 2
    page = Page(write_run_page(run_dir, lambda *_: ""))
    page.check()
    drawn = re.findall(r"<figure>.*?</figure>", page.source)
    assert len(drawn) == 6 + 2  # beside those of every run
    captions = ("RMS of the update", "Share of coordinates")
    for figure, caption in zip(drawn[5:7], captions, strict=True):
        assert caption in figure
    assert ">0.9</text>" in drawn[6]


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
    for words in ("10, from step 100 on", "rollback: the loss was in excess", "spike to 9.000"):
        assert words in page.text
    assert "but only since the run went back once to step 100" in page.text
    loss = re.findall(r"<figure>.*?</figure>", page.source)[0]
    assert ">rollback</text>" in loss
    assert f"stroke: {style.THRESHOLD}" in loss  # no summary, so no unigram model: the undone
    # A line at step 100, and nine crosses: their shape and where it is used.
    assert loss.count(f"stroke: {style.ALARM}") == 1 + 1 + 9


def test_the_figures_of_a_page_reach_over_the_same_steps(tmp_path):
    # δ was measured at the first step alone, and the loss goes on after the last diagnostics.
    signals = {0: layers({"query_gradient_error_relative": [0.1, 0.2]}, {}), 100: layers({}, {})}
    history = History.read(record_run(tmp_path / "run", FALLING, signals))
    health = judge(history)
    drawn = [figures.loss(history, health)]
    drawn += [figures.by_layer(history, rule.value, health, rule.threshold) for rule in RULES]
    drawn.append(figures.series([history], [{0: 5.0, 100: 6.0}]))
    assert {figure.axes[0].get_xlim() for figure in drawn} == {(-4.5, 154.5)}


def test_every_head_of_every_signal_has_its_last_value_and_a_curve(runs, tmp_path):
    page = Page(write_run_page(runs["bad"], lambda *_: "", tmp_path / "page.html"))
    curves = [value for name, value in page.attributes if name == "d" and "M0 " in value]
    row = re.compile(r"score_maximum</code></td><td><svg.*?</svg></td><td>nan</td><td>5</td>")
    assert len(row.findall(page.source)) == 1
    # A curve of each head: from the left edge on, with a gap where a value is not finite.
    assert sum(value.startswith("M0 ") and value.count("M0 ") == HEADS for value in curves) >= 8


def test_the_command_writes_a_page_or_a_comparison(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, bad, short = (str(runs[name].path) for name in ("good", "bad", "short"))
    assert main(["report", good]) == 0
    assert capsys.readouterr().out.split() == [f"{good}/report.html"]
    Page(runs["good"].page).check()
    assert main(["report", good, bad, short, "--html", "three.html"]) == 0
    page = Page(tmp_path / "three.html")
    page.check()
    (differ, last) = re.findall(r"<table>.*?</table>", page.source)
    # Of the config, what differs and nothing else.
    assert re.findall("<code>(.*?)</code>", differ) == ["name", "steps"]
    assert "<td>150</td><td>400</td><td>150</td>" in differ
    assert "&lt;script&gt;" in differ
    assert "<td>good</td><td>150</td><td>healthy</td><td>–</td><td>–</td>" in last
    assert "<td>3.5000</td><td>3.5000</td><td>5</td><td>5</td><td>512</td>" in last
    assert "<td>bad</td><td>271</td><td>broken</td>" in last
    assert page.tags.count("figure") == 2
    for words in ("Healthy: ", "Not healthy: ", "Too little was recorded to tell"):
        assert words in page.text


def test_of_texts_that_differ_the_first_digits_are_told(runs, tmp_path):
    for name in "ab":
        shutil.copytree(runs["good"].path, tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "text_sha256": {"train": name * 64}}))
    out = tmp_path / "two.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(out)]) == 0
    (differ, _) = re.findall(r"<table>.*?</table>", Page(out).source)
    assert f'<td>"{"a" * 12}…"</td>' in differ
    assert "a" * 13 not in differ and "b" * 12 in differ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{good}", "{good}"], "is there twice; give every run once"),
        (["{good}", "{nothing}"], "is not a run directory: it has no metrics.jsonl"),
        (["{nothing}"], "is not a run directory: it has no metrics.jsonl"),
        (["{good}", "{bad}", "--html", "{nothing}/a.html"], "cannot write"),
        (["{damaged}"], "signals must be numbers by layer and name"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_in_one_line(
    runs, tmp_path, capsys, arguments, words
):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 0, "signals": {"layer_0": 3}}\n')
    places = {name: runs[name].path for name in ("good", "bad")}
    places |= {name: tmp_path / name for name in ("nothing", "damaged")}
    assert main(["report", *(word.format(**places) for word in arguments)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_text_and_attributes_are_escaped_and_half_a_surrogate_is_no_error(tmp_path):
    made = element("p", HOSTILE, element("b", "x", title=HOSTILE), "after \ud800", None)
    write_page(tmp_path / "page.html", HOSTILE, [made])
    page = Page(tmp_path / "page.html")
    assert page.tags == ["html", "head", "meta", "meta", "title", "style", "body", "p", "b"]
    assert ("title", HOSTILE) in page.attributes
    assert "after \\ud800" in page.text


@pytest.mark.slow
def test_the_page_of_gpt2_stays_below_two_megabytes(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"signal_{i}_of_a_usual_length_error_rms" for i in range(40)]
    names += ["score_maximum", "p_row_sum_error_rms", "query_weight_gradient_error_relative"]
    signals = {
        step: {
            f"layer_{i}": {name: rng.normal(size=12).tolist() for name in names} for i in range(12)
        }
        for step in range(0, 5000, 50)
    }
    losses = rng.normal(3.0, 0.1, 5000).tolist()
    run_dir = record_run(tmp_path / "run", losses, signals)
    page = write_run_page(run_dir, lambda *_: "")
    assert 500_000 < page.stat().st_size < 2_000_000
