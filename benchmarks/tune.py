"""Times tiles of each GPU kernel on the device at hand; `block_sizes` has its table from here.

    python -m benchmarks.tune --shapes gpt2 long64 long128 --presets flash exact --out FILE

Each kernel is timed alone, all its tiles in turn, round after round. The fastest tiles of each
kernel are printed, and the table's own. The records hold every tile; one that the compiler refuses
has the reason.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from benchmarks.attention.measure import threads
from benchmarks.attention.problem import Problem as Benchmark
from benchmarks.attention.records import Record, environment, reason, write
from benchmarks.attention.timing import Timed, in_one_program, interleave
from benchmarks.shapes import SHAPES
from lowprec_attn.arithmetic.backward import delta_from_output
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import PRESETS, Numerics, StandardMax
from lowprec_attn.tables import columns
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.backward import (
    Operands,
    dp_offset,
    exponent_offset,
    key_gradients,
    query_gradients,
)
from pallas_kernels.gpu.block_sizes import BlockSizes, Tile
from pallas_kernels.gpu.forward import forward
from pallas_kernels.gpu.problem import Problem
from pallas_kernels.scalars import Scalars

KERNELS = tuple(f.name for f in dataclasses.fields(BlockSizes) if f.name != "interpret")
_PRESETS = [name for name, n in PRESETS.items() if not (n.normalize_probs or n.needs_bits)]

# With fewer scores per thread a tile is too small for its warps, with more it does not fit into
# the registers.
_SCORES_PER_THREAD = range(16, 65)

Inputs = tuple[Array, ...]


def tiles(kernel_name: str, stages: Sequence[int]) -> Iterator[Tile]:
    """The tiles to try for a kernel: 64 or 128 of what a program owns by 32 to 128."""
    for owned, step, warps in itertools.product((64, 128), (32, 64, 128), (4, 8)):
        if owned * step // (32 * warps) not in _SCORES_PER_THREAD:
            continue
        query, kv = (step, owned) if kernel_name == "key_gradients" else (owned, step)
        yield from (Tile(query=query, kv=kv, warps=warps, stages=n) for n in stages)


def inputs(shape_name: str, numerics: Numerics) -> Inputs:
    """q, k, v, dO [B, T, N, H] of the benchmark and the two offsets [B, N, T] of `Operands`."""
    q, k, v, do = Benchmark(shape_name, SHAPES[shape_name], "bfloat16", backward=True).inputs()
    spec = _spec(q, numerics)
    problem = _problem(q, k, spec, gpu.block_sizes(q, spec).forward)

    @jax.jit
    def offsets() -> tuple[Array, Array]:
        out = forward(q, k, v, Scalars(), problem)
        delta = delta_from_output(do, out.o, numerics, q.dtype)[..., 0].transpose(0, 2, 1)
        return exponent_offset(out.lse, problem), dp_offset(delta, problem)

    return q, k, v, do, *offsets()


def _spec(q: Array, numerics: Numerics) -> Spec:
    scale = q.shape[-1] ** -0.5
    return Spec(numerics=numerics, row_max=StandardMax(), scale=scale, is_causal=True)


def _problem(q: Array, k: Array, spec: Spec, tile: Tile) -> Problem:
    # The standard rule counts no ties, the one thing that is done otherwise on Hopper.
    return Problem.of(q, k, Extras(), spec, tile, interpret=False, hopper=False)


def kernel(name: str, tile: Tile, numerics: Numerics) -> Callable[..., Inputs]:
    """One kernel as a function of `inputs`."""

    def run(q: Array, k: Array, v: Array, do: Array, *offsets: Array) -> Inputs:
        problem, scalars = _problem(q, k, _spec(q, numerics), tile), Scalars()
        operands = Operands(q, k, v, do, *offsets)
        if name == "forward":
            out = forward(q, k, v, scalars, problem)
            return tuple(x for x in out if x is not None)
        if name == "key_gradients":
            return key_gradients(operands, scalars, problem)
        return query_gradients(operands, scalars, problem)

    return run


def prepare(function: Callable[..., Inputs], arrays: Inputs, calls: int) -> Timed:
    """Compiles `calls` calls as one program and runs it once."""
    timed = in_one_program(function, arrays, calls)
    jax.block_until_ready(timed.results())
    return timed


def sweep(
    shape_name: str, preset: str, kernels: Sequence[str], stages: Sequence[int], rounds: int
) -> Iterator[list[Record]]:
    """The records of each kernel, fastest tile first, refused tiles last."""
    numerics = PRESETS[preset]
    arrays = inputs(shape_name, numerics)
    table = gpu.block_sizes(arrays[0], _spec(arrays[0], numerics))
    calls = Benchmark(shape_name, SHAPES[shape_name], "bfloat16", backward=False).calls("gpu") // 2
    for name in kernels:
        own = getattr(table, name)
        key = {"kind": "tile", "shape": shape_name, "preset": preset, "kernel": name}
        tried = list(dict.fromkeys([own, *tiles(name, stages)]))
        records = [{**key, **dataclasses.asdict(tile), "table": tile == own} for tile in tried]
        functions = [kernel(name, tile, numerics) for tile in tried]
        for record, result in zip(records, _measure(functions, arrays, calls, rounds), strict=True):
            record.update(result)
        yield sorted(records, key=lambda record: record.get("seconds", float("inf")))


def _measure(
    functions: Sequence[Callable[..., Inputs]], arrays: Inputs, calls: int, rounds: int
) -> Iterator[Record]:
    """Median and samples of each function, or why it was refused."""
    with threads() as pool:
        futures = [pool.submit(prepare, f, arrays, max(calls, 1)) for f in functions]
    errors = [future.exception() for future in futures]
    ready = {str(i): futures[i].result() for i, error in enumerate(errors) if error is None}
    samples = interleave(ready, rounds)
    for i, error in enumerate(errors):
        if isinstance(error, Exception):
            yield {"refused": reason(error)}
        else:
            seconds = samples[str(i)]
            yield {
                "seconds": float(np.median(seconds)),
                "samples": [float(f"{x:.5g}") for x in seconds],
            }


def table(records: Sequence[Record], shown: int) -> str:
    """The fastest tiles of one kernel, and those that `block_sizes` has."""
    rows = [("shape", "preset", "kernel", "tile", "warps", "stages", "µs", "")]
    for place, record in enumerate(records):
        if place < shown or record["table"]:
            took = f"{1e6 * record['seconds']:.1f}" if "seconds" in record else "refused"
            tile = f"{record['query']}x{record['kv']}", f"{record['warps']}", f"{record['stages']}"
            named = (record["shape"], record["preset"], record["kernel"])
            rows.append((*named, *tile, took, "table" if record["table"] else ""))
    return columns(rows, "<<<>>>><")


def main() -> int:
    """Sweeps, prints, writes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2"], metavar="SHAPE")
    parser.add_argument("--presets", nargs="+", choices=_PRESETS, default=["flash"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5, help="samples of each tile")
    parser.add_argument("--shown", type=int, default=3, help="tiles printed per kernel")
    parser.add_argument("--out", type=Path, help="JSON lines file to write")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("error: tiles are timed on a GPU, and JAX finds none here", file=sys.stderr)
        return 2
    command = " ".join([parser.prog, *sys.argv[1:]])
    records: list[Record] = [{**environment(), "command": command}]
    for shape, preset in itertools.product(args.shapes, args.presets):
        for part in sweep(shape, preset, args.kernels, args.stages, args.rounds):
            print(table(part, args.shown), flush=True)
            records += part
            if args.out:
                write(args.out, records)  # so that a run that is stopped leaves what it has
    return 0


if __name__ == "__main__":
    sys.exit(main())
