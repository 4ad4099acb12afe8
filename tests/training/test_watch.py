"""What a run reports about itself, undisturbed and resumed."""

import pytest

from lowprec_attn.runs.instability.incidents import AT_ITS_BATCH
from lowprec_attn.training.instability.watch import Watch

QUIET, LOUD = ({"layer_0": {"score_maximum": [3.0, value]}} for value in (4.0, 600.0))


class Heard:
    """A watch, with the records and lines that it produced."""

    def __init__(self, recorded=(), start=0, limit=None):
        self.records, self.lines = [], []

        def write(step, values):
            self.records.append({"step": step, **values})

        self.watch = Watch(recorded, start, limit, write, self.lines.append)


def loss(step):
    """About 3, with a spike from step 60 to 69 and an excess from step 150 on."""
    return 3.0 + 0.05 * (step % 3) + (2.0 if 60 <= step < 70 or step >= 150 else 0.0)


def take(heard, first, last):
    for step in range(first, last):
        heard.watch.add_loss(step, loss(step))
        if step % 50 == 0:
            heard.watch.add_signals(step, LOUD if step >= 50 else QUIET)


@pytest.fixture(scope="module")
def whole():
    heard = Heard(limit=20)
    take(heard, 0, 200)
    return heard


def test_each_event_is_a_record_and_a_line(whole):
    kinds = [(r["step"], *(set(r) - {"step"})) for r in whole.records]
    assert kinds == [(50, "warnings"), (60, "spike"), (72, "spike_end"), (150, "spike")]
    first, second, third, _ = whole.lines
    assert first.startswith("warning: step 50, layer 0, head 1: the largest |score| is 600")
    assert second.startswith("warning: step 60: the loss 5.000 is a spike")
    assert third.startswith("note: step 72: the loss has recovered 12 steps after")
    assert third.endswith("(fast)")  # the signals met a rule


@pytest.mark.parametrize("start", [51, 65, 100, 160])
def test_a_resumed_run_goes_on_and_repeats_nothing(whole, start):
    recorded = [{"step": s, "loss": loss(s)} for s in range(start)]
    recorded += [{"step": s, "signals": LOUD if s >= 50 else QUIET} for s in range(0, start, 50)]
    heard = Heard(recorded, start, limit=20)
    take(heard, start, 200)
    assert heard.records == [r for r in whole.records if r["step"] >= start]
    assert len(heard.lines) == len(heard.records)
    assert (heard.watch.enough, heard.watch.onset) == (whole.watch.enough, whole.watch.onset)


@pytest.mark.parametrize(("start", "says"), [(0, True), (50, True), (65, False)])
def test_a_fast_spike_without_a_rule_met_points_at_its_batch(start, says):
    recorded = [{"step": s, "loss": loss(s)} for s in range(start)]
    recorded += [{"step": s, "signals": QUIET} for s in range(0, start, 10)]
    heard = Heard(recorded, start)
    for step in range(start, 100):
        heard.watch.add_loss(step, loss(step))
        if step % 10 == 0:
            heard.watch.add_signals(step, QUIET)
    end = heard.lines[-1]
    assert end.startswith("note: step 72: the loss has recovered 12 steps after")
    assert end.endswith(f"(fast); {AT_ITS_BATCH}" if says else "(fast)")


def test_an_excess_is_enough_after_the_limit_and_its_onset_is_the_spike(whole):
    assert whole.watch.onset == 150
    assert whole.watch.explosion > 150  # the mean of 50 losses rises later
    assert whole.watch.enough == whole.watch.explosion + 19
    unlimited = Heard()
    take(unlimited, 0, 200)
    assert unlimited.watch.enough is None
