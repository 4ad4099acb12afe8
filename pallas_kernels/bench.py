"""Times attention, forward and forward + backward, as ratios within one run.

    python -m pallas_kernels.bench --shapes cpu1k cpu4k --out results/bench_cpu.jsonl
    python -m pallas_kernels.bench --memory --out results/memory_cpu.jsonl

All candidates of a shape are timed in turn, round after round, so that a ratio compares times
taken under the same conditions. Reported are median and spread (25th to 75th percentile).
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn import tiled
from lowprec_attn.numerics import (
    EXACT,
    FLASH,
    POINTS,
    PRESETS,
    DynamicMax,
    Numerics,
    PublishedMax,
    RowMax,
    StandardMax,
)
from lowprec_attn.request import Extras, RandomStream, Spec
from pallas_kernels.shapes import SHAPES, Shape

Attention = Callable[[Array, Array, Array], Array]
BASELINE = "jax.nn xla"


def candidates(shape: Shape) -> Iterator[tuple[str, Attention]]:
    """Name and function of everything that can be timed here; the baseline comes first."""
    yield (
        BASELINE,
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    )
    for name, numerics in PRESETS.items():
        if not numerics.normalize_probs:
            yield f"tiled {name}", _tiled(shape, numerics, StandardMax())
    yield "tiled flash dynamic_max", _tiled(shape, FLASH, DynamicMax())
    yield "tiled flash published_max", _tiled(shape, FLASH, PublishedMax())
    for point in POINTS:
        if getattr(FLASH, point) == getattr(EXACT, point):
            yield (
                f"tiled flash + {point}",
                _tiled(shape, FLASH.replace(**{point: "bfloat16"}), StandardMax()),
            )


def _tiled(shape: Shape, numerics: Numerics, row_max: RowMax) -> Attention:
    spec = Spec(numerics=numerics, row_max=row_max, scale=shape.head_size**-0.5, is_causal=True)
    stream = RandomStream(
        jnp.zeros(2, jnp.uint32),
        jnp.arange(shape.batch, dtype=jnp.int32),
        jnp.arange(shape.heads, dtype=jnp.int32),
    )
    return lambda q, k, v: tiled.attention(q, k, v, Extras(stream=stream), spec)[0]


def forward_backward(attention: Attention) -> Callable[..., Any]:
    """O, dQ, dK and dV of (q, k, v, dO)."""

    def run(q: Array, k: Array, v: Array, do: Array) -> Any:
        o, vjp = jax.vjp(attention, q, k, v)
        return o, vjp(do)

    return run


def forward(attention: Attention) -> Callable[..., Any]:
    """O of (q, k, v, dO)."""
    return lambda q, k, v, do: attention(q, k, v)


PASSES = {"forward": forward, "forward+backward": forward_backward}


def inputs(shape: Shape, dtype: str, seed: int = 0) -> list[Array]:
    """Standard normal q, k, v, dO."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape.qkv), dtype) for _ in range(4)]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one candidate over all rounds."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        """Median time."""
        return float(np.median(self.seconds))


def time_interleaved(
    functions: dict[str, Callable[..., Any]], arrays: list[Array], rounds: int
) -> list[Timing]:
    """Every function once per round, after one untimed call each."""
    compiled = {name: jax.jit(f).lower(*arrays).compile() for name, f in functions.items()}
    for f in compiled.values():
        jax.block_until_ready(f(*arrays))
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*arrays))
            seconds[name].append(time.perf_counter() - start)
    return [Timing(name, times) for name, times in seconds.items()]


def bench(shape_name: str, dtype: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One record per pass and candidate."""
    shape = SHAPES[shape_name]
    arrays = inputs(shape, dtype)
    for pass_name, make in PASSES.items():
        functions = {name: make(f) for name, f in candidates(shape)}
        timings = time_interleaved(functions, arrays, rounds)
        baseline = next(t.median for t in timings if t.name == BASELINE)
        for timing in timings:
            low, high = np.percentile(timing.seconds, [25, 75])
            yield {
                "kind": "time",
                "shape": shape_name,
                "dtype": dtype,
                "pass": pass_name,
                "name": timing.name,
                "seconds": timing.median,
                "seconds_25_75": [float(low), float(high)],
                "ratio": timing.median / baseline,
                "tflops": shape.flops(backward=pass_name != "forward") / timing.median / 1e12,
                "rounds": rounds,
            }


def memory(lengths: list[int], dtype: str) -> Iterator[dict[str, Any]]:
    """Temporary memory of the compiled forward + backward pass against the length."""
    for length in lengths:
        shape = Shape(1, length, 12, 64)
        for name, attention in candidates(shape):
            if name not in (BASELINE, "tiled flash", "tiled published"):
                continue
            lowered = jax.jit(forward_backward(attention)).lower(
                *[jax.ShapeDtypeStruct(shape.qkv, jnp.dtype(dtype))] * 4
            )
            analysis = lowered.compile().memory_analysis()
            assert analysis is not None
            yield {
                "kind": "memory",
                "length": length,
                "dtype": dtype,
                "name": name,
                "temporary_mib": analysis.temp_size_in_bytes / 2**20,
            }


def environment() -> dict[str, Any]:
    """What every record carries: device, versions, date."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "cores": len(os.sched_getaffinity(0)) if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    """Runs the benchmark, prints a table, appends the records to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["cpu1k"], choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--out", type=Path, help="JSON lines file to write")
    args = parser.parse_args()
    records = []
    if args.memory:
        for record in memory(args.lengths, args.dtype):
            records.append(record)
            print(f"{record['length']:6d}  {record['name']:24s}{record['temporary_mib']:10.1f} MiB")
    else:
        for shape in args.shapes:
            for record in bench(shape, args.dtype, args.rounds):
                records.append(record)
                print(
                    f"{shape:8s}{record['pass']:18s}{record['name']:28s}"
                    f"{1e3 * record['seconds']:9.1f} ms{record['ratio']:7.2f} x xla"
                )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**record, **environment()}) + "\n" for record in records]
        args.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
