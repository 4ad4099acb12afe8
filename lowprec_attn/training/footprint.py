"""The footprint of a compiled training step on each device: memory, collectives, kernels."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from lowprec_attn.training.devices import Devices
from lowprec_attn.training.program import make_program
from lowprec_attn.training.settings import TrainSettings


class OutOfMemoryError(Exception):
    """A program needs more memory than its device has, in the compiler's words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one device needs for a training step, in bytes and operations.

    Attributes:
      arguments: state and batch.
      temporaries: values in between.
      results: new state and metrics.
      aliased: the part of the results that takes the memory of donated arguments.
      code: the program itself.
      collectives: count and bytes of results per kind; one in a loop counts once.
      kernels: calls of kernels written by hand.
      compiler_flops: operations by the compiler's count. It leaves kernels out and counts the
        body of a loop once.
    """

    arguments: int
    temporaries: int
    results: int
    aliased: int
    code: int
    collectives: dict[str, tuple[int, int]]
    kernels: int
    compiler_flops: float

    @property
    def total(self) -> int:
        """Bytes in use at once, at most."""
        return self.arguments + self.temporaries + self.results - self.aliased + self.code


# Makes the name of a stage of the compilation -> a context manager around it.
Stage = Callable[[str], AbstractContextManager[Any]]


def step_footprint(
    settings: TrainSettings, devices: Devices, stage: Stage = nullcontext
) -> Footprint:
    """Compiles the training step of a run.

    Args:
      settings: of the run.
      devices: what it is compiled for; they need not be there.
      stage: is entered for every stage, of which compiling takes by far the longest.

    Raises:
      OutOfMemoryError: the compiler finds no room for it.
    """
    program = make_program(settings, devices)
    with stage("tracing"):
        traced = program.train.trace(program.state, program.batch, program.batch, program.root)
    with stage("lowering"):
        lowered = traced.lower()
    try:
        with stage("compiling"):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise OutOfMemoryError(reason[max(reason.find("Ran out"), 0) :]) from error
    with stage("reading the program"):
        memory, text = compiled.memory_analysis(), compiled.as_text()
    return Footprint(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        collectives=collectives(text),
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        compiler_flops=compiled.cost_analysis()["flops"],
    )


_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Count and bytes of results, per kind of collective, of a compiled program's text."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for results, kind, started in _COLLECTIVE.findall(text):
        arrays = [
            int(bits) // 8 * int(np.prod([int(n) for n in shape.split(",") if n]))
            for _, bits, shape in _ARRAY.findall(results)
        ]
        # An asynchronous collective lists its operands and some flags beside its result.
        alone = started and kind != "all-reduce"
        counts[kind] += 1
        sizes[kind] += max(arrays) if alone else sum(arrays)
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}
