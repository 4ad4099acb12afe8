"""A Llama-style model in bfloat16 with FlashAttention's arithmetic: the recipe of such runs.

Command:   python train.py --config=configs/llama_bf16.py
           python train.py --config=configs/llama_bf16.py:full --config.data.path=DIR
Variants:  `tiny` on a CPU, `short` on an accelerator, unless named. `full`, `350m` and `1b` have
           124.8, 354.7 and 1,179.2 M parameters with GPT-2's vocabulary and are for a text of
           billions of tokens. `full` has the layers and heads of GPT-2 124M, and ties its output
           layer, which would be a third of it; `1b` has the blocks of Llama 3.2 1B.
Cost:      tiny 1.4 minutes on 2 CPU cores. The others were not run. They compute no activations
           again unless `model.remat` says so.
Result:    tiny ends 1.0 below the unigram loss of the built-in text (one run).
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
_PEAK_LR = {"tiny": 2e-3, "350m": 3e-4, "1b": 2e-4}  # as gpt2_bf16.py has them


def get_config(variant: str = "") -> ConfigDict:
    """The config of a variant, or with '' of `tiny` or `short`, whichever suits the device."""
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
    config.model.logits_dtype = "float32"  # bfloat16 is faster, and what PyTorch's autocast does
    config.model.z_loss = 0.0  # times log²Z of the output softmax; PaLM has 1e-4
    config.model.remat = placeholder(str)  # nothing_saveable: blocks are computed again
    config.model.qk_norm = False  # q and k over their RMS, times a learned scale
    config.model.soft_cap = placeholder(float)  # c · tanh(score / c); Gemma 2 has 50
    config.model.sinks = False  # a learned score without a key, as in gpt-oss

    config.attention.numerics = "flash"
    config.optimizer.peak_lr = _PEAK_LR.get(variant, 6e-4)
    config.optimizer.end_lr = 0.1 * config.optimizer.peak_lr
    config.optimizer.weight_decay = 0.1
    return config
