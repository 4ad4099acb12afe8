"""Times `lowprec_attn.torch.attention` beside PyTorch's own attention, in one process on one GPU.

    python -m benchmarks.bridge --out results/bridge.jsonl

PyTorch's FlashAttention-2 and cuDNN, the bridge, and the same attention called from JAX are timed
in turns. Calls are causal and in bfloat16. Ratios are to the faster of PyTorch's two. The calls of
PyTorch and of the bridge are queued one by one, those of JAX are made by one program. So what the
bridge takes above JAX is the host's work for a call, as far as the GPU waits for it. The shape
`tiny` leaves the GPU almost nothing to do; there a time is the host's work alone.

Predicted before the first run, from 1.1 and 3.3 ms a call on two busy CPU cores. At tiny the bridge
takes 0.3 to 0.6 ms forward and 1 to 1.5 ms in both passes, PyTorch 0.01 to 0.1 ms. At gpt2, whose
kernels take 0.13 and 0.45 ms, these remain. At long64 and long128 the GPU hides them. There the
bridge takes 0.1 and 0.2 ms more than JAX: it writes copies of q, k, v and O, and as many arrays
that only implementations for other platforms read.

Came on a busy host (results/bridge_h200.jsonl, two shapes): at tiny the bridge takes 1.4 ms forward
and 5 ms in both passes. At long64 the GPU does not hide that: 1.0 and 4.7 ms, JAX 0.6 and 2.1 ms.
Since then the bridge keeps O and row statistics alone, without the copies above. It was not timed
again.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from benchmarks import program
from benchmarks.attention import table
from benchmarks.attention.candidates import select
from benchmarks.attention.measure import measure
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, add_ratios, environment, write
from benchmarks.attention.timing import Attention, Candidate, JaxCandidate, Results, Timed
from benchmarks.attention.torch_calls import queued
from benchmarks.attention.torch_sdpa import torch_candidates
from benchmarks.shapes import SHAPES, Shape
from lowprec_attn.attention import dot_product_attention

_SHAPES = {"tiny": Shape(1, 128, 2, 64), **SHAPES}
NUMERICS = ("normalized_delta", "flash")


@dataclasses.dataclass(frozen=True)
class BridgeCandidate:
    """`lowprec_attn.torch.attention_fn` with a preset."""

    numerics: str

    @property
    def name(self) -> str:
        """The name in tables and records."""
        return f"bridge {self.numerics}"

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """See `torch_calls.queued`."""
        from lowprec_attn.torch import attention_fn

        attend = functools.partial(
            attention_fn(numerics=self.numerics), is_causal=True, scale=problem.scale
        )
        found = queued(attend, problem, inputs, calls, heads_first=True)
        found.results()  # compiles, while the other candidates do
        return found


def in_jax(numerics: str) -> JaxCandidate:
    """Returns the attention that the bridge calls, without the bridge."""

    attend: Any = dot_product_attention

    def attention(problem: Problem) -> Attention:
        return functools.partial(attend, is_causal=True, scale=problem.scale, numerics=numerics)

    return JaxCandidate(f"jax {numerics}", attention)


def candidates() -> list[Candidate]:
    """Returns PyTorch's two, then the bridge and JAX with every preset."""
    return [
        *select(torch_candidates(), ["torch flash", "torch cudnn"]),
        *map(BridgeCandidate, NUMERICS),
        *map(in_jax, NUMERICS),
    ]


@program.told
def main() -> int:
    """Measures all candidates, prints the times and writes the records."""
    parser = program.parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=_SHAPES, default=["tiny", "gpt2", "long64", "long128"]
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    records: list[Record] = [environment(program.name())]
    for name in args.shapes:
        for backward in (False, True):
            problem = Problem(name, _SHAPES[name], "bfloat16", backward)
            rows = measure(problem, candidates(), args.rounds)
            add_ratios(rows, "torch *")
            records += rows
            print("\n".join(table.time_lines(rows)), flush=True)
            if args.out:
                write(args.out, records)  # a run that is stopped leaves what it has measured
    return 0


if __name__ == "__main__":
    sys.exit(main())
