"""Signals that compare a step with earlier ones: do the errors of δ add up over training?"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.diagnostics import across_steps
from lowprec_attn.training.devices import Devices
from lowprec_attn.training.settings import Model, TrainSettings
from lowprec_attn.training.signals import Directions, Signals

CUMULATIVE = "delta_error_cumulative"


class AcrossSteps:
    """Adds these signals, per layer and head, to every measurement of a run:

      outer_product_similarity_across_steps, common_direction_across_steps: compare (PK)[T]ᵀ X[T]
        at this measurement and at the one before; see `diagnostics.across_steps`. The first
        measurement of a run has neither. Each measurement uses the training batch of its own step,
        because the paper's equation adds up the gradients of these batches. Text and weights
        therefore both differ between the two.
      delta_error_cumulative: Σ (δ_lp − δ_hp)[T], summed over the T tokens of the sequence of every
        measurement up to this one. The sum grows in proportion to the number of measurements if
        the errors keep their sign, and as its square root if the signs are random. It leaves out
        the steps between two measurements. A run that was resumed from another run begins at 0.

    An interrupted run continues bit for bit, because its checkpoints hold `directions` and its last
    recorded signals hold the sums. The directions take 4·d² bytes a layer, on every device and in
    every checkpoint. For GPT-2 124M they are 28 MB, next to 1.5 GB of training state.

    Args:
      settings: settings of the run.
      devices: devices that the run uses.
      directions: directions of the last measurement before this process, None if there is none.
      recorded: signals of that measurement by layer, None if there is none.

    Attributes:
      directions: directions of the last measurement, None before the first.
    """

    def __init__(
        self,
        settings: TrainSettings,
        devices: Devices,
        directions: Directions | None,
        recorded: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        self.directions = directions
        self._tokens = settings.model.context
        self._sums = {
            layer: np.asarray(signals[CUMULATIVE], np.float64)
            for layer, signals in (recorded or {}).items()
            if CUMULATIVE in signals  # earlier versions recorded none
        }
        self._similarities = devices.jit(_similarities, out_shardings=devices.replicated)

    def join(self, signals: Signals, directions: Directions) -> Signals:
        """Returns the signals with their similarities to the last measurement, without waiting."""
        before, self.directions = self.directions, directions or None
        if before is None or not directions:
            return signals
        similar = self._similarities(directions, before)
        return {layer: values | similar[layer] for layer, values in signals.items()}

    def add_up(self, signals: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns fetched signals with the sums of errors up to this measurement, in float64."""
        for layer, values in signals.items():
            error = self._tokens * np.asarray(values["delta_error_mean"], np.float64)
            self._sums[layer] = self._sums.get(layer, np.float64(0)) + error
        return {
            layer: {**values, CUMULATIVE: self._sums[layer]} for layer, values in signals.items()
        }


def direction_shapes(model: Model, devices: Devices) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of the directions that a checkpoint may hold, by layer."""
    shape = (model.heads, model.width, model.head_size)
    whole = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=devices.replicated)
    return {f"layer_{i}": whole for i in range(model.layers)}


def _similarities(now: Directions, before: Directions) -> dict[str, dict[str, Array]]:
    return {layer: across_steps(now[layer], before[layer]) for layer in now}
