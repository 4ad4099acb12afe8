"""Warpgroups of a program: registers, compiler options, the interpreter."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a warpgroup


# Registers per thread: of the warpgroup that loads, of those that multiply, by the number of the
# latter. Together at most 65,536.
_REGISTERS = {1: (24, 240), 2: (40, 232), 3: (24, 160)}


COMPILER = plgpu.CompilerParams(
    approx_math=True,
    # A warp overwrites only what it alone has read in shared memory, or waits for the others.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=512,  # of attention no reduction crosses warps
)


def set_registers(consumers: int, *, producer: bool, most: bool = False) -> None:
    """Moves registers from the warpgroup that loads to the `consumers` that multiply.

    most: two that multiply get all that one would.
    """
    few, many = _REGISTERS[1 if most else consumers]
    # All warpgroups begin with the same number (the assembler's, at most 65,536 divided by all
    # threads): a consumer's request waits until the producer has given its own back.
    if producer:
        plgpu.set_max_registers(few, action="decrease")
    else:
        plgpu.set_max_registers(many, action="increase")


def interpreter(*, on: bool) -> dict[str, Any]:
    """Options of a kernel that runs in Pallas' interpreter, with a check for races."""
    if not on:
        return {}
    params = plgpu.InterpretGPUParams  # type: ignore[attr-defined]  # not in JAX 0.10
    return {"interpret": params(detect_races=True)}
