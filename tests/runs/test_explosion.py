"""The words for failures of a run: explosion, and runaway of scores."""

import math

import numpy as np
import pytest

from lowprec_attn.runs.instability.explosion import LargeHeads, LossWatch, RunawayRule, large_heads


def risen(at, by, steps, until=math.inf):
    """Losses of every step: 3, and `by` more from step `at` until another step."""
    return [(s, 3.0 + (by if at <= s < until else 0.0)) for s in range(steps)]


# A rise by 0.8 lifts the mean of 50 steps by more than 0.7 once 44 of them have risen.
FIRST = 500 + 43


def test_an_excess_of_100_steps_is_an_explosion_at_its_first_step():
    losses = risen(500, 0.8, 700)
    assert LossWatch(losses[: FIRST + 99]).explosion is None
    assert LossWatch(losses[: FIRST + 100]).explosion == FIRST
    assert LossWatch(losses).explosion == FIRST


@pytest.mark.parametrize(("rise", "explosion"), [(0.69, None), (0.71, 500 + 49)])
def test_the_excess_is_one_of_more_than_seven_tenths(rise, explosion):
    assert LossWatch(risen(500, rise, 900)).explosion == explosion


@pytest.mark.parametrize(("steps", "explosion"), [(136, None), (137, FIRST)])
def test_a_short_excess_is_no_explosion(steps, explosion):
    """The mean exceeds the limit for 37 steps less than the loss does."""
    watch = LossWatch(risen(500, 0.8, 900, until=500 + steps))
    assert watch.explosion == explosion
    assert watch.excess_steps == 0


def test_two_short_excesses_are_no_explosion():
    losses = risen(500, 0.8, 1100, until=620) + [(s + 1100, x) for s, x in risen(0, 0.8, 120)]
    assert LossWatch(losses).explosion is None


def test_the_excess_is_that_over_the_best_so_far():
    """A loss that falls from 11 to 3 and rises to 4.5 is still far below its first values."""
    falling = [(s, 11.0 - 0.02 * s) for s in range(400)]
    watch = LossWatch([*falling, *((s, 4.5) for s in range(400, 700))])
    assert watch.explosion is not None
    assert 400 < watch.explosion < 450


def test_one_low_loss_is_not_the_best():
    assert LossWatch([*risen(0, 0.0, 300), (300, 1.0), *risen(0, 0.0, 900)[301:]]).explosion is None


def test_the_first_losses_of_a_resumed_run_are_not_its_best():
    """A loss of 2 by chance, followed by 3, is no excess of 0.7 over a best of 2."""
    losses = [(1000, 2.0), *((s, 3.0) for s in range(1001, 1300))]
    assert LossWatch(losses).explosion is None
    assert LossWatch(losses).best == pytest.approx(2.9)  # the mean of the first ten
    assert LossWatch(losses[:9]).best == math.inf
    risen_later = [(s, x + (0.9 if s >= 1200 else 0.0)) for s, x in losses[1:]]
    assert LossWatch([*risen_later, *((s, 3.9) for s in range(1300, 1400))]).explosion is not None


@pytest.mark.parametrize("every", [10, 100])
def test_sparse_losses_have_a_best_too(every):
    assert LossWatch([(s, 3.0) for s in range(0, 500, every)]).best == 3.0


def test_the_steps_in_excess_are_counted_and_forgotten():
    watch = LossWatch()
    counts = []
    for step, loss in risen(500, 0.8, 800, until=700):
        watch.add(step, loss)
        counts.append(watch.excess_steps)
    assert counts[:FIRST] == [0] * FIRST
    assert counts[FIRST : FIRST + 150] == list(range(1, 151))
    assert counts[-1] == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_no_explosion_and_no_part_of_the_mean(loss):
    calm = risen(500, 0.8, 300)
    watch = LossWatch([*calm, (300, loss), (301, 3.0)])
    assert (watch.explosion, watch.excess_steps, watch.smoothed) == (None, 0, 3.0)
    # An excess must last 100 steps, whatever the end of the run.
    assert LossWatch([*risen(500, 0.8, FIRST + 99), (FIRST + 99, loss)]).explosion is None
    assert LossWatch([*risen(500, 0.8, FIRST + 100), (FIRST + 100, loss)]).explosion == FIRST


def test_the_first_explosion_stays():
    watch = LossWatch(risen(500, 0.8, 1400, until=650) + [(s, 5.0) for s in range(1400, 1700)])
    assert watch.explosion == FIRST


@pytest.mark.parametrize("seed", range(4))
def test_every_tenth_loss_says_the_same_within_ten_steps(seed):
    noise = np.random.default_rng(seed).normal(0.0, 0.02, 1200)
    ramp = 3.0 + np.maximum(0.0, 0.02 * (np.arange(1200) - 600)) + noise
    losses = list(enumerate(ramp.tolist()))
    every, tenth = LossWatch(losses).explosion, LossWatch(losses[::10]).explosion
    assert every is not None
    assert tenth is not None
    assert abs(every - tenth) <= 10


# Runaway.


def scores(last, every=250, **heads):
    """Scores of 100 in two heads of three layers, and `h01=value` in head 1 of layer 0."""
    table = {step: [[100.0, 100.0] for _ in range(3)] for step in range(0, last + 1, every)}
    for name, value in heads.items():
        for layers in table.values():
            layers[int(name[1])][int(name[2])] = value
    return table


RULE = RunawayRule()


@pytest.mark.parametrize(
    ("heads", "large"),
    [
        ({}, 0),
        ({"h10": 9e9}, 1),  # a single head, however large
        ({"h10": 513.0, "h11": 513.0}, 2),
        ({"h00": 513.0, "h21": 513.0}, 2),  # heads of all layers count
        ({"h10": 513.0, "h11": 512.0}, 1),
        ({"h10": math.nan, "h11": math.inf}, 2),
    ],
)
def test_a_runaway_is_two_heads_above_512_at_step_2000(heads, large):
    found = large_heads(scores(3000, **heads), RULE)
    assert found == LargeHeads(2000, large)
    assert found.ran_away == (large >= 2)


def test_it_is_the_first_recorded_step_from_there_on_that_is_judged():
    early = scores(1750, h10=900.0, h11=900.0)
    assert large_heads(early, RULE) is None
    assert large_heads({}, RULE) is None
    late = {step + 30: layers for step, layers in scores(2500).items()}
    assert large_heads({**early, **late}, RULE) == LargeHeads(2030, 0)


def test_when_and_by_which_size_a_run_is_judged_can_be_chosen():
    table = {**scores(250, h10=60.0, h11=90.0), 500: scores(0, h00=90.0, h10=90.0)[0]}
    assert large_heads(table, RunawayRule(score=95.0, step=300)) == LargeHeads(500, 4)
