"""Times the auxiliary outputs of attention: the largest score of a head and the row sums of dS.

    python -m benchmarks.auxiliary --out results/hopper/auxiliary.jsonl

Calls with and without an auxiliary output are timed in turns within one run. They are causal and in
bfloat16. Ratios are to the call without auxiliary outputs.

The least possible cost. The largest score takes a multiplication, a comparison and 4 bytes per row,
and a kernel that reduces the rows: at gpt2 0.8 MB, beside the 101 MB of a forward pass. If the
largest score is not the m of the softmax, a maximum per row and step is added, which is 1 / 64 or
1 / 128 of an instruction per entry. The row sums take two additions per entry in dQ's kernel (three
if `delta` corrects dQ), and 8 bytes per row.

Predicted before the first run. The largest score costs at most 1 % of both passes everywhere. It
costs at most 1 % of the forward pass, except at gpt2, where the launch of the reduction takes 2 µs,
which is 2 %. The row sums cost 3 to 6 % of both passes with `gpu`; `hopper` declines them.
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

from benchmarks import program
from benchmarks.attention.records import Record, environment, reason, write
from benchmarks.attention.timing import Results, Timed, in_one_program, interleave
from benchmarks.shapes import SHAPES, Shape
from lowprec_attn.attention import BackwardSums, dot_product_attention
from lowprec_attn.errors import UserError

_SECONDS = 0.1  # the approximate length of a sample
IMPLEMENTATIONS = ("hopper", "gpu")
# Both kinds: arithmetics whose m is the largest score, and arithmetics whose m is not.
ARITHMETICS: dict[str, dict[str, Any]] = {
    "flash": {"numerics": "flash"},
    "flash dynamic_max": {"numerics": "flash", "row_max": "dynamic_max"},
    "matched": {"numerics": "matched"},
}
OUTPUTS = ("none", "max_logit", "backward_sums")


def prepare(
    shape: Shape, options: dict[str, Any], output: str, *, backward: bool
) -> tuple[Timed, int]:
    """Returns the compiled candidate and the number of calls in a sample; raises if it declines."""
    options = {"scale": shape.head_size**-0.5, "is_causal": True, **options}
    if output == "max_logit":
        options["return_max_logit"] = True
    attend: Callable[..., Any] = functools.partial(dot_product_attention, **options)
    asks_sums = output == "backward_sums"

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Results:
        return tuple(jax.tree.leaves(attend(q, k, v)))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Results:
        sums = BackwardSums.zeros(q) if asks_sums else None

        def called(sums: BackwardSums | None, *qkv: jax.Array) -> tuple[jax.Array, Any]:
            given = attend(*qkv, backward_sums=sums)
            return (given[0], given[1:]) if isinstance(given, tuple) else (given, ())

        o, pullback, others = jax.vjp(called, sums, q, k, v, has_aux=True)
        return o, *jax.tree.leaves((pullback(do), others))

    keys = jax.random.split(jax.random.key(0), 4)
    inputs = tuple(jax.random.normal(key, shape.qkv, jnp.bfloat16) for key in keys)
    seconds = shape.flops(backward=backward) / 4e14  # at half of an H200's rate
    calls = max(math.ceil(_SECONDS / seconds), 1)
    timed = in_one_program(both if backward else forward, inputs, calls)
    timed.seconds()  # the first call loads the program
    return timed, calls


def measure(shape: Shape, options: dict[str, Any], *, backward: bool, rounds: int) -> list[Record]:
    """Returns a record for each output, with its ratio to the call without auxiliary outputs."""
    timed, rows = {}, []
    for output in OUTPUTS if backward else OUTPUTS[:2]:
        row: Record = {"output": output, "pass": "both" if backward else "forward"}
        rows.append(row)
        try:
            timed[output], row["calls"] = prepare(shape, options, output, backward=backward)
        except (UserError, RuntimeError) as error:
            row["declined"] = reason(error)
    samples = interleave(timed, rounds)
    for row in rows:
        if (own := samples.get(row["output"])) is not None:
            row["ms"] = 1e3 * float(np.median(own))
            row["ratio"] = float(np.median(np.array(own) / np.array(samples["none"])))
    return rows


@program.told
def main() -> int:
    """Measures all outputs, prints the times and writes the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["gpt2", "long64", "long128"]
    )
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    records: list[Record] = [environment("python -m benchmarks.auxiliary")]
    for name in args.shapes:
        for implementation in args.implementations:
            for arithmetic, options in ARITHMETICS.items():
                options = {**options, "implementation": implementation}
                about = {"kind": "auxiliary", "shape": name, "implementation": implementation}
                for backward in (False, True):
                    found = measure(SHAPES[name], options, backward=backward, rounds=args.rounds)
                    for row in found:
                        records.append({**about, "arithmetic": arithmetic, **row})
                        told = row.get("declined") or f"{row['ms']:.3f} ms, {row['ratio']:.4f}"
                        print(
                            name,
                            implementation,
                            arithmetic,
                            row["pass"],
                            row["output"],
                            told,
                            flush=True,
                        )
                if args.out:
                    write(args.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
