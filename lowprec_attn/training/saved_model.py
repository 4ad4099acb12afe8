"""The model of a run at a checkpoint, for what measures it beside its training."""

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
      step: of the checkpoint.
      params: on the devices.
      devices: of the settings that it was restored with.
      attention: the arithmetic of the steps that led to it: after a rollback, that of the rollback.
    """

    step: int
    params: Any
    devices: Devices
    attention: AttentionSettings


def settings_of(path: Path) -> TrainSettings:
    """The settings of a run directory, for one device.

    Raises:
      UserError: it is none, or its config is damaged or of another version.
    """
    fields = {name: value for name, value in _config_of(path).items() if name != "text_sha256"}
    try:
        return dataclasses.replace(train_settings(fields), devices=1, shard_optimizer=False)
    except ConfigError as error:
        raise RunError(
            f"{RunDir(path).config}: {error}; it was written by another version, or by hand"
        ) from error


def val_sha256_of(path: Path) -> str | None:
    """The SHA-256 of the held-out tokens of a run directory; None where its config has none.

    Raises:
      UserError: as `settings_of`.
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
    """The model at the newest intact checkpoint, None where none was ever completed.

    Args:
      settings: of the run.
      run_dir: its directory.
      last_step: as `Checkpoints.restore` takes it.

    Raises:
      RunError: as `Checkpoints.restore` and `run_devices`.
    """
    devices = run_devices(settings)
    with Checkpoints(run_dir.checkpoints) as checkpoints:
        restored = checkpoints.restore(make_program(settings, devices).state, last_step)
    if restored is None:
        return None
    attention = _attention(settings, restored.records.get(run_dir.rollbacks.name))
    return SavedModel(restored.step, restored.state.params, devices, attention)


def to_hugging_face(path: Path, folder: Path) -> None:
    """Writes the newest checkpoint of a Llama-style run as transformers reads it.

    Args:
      path: the run directory.
      folder: see `llama.hugging_face.save`.

    Raises:
      UserError: it is no run of such a model, or has no checkpoint.
    """
    settings = settings_of(path)
    if not isinstance(settings.model, LlamaSettings):
        raise RunError(f"{path}: its model is {settings.model.architecture}; only llama is written")
    saved = restore(settings, RunDir(path))
    if saved is None:
        raise RunError(f"{path}: holds no complete checkpoint; train on, or wait")
    hugging_face.save(folder, settings.model, saved.params)


def _attention(settings: TrainSettings, rollbacks: Fingerprint | None) -> AttentionSettings:
    """The arithmetic of a checkpoint, which knows the record of rollbacks as it was then."""
    went_back = rollbacks is not None and rollbacks.size > 0
    if went_back and settings.rollback is not None and settings.rollback.attention is not None:
        return settings.rollback.attention
    return settings.attention
