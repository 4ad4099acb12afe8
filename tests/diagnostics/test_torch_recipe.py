"""The recipe of docs/diagnose.md for PyTorch, on small models of Hugging Face and on stand-ins."""

import re
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from command import ROOT

from lowprec_attn import attention
from lowprec_attn.diagnostics import CaptureError
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.diagnostics.examine.examination import examine
from lowprec_attn.diagnostics.examine.measurement import Arithmetic
from lowprec_attn.numerics import EXACT

PAGE = (ROOT / "docs" / "diagnose.md").read_text()
SECTION = PAGE[PAGE.index("## From PyTorch") : PAGE.index("## What a file holds")]
(TEXT,) = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
RECIPE = compile(TEXT, "docs/diagnose.md", "exec")  # what all tests here run

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
    assert len(TEXT.splitlines()) <= 10


class Tensor:
    """As much of a torch.Tensor as the capture uses."""

    requires_grad = True

    def __init__(self, values):
        self.values, self.hooks = values, []
        self.shape, self.dtype = values.shape, f"torch.{values.dtype}"

    def detach(self):
        return self

    def cpu(self):
        return self

    def to(self, dtype):
        return Tensor(self.values.astype(dtype.removeprefix("torch.")))

    def double(self):
        return self.to("torch.float64")

    def numpy(self):
        assert self.values.dtype != ml_dtypes.bfloat16  # torch raises TypeError
        return self.values

    def register_hook(self, hook):
        self.hooks.append(hook)


class Module:
    """A layer of attention with some attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Model:
    """Calls attention as it is told, and hands output n, from 1, a gradient of n everywhere."""

    def __init__(self, attentions, calls):
        self.attentions, self.calls, self.name = attentions, calls, "sdpa"

    def set_attn_implementation(self, name):
        self.name = name

    def __call__(self):
        attend = self.attentions()[self.name]
        self.outs = [attend(*call, **options)[0] for *call, options in self.calls]
        return types.SimpleNamespace(loss=self)

    def backward(self):
        for number, out in reversed(list(enumerate(self.outs, 1))):
            for hook in out.hooks:
                hook(Tensor(np.full_like(out.values, number)))


def interface(**functions):
    """A class as AttentionInterface is: one table of functions for all its instances."""
    members = {"__getitem__": lambda _, name: functions[name], "register": functions.__setitem__}
    return type("Interface", (), members)


def sdpa(module, query, key, value, mask, **options):
    """An output in bfloat16, as under autocast; no test reads its values."""
    batch, heads, length, _ = query.shape
    return Tensor(np.zeros((batch, length, heads, value.shape[-1]), ml_dtypes.bfloat16)), None


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Runs the recipe on a model that calls attention so; returns the layers in its file."""

    def run(*calls):
        attentions, masks = interface(sdpa=sdpa), interface(sdpa=None)
        transformers = types.SimpleNamespace(
            AttentionInterface=attentions, AttentionMaskInterface=masks
        )
        monkeypatch.setitem(sys.modules, "transformers", transformers)
        monkeypatch.chdir(tmp_path)
        exec(RECIPE, {"model": Model(attentions, calls), "batch": {}})
        assert "capturing" in masks.register.__self__  # else a model would get no mask
        return array_file.load(tmp_path / "step.npz")

    return run


RANDOM = np.random.default_rng(0)
Q, K = (RANDOM.standard_normal((2, heads, 8, 4)).astype(np.float32) for heads in (4, 2))
TENSORS = Tensor(Q), Tensor(K), Tensor(2 * K)


def rows_first(values):
    return values.astype(ml_dtypes.bfloat16).swapaxes(1, 2)


def test_the_recipe_saves_every_module_with_its_own_gradient(saved):
    decoder, encoder = Module(), Module(is_causal=False)
    layers = saved((encoder, *TENSORS, None, {"scaling": 0.25}), (decoder, *TENSORS, None, {}))
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    assert [(layer.is_causal, layer.scale) for layer in layers] == [(False, 0.25), (True, 0.5)]
    for number, layer in enumerate(layers, 1):
        for array, values in ((layer.q, Q), (layer.k, K), (layer.v, 2 * K)):
            assert array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(array, rows_first(values))
        np.testing.assert_array_equal(layer.do, np.full((2, 8, 4, 4), number, layer.do.dtype))
        assert not any("not kept" in note for note in layer.notes)


def test_a_module_that_is_called_twice_keeps_arrays_and_gradient_of_one_call(saved):
    module, others = Module(), [Tensor(-x.values) for x in TENSORS]
    (layer,) = saved((module, *TENSORS, None, {}), (module, *others, None, {}))
    np.testing.assert_array_equal(layer.q, rows_first(Q))
    assert np.all(layer.do == 1)  # backwards, the first call comes last


@pytest.mark.parametrize(
    ("mask", "options", "is_causal", "window", "notes"),
    [
        (None, {"is_causal": False}, False, None, []),
        ("a mask", {}, True, None, ["a mask"]),
        ("that of the window", {"sliding_window": 3}, True, (2, 0), []),
        ("that of the window", {"sliding_window": 3, "is_causal": False}, False, (2, 2), []),
        (None, {"dropout": 0.0, "position_bias": None}, True, None, []),
        (None, {"dropout": 0.1, "position_bias": 1}, True, None, ["position_bias, dropout"]),
    ],
)
def test_the_recipe_saves_what_hides_keys_or_names_it(
    saved, mask, options, is_causal, window, notes
):
    (layer,) = saved((Module(), *TENSORS, mask, options))
    assert (layer.is_causal, layer.window) == (is_causal, window)
    assert [note.split(" of the call")[0] for note in layer.notes if "not kept" in note] == notes


@pytest.mark.parametrize("name", ["s_aux", "softcap"])
def test_the_recipe_stops_at_what_diagnose_does_not_compute(saved, name):
    expected = rf"the model has .* \({name}\), which diagnose does not compute"
    with pytest.raises(CaptureError, match=expected):
        saved((Module(), *TENSORS, None, {name: 30.0}))


def test_a_model_that_calls_no_attention_says_so(saved):
    with pytest.raises(CaptureError, match=r"nothing was captured: .*set_attn_implementation"):
        saved()


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
    layers = array_file.load(tmp_path / "step.npz")
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
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_recipe_notes_masks_and_refuses_sinks(reentrant, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="the recipe needs torch")
    transformers = pytest.importorskip("transformers", reason="the recipe needs transformers")
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(1, WORDS, (2, LENGTH))
    tokens[0, :3] = 0  # padding, without which there is no mask
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": tokens > 0}
    model, _ = small_model(transformers, "Llama")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    exec(RECIPE, {"model": model, "batch": batch})
    for layer in array_file.load(tmp_path / "step.npz"):
        assert "a mask of the call was not kept" in layer.notes[-1]
        assert np.any(layer.do)
    config = transformers.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(CaptureError, match="sinks"):
        exec(RECIPE, {"model": transformers.GptOssForCausalLM(config), "batch": batch})
