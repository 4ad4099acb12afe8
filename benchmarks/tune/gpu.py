"""The general GPU kernels for `sweep`: their tiles, inputs and functions."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
from jaxtyping import Array

from benchmarks.attention.timing import Results
from lowprec_attn.arithmetic.backward import delta_from_output
from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.gpu import attention
from pallas_kernels.gpu.backward import (
    Operands,
    dp_offset,
    exponent_offset,
    key_gradients,
    query_gradients,
)
from pallas_kernels.gpu.block_sizes import BlockSizes, Tile, is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.forward import forward
from pallas_kernels.gpu.problem import Problem
from pallas_kernels.scalars import Scalars

PRESETS = ("flash",)
RULES = ("standard",)
STAGES = (1, 2, 3, 4)
TILES = dict.fromkeys(("forward", "query_gradients", "key_gradients"), Tile)

# With fewer scores per thread, a tile is too small for its warps. With more, it does not fit into
# the registers.
_SCORES_PER_THREAD = range(16, 65)


def table(q: Array, spec: Spec) -> BlockSizes:
    """Returns the tiles of `block_sizes`."""
    return attention.block_sizes(q, spec)


def tiles(kernel: str, head_size: int, spec: Spec, stages: Sequence[int]) -> Iterator[Tile]:
    """Yields tiles of 64 or 128 rows that a program owns by 32 to 128 in a step.

    They are the same at every head size.
    """
    for owned, step, warps in itertools.product((64, 128), (32, 64, 128), (4, 8)):
        if owned * step // (32 * warps) not in _SCORES_PER_THREAD:
            continue
        query, kv = (step, owned) if kernel == "key_gradients" else (owned, step)
        yield from (Tile(query=query, kv=kv, warps=warps, stages=n) for n in stages)


def sees(kernel: str, spec: Spec) -> Hashable:
    """Returns what a kernel sees: the numerics and, in the forward kernel, the row-max rule.

    The backward kernels do not see the rule, because they take lse.
    """
    return spec.numerics, spec.row_max if kernel == "forward" else None


def inputs(q: Array, k: Array, v: Array, do: Array, spec: Spec, sizes: BlockSizes) -> Results:
    """Returns q, k, v, dO [B, T, N, H] and the two offsets [B, N, T] of `Operands`.

    They are followed by `inverse_l` [B, N, T] if m and l are kept apart.
    """
    problem = _problem(q, k, spec, sizes, "forward")
    out = forward(q, k, v, Scalars(), problem)
    delta = delta_from_output(do, out.o, spec.numerics, q.dtype)[..., 0].transpose(0, 2, 1)
    subtracted, *inverse_l = (out.lse,) if out.apart is None else out.apart
    offsets = exponent_offset(subtracted, problem), dp_offset(delta, problem)
    return q, k, v, do, *offsets, *inverse_l


def function(kernel: str, spec: Spec, sizes: BlockSizes) -> Callable[..., Results]:
    """Returns one kernel as a function of `inputs`."""

    def run(q: Array, k: Array, v: Array, do: Array, *offsets: Array) -> Results:
        problem, scalars = _problem(q, k, spec, sizes, kernel), Scalars()
        operands = Operands(q, k, v, do, *offsets[:2])
        if offsets[2:]:
            operands = operands._replace(inverse_l=offsets[2])
        if kernel == "forward":
            out = forward(q, k, v, scalars, problem)
            return tuple(jax.tree.leaves(out))
        if kernel == "key_gradients":
            return key_gradients(operands, scalars, problem)
        dq, found, _ = query_gradients(operands, scalars, problem)
        return dq, found.dp_offset

    return run


def _problem(q: Array, k: Array, spec: Spec, sizes: BlockSizes, kernel: str) -> Problem:
    tile, hopper = getattr(sizes, kernel), is_hopper(device_kind())
    return Problem.of(q, k, Extras(), spec, tile, interpret=sizes.interpret, hopper=hopper)
