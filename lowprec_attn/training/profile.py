"""Profiles a training step: its time by part of the model and kind of operation.

    python train.py --config=configs/gpt2_bf16.py:full --profile=DIR

The floor is the time of the step's arithmetic at the rate of one large matrix product, which is
measured beside it. Tokens are random, because the time does not depend on them.
"""

import collections
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.data.batches import Batch
from lowprec_attn.files import require_writable, write_json, writing
from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.gpt2.settings import ModelSettings
from lowprec_attn.runs import environment
from lowprec_attn.tables import columns
from lowprec_attn.training.devices import Devices, run_devices
from lowprec_attn.training.memory import explained_shortage, require_memory
from lowprec_attn.training.program import make_program
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.step import root_key

# The named scopes of model and step, the innermost first. An operation belongs to the first scope
# that is part of its name.
PARTS = ("attention", "projections", "mlp", "norm", "loss", "embedding", "optimizer")
_TIMED_STEPS = 20
_TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Speed of a training step and where its time goes.

    Attributes:
      seconds: median time of a step.
      tokens: of a step.
      flops: model operations of a step; see `step_flops`.
      peak: operations per second of a large matrix product in the activations' format, of all
        devices together.
      busy: seconds per step in which the device computed, summed over operations.
      operations: seconds per step by (part, kind), the largest first.
      kernels: seconds per step by name of the operation, likewise.
    """

    seconds: float
    tokens: int
    flops: float
    peak: float
    busy: float
    operations: dict[tuple[str, str], float]
    kernels: dict[str, float]

    @property
    def floor(self) -> float:
        """Seconds that the operations take at the peak rate."""
        return self.flops / self.peak

    def __str__(self) -> str:
        lines = [
            f"{self.tokens / self.seconds:,.0f} tokens/s: {1e3 * self.seconds:.1f} ms a step of "
            f"{self.tokens:,} tokens",
            f"{self.flops / 1e12:.2f} T model operations a step: {self.floor / self.seconds:.0%} "
            f"of the {self.peak / 1e12:.0f} T/s of a large matrix product, at which they would "
            f"take {1e3 * self.floor:.1f} ms",
        ]
        rows = [("part", "kind", "ms", "share")]
        for (part, kind), seconds in self.operations.items():
            rows.append((part, kind, f"{1e3 * seconds:.2f}", f"{seconds / self.busy:.1%}"))
        idle = max(self.seconds - self.busy, 0.0)
        rows.append(("no operation", "", f"{1e3 * idle:.2f}", ""))
        return "\n".join([*lines, columns(rows, "<<>>")])

    def as_json(self) -> dict[str, Any]:
        """The profile as JSON, with the environment; at most 60 kernels."""
        operations = [
            {"part": part, "kind": kind, "ms": round(1e3 * seconds, 4)}
            for (part, kind), seconds in self.operations.items()
        ]
        kernels = {name: round(1e3 * s, 4) for name, s in list(self.kernels.items())[:60]}
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "step_ms": 1e3 * self.seconds,
            "busy_ms": 1e3 * self.busy,
            "floor_ms": 1e3 * self.floor,
            "model_flops": self.flops,
            "peak_flops_per_second": self.peak,
            "operations": operations,
            "kernels_ms": kernels,
            "environment": environment.describe(),
        }


def step_flops(model: ModelSettings, tokens: int) -> float:
    """Operations of the matrix products of a forward and backward pass over `tokens` tokens.

    A token takes 6 operations per weight that enters a matrix product; the embedding does, as the
    output layer. Attention takes 3.5 times its causal forward pass of 2·T·d per token and layer.
    Recomputation does not count.
    """
    weights = parameter_count(model) - model.context * model.width
    attention = 3.5 * 2 * model.context * model.width * model.layers
    return tokens * (6.0 * weights + attention)


def profile(settings: TrainSettings, out: Path) -> int:
    """Times and traces training steps; prints the table and writes it to `out`/profile.json.

    Raises:
      UserError: the settings do not fit this machine, or the disk refuses.
    """
    path = out / "profile.json"
    require_writable(path)  # before what takes minutes
    devices = run_devices(settings)
    with explained_shortage(devices):
        result = measure(settings, devices)
    print(result)
    with writing(path):
        write_json(path, result.as_json(), indent=1)
    return 0


def measure(settings: TrainSettings, devices: Devices) -> Profile:
    """The profile of training steps with these settings on the devices of a run."""
    require_memory(settings, devices)
    program = make_program(settings, devices)
    root = root_key(settings)
    state = program.initial_state(root)
    batch = (*devices.put(_random_batch(settings)), root)
    lowered = program.train.lower(state, *batch)
    train = lowered.compile()
    state = _run(train, state, batch, steps=3)

    times = []
    for _ in range(3):
        start = time.perf_counter()
        state = _run(train, state, batch, _TIMED_STEPS)
        times.append((time.perf_counter() - start) / _TIMED_STEPS)
    traced = lowered.compile({**devices.compiler_options, **_one_by_one(devices)})
    # As many steps as were timed: a GPU at its power limit lowers its clock meanwhile.
    state = _run(traced, state, batch, _TIMED_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _run(traced, state, batch, _TRACED_STEPS)
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        kernels = _seconds_by_operation(trace)
    names = _operation_names(traced.as_text())
    tokens = settings.batch_size * settings.model.context
    return Profile(
        seconds=float(np.median(times)),
        tokens=tokens,
        flops=step_flops(settings.model, tokens),
        peak=_peak(settings, devices),
        busy=sum(kernels.values()),
        operations=_by_part(kernels, names),
        kernels=kernels,
    )


def _one_by_one(devices: Devices) -> dict[str, str]:
    """Options without CUDA graphs, each of which a trace would show as one operation."""
    on_gpu = devices.mesh.devices.flat[0].platform == "gpu"
    return {"xla_gpu_enable_command_buffer": ""} if on_gpu else {}


def _run(train: Any, state: Any, batch: tuple[Array, ...], steps: int) -> Any:
    for _ in range(steps):
        state, metrics = train(state, *batch)
    jax.block_until_ready((state, metrics))
    return state


def _random_batch(settings: TrainSettings) -> Batch:
    rng = np.random.default_rng(0)
    parts = settings.accumulation_steps
    shape = (parts, settings.batch_size // parts, settings.model.context + 1)
    # Text repeats few tokens often: squaring a uniform number leans to low ids as its ranks do.
    ids = (rng.random(shape) ** 4 * settings.model.vocab_size).astype(np.int32)
    starts = np.zeros(settings.batch_size, np.int64)
    return {"step": 0, "starts": starts, "inputs": ids[..., :-1], "targets": ids[..., 1:]}


def _peak(settings: TrainSettings, devices: Devices) -> float:
    """Operations per second of a square matrix product on one device, times their number."""
    on_cpu = devices.mesh.devices.flat[0].platform == "cpu"
    size = 1024 if on_cpu else 8192
    dtype = jnp.dtype(settings.model.activation_dtype)
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(product(a, b))
    repeats, times = 10, []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            result = product(a, b)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / repeats)
    return devices.mesh.devices.size * 2.0 * size**3 / float(np.median(times))


def _seconds_by_operation(trace: Path) -> dict[str, float]:
    """Seconds per step and device that each compiled operation took, the largest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    planes = set()
    for plane, name, duration in _events(trace):
        planes.add(plane)
        seconds[name] += duration
    share = _TRACED_STEPS * len(planes)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: total / share for name, total in ordered}


_CONTAINERS = ("while", "call", "conditional", "async")


def _events(trace: Path) -> Iterator[tuple[str, str, float]]:
    """Device plane, operation and seconds of every event of a compiled operation."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                # A container's time is that of the operations within.
                if name and not str(name).startswith(_CONTAINERS):
                    yield plane.name, str(name), event.duration_ns * 1e-9


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", re.MULTILINE)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def _operation_names(text: str) -> dict[str, tuple[str, str]]:
    """By instruction of a compiled program: the name it had in the source, and its call target."""
    result = {}
    for name, rest in _INSTRUCTION.findall(text):
        source, target = _OP_NAME.search(rest), _TARGET.search(rest)
        result[name] = (source.group(1) if source else "", target.group(1) if target else "")
    return result


def _by_part(
    kernels: Mapping[str, float], names: Mapping[str, tuple[str, str]]
) -> dict[tuple[str, str], float]:
    totals: dict[tuple[str, str], float] = collections.defaultdict(float)
    for kernel, seconds in kernels.items():
        source, target = names.get(kernel, ("", ""))
        part = next((part for part in PARTS if part in source), "other")
        totals[part, _kind(kernel, target)] += seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _kind(kernel: str, target: str) -> str:
    """Matrix product, kernel written by hand, communication, or elementwise and the like."""
    if "cublas" in target or "dot" in kernel or "gemm" in kernel or "convolution" in kernel:
        return "product"
    if "triton" in target or "mosaic" in target or "tpu_custom_call" in target:
        return "kernel"
    for word, kind in (
        ("all-", "communication"),
        ("sort", "sort"),
        ("scatter", "scatter"),
        ("copy", "copy"),
        ("transpose", "copy"),
        ("reduce", "reduction"),
    ):
        if word in kernel:
            return kind
    return "elementwise"
