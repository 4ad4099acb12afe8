"""Sets of arms: their definition, their processes, and what is collected and reported of them.

Most tests run a stand-in for `train.py` that ends at once, as its arm says; the last one trains.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from command import ROOT, TINY, environment

from lowprec_attn.commands import config
from lowprec_attn.commands.main import EXIT_BAD_INPUT, main
from lowprec_attn.errors import RunError
from lowprec_attn.lab import experiment, figure, processes, records, runner, table
from lowprec_attn.training.config import train_settings

FIRST_SIGHT = ROOT / "configs" / "first_sight.toml"

# Writes what the trainer writes, as far as the lab reads it, and then does what `config.act` says.
STAND_IN = """
import json, os, pathlib, signal, sys, time
words = [word.lstrip("-").removeprefix("config.").split("=", 1) for word in sys.argv[1:]]
config = dict(words)
run = pathlib.Path(config.pop("workdir"))
run.mkdir(exist_ok=True)
same = ("versions", "backend", "device_kind", "device_count", "commit")
(run / "config.json").write_text(json.dumps(config))
(run / "environment.json").write_text(json.dumps([dict.fromkeys(same, "x")]))
(run / "data_order.txt").write_text("1,2\\n3,4\\n")
(run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\\n')
(run / "throughput.jsonl").write_text('{"step": 0, "seconds": 1.0}\\n')
act = config["act"]
begin = time.monotonic()
if act == "fail" and not (run.parent / "mended").exists():
    sys.exit("\\n".join(f"line {i} of the traceback" for i in range(9)))
if act == "nan":
    (run / "failure.json").write_text('{"step": 7, "message": "first in layer 1"}')
    sys.exit(3)
if act == "wait" and not (run.parent / "mended").exists():
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    print("listening", flush=True)
    time.sleep(60)
if act == "slow":
    time.sleep(0.5)
(run / "summary.json").write_text('{"val_loss": 2.5}')
places = {"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "begin": begin, "end": time.monotonic()}
(run / "places.json").write_text(json.dumps(places))
"""


@pytest.fixture
def lab(tmp_path, monkeypatch, capsys):
    """`lab(acts, *options)` runs one stand-in per act, named by its key; (exit code, output)."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "unused")
    definition, trainer, out = tmp_path / "arms.toml", tmp_path / "stand_in.py", tmp_path / "out"
    trainer.write_text(STAND_IN)
    stand_in = (sys.executable, str(trainer))
    monkeypatch.setattr(runner, "TRAIN", stand_in)
    code = (
        "import sys; from lowprec_attn.lab import runner; from lowprec_attn.commands.main import "
        f"main; runner.TRAIN = {stand_in!r}; sys.exit(main(sys.argv[1:]))"
    )

    def words(acts, *options):
        arms = "".join(f"[arms.{name}]\nact = '{act}'\n" for name, act in acts.items())
        definition.write_text(f"config = 'some.py'\n{arms}")
        words = ["lab", "run", definition, "--workdir", out, *options]
        return [str(word) for word in words]

    def run(acts, *options):
        code = main(words(acts, *(options or ("--jobs", 2))))
        return code, "".join(capsys.readouterr())

    def start(acts, *options):
        command = [sys.executable, "-c", code, *words(acts, *options)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    run.out, run.start = out, start
    return run


def wait_until(holds):
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The definition.


def settings_of(arm, defined):
    """The settings that the trainer makes of an arm's arguments."""
    name, *fields = defined.arguments(arm)
    return train_settings(config.load(name.removeprefix("--config="), fields))


def test_the_arms_of_first_sight_differ_in_their_arithmetic_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    defined = experiment.load(FIRST_SIGHT)
    arms = {arm.name: settings_of(arm, defined) for arm in defined.arms}
    heads = {name: settings.attention.layers[0][0] for name, settings in arms.items()}
    assert len(set(heads.values())) == len(arms) == 8
    for settings in arms.values():
        assert settings.attention.implementation == "gpu"
        assert settings.batch_size * settings.model.context == 32_768
        groups = [group for layer in settings.attention.layers for group in layer]
        assert {group.numerics.kv_block for group in groups} == {128}
    rest = [
        {k: v for k, v in vars(settings).items() if k != "attention"} for settings in arms.values()
    ]
    assert all(other == rest[0] for other in rest)
    changed = heads["probe_float32_pv_saved"].numerics
    assert (str(changed.pv), str(changed.saved_output)) == ("float32", "float32")
    assert changed.replace(pv="bfloat16", saved_output="same") == heads["probe"].numerics


def test_flags_reach_every_arm_but_not_what_distinguishes_them():
    defined = experiment.load(FIRST_SIGHT).with_flags(
        ["--config.steps=7", "--config.data.path=a=b"]
    )
    for arm in defined.arms:
        assert "--config.steps=7" in defined.arguments(arm)
        assert "--config.data.path=a=b" in defined.arguments(arm)
        assert "--config.steps=3500" not in defined.arguments(arm)
    with pytest.raises(experiment.ExperimentError, match="arm probe sets it"):
        defined.with_flags(["--config.attention.numerics=exact"])
    with pytest.raises(experiment.ExperimentError, match=r"'--config\.steps' is not"):
        defined.with_flags(["--config.steps"])
    with pytest.raises(experiment.ExperimentError, match="no arm 'flahs'; arms are probe, "):
        defined.select(["flahs"])


def test_a_title_says_what_an_arm_computes():
    titles = [arm.title for arm in experiment.load(FIRST_SIGHT).arms]
    assert titles[0] == "probe"
    assert "probe, pv=float32, saved_output=float32" in titles
    assert experiment.Arm("base", {}).title == "base"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config = ", "not TOML"),
        ("[arms.a]", "config must name a file, got None"),
        ("config = 'c.py'", "no arms"),
        ("config = 'c.py'\nsteps = 3\n[arms.a]", "unknown field 'steps'"),
        ("config = 'c.py'\n[arms.'a/b']", "'a/b'"),
        ("config = 'c.py'\n[arms]\na = 3", "a must be a table of fields, got 3"),
        ("config = 'c.py'\n[arms.a]\nx.y = [1]", r"arms.a.x.y must be .* got \[1\]"),
    ],
)
def test_a_wrong_definition_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "arms.toml"
    path.write_text(text)
    with pytest.raises(experiment.ExperimentError, match=message) as error:
        experiment.load(path)
    assert "\n" not in str(error.value)


# The processes.


def test_finished_arms_are_skipped_and_a_failing_one_is_reported_and_tried_again(lab):
    acts = {"good": "finish", "bad": "fail", "wild": "nan", "late": "finish"}
    code, output = lab(acts)
    assert code == EXIT_BAD_INPUT
    assert "good: done, validation loss 2.500" in output
    assert "wild: not finite at step 7: first in layer 1" in output  # a result, not an error
    assert "late: done" in output
    error = output[output.index("error: ") :]
    assert "bad failed: exit code 1" in error
    assert "bad.log" in error
    assert error.count("of the traceback") == 5
    assert "line 8 of the traceback" in error
    assert "wild" not in error

    (lab.out / "mended").touch()
    code, output = lab(acts)
    assert code == 0
    assert re.findall(r"(\w+): .*; starts on", output) == ["bad"]
    assert "good: done" in output
    log = (lab.out / "bad.log").read_text()
    assert log.count("line 0 of") == 1, "the log of the first attempt is kept"

    code, output = lab(acts)
    assert code == 0
    assert "starts on" not in output


def test_every_gpu_has_one_arm_at_a_time_and_all_are_used(lab):
    acts = dict.fromkeys("abcde", "slow")
    code, _ = lab(acts, "--devices", "3,5")
    assert code == 0
    places = [json.loads((lab.out / name / "places.json").read_text()) for name in acts]
    assert {place["device"] for place in places} == {"3", "5"}
    for device in ("3", "5"):
        mine = sorted((p["begin"], p["end"]) for p in places if p["device"] == device)
        assert len(mine) >= 2
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))


def test_gpus_are_those_that_jax_finds(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert processes.gpu_slots() == []
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(RunError, match="abacus"):
        processes.gpu_slots()


def test_only_the_arms_asked_for_run(lab):
    acts = dict.fromkeys("abc", "finish")
    assert lab(acts, "--jobs", "1", "--arms", "c", "a")[0] == 0
    assert [(lab.out / name).exists() for name in acts] == [True, False, True]


def test_ctrl_c_reaches_every_arm_once_and_the_same_command_continues(lab):
    acts = {"a": "wait", "b": "wait", "later": "finish"}
    process = lab.start(acts, "--jobs", "2")
    logs = [lab.out / "a.log", lab.out / "b.log"]
    wait_until(lambda: all(log.exists() and "listening" in log.read_text() for log in logs))
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [log.read_text() for log in logs] == ["listening\nsaved\n"] * 2
    assert "a: interrupted after 1 steps" in output
    assert "not finished: a, b, later; the same command continues" in output
    assert not (lab.out / "later").exists()

    (lab.out / "mended").touch()
    code, output = lab(acts)
    assert code == 0
    assert output.count("; starts on") == 3
    assert "b: interrupted after 1 steps; starts on" in output


def test_arms_that_outlive_their_lab_are_noticed(lab):
    process = lab.start({"a": "wait"}, "--jobs", "1")
    log = lab.out / "a.log"
    wait_until(lambda: log.exists() and "listening" in log.read_text())
    process.kill()
    output, _ = process.communicate(timeout=60)
    pid = int(re.search(r"\(process (\d+)\)", output)[1])
    code, output = lab({"a": "wait"})
    assert code == EXIT_BAD_INPUT
    assert "is in use by another `lab run`, or by arms that go on" in output
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: "saved" in log.read_text())
    (lab.out / "mended").touch()
    wait_until(lambda: lab({"a": "wait"})[0] == 0)


def test_a_started_arm_keeps_its_definition(lab):
    assert lab({"a": "finish", "b": "fail"})[0] == 1
    code, output = lab({"a": "slow", "b": "fail"})
    assert code == 1
    assert "arm a" in output
    assert "(act: finish -> slow)" in output
    code, output = lab({"a": "finish"}, "--jobs", "1", "--config.steps=9")
    assert "(steps: (absent) -> 9)" in output


def test_bad_arguments_give_one_line(lab, capsys):
    assert "--jobs must be at least 1, got 0" in lab({"a": "finish"}, "--jobs", "0")[1]
    with pytest.raises(SystemExit):
        lab({"a": "finish"}, "--steps=3")
    assert "unrecognized arguments: --steps=3" in capsys.readouterr().err


# The comparison.


def rewrite(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


DIFFERENCES = {
    "config": (
        lambda run: rewrite(run / "config.json", lambda c: c.update(seed=1)),
        "a and b differ in config.seed: (absent) and 1",
    ),
    "batches": (
        lambda run: (run / "data_order.txt").write_text("1,2\n3,5\n"),
        "a and b were not given the same batches",
    ),
    "versions": (
        lambda run: rewrite(run / "environment.json", lambda e: e[0].update(versions="y")),
        "versions differs: x (a), y (b)",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_arms_that_differ_in_more_than_their_overrides_are_not_compared(lab, tmp_path, case):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    change, message = DIFFERENCES[case]
    change(lab.out / "b")
    code, output = lab(acts)
    assert code == 1
    assert message in output
    assert main(["lab", "collect", str(lab.out), str(tmp_path / "results")]) == 1
    assert not (tmp_path / "results").exists()


def test_an_arm_that_ended_earlier_has_seen_the_same_batches(lab):
    acts = {"a": "finish", "b": "slow"}
    assert lab(acts)[0] == 0
    (lab.out / "b" / "data_order.txt").write_text("1,2\n3")  # the second line is half written
    assert lab(acts)[0] == 0


# Records and report.

LAYERS = 12
STEPS = range(0, 101, 10)


def score(step, layer):
    """Distinct for every step and layer; layer 1 grows most."""
    return (step + 1.0) * (10.0 if layer == 1 else 1.0) + layer


def metrics_lines(last, failed=False):
    """As the trainer writes them: sorted keys, and texts for what is not finite."""
    for step in range(last):
        yield {"step": step, "loss": "nan" if failed and step == last - 1 else 3.0, "lr": 0.1}
    for step in [s for s in STEPS if s <= last]:
        layers = {
            f"layer_{i}": {name: [0.123456, "-inf"] for name in (*records.SIGNALS, "delta_rms")}
            | {"score_maximum": [score(step, i), 0.0], "query_weight_norm": [1.0, 2.0 + i]}
            for i in range(LAYERS)
        }
        yield {"step": step, "signals": dict(sorted(layers.items()))}
    yield from ({"step": step, "val_loss": loss} for step, loss in val_losses(last).items())


def val_losses(last):
    """Of the arm that ends at step 57: up by 0.75 meanwhile, and back again."""
    return {20: 3.0, 40: 3.75, last: 2.25} if last == 57 else {50: 3.0, last: 2.25}


@pytest.fixture
def collected(lab, tmp_path):
    """Records of an arm with 12 layers and of one whose loss was not finite at step 57."""
    lab({"calm": "finish", "wild": "nan"})
    for name, last in (("calm", 100), ("wild", 57)):
        lines = [json.dumps(line) + "\n" for line in metrics_lines(last, name == "wild")]
        (lab.out / name / "metrics.jsonl").write_text("".join(lines))
    rewrite(lab.out / "wild" / "failure.json", lambda failure: failure.update(step=57))
    results = tmp_path / "results"
    assert main(["lab", "collect", str(lab.out), str(results)]) == 0
    return results


def test_records_keep_what_a_reader_needs(collected):
    header, *lines = map(json.loads, (collected / "wild.jsonl").read_text().splitlines())
    assert header["arm"] == "wild"
    assert header["overrides"] == {"act": "nan"}
    assert header["config"]["act"] == "nan"
    assert header["environment"][0]["versions"] == "x"
    assert header["failure"]["step"] == 57
    losses = [line["step"] for line in lines if "loss" in line]
    assert losses == [0, 10, 20, 30, 40, *range(47, 57)]
    assert [line["loss"] for line in lines if "loss" in line][-1] == "nan"
    signals = next(line["signals"] for line in lines if "signals" in line)
    assert set(signals["layer_3"]) == set(records.SIGNALS)
    assert signals["layer_3"]["repeated_maxima"] == [0.1235, "-inf"]


def test_the_table_reads_the_layers_by_their_number(collected):
    text = table.markdown(records.read_all(collected), layer=10, steps=[50, 100])
    calm, wild = (line for line in text.splitlines() if line[:6] in ("| act=", "| calm", "| wild"))
    at_50, at_100 = score(50, 10), score(100, 10)
    others = score(100, 1)
    cells = f"{at_50:.0f} | {at_100:.0f} | {others:.0f} | 12.0 | 2.250 | none | no |"
    assert calm == f"| act=finish | {cells}"
    others = score(50, 1)
    assert wild == f"| act=nan | {at_50:.0f} | – | {others:.0f} | 12.0 | 2.250 | 0.75 at 40 | 57 |"


def test_the_figure_has_a_panel_an_arm_and_a_line_a_layer(collected):
    arms = records.read_all(collected)
    panels = figure.score_figure(arms, layer=1).axes
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
    assert "| arm | 10 | 30 | 40 | 60 | 70 | 90 | 100 |" in text
    assert main(["lab", "report", str(collected), "--layer", "12"]) == 1
    assert "--layer must be 0 to 11, got 12" in capsys.readouterr().err
    assert main(["lab", "report", str(collected), "--figure", "/nonexistent/a.png"]) == 1
    assert "cannot write /nonexistent/a.png" in capsys.readouterr().err
    assert main(["lab", "report", str(tmp_path)]) == 1
    assert "holds no records of arms" in capsys.readouterr().err


def test_a_value_that_is_not_a_number_is_the_largest(collected):
    (record,) = [r for r in records.read_all(collected) if r.arm.name == "calm"]
    record.signals[10][0]["score_maximum"][:] = [1.0, float("nan")]
    assert record.largest("score_maximum", 10, 0) != record.largest("score_maximum", 10, 0)


def test_the_committed_table_is_that_of_the_committed_records(tmp_path, capsys):
    results = ROOT / "results" / "first_sight"
    for path in results.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    assert main(["lab", "report", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_text() == (results / "table.md").read_text()
    page = (results / "README.md").read_text()
    rows = [line for line in (results / "table.md").read_text().splitlines() if line[:1] == "|"]
    assert "\n".join(rows) in page


# With the trainer.


def test_arms_that_were_stopped_or_killed_give_the_records_of_undisturbed_ones(
    tmp_path, compilations, text
):
    fields = {**TINY, "model.layers": 1, "attention.implementation": "tiled", "steps": 600}
    fields["data.path"] = text
    fields |= {"checkpoint_every": 100, "diagnostics_every": 300, "eval_every": 300}
    arms = ("flash", "probe_dynamic_max")

    def start(out):
        options = ["--workdir", out, "--jobs", "2", "--arms", *arms]
        command = [sys.executable, "-m", "lowprec_attn", "lab", "run", FIRST_SIGHT, *options]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        return subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=environment(compilations),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(process, code=0):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == code, output
        return output

    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    process = start(disturbed)
    killed = int(re.search(r"flash.*process (\d+)", process.stdout.readline())[1])
    wait_until(lambda: any((disturbed / "flash").glob("checkpoints/*.json")))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: any((disturbed / "probe_dynamic_max").glob("checkpoints/*.json")))
    process.send_signal(signal.SIGTERM)
    output = finish(process, EXIT_BAD_INPUT)
    assert re.search(r"probe_dynamic_max: interrupted after \d+ steps", output)
    assert "flash failed: exit code -9, interrupted after" in output

    output = finish(start(disturbed))
    assert output.count(": done, validation loss") == 2
    for arm in arms:
        assert "resuming at step" in (disturbed / f"{arm}.log").read_text()
    assert finish(start(whole)).count("; starts on") == 2
    for name in ("metrics.jsonl", "data_order.txt"):
        for arm in arms:
            assert (disturbed / arm / name).read_bytes() == (whole / arm / name).read_bytes()
