"""What a training run is made of, as frozen records.

`train.py` builds these once from its config (see `lowprec_attn.run_config`); nothing in the
library reads a ConfigDict, a flag or an environment variable.
"""

import dataclasses
from typing import Literal

from lowprec_attn.numerics import Numerics, RowMax

InitStd = Literal["gpt2", "small_init", "lecun_uniform"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadArithmetic:
    """The arithmetic of one attention head: its roundings and its row-max rule."""

    numerics: Numerics
    row_max: RowMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape and initialisation of the GPT-2 model.

    Attributes:
      layers, heads, width: depth L, heads N per layer, model width d (a multiple of heads).
      context: tokens per sequence T.
      vocab_size: rows of the (tied) embedding table; 50304 is GPT-2's 50257 padded.
      init: standard deviation of the weights: `gpt2` 0.02, `small_init` sqrt(2 / (5 d)),
        `lecun_uniform` sqrt(1 / (3 d)). Projections into the residual stream are divided by
        sqrt(2 L) in every case.
      scale_placement: where 1/sqrt(H) enters: `scores` multiplies the float32 product q kᵀ;
        `qk` multiplies q and k by H^(-1/4) each, before the product and in their own format.
      activation_dtype: format of the activations between layers (the residual stream and all
        parameters stay float32).
      logits_dtype: format of the logits: float32; or bfloat16, as PyTorch's autocast has them,
        which spares memory traffic (with bfloat16 activations and an even vocab_size).
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    init: InitStd = "gpt2"
    scale_placement: Literal["scores", "qk"] = "scores"
    activation_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    logits_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Arithmetic of every head of every layer: `heads[layer][head]`, and who computes it."""

    heads: tuple[tuple[HeadArithmetic, ...], ...]
    implementation: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the tokens come from and in which order they are read.

    Attributes:
      path: a directory with `train.bin` and `val.bin` (nanoGPT format, or as written by
        `lowprec-attn prepare`), or None for the built-in text.
      replay: a file with one line of comma-separated start indices per step, or None for the
        order drawn from the run's seed.
    """

    path: str | None = None
    replay: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with warm-up, cosine decay and global-norm clipping.

    Attributes:
      peak_lr, end_lr: learning rate after warm-up and at the last step.
      warmup_steps: steps of linear warm-up from 0.
      b1, b2, eps: Adam's decay rates and ε ≥ 0; with ε = 0 a parameter whose second moment is
        still exactly zero is left unchanged (0/0 := 0).
      weight_decay: decoupled decay λ ≥ 0 of matrices and embeddings, 0 switches it off.
      clip_norm: global gradient-norm bound, None for no clipping.
    """

    peak_lr: float
    end_lr: float
    warmup_steps: int
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run.

    Attributes:
      name, variant: of the config, such as `gpt2_bf16` and `tiny`.
      batch_size: sequences per optimizer step, over all devices and micro-batches.
      accumulation_steps: micro-batches that one optimizer step is split into.
      seed: root of initialisation, data order and stochastic rounding.
      diagnostics_every, checkpoint_every, eval_every: period in steps, 0 for never.
      eval_batches: batches of `batch_size` validation sequences per evaluation.
      checkpoints_kept: how many of the newest checkpoints stay on disk.
      devices: how many devices to use, None for all.
      shard_optimizer: split the optimizer's state over the devices.
      resume_from: run directory whose newest checkpoint to start from, with any setting changed.
    """

    name: str
    variant: str
    model: ModelSettings
    attention: AttentionSettings
    data: DataSettings
    optimizer: OptimizerSettings
    steps: int
    batch_size: int
    accumulation_steps: int = 1
    seed: int = 42
    diagnostics_every: int = 100
    checkpoint_every: int = 1000
    checkpoints_kept: int = 2
    eval_every: int = 500
    eval_batches: int = 8
    resume_from: str | None = None
    devices: int | None = None
    shard_optimizer: bool = False
