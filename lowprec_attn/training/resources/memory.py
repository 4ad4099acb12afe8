"""Whether a run can fit into memory, from its shapes alone: asked before anything is traced."""

import contextlib
import os
import re
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

# Of a container, in bytes, or "max"; the second of version 1 of control groups.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MAPPED = Path("/proc/self/statm")  # of Linux: in pages, the first number
_GB = 1e9
_ADVICE = "choose a smaller model or batch_size, or more accumulation_steps"


class MemoryShortageError(RunError):
    """A run takes more memory than there is."""


def least_bytes(settings: TrainSettings, devices: int) -> int:
    """What every device holds at once, at least, during a training step, in bytes.

    Float32 parameters and Adam's two moments; of every token and layer what the backward pass reads
    and no compiler computes again (`kept_values` of the model), in the format of the activations,
    or with `model.remat` the float32 residual stream before it, and O and lse where it keeps them;
    and the larger of two things that need not be there together: gradients, and the scores of
    `dense` in the last layer.

    Args:
      settings: of the run.
      devices: of the run.
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
    # dP in float32 as it leaves its product, beside S, which a compiler may keep in 16 bits.
    scores = (4 + 2) * sequences * _dense_heads(settings) * model.context**2
    return state + activations + max(4 * parameters, scores)


def _dense_heads(settings: TrainSettings) -> int:
    """How many heads the last layer computes by `dense` in one call, which holds all scores."""
    is_dense = settings.attention.implementation == "dense"
    groups = settings.attention.layers[-1]
    called = [g for g in groups if is_dense or g.numerics.normalize_probs]  # which no other serves
    return max((len(group.heads) for group in called), default=0)


def require_memory(settings: TrainSettings, devices: Devices) -> None:
    """Refuses a run that cannot fit, which a compiler may take for ever to notice.

    Raises:
      MemoryShortageError: a device, or on a CPU the host, has less than `least_bytes`.
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
    """What has the memory, how many bytes, and how many devices of this process share them."""
    local = [d for d in devices.mesh.devices.flat if d.process_index == jax.process_index()]
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return "this machine", host_bytes(), len(local)
    return f"a {local[0].device_kind}", limit, 1


@contextlib.contextmanager
def explained_shortage(devices: Devices) -> Iterator[None]:
    """Turns the compiler's or allocator's refusal of memory into one line.

    Args:
      devices: of the run, whose memory the line names too.

    Raises:
      MemoryShortageError: there was no room.
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
    """The words of an allocator, with a size in GB."""
    return re.sub(r"(\d+) bytes", lambda size: f"{int(size[1]) / _GB:,.1f} GB", reason)


def host_bytes() -> int:
    """Memory of this machine, or what its container or `ulimit -v` leaves to the process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else "max"
        limits += [int(text)] if text.isdigit() else []
    with contextlib.suppress(ImportError):  # which Windows has not
        import resource

        address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
        if address_space != resource.RLIM_INFINITY:  # libraries have taken some of it
            limits += [max(address_space - _mapped_bytes(), 0)]
    return min(limits)


def _mapped_bytes() -> int:
    """Address space that this process has taken; 0 where the system does not tell."""
    if not _MAPPED.exists():
        return 0
    return int(_MAPPED.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
