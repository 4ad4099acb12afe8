"""Measures the device memory that the compiler plans for both passes, against the length."""

import math
from collections.abc import Iterable, Sequence

import jax

from benchmarks.attention.measure import threads
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, reason
from benchmarks.attention.timing import JaxCandidate
from benchmarks.shapes import Shape

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PATTERNS = ("jax.nn xla", "* exact", "* flash", "* published")


def memory(found: Iterable[JaxCandidate], lengths: Sequence[int], dtype: str) -> list[Record]:
    """Reads the memory at batch 1 and 12 heads of 64 from `memory_analysis()`; nothing is run.

    Returns:
      A record for each candidate and length. A record of kind `memory` holds in MiB `arguments` (q,
      k, v, dO), `outputs` (O, dQ, dK, dV), `temporary` (all else that the program allocates) and
      `total`. A record of kind `refused` holds the reason.
    """
    with threads() as pool:
        futures = [
            pool.submit(_memory, candidate, length, dtype)
            for candidate in found
            for length in lengths
        ]
    return [future.result() for future in futures]


def _memory(candidate: JaxCandidate, length: int, dtype: str) -> Record:
    problem = Problem(f"memory{length}", Shape(1, length, 12, 64), dtype, backward=True)
    key = {"name": candidate.name, "dtype": dtype, "length": length}
    try:
        sizes = _sizes(candidate, problem)
    except Exception as error:  # every package declines with exceptions of its own
        return {"kind": "refused", **key, "reason": reason(error)}
    sizes["total"] = sum(sizes.values())
    return {"kind": "memory", **key, **{f"{k}_mib": v / 2**20 for k, v in sizes.items()}}


def _sizes(candidate: JaxCandidate, problem: Problem) -> dict[str, int]:
    """Returns the bytes of the compiled program by use."""
    program = jax.jit(candidate.function(problem)).lower(*problem.abstract_inputs()).compile()
    plan = program.memory_analysis()
    if plan is None:
        raise NotImplementedError(f"{jax.default_backend()} reports no memory of programs")
    return {
        "arguments": plan.argument_size_in_bytes,
        "outputs": plan.output_size_in_bytes,
        "temporary": plan.temp_size_in_bytes,
    }


def growth(rows: Sequence[Record]) -> float:
    """Returns the exponent e of memory ~ T^e between the last two lengths of one candidate."""
    before, last = rows[-2:]
    return math.log(last["total_mib"] / before["total_mib"]) / math.log(
        last["length"] / before["length"]
    )
