"""Tells from its shapes alone whether a run can fit into memory, before anything is traced."""

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from lowprec_attn.counts import many
from lowprec_attn.errors import RunError
from lowprec_attn.training import models
from lowprec_attn.training.devices import Devices
from lowprec_attn.training.models import parameter_count
from lowprec_attn.training.settings import TrainSettings

# Files with the memory limit of a container, in bytes or "max". The second file belongs to control
# groups of version 1.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MAPPED = Path("/proc/self/statm")  # Linux: the first number is in pages
_GB = 1e9
_ADVICE = "choose a smaller model or batch_size, or more accumulation_steps"


class MemoryShortageError(RunError):
    """A run takes more memory than there is."""


def least_bytes(settings: TrainSettings, devices: int) -> int:
    """Returns the least number of bytes that each device holds at once during a training step.

    It is the sum of:

      - the float32 parameters and Adam's two moments;
      - for every token and layer, the values that the backward pass reads and no compiler
        recomputes (`kept_values` of the model), in the format of the activations. With
        `model.remat` it is instead the float32 residual stream before the layer, and O and lse if
        the policy keeps them;
      - the larger of two things that need not exist together: the gradients, and the scores of
        `dense` in the last layer.

    Args:
      settings: settings of the run.
      devices: number of devices of the run.
    """
    model = settings.model
    parameters = parameter_count(model)
    moments = 8 / devices if settings.shard_optimizer else 8
    state = int((4 + moments) * parameters)
    sequences = settings.batch_size // settings.accumulation_steps // devices
    itemsize = jnp.dtype(model.activation_dtype).itemsize
    of_token = models.of(model).kept_values(model) * itemsize
    if model.remat is not None:
        of_token = 4 * model.width
    if model.remat == "attention_saveable":
        of_token += model.heads * (model.value_size * itemsize + 4)
    activations = of_token * model.layers * sequences * model.context
    # dP leaves its product in float32. S exists beside it, and a compiler may keep S in 16 bits.
    scores = (4 + 2) * sequences * _dense_heads(settings) * model.context**2
    return state + activations + max(4 * parameters, scores)


def _dense_heads(settings: TrainSettings) -> int:
    """Returns the most heads whose scores one call of `dense` in the last layer holds."""
    is_dense = settings.attention.implementation == "dense"
    groups = settings.attention.layers[-1]
    called = [g for g in groups if is_dense or g.numerics.normalize_probs]  # needs `dense`
    return max((len(group.heads) for group in called), default=0)


def require_memory(settings: TrainSettings, devices: Devices) -> None:
    """Refuses a run that cannot fit into memory, which a compiler may take very long to notice.

    Raises:
      MemoryShortageError: a device has less than `least_bytes`, or the host has less than its CPU
        devices need together.
    """
    where, limit, sharing = _room(devices)
    needed = sharing * least_bytes(settings, devices.mesh.devices.size)
    if needed > limit:
        model = settings.model
        raise MemoryShortageError(
            f"a training step takes at least {needed / _GB:,.1f} GB "
            f"({parameter_count(model) / 1e6:,.1f}M parameters; batch_size {settings.batch_size} "
            f"in {many(settings.accumulation_steps, 'part')}, {model.context} tokens each), and "
            f"{where} has {limit / _GB:,.1f} GB; {_ADVICE}"
        )


def _room(devices: Devices) -> tuple[str, int, int]:
    """Returns what has the memory, its bytes, and how many devices of this process share them."""
    local = [d for d in devices.mesh.devices.flat if d.process_index == jax.process_index()]
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return "this machine", host_bytes(), len(local)
    return f"a {local[0].device_kind}", limit, 1


@contextlib.contextmanager
def explained_shortage(devices: Devices) -> Iterator[None]:
    """Turns an out-of-memory error of the compiler or allocator into an error of one line.

    Args:
      devices: devices of the run; the line also names their memory.

    Raises:
      MemoryShortageError: memory ran out within the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        where, limit, _ = _room(devices)
        raise MemoryShortageError(
            f"{_in_gb(reason.removeprefix('RESOURCE_EXHAUSTED: ').rstrip('.'))}, and {where} has "
            f"{limit / _GB:,.1f} GB; {_ADVICE}"
        ) from error


def _in_gb(reason: str) -> str:
    """Returns an allocator's message with its sizes in GB."""
    return re.sub(r"(\d+) bytes", lambda size: f"{int(size[1]) / _GB:,.1f} GB", reason)


def host_bytes() -> int:
    """Returns the bytes of memory that the machine, its container and `ulimit -v` all allow."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else "max"
        limits += [int(text)] if text.isdigit() else []
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:  # libraries have mapped some of it
        limits += [max(address_space - _mapped_bytes(), 0)]
    return min(limits)


def _mapped_bytes() -> int:
    """Returns the bytes of address space that this process has mapped; 0 if not known."""
    if not _MAPPED.exists():
        return 0
    return int(_MAPPED.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
