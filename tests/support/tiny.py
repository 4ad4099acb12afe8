"""The smallest training settings that still have every part, shared by the trainer's tests."""

import dataclasses
from typing import Any

from configs import gpt2_bf16, llama_bf16
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.settings import TrainSettings


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The `tiny` config as plain dicts, shrunk to 2 layers; `changes` use dotted names."""
    config = gpt2_bf16.get_config("tiny").to_dict()
    config["model"].update(layers=2, heads=2, width=32, context=32, vocab_size=257)
    return _small(config, changes)


# Two query heads share a key head, and the head size differs from width / heads.
LLAMA = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "head_size": 16, "value_size": 16}
LLAMA |= {"hidden": 48, "context": 32, "vocab_size": 257}


def llama_config(**changes: Any) -> dict[str, Any]:
    """The `tiny` config of the Llama-style model, shrunk in the same way."""
    config = llama_bf16.get_config("tiny").to_dict()
    config["model"].update(LLAMA)
    return _small(config, changes)


def _small(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config["optimizer"].update(warmup_steps=2)
    config.update(steps=6, batch_size=8, diagnostics_every=3, checkpoint_every=2, eval_every=3)
    config.update(eval_batches=1)
    for name, value in changes.items():
        *path, field = name.split("__")
        section = config
        for part in path:
            section = section[part]
        section[field] = value
    return config


def tiny_settings(**changes: Any) -> TrainSettings:
    """The settings that `tiny_config` describes."""
    return train_settings(tiny_config(**changes))


def llama_settings(**changes: Any) -> TrainSettings:
    """The settings that `llama_config` describes."""
    return train_settings(llama_config(**changes))


def with_optimizer(settings: TrainSettings, **changes: Any) -> TrainSettings:
    """A copy with some optimizer settings changed."""
    optimizer = dataclasses.replace(settings.optimizer, **changes)
    return dataclasses.replace(settings, optimizer=optimizer)
