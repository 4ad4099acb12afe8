"""A Llama-style model in bfloat16, with FlashAttention's arithmetic and the usual recipe.

Command:   python train.py --config=configs/llama_bf16.py
           python train.py --config=configs/llama_bf16.py:full --config.data.path=DIR
Variants:  Without a name, a CPU runs `tiny` and an accelerator runs `short`. `full`, `350m` and
           `1b` have 124.8, 354.7 and 1,179.2 M parameters with GPT-2's vocabulary and need a text
           of billions of tokens. `full` has the layers and heads of GPT-2 124M. Its output layer
           is tied, because a separate one would be a third of the model. `1b` has the blocks of
           Llama 3.2 1B.
Cost:      `tiny` takes 1.4 minutes on 2 CPU cores. `full` was trained for 121 million tokens
           (results/true_bfloat16/llama), the others not. They recompute activations only if
           `model.remat` says so.
Result:    `tiny` ends 1.0 below the unigram loss of the built-in text (one run).
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

_BASE = runpy.run_path(str(Path(__file__).with_name("gpt2_bf16.py")))

_SHAPES = {
    "tiny": {
        "layers": 4, "heads": 4, "kv_heads": 2, "width": 128, "head_size": 32, "value_size": 32,
        "hidden": 352, "tied": False, "context": 256, "vocab_size": 320,
    },
    "full": {
        "layers": 12, "heads": 12, "kv_heads": 4, "width": 768, "head_size": 64, "value_size": 64,
        "hidden": 2432, "tied": True, "context": 1024, "vocab_size": 50304,
    },
    "350m": {
        "layers": 24, "heads": 16, "kv_heads": 4, "width": 1024, "head_size": 64, "value_size": 64,
        "hidden": 2560, "tied": False, "context": 1024, "vocab_size": 50304,
    },
    "1b": {
        "layers": 16, "heads": 32, "kv_heads": 8, "width": 2048, "head_size": 64, "value_size": 64,
        "hidden": 8192, "tied": False, "context": 1024, "vocab_size": 50304,
    },
}  # fmt: skip
_PEAK_LR = {"tiny": 2e-3, "350m": 3e-4, "1b": 2e-4}  # the rates of gpt2_bf16.py for these sizes


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a variant; '' picks `tiny` or `short`, whichever suits the device."""
    known = ("tiny", "short", "full", "350m", "1b")
    if variant not in ("", *known):
        raise ValueError(f"unknown variant {variant!r}; variants are {', '.join(known)}")
    config = _BASE["get_config"](variant if variant in ("", "tiny", "short") else "full")
    config.name = "llama_bf16"
    config.variant = variant = variant or config.variant

    config.model = ConfigDict(_SHAPES.get(variant, _SHAPES["full"]))
    config.model.architecture = "llama"
    config.model.rope_theta = 1e4
    config.model.norm_eps = 1e-5
    config.model.init = "gpt2"  # or small_init, lecun_uniform
    config.model.activation_dtype = "bfloat16"
    config.model.logits_dtype = "float32"  # bfloat16 is faster and matches PyTorch's autocast
    config.model.z_loss = 0.0  # factor of log²Z of the output softmax; PaLM uses 1e-4
    config.model.remat = placeholder(str)  # nothing_saveable: recompute every block
    config.model.qk_norm = False  # True: divide q and k by their RMS, times a learned scale
    config.model.soft_cap = placeholder(float)  # c of c · tanh(score / c); Gemma 2 uses 50
    config.model.embedding_mean = placeholder(float)  # c: all tokens start with one vector of ±c
    config.model.sinks = False  # True: every head has a learned score without a key, as in gpt-oss

    config.attention.numerics = "flash"
    config.optimizer.peak_lr = _PEAK_LR.get(variant, 6e-4)
    config.optimizer.end_lr = 0.1 * config.optimizer.peak_lr
    config.optimizer.weight_decay = 0.1
    return config
