"""Warpgroups of a program: registers, compiler options, the interpreter."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a warpgroup


# Registers per thread of the producer and of the consumers, by the number of consumers. All threads
# together have at most 65,536.
_REGISTERS = {1: (24, 240), 2: (40, 232), 3: (24, 160)}


COMPILER = plgpu.CompilerParams(
    approx_math=True,
    # In shared memory a warp overwrites only what it alone has read, or it waits for the others.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=512,  # no reduction of attention crosses warps
)


def set_registers(consumers: int, *, producer: bool, most: bool = False) -> None:
    """Moves registers from the producer warpgroup to the consumer warpgroups.

    most: each of two consumers gets as many as a single one would.
    """
    few, many = _REGISTERS[1 if most else consumers]
    # All warpgroups begin with the same number (the assembler's, at most 65,536 divided by all
    # threads). A consumer's request waits until the producer has given registers back.
    if producer:
        plgpu.set_max_registers(few, action="decrease")
    else:
        plgpu.set_max_registers(many, action="increase")


def interpreter(*, on: bool) -> dict[str, Any]:
    """The kernel options for Pallas' interpreter with a check for races; empty unless `on`."""
    if not on:
        return {}
    params = plgpu.InterpretGPUParams  # type: ignore[attr-defined]  # not in JAX 0.10
    return {"interpret": params(detect_races=True)}
