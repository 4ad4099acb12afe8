"""Restores the model of a run at a checkpoint, to measure it outside its training."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint, read_record
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.llama import hugging_face
from lowprec_attn.llama.settings import LlamaSettings
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import ConfigError, train_settings
from lowprec_attn.training.devices import Devices, make_program, run_devices
from lowprec_attn.training.settings import TrainSettings


class SavedModel(NamedTuple):
    """A run's model at a checkpoint.

    Attributes:
      step: step of the checkpoint.
      params: parameters, on the devices.
      devices: devices of the settings with which the model was restored.
      attention: arithmetic of the steps before the checkpoint. After a rollback it is the
        arithmetic that the rollback has set.
    """

    step: int
    params: Any
    devices: Devices
    attention: AttentionSettings


def settings_of(path: Path) -> TrainSettings:
    """Returns the settings of a run directory, changed to one device.

    Raises:
      UserError: the path is no run directory, or its config is damaged or of another version.
    """
    fields = {name: value for name, value in _config_of(path).items() if name != "text_sha256"}
    try:
        return dataclasses.replace(train_settings(fields), devices=1, shard_optimizer=False)
    except ConfigError as error:
        raise RunError(
            f"{RunDir(path).config}: {error}; it was written by another version, or by hand"
        ) from error


def val_sha256_of(path: Path) -> str | None:
    """Returns the SHA-256 of a run's held-out tokens, or None if its config names none.

    Raises:
      UserError: the path is no run directory, or its config is damaged.
    """
    digests = _config_of(path).get("text_sha256")
    return digests.get("val") if isinstance(digests, dict) else None


def _config_of(path: Path) -> dict[str, Any]:
    config = RunDir(path).config
    if not config.is_file():
        raise RunError(f"{path} is not a run directory: it has no config.json")
    return read_record(config)


def restore(
    settings: TrainSettings, run_dir: RunDir, last_step: int | None = None
) -> SavedModel | None:
    """Returns the model at the newest intact checkpoint, or None if none was ever completed.

    Args:
      settings: settings of the run.
      run_dir: directory of the run.
      last_step: checkpoints of later steps are left alone; None to take any.

    Raises:
      RunError: `Checkpoints.restore` or `run_devices` raises it.
    """
    devices = run_devices(settings)
    with Checkpoints(run_dir.checkpoints) as checkpoints:
        restored = checkpoints.restore(make_program(settings, devices).state, last_step)
    if restored is None:
        return None
    attention = _attention(settings, restored.records.get(run_dir.rollbacks.name))
    return SavedModel(restored.step, restored.state.params, devices, attention)


def to_hugging_face(path: Path, folder: Path) -> None:
    """Writes the newest checkpoint of a Llama-style run in the format of transformers.

    Args:
      path: the run directory.
      folder: see `llama.hugging_face.save`.

    Raises:
      UserError: the run trains another model, or has no checkpoint.
    """
    settings = settings_of(path)
    if not isinstance(settings.model, LlamaSettings):
        raise RunError(f"{path}: its model is {settings.model.architecture}; only llama is written")
    saved = restore(settings, RunDir(path))
    if saved is None:
        raise RunError(f"{path}: holds no complete checkpoint; train on, or wait")
    hugging_face.save(folder, settings.model, saved.params)


def _attention(settings: TrainSettings, rollbacks: Fingerprint | None) -> AttentionSettings:
    """Returns the arithmetic of a checkpoint, by the fingerprint of the rollbacks before it."""
    went_back = rollbacks is not None and rollbacks.size > 0
    if went_back and settings.rollback is not None and settings.rollback.attention is not None:
        return settings.rollback.attention
    return settings.attention
