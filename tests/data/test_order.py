"""The order of batches is a pure function of seed and step; and the record of the order."""

import hashlib
import resource

import numpy as np
import pytest

from lowprec_attn.data.order import OrderRecord, SeededOrder
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import DiskError, Fingerprint

GOLDEN = [854, 480, 664, 796]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data_order.txt"


def test_the_order_never_changes():
    # Runs are resumed and compared across versions. A new value here would break all of them.
    starts = SeededOrder(42, 4, 1000, 16)(7)
    assert starts.tolist() == GOLDEN and starts.dtype == np.int64


def test_every_step_and_seed_draws_anew():
    orders = [SeededOrder(seed, 8, 10**9, 16) for seed in range(10)]
    draws = {tuple(order(step)) for order in orders for step in range(10)}
    assert len(draws) == 100


def test_starts_are_uniform_over_all_windows():
    token_count, context = 24, 16  # 8 windows with starts 0 to 7
    order = SeededOrder(0, 100, token_count, context)
    drawn = np.concatenate([order(step) for step in range(80)])
    counts = np.bincount(drawn)
    assert len(counts) == token_count - context
    # 8000 draws over 8 bins: 1000 per bin, with a standard deviation of 30. The limit is six of
    # them.
    assert np.abs(counts - 1000).max() < 180


def test_text_of_exactly_one_window():
    assert SeededOrder(0, 5, 17, 16)(0).tolist() == [0] * 5


def test_a_record_has_the_starts_of_every_step(path):
    order, record = SeededOrder(3, 3, 100, 8), OrderRecord(path)
    for step in range(5):
        record.append(step, order(step))
    assert path.read_text().splitlines()[2] == ",".join(map(str, order(2)))


def test_a_record_is_continued(path):
    OrderRecord(path).append(0, np.array([1, 2]))
    record = OrderRecord(path)
    assert record.steps == 1
    record.append(1, np.array([3, 4]))
    assert path.read_text() == "1,2\n3,4\n"


@pytest.mark.parametrize("step", [0, 2])
def test_steps_are_recorded_in_order(path, step):
    record = OrderRecord(path)
    record.append(0, np.array([1]))
    with pytest.raises(DataError, match=rf"holds 1 step, so step {step} cannot follow"):
        record.append(step, np.array([2]))
    assert path.read_text() == "1\n"


@pytest.mark.parametrize("tail", ["", "5,"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_truncate_keeps_the_first_steps(path, steps, tail):
    path.write_text("1,2\n3,4\n5,6\n" + tail)
    record = OrderRecord(path)
    record.truncate(steps)
    assert path.read_text() == "1,2\n3,4\n5,6\n" + tail  # nothing is removed until more is written
    record.flush()
    assert path.read_text() == "".join(["1,2\n", "3,4\n", "5,6\n"][:steps])
    record.append(steps, np.array([7, 8]))
    assert path.read_text().endswith("7,8\n")


def test_truncate_cannot_make_steps_up(path):
    path.write_text("1,2\n3,")
    with pytest.raises(DataError, match=r"holds 1 complete steps, but the run resumes from step 2"):
        OrderRecord(path).truncate(2)
    assert path.read_text() == "1,2\n3,"


def test_nothing_is_appended_to_a_cut_off_line(path):
    path.write_text("1,2\n3,")
    with pytest.raises(DataError, match=r"holds 1 step and a cut-off line, so step 1 cannot"):
        OrderRecord(path).append(1, np.array([3, 4]))


def test_a_full_disk_is_one_line(path):
    record = OrderRecord(path)
    record.append(0, np.arange(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, hard))
    try:
        with pytest.raises(DiskError, match=r"cannot write .*data_order.txt: .*; free space"):
            record.append(1, np.arange(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    survivor = OrderRecord(path)
    survivor.truncate(1)
    survivor.append(1, np.arange(10))
    assert path.read_text() == 2 * (",".join(map(str, range(10))) + "\n")


def test_the_fingerprint_is_that_of_the_lines_before_a_step(path):
    record, before = OrderRecord(path), {}
    for step in range(4):
        before[step] = record.written_before(step)
        record.append(step, np.array([step, 7]))
        assert record.written_before(step) == before[step]
    record.flush()
    assert before[3] == Fingerprint(12, hashlib.sha256(path.read_bytes()[:12]).hexdigest())
    resumed = OrderRecord(path)
    assert resumed.written_before(4) == Fingerprint.of(path)
    resumed.truncate(2)
    assert resumed.written_before(2) == before[2]
