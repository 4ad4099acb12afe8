"""Hugging Face folders of Llama and Qwen3: reading, examining, writing."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama import CONFIG, IDS, QWEN3, forward, tensors
from safetensors.numpy import load_file, save_file

from lowprec_attn import attention
from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics.examine import folder_layers
from lowprec_attn.gpt2.hugging_face import WeightsError
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.llama import hugging_face
from lowprec_attn.llama.model import Llama
from lowprec_attn.numerics import EXACT, StandardMax

CONTEXT = CONFIG["max_position_embeddings"]
KINDS = {
    "llama": CONFIG,
    "tied": CONFIG | {"tie_word_embeddings": True},
    "qwen3": QWEN3,
}


def logits(settings, params, ids):
    """Logits [T, V] of this library's model in float32 with exact attention."""
    heads = group_heads([(EXACT, StandardMax())] * settings.heads)
    arithmetic = AttentionSettings(layers=(heads,) * settings.layers)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(settings, arithmetic, nnx.Rngs(0))))
    model = nnx.merge(graph, params)
    attend = Attend(attention.dot_product_attention)
    hidden, _ = jax.jit(lambda ids: model(ids, attend))(jnp.asarray(ids, jnp.int32)[None])
    return np.asarray(hidden[0]) @ np.asarray(model.output_table).T


def read(config, weights):
    settings = hugging_face.model_settings(config, "float32")
    return settings, hugging_face.parameters(weights, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_published_model(kind):
    config, ids = KINDS[kind], IDS[:CONTEXT]
    weights = tensors(config)
    expected, _ = forward(weights, ids, config)
    # float32 sums of at most 40 terms, through 2 layers. Without rotation they would be off by 1.
    ours = logits(*read(config, weights), ids)
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_was_read(kind, tmp_path):
    config, weights = KINDS[kind], tensors(KINDS[kind])
    settings, params = read(config, weights)
    hugging_face.save(tmp_path / "out", settings, params)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hugging_face.model_settings(written, "float32") == settings
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_stands_in_a_folder_is_not_written_over(name, tmp_path):
    (tmp_path / name).symlink_to(tmp_path / "mine")
    settings, params = read(CONFIG, tensors())
    with pytest.raises(WeightsError, match=f"{name} is there already; give another folder"):
        hugging_face.save(tmp_path, settings, params)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
)
def test_a_folder_of_pickled_weights_says_how_to_save_them(name, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"")
    np.save(tmp_path / "ids.npy", IDS)
    assert main(["diagnose", str(tmp_path), f"--text={tmp_path / 'ids.npy'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no model.safetensors; pickled weights are not read" in line


def test_a_folder_is_examined_layer_by_layer(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    save_file(tensors(QWEN3), tmp_path / "model.safetensors")
    np.save(tmp_path / "ids.npy", IDS)
    layers = folder_layers.load(tmp_path, tmp_path / "ids.npy")
    _, queries = forward(tensors(QWEN3), IDS[:CONTEXT], QWEN3)
    for layer, q in zip(layers, queries, strict=True):
        assert layer.k.shape == (1, CONTEXT, 2, 8)
        # bfloat16 activations round every operand by 2⁻⁸.
        np.testing.assert_allclose(layer.q[0].astype(np.float64), q, atol=0.05 * np.abs(q).max())
    code = main(
        [
            *("diagnose", str(tmp_path), f"--text={tmp_path / 'ids.npy'}", "--numerics=flash"),
            f"--json={tmp_path / 'json'}",
        ]
    )
    assert code in (0, 3)
    assert "layer_01" in capsys.readouterr().out
    measured = json.loads((tmp_path / "json").read_text())["layers"][1]["signals"]
    # The gradient of W_Q is known despite rotation and norm.
    assert all("query_weight_gradient_error_relative" in of for of in measured.values())


REFUSED = [
    ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu', and only 'silu'"),
    ({"attention_bias": True}, {}, "attention_bias True, and only False"),
    ({"rope_scaling": {"factor": 2.0}}, {}, "rope_scaling .*, and only None"),
    ({"rope_parameters": {"rope_type": "llama3"}}, {}, "'llama3'.*, and only rope_type 'default'"),
    ({"rope_parameters": {"rope_theta": "a"}}, {}, "rope_theta 'a', not a positive number"),
    (
        {"num_key_value_heads": 3},
        {},
        "num_attention_heads 4, not a multiple of num_key_value_heads 3",
    ),
    ({"head_dim": 5}, {}, "head_dim 5, and RoPE needs an even number"),
    ({"num_hidden_layers": None}, {}, "num_hidden_layers None, not a number"),
    ({"num_hidden_layers": 3}, {}, r"there is no tensor model\.layers\.2\."),
    ({"vocab_size": 51}, {}, r"lm_head.weight gives head as float32\[50, 24\]"),
    ({"tie_word_embeddings": True}, {}, "lm_head.weight is not embed_tokens.weight"),
    ({"tie_word_embeddings": "false"}, {}, "tie_word_embeddings 'false', and only False or True"),
    ({"num_hidden_layers": 10**8}, {}, "num_hidden_layers 100000000, not a number from 1 to 4096"),
    ({"hidden_size": 2**24}, {}, r"as float32\[24, 16\], and config.json asks for"),
    ({"vocab_size": 2**24}, {}, r"as float32\[50, 24\], and config.json asks for"),
    ({"max_position_embeddings": 10**12}, {}, "max_position_embeddings 1000000000000, not a"),
    ({"rms_norm_eps": float("nan")}, {}, "rms_norm_eps nan, not a positive number"),
]


@pytest.mark.parametrize(("change", "added", "words"), REFUSED)
def test_other_models_are_refused(change, added, words):
    with pytest.raises(WeightsError, match=words) as error:
        read(CONFIG | change, tensors() | added)
    assert "\n" not in str(error.value)


def test_a_tied_table_with_nan_is_tied():
    table = np.full_like(tensors()["model.embed_tokens.weight"], np.nan)
    twice = {"model.embed_tokens.weight": table, "lm_head.weight": table.copy()}
    read(CONFIG | {"tie_word_embeddings": True}, tensors() | twice)


def test_a_model_type_that_is_unknown_lists_those_that_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "bert"}))
    with pytest.raises(folder_layers.DiagnoseError, match="'bert', and only gpt2, llama, qwen3"):
        folder_layers.load(tmp_path, tmp_path / "ids.npy")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_both_ways(kind, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    fields = {name: value for name, value in KINDS[kind].items() if name != "model_type"}
    name = "Qwen3" if kind == "qwen3" else "Llama"
    config = getattr(transformers, f"{name}Config")(**fields, initializer_range=0.3)
    made = getattr(transformers, f"{name}ForCausalLM")
    model, ids = made(config).eval(), IDS[:CONTEXT]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.3)
        model.save_pretrained(tmp_path / "theirs")
        expected = model(torch.tensor(ids[None])).logits[0].numpy()
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    settings, params = read(written, folder_layers._tensors(tmp_path / "theirs"))
    tolerance = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(settings, params, ids), expected, atol=tolerance)
    hugging_face.save(tmp_path / "ours", settings, params)
    with torch.no_grad():
        again = made.from_pretrained(tmp_path / "ours").eval()(torch.tensor(ids[None])).logits[0]
    np.testing.assert_array_equal(again.numpy(), expected)
