"""TPU slices that programs can be compiled for on a host that has none."""

import dataclasses
import importlib.util
import math
import re
from typing import Any

import jax
from jax.experimental import topologies

from lowprec_attn import installation
from lowprec_attn.errors import RunError

_GIB = 2**30
_SLICE = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)+)")


class SliceError(RunError):
    """A slice that the compiler does not know."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of TPU, by device as JAX counts them.

    Attributes:
      hbm: bytes that the compiler may use, as libtpu 0.0.42 says when a program needs more.
      peak: bfloat16 operations per second, from Google's pages on the generation.
      options: of `get_topology_desc`: a v4 chip's two cores are one device.
    """

    hbm: float
    peak: float
    options: tuple[tuple[str, Any], ...] = ()


GENERATIONS = {
    "v4": Generation(30.75 * _GIB, 275e12, (("chip_config_name", "megacore"),)),
    "v5e": Generation(15.75 * _GIB, 197e12),
    "v5p": Generation(95.74 * _GIB, 459e12),
    "v6e": Generation(31.25 * _GIB, 918e12),
    "tpu7x": Generation(94.75 * _GIB, 1153.5e12),  # two devices a chip
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """The devices of a slice, those of one host next to each other; none of them is there."""

    name: str
    generation: Generation
    devices: tuple[jax.Device, ...]

    @property
    def hosts(self) -> int:
        """How many processes run on it."""
        return len({device.process_index for device in self.devices})

    @classmethod
    def of(cls, name: str) -> "Slice":
        """The slice of a name such as `v5e:16x16`, `v4:2x2x1` or `v5e:1x1`.

        Raises:
          SliceError: no such generation or shape, or libtpu is not installed.
        """
        match = _SLICE.fullmatch(name)
        if match is None or match[1] not in GENERATIONS:
            raise SliceError(
                f"unknown topology {name!r}; it is GENERATION:SHAPE, such as v5e:16x16 or v4:2x2x1,"
                f" with one of {', '.join(GENERATIONS)}"
            )
        generation = GENERATIONS[match[1]]
        options = dict(generation.options)
        if math.prod(map(int, match[2].split("x"))) == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        try:
            topology = topologies.get_topology_desc(name, platform="tpu", **options)
        except (RuntimeError, ValueError) as error:
            if importlib.util.find_spec("libtpu") is None:
                raise SliceError(
                    f"to compile for {name} takes the TPU compiler, libtpu, which is not "
                    f"installed: {installation.command('tpu-compile')}"
                ) from error
            reason = str(error).splitlines()[0]
            raise SliceError(
                f"the TPU compiler does not know {name}: {reason}; it needs "
                "a shape that Google offers"
            ) from error
        devices: list[Any] = list(topology.devices)
        devices.sort(key=lambda device: (device.process_index, device.id))
        return cls(name, generation, tuple(devices))
