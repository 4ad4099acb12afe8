import json

import pytest

from lowprec_attn.runs.report import draw, outcome
from lowprec_attn.runs.run_dir import RunDir


@pytest.mark.parametrize(
    ("val_loss", "words"),
    [(2.64, "0.612 below the unigram"), (5.21, "1.958 above the unigram"), (3.252, "0.000 below")],
)
def test_the_outcome_says_on_which_side_of_the_unigram_model_the_loss_is(val_loss, words):
    said = outcome(val_loss, 3.252)
    assert f"validation loss {val_loss:.3f} nats per token, {words}" in said
    assert said.endswith("model's 3.252")


def test_a_signal_that_a_run_of_another_version_lacks_is_said_to_be_missing(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text(json.dumps({"name": "n", "variant": "v", "seed": 1}))
    layers = {"layer_0": {"score_maximum": [2.0, 3.0]}}
    lines = [{"step": step, "loss": 3.0, "signals": layers} for step in (0, 10)]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    scores, ties = draw(run_dir, ("score_maximum", "repeated_maxima")).axes
    assert list(scores.lines[0].get_ydata()) == [3.0, 3.0]
    assert not ties.lines and [text.get_text() for text in ties.texts] == [
        "not measured in this run"
    ]
