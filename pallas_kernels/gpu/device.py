"""Which GPU it is, and which run the kernels: JAX with Triton, compute capability 8.0 and newer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from pallas_kernels.gpu.triton import plt


def without_triton() -> str | None:
    """The version of this JAX if it has dropped Pallas' Triton lowering, else None."""
    return jax.__version__ if plt is None else None


def too_old() -> str | None:
    """The compute capability of this process's GPU if it is below 8.0, else None.

    Without a GPU, as when compiling ahead of time, nothing is known and nothing is too old.
    """
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return capability if capability is not None and float(capability) < 8 else None


def device_kind() -> str | None:
    """Of the GPU that is compiled for: the mesh's, ahead of time, or the first one here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    return None if device is None else device.device_kind


def kernel_or(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays: `kernel` where it is lowered for a GPU that runs it, else `plain`."""
    declines = without_triton() or too_old()
    return partial(lax.platform_dependent, cuda=plain if declines else kernel, default=plain)
