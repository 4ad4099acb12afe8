"""Runs that go back to a checkpoint by themselves, undisturbed and disturbed."""

import json
import os
import signal
import weakref

import numpy as np
import pytest
from tiny import tiny_config

from benchmarks import delta_bias
from lowprec_attn.data.order import OrderRecord, SeededOrder
from lowprec_attn.diagnostics.examine import run_layers
from lowprec_attn.errors import UserError
from lowprec_attn.runs import metrics
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.instability.rollbacks import RollbackRecord
from lowprec_attn.runs.pages import figures, style
from lowprec_attn.runs.pages.run import write_run_page
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training import announcement
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.loop import EXIT_BROKEN, EXIT_DONE, Loop
from lowprec_attn.training.resources import heap
from lowprec_attn.training.run import train

RECORDS = ("metrics.jsonl", "data_order.txt", "rollbacks.jsonl", "abandoned/1.jsonl")


class KilledError(Exception):
    """Stands for kill -9: nothing is saved."""


@pytest.fixture(scope="module", autouse=True)
def no_figures(compiled_once):
    """Skips the figures of runs, which share compiled programs as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            announcement, "write_run_page", lambda run_dir, efficiency: run_dir.page
        )  # drawing takes seconds
        yield


@pytest.fixture(scope="module")
def run(text):
    """`run(workdir, **changes)` trains until float8 scores overflow, then goes on with bfloat16."""

    def run(workdir, **changes):
        fields = {
            "optimizer__peak_lr": 0.5,
            "optimizer__warmup_steps": 40,
            "attention__points": {"scores": "float8_e4m3fn"},
            "attention__implementation": "tiled",
            "data__path": str(text),
            "model__layers": 1,
            "devices": 1,
            "steps": 48,
            "diagnostics_every": 12,
            "checkpoint_every": 4,
            "checkpoints_kept": 1,
            "eval_every": 0,
            "rollback__tries": 3,
            "rollback__steps": 6,
            "rollback__after": 1000,
            "rollback__points": {"scores": "bfloat16"},
        }
        config = tiny_config(**(fields | changes))
        return train(train_settings(config), config, workdir)

    return run


SETTLE = heap.settle  # before the suite turns it off


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    """The directory of an undisturbed run, and how many loops were alive as each began."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    loops, alive, dispatch = [], [], Loop._dispatch

    def watched(self, step):
        if all(known() is not self for known in loops):
            alive.append(sum(known() is not None for known in loops))
            loops.append(weakref.ref(self))
        dispatch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_dispatch", watched)
        patch.setattr(heap, "settle", SETTLE)
        assert run(workdir, checkpoints_kept=100) == EXIT_DONE
    return workdir, alive


@pytest.fixture(scope="module")
def whole(undisturbed):
    """The directory of an undisturbed run, which has kept all checkpoints."""
    return undisturbed[0]


def rollbacks(workdir):
    return [json.loads(line) for line in (workdir / "rollbacks.jsonl").read_text().splitlines()]


def losses(path):
    return {r["step"]: r["loss"] for r in metrics.read(path) if "loss" in r}


def test_a_loop_that_went_back_leaves_the_device(undisturbed):
    """Otherwise its parameters and moments would stay in memory during the next loop."""
    assert undisturbed[1] == [0, 0]


def test_a_run_goes_back_leaves_out_batches_and_ends(whole):
    (rollback,) = rollbacks(whole)
    to, detected = rollback["to"], rollback["detected"]
    assert rollback["reason"] == "not finite"
    assert to == (rollback["onset"] - 6) // 4 * 4 > 0
    assert rollback["skipped"] == detected + 1 - to
    kept, abandoned = losses(whole / "metrics.jsonl"), losses(whole / "abandoned" / "1.jsonl")
    assert list(kept) == list(range(48))
    assert list(abandoned) == list(range(to, detected + 1))
    assert all(abs(loss) < float("inf") for loss in kept.values())
    assert not abs(abandoned[detected]) < float("inf")
    lines = (whole / "data_order.txt").read_text().splitlines()
    assert len(lines) == 48
    assert not (whole / "failure.json").exists()


def test_a_checkpoint_has_the_arithmetic_that_led_to_it(whole):
    """The last checkpoint has bfloat16 scores; float8 would overflow there."""
    (rollback,) = rollbacks(whole)
    for last_step, scores in ((None, "bfloat16"), (rollback["to"], "float8_e4m3fn")):
        (layer,) = run_layers.load(whole, last_step=last_step)
        assert [str(group.numerics.scores) for group in layer.own] == [scores]
        assert np.isfinite(np.asarray(layer.do, np.float32)).all()
    step, errors = delta_bias.measure(whole, draws=2)
    assert step == 48 and np.isfinite(errors.rms).all()


def test_measurements_are_joined_across_steps_and_the_rollback(whole):
    """Errors add up and directions are compared; the tests below repeat them after kills."""
    records = metrics.read(whole / "metrics.jsonl")
    signals = {r["step"]: r["signals"]["layer_0"] for r in records if "signals" in r}
    assert len(signals) >= 4
    steps = sorted(signals)
    errors = [32 * np.array(signals[step]["delta_error_mean"]) for step in steps]
    sums = [signals[step]["delta_error_cumulative"] for step in steps]
    np.testing.assert_allclose(sums, np.cumsum(errors, axis=0), rtol=1e-12)
    for name in ("outer_product_similarity_across_steps", "common_direction_across_steps"):
        assert [name in signals[step] for step in steps] == [step > 0 for step in steps]
        sizes = np.abs([signals[step][name] for step in steps[1:]])
        assert np.all((sizes > 1e-4) & (sizes < 1 + 1e-6))


def test_the_order_says_which_batch_each_step_saw(whole, text):
    (rollback,) = rollbacks(whole)
    count = json.loads((text / "meta.json").read_text())["splits"]["train"]["tokens"]
    lines = (whole / "data_order.txt").read_text().splitlines()
    for step, line in enumerate(lines):
        batch = step if step < rollback["to"] else step + rollback["skipped"]
        expected = SeededOrder(42, 8, count, 32)(batch)
        assert line == ",".join(map(str, expected.tolist()))


def test_a_run_resumed_from_it_leaves_out_the_same_batches(run, whole, text, tmp_path):
    (rollback,) = rollbacks(whole)
    for name, source, steps in (("first", whole, 50), ("second", tmp_path / "first", 51)):
        fields = {"resume_from": str(source), "attention__points": {"scores": "bfloat16"}}
        fields |= {"diagnostics_every": 0}
        assert run(tmp_path / name, steps=steps, **fields) == EXIT_DONE
    count = json.loads((text / "meta.json").read_text())["splits"]["train"]["tokens"]
    lines = (tmp_path / "second" / "data_order.txt").read_text().splitlines()
    draw = SeededOrder(42, 8, count, 32)
    for step in (47, 48, 49, 50):
        assert lines[step] == ",".join(map(str, draw(step + rollback["skipped"]).tolist()))


def test_the_page_shows_what_was_abandoned(whole, tmp_path):
    page = write_run_page(RunDir(whole), lambda *_: "", tmp_path / "page.html").read_text()
    assert "rollback: the loss was not finite" in page
    history = History.read(RunDir(whole))
    (axis,) = figures.loss(history, judge(history)).axes
    assert style.THRESHOLD in [line.get_color() for line in axis.lines]


def kill_in(patch, owner, name, when=lambda *args: True, after=False):
    """Makes the process end in a function, before the function acts or after it is done."""
    original = getattr(owner, name)

    def killed(self, *args):
        if not when(*args):
            return original(self, *args)
        if after:
            original(self, *args)
        raise KilledError

    patch.setattr(owner, name, killed)


def test_a_run_that_is_killed_at_any_instant_comes_to_the_same_end(run, whole, tmp_path):
    (rollback,) = rollbacks(whole)
    workdir = tmp_path / "run"
    discards = []

    def some_are_abandoned(unwanted):
        discards.append(unwanted)
        return (workdir / "rollbacks.jsonl").exists()

    kills = [
        (Loop, "_before", lambda step: step == rollback["detected"], False),
        (RollbackRecord, "add", lambda _: True, False),
        (RollbackRecord, "_write", lambda _: True, False),  # the metrics have already been kept
        (RollbackRecord, "add", lambda _: True, True),
        (Checkpoints, "discard", some_are_abandoned, True),
        (OrderRecord, "truncate", lambda _: True, True),
        (Loop, "_before", lambda step: step == rollback["to"] + 2, False),
        (Loop, "_before", lambda step: step == rollback["to"] + 7, False),
    ]
    for owner, name, when, after in kills:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
            kill_in(patch, owner, name, when, after)
            run(workdir)
    assert run(workdir) == EXIT_DONE
    for name in RECORDS:
        assert (workdir / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_a_killed_run_with_qk_norm_comes_to_the_same_end(run, tmp_path):
    """Every run of test_train_ends.py has `qk_clip`."""
    fields = {"rollback__tries": 0, "steps": 10, "attention__points": {}, "diagnostics_every": 0}
    fields |= {"model__qk_norm": True}
    assert run(tmp_path / "whole", **fields) == EXIT_DONE
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        kill_in(patch, Loop, "_before", lambda step: step == 6)
        run(tmp_path / "killed", **fields)
    assert run(tmp_path / "killed", **fields) == EXIT_DONE
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert killed.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_checkpoints_are_removed_one_by_one(run, whole, tmp_path):
    """A kill between removals leaves undone checkpoints, which the next start removes."""
    from lowprec_attn.runs import checkpoint

    workdir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        kill_in(patch, RollbackRecord, "add", after=True)
        run(workdir)
    (rollback,) = rollbacks(workdir)
    saved = sorted(int(path.stem) for path in (workdir / "checkpoints").glob("*.json"))
    undone = [step for step in saved if step > rollback["to"]]
    assert undone
    assert rollback["to"] in saved
    removed, remove = [], checkpoint._remove

    def once(path):
        if removed:
            raise KilledError
        removed.append(path)
        remove(path)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError):
        patch.setattr(checkpoint, "_remove", once)
        run(workdir)
    assert run(workdir) == EXIT_DONE
    for name in RECORDS:
        assert (workdir / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_a_request_to_stop_at_the_rollback_is_kept(run, whole, tmp_path, capfd):
    workdir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        add = RollbackRecord.add

        def stop(self, rollback):
            os.kill(os.getpid(), signal.SIGTERM)
            add(self, rollback)

        patch.setattr(RollbackRecord, "add", stop)
        assert run(workdir) == EXIT_DONE
    assert "stopped by a signal" in capfd.readouterr().out
    assert not (workdir / "summary.json").exists()
    assert run(workdir) == EXIT_DONE
    for name in RECORDS:
        assert (workdir / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_after_the_last_try_it_stops(run, tmp_path):
    """With unchanged arithmetic the scores overflow again."""
    workdir = tmp_path / "run"
    unchanged = {"rollback__points": {}, "rollback__tries": 2, "steps": 400}
    assert run(workdir, **unchanged) == EXIT_BROKEN
    first, second = rollbacks(workdir)
    assert first["to"] <= second["to"]
    failure = json.loads((workdir / "failure.json").read_text())
    assert failure["what"] == "the attention output"
    assert run(workdir, **unchanged) == EXIT_BROKEN
    assert json.loads((workdir / "failure.json").read_text()) == failure


def test_a_loss_in_excess_is_rolled_back_too(run, tmp_path):
    wild = {
        "optimizer__peak_lr": 3.0,
        "optimizer__end_lr": 3.0,
        "optimizer__warmup_steps": 2,
        "attention__points": {},
        "rollback__points": {},
        "rollback__steps": 0,
        "rollback__after": 8,
        "rollback__tries": 1,
        "diagnostics_every": 0,
    }
    assert run(tmp_path / "run", **wild) == EXIT_BROKEN
    (rollback,) = rollbacks(tmp_path / "run")
    assert rollback["reason"] == "excess"
    assert rollback["detected"] == rollback["onset"] + 7
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert "the loss exploded at step" in failure["message"]
    assert failure["step"] == failure["explosion"] + 9


BAD = {
    "rollback.steps": ({"rollback__steps": -1}, "0 or more, got -1"),
    "rollback.after": ({"rollback__after": 0}, "1 or more, got 0"),
    "rollback.tries": ({"rollback__tries": -1}, "0 or more, got -1"),
    "rollback.numerics": ({"rollback__numerics": "flahs"}, "unknown numerics 'flahs'"),
    "rollback.points": ({"rollback__points": {"scors": "float32"}}, "scors"),
    "checkpoint_every": ({"checkpoint_every": 0}, "1 or more beside rollback.tries, got 0"),
    "stop_exploded_after": ({"stop_exploded_after": 100}, "None beside rollback.tries, got 100"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_named(name):
    changes, words = BAD[name]
    with pytest.raises(UserError, match=name) as error:
        train_settings(tiny_config(**({"rollback__tries": 3} | changes)))
    assert words in str(error.value)


def test_the_arithmetic_after_a_rollback_is_that_of_every_head():
    settings = train_settings(
        tiny_config(
            rollback__tries=3,
            attention__layers={1: {"points": {"scores": "float16"}}},
            rollback__points={"saved_output": "float32"},
        )
    )
    for before, after in zip(
        settings.attention.layers, settings.rollback.attention.layers, strict=True
    ):
        (before,), (after,) = before, after
        assert after.numerics == before.numerics.replace(saved_output="float32")
    preset = train_settings(tiny_config(rollback__tries=3, rollback__numerics="exact"))
    assert {len(layer) for layer in preset.rollback.attention.layers} == {1}
