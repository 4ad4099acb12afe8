"""The model of a run at a checkpoint, for what measures it beside its training."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint, read_record
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import ConfigError, train_settings
from lowprec_attn.training.devices import Devices, run_devices
from lowprec_attn.training.program import make_program
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


def recorded_settings(config: Mapping[str, Any]) -> TrainSettings:
    """The settings in a run's `config.json`, for one device.

    Raises:
      ConfigError: it was written by another version, or by hand.
    """
    fields = {name: value for name, value in config.items() if name != "text_sha256"}
    return dataclasses.replace(train_settings(fields), devices=1, shard_optimizer=False)


def settings_of(path: Path) -> TrainSettings:
    """The settings of a run directory, for one device.

    Raises:
      UserError: it is none, or its config is damaged or of another version.
    """
    config = RunDir(path).config
    if not config.is_file():
        raise RunError(f"{path} is not a run directory: it has no config.json")
    try:
        return recorded_settings(read_record(config))
    except ConfigError as error:
        raise RunError(
            f"{config}: {error}; it was written by another version, or by hand"
        ) from error


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


def _attention(settings: TrainSettings, rollbacks: Fingerprint | None) -> AttentionSettings:
    """The arithmetic of a checkpoint, which knows the record of rollbacks as it was then."""
    went_back = rollbacks is not None and rollbacks.size > 0
    if went_back and settings.rollback is not None and settings.rollback.attention is not None:
        return settings.rollback.attention
    return settings.attention
