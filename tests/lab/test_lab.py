"""The processes of a set of arms.

Most tests run a stand-in for `train.py` that ends at once as its arm says. The last test trains.
"""

import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import command
import pytest
from command import TINY, environment, lab_without_reports
from processes.forks import Fork
from processes.stand_in import rewrite, wait_until

from lowprec_attn.commands.main import EXIT_BAD_INPUT, main
from lowprec_attn.errors import RunError
from lowprec_attn.lab import RECORDS, processes, runner
from lowprec_attn.lab.experiment import Arm, Trial, load
from lowprec_attn.lab.workdir import ArmRun


def test_finished_arms_are_skipped_and_a_failing_one_is_reported_and_tried_again(lab):
    acts = {"good": "finish", "bad": "fail", "wild": "nan", "late": "finish"}
    code, output = lab(acts)
    assert code == EXIT_BAD_INPUT
    assert "good: done, validation loss 2.500" in output
    assert "wild: not finite at step 7: first in layer 1" in output  # counts as a result
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


@pytest.mark.parametrize("devices", ["", "-1", "0,,1", "0,99999999", "0+", "cpu", "0 1", "²"])
def test_devices_that_are_none_are_refused_before_anything_starts(lab, devices):
    code, output = lab({"a": "finish"}, f"--devices={devices}")
    assert (code, output.count("\n")) == (EXIT_BAD_INPUT, 1)
    assert "name GPUs as CUDA_VISIBLE_DEVICES does" in output
    assert not (lab.out / "a").exists()


def test_gpus_are_those_that_jax_finds(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert processes.gpu_slots() == []
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(RunError, match="abacus"):
        processes.gpu_slots()


def test_an_arm_that_was_killed_before_its_last_file_is_not_done(lab):
    acts = {"a": "finish", "b": "report"}
    code, output = lab(acts)
    assert code == EXIT_BAD_INPUT
    assert "b failed: exit code -9, interrupted at its end, after 1 step" in output
    (lab.out / "mended").touch()
    code, output = lab(acts)
    assert (code, re.findall(r"(\w+): .*; starts on", output)) == (0, ["b"])
    assert "b: done, validation loss 2.500" in output


def test_a_run_ends_with_the_next_command(lab, monkeypatch):
    words = ["lab", "run", "arms.toml", "--workdir", "my runs"]
    monkeypatch.setattr(sys, "argv", ["/bin/lowprec-attn", *words])
    again = "next: lowprec-attn lab run arms.toml --workdir 'my runs'"
    _, output = lab({"a": "finish", "b": "fail"})
    assert output.splitlines()[-1] == again
    (lab.out / "mended").touch()
    _, output = lab({"a": "finish", "b": "fail"})
    collect, report = output.splitlines()[-1].split(" && ")
    assert collect == f"next: lowprec-attn lab collect {lab.out} results/{lab.out.name}"
    assert report == f"lowprec-attn lab report results/{lab.out.name}"
    monkeypatch.chdir(lab.out.parent)
    there = Path("results", lab.out.name, RECORDS)
    there.parent.mkdir(parents=True)
    there.touch()  # as results/laptop in a checkout, which the command must not replace
    _, output = lab({"a": "finish", "b": "fail"})
    assert output.splitlines()[-1].endswith("lab report results/mine")


def test_what_waits_is_said_and_for_which_gpu(lab):
    _, output = lab(dict.fromkeys("abcde", "finish"), "--devices", "3,5,3")
    waiting = "2 wait until one has ended on GPU 3 (2 at a time), GPU 5: d, e"
    assert output.splitlines()[0] == waiting
    _, output = lab(dict.fromkeys("abc", "finish"), "--devices", "3,5,3")
    assert "wait until" not in output


def test_progress_names_each_arm_that_runs_once(monkeypatch, capsys, tmp_path):
    """Jobs may wait for hours before one starts, and one that is queued again starts again."""
    monkeypatch.setattr(runner, "_PROGRESS_SECONDS", -1)
    task, slot = processes.Task("a", [], tmp_path / "a.log"), processes.Slot("Slurm", {}, "job")
    kinds = ("submitted", None, "started", None, "started", None, "ended", None)
    events = (kind and processes.Event(kind, task, slot, 1, 0, 0.0, True) for kind in kinds)
    assert runner._watch({"a": ArmRun(tmp_path, "a")}, events) == {}
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("step")] == ["step 0 of a"] * 2


def test_lines_fit_the_terminal_but_for_commands(lab, monkeypatch):
    lab({"a": "nan"})
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(runner.sys.stdout, "isatty", lambda: True, raising=False)
    _, output = lab({"a": "nan"})
    *lines, following = output.splitlines()
    assert lines == ["a: not finite at step 7: first in layer", "    1"]
    assert len(following) > 40


def test_arms_share_all_their_compilations_unless_told_otherwise(tmp_path, monkeypatch):
    cache, least = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    for name in (cache, least):
        monkeypatch.delenv(name, raising=False)
    own = str(tmp_path / ".lab" / "compilations")
    assert runner._environment(tmp_path) == {cache: own, least: "0"}
    monkeypatch.setenv(least, "5")
    assert runner._environment(tmp_path) == {cache: own, least: "5"}
    monkeypatch.setenv(cache, "mine")
    assert runner._environment(tmp_path) == {}


def test_only_the_arms_asked_for_run(lab):
    acts = dict.fromkeys("abc", "finish")
    assert lab(acts, "--jobs", "1", "--arms", "c", "a")[0] == 0
    assert [(lab.out / name).exists() for name in acts] == [True, False, True]


def test_every_arm_runs_once_for_each_seed(lab):
    acts = {"a": "finish", "b": "explode"}
    head = "seeds = [5, 2]\nnegative_control = 'a'"
    code, output = lab(acts, "--jobs", "1", head=head)
    assert code == 0
    started = re.findall(r"([\w-]+): .*; starts on", output)
    assert started == ["a-seed5", "b-seed5", "a-seed2", "b-seed2"]
    assert "b-seed2: the loss exploded at step 3 (" in output  # counts as a result
    assert json.loads((lab.out / "a-seed2" / "config.json").read_text())["seed"] == 2
    definition = json.loads((lab.out / "a-seed2.json").read_text())
    assert [definition[name] for name in ("arm", "control", "seed")] == ["a", "negative", 2]
    code, output = lab(acts, "--jobs", "1", "--seeds", "2", "9", head=head)
    assert code == 0
    assert re.findall(r"([\w-]+): .*; starts on", output) == ["a-seed9", "b-seed9"]


def test_seeds_on_the_command_line_are_checked(lab):
    assert "different whole numbers" in lab({"a": "finish"}, "--seeds", "1", "1")[1]
    code, output = lab({"a": "finish"}, "--config.seed=4", head="seeds = [1]")
    assert code == EXIT_BAD_INPUT
    assert "--config.seed" in output
    assert not lab.out.exists()


def test_a_definition_of_an_earlier_version_is_read(lab):
    """It lacks arm, control and seed. Another control alone does not make it another definition."""
    assert lab({"a": "finish"})[0] == 0
    rewrite(lab.out / "a.json", lambda d: [d.pop(name) for name in ("arm", "control", "seed")])
    assert ArmRun(lab.out, "a").trial == Trial(Arm("a", {"act": "finish"}), None)
    code, output = lab({"a": "finish"}, head="positive_control = 'a'")
    assert (code, output.splitlines()[0]) == (0, "a: done, validation loss 2.500")
    assert ArmRun(lab.out, "a").trial.arm.control == "positive"


@pytest.mark.parametrize("asked", ["Ctrl-C", "SIGTERM"])
def test_a_stop_reaches_every_arm_once_and_the_same_command_continues(lab, asked):
    acts = {"a": "wait", "b": "wait", "later": "finish"}
    process = lab.start(acts, "--jobs", "2")
    logs = [lab.out / "a.log", lab.out / "b.log"]
    wait_until(lambda: all(log.exists() and "listening" in log.read_text() for log in logs))
    if asked == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        process.terminate()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [log.read_text() for log in logs] == ["listening\nsaved\n"] * 2
    assert "a: interrupted after 1 step" in output
    assert "not finished: a, b, later; the same command continues" in output
    assert not (lab.out / "later").exists()

    (lab.out / "mended").touch()
    code, output = lab(acts)
    assert code == 0
    assert output.count("; starts on") == 3
    assert "b: interrupted after 1 step; starts on" in output


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


def test_a_text_that_cannot_be_read_is_told_once_before_any_arm_starts(lab, tmp_path):
    acts, text = {"a": "finish", "b": "finish"}, tmp_path / "text"
    head = f"seeds = [1, 2]\n[shared]\ndata.path = '{text}'"
    for told in ("does not exist", "train.bin is missing"):
        code, output = lab(acts, head=head)
        assert (code, output.count("\n"), output.count(told)) == (EXIT_BAD_INPUT, 1, 1)
        assert not list(lab.out.glob("*.log"))
        text.mkdir(exist_ok=True)
    for split in ("train", "val"):
        (text / f"{split}.bin").write_bytes(bytes(2))
    assert lab(acts, head=head)[0] == 0
    shutil.rmtree(text)  # finished arms no longer need it
    assert lab(acts, head=head)[0] == 0


def test_the_built_in_text_is_no_directory_to_be_opened(lab):
    flags = ("--jobs", "1", "--config.data.path=None")
    assert lab({"a": "finish"}, *flags, head="[shared]\ndata.path = 'data/mine'")[0] == 0


def test_an_arm_that_was_killed_gives_the_records_of_an_undisturbed_one(
    tmp_path, compilations, text, monkeypatch, capsys
):
    fields = {**TINY, "model.layers": 1, "attention.implementation": "tiled", "steps": 300}
    fields["data.path"] = text
    fields |= {"checkpoint_every": 30, "diagnostics_every": 0, "eval_every": 0}
    changes = [f"--config.{name}={value}" for name, value in fields.items()]
    definition = tmp_path / "seeds.toml"
    arm = "[arms.flash]\nattention.numerics = 'flash'\n"
    definition.write_text(f"config = 'configs/gpt2_bf16.py:tiny'\nseeds = [1]\n{arm}")
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    words = list(map(str, ["run", definition, "--workdir", disturbed, "--jobs", "1", *changes]))

    process = Fork(lab_without_reports, words, environment=environment(compilations))
    process.wait_for_lines(1)
    (arm,) = re.findall(r"process (\d+)", process.printed())
    wait_until((disturbed / "flash-seed1" / "checkpoints" / "00000030.json").exists)
    os.kill(int(arm), signal.SIGKILL)
    output = "".join(command.finish(process, EXIT_BAD_INPUT))
    assert "flash-seed1 failed: exit code -9, interrupted after" in output

    monkeypatch.setenv("PYTHONPATH", "")  # so that it is restored
    for name, value in environment(compilations).items():
        monkeypatch.setenv(name, value)
    assert lab_without_reports(words) == 0
    assert "flash-seed1: done, validation loss" in capsys.readouterr().out
    assert re.search(r"resuming at step [1-9]", (disturbed / "flash-seed1.log").read_text())
    (trial,) = load(definition).trials
    arguments = [*load(definition).arguments(trial), *changes, f"--workdir={whole}"]
    command.finish(command.launch(environment(compilations), arguments))
    for name in ("metrics.jsonl", "data_order.txt"):
        assert (disturbed / "flash-seed1" / name).read_bytes() == (whole / name).read_bytes()


def test_damage_to_any_file_is_told(lab, capsys):
    lab({"a": "finish", "b": "nan"}, "--jobs", "2")
    names = ("a.json", "a/config.json", "a/environment.json", "a/summary.json", "b/failure.json")
    for name in (*names, "a/metrics.jsonl", "a/throughput.jsonl"):
        path = lab.out / name
        whole = path.read_bytes()
        for damage in (b"{}\n", b"[5]\n", b"[" * 9999 + b"\n"):
            path.write_bytes(damage)
            assert main(["lab", "collect", str(lab.out), str(lab.out / "results")]) == 1
            told = capsys.readouterr().err
            assert str(path) in told or "a and b differ in config" in told, (name, damage, told)
        path.write_bytes(whole)
    assert main(["lab", "collect", str(lab.out), str(lab.out / "results")]) == 0
