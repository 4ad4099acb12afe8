"""Random calls of attention, compared with `attention_oracle`.

A program is the part of a call that is compiled: shapes, formats, and which arguments are given. A
draw supplies its values. Both follow from their numbers alone, so a failure names the command that
repeats it:

    pytest tests/attention/test_fuzz.py -k "program[17]"
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import attention_oracle as oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import attention, numerics
from lowprec_attn.attention import tiled

SEED = 41
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # from 1 to the next number
PRESETS = ("exact", "exact", "flash", "float32_output", "auxiliary_output", "delta_dp_p")
PRESETS = (*PRESETS, "normalized_delta", "published")
DELTAS = ("do_o", "normalized", "after_cast", "dp_p")
EXPONENTS = (None, "scale_first", "unfused", "whole_max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The static part of a call; a span tells which of the axes B, N, T, S an array has in full."""

    number: int
    implementation: str
    block_sizes: Any
    kv_block: int | None
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    preset: str
    row_max: str
    is_causal: bool
    window: tuple[int, int] | None
    offset: int | str  # 'array': one per batch element
    scale: float | str | None  # 'traced'
    lengths: tuple[bool, bool]
    segments: bool
    mask: tuple[bool, ...] | None
    bias: tuple[bool, ...] | None
    soft_cap: float | None
    sinks: bool
    value_size: int
    delta: str  # delta and exponent apply to the preset `exact` only
    exponent: str | None

    @property
    def numerics(self) -> numerics.Numerics:
        """The preset of the program, with float16 points where the arrays are float16."""
        chosen = numerics.get_preset(self.preset).replace(kv_block=self.kv_block)
        if self.preset == "exact":
            chosen = chosen.replace(delta=self.delta, exponent=self.exponent)
        return chosen.with_format("float16") if self.dtype == "float16" else chosen


def program(number: int, implementation: str) -> Program:
    """Draws the program with this number."""
    rng = np.random.default_rng([SEED, number])

    def maybe(probability: float) -> bool:
        return bool(rng.random() < probability)

    def span() -> tuple[bool, ...]:
        return tuple(bool(x) for x in rng.random(4) < 0.6)

    rows = int(rng.integers(1, 25))
    keys = rows if maybe(0.4) else int(rng.integers(1, 33))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    dtype = str(rng.choice(["float32", "float32", "bfloat16", "float16"]))
    in_kernel, is_tiled = implementation == "gpu", implementation == "tiled"
    sizes: Any = None
    if in_kernel:
        sizes = harness.GPU_TALL if maybe(0.5) else harness.GPU_TILES
    elif is_tiled:
        sizes = tiled.BlockSizes(query=int(rng.integers(1, 12)), kv_bwd=int(rng.integers(1, 12)))
    window = tuple(int(x) for x in rng.integers(0, 12, 2)) if maybe(0.4) else None
    if window is not None and maybe(0.1):
        window = (window[0], 10**9)
    offset: int | str = 0
    if not in_kernel and maybe(0.5):
        offset = [int(rng.integers(-8, 40)), "array", "end"][rng.integers(3)]
    scale: float | str | None = [None, float(rng.uniform(-0.5, 1)), "traced"][rng.integers(3)]
    head_size = 16 if in_kernel else int(rng.choice([1, 4, 8]))
    of_exact = np.random.default_rng([SEED, number, 2])
    program = Program(
        number=number,
        implementation=implementation,
        block_sizes=sizes,
        kv_block=16 if in_kernel else int(rng.integers(1, 12)) if is_tiled else None,
        batch=int(rng.integers(1, 4)),
        rows=rows,
        keys=keys,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        preset=str(rng.choice(PRESETS)),
        # The dynamic maximum shifts m too far for float16.
        row_max="dynamic_max" if dtype != "float16" and maybe(0.5) else "standard",
        is_causal=maybe(0.5),
        window=window,  # type: ignore[arg-type]
        offset=offset,
        scale=None if in_kernel and scale == "traced" else scale,
        lengths=(maybe(0.3), maybe(0.4)),
        segments=maybe(0.3),
        mask=span() if maybe(0.3) else None,
        bias=None if in_kernel or not maybe(0.3) else span(),
        soft_cap=float(rng.uniform(0.5, 4)) if maybe(0.3) else None,
        sinks=maybe(0.3),
        value_size=int(rng.choice([24, 40] if in_kernel else [1, 3, 16]))
        if maybe(0.3)
        else head_size,
        delta=str(of_exact.choice(DELTAS)),
        exponent=of_exact.choice(EXPONENTS),
    )
    if in_kernel and program.exponent == "unfused":  # the kernels decline it
        program = dataclasses.replace(program, exponent=None)
    if program.soft_cap is not None and program.delta == "after_cast":  # it lacks the cap's slope
        program = dataclasses.replace(program, delta="normalized")
    return program


def compiled(p: Program) -> Callable[..., dict[str, jax.Array]]:
    """Compiles (differentiated arrays, other arrays, dO, dlse) -> out, lse and gradients."""
    names = {"q": "query", "k": "key", "v": "value", "bias": "bias", "sinks": "sinks"}

    def run(arrays: dict[str, Any], others: dict[str, Any], do: Any, dlse: Any) -> Any:
        def call(arrays: dict[str, Any]) -> Any:
            static = {} if p.scale == "traced" else {"scale": p.scale}
            if not isinstance(p.offset, str) or p.offset == "end":
                static["query_offset"] = p.offset
            return attention.dot_product_attention(
                **{names[name]: x for name, x in arrays.items()},
                **others,
                **static,
                is_causal=p.is_causal,
                local_window_size=p.window,
                logits_soft_cap=p.soft_cap,
                numerics=p.numerics,
                row_max=p.row_max,
                implementation=p.implementation,
                block_sizes=p.block_sizes,
                return_residual=True,
            )

        (out, lse), pullback = jax.vjp(call, arrays)
        (gradients,) = pullback((do.astype(out.dtype), dlse))
        return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}

    return jax.jit(run)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The arrays of a call, for `compiled` and for the oracle."""

    arrays: dict[str, np.ndarray]
    others: dict[str, np.ndarray]
    do: np.ndarray
    dlse: np.ndarray
    problem: oracle.Problem


def draw(p: Program, number: int) -> Draw:
    """Draws the values with this number."""
    rng = np.random.default_rng([SEED, p.number, number])
    b, t, s, n, kv, h = p.batch, p.rows, p.keys, p.heads, p.kv_heads, p.head_size
    dtype = jnp.dtype(p.dtype)
    of_v = p.value_size
    shapes = {"q": (b, t, n, h), "k": (b, s, kv, h), "v": (b, s, kv, of_v), "do": (b, t, n, of_v)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if rng.random() < 0.2:
        arrays["q"] *= 4  # one key dominates
    if rng.random() < 0.2:
        arrays["k"][:, s // 2 :] = arrays["k"][:, : s - s // 2]  # maxima repeat
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    do, dlse = arrays.pop("do"), rng.standard_normal((b, t, n)).astype(np.float32)

    def pairs(span: tuple[bool, ...]) -> tuple[int, ...]:
        return tuple(x if full else 1 for x, full in zip((b, n, t, s), span, strict=True))

    if p.bias is not None:
        arrays["bias"] = (2 * rng.standard_normal(pairs(p.bias))).astype(np.float32)
    if p.sinks:
        arrays["sinks"] = (2 * rng.standard_normal(n)).astype(dtype)
    others: dict[str, np.ndarray] = {}
    if p.mask is not None:
        others["mask"] = rng.random(pairs(p.mask)) < rng.uniform(0.3, 1)
    ends = {"query": [t] * b, "key_value": [s] * b}
    for name, given, longest in zip(ends, p.lengths, (t, s), strict=True):
        if given:
            others[f"{name}_seq_lengths"] = rng.integers(0, longest + 1, b)
            ends[name] = others[f"{name}_seq_lengths"].tolist()
    if p.segments:
        kinds = int(rng.integers(1, 4))
        for name, length in (("query", t), ("key_value", s)):
            others[f"{name}_segment_ids"] = np.sort(rng.integers(0, kinds + 1, (b, length)), 1)
    offset = [p.offset] * b if isinstance(p.offset, int) else [0] * b
    if p.offset == "array":
        others["query_offset"] = rng.integers(-t, s + 4, b)
        offset = others["query_offset"].tolist()
    elif p.offset == "end":
        offset = [end - rows for end, rows in zip(ends["key_value"], ends["query"], strict=True)]
    scale = p.scale
    if scale == "traced":
        others["scale"] = np.float32(rng.uniform(-0.5, 1))
        scale = float(others["scale"])
    problem = oracle.Problem(
        **{name: arrays[name].astype(np.float64) for name in ("q", "k", "v")},
        do=do.astype(np.float64),
        dlse=dlse.astype(np.float64),
        scale=h**-0.5 if scale is None else float(scale),
        soft_cap=p.soft_cap,
        is_causal=p.is_causal,
        window=p.window,
        offset=offset,
        query_lengths=ends["query"],
        key_lengths=ends["key_value"],
        query_segments=others.get("query_segment_ids"),
        key_segments=others.get("key_value_segment_ids"),
        mask=others.get("mask"),
        bias=arrays["bias"].astype(np.float64) if "bias" in arrays else None,
        sinks=arrays["sinks"].astype(np.float64) if p.sinks else None,
    )
    return Draw(arrays, others, do, dlse, problem)


def with_garbage(x: Draw, seen: np.ndarray, rng: np.random.Generator) -> Draw:
    """Puts NaN and infinities into rows that see no key and keys that no row of their head sees."""
    rows = ~seen.any(3).swapaxes(1, 2)
    batch, kv_heads = seen.shape[0], x.arrays["k"].shape[2]
    keys = ~seen.reshape(batch, kv_heads, -1, *seen.shape[2:]).any((2, 3)).swapaxes(1, 2)
    arrays, do, dlse = dict(x.arrays), x.do.copy(), x.dlse.copy()
    for name, at in (("q", rows), ("k", keys), ("v", keys)):
        arrays[name] = arrays[name].copy()
        arrays[name][at] = rng.choice([np.nan, np.inf, -np.inf])
    do[rows] = np.nan
    if x.problem.sinks is not None:  # dlse of a row without keys reaches the sink
        lengths = np.array(x.problem.query_lengths)[:, None, None]
        rows = rows & (np.arange(rows.shape[1])[:, None] >= lengths)
    dlse[rows] = np.inf
    return Draw(arrays, x.others, do, dlse, x.problem)


def bounds(p: Program, x: oracle.Problem, seen: np.ndarray) -> dict[str, Any]:
    """The error that each entry of each result may have.

    Rounding to a format adds half an ulp to a term. At most three roundings lie on the way to a
    result, plus one where scores are rounded. A float32 sum adds an ulp per term; the error of a
    score grows with the size of the score too. The derivative of a soft cap is 1 − t², where t has
    an error of one or two ulps of 1.
    """
    sizes = oracle.sizes(x, seen)
    score = sizes.score
    rounds = p.preset != "exact" or p.dtype != "float32"
    low = EPS["float16" if p.dtype == "float16" else "bfloat16"] if rounds else 0.0
    terms = p.head_size + p.keys + p.rows + 16
    of_scores = 2 * EPS["float32"] * terms * (1 + score)
    if p.preset == "published":
        of_scores += low * (1 + score)
    relative = 3 * low + of_scores
    # The smallest float16 is 2^-24, in P and dS as well as in a result.
    least = 2.0**-24 * terms if p.dtype == "float16" else 2.0**-100
    result = {
        name: relative * size + least * (1 + size.max(initial=0.0))
        for name, size in sizes.of.items()
    }
    if p.soft_cap is not None:
        for name, size in sizes.uncapped.items():
            result[name] += 4 * EPS["float32"] * size
    return result | {"lse": of_scores + 2.0**-100}


def check(p: Program, run: Callable[..., Any], number: int) -> None:
    """Compares one draw; its AssertionError names program, draw, result and the worst entry."""
    x = draw(p, number)
    seen = oracle.seen_pairs(x.problem)
    rng = np.random.default_rng([SEED, p.number, number, 1])
    given = with_garbage(x, seen, rng) if rng.random() < 0.3 else x
    result = run(given.arrays, given.others, given.do, given.dlse)
    expected, limits = oracle.attend(x.problem, seen), bounds(p, x.problem, seen)
    assert result.keys() == expected.keys()
    for name, exact in expected.items():
        value = np.asarray(result[name]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where(value == exact, 0.0, np.abs(value - exact))  # −inf equals −inf
        wrong = ~(error <= limits[name])
        if wrong.any():
            at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
            raise AssertionError(
                f"program {p.number}, draw {number}: {name} at {tuple(map(int, at))} is "
                f"{value[at]:.7g}, exactly {exact[at]:.7g}; {wrong.sum()} of {wrong.size} entries "
                f"beyond their bound; {p}"
            )
