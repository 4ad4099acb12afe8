"""The recipe of docs/diagnose.md for PyTorch, on small models of Hugging Face."""

import re

import numpy as np
import pytest
from command import ROOT

from lowprec_attn import attention
from lowprec_attn.diagnose import array_file
from lowprec_attn.diagnose.examination import examine
from lowprec_attn.diagnose.measurement import Arithmetic
from lowprec_attn.numerics import EXACT

PAGE = (ROOT / "docs" / "diagnose.md").read_text()
SECTION = PAGE[PAGE.index("## From PyTorch") : PAGE.index("## What a file holds")]
FUNCTION, USE = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
RECIPE = compile(FUNCTION + USE, "docs/diagnose.md", "exec")  # in the order of the page

LENGTH, WORDS = 40, 50
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS,
         "num_attention_heads": 4, "max_position_embeddings": LENGTH}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": 8, "query_pre_attn_scalar": 64}
COMPRESSED = SHAPE | {"moe_intermediate_size": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
                      "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                      "num_key_value_heads": 4, "first_k_dense_replace": 2}  # fmt: skip
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "n_positions": LENGTH}


def test_the_recipe_is_short():
    assert len(FUNCTION.splitlines()) <= 28


def small_model(transformers, name):
    """A model, and the projection of each of its layers that takes O."""
    model = {
        "GPT2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL)),
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
        "Gemma3": lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**WINDOWED, sliding_window_pattern=2)
        ),
        "DeepseekV3": lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**COMPRESSED)
        ),
        "Bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE)),
    }[name]()
    ends = ("attn.c_proj", "self_attn.o_proj", "attention.output.dense")
    return model.eval(), [m for path, m in model.named_modules() if path.endswith(ends)]


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("name", "window"),
    [("GPT2", None), ("Llama", None), ("Gemma3", (7, 0)), ("DeepseekV3", None), ("Bert", None)],
)
def test_the_recipe_saves_what_the_model_computes(name, window, half, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="the recipe needs torch")
    transformers = pytest.importorskip("transformers", reason="the recipe needs transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, projections = small_model(transformers, name)
    seen = {}
    for i, projection in enumerate(projections):
        # O and dO by another way: the input of the projection behind attention, and its gradient.
        projection.register_forward_hook(
            lambda _, inputs, __, i=i: seen.update({f"o_{i}": inputs[0].detach()})
        )
        projection.register_full_backward_hook(
            lambda _, grads, __, i=i: seen.update({f"do_{i}": grads[0].detach()})
        )
    tokens = torch.randint(WORDS, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    names = {"model": model, "batch": batch}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain = model(**batch).loss
        exec(RECIPE, names)
        assert model(**batch).loss == plain  # masks, windows and scales as without the recipe
    layers = array_file.load(tmp_path / "step.safetensors")
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    assert {layer.window for layer in layers} == {None, window}
    for i, layer in enumerate(layers):
        assert layer.is_causal is (name != "Bert")
        assert layer.q.dtype.name == ("bfloat16" if half else "float32")
        assert not any("mask" in note for note in layer.notes)
        o = attention.dot_product_attention(
            *(layer.q, layer.k, layer.v),
            scale=layer.scale, is_causal=layer.is_causal, local_window_size=layer.window,
            numerics="exact", implementation="dense",
        )  # fmt: skip
        expected = {w: seen[f"{w}_{i}"].float().numpy().reshape(2, LENGTH, 4, -1)
                    for w in ("o", "do")}  # fmt: skip
        size = expected["o"].shape[-1]
        # One rounding of O to bfloat16, another of P̄ to it: two units of 2^-8.
        tolerance = {"rtol": 0, "atol": (2**-7 if half else 1e-5) * np.abs(expected["o"]).max()}
        np.testing.assert_allclose(np.float32(o)[..., :size], expected["o"], **tolerance)
        np.testing.assert_array_equal(np.float32(layer.do)[..., :size], expected["do"])
        assert np.any(layer.do)
        assert not examine(layer, [Arithmetic("exact", EXACT)]).found


@pytest.mark.slow
def test_the_recipe_notes_masks_and_refuses_sinks(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="the recipe needs torch")
    transformers = pytest.importorskip("transformers", reason="the recipe needs transformers")
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(WORDS, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": tokens > 0}
    model, _ = small_model(transformers, "Llama")
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()
    exec(RECIPE, {"model": model, "batch": batch})
    for layer in array_file.load(tmp_path / "step.safetensors"):
        assert "a mask of the call was not kept" in layer.notes[-1]
        assert np.any(layer.do)
    config = transformers.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(AssertionError, match="sinks"):
        exec(RECIPE, {"model": transformers.GptOssForCausalLM(config), "batch": batch})
