"""Spikes and divergence, on synthetic losses."""

import math

import numpy as np
import pytest

from lowprec_attn.runs.instability.spikes import (
    SLOW_STEPS,
    Divergence,
    Spike,
    SpikeEnd,
    Spikes,
    level,
)


def losses(steps, seed=0, noise=0.05):
    """Losses of 3 nats with normal noise."""
    return 3.0 + noise * np.random.default_rng(seed).normal(size=steps)


def raised(first, last, by, steps=1200):
    found = losses(steps)
    found[first : last + 1] += by
    return found


def events(values):
    watch = Spikes()
    return [event for step, loss in enumerate(values) for event in watch.add(step, float(loss))]


CASES = {
    # name: losses, [(kind, step, recovery or None)]
    "calm": (losses(5000), []),
    "falling": (11.0 - 8.0 * (1 - np.exp(-np.arange(1000) / 200)) + losses(1000) - 3.0, []),
    "one batch": (raised(300, 300, 1.0), [(Spike, 300, None), (SpikeEnd, 302, "fast")]),
    "fast": (raised(300, 330, 1.0), [(Spike, 300, None), (SpikeEnd, 333, "fast")]),
    "slow": (raised(300, 400, 1.0), [(Spike, 300, None), (SpikeEnd, 403, "slow")]),
    "none": (raised(300, 1199, 1.0), [(Spike, 300, None), (SpikeEnd, 300 + SLOW_STEPS, "none")]),
    "not finite": (raised(300, 310, math.inf), [(Spike, 300, None), (SpikeEnd, 313, "fast")]),
    "nan": (raised(300, 300, math.nan), [(Spike, 300, None), (SpikeEnd, 302, "fast")]),
    "too early to tell": (raised(10, 12, 0.6, 60), []),
    "downwards": (raised(300, 310, -1.0), []),
}


@pytest.mark.parametrize("case", CASES)
def test_spikes_are_found_with_their_recovery(case):
    values, expected = CASES[case]
    found = [(type(e), e.step, getattr(e, "recovery", None)) for e in events(values)]
    assert found == expected


@pytest.mark.parametrize("seed", range(20))
def test_normal_noise_makes_no_spike(seed):
    assert events(losses(2000, seed)) == []


def test_the_threshold_is_six_spreads_of_the_losses_before():
    before = level(losses(200))
    assert before.spread == pytest.approx(0.05, rel=0.25)
    for spreads, count in ((5.9, 0), (6.1, 1)):
        watch = Spikes()
        for step, loss in enumerate(losses(200)):
            watch.add(step, float(loss))
        assert len(watch.add(200, before.median + spreads * before.spread)) == count


def test_losses_without_noise_have_a_least_spread():
    assert events([3.0] * 100 + [3.1] * 100) == []
    assert [type(e) for e in events([3.0] * 100 + [3.2] * 3)] == [Spike]


def test_a_level_that_was_not_recovered_is_the_new_one():
    values = losses(1500)
    values[300:] += 1.0
    values[1200] += 1.0
    assert [(type(e), e.step) for e in events(values)][2:] == [(Spike, 1200), (SpikeEnd, 1202)]


def test_a_slow_rise_is_a_divergence_and_no_spike():
    rising = losses(1500) + np.maximum(0.0, 0.003 * (np.arange(1500) - 500))
    (event,) = events(rising)
    assert isinstance(event, Divergence)
    assert 700 < event.step < 800
    assert event.smoothed == pytest.approx(event.best + 0.7, abs=0.01)


def test_a_spike_that_grows_into_an_excess_is_no_divergence():
    found = events(raised(300, 450, 2.0))
    assert [type(e) for e in found] == [Spike, SpikeEnd]


@pytest.mark.parametrize("event", events(raised(300, 330, 1.0)), ids=lambda e: type(e).__name__)
def test_an_event_says_step_and_batch(event):
    assert "300" in str(event) or "line 301 of data_order.txt" in str(event)
    assert type(event).of({"step": event.step, **event.record()}) == event
