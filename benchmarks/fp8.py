"""Measures what 8 bits cost, and which point must stay in bfloat16: errors and row sums of dS.

    python -m benchmarks.fp8 --out FILE.jsonl
    python -m benchmarks.fp8 --read FILE.jsonl

It runs on a CPU. The problems are the clustered ones of `benchmarks.fidelity`, with largest scores
from 1e1 to 1e4. They are causal, with 256 tokens, four heads of size 64 and bfloat16 arrays.
`tiled` computes them in steps of 64 keys. The arms are the two presets, and each of them with one
of its points put back to bfloat16, with the other ways to form δ, and with other kinds of scales.

A line is one arm on one problem. It holds ‖x − x64‖ / ‖x64‖ of O, dQ, dK, dV, and of W_Q's gradient
xᵀ dQ, where the hidden states x = 3 + normal have the mean of those in configs/laptop.toml. It also
holds the RMS of Σ dS, before the cast of dS and after it, divided by the RMS of Σ |P dP|.

Predicted before the first run. In 8 bits, the errors of O and dV are sixteen times those in
bfloat16. From scores of 1e2 on, q and k cause the error of dQ: with both in bfloat16 it falls by
half or more, and no other point removes a quarter of it. `normalized` leaves 1e-6 of the row sum
before the cast, and after it 2^-3 of dS divided by the root of its number of terms; `matched` in
one step leaves the same. Under `do_o`, the relative error of W_Q's gradient is above that of dQ,
and it falls with `normalized`. Scales of blocks change errors by less than a quarter, since no
feature stands out here.

The runs agreed, with these exceptions. The error of O is 6 times that in bfloat16 at 1e1, and 350
times at 1e4, where only q and k change it. Up to 1e2, P̄ causes the row sum, through δ: at 1e1,
`probs` in bfloat16 removes the same part of dQ's error as a normalized δ. At 1e2 no point removes
half of it; at 1e3 `key` alone does. A normalized δ leaves 3e-8 before the cast. At 1e1, `mx` and
`nvfp4` raise the row sum of dS eightfold and dQ's error sixfold, because under cuDNN's rule for
blocks δ reads the unrounded dO, and dP the rounded one. A normalized δ removes this. In `nvfp4`, V
alone leaves a row sum of 1 to 3 %, because its scales in dP differ from those in P̄ V. If δ reads
an O in 8 bits, the row sum rises threefold.
"""

import functools
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
from lowprec_attn import attention
from lowprec_attn.attention import tiled
from lowprec_attn.check.measure import both_passes
from lowprec_attn.check.problems import Problem
from lowprec_attn.files import append_line, strict_json
from lowprec_attn.numerics import (
    FLASH,
    FLASH_ATTENTION_3_FP8,
    MATCHED,
    NORMALIZED_DELTA,
    TRANSFORMER_ENGINE_FP8,
    Numerics,
    round_scaled,
    round_to,
)
from lowprec_attn.tables import markdown

SCORES = (1e1, 1e2, 1e3, 1e4)
STEP, TILE = 64, 128  # the step in keys, and the tile of queries and of keys in the backward pass
MEAN = 3.0
_ARRAYS = ("query", "key", "value", "do")
_PROBS = ("probs", "probs_bwd")


def arms() -> Iterator[tuple[str, Numerics]]:
    """Yields the name and numerics of each arm; `…` stands for the preset before it."""
    yield "flash", FLASH
    yield "normalized_delta", NORMALIZED_DELTA
    for name, preset in (
        ("flash_attention_3_fp8", FLASH_ATTENTION_3_FP8),
        ("transformer_engine_fp8", TRANSFORMER_ENGINE_FP8),
    ):
        yield name, preset
        points = [p for p in (*_ARRAYS, *_PROBS, "ds") if getattr(preset, p) != getattr(FLASH, p)]
        for point in points:
            yield f"… {point} bfloat16", preset.replace(**{point: "bfloat16"})
        yield "… query, key bfloat16", preset.replace(query="bfloat16", key="bfloat16")
        yield "… delta normalized", preset.replace(delta="normalized")
        yield "… delta dp_p", preset.replace(delta="dp_p")
        yield "… saved_output float32", preset.replace(saved_output="float32")
        points = [p for p in points if p != "probs_bwd"]
        of_preset = {p: getattr(preset, p) for p in points} | {"kv_block": "all"}
        yield "… matched, one step", MATCHED.replace(**of_preset)
    delayed = {"output_bwd": "float8_e4m3fn/tensor", "grads": "float8_e5m2/tensor"}
    yield "… delayed: O, dQ, dK, dV too", TRANSFORMER_ENGINE_FP8.replace(**delayed)
    for scale in ("head", "block128", "mx", "nvfp4"):
        scaled = {p: f"{getattr(TRANSFORMER_ENGINE_FP8, p).format}/{scale}" for p in _ARRAYS}
        if scale in ("mx", "nvfp4"):
            scaled |= dict.fromkeys(_PROBS, f"float8_e4m3fn/{scale}")
            scaled |= {"ds": f"float8_e5m2/{scale}"}
        yield f"… {scale}", TRANSFORMER_ENGINE_FP8.replace(**scaled)
        if scale in ("mx", "nvfp4"):
            in_blocks = TRANSFORMER_ENGINE_FP8.replace(**scaled)
            yield f"… {scale}, value bfloat16", in_blocks.replace(value="bfloat16")
            yield f"… {scale}, do bfloat16", in_blocks.replace(do="bfloat16")
            yield f"… {scale}, delta normalized", in_blocks.replace(delta="normalized")


@program.told
def main() -> None:
    """Prints and appends a line for each arm and problem, or prints the tables of a file."""
    args = fidelity.arguments(__doc__, tokens=256, scores=SCORES)
    if args.read:
        print("\n".join(tables(args.read)), end="")
        return
    append_line(args.out, json.dumps({"environment": environment(program.name())}))
    under = ""
    for name, numerics in arms():
        under = under if name.startswith("…") else name
        for problem in fidelity.made_up(args):
            if problem.name.startswith("clustered"):
                arm = name.replace("…", f"{under},")
                record = {"problem": problem.name, "arm": arm, **measured(problem, numerics)}
                append_line(args.out, json.dumps(strict_json(record), allow_nan=False))
                print(json.dumps(record), flush=True)


def measured(problem: Problem, numerics: Numerics) -> dict[str, float]:
    """Returns the errors and row sums of one arm on one problem, to three digits."""
    q, k, v, do = problem.arrays
    bias = np.zeros((1, q.shape[2], q.shape[1], k.shape[1]), np.float32)
    found = _compiled(numerics, problem.scale)(q, k, v, bias, do)
    o, dq, dk, dv, ds = (np.asarray(x).astype(np.float64) for x in found)
    forward, exact = both_passes(problem)
    x = MEAN + np.random.default_rng(1).standard_normal((*q.shape[:2], 64))

    def weight(dq: np.ndarray) -> np.ndarray:
        gradient: np.ndarray = np.einsum("btd,btnh->dnh", x, dq)
        return gradient

    pairs = {
        "o": (o, forward.o),
        "dq": (dq, exact.dq),
        "dk": (dk, exact.dk),
        "dv": (dv, exact.dv),
        "w_q": (weight(dq), weight(exact.dq)),
    }
    errors = {n: np.linalg.norm(a - b) / np.linalg.norm(b) for n, (a, b) in pairs.items()}
    size = _rms(np.abs(forward.p * exact.dp).sum(-1))
    cast = np.asarray(_cast(found[4], numerics, problem.scale)).astype(np.float64)
    sums = {"ds": _rms(ds.sum(-1)) / size, "cast": _rms(cast.sum(-1)) / size}
    return {name: float(f"{value:.3g}") for name, value in (errors | sums).items()}


@functools.cache  # one program for all problems of a shape
def _compiled(numerics: Numerics, scale: float) -> Any:
    """Returns (q, k, v, bias, dO) -> O, then dQ, dK and dV in float32, then dS before its cast.

    dS is the gradient of the bias.
    """
    numerics = numerics.replace(
        kv_block=numerics.kv_block or STEP, grads=numerics.grads or "float32"
    )

    @jax.jit
    def both(q: Any, k: Any, v: Any, bias: Any, do: Any) -> Any:
        attend: Any = functools.partial(
            attention.dot_product_attention,
            is_causal=True,
            scale=scale,
            numerics=numerics,
            implementation="tiled",
            block_sizes=tiled.BlockSizes(query=TILE, kv_bwd=TILE),
        )
        arrays = (x.astype(jnp.float32) for x in (q, k, v, bias))
        out, pullback = jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias=bias), *arrays)
        return out, *pullback(do.astype(out.dtype))

    return both


def _cast(ds: Any, numerics: Numerics, scale: float) -> Any:
    """Rounds dS at the point `ds`, which rounds dS · scale; every head has its own key head."""
    scaled, rounding = ds[:, :, None] * jnp.float32(scale), numerics.ds
    if rounding.scaling is None:
        rounded = round_to(scaled, rounding.format)
    else:
        rounded = round_scaled(scaled, rounding, -1)
    return rounded[:, :, 0] / jnp.float32(scale)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def tables(path: Path) -> Iterator[str]:
    """Yields one Markdown table for each problem."""
    # The line of the environment stands before the arms of every call that appended to the file.
    records = [record for record in fidelity.read_records(path) if "problem" in record]
    names = ("o", "dq", "dk", "dv", "w_q", "ds", "cast")
    for problem in dict.fromkeys(r["problem"] for r in records):
        rows = [
            [r["arm"], *(f"{r[name]:.1e}" for name in names)]
            for r in records
            if r["problem"] == problem
        ]
        yield markdown([problem, *names], rows)


if __name__ == "__main__":
    sys.exit(main())
