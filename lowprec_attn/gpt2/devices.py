"""Where a run computes: the mesh over all local devices, and its attention."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowprec_attn import attention
from lowprec_attn.gpt2.data import Batch
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.gpt2.settings import TrainSettings

_AXIS = "data"


class Devices(NamedTuple):
    """A one-axis mesh; parameters are replicated over it, batches split.

    Attributes:
      mesh: of all local devices.
      attend: attention for arrays that are split over the batch.
      attend_part: attention for what a function under `over_devices` sees of them.
      attend_whole: attention for arrays that every device holds whole.
      accumulation_steps: micro-batches per step.
    """

    mesh: Mesh
    attend: Attend
    attend_part: Attend
    attend_whole: Attend
    accumulation_steps: int

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def compiler_options(self) -> dict[str, bool]:
        """XLA options of every jitted function of the run.

        By default XLA may drop the rounding of a bfloat16 activation between two operations;
        on a GPU its reductions and scatters need not give the same bits twice.
        """
        options = {"xla_allow_excess_precision": False}
        if self.mesh.devices.flat[0].platform == "gpu":
            options["xla_gpu_deterministic_ops"] = True
        return options

    def jit(self, function: Any, **options: Any) -> Any:
        """`jax.jit` with the run's compiler options."""
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def over_devices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The mean over the devices of function(params, inputs, targets [A, M, T], key).

        Each device computes it for its own sequences, and one all-reduce follows at the end: left
        to itself, XLA reduces the gradients of every micro-batch.
        """
        if self.mesh.devices.size == 1:
            return function
        whole, part = PartitionSpec(), PartitionSpec(None, _AXIS)
        return jax.shard_map(
            lambda *args: lax.pmean(function(*args), _AXIS),
            mesh=self.mesh,
            in_specs=(whole, part, part, whole),
            out_specs=whole,
            check_vma=False,  # Pallas calls carry no varying-axes types
        )

    def put(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets as [A, B/A, T], the middle axis split over the devices."""
        sharding = NamedSharding(self.mesh, PartitionSpec(None, _AXIS))

        def put(x: np.ndarray) -> jax.Array:
            return jax.device_put(x.reshape(self.accumulation_steps, -1, x.shape[-1]), sharding)

        return put(batch["inputs"]), put(batch["targets"])


def local_devices(settings: TrainSettings) -> Devices:
    """The mesh of `settings.devices`, by default all local devices of the default backend.

    Raises:
      ValueError: there are fewer, or a micro-batch does not divide over them.
    """
    devices = jax.local_devices()
    if settings.devices is not None:
        if not 1 <= settings.devices <= len(devices):
            raise ValueError(f"devices={settings.devices}, but there are {len(devices)}")
        devices = devices[: settings.devices]
    micro_batch = settings.batch_size // settings.accumulation_steps
    if micro_batch % len(devices):
        raise ValueError(
            f"a micro-batch of {micro_batch} sequences (batch_size {settings.batch_size} / "
            f"accumulation_steps {settings.accumulation_steps}) does not divide over "
            f"{len(devices)} devices; choose a multiple of {len(devices)}"
        )
    mesh = Mesh(np.array(devices), (_AXIS,))
    one = len(devices) == 1
    whole = attention.dot_product_attention
    split = whole if one else attention.sharded(mesh, batch_axis=_AXIS)
    part = whole if one else attention.within_shard(batch_axis=_AXIS)
    chosen = [
        functools.partial(attend, implementation=settings.attention.implementation)
        for attend in (split, part, whole)
    ]
    return Devices(mesh, *chosen, settings.accumulation_steps)
