"""The GPU in use, and whether it runs the kernels, which need Triton and capability 8.0 or more."""

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

    An AMD GPU has a name such as gfx942 in its place, which is returned. Without a GPU, as in
    ahead-of-time compilation, the capability is unknown: the result is None.
    """
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None:
        return None
    is_number = capability.replace(".", "").isdecimal()
    return None if is_number and float(capability) >= 8 else capability


def device_kind() -> str | None:
    """JAX's name of the GPU that is compiled for, or None if there is none.

    In ahead-of-time compilation this is the mesh's GPU, otherwise the first GPU of this process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    return None if device is None else device.device_kind


def kernel_or(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `kernel` where it is lowered for a GPU that runs it, else `plain`."""
    declines = without_triton() or too_old()
    return partial(lax.platform_dependent, cuda=plain if declines else kernel, default=plain)
