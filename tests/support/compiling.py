"""XLA options for fast compilation: most test programs take longer to compile than to run.

The options keep every rounding that the library asks for. They skip the work of XLA and LLVM that
only makes machine code faster. `optimized` compiles programs as a user's are compiled: for tests of
what a compiler may do to a rounding, and for tests that compare numbers with recorded ones.
Everything that `pytest -m slow` runs is compiled so, too.
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
OPTIMIZED: dict[str, bool | int] = {"xla_backend_optimization_level": 3}  # the default of XLA
if jax.__version_info__ < (0, 11):  # later versions reject this option
    UNOPTIMIZED["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

optimized = functools.partial(jax.jit, compiler_options=OPTIMIZED)

_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in UNOPTIMIZED.items())


def compile_quickly() -> None:
    """Makes this process and its children compile with UNOPTIMIZED; XLA_FLAGS takes precedence."""
    given = os.environ.get("XLA_FLAGS", "")
    if _FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{_FLAGS} {given}"  # the last of two values holds


def slow_among(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Parameters of a test, with those of `slow` marked to run under `pytest -m slow` only."""
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in values]
