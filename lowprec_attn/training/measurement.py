"""The diagnostics that a run computes while it trains: signals of every layer.

They use the first sequence of the step's batch, and the parameters before the step's update.
Nothing waits for them until their values are requested.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.training.across_steps import AcrossSteps
from lowprec_attn.training.devices import ALIKE, Devices
from lowprec_attn.training.settings import Model, TrainSettings
from lowprec_attn.training.signals import Directions, Signals, make_signals
from lowprec_attn.training.step import make_loss, root_key, step_key


class Measurement:
    """The measurements of a run.

    Args:
      settings: settings of the run.
      devices: devices that the run uses.
      directions: directions of the last measurement before this process; see `AcrossSteps`.
      recorded: signals of that measurement; see `AcrossSteps`.

    Attributes:
      across: the signals that compare measurements; a checkpoint holds its `directions`.
    """

    def __init__(
        self,
        settings: TrainSettings,
        devices: Devices,
        directions: Directions | None,
        recorded: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        # One sequence cannot be split over devices.
        self._first_sequence = devices.jit(_first_sequence, out_shardings=devices.replicated)
        self._signals = _signals_program(settings.model, settings.attention, devices)
        self._root = root_key(settings)
        self.across = AcrossSteps(settings, devices, directions, recorded)

    def signals(self, params: Any, step: int, arrays: tuple[Array, Array]) -> Signals:
        """The signals of every layer and head on the first sequence of a batch."""
        key = step_key(self._root, jnp.int32(step))
        key = jax.random.fold_in(key, 0)  # the key of the first micro-batch
        sequence = self._first_sequence(*arrays)
        return self.across.join(*self._signals(params, *sequence, key))

    def values(self, signals: Signals) -> dict[str, dict[str, Any]]:
        """Returns the fetched signals with the sums over the measurements so far."""
        return self.across.add_up(jax.device_get(signals))


@functools.lru_cache(maxsize=ALIKE)  # cached like the programs in `devices`
def _signals_program(model: Model, attention: AttentionSettings, devices: Devices) -> Any:
    """Returns the jitted function that `make_signals` makes for a run."""
    signals = make_signals(model, attention, make_loss(model, attention, devices.attend_whole))
    return devices.jit(signals, out_shardings=devices.replicated)


def _first_sequence(inputs: Array, targets: Array) -> tuple[Array, Array]:
    """Returns the first sequence [1, T] of a batch [A, B/A, T]."""
    return inputs[0, :1], targets[0, :1]
