"""Signals that join a step to those measured before it: do the errors of δ add up over training?"""

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
    """Adds to the signals of every measurement of a run, per layer and head:

      outer_product_similarity_across_steps, common_direction_across_steps: of (PK)[T]ᵀ X[T] at
        this measurement and the one before; see `diagnostics.across_steps`. The first measurement
        of a run has neither. Both steps look at their own training
        batch, whose gradient it is that the paper's equation adds up; so text and weights differ.
      delta_error_cumulative: Σ (δ_lp − δ_hp)[T] over the T tokens of the sequence of every
        measurement up to this one. It grows in proportion to the number of measurements where the
        errors have a persistent sign, and as its square root where signs are random. The steps
        between two measurements are not in it. A run that was resumed from another begins at 0.

    An interrupted run goes on bit for bit: `directions` are in its checkpoints, and the sums in the
    last signals that it has recorded. Directions take 4·d² bytes a layer, on every device and in
    every checkpoint: 28 MB for GPT-2 124M, beside 1.5 GB.

    Args:
      settings: of the run.
      devices: that it runs on.
      directions: of the measurement before the first, None where there is none.
      recorded: its signals, likewise.

    Attributes:
      directions: of the last measurement, None before the first.
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
        """The signals of a measurement, with its similarities to the one before; not waited for."""
        before, self.directions = self.directions, directions or None
        if before is None or not directions:
            return signals
        similar = self._similarities(directions, before)
        return {layer: values | similar[layer] for layer, values in signals.items()}

    def add_up(self, signals: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The signals, fetched, with the sums of errors up to this measurement, in float64."""
        for layer, values in signals.items():
            error = self._tokens * np.asarray(values["delta_error_mean"], np.float64)
            self._sums[layer] = self._sums.get(layer, np.float64(0)) + error
        return {
            layer: {**values, CUMULATIVE: self._sums[layer]} for layer, values in signals.items()
        }


def direction_shapes(model: Model, devices: Devices) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of the directions that a checkpoint holds, if it holds any."""
    shape = (model.heads, model.width, model.head_size)
    whole = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=devices.replicated)
    return {f"layer_{i}": whole for i in range(model.layers)}


def _similarities(now: Directions, before: Directions) -> dict[str, dict[str, Array]]:
    return {layer: across_steps(now[layer], before[layer]) for layer in now}
