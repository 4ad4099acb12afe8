"""One oracle, one table of implementations, one table of cases.

`run` runs an implementation forward and backward on a case. `check` bounds every error against the
float64 reference by the error of `plain`, the same numerics in float32 NumPy. A new implementation
is one more row of IMPLEMENTATIONS.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from compiling import UNOPTIMIZED
from jax.experimental.pallas import tpu as pltpu

from lowprec_attn import attention, numerics
from lowprec_attn.attention import dispatch, reference, tiled
from lowprec_attn.numerics import Numerics, RowMax
from pallas_kernels.gpu import block_sizes as gpu
from pallas_kernels.gpu.hopper import block_sizes as hopper
from pallas_kernels.tpu import block_sizes as tpu

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """A row of the table: an implementation and the tiles that it runs with.

    Attributes:
      name: the name of the implementation.
      kv_block: keys per step.
      block_sizes: its tiles; kernels run in Pallas' interpreter.
      tile: the largest side of a tile; None if tiles are as large as the small cases.
      declines: fields of a case, and dtypes, that it does not serve.
      tried: names of the cases that it runs; None for all that it serves.
    """

    name: str
    kv_block: int | None = None
    block_sizes: Hashable = None
    tile: int | None = None
    declines: frozenset[str] = frozenset()
    tried: frozenset[str] | None = None

    def serves(self, case: "Case") -> bool:
        """Whether the case asks for nothing that the implementation declines."""
        asked = {
            name
            for name in ("mask", "bias", "query_offset", "soft_cap")
            if getattr(case, name) is not None
        } | ({"sinks"} if case.sinks else set())
        asked |= set() if case.value_size is None else {"value_size"}
        return not self.declines & (asked | {case.dtype})

    def numerics(self, base: Numerics) -> Numerics:
        return base.replace(kv_block=self.kv_block)


GPU_TILE = gpu.Tile(query=16, kv=16, stages=1)
GPU_TILES = gpu.BlockSizes(
    forward=GPU_TILE, key_gradients=GPU_TILE, query_gradients=GPU_TILE, interpret=True
)
# A query tile that spans several steps, some of which its first rows do not see; and the reverse.
GPU_TALL = gpu.BlockSizes(
    forward=gpu.Tile(query=32, kv=64, stages=1),
    key_gradients=gpu.Tile(query=32, kv=16, stages=1),
    query_gradients=gpu.Tile(query=16, kv=32, stages=1),
    interpret=True,
)
HOPPER_FORWARD = hopper.ForwardTile(step=64)
HOPPER_BACKWARD = hopper.BackwardTile(step=64)
HOPPER_TILES = hopper.BlockSizes(
    forward=HOPPER_FORWARD,
    query_gradients=HOPPER_BACKWARD,
    key_gradients=HOPPER_BACKWARD,
    programs=2,
    interpret=True,
)
# In this interpreter memory that was never written is NaN, a read out of bounds raises, and a race
# is reported. Each read and write calls Python, so it is slow. Every case and step of several tiles
# runs here once, and so does every array that a preset adds. Other tests of the arithmetic use
# Pallas' other interpreter, which runs a kernel as one program.
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
TPU_TILE = tpu.Tile(query=128, kv=128)
TPU_TILES = tpu.BlockSizes(
    forward=TPU_TILE, key_gradients=TPU_TILE, query_gradients=TPU_TILE, interpret=True
)

# `tiled` in one step has the bits of `dense` (test_attention.py), so these are the cases of
# `dense`. They include every field of a case, and combine what hides keys with the other fields.
IN_ONE_STEP = ("full", "repeated_maxima", "dominant_key", "large_positive_scores")
IN_ONE_STEP += ("large_negative_scores", "mqa_head_128", "both_lengths", "window_more_rows")
IN_ONE_STEP += ("offset_of_lengths", "segments", "mask_empty_rows_and_blocks", "bias_of_heads")
IN_ONE_STEP += ("bfloat16", "bfloat16_one_sign", "soft_cap_bias", "values_mask_bias")
IN_ONE_STEP += ("sinks_lengths", "sinks_window_cap_large_values", "sinks_mask_bias")
IN_ONE_STEP += ("sinks_cap_bfloat16", "float16_key_lengths")

IMPLEMENTATIONS = {
    "dense": Implementation(name="dense", tried=frozenset(IN_ONE_STEP)),
    "tiled": Implementation(name="tiled", tried=frozenset()),
    "tiled_odd": Implementation(
        name="tiled", kv_block=7, block_sizes=tiled.BlockSizes(query=5, kv_bwd=9), tile=9
    ),
    "gpu": Implementation(
        name="gpu",
        kv_block=16,
        block_sizes=GPU_TILES,
        tile=16,
        declines=frozenset({"bias", "query_offset"}),
    ),
    "tpu": Implementation(
        name="tpu",
        kv_block=128,
        block_sizes=TPU_TILES,
        tile=128,
        declines=frozenset({"bias", "query_offset", "float16", "soft_cap", "sinks", "value_size"}),
    ),
}
KERNELS = ("gpu", "tpu")


def strict(implementation: str) -> Implementation:
    """A row of the table, with an interpreter that watches memory where one exists."""
    row = IMPLEMENTATIONS[implementation]
    if implementation != "tpu":
        return row
    watched = dataclasses.replace(TPU_TILES, interpret=STRICT)
    return dataclasses.replace(row, block_sizes=watched)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A problem: shapes, visible pairs and values; masks and biases are named (see below)."""

    batch: int = 2
    rows: int = 20
    keys: int = 20
    heads: int = 2
    kv_heads: int = 2
    head_size: int = 16
    value_size: int | None = None
    dtype: str = "float32"
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    query_offset: int | tuple[int, ...] | str | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    segments: bool = False
    mask: str | None = None
    bias: tuple[bool, bool, bool] | None = None  # whether the bias spans B, N and T
    values: str = "normal"

    @property
    def offset(self) -> np.ndarray:
        """The position of row 0 among the keys, int [B]."""
        if self.query_offset != "end":
            given = np.array(0 if self.query_offset is None else self.query_offset)
            return np.broadcast_to(given, (self.batch,))
        ends = np.array([self.keys] * self.batch if self.key_lengths is None else self.key_lengths)
        return ends - np.array(self.rows if self.query_lengths is None else self.query_lengths)


SINKS_LENGTHS = Case(
    sinks=True, heads=4, key_lengths=(20, 0), query_lengths=(4, 17), is_causal=True
)
# Cases that differ only in values share their compiled functions, which keeps compilation short.
# Lengths are values too.
CASES = {
    "full": Case(),
    "repeated_maxima": Case(values="repeated_maxima"),
    "dominant_key": Case(values="dominant_key"),
    "large_positive_scores": Case(values="large_positive_scores"),
    "large_negative_scores": Case(values="large_negative_scores"),
    "causal": Case(is_causal=True),
    "causal_repeated_maxima": Case(is_causal=True, values="repeated_maxima"),
    "gqa_head_32": Case(heads=4, head_size=32, is_causal=True),
    "mqa_head_128": Case(heads=3, kv_heads=1, head_size=128),
    "more_keys_head_64": Case(rows=9, keys=23, head_size=64, is_causal=True),
    "more_rows": Case(rows=23, keys=9, scale=0.7, is_causal=True),
    "one_row": Case(rows=1, keys=19, is_causal=True),
    "both_lengths": Case(key_lengths=(20, 6), query_lengths=(4, 17), is_causal=True),
    "both_lengths_repeated_maxima": Case(
        key_lengths=(20, 6), query_lengths=(4, 17), is_causal=True, values="repeated_maxima"
    ),
    "window": Case(window=(6, 2), values="repeated_maxima"),
    "causal_window": Case(rows=60, keys=50, heads=4, is_causal=True, window=9),
    "window_more_rows": Case(rows=40, keys=20, window=(7, 1), key_lengths=(20, 9)),
    "offset": Case(rows=11, keys=33, heads=4, is_causal=True, query_offset=(19, -4)),
    "offset_of_the_end": Case(rows=11, keys=33, is_causal=True, window=9, query_offset="end"),
    "offset_of_lengths": Case(
        rows=21,
        keys=40,
        window=(6, 2),
        query_offset="end",
        query_lengths=(21, 8),
        key_lengths=(40, 25),
        values="repeated_maxima",
    ),
    "segments": Case(rows=25, keys=21, heads=4, segments=True, key_lengths=(21, 12)),
    "mask_padding": Case(mask="padding"),
    "mask_empty_rows_and_blocks": Case(mask="empty", heads=4),
    "bias_of_heads": Case(bias=(False, True, True), heads=4, is_causal=True),
    "bias_of_keys": Case(bias=(False, False, False)),
    "bfloat16": Case(dtype="bfloat16", is_causal=True),
    "bfloat16_repeated_maxima": Case(dtype="bfloat16", is_causal=True, values="repeated_maxima"),
    "bfloat16_one_sign": Case(dtype="bfloat16", is_causal=True, values="one_sign_values"),
    "soft_cap_window": Case(
        rows=40, keys=30, heads=4, soft_cap=1.5, window=(9, 4), key_lengths=(30, 9)
    ),
    "soft_cap_bias": Case(
        soft_cap=2.0, bias=(True, True, True), mask="random", heads=4, query_offset=(4, -3)
    ),
    "small_values_cap_large_scores": Case(
        heads=4,
        head_size=48,
        value_size=16,
        is_causal=True,
        soft_cap=30.0,
        values="large_positive_scores",
    ),
    "values_mask_bias": Case(
        value_size=3, head_size=5, heads=4, bias=(True, False, True), mask="random"
    ),
    "values_of_one_padded_size": Case(
        dtype="bfloat16", head_size=24, value_size=32, soft_cap=2.0, window=(9, 3)
    ),
    "sinks_lengths": SINKS_LENGTHS,
    "sinks_repeated_maxima": dataclasses.replace(
        SINKS_LENGTHS, key_lengths=(20, 20), query_lengths=(20, 17), values="repeated_maxima"
    ),
    "sinks_large_scores": dataclasses.replace(
        SINKS_LENGTHS, key_lengths=(20, 20), query_lengths=(20, 17), values="large_negative_scores"
    ),
    "sinks_window_cap_large_values": Case(
        rows=40,
        keys=20,
        value_size=40,
        sinks=True,
        window=(7, 1),
        key_lengths=(20, 9),
        soft_cap=2.0,
    ),
    "sinks_mask_bias": Case(
        sinks=True, bias=(True, True, True), mask="empty", heads=4, query_offset=(4, -3)
    ),
    "sinks_cap_bfloat16": Case(
        dtype="bfloat16", sinks=True, soft_cap=3.0, is_causal=True, segments=True
    ),
    "float16_key_lengths": Case(dtype="float16", heads=4, key_lengths=(11, 0)),
}


# Cases of several TPU tiles, both of rows and of keys.
LONG = Case(batch=1, rows=150, keys=200, head_size=32, is_causal=True)
ONE_HEAD = dataclasses.replace(LONG, heads=1, kv_heads=1)
LONG_CASES = {
    "tiles": LONG,
    "tiles_gqa_lengths": dataclasses.replace(
        LONG, batch=2, heads=4, query_lengths=(150, 40), key_lengths=(200, 131)
    ),
    "tiles_window": dataclasses.replace(LONG, rows=300, keys=400, window=(40, 10), is_causal=False),
    "tiles_causal_window": dataclasses.replace(
        ONE_HEAD, batch=2, rows=400, keys=300, window=50, query_lengths=(400, 170)
    ),
    "tiles_segments_mask": dataclasses.replace(LONG, kv_heads=1, segments=True, mask="random"),
    "tiles_full_head_192": dataclasses.replace(ONE_HEAD, head_size=192, is_causal=False, scale=0.3),
}

# Cases that need a program of their own here, although others have all of their features. On a
# device every case runs.
COVERED = {
    "tiled_odd": (
        *("gqa_head_32", "mqa_head_128", "more_keys_head_64", "one_row", "mask_padding"),
        *("values_of_one_padded_size", "window"),
    ),
    # sinks_cap_bfloat16
    "gpu": ("segments", "bfloat16", "bfloat16_repeated_maxima", "bfloat16_one_sign"),
    # tiles_gqa_lengths; test_tpu_kernels.py has arrays of bfloat16
    "tpu": (
        *("one_row", "both_lengths", "both_lengths_repeated_maxima"),
        *("bfloat16", "bfloat16_repeated_maxima", "bfloat16_one_sign"),
    ),
}
# Kernels that take long to compile in the interpreter. On a device every case runs.
SLOW = {
    "gpu": (
        *("gqa_head_32", "one_row", "more_rows", "more_keys_head_64"),
        *("window", "window_more_rows", "mask_padding"),
        *("causal", "causal_repeated_maxima", "soft_cap_window"),
    ),
    # `tiles_gqa_lengths` still runs, and so do cases with as many keys and with larger heads.
    "tpu": (
        *("gqa_head_32", "more_keys_head_64", "window", "causal_window", "window_more_rows"),
        *("segments", "tiles_window", "mask_padding", "mask_empty_rows_and_blocks"),
        *("more_rows", "tiles", "causal", "causal_repeated_maxima", "mqa_head_128"),
    ),
}


def cases_of(implementation: str) -> dict[str, Case]:
    """The cases that an implementation runs, by name."""
    row = IMPLEMENTATIONS[implementation]
    cases = CASES | LONG_CASES if implementation == "tpu" else CASES
    return {
        name: case
        for name, case in cases.items()
        if row.serves(case) and (row.tried is None or name in row.tried)
    }


def every_case() -> list[Any]:
    """The parameters (implementation, case) of a test over the whole table, without COVERED."""
    return [
        pytest.param(name, case, marks=[pytest.mark.slow] * (case in SLOW.get(name, ())))
        for name in IMPLEMENTATIONS
        for case in CASES | LONG_CASES
        if case in cases_of(name) and case not in COVERED.get(name, ())
    ]


def inputs(case: Case, seed: int = 0) -> Arrays:
    """q k v do dlse, and mask and bias if the case has them; NumPy arrays of its dtype."""
    rng = np.random.default_rng(seed)
    b, t, s, n, h = case.batch, case.rows, case.keys, case.heads, case.head_size
    of_v = case.value_size or h
    q, do = (rng.standard_normal((b, t, n, size)) for size in (h, of_v))
    k, v = (rng.standard_normal((b, s, case.kv_heads, size)) for size in (h, of_v))
    if case.values == "repeated_maxima":
        k[:, s // 2 :] = k[:, : s - s // 2]  # each key occurs twice, in different blocks and rows
        k[:, 1] = k[:, 0]
    elif case.values == "dominant_key":
        q[..., 0], k[..., 0], k[:, 2, :, 0] = 8.0, 0.0, 12.0
    elif case.values == "large_positive_scores":
        q[..., 0], k[..., 0] = 30.0, 12.0
    elif case.values == "large_negative_scores":
        q[..., 0], k[..., 0] = 30.0, -12.0
    elif case.values in ("huge_positive_scores", "huge_negative_scores"):  # exact if the scale is 1
        q, k = (np.rint(x.clip(-1, 1)) for x in (q, k))
        q[..., 0], k[..., 0] = 2.0**11, 2.0**11 if "positive" in case.values else -(2.0**11)
    elif case.values == "exact_large_scores":  # before the scale: about ± 2^19, in many sizes
        q, k = (np.rint(8 * x.clip(-2, 2)) for x in (q, k))
        q[..., 0], k[..., 0] = 2.0**10 - np.arange(t)[:, None], 2.0**9
    elif case.values == "small_integers":
        q, k = (np.rint(x.clip(-1, 1)) for x in (q, k))  # most rows tie in most steps
    elif case.values == "exact_sums":  # sums of bfloat16 P̄ and P̄v, in any order
        q, k = (np.rint(x.clip(-1, 1)) for x in (q, k))
        v = np.sign(v)
    elif case.values == "one_sign_values":
        v = np.abs(v) * rng.choice([-1.0, 1.0], (1, 1, case.kv_heads, h))
    dtype = jnp.dtype(case.dtype)
    result = {name: x.astype(dtype) for name, x in {"q": q, "k": k, "v": v, "do": do}.items()}
    result["dlse"] = rng.standard_normal((b, t, n)).astype(np.float32)
    if case.bias is not None:
        spans = [size if spanned else 1 for spanned, size in zip(case.bias, (b, n, t), strict=True)]
        result["bias"] = 3 * rng.standard_normal((*spans, s)).astype(np.float32)
        result["bias"][..., 0] += 100.0  # exp(bias) alone would overflow
    if case.sinks:  # one takes all weight, one almost none
        result["sinks"] = (2 * rng.standard_normal(n)).astype(np.float32)
        if case.values == "large_negative_scores":
            result["sinks"] = np.resize(np.array([-88.0, -95.0], np.float32), n)
    if case.mask is not None:
        result["mask"] = _mask(case, rng)
    if case.segments:
        result["query_segments"], result["key_segments"] = _segments(case)
    return result


def _segments(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Ids of packed sequences, which differ between batch elements; the last rows see no key."""
    return tuple(
        np.stack([np.arange(size) // (length // 3 + 1 + b) for b in range(case.batch)]) + extra
        for size, length, extra in (
            (case.rows, case.keys, (np.arange(case.rows) >= case.rows - 2) * 100),
            (case.keys, case.keys, 0),
        )
    )


def _mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    b, t, s, n = case.batch, case.rows, case.keys, case.heads
    if case.mask == "random":
        return rng.random((b, n, t, s)) < 0.6
    if case.mask == "padding":  # one per batch element, for all heads and rows
        return np.arange(s) < np.array([s - 6, s - 1])[:, None, None, None]
    assert case.mask == "empty", case.mask
    mask = np.ones((1, 1, t, s), bool)
    mask[:, :, ::2, : s // 2] = False  # the first steps of these rows are fully masked
    mask[:, :, [0, 3, t - 1]] = False
    return mask


def sides(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """A window as (left, right)."""
    return (window, window) if isinstance(window, int) else window


def masking(case: Case, arrays: Arrays) -> reference.Masking:
    """The masking of the case, for the reference."""
    return reference.Masking(
        is_causal=case.is_causal,
        window=sides(case.window),
        mask=arrays.get("mask"),
        bias=arrays.get("bias"),
        query_lengths=None if case.query_lengths is None else np.array(case.query_lengths),
        key_lengths=None if case.key_lengths is None else np.array(case.key_lengths),
        query_segments=arrays.get("query_segments"),
        key_segments=arrays.get("key_segments"),
        query_offset=case.offset,
        sinks=arrays.get("sinks"),
    )


def reference_options(case: Case, arrays: Arrays) -> dict[str, Any]:
    return {"scale": case.scale, "soft_cap": case.soft_cap, "masking": masking(case, arrays)}


def slope(case: Case, arrays: Arrays) -> np.ndarray:
    """The derivative of the soft cap, float64 [B, N, T, S], or [1] without a cap."""
    if case.soft_cap is None:
        return np.ones(1)
    q, k = (arrays[name].astype(np.float64) for name in ("q", "k"))
    products = np.einsum("btnh,bsnh->bnts", q, k.repeat(case.heads // case.kv_heads, 2))
    return np.cosh(products * (case.scale or case.head_size**-0.5) / case.soft_cap) ** -2.0


def oracle(case: Case, arrays: Arrays) -> Arrays:
    """The float64 results of the forward and backward pass, including a gradient of lse."""
    qkv = (arrays["q"], arrays["k"], arrays["v"])
    options = reference_options(case, arrays)
    bwd = reference.backward(*qkv, arrays["do"], dlse=arrays["dlse"], **options)
    fwd = bwd.forward
    result = {"out": fwd.o, "lse": fwd.lse, "dq": bwd.dq, "dk": bwd.dk, "dv": bwd.dv}
    if "sinks" in arrays:
        result["dsinks"] = bwd.dsinks
    if "bias" in arrays:
        axes = tuple(i for i, size in enumerate(arrays["bias"].shape) if size == 1)
        result["dbias"] = bwd.ds.sum(axes, keepdims=True)
    return result


def check_skips(how: Implementation, case: Case, arrays: Arrays) -> None:
    """Checks that tiles of keys and of rows outside a window are not read, by placing NaN there.

    It runs the program of `run` with `max_logit`.
    """
    if case.window is None or how.tile is None:
        return
    left, right = sides(case.window)
    distance = (np.arange(case.rows) + case.offset[0])[:, None] - np.arange(case.keys)
    # Pairs at least one tile outside each side of the window, wherever the tiles begin.
    apart = (distance > left + 2 * how.tile, -distance > right + 2 * how.tile)
    if case.is_causal:
        apart = (apart[0], -distance > 2 * how.tile)
    for pairs, key, row in ((apart[0], 0, -1), (apart[1], -1, 0)):
        poisoned = {name: x.copy() for name, x in arrays.items()}
        poisoned["v"][:, key] = np.nan
        poisoned["do"][:, row] = np.nan
        result = run(how, case, poisoned, numerics.EXACT, max_logit=True)
        assert np.isfinite(result["out"][:, pairs[:, key]]).all()
        assert np.isfinite(result["dv"][:, pairs[row]]).all()


def visible(case: Case, arrays: Arrays) -> np.ndarray:
    """Which query sees which key, bool [B, N, T, S]."""
    qkv = (arrays[name] for name in ("q", "k", "v"))
    return reference.attention(*qkv, masking=masking(case, arrays)).s > -np.inf


GARBAGE = (np.nan, np.inf, -np.inf)


def check_hidden(
    how: Implementation, case: Case, arrays: Arrays, expected: Arrays, numerics_: Numerics
) -> bool:
    """Checks that NaN, inf and −inf in rows and keys that nothing sees change no result.

    The results of these rows and keys themselves must be 0. Returns False if every row sees some
    key and every key is seen. It runs the program of `run`.
    """
    seen = visible(case, arrays)
    rows = ~seen.any(3).swapaxes(1, 2)  # [B, T, N]
    by_key_head = seen.reshape(case.batch, case.kv_heads, -1, *seen.shape[2:]).any((2, 3))
    keys = ~by_key_head.swapaxes(1, 2)
    if not (keys.any() or rows.any()):
        return False
    where = {"q": rows, "do": rows, "dlse": rows, "k": keys, "v": keys}
    if case.sinks:  # dlse of a row within the lengths reaches its sink
        lengths = np.array(case.query_lengths or [case.rows] * case.batch)
        where["dlse"] = rows & (np.arange(case.rows)[:, None] >= lengths[:, None, None])
    spoiled = {name: x.copy() for name, x in arrays.items()}
    for number, (name, at) in enumerate(where.items()):
        values = np.resize(np.roll(GARBAGE, number), at.sum()).astype(arrays[name].dtype)
        spoiled[name][at] = values[:, None] if arrays[name].ndim == 4 else values
    result = run(how, case, spoiled, numerics_, max_logit="max_logit" in expected)
    for name, x in result.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    for name, at in {"dq": rows, "dk": keys, "dv": keys}.items():
        np.testing.assert_array_equal(result[name][at], 0, err_msg=name)
    return True


def score_noise(case: Case, arrays: Arrays) -> Arrays:
    """The effect on each result of an error of one ulp in every score.

    The backward pass forms S again, in products of other shapes than in the forward pass. Its S may
    differ by an ulp of |S|, ε·max|S|, and P then changes by that factor. So lse does not normalise
    this P exactly. Each result moves by at most the factor times the sum of the sizes of its terms.
    """
    qkv = (arrays["q"], arrays["k"], arrays["v"])
    options = reference_options(case, arrays)
    bwd = reference.backward(*qkv, arrays["do"], **options)
    fwd = bwd.forward
    dlse = arrays["dlse"].astype(np.float64).transpose(0, 2, 1)[..., None]
    ds, scale = np.abs(bwd.ds + fwd.p * dlse), case.scale or case.head_size**-0.5
    dbias, ds, ulp = ds, ds * slope(case, arrays), plain.EPS32 * largest(fwd.s)
    if case.soft_cap is not None:  # 1 − t²: XLA's tanh on a CPU is off by 2.5 ε near t = 1
        ds = ds + 5 * plain.EPS32 / ulp * dbias
    q, k, v, do = (np.abs(arrays[name].astype(np.float64)) for name in ("q", "k", "v", "do"))
    group = case.heads // case.kv_heads

    def by_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:3], group, -1).sum(3)

    sizes = {
        "out": np.einsum("bnts,bsnh->btnh", fwd.p, v.repeat(group, 2)),
        "lse": np.ones(1),
        "dq": np.einsum("bnts,bsnh->btnh", ds, k.repeat(group, 2)) * scale,
        "dk": by_group(np.einsum("bnts,btnh->bsnh", ds, q)) * scale,
        "dv": by_group(np.einsum("bnts,btnh->bsnh", fwd.p, do)),
        "dbias": dbias.sum((0, 1)),
        "dsinks": (np.abs(bwd.delta) + np.abs(arrays["dlse"])).sum((0, 1)),
    }
    return {name: ulp * x.max() for name, x in sizes.items()}


def plain_options(
    case: Case, arrays: Arrays, numerics_: Numerics, row_max: RowMax
) -> plain.Options:
    """The options of the plain implementation for this case."""
    b, t, s = case.batch, case.rows, case.keys
    rows, cols = np.arange(t)[:, None], np.arange(s)
    at = rows + case.offset[:, None, None, None]
    within = np.ones((b, 1, t, s), bool)
    exists = np.ones((b, 1, t, 1), bool)
    if case.query_lengths is not None:
        exists = rows < np.array(case.query_lengths)[:, None, None, None]
        within = within & exists
    if case.key_lengths is not None:
        within = within & (cols < np.array(case.key_lengths)[:, None, None, None])
    if case.window is not None:
        left, right = sides(case.window)
        within = within & (at - left <= cols) & (cols <= at + right)
    visited = within & (cols <= at) if case.is_causal else within
    seen = visited & arrays.get("mask", np.True_)
    if case.segments:
        of_rows, of_keys = arrays["query_segments"], arrays["key_segments"]
        seen = seen & (of_rows[:, None, :, None] == of_keys[:, None, None])
    return plain.Options(
        numerics=numerics_,
        row_max=row_max,
        scale=case.scale or case.head_size**-0.5,
        seen=seen,
        visited=visited,
        within_lengths=within,
        bias=arrays.get("bias"),
        soft_cap=case.soft_cap,
        sinks=arrays.get("sinks"),
        exists=exists,
    )


def run_plain(
    case: Case,
    arrays: Arrays,
    numerics_: Numerics,
    row_max: RowMax = numerics.StandardMax(),  # noqa: B008 (frozen)
) -> Arrays:
    """The results of the same numerics in NumPy float32; a row without keys may divide 0 by 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return plain.attend(arrays, plain_options(case, arrays, numerics_, row_max), case.dtype)


def run(
    implementation: Implementation,
    case: Case,
    arrays: Arrays,
    numerics_: Numerics,
    row_max: RowMax = numerics.StandardMax(),  # noqa: B008 (frozen)
    key: jax.Array | None = None,
    *,
    max_logit: bool = False,
) -> Arrays:
    """Runs one implementation forward and backward under one `jit`, to float32 NumPy arrays."""
    call = Call(
        implementation,
        numerics_,
        row_max,
        case.scale,
        case.is_causal,
        case.window,
        case.soft_cap,
        max_logit,
    )
    return as_float32(compiled(call)(*call_arrays(case, arrays), key))


def as_float32(result: dict[str, jax.Array]) -> Arrays:
    return {name: np.asarray(x).astype(np.float32) for name, x in result.items()}


class Operands(NamedTuple):
    """Arrays to differentiate by, the other arrays, and the cotangents of out and lse."""

    differentiated: dict[str, Any]
    rest: dict[str, Any]
    cotangents: tuple[Any, Any]


def call_arrays(case: Case, arrays: Arrays) -> Operands:
    """The arrays of a case, as `Call.forward_and_backward` takes them."""
    rest: dict[str, Any] = {"mask": arrays.get("mask")}
    for name, lengths in (("query", case.query_lengths), ("key_value", case.key_lengths)):
        rest[f"{name}_seq_lengths"] = None if lengths is None else np.array(lengths, np.int32)
    if case.query_offset is not None:
        rest["query_offset"] = case.offset.astype(np.int32)
    rest["query_segment_ids"] = arrays.get("query_segments")
    rest["key_value_segment_ids"] = arrays.get("key_segments")
    differentiated = {
        name: arrays[name] for name in ("q", "k", "v", "bias", "sinks") if name in arrays
    }
    return Operands(differentiated, rest, (arrays["do"], arrays["dlse"]))


def by_argument(arrays: dict[str, Any]) -> dict[str, Any]:
    """Renames q, k and v to the arguments of attention, and keeps the other names."""
    arguments = {"q": "query", "k": "key", "v": "value"}
    return {arguments.get(name, name): x for name, x in arrays.items()}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a run; equal calls share one compiled function."""

    implementation: Implementation
    numerics: Numerics
    row_max: RowMax
    scale: float | None
    is_causal: bool
    window: int | tuple[int, int] | None
    soft_cap: float | None = None
    max_logit: bool = False

    def forward_and_backward(
        self,
        differentiated: dict[str, Any],
        rest: dict[str, Any],
        cotangents: tuple[Any, Any],
        key: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """out, lse, dq, dk, dv, dbias if there is a bias, and with `max_logit` that too."""

        def attend(x: dict[str, Any]) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
            out, lse, *max_logit = attention.dot_product_attention(
                **by_argument(x),
                **rest,
                scale=self.scale,
                is_causal=self.is_causal,
                local_window_size=self.window,
                logits_soft_cap=self.soft_cap,
                numerics=self.implementation.numerics(self.numerics),
                row_max=self.row_max,
                rng_key=key,
                implementation=self.implementation.name,
                block_sizes=self.implementation.block_sizes,
                return_residual=True,
                return_max_logit=self.max_logit,
            )
            return (out, lse), max_logit

        (out, lse), pullback, max_logit = jax.vjp(attend, differentiated, has_aux=True)
        do, dlse = cotangents
        (grads,) = pullback((jnp.asarray(do).astype(out.dtype), jnp.asarray(dlse)))
        result = {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in grads.items()}
        return result | dict(zip(["max_logit"], max_logit, strict=False))


@functools.cache
def compiled(call: Call) -> Callable[..., dict[str, jax.Array]]:
    # Interpreted kernels take longer to compile than to run, even in slow tests.
    options = UNOPTIMIZED if call.implementation.name in KERNELS else None
    # A fresh lambda, because `jit` would reuse the trace of an equal call: a mutant would run the
    # original's program.
    return jax.jit(lambda *operands: call.forward_and_backward(*operands), compiler_options=options)


def trace_anew() -> None:
    """Drops all compiled programs, so that the next programs contain what a test has patched."""
    compiled.cache_clear()
    dispatch._compute.clear_cache()


def error(x: np.ndarray, exact: np.ndarray) -> float:
    """The largest absolute error; rows without keys must agree on lse = −inf exactly."""
    empty = exact == -np.inf
    np.testing.assert_array_equal(x == -np.inf, empty)
    return float(np.max(np.abs(np.where(empty, 0.0, x) - np.where(empty, 0.0, exact))))


def largest(exact: np.ndarray) -> float:
    return float(np.max(np.abs(np.where(exact == -np.inf, 0.0, exact))))


def bounds(
    same_numerics: Arrays, exact: Arrays, factor: float = 2, noise: Arrays | None = None
) -> dict[str, float]:
    """The allowed errors: `factor` times the error of the plain implementation, plus float32 ulps.

    A floor of 16 ulps of the largest entry covers sums of some twenty terms in another order.
    `noise`, where given, is added too; see `score_noise`.
    """
    return {
        name: factor * error(same_numerics[name], oracle_)
        + 16 * plain.EPS32 * largest(oracle_)
        + (0.0 if noise is None else noise[name])
        for name, oracle_ in exact.items()
    }


def check(
    result: Arrays,
    same_numerics: Arrays,
    exact: Arrays,
    factor: float = 2,
    noise: Arrays | None = None,
) -> None:
    """Checks that every error is within its bound, and that a result of zeros would not be."""
    assert result.keys() == exact.keys()
    for name, bound in bounds(same_numerics, exact, factor, noise).items():
        assert error(result[name], exact[name]) <= bound, name
        if largest(exact[name]) > 1e-3:  # a vanishing gradient cannot be told from zeros
            assert error_of_zeros(exact[name]) > 2 * bound, name


def error_of_zeros(exact: np.ndarray) -> float:
    """The error of a result that is never written."""
    return error(np.where(exact == -np.inf, exact, 0.0), exact)


def check_same(result: Arrays, expected: Arrays, terms: int) -> None:
    """Checks that results agree up to one rounding error per term, of sums of `terms` terms."""
    assert result.keys() == expected.keys()
    for name, x in expected.items():
        assert error(result[name], x) <= terms * plain.EPS32 * largest(x), name


def share_of_other_roundings(x: np.ndarray, expected: np.ndarray) -> float:
    """The share of entries that differ by more than half an ulp of bfloat16.

    Sums in another order change few roundings; other random bits would change about half of them.
    """
    return float(np.mean(np.abs(x - expected) > 2.0**-9 * np.abs(expected)))
