"""The recipe of docs/diagnose.md for PyTorch, on a small GPT-2 of Hugging Face."""

import re

import numpy as np
import pytest
from command import ROOT

from lowprec_attn.diagnose import array_file
from lowprec_attn.diagnose.examination import examine
from lowprec_attn.diagnose.measurement import Arithmetic
from lowprec_attn.numerics import EXACT

PAGE = (ROOT / "docs" / "diagnose.md").read_text()
SECTION = PAGE[PAGE.index("## From PyTorch") : PAGE.index("## What a file holds")]
FUNCTION, USE = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


def test_the_recipe_is_short():
    assert len(FUNCTION.splitlines()) <= 10
    compile(FUNCTION + USE, "docs/diagnose.md", "exec")


@pytest.mark.slow
def test_the_recipe_saves_what_the_model_computes(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="the recipe needs torch")
    transformers = pytest.importorskip("transformers", reason="the recipe needs transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    seen = {}
    for i, block in enumerate(model.transformer.h):
        # The same values by another way: the projections' output, and the gradient of c_proj's
        # input.
        block.attn.c_attn.register_forward_hook(
            lambda _, __, out, i=i: seen.update({f"qkv_{i}": out.detach()})
        )
        block.attn.c_proj.register_full_backward_hook(
            lambda _, grads, __, i=i: seen.update({f"do_{i}": grads[0].detach()})
        )
    tokens = torch.randint(50, (3, 16))
    imports, steps = USE.split("\n\n")
    names = {"model": model, "batch": {"input_ids": tokens, "labels": tokens}}
    exec(compile(f"{imports}\n{FUNCTION}\n{steps}", "docs/diagnose.md", "exec"), names)
    layers = array_file.load(tmp_path / "step.safetensors")
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    for i, layer in enumerate(layers):
        for name, x in zip("qkv", np.split(seen[f"qkv_{i}"].numpy(), 3, axis=-1), strict=True):
            np.testing.assert_array_equal(getattr(layer, name), x.reshape(3, 16, 2, 16))
        np.testing.assert_array_equal(layer.do, seen[f"do_{i}"].numpy().reshape(3, 16, 2, 16))
        assert np.any(layer.do)
        examined = examine(layer._replace(is_causal=True), [Arithmetic("exact", EXACT)])
        assert not examined.found
