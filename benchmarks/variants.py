"""Times attention with windows, packed segments, lengths, a soft cap and sinks.

    python -m benchmarks.variants --out results/hopper/variants.jsonl
    python -m benchmarks.variants --out FILE --shapes mla192 mla128 --variants plain

Every variant is causal, and plain causal attention of the same shape is timed in the same run. Each
is computed by `hopper`, by `gpu`, and by cuDNN through `jax.nn` if that has it. Ratios are to the
time of `hopper`.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import program
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, environment, reason, write
from benchmarks.attention.timing import Attention, JaxCandidate, Timed, interleave
from benchmarks.shapes import OTHER_VALUES, SHAPES, Shape
from lowprec_attn.attention import dot_product_attention

_DOCUMENTS = 8  # documents of random lengths that are packed into one sequence
IMPLEMENTATIONS = ("hopper", "gpu", "cudnn")
_SHAPES = SHAPES | OTHER_VALUES
# For each variant, the options of `dot_product_attention` by shape.
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
# The options that `jax.nn.dot_product_attention` has too.
_OF_CUDNN = {"local_window_size", "query_seq_lengths", "key_value_seq_lengths"}


def segments(shape: Shape) -> jax.Array:
    """Returns sorted segment ids [B, T] of packed documents."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, shape.length, (shape.batch, _DOCUMENTS - 1))
    ids = (starts[:, :, None] <= np.arange(shape.length)).sum(axis=1)
    return jnp.asarray(ids, jnp.int32)


def lengths(shape: Shape) -> jax.Array:
    """Returns random lengths [B] from T / 2 to T."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(shape.length // 2, shape.length + 1, shape.batch), jnp.int32)


def candidate(variant: str, implementation: str) -> JaxCandidate:
    """Returns a variant's candidate; with cuDNN it declines options that `jax.nn` lacks."""

    def attend(problem: Problem) -> Attention:
        options = VARIANTS[variant](problem.shape)
        how: dict[str, Any] = {"scale": problem.scale, "is_causal": True}
        if implementation != "cudnn":
            how["numerics"] = "flash"
            function: Any = dot_product_attention
        elif missing := set(options) - _OF_CUDNN:
            raise NotImplementedError(f"jax.nn has no {', '.join(sorted(missing))}")
        else:
            function = jax.nn.dot_product_attention
        return functools.partial(function, implementation=implementation, **how, **options)

    return JaxCandidate(implementation, attend)


def measure(name: str, variant: str, *, backward: bool, rounds: int) -> list[Record]:
    """Returns a record for each implementation."""
    problem = Problem(name, _SHAPES[name], "bfloat16", backward)
    inputs, calls = problem.inputs(), problem.calls("gpu")
    timed: dict[str, Timed] = {}
    rows: list[Record] = []
    for implementation in IMPLEMENTATIONS:
        row: Record = {
            "kind": "variant",
            "shape": name,
            "variant": variant,
            "pass": "both" if backward else "forward",
            "implementation": implementation,
            "calls": calls,
        }
        rows.append(row)
        try:
            found = candidate(variant, implementation).prepare(problem, inputs, calls)
            found.seconds()  # the first call loads the program
            timed[implementation] = found
        except Exception as error:
            row["declined"] = reason(error)
    samples = interleave(timed, rounds)
    for row in rows:
        if (own := samples.get(row["implementation"])) is not None:
            row["ms"] = 1e3 * float(np.median(own))
            if "hopper" in samples:
                row["ratio"] = float(np.median(np.divide(own, samples["hopper"])))
    return rows


@program.told
def main() -> int:
    """Measures all variants, prints the times and writes the records."""
    parser = program.parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=_SHAPES, default=["gpt2", "long64", "long128"]
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    records: list[Record] = [environment(program.name())]
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
