"""The settings of a training run, as frozen records. Their defaults are in the configs.

`training.config` makes them once from a config. The code that takes them reads no ConfigDict, flag
or environment variable.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lowprec_attn.gpt2.settings import AttentionSettings, ModelSettings
from lowprec_attn.llama.settings import LlamaSettings

Model = ModelSettings | LlamaSettings
MODELS: dict[str, type[Model]] = {"gpt2": ModelSettings, "llama": LlamaSettings}
"""The class of settings for each value of `config.model.architecture`."""

SEEDS = 2**32  # number of seeds; JAX takes larger ones modulo this number


def recorded_model(fields: Mapping[str, Any]) -> Model:
    """Returns the model settings that the config of a run has recorded.

    Raises:
      KeyError, TypeError: the config is of another version.
    """
    return MODELS[fields.get("architecture", "gpt2")](**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the tokens come from.

    Attributes:
      path: a directory with `train.bin` and `val.bin` (nanoGPT format, or as written by
        `lowprec-attn prepare`), or None for a built-in text.
      builtin: the text to use without a path: the `documentation` that comes with Python
        (`data.builtin_text`), or `lookup` (`data.lookup_text`).
    """

    path: str | None
    builtin: Literal["documentation", "lookup"] = "documentation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with warm-up, cosine decay and global-norm clipping.

    Attributes:
      peak_lr, end_lr: learning rate after warm-up and at the last step.
      warmup_steps: steps of linear warm-up from 0.
      b1, b2, eps: Adam's decay rates and ε ≥ 0; with ε = 0 a parameter whose second moment is
        still exactly zero is left unchanged (0/0 := 0).
      weight_decay: decoupled decay λ ≥ 0 of matrices and embeddings; 0 switches it off.
      clip_norm: global gradient-norm bound, None for no clipping.
      qk_clip: τ > 0, the largest score that a head keeps; see `training.qk_clip`. None for no
        bound.
    """

    peak_lr: float
    end_lr: float
    warmup_steps: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float | None
    qk_clip: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackSettings:
    """When a run goes back to a checkpoint by itself, and what it changes then.

    PaLM was trained in this way: its runs went back to some 100 steps before a spike and skipped
    200 to 500 batches (Chowdhery et al., arXiv 2204.02311, section 5.1).

    Attributes:
      steps: smallest number of steps from the checkpoint to the onset, ≥ 0.
      after: steps of excess loss (`runs.instability.explosion`) that cause a rollback, ≥ 1. A loss,
        gradient or update that is not finite causes a rollback at once.
      tries: largest number of rollbacks, ≥ 1. When all are used, the run stops instead.
      attention: arithmetic after a rollback, None to keep the arithmetic.
    """

    steps: int
    after: int
    tries: int
    attention: AttentionSettings | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run.

    Attributes:
      name, variant: names of the config and its variant, for example `gpt2_bf16` and `tiny`.
      batch_size: sequences per optimizer step, over all devices and micro-batches.
      accumulation_steps: micro-batches A of an optimizer step.
      seed: root of initialisation, data order and stochastic rounding, in [0, 2³²).
      diagnostics_every, checkpoint_every, eval_every: period in steps, 0 for never. A checkpoint is
        saved before the first step and after the last in any case.
      eval_batches: batches of `batch_size` validation sequences per evaluation.
      stop_exploded_after: steps of excess loss (`runs.instability.explosion`) after which the run
        ends, None to go on.
      rollback: when and how to go back if the loss is in excess or not finite (`config.rollback`).
        None for no rollbacks.
      checkpoints_kept: how many of the newest checkpoints stay on disk, beside those that a
        rollback may need.
      devices: how many devices to use, None for all.
      shard_optimizer: split the optimizer's state over the devices.
      resume_from: run directory whose newest checkpoint the run starts from; other settings may
        differ. None for a fresh start.
      resume_step: the run starts from the newest checkpoint of `resume_from` at or before this
        step, None for the newest of all.
    """

    name: str
    variant: str
    model: Model
    attention: AttentionSettings
    data: DataSettings
    optimizer: OptimizerSettings
    steps: int
    batch_size: int
    accumulation_steps: int
    seed: int
    diagnostics_every: int
    checkpoint_every: int
    checkpoints_kept: int
    eval_every: int
    eval_batches: int
    stop_exploded_after: int | None
    rollback: RollbackSettings | None
    resume_from: str | None
    resume_step: int | None
    devices: int | None
    shard_optimizer: bool
