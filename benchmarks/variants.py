"""Times attention in windows, of packed segments and lengths, with a soft cap and with sinks.

    python -m benchmarks.variants --out results/hopper/variants.jsonl

Every variant is causal and timed beside plain causal attention of the same shape, in one run: by
`hopper` and `gpu`, and by cuDNN through `jax.nn` where that has it. Ratios are to `hopper`.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention.records import Record, environment, reason, write
from benchmarks.attention.timing import Results, Timed, in_one_program, interleave
from benchmarks.shapes import SHAPES, Shape
from lowprec_attn.attention import dot_product_attention

_SECONDS = 0.1  # of a sample, about
_DOCUMENTS = 8  # sequences that are packed into one, of random lengths
IMPLEMENTATIONS = ("hopper", "gpu", "cudnn")
# Options of `dot_product_attention`, of a shape.
VARIANTS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "plain": lambda _: {},
    "window": lambda shape: {"local_window_size": (shape.length // 8, 0)},
    "segments": lambda shape: {"query_segment_ids": segments(shape)},
    "lengths": lambda shape: dict.fromkeys(
        ("query_seq_lengths", "key_value_seq_lengths"), lengths(shape)
    ),
    "soft_cap": lambda _: {"logits_soft_cap": 50.0},
    "sinks": lambda shape: {"sinks": jnp.zeros(shape.heads)},
}
# What `jax.nn.dot_product_attention` has of them.
_OF_CUDNN = {"local_window_size", "query_seq_lengths", "key_value_seq_lengths"}


def segments(shape: Shape) -> jax.Array:
    """Ids [B, T] of packed sequences, sorted."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, shape.length, (shape.batch, _DOCUMENTS - 1))
    ids = (starts[:, :, None] <= np.arange(shape.length)).sum(axis=1)
    return jnp.asarray(ids, jnp.int32)


def lengths(shape: Shape) -> jax.Array:
    """Lengths [B], from half of T on."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(shape.length // 2, shape.length + 1, shape.batch), jnp.int32)


def prepare(
    shape: Shape, options: dict[str, Any], implementation: str, *, backward: bool
) -> tuple[Timed, int]:
    """The compiled candidate, and calls of a sample. Raises where it declines."""
    how: dict[str, Any] = {
        "scale": shape.head_size**-0.5,
        "is_causal": True,
        "implementation": implementation,
    }
    attention: Any = dot_product_attention
    if implementation == "cudnn":
        if missing := set(options) - _OF_CUDNN:
            raise NotImplementedError(f"jax.nn has no {', '.join(sorted(missing))}")
        attention = jax.nn.dot_product_attention
    else:
        how["numerics"] = "flash"
    attend = functools.partial(attention, **options, **how)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Results:
        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(do)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Results:
        return (attend(q, k, v),)

    keys = jax.random.split(jax.random.key(0), 4)
    inputs = tuple(jax.random.normal(key, shape.qkv, jnp.bfloat16) for key in keys)
    # At half of an H200's rate, if nothing is skipped.
    seconds = shape.flops(backward=backward) / 4e14
    calls = max(math.ceil(_SECONDS / seconds), 1)
    timed = in_one_program(both if backward else forward, inputs, calls)
    timed.seconds()  # the first call loads the program
    return timed, calls


def measure(name: str, variant: str, *, backward: bool, rounds: int) -> list[Record]:
    """A record of every implementation."""
    shape, timed, rows = SHAPES[name], {}, []
    for implementation in IMPLEMENTATIONS:
        row: Record = {
            "kind": "variant",
            "shape": name,
            "variant": variant,
            "pass": "both" if backward else "forward",
            "implementation": implementation,
        }
        rows.append(row)
        try:
            found, row["calls"] = prepare(
                shape, VARIANTS[variant](shape), implementation, backward=backward
            )
            timed[implementation] = found
        except Exception as error:
            row["declined"] = reason(error)
    samples = interleave(timed, rounds)
    for row in rows:
        if (own := samples.get(row["implementation"])) is not None:
            row["ms"] = 1e3 * float(np.median(own))
            if "hopper" in samples:
                of_hopper = np.array(samples["hopper"])
                row["ratio"] = float(np.median(np.array(own) / of_hopper))
    return rows


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["gpt2", "long64", "long128"]
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    records: list[Record] = [environment("python -m benchmarks.variants")]
    for name in args.shapes:
        for variant in args.variants:
            for backward in (False, True):
                rows = measure(name, variant, backward=backward, rounds=args.rounds)
                records += rows
                for row in rows:
                    told = row.get("declined") or f"{row['ms']:.3f} ms"
                    print(name, variant, row["pass"], row["implementation"], told, flush=True)
                if args.out:
                    write(args.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
