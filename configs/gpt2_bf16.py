"""GPT-2 in bfloat16 with the attention arithmetic that the public code of arXiv 2510.04212 runs.

Command:   python train.py --config=configs/gpt2_bf16.py
           python train.py --config=configs/gpt2_bf16.py:full --config.data.path=DIR
Variants:  Without a name, a CPU runs `tiny` and an accelerator runs `short`. `full` is the paper's
           run and needs a text of billions of tokens. `medium`, `large` and `xl` run for the same
           number of steps with the larger models of Radford et al. (2019): 355, 774 and 1,557 M
           parameters.
Cost:      `tiny` takes about a minute on 2 CPU cores. On one NVIDIA H200, `short` takes 72 seconds,
           mostly for compilation, and `full` an estimated 6.5 hours.
Result:    `tiny` ends 0.6 below the unigram loss of the built-in text, `short` 0.7 below (one run
           each). In `tiny` the score maximum of every layer stays small. The paper's failure took
           the full model and some 7,000 steps; docs/failure.md describes when it occurs here.
"""

import copy

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Fields of `lowprec_attn.numerics.Numerics` that a run can change one by one, for example with
# --config.attention.points.output=float32.
_POINTS = [
    "query", "key", "scores", "shift", "probs", "value", "pv", "rescale", "accumulator", "stats",
    "normalizer", "divisor", "lse", "output", "saved_output", "do", "output_bwd", "delta_value",
    "delta", "probs_bwd", "dp", "ds", "tile_grads", "grads", "exponent", "statistics", "row_sum",
    "recomputed_probs", "divided_in_dv", "mean_key",
]  # fmt: skip

# Shapes from Radford et al. (2019). Learning rates for models of these sizes from Brown et al.
# (arXiv 2005.14165, table 2.1).
_LARGER = {
    "medium": ({"layers": 24, "heads": 16, "width": 1024}, 3e-4),
    "large": ({"layers": 36, "heads": 20, "width": 1280}, 2.5e-4),
    "xl": ({"layers": 48, "heads": 25, "width": 1600}, 2e-4),
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config of a variant; '' picks `tiny` or `short`, whichever suits the device."""
    known = ("tiny", "short", "full", *_LARGER)
    if variant not in ("", *known):
        raise ValueError(f"unknown variant {variant!r}; variants are {', '.join(known)}")
    config = ConfigDict()
    config.name = "gpt2_bf16"
    config.variant = variant or _variant_for_device()
    config.seed = 42
    config.resume_from = placeholder(str)
    config.resume_step = placeholder(int)
    config.stop_exploded_after = placeholder(int)  # steps of excess loss; None: never
    config.devices = placeholder(int)  # None: all
    config.shard_optimizer = False  # True saves memory on several devices

    config.model = ConfigDict()
    config.model.init = "gpt2"  # or small_init, lecun_uniform
    config.model.scale_placement = "scores"  # or qk
    config.model.activation_dtype = "bfloat16"
    config.model.remat = placeholder(str)  # nothing_saveable: recompute every block
    config.model.biases = placeholder(bool)  # True: linear layers and norms have biases
    config.model.logits_dtype = "float32"  # bfloat16 is faster and matches PyTorch's autocast
    config.model.qk_norm = False  # True: divide q and k by their RMS, times a learned scale
    config.model.z_loss = 0.0  # factor of log²Z of the output softmax; PaLM uses 1e-4
    config.model.embedding_mean = 0.0  # c: all position embeddings start with one vector of ±c

    config.attention = ConfigDict()
    config.attention.numerics = "published"
    config.attention.points = ConfigDict({point: placeholder(str) for point in sorted(_POINTS)})
    config.attention.points.normalize_probs = placeholder(bool)
    # When the loss is in excess or not finite, the run goes back to a checkpoint and skips the
    # batches that it has read since then.
    config.rollback = ConfigDict()
    config.rollback.tries = 0  # largest number of rollbacks, for example 3
    config.rollback.steps = 100  # smallest number of steps from the checkpoint to the onset
    config.rollback.after = 100  # steps of excess loss that cause a rollback
    config.rollback.numerics = placeholder(str)  # preset after a rollback
    config.rollback.points = copy.deepcopy(config.attention.points)
    config.attention.kv_block = placeholder(int)
    config.attention.row_max = "standard"  # or dynamic_max, published
    config.attention.row_max_beta = placeholder(float)
    config.attention.row_max_tolerance = placeholder(float)
    config.attention.row_max_clamp = placeholder(float)
    config.attention.row_max_max_shift = placeholder(float)
    config.attention.layers = {}  # {1: {"numerics": "flash"}} changes the second layer
    config.attention.heads = {}  # {7: {"points": {"output": "float32"}}}: head 7 in every layer
    config.attention.implementation = placeholder(str)
    config.attention.function = placeholder(str)  # jax.nn:cudnn, or MODULE:FUNCTION of yours

    config.data = ConfigDict()
    config.data.path = placeholder(str)
    config.data.builtin = "documentation"  # or lookup; used if path is None

    config.optimizer = ConfigDict()
    config.optimizer.peak_lr = 1e-3
    config.optimizer.end_lr = 1e-5
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = placeholder(float)
    config.optimizer.clip_norm = 1.0
    config.optimizer.qk_clip = placeholder(float)  # largest score a head keeps; Kimi K2 uses 100

    config.checkpoints_kept = 2
    config.eval_batches = 8
    if config.variant == "tiny":
        _tiny(config)
    else:
        _full(config)
    if config.variant == "short":
        _short(config)
    if variant in _LARGER:
        shape, peak_lr = _LARGER[variant]
        config.model.update(shape)
        config.optimizer.peak_lr = peak_lr
    return config


def _variant_for_device() -> str:
    import jax

    return "tiny" if jax.default_backend() == "cpu" else "short"


def _tiny(config: ConfigDict) -> None:
    """A byte model that two CPU cores train in about a minute."""
    config.model.update(layers=4, heads=4, width=128, context=256, vocab_size=320)
    config.optimizer.update(peak_lr=2e-3, end_lr=2e-4, warmup_steps=40)
    config.update(steps=250, batch_size=8, accumulation_steps=1)
    config.update(diagnostics_every=50, checkpoint_every=100, eval_every=100)


def _full(config: ConfigDict) -> None:
    """The paper's 124M model: 524,288 tokens per step."""
    config.model.update(layers=12, heads=12, width=768, context=1024, vocab_size=50304)
    config.optimizer.update(warmup_steps=2000)
    config.update(steps=20_000, batch_size=512, accumulation_steps=16)
    config.update(diagnostics_every=100, checkpoint_every=500, eval_every=500)


def _short(config: ConfigDict) -> None:
    """The paper's model on the built-in text, for as long as that lasts: 3 to 4 epochs."""
    config.optimizer.update(peak_lr=6e-4, end_lr=6e-5, warmup_steps=40)
    config.update(steps=200, batch_size=32, accumulation_steps=2)
    config.update(diagnostics_every=20, checkpoint_every=100, eval_every=50)
