"""`lowprec-attn diagnose FOLDER --text FILE` on a Hugging Face GPT-2."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lowprec_attn import attention
from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics.examine import folder_layers
from lowprec_attn.errors import UserError
from lowprec_attn.gpt2 import hugging_face
from lowprec_attn.gpt2.model import GPT2, Attend
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.numerics import EXACT, StandardMax

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 2, 2, 16, 12, 50
CONFIG = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "n_positions": CONTEXT,
    "vocab_size": VOCABULARY,
}
IDS = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT + 5)


def tensors(prefix=""):
    """Random weights under the names of transformers, in which every bias and scale matters."""
    rng = np.random.default_rng(0)

    def normal(*shape, mean=0.0, std=0.3):
        return (mean + std * rng.standard_normal(shape)).astype(np.float32)

    d, found = WIDTH, {}
    for i in range(LAYERS):
        for name, shape in {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, 4 * d),
            "mlp.c_proj": (4 * d, d),
        }.items():
            found[f"h.{i}.{name}.weight"] = normal(*shape)
            found[f"h.{i}.{name}.bias"] = normal(shape[1])
        found[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, CONTEXT, CONTEXT), bool))  # a buffer
        for name in ("ln_1", "ln_2"):
            found[f"h.{i}.{name}.weight"] = normal(d, mean=1.0)
            found[f"h.{i}.{name}.bias"] = normal(d)
    found |= {"wte.weight": normal(VOCABULARY, d), "wpe.weight": normal(CONTEXT, d)}
    found |= {"ln_f.weight": normal(d, mean=1.0), "ln_f.bias": normal(d)}
    return {prefix + name: value for name, value in found.items()}


def forward(w, ids):
    """Logits [T, V] and each layer's q [T, N, H] of GPT-2 as published, in float64."""
    w = {name: x.astype(np.float64) for name, x in w.items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    x, queries = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)], []
    for i in range(LAYERS):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.reshape(len(ids), HEADS, -1) for part in np.split(qkv, 3, -1))
        queries.append(q)
        s = np.einsum("tnh,snh->nts", q, k) / math.sqrt(WIDTH / HEADS)
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v)
        x = x + linear(o.reshape(len(ids), -1), f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T, queries


def logits(weights, ids, config=CONFIG, packed=False):
    """Logits [T, V] of this library's model in float32 with exact attention."""
    settings = hugging_face.model_settings(config, "float32")
    params = hugging_face.parameters(weights, settings)
    heads = group_heads([(EXACT, StandardMax())] * settings.heads)
    arithmetic = AttentionSettings(layers=(heads,) * settings.layers)
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT2(settings, arithmetic, nnx.Rngs(0))))
    model = nnx.merge(graph, params)
    attend = Attend(attention.dot_product_attention, packed)
    hidden, _ = jax.jit(lambda ids: model(ids, attend))(jnp.asarray(ids, jnp.int32)[None])
    return np.asarray(hidden[0]) @ np.asarray(params["tokens"]["embedding"][...]).T


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors("transformer."), path / "model.safetensors")
    np.save(path / "ids.npy", IDS)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_those_of_the_published_model(packed):
    ids = IDS[:CONTEXT]
    expected, _ = forward(tensors(), ids)
    # float32 sums of at most 64 terms, through 2 layers. Zeroed biases would be off by 1 or more.
    np.testing.assert_allclose(logits(tensors(), ids, packed=packed), expected, atol=2e-5)


def test_a_folder_is_examined_layer_by_layer(folder, capsys):
    layers = folder_layers.load(folder, folder / "ids.npy")
    _, queries = forward(tensors(), IDS[:CONTEXT])
    assert [layer.name for layer in layers] == ["layer_00", "layer_01"]
    for layer, q in zip(layers, queries, strict=True):
        assert layer.q.shape == (1, CONTEXT, HEADS, WIDTH // HEADS)
        # bfloat16 activations round every operand by 2⁻⁸.
        np.testing.assert_allclose(layer.q[0].astype(np.float64), q, atol=0.05 * np.abs(q).max())
        assert np.any(layer.do) and layer.x.shape == (1, CONTEXT, WIDTH)
    assert main(["diagnose", str(folder), "--text", str(folder / "ids.npy")]) in (0, 3)
    printed = capsys.readouterr().out
    note = f"one step in bfloat16 and flash, on the first {CONTEXT + 1} tokens of"
    assert note in printed and "layer_01" in printed and "published" in printed


REFUSED = [
    ({"activation_function": "relu"}, {}, "activation_function 'relu', and only 'gelu_new'"),
    ({"n_head": 3}, {}, "n_embd 16, not a multiple of n_head 3"),
    ({"n_layer": None}, {}, "n_layer None, not a number"),
    ({"n_inner": 8}, {}, "n_inner 8, and this library computes only 4 n_embd"),
    ({"n_layer": 3}, {}, r"there is no tensor h\.2\.ln_1|there is no tensor h\.2\.attn"),
    ({"vocab_size": 51}, {}, r"wte.weight gives tokens/embedding as float32\[50, 16\]"),
    ({}, {"lm_head.weight": np.zeros((VOCABULARY, WIDTH), np.float32)}, "only tied output"),
]


@pytest.mark.parametrize(("change", "added", "words"), REFUSED)
def test_other_models_are_refused(change, added, words):
    with pytest.raises(hugging_face.WeightsError, match=words) as error:
        settings = hugging_face.model_settings(CONFIG | change, "float32")
        hugging_face.parameters(tensors() | added, settings)
    assert "\n" not in str(error.value)


def test_a_tied_table_with_nan_is_tied():
    """The weights of a run that broke, as PyTorch saves them: the table is there twice."""
    broken = tensors()
    broken["wte.weight"] = broken["wte.weight"].copy()
    broken["wte.weight"][3] = np.nan
    broken["lm_head.weight"] = broken["wte.weight"].copy()
    settings = hugging_face.model_settings(CONFIG, "float32")
    params = hugging_face.parameters(broken, settings)
    assert np.isnan(params["tokens"]["embedding"][...][3]).all()


TEXTS = {
    "short.npy": (np.array([3]), "holds 1 token; give at least 2"),
    "beyond.npy": (
        np.array([3, 50, 1]),
        "token id 50 at position 1 is outside .* of 50",
    ),
    "floats.npy": (np.zeros(3), r"must hold whole numbers \[n\] or \[1, n\], got float64\[3\]"),
    "rows.npy": (np.zeros((2, 3), int), r"got int64\[2, 3\]"),
    "missing.npy": (None, "No such file"),
    "broken.npy": (b"x", "not a readable npy file"),
    "text.txt": (b"a text", "has no tokenizer.json; save it there with"),
    "latin.txt": ("é".encode("latin-1") * 9, "is not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_cannot_serve(folder, tmp_path, name):
    content, words = TEXTS[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(UserError, match=words) as error:
        folder_layers.load(folder, path)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_serve(folder, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="add --text FILE, on which the model runs"):
        folder_layers.load(tmp_path, None)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        folder_layers.load(tmp_path, folder / "ids.npy")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match="pickled weights are not read: save them again"):
        folder_layers.load(tmp_path, folder / "ids.npy")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, "must name the file of each array"),
        (["a"], "must name the file of each array"),
        ({"a": 3}, "must name files of its folder, got 3"),
        ({"a": None, "b": "x"}, "must name files of its folder, got None"),
        ({"a": "../outside.safetensors"}, r"must name files of its folder, got '\.\./outside"),
        ({"a": "/etc/passwd"}, "must name files of its folder, got '/etc/passwd'"),
        ({"a": "."}, r"must name files of its folder, got '\.'"),
    ],
)
def test_an_index_that_cannot_serve(folder, tmp_path, weight_map, words):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=words) as error:
        folder_layers.load(tmp_path, folder / "ids.npy")
    assert "\n" not in str(error.value)


def test_text_takes_the_tokenizer_of_the_folder(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    copy = tmp_path / "gpt2"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).symlink_to(folder / name)
    tokenizer.save(str(copy / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in IDS))
    of_text = folder_layers.load(copy, tmp_path / "text.txt")
    of_ids = folder_layers.load(copy, folder / "ids.npy")
    for a, b in zip(of_text, of_ids, strict=True):
        np.testing.assert_array_equal(a.q, b.q)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_logits_are_those_of_transformers(tmp_path, prefix):
    torch = pytest.importorskip("torch", reason="compares with transformers")
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16, initializer_range=0.3
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
        saved = model if prefix else model.transformer
        saved.save_pretrained(tmp_path, safe_serialization=True)
        expected = model(torch.tensor(IDS[None, :16])).logits[0].numpy()
    written = folder_layers._tensors(tmp_path)
    assert any(name.startswith("transformer.") for name in written) == bool(prefix)
    ours = logits(written, IDS[:16], json.loads((tmp_path / "config.json").read_text()))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
    np.save(tmp_path / "ids.npy", IDS)
    assert len(folder_layers.load(tmp_path, tmp_path / "ids.npy")) == 2
