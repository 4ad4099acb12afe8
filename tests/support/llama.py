"""Llama as published, in float64 NumPy, and random weights under the names of transformers."""

import math

import numpy as np

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 24,
    "head_dim": 8,  # not hidden_size / num_attention_heads
    "intermediate_size": 40,
    "max_position_embeddings": 12,
    "vocab_size": 50,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3 = CONFIG | {"model_type": "qwen3", "tie_word_embeddings": True}
IDS = np.random.default_rng(1).integers(0, 50, 17)


def tensors(config=CONFIG, value_size=None):
    """Random weights, in which every scale has an effect."""
    rng = np.random.default_rng(0)

    def normal(*shape, mean=0.0, std=0.3):
        return (mean + std * rng.standard_normal(shape)).astype(np.float32)

    d, f, h = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    v = value_size or h
    found = {"model.embed_tokens.weight": normal(config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (n * h, d),
            "self_attn.k_proj": (k * h, d),
            "self_attn.v_proj": (k * v, d),
            "self_attn.o_proj": (d, n * v),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }.items():
            found[f"model.layers.{i}.{name}.weight"] = normal(*shape)
        norms = {"input_layernorm": d, "post_attention_layernorm": d}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": h, "self_attn.k_norm": h}
        for name, size in norms.items():
            found[f"model.layers.{i}.{name}.weight"] = normal(size, mean=1.0)
    found["model.norm.weight"] = normal(d, mean=1.0)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = normal(config["vocab_size"], d)
    return found


def rotated(x, theta):
    """Applies Hugging Face's rotary embedding to x [T, N, H]: x cos + rotate_half(x) sin."""
    t, _, h = x.shape
    angles = np.arange(t)[:, None] * theta ** (-np.arange(0, h, 2) / h)[None]
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., h // 2 :], x[..., : h // 2]], -1) * sin


def forward(weights, ids, config=CONFIG, soft_cap=None, sinks=None):
    """Logits [T, V] and the q [T, N, H] of every layer, in float64.

    sinks: [layers, N], or None.
    """
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]

    def norm(x, name):
        scale = w[f"{name}.weight"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    x, queries = w["model.embed_tokens.weight"][ids], []
    for i in range(config["num_hidden_layers"]):
        of = f"model.layers.{i}"

        def linear(x, name, of=of):
            return x @ w[f"{of}.{name}.weight"].T

        y = norm(x, f"{of}.input_layernorm")
        q, key, v = (
            linear(y, f"self_attn.{name}_proj").reshape(len(ids), heads, -1)
            for name, heads in (("q", n), ("k", k), ("v", k))
        )
        if config["model_type"] == "qwen3":
            q, key = norm(q, f"{of}.self_attn.q_norm"), norm(key, f"{of}.self_attn.k_norm")
        q, key = rotated(q, theta), rotated(key, theta)
        queries.append(q)
        key, v = (np.repeat(x, n // k, axis=1) for x in (key, v))
        s = np.einsum("tnh,snh->nts", q, key) / math.sqrt(q.shape[-1])
        if soft_cap is not None:
            s = soft_cap * np.tanh(s / soft_cap)
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
        p = np.exp(s)
        total = p.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[i])[:, None, None]
        o = np.einsum("nts,snh->tnh", p / total, v)
        x = x + linear(o.reshape(len(ids), -1), "self_attn.o_proj")
        y = norm(x, f"{of}.post_attention_layernorm")
        gate = linear(y, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    table = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ table.T, queries
