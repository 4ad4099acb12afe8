"""A warning is given when a layer begins to meet a rule."""

from lowprec_attn.diagnostics.onset import Onsets, as_record

QUIET = {"score_maximum": [3.0, 4.0]}


def loud(head, value=600.0):
    return {"score_maximum": [value if n == head else 4.0 for n in range(2)]}


def named(found):
    return [(a.layer, a.alarm.rule.name, a.alarm.head) for a in found]


def test_a_rule_is_reported_when_it_begins_and_after_it_was_quiet():
    onsets = Onsets()
    measured = [
        (QUIET, QUIET, []),
        (QUIET, loud(1), [(1, "scores", 1)]),
        (QUIET, loud(0), []),  # the alarm lasts, with another worst head
        (loud(0), loud(0), [(0, "scores", 0)]),
        (loud(0), QUIET, []),
        (loud(0, float("nan")), loud(1), [(1, "scores", 1)]),
    ]
    for first, second, expected in measured:
        assert named(onsets.add({"layer_0": first, "layer_1": second})) == expected


def test_a_rule_that_the_last_measurement_met_is_not_reported_again():
    before = {"layer_0": loud(1)}
    assert Onsets(before).add({"layer_0": loud(1)}) == []
    assert len(Onsets().add({"layer_0": loud(1)})) == 1


def test_errors_of_delta_are_reported_with_large_scores_alone():
    shares = {"query_weight_gradient_error_relative": [0.1, 0.5]}
    onsets = Onsets()
    assert onsets.add({"layer_0": {"score_maximum": [4.0, 40.0], **shares}}) == []
    found = onsets.add({"layer_0": {**loud(1), **shares}})
    assert named(found) == [(0, "delta", 1), (0, "scores", 1)]


def test_rules_of_a_layer_are_told_apart():
    onsets = Onsets({"layer_0": loud(0)})
    (found,) = onsets.add({"layer_0": {**loud(0), "p_row_sum_error_rms": [0.0, 0.5]}})
    assert str(found).startswith("layer 0, head 1: rows of the backward pass's P")
    assert as_record([found]) == {"layer_0": {"row_sums": {"head": 1, "value": 0.5}}}
