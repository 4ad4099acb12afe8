"""Tells whether a training step fits a TPU slice, on a host without TPUs.

    lowprec-attn compile --topology v5e:16x16 --config=configs/gpt2_bf16.py:full \\
        --config.accumulation_steps=1

The TPU compiler itself (libtpu) allocates the memory, so a step that fits here fits on the slice.
Nothing is run.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import re
import time
from typing import Any

import jax
from jax.experimental import topologies

from lowprec_attn import installation
from lowprec_attn.counts import many
from lowprec_attn.errors import RunError
from lowprec_attn.tables import columns
from lowprec_attn.training.announcement import arithmetic
from lowprec_attn.training.devices import Devices, make_program, mesh_over
from lowprec_attn.training.models import parameter_count
from lowprec_attn.training.resources.efficiency import GENERATIONS, step_flops
from lowprec_attn.training.settings import TrainSettings

_GIB = 2**30
_SLICE = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)+)")
EXIT_DOES_NOT_FIT = 1


class SliceError(RunError):
    """A slice that the compiler does not know."""


def compile_for(topology: str, settings: TrainSettings) -> int:
    """Compiles the step of a run for a slice and prints the resources it takes on each device.

    Args:
      topology: see `slice_devices`.
      settings: settings of the run. If they set `devices`, only so many devices of the slice are
        used.

    Returns:
      0 if the step fits, else EXIT_DOES_NOT_FIT.

    Raises:
      UserError: the slice, the batch or the attention cannot be served.
    """
    there = slice_devices(topology)
    generation = GENERATIONS[topology.partition(":")[0]]
    computed = arithmetic(settings, platform="tpu")
    settings = _released(settings)
    devices = mesh_over(there, settings)
    model, count = settings.model, devices.mesh.devices.size
    rows = settings.batch_size // settings.accumulation_steps
    flops = step_flops(model, settings.batch_size * model.context) / count
    processes = len({device.process_index for device in there})
    lines = [
        (
            "slice",
            f"{topology}: {count} x {there[0].device_kind} ({many(processes, 'host')}), "
            f"{generation.hbm / _GIB:.2f} GiB each",
        ),
        (
            "step",
            f"{settings.name}:{settings.variant}, {parameter_count(model) / 1e6:.1f}M parameters; "
            f"{many(settings.batch_size, 'sequence')} of {model.context} tokens, "
            f"{settings.accumulation_steps} x {rows // count} per device; optimizer state "
            + ("split over the devices" if settings.shard_optimizer else "whole on every device")
            + ("" if model.remat is None else f"; remat {model.remat}"),
        ),
        *(("attention", text) for text in computed),
        (
            "arithmetic",
            f"{flops / 1e12:.2f} T model operations per device: "
            f"{1e3 * flops / generation.peak:.1f} ms at the peak rate",
        ),
    ]
    start = time.perf_counter()
    needed, found = footprint(settings, devices)
    fits = needed is not None and needed <= generation.hbm
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("libtpu", "jax"))
    by = f"{', '.join(versions)}, {time.perf_counter() - start:.0f} s"
    lines += [*found, ("verdict", f"{'fits' if fits else 'does not fit'} ({by})")]
    print(columns(lines, "<<"))
    return 0 if fits else EXIT_DOES_NOT_FIT


def slice_devices(name: str) -> list[Any]:
    """Returns descriptions of the devices of a slice; devices of one host are adjacent.

    Args:
      name: the slice, for example `v5e:16x16`, `v4:2x2x1` or `v5e:1x1`.

    Raises:
      SliceError: the generation or shape is unknown, or libtpu is not installed.
    """
    match = _SLICE.fullmatch(name)
    if match is None or match[1] not in GENERATIONS:
        raise SliceError(
            f"unknown topology {name!r}; it is GENERATION:SHAPE, such as v5e:16x16 or v4:2x2x1,"
            f" with one of {', '.join(GENERATIONS)}"
        )
    options = dict(GENERATIONS[match[1]].options)
    if math.prod(map(int, match[2].split("x"))) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        found = list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except (RuntimeError, ValueError) as error:
        if importlib.util.find_spec("libtpu") is None:
            raise SliceError(
                f"compiling for {name} needs the TPU compiler, libtpu, which is not "
                f"installed: {installation.command('tpu-compile')}"
            ) from error
        reason = str(error).splitlines()[0]
        raise SliceError(
            f"the TPU compiler does not know {name}: {reason}; it needs a shape that Google offers"
        ) from error
    return sorted(found, key=lambda device: (device.process_index, device.id))


def footprint(
    settings: TrainSettings, devices: Devices
) -> tuple[int | None, list[tuple[str, str]]]:
    """Compiles the training step of a run; the devices need not be attached.

    Returns:
      The bytes that the step takes on each device at once, or None if the compiler finds no room;
      and lines about kernels and memory, each with a name.
    """
    program = make_program(settings, devices)
    lowered = program.train.lower(program.state, program.batch, program.batch, program.root)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        return None, [("memory", reason[max(reason.find("Ran out"), 0) :])]
    memory = compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        # Results that do not reuse the memory of donated arguments.
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    needed = sum(sizes.values())
    listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in sizes.items())
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    return needed, [
        ("kernels", f"{kernels} calls"),
        ("memory", f"{needed / _GIB:.2f} GiB per device: {listed}"),
    ]


def _released(settings: TrainSettings) -> TrainSettings:
    """Returns the settings without a forced implementation `tpu`, which a TPU chooses anyway."""
    # On this host, which has no TPU, the forced implementation would refuse.
    if settings.attention.implementation != "tpu":
        return settings
    released = dataclasses.replace(settings.attention, implementation=None)
    return dataclasses.replace(settings, attention=released)
