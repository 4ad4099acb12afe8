"""nanoGPT in the regime of true_bfloat16.toml: its definition, and the records of a run."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from command import ROOT, TINY, write_text

from benchmarks import nanogpt_regime
from lowprec_attn.commands import config
from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics import attention_signals
from lowprec_attn.lab import experiment
from lowprec_attn.lab.workdir import ArmRun, arm_runs
from lowprec_attn.training.config import train_settings


def settings_of(trial, defined):
    name, *fields = defined.arguments(trial)
    return train_settings(config.load(name.removeprefix("--config="), fields))


def test_it_is_the_regime_of_our_own_arms(monkeypatch):
    monkeypatch.chdir(ROOT)
    theirs = nanogpt_regime.definition([], "text")
    ours = experiment.load(ROOT / "configs" / "true_bfloat16.toml")
    own = settings_of(ours.trials[0], ours)
    for trial in theirs.trials:
        settings = settings_of(trial, theirs)
        assert settings.name == f"nanogpt_{trial.arm.name}"
        for name in ("model", "optimizer", "batch_size", "steps", "diagnostics_every"):
            assert getattr(settings, name) == getattr(own, name)
    assert {trial.seed for trial in theirs.trials} == set(ours.seeds)


def torch_run():
    pytest.importorskip("torch", reason="needs torch")
    from benchmarks import nanogpt_run

    return nanogpt_run


def small_model(layers=2, heads=2, width=16, tokens=50):
    """The parts of nanoGPT's model that `signals` reads, with a loss."""
    import torch
    from torch.nn import functional

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.n_head, self.n_embd = heads, width
            self.c_attn = torch.nn.Linear(width, 3 * width, bias=False)

        def forward(self, x):
            qkv = self.c_attn(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(*qkv, is_causal=True).mT.flatten(-2).mT

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            blocks = (SimpleNamespace(attn=Attention()) for _ in range(layers))
            self.transformer = SimpleNamespace(h=list(blocks))
            self.wte = torch.nn.Embedding(tokens, width)
            self.attentions = torch.nn.ModuleList(b.attn for b in self.transformer.h)

        def forward(self, ids, targets=None):
            x = self.wte(ids)
            for block in self.transformer.h:
                x = x + block.attn(x).sum(-1, keepdim=True).sum(1, keepdim=True)
            logits = x @ self.wte.weight.T
            if targets is None:
                return logits, None
            return logits, functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

        def configure_optimizers(self, weight_decay, rate, betas, device):
            return torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=weight_decay)

    return Model()


def test_scores_and_norms_are_those_of_our_diagnostics():
    run = torch_run()
    import torch

    torch.manual_seed(0)
    model = small_model()
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 30
    captured = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda _, __, qkv: captured.append(qkv.detach()))
    found = run.signals(model, torch.randint(50, (1, 24)))
    for i, (qkv, block) in enumerate(zip(captured, model.transformer.h, strict=True)):
        assert qkv.dtype == torch.bfloat16
        planes = qkv.float().numpy().reshape(1, 24, 3, 2, 8)
        q, k, v = (jnp.asarray(planes[:, :, j], jnp.bfloat16) for j in range(3))
        weights = block.attn.c_attn.weight.detach().numpy().reshape(3, 2, 8, 16)
        w_q, w_k = (jnp.asarray(weights[j].transpose(2, 0, 1)) for j in range(2))
        expected = attention_signals(q, k, v, numerics="exact", is_causal=True, w_q=w_q, w_k=w_k)
        assert len(captured) == 2
        for name, values in found[f"layer_{i}"].items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("attention", ["flash", "matched"])
def test_a_run_leaves_what_the_lab_collects(tmp_path, monkeypatch, attention):
    run = torch_run()
    import torch

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "gpt", lambda _, settings: small_model(tokens=258))
    text = write_text(tmp_path)
    small = {**TINY, "model.width": 16, "model.vocab_size": 258, "eval_every": 5}
    flags = [f"--config.{name}={value}" for name, value in small.items()]
    defined = nanogpt_regime.definition(flags, str(text)).with_seeds([1]).select([attention])
    (trial,) = defined.trials
    workdir = tmp_path / "runs"
    workdir.mkdir()
    arm = ArmRun(workdir, trial.name)
    arm.define(defined, trial)
    name, *fields = defined.arguments(trial)
    values = config.load(name.removeprefix("--config="), fields)
    assert run.train(train_settings(values), values, arm.run_dir.path, tmp_path, "cpu") == 0
    assert arm_runs(workdir)[0].outcome().finished
    lines = [json.loads(line) for line in arm.run_dir.metrics.read_text().splitlines()]
    assert [r["step"] for r in lines if "loss" in r] == list(range(12))
    assert [r["step"] for r in lines if "signals" in r] == [0, 5, 10, 12]
    assert [r["step"] for r in lines if "val_loss" in r] == [5, 10, 12]
    starts = arm.run_dir.data_order.read_text().splitlines()
    assert len(starts) == 12
    start = arm.run_dir.starts()[-1]
    assert (start["versions"]["nanoGPT"], start["versions"]["torch"]) == (
        run.COMMIT,
        torch.__version__,
    )
    assert main(["lab", "collect", str(workdir), str(tmp_path / "results")]) == 0
    with pytest.raises(run.RunError, match="cannot be continued; remove it"):
        run.train(train_settings(values), values, arm.run_dir.path, tmp_path, "cpu")


def test_another_model_and_an_attention_that_cannot_serve_are_refused(tmp_path, monkeypatch):
    run = torch_run()
    import torch

    monkeypatch.chdir(ROOT)
    defined = nanogpt_regime.definition([], "text")
    (tmp_path / "model.py").write_text("class GPT: pass")
    with pytest.raises(run.RunError, match="not that of nanoGPT's commit 3adf61e"):
        run.gpt(tmp_path, settings_of(defined.trials[0], defined))
    qkv = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)
    with run.attention_by("nanogpt_cudnn"), pytest.raises(RuntimeError, match="No viable backend"):
        torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)


@pytest.mark.parametrize("preset", ["normalized_delta", "matched"])
def test_an_arm_of_ours_computes_its_preset(preset):
    run = torch_run()
    import torch

    from lowprec_attn.torch import attention_fn

    usual = torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 2, 64, 16).bfloat16() * 4
    with run.attention_by(f"nanogpt_{preset}"), torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    assert torch.equal(out, attention_fn(numerics=preset)(*qkv, is_causal=True))
    assert torch.nn.functional.scaled_dot_product_attention is usual


def test_float32_is_the_unfused_attention_of_unrounded_operands_and_products():
    run = torch_run()
    import torch

    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 32, 16).bfloat16().requires_grad_() for _ in range(3)]
    d_out = torch.randn(1, 2, 32, 16).bfloat16()
    with run.attention_by("nanogpt_float32"), torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    out.backward(d_out)  # as in a run: autocast would make the products bfloat16
    wide = [x.detach().double().requires_grad_() for x in qkv]
    scores = wide[0] @ wide[1].mT / 4
    seen = torch.ones(32, 32, dtype=torch.bool).tril()
    exact = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[2]
    exact.backward(d_out.double())
    assert out.dtype == torch.bfloat16
    for ours, theirs in zip(
        (out, *(x.grad for x in qkv)), (exact, *(x.grad for x in wide)), strict=True
    ):
        # Only results are rounded to bfloat16, by half a unit, 2⁻⁹.
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2.0**-8, atol=1e-6)
