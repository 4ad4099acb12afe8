"""Times the forward pass of `hopper` in FP8 against its forward pass in bfloat16.

    python -m benchmarks.fp8_speed --out FILE.jsonl
    python -m benchmarks.fp8_speed --read FILE.jsonl

It runs on an NVIDIA Hopper GPU. There are three arms: `flash` in bfloat16; `flash_attention_3_fp8`
with the rounding of q, k and V in every call; and its kernel alone, with codes and scales given, as
FlashAttention-3's callers give them. A line is one shape. It holds the median seconds of each arm,
all samples, and ‖O − O₃₂‖ / ‖O₃₂‖ of the first two, where O₃₂ is that of `tiled` with `exact` on
the first batch element.

Predicted before the first run, as bfloat16's time divided by FP8's. Products take half the time,
and exponentials the same: they alone take 27 µs at gpt2 and 290 µs at long64 and long128. The
kernel alone gains 1.2 at gpt2 and long64, and 1.5 at long128, whose products limit bfloat16. XLA
reads q, k and v twice, writes them once, and reads and writes V once more: 50 µs at gpt2, 66 at
long64, 132 at long128. With that the ratios are 0.7, 1.05 and 1.25. FP8 is worth its code only
where the ratio is 1.3 or more. What came is less, with tiles that were not tuned: results/fp8.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fidelity, program
from benchmarks.attention.records import environment
from benchmarks.attention.timing import Timed, in_one_program, interleave
from benchmarks.shapes import SHAPES
from lowprec_attn import attention
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line
from lowprec_attn.numerics import EXACT, FLASH, FLASH_ATTENTION_3_FP8, Numerics, StandardMax
from lowprec_attn.tables import markdown
from pallas_kernels.gpu.block_sizes import is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper import attention as hopper

BFLOAT16, CALL, KERNEL = "flash", "flash_attention_3_fp8", "flash_attention_3_fp8, kernel alone"


@program.told
def main() -> None:
    """Prints and appends a line for each shape, or prints the table of a file."""
    parser = program.recording_parser(__doc__)
    shapes = ["gpt2", "long64", "long128"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes, metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each arm")
    parser.add_argument("--calls", type=int, default=50, help="calls of a sample")
    args = parser.parse_args()
    if args.read:
        print(table(args.read), end="")
        return
    if not is_hopper(kind := device_kind()):
        raise UserError(f"{kind or 'this host'} is no Hopper GPU, which the kernels need")
    append_line(args.out, json.dumps({"environment": environment(program.name())}))
    for shape in args.shapes:
        record = {"shape": shape, **measured(SHAPES[shape].qkv, args.rounds, args.calls)}
        append_line(args.out, json.dumps(record))
        print(json.dumps({name: x for name, x in record.items() if name != "samples"}), flush=True)


def measured(shape: tuple[int, ...], rounds: int, calls: int) -> dict[str, Any]:
    """The seconds of each arm, and the errors of O."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(3))
    timed = arms(q, k, v, calls)
    samples = interleave(timed, rounds)
    first = [x[:1] for x in (q, k, v)]
    exact: Any = attention.dot_product_attention(
        *(x.astype(jnp.float32) for x in first),
        is_causal=True,
        numerics=EXACT,
        implementation="tiled",
    )
    errors = {
        name: float(jnp.linalg.norm(timed[name].results()[0][:1] - exact) / jnp.linalg.norm(exact))
        for name in (BFLOAT16, CALL)
    }
    seconds = {name: float(np.median(x)) for name, x in samples.items()}
    return {"seconds": seconds, "errors": errors, "samples": samples}


def arms(q: jax.Array, k: jax.Array, v: jax.Array, calls: int) -> dict[str, Timed]:
    """The three arms, compiled for causal attention of these arrays."""
    # Mosaic GPU is imported where a kernel is compiled, so that records are read without it.
    from pallas_kernels.gpu.hopper.forward import eight_bits

    def spec(numerics: Numerics) -> Spec:
        scale = q.shape[-1] ** -0.5
        return Spec(numerics=numerics, row_max=StandardMax(), scale=scale, is_causal=True)

    def attend(numerics: Numerics) -> Timed:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            return hopper.attention(q, k, v, Extras(), spec(numerics))

        return in_one_program(call, (q, k, v), calls)

    in_fp8 = spec(FLASH_ATTENTION_3_FP8)
    given = jax.jit(lambda q, k, v: eight_bits.codes(q, k, v, in_fp8))(q, k, v)

    def alone(*codes: jax.Array) -> tuple[jax.Array, ...]:
        return eight_bits.attend_codes(eight_bits.Codes(*codes), in_fp8)

    return {
        BFLOAT16: attend(FLASH),
        CALL: attend(FLASH_ATTENTION_3_FP8),
        KERNEL: in_one_program(alone, tuple(given), calls),
    }


def table(path: Path) -> str:
    """The table of a file: times in µs, ratios of bfloat16's time to that of FP8, and errors."""

    def rows() -> Iterator[list[str]]:
        for record in fidelity.read_records(path):
            if "shape" not in record:
                continue
            seconds, errors = record["seconds"], record["errors"]
            ratios = (seconds[BFLOAT16] / seconds[name] for name in (CALL, KERNEL))
            yield [
                record["shape"],
                *(f"{1e6 * seconds[name]:.0f}" for name in (BFLOAT16, CALL, KERNEL)),
                *(f"{ratio:.2f}" for ratio in ratios),
                *(f"{errors[name]:.1e}" for name in (BFLOAT16, CALL)),
            ]

    names = ["shape", "bfloat16, µs", "FP8", "its kernel", "ratio", "ratio of the kernel"]
    return markdown([*names, "error of O", "in FP8"], list(rows()))


if __name__ == "__main__":
    sys.exit(main())
