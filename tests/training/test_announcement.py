"""What a run says about its length: before it starts, and once its steps are timed."""

import itertools

import pytest
from tiny import tiny_settings

from configs import gpt2_bf16
from lowprec_attn.training import progress
from lowprec_attn.training.announcement import _length
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.progress import Progress

# What Pythons 3.11 to 3.14 carry, to the nearest 100,000.
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


# Seconds of each step, the first of which compiles, and after how many there is a line.
STEPS = {
    "fast": (
        [60.0, 0.1, 0.1, 9.0, 0.1, 0.1, 0.1],
        6,
        "about 9 seconds for the remaining 94 steps at 2,560 ",
    ),
    "slow": ([60.0, 100.0, 100.0], 2, "about 3 hours for the remaining 98 steps at 3 "),
    "short": ([60.0, 100.0], 2, None),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_time_is_said_once_when_steps_have_been_timed(monkeypatch, capsys, case):
    seconds, after, said = STEPS[case]
    clock = itertools.accumulate([0.0, *seconds])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    steps = 100 if said else len(seconds)
    with Progress(tiny_settings(steps=steps, batch_size=8), 0) as bar:
        for i, _ in enumerate(seconds, 1):
            bar.advance(1.0)
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == (i == after and said is not None)
            if lines:
                assert said in lines[0]
