"""XLA's options: most programs of the tests take longer to compile than to run.

The options leave every rounding that the library asks for; what they skip is XLA's and LLVM's work
on the speed of the machine code. Tests of what a compiler may do to a rounding, and tests
whose numbers are compared with recorded ones, are compiled as a user's programs are: `optimized`.
So is everything that `pytest -m slow` runs.
"""

import functools
import os
from collections.abc import Collection, Iterable
from typing import Any

import jax
import pytest

UNOPTIMIZED: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
OPTIMIZED: dict[str, bool | int] = {"xla_backend_optimization_level": 3}  # XLA's default
if jax.__version_info__ < (0, 11):  # later versions have no such option, and refuse its name
    UNOPTIMIZED["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

optimized = functools.partial(jax.jit, compiler_options=OPTIMIZED)

_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in UNOPTIMIZED.items())


def compile_quickly() -> None:
    """What this process and its children compile is UNOPTIMIZED; what XLA_FLAGS says goes first."""
    given = os.environ.get("XLA_FLAGS", "")
    if _FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{_FLAGS} {given}"  # of two values the last one holds


def slow_among(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Parameters of a test, some of which only `pytest -m slow` runs."""
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in values]
