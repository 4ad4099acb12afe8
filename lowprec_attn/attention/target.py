"""Names the GPU that a program is compiled for, and explains the choice of an implementation."""

import contextlib
import logging
import re
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from lowprec_attn.arithmetic.request import Request
from lowprec_attn.attention.dispatch import declined_by, resolve

_log = logging.getLogger(__name__)

# Device kinds for which the kernels have been compiled, by compute capability.
_KINDS = {"8.0": "NVIDIA A100", "8.9": "NVIDIA L4", "9.0": "NVIDIA H100", "10.0": "NVIDIA B200"}
_COMPILED_FOR = (*_KINDS.values(), "NVIDIA H200", "NVIDIA GH200")
_LEAST = (8, 0)  # Ampere


@contextlib.contextmanager
def compiled_for(device: str) -> Iterator[None]:
    """A context in which attention is traced for one GPU of the given kind, whatever this host has.

    Without this context, a host without a GPU does not know which kind of GPU will run a program
    for CUDA. It then chooses `gpu`, which runs on every GPU of compute capability 8.0 or higher,
    even where `hopper` would be faster. If the kernels have not been compiled for the named kind,
    which may be a newer one, `gpu` is chosen as well, and a warning is logged. JAX compiles only
    for kinds that it knows; it raises RuntimeError for others. No kernel for GPUs takes a symbolic
    batch; `tiled` does.

    Args:
      device: JAX's name of the device kind, or the beginning of that name, with or without the
        maker (`NVIDIA H100`, `h100`); or the compute capability (`9.0`, `sm_90`).

    Raises:
      ValueError: `device` is neither a device kind nor a compute capability; it is a TPU, which
        need not be named; it is a capability below 8.0, or one that is not known, so that the
        device kind must be named; or a mesh is already set, whose `abstract_device` must be set
        instead.

    Example:
      JAX exports kernels only if asked not to check how long their format stays readable::

          kernels = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")
          unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in kernels]
          with attention.compiled_for("NVIDIA H100"):
              f, to = jax.jit(attend), ["cuda"]
              exported = jax.export.export(f, platforms=to, disabled_checks=unchecked)(q, k, v)
    """
    kind = _kind(device)
    if not jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"compiled_for({device!r}) cannot change the mesh that is set; set a mesh with an "
            "abstract_device instead"
        )
    if not kind.startswith(_COMPILED_FOR):
        _log.warning("attention has not been compiled for %s before; `gpu` serves it", kind)
    target = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=target)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _kind(device: str) -> str:
    if not isinstance(device, str) or not device.strip():
        raise ValueError(f"the target is a device kind or a compute capability, got {device!r}")
    if device.lower().startswith("tpu"):
        raise ValueError(f"{device} is no GPU; a program for a TPU takes `tpu` without this")
    capability = re.fullmatch(r"(\d+)\.(\d)|sm_(\d+)(\d)[af]?", device, re.IGNORECASE)
    if capability is None:
        return _spelled(device)
    major, minor = (int(digits) for digits in capability.groups() if digits is not None)
    if (major, minor) < _LEAST:
        raise ValueError(f"compute capability {device} (the kernels need 8.0, Ampere)")
    if (kind := _KINDS.get(f"{major}.{minor}")) is None:
        known = ", ".join(_KINDS)
        raise ValueError(
            f"compute capability {device} is none of {known}; name the kind of device instead"
        )
    return kind


def _spelled(device: str) -> str:
    """Spells a kind that is known as JAX does: with the maker, and in its capitals."""
    maker = "NVIDIA "
    rest = device[len(maker) :] if device.upper().startswith(maker) else device
    for name in (kind.removeprefix(maker) for kind in _COMPILED_FOR):
        if rest.upper().startswith(name):
            return maker + name + rest[len(name) :]
    return device


def explanation(request: Request) -> str:
    """Says which implementation serves a request on its platform, and why no faster one does.

    An example is `gpu, since hopper does not support NVIDIA A100 (it needs a Hopper GPU)`.

    Args:
      request: see `resolve`.

    Raises:
      UnsupportedError: no implementation serves the request.
    """
    taken = resolve(request)
    reasons = declined_by(request, taken)
    return f"{taken}, since {'; '.join(reasons)}" if reasons else taken
