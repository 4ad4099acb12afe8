"""What a run announces about its length before it starts."""

import pytest

from configs import gpt2_bf16
from lowprec_attn.training.announcement import _length
from lowprec_attn.training.config import train_settings

# The size of the built-in text in Python 3.11 to 3.14, to the nearest 100,000.
BUILT_IN = 1_700_000


@pytest.mark.parametrize(
    ("steps", "tokens", "said"),
    [
        (250, 512_000, ["250: 512,000 tokens, 0.3 epochs"]),
        (100, 4 * BUILT_IN, ["100: 6,800,000 tokens, 4.0 epochs"]),
        (
            20_000,
            20_000 * 524_288,
            ["6,168.1 epochs", "6,168.1 times", "data.path=DIR", "steps=12 "],
        ),
    ],
)
def test_the_length_is_said_in_tokens_and_epochs_with_a_warning_above_four(steps, tokens, said):
    lines = _length(steps, tokens, BUILT_IN)
    assert [label for label, _ in lines] == ["steps", "warning"][: 2 if len(said) > 1 else 1]
    text = "\n".join(text for _, text in lines)
    for words in said:
        assert words in text


@pytest.mark.parametrize("variant", ["tiny", "short"])
def test_no_default_reads_the_built_in_text_so_often(variant):
    settings = train_settings(gpt2_bf16.get_config(variant).to_dict())
    tokens = settings.steps * settings.batch_size * settings.model.context
    assert len(_length(settings.steps, tokens, BUILT_IN)) == 1
