"""`lowprec_attn.torch.watch` on small trainings in PyTorch, and in the trainers that people use."""

import json
import logging
import math
import types

import numpy as np
import pytest

from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.diagnostics.examine.examination import examine
from lowprec_attn.diagnostics.measurement import Arithmetic
from lowprec_attn.diagnostics.watch import SIGNALS, WatchError
from lowprec_attn.numerics import FLASH

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn import functional  # noqa: E402 (only where there is torch)

from lowprec_attn import torch as ours  # noqa: E402

B, T, WIDTH, HEADS, LAYERS, WORDS = 2, 16, 32, 2, 2, 11
USUAL = [functional.scaled_dot_product_attention]  # in a list, because a capture replaces names


class Block(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        self.q, self.k, _ = parts.detach()
        o = functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=self.gain * parts.shape[-1] ** -0.5
        )
        return x + self.out(o.transpose(1, 2).reshape(x.shape))


class Model(torch.nn.Module):
    """Predicts the next word, where words count up."""

    def __init__(self, gain=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(gain) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batches(count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        first = torch.randint(WORDS, (B, 1), generator=generator)
        yield (first + torch.arange(T + 1)) % WORDS


def train(model, watched, steps=30, rate=3e-3, micro_batches=1, half=False):
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    losses = []
    for step, tokens in enumerate(batches(steps)):
        with watched.step(step), torch.autocast("cpu", torch.bfloat16, enabled=half):
            for _ in range(micro_batches):
                loss = model(tokens)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_healthy_training_is_recorded_and_trains_as_without(tmp_path, caplog):
    path = tmp_path / "attention.jsonl"
    model = Model()
    losses = train(model, ours.watch(every=10, path=path))
    assert losses == train(Model(), ours.watch(every=10**9))
    assert losses[-1] < losses[0] / 2
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 10, 20]
    for line in lines:
        assert "runaway" not in line
        assert list(line["signals"]) == ["layer_00", "layer_01"]
        for layer in line["signals"].values():
            assert set(layer) == set(SIGNALS)  # W_Q's input is known here
            assert all(len(values) == HEADS for values in layer.values())
    assert not caplog.records


@pytest.mark.parametrize("half", [False, True])
def test_scores_that_run_away_are_warned_of_once_with_the_action(half, tmp_path, caplog):
    """At a rate too high, the warning blames the rate in float32 and δ's errors in bfloat16."""
    path = tmp_path / "attention.jsonl"
    train(Model(gain=20.0), ours.watch(every=5, path=path), steps=60, rate=5e-2, half=half)
    lines = lines_of(path)
    away = [line["step"] for line in lines if "runaway" in line]
    assert 0 not in away
    for line in lines:
        for name, layer in line["signals"].items():
            large = sorted(h for h, x in enumerate(layer["score_maximum"]) if x > 512)
            assert sorted(line.get("runaway", {}).get(name, [])) == (
                large if len(large) > 1 else []
            )
    first, *_ = caplog.records
    assert (first.name, first.levelno) == ("lowprec_attn.watch", logging.WARNING)
    assert first.getMessage().startswith(f"step {away[0]}: scores run away in layer_0")
    assert "above 512, the largest " in first.getMessage()
    action = "use lowprec_attn.torch.attention" if half else "lower the learning rate"
    assert action in first.getMessage()
    assert "\n" not in first.getMessage()
    assert len(caplog.records) <= 4 < len(away)


@pytest.mark.parametrize(
    ("share", "action"),
    [
        (0.31, "Errors of δ are 31% of the gradient that reaches W_Q: use lowprec_attn.torch.atte"),
        (math.nan, "Errors of δ are nan% of the gradient that reaches W_Q: use lowprec_attn.torch"),
        (0.29, "Errors of δ are 29% of the gradient that reaches W_Q, which names no cause: norms"),
        (0.09, "Errors of δ are only 9.0% of the gradient that reaches W_Q, so the cause is elsew"),
        (None, "The backward pass was not seen: norms on q and k"),
    ],
)
def test_the_action_follows_from_the_errors_of_delta(share, action, caplog):
    watched = ours.watch(every=1, numerics="flash")

    def record(step, *scores):
        layer = {"score_maximum": list(scores)}
        if share is not None:
            layer["query_gradient_error_relative"] = [0.0, share, 9.0]
        watched._record(step, {"layer_00": layer, "layer_01": {"score_maximum": [1.0, 2.0, 3.0]}})
        return [r.getMessage() for r in caplog.records]

    assert record(0, 513.0, 512.0, 3.0) == []  # one head is no runaway
    (line,) = record(1, 513.0, 2592.0, 3.0)
    start = "step 1: scores run away in layer_00: heads 1, 0 above 512, the largest 2,592. "
    assert line.startswith(start + action)
    assert line.endswith("resume from a checkpoint at which the largest score was below 100")
    assert len(record(2, 600.0, 2592.0, 3.0)) == 1  # the runaway lasts
    assert len(record(3, 1.0, 2592.0, 3.0)) == 1
    assert len(record(4, math.nan, 2592.0, 3.0)) == 2  # a new runaway


def test_what_is_recorded_is_what_diagnose_measures(tmp_path):
    model, path = Model(gain=4.0), tmp_path / "attention.jsonl"
    (tokens,) = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        with ours.watch(every=1, path=path).step(0):
            model(tokens).backward()
        with ours.capture() as taken:
            model(tokens).backward()
    (line,) = lines_of(path)
    taken.save(tmp_path / "step.npz")
    for layer, block in zip(array_file.load(tmp_path / "step.npz"), model.blocks, strict=True):
        found = line["signals"][layer.name]
        expected = examine(layer, [Arithmetic("flash", FLASH)]).measured["flash"]
        assert layer.q.dtype == "bfloat16"
        for name in SIGNALS:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-9)
        scores = block.q[0].float() @ block.k[0].float().mT * 4.0 * (WIDTH // HEADS) ** -0.5
        largest = scores.abs().tril().amax((1, 2))
        np.testing.assert_allclose(found["score_maximum"], largest, rtol=1e-5)


def test_the_steps_between_are_left_alone(tmp_path, monkeypatch):
    watched = ours.watch(every=3, path=tmp_path / "a.jsonl")
    (tokens,) = batches(1)
    for step in (1, 2):
        with watched.step(step):
            assert functional.scaled_dot_product_attention is USUAL[0]
            assert not ours.bridge.capturing
            model = Model()
            model(tokens).backward()
    assert not (tmp_path / "a.jsonl").exists()


def test_of_micro_batches_the_first_is_measured(tmp_path):
    path = tmp_path / "a.jsonl"
    train(Model(), ours.watch(every=1, path=path), steps=1, micro_batches=3)
    (line,) = lines_of(path)
    assert list(line["signals"]) == ["layer_00", "layer_01"]


def test_writers_get_every_number(tmp_path):
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, scalar_value, global_step):
            self.scalars[tag, global_step] = scalar_value

    writer, metrics, path = Writer(), {}, tmp_path / "a.jsonl"
    train(Model(), ours.watch(every=1, path=path, write=writer), steps=1)
    train(Model(), ours.watch(every=1, write=lambda step, found: metrics.update({step: found})), 1)
    (line,) = lines_of(path)
    expected = line["signals"]["layer_01"]["score_maximum"][1]
    assert writer.scalars["attention/layer_01/head_1/score_maximum", 0] == expected
    assert metrics[0]["attention/layer_01/head_1/score_maximum"] == expected
    assert len(metrics[0]) == len(writer.scalars) == len(SIGNALS) * LAYERS * HEADS


def test_the_cap_of_our_own_function_is_kept():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    attend = ours.attention_fn(numerics="exact", logits_soft_cap=3.0)
    with ours.capture() as taken:
        attend(q, q, q).sum().backward()
    assert taken.layers["layer_00"]["logits_soft_cap"] == 3


def test_our_own_function_is_watched_too(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(functional, "scaled_dot_product_attention", ours.attention)
    train(Model(), ours.watch(every=1, path=path, numerics="normalized_delta"), steps=2)
    cured = lines_of(path)[1]["signals"]["layer_01"]
    monkeypatch.setattr(functional, "scaled_dot_product_attention", USUAL[0])
    train(Model(), ours.watch(every=1, path=path, numerics="flash"), steps=2)
    plain = lines_of(path)[3]["signals"]["layer_01"]
    assert max(cured["ds_row_sum_rms"]) < min(plain["ds_row_sum_rms"]) / 100


def test_what_is_not_measured_is_named():
    q = torch.randn(1, HEADS, T, 8, requires_grad=True)
    watched = ours.watch(every=1)
    with pytest.raises(WatchError, match="layer_00: attn_mask adds to the scores"), watched.step(0):
        USUAL[0](q, q, q, attn_mask=torch.randn(T, T)).sum().backward()
    with pytest.raises(WatchError, match="layer_00: dropout_p of the call is not"), watched.step(0):
        USUAL[0](q, q, q, dropout_p=0.1).sum().backward()
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        ours.watch(every=0)


def test_padding_is_cut_before_it_is_measured(tmp_path):
    path = tmp_path / "a.jsonl"
    q = torch.randn(1, HEADS, T, 8)
    q[:, :, 10:] = 100.0
    q.requires_grad_()
    mask = (torch.arange(T) < 10)[None, None, None]
    with ours.watch(every=1, path=path).step(0):
        USUAL[0](q, q, q, attn_mask=mask)[:, :, :10].sum().backward()
    (line,) = lines_of(path)
    assert max(line["signals"]["layer_00"]["score_maximum"]) < 50


@pytest.mark.parametrize("is_same", [True, False])
def test_a_step_that_raised_in_hugging_faces_trainer_is_watched_again(is_same, tmp_path):
    """The hooks as the Trainer calls them. It calls none for an error, such as a lack of memory."""
    path, state = tmp_path / "attention.jsonl", types.SimpleNamespace(global_step=0)

    def train_with(callback, raises):
        callback.on_train_begin(None, state, None)
        callback.on_step_begin(None, state, None)
        loss = Model()(next(batches(1)))
        if not raises:
            loss.backward()
            callback.on_pre_optimizer_step(None, state, None)

    first = ours.watch(every=1, path=path)
    train_with(first.callback(object), raises=True)
    second = first if is_same else ours.watch(every=1, path=path)
    train_with(second.callback(object), raises=False)
    train_with(second.callback(object), raises=False)
    assert [line["step"] for line in lines_of(path)] == [0, 0]
    assert functional.scaled_dot_product_attention is USUAL[0]


def test_float64_is_measured_as_float32(tmp_path):
    path = tmp_path / "attention.jsonl"
    with ours.watch(path=path).step(0):
        Model().double()(next(batches(1))).backward()
    (line,) = lines_of(path)
    assert max(line["signals"]["layer_00"]["query_gradient_error_relative"]) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_hugging_face(accumulation, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=WORDS,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": tokens[0], "labels": tokens[0]} for tokens in batches(24)]
    path = tmp_path / "attention.jsonl"
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=5, use_cpu=True,
            gradient_accumulation_steps=accumulation, report_to=[], save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data,
        callbacks=[ours.watch(every=2, path=path).callback(transformers.TrainerCallback)],
    )  # fmt: skip
    trainer.train()
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all(list(line["signals"]) == ["layer_00", "layer_01"] for line in lines)
    assert functional.scaled_dot_product_attention is USUAL[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_lightning(accumulation, tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, tokens, _):
            return self.model(tokens)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    path = tmp_path / "attention.jsonl"
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        accumulate_grad_batches=accumulation,
        callbacks=[ours.watch(every=2, path=path).callback(lightning.Callback)],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader([*batches(12)], batch_size=None)
    trainer.fit(Training(), loader)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all(list(line["signals"]) == ["layer_00", "layer_01"] for line in lines)
    assert functional.scaled_dot_product_attention is USUAL[0]


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_lightning_gives_up_leaves_nothing_open(tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Broken(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, tokens, _):
            self.model(tokens)
            raise ZeroDivisionError

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[ours.watch(every=1).callback(lightning.Callback)],
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), torch.utils.data.DataLoader([*batches(2)], batch_size=None))
    assert functional.scaled_dot_product_attention is USUAL[0]
    assert not ours.bridge.capturing
