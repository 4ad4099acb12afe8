"""The programs of a run: one step for training and for `lowprec-attn compile`."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from lowprec_attn.training.devices import Devices
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.step import Steps, TrainState, make_steps, root_key


class Program(NamedTuple):
    """The training step of a run, and the shapes of its arguments.

    Attributes:
      steps: the functions that the programs are made of.
      init: (root) -> TrainState, jitted.
      train: (state, inputs, targets [A, B/A, T], root) -> (state, StepMetrics), jitted; the state
        is donated.
      state: shapes, dtypes and shardings of the state.
      batch: the same of the inputs, and of the targets.
      root: the same of the root key.
    """

    steps: Steps
    init: Any
    train: Any
    state: TrainState
    batch: jax.ShapeDtypeStruct
    root: jax.ShapeDtypeStruct

    def initial_state(self, root: Key[Array, ""]) -> TrainState:
        """What `init` gives, compiled in seconds on a GPU as well."""
        with random_bits_by_kernel():
            state: TrainState = self.init(root)
            return state


@contextlib.contextmanager
def random_bits_by_kernel() -> Iterator[None]:
    """Threefry by JAX's own kernel wherever a program is compiled for a GPU; the same bits.

    XLA would compile it anew for each of GPT-2's 74 random arrays, which takes half a minute.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def make_program(settings: TrainSettings, devices: Devices) -> Program:
    """The programs of a run; nothing is compiled yet, and the devices need not be there."""
    steps = make_steps(settings, devices.attend_part, devices.over_devices)
    root = jax.eval_shape(lambda: root_key(settings))
    shapes = jax.eval_shape(steps.init, root)
    placed = devices.shardings(shapes)
    rows = settings.batch_size // settings.accumulation_steps
    return Program(
        steps=steps,
        init=jax.jit(steps.init, out_shardings=placed),
        train=devices.jit(
            steps.train, donate_argnums=0, out_shardings=(placed, devices.replicated)
        ),
        state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            placed,
        ),
        batch=jax.ShapeDtypeStruct(
            (settings.accumulation_steps, rows, settings.model.context),
            jnp.int32,
            sharding=devices.split,
        ),
        root=jax.ShapeDtypeStruct(root.shape, root.dtype, sharding=devices.replicated),
    )
