"""The Hopper kernels for `sweep`: their tiles, inputs and functions."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.attention.timing import Results
from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import DynamicMax
from pallas_kernels.gpu.hopper.backward import dq_accumulator
from pallas_kernels.gpu.hopper.backward.key_gradients import key_gradients
from pallas_kernels.gpu.hopper.backward.key_operands import KeyInputs
from pallas_kernels.gpu.hopper.backward.query_gradients import query_gradients
from pallas_kernels.gpu.hopper.backward.query_operands import QueryInputs
from pallas_kernels.gpu.hopper.block_sizes import (
    ROWS,
    STEPS,
    BackwardTile,
    BlockSizes,
    ForwardTile,
    Tile,
    block_sizes,
    is_wide,
    rounds_products,
)
from pallas_kernels.gpu.hopper.forward.kernel import forward
from pallas_kernels.gpu.hopper.problem import Problem

PRESETS = (
    "flash",
    "float32_output",
    "normalized_delta",
    "auxiliary_output",
    "matched",
    "corrected_after_cast",
)
RULES = ("standard", "dynamic_max")
STAGES = (2, 3)
TILES: dict[str, type[Tile]] = {
    "forward": ForwardTile,
    "query_gradients": BackwardTile,
    "key_gradients": BackwardTile,
}

# No ping-pong; turns that cover the products that begin a step; turns held from the products that
# end a step on; and turns in which the products of two steps start.
_PING_PONGS: tuple[dict[str, bool], ...] = (
    {},
    {"ping_pong": True},
    {"ping_pong": True, "held": True},
    {"ping_pong": True, "overlap_steps": True},
)


# Registers per thread, by the number of consumer warpgroups: all registers of a thread, less about
# 32 for addresses, masks and rows. One warpgroup is not tried, because nothing then multiplies
# during its softmax, which made it a third slower.
_REGISTERS = {2: 232 - 32, 3: 160 - 32}

# The shared memory of a program, less 2 KiB for barriers and row statistics.
_SHARED_BYTES = 232_448 - 2048

_THREADS = 128  # threads of a warpgroup


def table(q: Array, spec: Spec) -> BlockSizes:
    """Returns the tiles of `block_sizes`, or those that the call names."""
    return block_sizes(q.shape, spec)


def tiles(kernel: str, head_size: int, spec: Spec, stages: Sequence[int]) -> Iterator[Tile]:
    """Yields the tiles of two or three warpgroups that fit in registers and shared memory."""
    for tile in _candidates(kernel, spec, stages):
        if _registers(kernel, tile, head_size, spec) > _REGISTERS[tile.warpgroups]:
            continue
        for found in _with_fewer_stages(kernel, tile, head_size):
            try:
                _check(kernel, found, head_size, spec)
            except ValueError:
                continue
            if _shared_bytes(kernel, found, head_size, spec) <= _SHARED_BYTES:
                yield found


def _candidates(kernel: str, spec: Spec, stages: Sequence[int]) -> Iterator[Tile]:
    """Yields every tile that can be made of the sizes and switches to try."""
    sizes: list[dict[str, Any]] = [
        {"warpgroups": warpgroups, "step": step, "stages": n, "owned_stages": owned}
        for warpgroups, step, n, owned in itertools.product(_REGISTERS, STEPS, stages, (1, 2))
    ]
    in_long_steps = rounds_products(spec.numerics)
    if kernel == "forward":
        counts = isinstance(spec.row_max, DynamicMax) and not in_long_steps
        if in_long_steps:  # long steps have no ping-pong, no early wait and no tests for ties
            switches = _all(longest_first=(False, True), halved=(False, True))
        else:
            switches = _all(
                ping_pong=(False, True),
                longest_first=(False, True),
                early_wait=(False, True),
                overlap_tiles=(False, True),
                tests_ties=(True, False) if counts else (True,),
            )
        of: type[Tile] = ForwardTile
    else:
        # With two sums, or with dQ summed as well, the products of two steps would need more
        # registers than there are.
        two_sums = kernel == "query_gradients" and _sums(kernel, spec) > 1
        most = 3 if in_long_steps or two_sums or sums_queries(kernel, spec) else 4
        switches = [
            {**ping_pong, "longest_first": first, "cooperative": cooperative}
            for ping_pong in _PING_PONGS[:most]
            for first in (False, True)
            for cooperative in (False, True)
        ]
        of = BackwardTile
    for size, switch in itertools.product(sizes, switches):
        with contextlib.suppress(ValueError):  # no call takes such a tile, see `check`
            yield of(**size, **switch)


def _all(**choices: Sequence[bool]) -> list[dict[str, bool]]:
    """Returns every combination of the choices of each switch."""
    found = itertools.product(*choices.values())
    return [dict(zip(choices, values, strict=True)) for values in found]


def _check(kernel: str, tile: Tile, head_size: int, spec: Spec) -> None:
    """Raises ValueError for a tile that the kernel does not take in this call."""
    if isinstance(tile, ForwardTile):
        tile.check(spec.numerics)
        return
    assert kernel != "forward"
    unordered = sums_queries(kernel, spec)
    if tile.cooperative != (_sums(kernel, spec) > 1 and is_wide(head_size)):
        raise ValueError("warpgroups share rows where one has no registers for two sums, only")
    if kernel == "query_gradients":
        tile.check("query_gradients", spec.numerics)
    else:
        tile.check("key_gradients", spec.numerics, unordered=unordered, head_size=head_size)


def _with_fewer_stages(kernel: str, tile: Tile, head_size: int) -> Iterator[Tile]:
    """Yields the tile, and variants with fewer stages of v than of k, which save shared memory.

    Only tiles of dQ's kernel that are short of shared memory have such variants.
    """
    yield tile
    if kernel != "query_gradients" or isinstance(tile, ForwardTile):
        return
    if (is_wide(head_size) or tile.overlap_steps) and not tile.cooperative:
        for stages in range(1, tile.stages):
            yield dataclasses.replace(tile, v_stages=stages)


# The names of a tile's fields in records of earlier versions, and their names today.
_FORMER_NAMES = {
    "walk": "step",
    "slots": "owned_stages",
    "value_stages": "v_stages",
    "turns": "ping_pong",
    "soon": "early_wait",
    "joined": "overlap_tiles",
    "ahead": "overlap_steps",
    "split": "cooperative",
}


def tile_of(record: Mapping[str, Any]) -> Tile:
    """Returns the tile of a record of `benchmarks.tune`, which may be of an earlier version."""
    of = TILES[record["kernel"]]
    named = {_FORMER_NAMES.get(name, name): value for name, value in record.items()}
    fields = {field.name for field in dataclasses.fields(of)}
    return of(**{name: value for name, value in named.items() if name in fields})


def sums_queries(kernel: str, spec: Spec) -> bool:
    """Whether the kernel is the one of dK and dV, and also sums dQ."""
    sizes = spec.block_sizes
    return kernel == "key_gradients" and isinstance(sizes, BlockSizes) and sizes.unordered


def _registers(kernel: str, tile: Tile, head_size: int, spec: Spec) -> float:
    """Returns a thread's registers for the accumulators and for the products of a step."""
    sums = _sums(kernel, spec)
    if isinstance(tile, BackwardTile) and tile.cooperative:
        sums = 1
    products = 1.5 if kernel == "forward" else 2  # forward: S, and P̄ in half its bits; else S, dP
    if kernel == "query_gradients" and isinstance(tile, BackwardTile) and tile.overlap_steps:
        products += 0.5  # dS of the previous step
    columns = sums * head_size + products * tile.step
    return ROWS * columns / _THREADS


def _sums(kernel: str, spec: Spec) -> int:
    """Returns the number of accumulators, each with all features of a head."""
    n, of_step = spec.numerics, rounds_products(spec.numerics)
    return {
        "forward": 1 + (n.saved_output == "auxiliary") + of_step,  # Ō; Ō′ − Ō
        "query_gradients": 1 + (n.delta in SUMS_ROWS) + of_step,  # dQ; Σ P k
        "key_gradients": 2 + 2 * of_step,  # dK, dV
    }[kernel]


def _shared_bytes(kernel: str, tile: Tile, head_size: int, spec: Spec) -> int:
    """Returns the shared memory of a program's matrices, in bytes.

    They are the matrices of the rows that it owns, and two matrices for every stage.
    """
    entry, saved = 2, spec.numerics.saved_dtype
    loaded = {
        "forward": entry,  # q
        "query_gradients": 2 * entry + (saved.itemsize if saved else entry),  # q, dO; O
        "key_gradients": 2 * entry,  # k, v
    }
    if spec.numerics.saved_output == "halves":
        loaded["query_gradients"] += entry  # the second half of O
    if is_wide(head_size):
        loaded["query_gradients"] = 2 * entry  # q, dO
    own = tile.owned_stages * loaded[kernel]
    if kernel == "forward" and saved and not is_wide(head_size):
        own += saved.itemsize
    stages, exchanged = 2 * tile.stages, 0
    if isinstance(tile, ForwardTile):
        own += entry * tile.overlap_tiles  # O
    else:
        stages = tile.stages + tile.stages_of_v
        exchanged = 2 * 4 * ROWS * tile.step * tile.cooperative  # P, exchanged between warpgroups
        if kernel == "key_gradients" and spec.numerics.delta == "after_cast":
            exchanged += entry * tile.stages * tile.step * head_size  # λ q, beside q and dO
    loads = head_size * (own * tile.owned + entry * stages * tile.step) + exchanged
    if not sums_queries(kernel, spec):
        return loads
    # The offsets of rows, as far as they exceed half of the 2 KiB that `_SHARED_BYTES` leaves out.
    vectors = max(2 * 4 * tile.stages * tile.step - 1024, 0)
    exchanged = 2 * entry * tile.owned * tile.step + 4 * tile.owned * ROWS  # dSᵀ; blocks of dQ
    return loads + vectors + exchanged


def sees(kernel: str, spec: Spec) -> Hashable:
    """Returns what a kernel sees of the arithmetic; calls with equal values run the same kernel."""
    n, long_steps = spec.numerics, rounds_products(spec.numerics)
    of_probs = long_steps, n.exponent == "whole_max", n.statistics
    if kernel == "forward":
        return *of_probs, n.saved_dtype, n.saved_output == "halves", spec.row_max, n.row_sum
    of_ds = *of_probs, n.recomputed_probs
    if kernel == "query_gradients":
        return *of_ds, n.saved_dtype == jnp.float32, n.saved_output == "halves", n.delta
    return *of_ds, n.divided_in_dv, n.delta == "after_cast"


def inputs(q: Array, k: Array, v: Array, do: Array, spec: Spec, sizes: BlockSizes) -> Results:
    """Returns the arrays that the kernels take, in the order that `_taken` reads.

    Arrays that this arithmetic lacks are left out.
    """
    problem = Problem.of(q, k, spec, sizes)
    out = forward(q, k, v, problem)
    o, low = (out.o, out.saved) if problem.saves_halves else (out.saved, None)
    if o is None:
        o = out.o
    dlse = jnp.zeros_like(out.offset)  # the loss depends on O alone
    of_queries = QueryInputs(q, k, v, do, o, out.offset, dlse, low, out.inverse_l, out.more)
    found = query_gradients(of_queries, problem)
    return tuple(jax.tree.leaves((of_queries, found.dp_offset, found.correction)))


def _taken(arrays: Results, problem: Problem) -> tuple[QueryInputs, KeyInputs]:
    """Splits the arrays of `inputs` into the inputs of dQ's kernel and those of dK and dV's."""
    optional = {
        "o_low": problem.saves_halves,
        "inverse_l": problem.saves_inverse_l,
        "more": problem.saves_log2_l,
        "segments": problem.has_segments,
        "ends": False,  # no lengths are timed
    }
    names = [name for name in QueryInputs._fields if optional.get(name, True)]
    given: dict[str, Any] = dict(zip(names, arrays, strict=False))
    x = QueryInputs(**given)
    dp_offset, *found = arrays[len(names) :]
    correction = found[0] if found else None
    of_keys = KeyInputs(x.q, x.k, x.v, x.do, x.offset, dp_offset, x.inverse_l, x.more, correction)
    return x, of_keys


def function(kernel: str, spec: Spec, sizes: BlockSizes) -> Callable[..., Results]:
    """Returns one kernel as a function of `inputs`."""

    def run(*arrays: Array) -> Results:
        problem = Problem.of(arrays[0], arrays[1], spec, sizes)
        x, of_keys = _taken(arrays, problem)
        if kernel == "forward":
            out = forward(x.q, x.k, x.v, problem)
            return tuple(array for array in out if array is not None)
        if kernel == "query_gradients":
            found = query_gradients(x, problem)
            return tuple(array for array in found[:3] if array is not None)
        if not problem.sums_queries:
            return tuple(key_gradients(of_keys, problem))
        dq = dq_accumulator.sums(problem)
        return *key_gradients(of_keys, problem, dq=dq), dq_accumulator.rounded(dq, problem)

    return run
