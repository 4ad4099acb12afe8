"""Times each kernel of an attention call alone, over its tiles.

An implementation adds a module with these constants and functions:

  PRESETS, RULES, STAGES                       the values to try if the command names none
  TILES                                        the class of each kernel's tiles
  table(q, spec) -> sizes                      the tiles of a call, with a field for each kernel
  tiles(kernel, head_size, spec, stages)       the tiles to try
  sees(kernel, spec)                           what a kernel sees of the arithmetic; of calls with
                                               equal values, only the first is timed
  inputs(q, k, v, do, spec, sizes) -> arrays   the arrays that all three kernels take
  function(kernel, spec, sizes)                one kernel as a function of `inputs`
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import own
from benchmarks.attention.measure import check, prepare
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record
from benchmarks.attention.timing import Results, Timed, in_one_program, interleave
from benchmarks.shapes import SHAPES
from benchmarks.tune import gpu, hopper
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention.dispatch import resolve
from lowprec_attn.errors import RunError
from lowprec_attn.numerics import PRESETS, get_row_max

IMPLEMENTATIONS: dict[str, ModuleType] = {"gpu": gpu, "hopper": hopper}
KERNELS = ("forward", "query_gradients", "key_gradients")
_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A causal attention call in bfloat16, by the names of its parts.

    If `unordered`, which only `hopper` has, dQ has no kernel of its own and is summed in no fixed
    order.
    """

    implementation: str
    shape: str
    preset: str
    row_max: str
    unordered: bool = False

    @property
    def module(self) -> ModuleType:
        """The module that the implementation adds."""
        return IMPLEMENTATIONS[self.implementation]

    @property
    def problem(self) -> Problem:
        """The problem, with its shape, dtype and inputs."""
        return Problem(self.shape, SHAPES[self.shape], _DTYPE, backward=False)

    @property
    def spec(self) -> Spec:
        """The arithmetic, with the tiles of the table."""
        sizes, numerics, shape = None, PRESETS[self.preset], SHAPES[self.shape]
        if self.unordered:
            sizes = own.unordered(shape)
        return Spec(
            numerics=numerics,
            row_max=get_row_max(self.row_max),
            scale=self.problem.scale,
            is_causal=True,
            block_sizes=sizes,
        )

    def check(self) -> None:
        """Checks that the implementation serves the call.

        Raises:
          UnsupportedError: the implementation declines it.
          RunError: there are no tiles for it.
        """
        shape = SHAPES[self.shape].qkv
        try:
            spec = self.spec
        except ValueError as error:
            raise RunError(f"{self.shape}: {error}") from error
        request = Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=jnp.dtype(_DTYPE))
        resolve(request, self.implementation)


def differing(calls: Iterable[Call], kernels: Sequence[str]) -> Iterator[tuple[Call, list[str]]]:
    """Yields the calls in which some kernels see something new, each with these kernels."""
    known: set[object] = set()
    for call in calls:
        seen = {name: (call.shape, name, call.module.sees(name, call.spec)) for name in kernels}
        new = [name for name in kernels if seen[name] not in known]
        known.update(seen.values())
        if new:
            yield call, new


def sweep(
    call: Call,
    kernels: Sequence[str],
    stages: Sequence[int],
    rounds: int,
    vary: Sequence[str] | None = None,
) -> Iterator[list[Record]]:
    """Yields the records of each kernel, with the fastest tile first and refused tiles last.

    Args:
      call: the attention call.
      kernels: the kernels to time.
      stages: the numbers of stages to try.
      rounds: the samples of each tile.
      vary: the fields in which a tile may differ from the table's; None for all.
    """
    module = call.module
    q, k, v, do = call.problem.inputs()
    sizes = module.table(q, call.spec)
    arrays = jax.jit(partial(module.inputs, spec=call.spec, sizes=sizes))(q, k, v, do)
    for name in kernels:
        own = getattr(sizes, name)
        found = module.tiles(name, q.shape[-1], call.spec, stages)
        tried = list(dict.fromkeys([own, *(t for t in found if _is_alike(t, own, vary))]))
        key = {"kind": "tile", **dataclasses.asdict(call), "kernel": name}
        records = [{**key, **dataclasses.asdict(tile), "table": tile == own} for tile in tried]
        functions = [
            module.function(name, call.spec, dataclasses.replace(sizes, **{name: tile}))
            for tile in tried
        ]
        results = _measure(call.problem, functions, arrays, rounds)
        for record, result in zip(records, results, strict=True):
            record.update(result)
        yield sorted(records, key=lambda record: record.get("seconds", float("inf")))


def _is_alike(tile: Any, own: Any, vary: Sequence[str] | None) -> bool:
    """Whether a tile equals the table's in all fields except those in `vary`."""
    fields = {field.name for field in dataclasses.fields(own)}
    kept = fields.difference(fields if vary is None else vary)
    return all(getattr(tile, name) == getattr(own, name) for name in kept)


def _measure(
    problem: Problem, functions: Sequence[Callable[..., Results]], arrays: Results, rounds: int
) -> Iterator[Record]:
    """Yields the median and the samples of each function, or why it was refused."""
    found = [_Kernel(str(place), function) for place, function in enumerate(functions)]
    calls = max(problem.calls("gpu") // 2, 1)  # a kernel takes about half the time of both passes
    ready, refused = prepare(problem, found, arrays, calls)
    right = check(ready, refused)
    samples = interleave({name: ready[name] for name in right}, rounds)
    for kernel in found:
        if kernel.name in refused:
            yield {"refused": refused[kernel.name]}
        else:
            seconds = samples[kernel.name]
            yield {
                "seconds": float(np.median(seconds)),
                "samples": [float(f"{x:.5g}") for x in seconds],
            }


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel with one tile, as a candidate of the benchmark."""

    name: str
    function: Callable[..., Results]

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """See `in_one_program`."""
        return in_one_program(self.function, inputs, calls)
