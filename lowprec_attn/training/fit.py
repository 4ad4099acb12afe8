"""Compiles a training step for a TPU slice on a host without one, to see whether it fits.

    lowprec-attn compile --topology v5e:16x16 --config=configs/gpt2_bf16.py:full \\
        --config.accumulation_steps=1

The TPU compiler itself (libtpu) allots the memory, so what fits here fits there. Time is not
measured. The time that is printed is that of the arithmetic at the chip's peak rate, the speed an
estimate from it.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowprec_attn.files import append_line, require_writable
from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.tables import columns
from lowprec_attn.training.announcement import arithmetic
from lowprec_attn.training.devices import Devices, mesh_over
from lowprec_attn.training.footprint import Footprint, OutOfMemoryError, step_footprint
from lowprec_attn.training.profile import step_flops
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.tpu_slice import Slice

_GIB = 2**30
# Of GPT-2 124M with `flash`, bfloat16 logits: 579 thousand tokens/s of 808 M operations each
# (docs/benchmarks.md), of 989 T/s. The compiler's own count of operations would not do: it leaves
# kernels out and counts a loop once.
_SHARE_OF_PEAK = 0.47
# Compiled quickly, five steps took from 10 % less to 1 % more memory than compiled in full
# (docs/tpu_training.md).
_QUICK_MARGIN = 0.15
EXIT_DOES_NOT_FIT = 1


def compile_for(
    topology: str, settings: TrainSettings, record: Path | None = None, quick: bool = False
) -> int:
    """Compiles the step of a run for a slice and prints what it takes.

    Args:
      topology: see `Slice.of`.
      settings: of the run; with `devices`, only that many of the slice compute.
      record: a file to which a line of JSON is appended.
      quick: this process compiles with less optimisation, so that the memory is an estimate.

    Returns:
      0, or EXIT_DOES_NOT_FIT, also where a quick look cannot tell.

    Raises:
      UserError: slice, batch or attention cannot serve, or the record cannot be written.
    """
    if record is not None:
        require_writable(record)  # before what takes minutes
    target = Slice.of(topology)
    computed = arithmetic(settings, platform="tpu")
    settings = _released(settings)
    devices = mesh_over(target.devices, settings)
    start = time.perf_counter()
    footprint, refusal = None, None
    try:
        footprint = step_footprint(settings, devices, _stage)
    except OutOfMemoryError as error:
        refusal = str(error)
    facts = _facts(target, devices, settings, footprint) | {
        "topology": topology,
        "attention": computed,
        "refusal": refusal,
        "seconds": round(time.perf_counter() - start, 1),
    }
    facts["quick"] = quick
    facts["fits"] = False if footprint is None else _fits(footprint.total, facts["hbm"], quick)
    lines = _lines(facts)
    if facts["fits"] is False:
        lines += [("", advice) for advice in _advice(facts, settings)]
    print(columns(lines, "<<"))
    if record is not None:
        append_line(record, json.dumps(facts))
    return 0 if facts["fits"] else EXIT_DOES_NOT_FIT


def _fits(needed: int, hbm: float, quick: bool) -> bool | None:
    """Whether a step fits; None where a quick look is too close to tell."""
    if needed > hbm:
        return False
    return None if quick and needed > hbm / (1 + _QUICK_MARGIN) else True


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Says on stderr what is being done, and how long it took."""
    hint = " (minutes)" if name == "compiling" else ""
    print(f"{name}{hint} ... ", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        yield
    finally:
        print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _released(settings: TrainSettings) -> TrainSettings:
    """The settings, with a forced `tpu` left to choice: a TPU chooses it by itself."""
    # This host has no TPU, so it would refuse.
    if settings.attention.implementation != "tpu":
        return settings
    released = dataclasses.replace(settings.attention, implementation=None)
    return dataclasses.replace(settings, attention=released)


def _facts(
    target: Slice, devices: Devices, settings: TrainSettings, footprint: Footprint | None
) -> dict[str, Any]:
    model, count = settings.model, devices.mesh.devices.size
    tokens = settings.batch_size * model.context
    flops = step_flops(model, tokens) / count
    facts: dict[str, Any] = {
        "config": f"{settings.name}:{settings.variant}",
        "parameters": parameter_count(model),
        "devices": count,
        "hosts": target.hosts,
        "device_kind": target.devices[0].device_kind,
        "hbm": target.generation.hbm,
        "batch_size": settings.batch_size,
        "context": model.context,
        "accumulation_steps": settings.accumulation_steps,
        "shard_optimizer": settings.shard_optimizer,
        "model_flops": flops,
        "seconds_at_peak": flops / target.generation.peak,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if footprint is not None:
        numbers = dataclasses.asdict(footprint)
        facts |= {name: numbers.pop(name) for name in ("collectives", "kernels", "compiler_flops")}
        facts["bytes"] = numbers | {"total": footprint.total}
    return facts


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    hbm = facts["hbm"] / _GIB
    per_device = facts["batch_size"] // facts["accumulation_steps"] // facts["devices"]
    optimizer = "split over the devices" if facts["shard_optimizer"] else "whole on every device"
    at_peak = facts["batch_size"] * facts["context"] / facts["seconds_at_peak"]
    lines = [
        (
            "slice",
            f"{facts['topology']}: {facts['devices']} x {facts['device_kind']} "
            f"({facts['hosts']} hosts), {hbm:.2f} GiB each",
        ),
        (
            "step",
            f"{facts['config']}, {facts['parameters'] / 1e6:.1f}M parameters; "
            f"{facts['batch_size']} sequences of {facts['context']} tokens, "
            f"{facts['accumulation_steps']} x {per_device} per device; optimizer state {optimizer}",
        ),
        *(("attention", text) for text in facts["attention"]),
        (
            "arithmetic",
            f"{facts['model_flops'] / 1e12:.2f} T model operations per device: "
            f"{1e3 * facts['seconds_at_peak']:.1f} ms at the peak rate",
        ),
        (
            "speed",
            f"at most {_rounded(at_peak)} tokens/s, if that is all; about "
            f"{_rounded(_SHARE_OF_PEAK * at_peak)} at the {_SHARE_OF_PEAK:.0%} of the peak that an "
            "H200 reaches: an estimate, nothing was run",
        ),
    ]
    if "bytes" in facts:
        lines += _compiled_lines(facts)
    verdicts = {True: "fits", False: "does not fit", None: "too close to tell; leave out --quick"}
    verdict = verdicts[facts["fits"]] + (", compiled quickly" if facts["quick"] else "")
    reason = f": {facts['refusal']}" if facts["refusal"] else ""
    versions = facts["versions"]
    by = f"libtpu {versions['libtpu']}, JAX {versions['jax']}, {facts['seconds']:.0f} s"
    return [*lines, ("verdict", f"{verdict}{reason} ({by})")]


def _compiled_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    gib = {name: size / _GIB for name, size in facts["bytes"].items()}
    listed = [
        f"{count} {kind} ({size / _GIB:.3f} GiB)"
        for kind, (count, size) in facts["collectives"].items()
    ]
    return [
        ("collectives", ", ".join(listed) or "none"),
        ("kernels", f"{facts['kernels']} calls"),
        (
            "memory",
            f"{gib['total']:.2f} GiB per device: arguments {gib['arguments']:.2f}, "
            f"temporaries {gib['temporaries']:.2f}, results {gib['results']:.2f} "
            f"(in place {gib['aliased']:.2f}), code {gib['code']:.2f}",
        ),
    ]


def _rounded(rate: float) -> str:
    """A rate to two digits."""
    return f"{float(f'{rate:.1e}'):,.0f}"


def _advice(facts: dict[str, Any], settings: TrainSettings) -> list[str]:
    """Changes that take less memory, the cheapest first."""
    advice = []
    rows = settings.batch_size // settings.accumulation_steps
    gradients = 4 * facts["parameters"] / _GIB
    if rows > facts["devices"]:
        cost = "" if settings.accumulation_steps > 1 else f" (their sum takes {gradients:.1f} GiB)"
        parts = 2 * settings.accumulation_steps
        advice.append(f"smaller micro-batches: --config.accumulation_steps={parts}{cost}")
    if facts["devices"] > 1 and not settings.shard_optimizer:
        freed = 8 * facts["parameters"] * (1 - 1 / facts["devices"]) / _GIB
        advice.append(f"a split optimizer state: --config.shard_optimizer=True ({freed:.1f} GiB)")
    if settings.accumulation_steps > 1 and rows == facts["devices"]:
        advice.append(
            f"no sum over micro-batches: --config.accumulation_steps=1 ({gradients:.1f} GiB)"
        )
    return [*advice, "a larger slice, or a generation with more memory"]
