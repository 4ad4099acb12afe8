"""The checkpoint that a run goes back to, and the checkpoints that a rollback undoes."""

import pytest

from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.instability.rollbacks import Rollback, RollbackRecord, read, skipped, target
from lowprec_attn.runs.run_dir import RunDir

FIRST = Rollback(to=10, onset=18, detected=24, skipped=15, reason="excess")
SECOND = Rollback(to=20, onset=33, detected=33, skipped=14, reason="not finite")

TARGETS = [
    # onset, steps back, period, first step -> target
    ((100, 10, 20, 0), 80),
    ((110, 10, 20, 0), 100),
    ((109, 10, 20, 0), 80),
    ((109, 0, 20, 0), 100),
    ((5, 10, 20, 0), 0),
    ((33, 10, 20, 27), 27),  # after a resume from another run
]


@pytest.mark.parametrize(("arguments", "step"), TARGETS)
def test_the_target_is_a_scheduled_checkpoint_early_enough(arguments, step):
    assert target(*arguments) == step


@pytest.fixture
def record(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text("".join(f'{{"step": {s}, "loss": 3.0}}\n' for s in range(40)))
    return RollbackRecord(run_dir)


def test_a_rollback_is_recorded_with_what_it_undoes(record, tmp_path):
    record.add(FIRST)
    record.add(SECOND)
    assert read(tmp_path / "rollbacks.jsonl") == [FIRST, SECOND]
    assert RollbackRecord(RunDir(tmp_path)).rollbacks == [FIRST, SECOND]
    assert skipped(record.rollbacks) == 29
    undone = (tmp_path / "abandoned" / "2.jsonl").read_text().splitlines()
    assert undone[0] == '{"step": 20, "loss": 3.0}'
    assert len(undone) == 20
    assert record.fingerprint == Fingerprint.of(tmp_path / "rollbacks.jsonl")


def test_checkpoints_that_do_not_know_a_rollback_are_undone(record):
    def known():
        return {"rollbacks.jsonl": record.fingerprint}

    none = {}
    record.add(FIRST)
    one = known()
    record.add(SECOND)
    two = known()
    cases = [(10, none, False), (15, none, True), (20, one, False), (25, one, True)]
    for step, files, undone in [*cases, (25, two, False), (10, one, False), (25, none, True)]:
        assert record.abandoned(step, files) is undone, (step, files)


def test_a_run_that_starts_before_a_rollback_forgets_it(record, tmp_path):
    record.add(FIRST)
    record.add(SECOND)
    for step, kept in ((20, [FIRST, SECOND]), (19, [FIRST]), (0, [])):
        record.keep_until(step)
        assert read(tmp_path / "rollbacks.jsonl") == record.rollbacks == kept


@pytest.mark.parametrize("line", ["{", '{"to": 1}', "7"])
def test_a_file_that_holds_no_rollbacks_is_named(tmp_path, line):
    (tmp_path / "rollbacks.jsonl").write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"rollbacks\.jsonl does not hold rollbacks"):
        RollbackRecord(RunDir(tmp_path))


def test_checkpoints_that_a_rollback_may_need_stay_and_others_go(tmp_path):
    def steps():
        return sorted(int(path.stem) for path in tmp_path.glob("*.json"))

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.newest(99) is None
        for step, keep_from in ((1, None), (2, 1), (3, 2), (4, 2)):
            checkpoints.save(step, {"a": 1}, {}, {}, keep_from)
        checkpoints.wait()
        assert steps() == [2, 3, 4]
        assert (checkpoints.newest(3), checkpoints.newest(99), checkpoints.newest(1)) == (
            3,
            4,
            None,
        )
        checkpoints.discard(lambda step, records: step > 2)
        assert steps() == [2]
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00000002-0"]
