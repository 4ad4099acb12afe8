import pytest

from lowprec_attn.runs.report import outcome


@pytest.mark.parametrize(
    ("val_loss", "words"),
    [(2.64, "0.612 below the unigram"), (5.21, "1.958 above the unigram"), (3.252, "0.000 below")],
)
def test_the_outcome_says_on_which_side_of_the_unigram_model_the_loss_is(val_loss, words):
    said = outcome(val_loss, 3.252)
    assert f"validation loss {val_loss:.3f} nats per token, {words}" in said
    assert said.endswith("model's 3.252")
