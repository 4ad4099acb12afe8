"""What each part of `matched` leaves alone: row sums of P and dS, errors of dQ, dK and dV.

    python -m benchmarks.matched --out FILE.jsonl
    python -m benchmarks.matched --out FILE.jsonl --arrays CAPTURE.npz

The problems are those of `benchmarks.fidelity`: clustered keys whose largest score is 10 to 1e7, or
captured layers. `tiled` computes them in steps of 64 keys and, in the backward pass, tiles of 128.
Arms are `matched` without one of its parts, `flash` with one of them, and the other cures.

The first line of the file says versions and device. The others, of each arm and problem over all
rows: the largest |Σ P − 1|; the RMS of Σ dS before and after the cast over that of Σ |P dP|; and
‖x − x64‖ / ‖x64‖ of dQ, dK and dV, gradients in float32. Where most rows are one key, at 1e6 and
more, the true dQ and dK fade, and any residue is large beside them.

Written before the first run. `matched` leaves 1e-7 of rows of dS before the cast with float32 O and
2e-6 with halves, whatever the score; after it 2^-9 of dS, as `normalized_delta`. Without any one of
its parts 1e-4 or more is left at some score. No part alone takes half of the error of `flash`,
except O in halves. The errors of dQ are those of `normalized_delta` at every score, and `matched`
corrected after the cast errs as `corrected_after_cast` does.

It came so but for these. Without the whole maximum 5e-5 is left at most. Alone it makes `flash`
worse, 20 times at 1e5: the largest P̄ of a row is no longer 1, so l does not add what P̄V has. At
1e4 dQ errs by a quarter of what `normalized_delta` leaves, which saves one lse. At 1e7 the residue
of float32 sums is left, as in `flash`; `normalized_delta` cancels there. dO / l in dV errs by 2^-9
in every row, and P̄ / l by nothing where a row is one key.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fidelity
from lowprec_attn import attention
from lowprec_attn.attention import reference, tiled
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line
from lowprec_attn.numerics import FLASH, MATCHED, PRESETS, Numerics

STEP, TILE = 64, 128
ARMS: dict[str, Numerics] = {
    "flash": FLASH,
    "matched": MATCHED,
    "matched_float32_output": PRESETS["matched_float32_output"],
    "matched, whole maximum off": MATCHED.replace(exponent="shift_first"),
    "matched, rounded row sum off": MATCHED.replace(row_sum="unrounded"),
    "matched, rounded P̄ in dS off": MATCHED.replace(recomputed_probs="unrounded"),
    "matched, halves off": MATCHED.replace(saved_output="same"),
    "flash, m and l": FLASH.replace(statistics="m_and_l"),
    "flash, whole maximum, m and l": FLASH.replace(exponent="whole_max", statistics="m_and_l"),
    "flash, rounded row sum": FLASH.replace(row_sum="rounded"),
    "flash, rounded P̄ in dS, m and l": FLASH.replace(
        recomputed_probs="rounded", statistics="m_and_l"
    ),
    "flash, halves": PRESETS["halves_output"],
    "matched, dO / l in dV": MATCHED.replace(divided_in_dv="do"),
    "normalized_delta": PRESETS["normalized_delta"],
    "corrected_after_cast": PRESETS["corrected_after_cast"],
    "matched, after_cast": MATCHED.replace(delta="after_cast"),
}


def main() -> None:
    """Prints and appends a line for each arm and problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--arrays", type=Path, help="an npz with q, k, v and do of layers")
    parser.add_argument("--scores", type=float, nargs="+", default=fidelity.SCORES)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    header = {"seed": args.seed, "environment": fidelity.environment()}
    append_line(args.out, fidelity.strict_json(header))
    try:
        for problem in _problems(args):
            for name, numerics in ARMS.items():
                record = {"problem": problem.name, "arm": name, **measured(problem, numerics)}
                append_line(args.out, fidelity.strict_json(record))
                print(_line(record), flush=True)
    except UserError as error:
        sys.exit(f"error: {error}")


def _problems(args: argparse.Namespace) -> Iterator[fidelity.Problem]:
    if args.arrays:
        return fidelity.captured(args.arrays)
    shape = (args.tokens, args.heads, args.head_size)
    made_up = fidelity.made_up(args.scores, shape, args.seed)
    return (problem for problem in made_up if problem.name.startswith("clustered"))


def measured(problem: fidelity.Problem, numerics: Numerics) -> dict[str, float]:
    """Row sums and errors of one arm."""
    q, k, v, do = problem[1:5]
    bias = np.zeros((1, q.shape[2], q.shape[1], k.shape[1]), np.float32)
    # With a bias S is formed, and its gradient is dS before the cast.
    both = compiled(numerics, problem.scale)
    found = dict(zip(("o", "dq", "dk", "dv", "ds"), both(q, k, v, bias, do, 0.0), strict=True))
    *_, p = both(q, k, v, bias, np.zeros_like(do), 1.0)
    found = {name: np.asarray(x, np.float64) for name, x in found.items()}
    p = np.asarray(p, np.float64)
    group = q.shape[2] // k.shape[2]
    dp = np.einsum(
        "btnh,bsnh->bnts", do.astype(np.float64), v.astype(np.float64).repeat(group, axis=2)
    )
    size = _rms(np.abs(p * dp).sum(-1))
    cast = found["ds"].astype(jnp.bfloat16).astype(np.float64)
    options: Any = {"scale": problem.scale, "masking": reference.Masking(is_causal=True)}
    exact = reference.backward(q, k, v, do, **options)
    return {
        "p": float(np.abs(p.sum(-1) - 1).max()),
        "ds": _rms(found["ds"].sum(-1)) / size,
        "cast": _rms(cast.sum(-1)) / size,
    } | {
        name: float(np.linalg.norm(found[name] - x) / np.linalg.norm(x))
        for name, x in (("dq", exact.dq), ("dk", exact.dk), ("dv", exact.dv))
    }


@functools.cache  # one program for all problems of a shape
def compiled(numerics: Numerics, scale: float) -> Any:
    """(q, k, v, bias, dO, dlse) -> O, then dQ, dK, dV in float32, and dS."""
    numerics = numerics.replace(kv_block=numerics.kv_block or STEP)
    if numerics.grads is None:
        numerics = numerics.replace(grads="float32")

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            is_causal=True,
            scale=scale,
            numerics=numerics,
            implementation="tiled",
            block_sizes=tiled.BlockSizes(query=TILE, kv_bwd=TILE),
            return_residual=True,
        )

    @jax.jit
    def both(q: Any, k: Any, v: Any, bias: Any, do: Any, dlse: Any) -> Any:
        arrays = (x.astype(jnp.float32) for x in (q, k, v))
        (out, lse), pullback = jax.vjp(attend, *arrays, bias)
        return out, *pullback((do.astype(out.dtype), jnp.full_like(lse, dlse)))

    return both


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _line(record: dict[str, Any]) -> str:
    values = " ".join(f"{n} {x:8.1e}" for n, x in record.items() if isinstance(x, float))
    return f"{record['problem']:16} {record['arm']:32} {values}"


if __name__ == "__main__":
    main()
