"""The compiled Hopper kernels on a device, compared with the general GPU kernels.

export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
pytest -m gpu tests/kernels/test_hopper_device.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import check_rows_without_a_score

from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.hidden import ends_by_position
from lowprec_attn.arithmetic.request import BackwardSums, Extras, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import (
    AUXILIARY_OUTPUT,
    CORRECTED_AFTER_CAST,
    EXACT,
    FLASH,
    FLOAT32_OUTPUT,
    MATCHED,
    MATCHED_FLOAT32_OUTPUT,
    NORMALIZED_DELTA,
    PUBLISHED,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.block_sizes import is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import (
    BackwardTile,
    BlockSizes,
    default_block_sizes,
    keeps_auxiliary,
    rounds_products,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not is_hopper(kind := device_kind()):
        pytest.skip(f"{kind} is no Hopper GPU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A problem in bfloat16, in which repeated keys make ties."""

    batch: int = 2
    rows: int = 1024
    keys: int = 1024
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 64
    value_size: int | None = None  # None: the head size
    is_causal: bool = True
    numerics: Numerics = FLASH
    row_max: RowMax = StandardMax()  # noqa: RUF009 (frozen)
    packed: bool = False
    kv_block: int = 128
    far_below: bool = False  # scores are −512 in all heads but the first
    few_ties: bool = False  # keys repeat for a few rows instead of nearly all
    window: tuple[int, int] | None = None
    has_segments: bool = False  # sorted ids of packed sequences
    has_lengths: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False

    def arrays(self) -> tuple[jax.Array, ...]:
        """q, k, v and dO."""
        rng = np.random.default_rng(0)
        rows, keys = (
            (self.batch, length, heads)
            for length, heads in ((self.rows, self.heads), (self.keys, self.kv_heads))
        )
        q, k, v, do = (
            rng.standard_normal((*shape, size))
            for size, shapes in (
                (self.head_size, (rows, keys)),
                (self.value_size or self.head_size, (keys, rows)),
            )
            for shape in shapes
        )
        groups = self.heads // self.kv_heads
        if self.few_ties:
            # For rows 5, 42, ... the largest scores belong to a key that occurs twice.
            for row in range(5, min(self.rows, self.keys), 37):
                key = row // 2
                k[:, key ^ 1], q[:, row] = k[:, key], 4 * np.repeat(k[:, key], groups, axis=1)
        else:
            k[:, self.keys // 2 :] = k[:, : self.keys - self.keys // 2]
            k[:, 1::2] = k[:, ::2]
        if self.far_below:
            q[:, :, 1:], k[:, :, 1:] = 8, -512 / self.head_size**0.5 / 8
        return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do))

    @property
    def is_plain(self) -> bool:
        """Whether an unordered dQ serves all options of the call."""
        hides = self.window is not None or self.has_segments or self.has_lengths
        other = self.soft_cap is not None or self.has_sinks or self.value_size is not None
        return not hides and not other

    def extras(self) -> Extras:
        """Segment ids, lengths and sinks."""
        rng, found = np.random.default_rng(1), Extras()
        if self.has_segments:
            ids = (np.sort(rng.integers(0, 5, (self.batch, n))) for n in (self.rows, self.keys))
            query, key = (jnp.asarray(x, jnp.int32) for x in ids)
            if self.rows == self.keys:
                key = query
            found = found._replace(query_segments=query, key_segments=key)
        if self.has_lengths:
            lengths = (
                rng.integers(0, n + 1, self.batch).astype(np.int32) for n in (self.rows, self.keys)
            )
            query, key = (jnp.asarray(x) for x in lengths)
            found = found._replace(query_lengths=query, key_lengths=key)
        if self.has_sinks:
            found = found._replace(sinks=jnp.asarray(rng.standard_normal(self.heads), jnp.float32))
        return found

    def spec(self, chosen: Numerics, block_sizes: Any, *, max_logit: bool = False) -> Spec:
        return Spec(
            numerics=chosen,
            row_max=self.row_max,
            scale=self.head_size**-0.5,
            is_causal=self.is_causal,
            window=self.window,
            soft_cap=self.soft_cap,
            block_sizes=block_sizes,
            max_logit=max_logit,
        )

    def forward(self, module: Any, block_sizes: Any = None, *, max_logit: bool) -> list[np.ndarray]:
        """O, lse and, if asked for, the largest score of each row."""
        chosen = self.numerics.replace(kv_block=self.kv_block)
        spec, (*qkv, _) = self.spec(chosen, block_sizes, max_logit=max_logit), self.arrays()
        qkv = [x.astype(jnp.bfloat16) for x in qkv]
        results = jax.jit(lambda *x: module.attention(*x, self.extras(), spec))(*qkv)
        return [np.asarray(x).astype(np.float32) for x in results]

    def run(self, module: Any, *, block_sizes: Any = None, **changes: Any) -> dict[str, np.ndarray]:
        """O, lse, dQ, dK, dV and dsinks of an implementation, as float32.

        The lse of rows that see no key is replaced by 0.
        """
        chosen = changes.get("numerics", self.numerics.replace(kv_block=self.kv_block))
        spec = self.spec(chosen, block_sizes)
        extras = self.extras()
        dtype = changes.get("dtype", jnp.bfloat16)
        q, k, v, do = (x.astype(dtype) for x in self.arrays())

        def attend(sinks: Any, *qkv: jax.Array) -> Any:
            given = extras._replace(sinks=sinks)
            if self.packed:
                return module.packed_attention(jnp.stack(qkv, axis=2), given, spec)
            return module.attention(*qkv, given, spec)

        def step(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
            (out, lse), pullback = jax.vjp(attend, extras.sinks, q, k, v)
            lse = jnp.where(lse == -jnp.inf, jnp.float32(0), lse)
            dsinks, *gradients = pullback((do.astype(out.dtype), jnp.cos(lse)))
            return out, lse, *gradients, dsinks

        results = jax.jit(step)(q, k, v, do)
        names = ("out", "lse", "dq", "dk", "dv", "dsinks")
        return {
            n: np.asarray(x).astype(np.float32)
            for n, x in zip(names, results, strict=True)
            if x is not None
        }


CALLS = {
    "causal": Call(),
    "head 128": Call(head_size=128),
    "grouped heads, an odd number of tiles": Call(rows=640, keys=640, kv_heads=2),
    "half of the last tile": Call(rows=1088, keys=1088),
    "half of the last tile, head 128": Call(rows=1088, keys=1088, head_size=128),
    "half of the last tile, the next head's scores far below 0": Call(
        rows=192, keys=192, far_below=True
    ),
    "not causal": Call(rows=192, keys=320, is_causal=False),
    "more rows": Call(rows=512, keys=192),
    "dynamic_max": Call(row_max=DynamicMax()),
    "float32_output": Call(numerics=FLOAT32_OUTPUT),
    "float32_output, head 128": Call(
        rows=320, keys=320, head_size=128, numerics=FLOAT32_OUTPUT, row_max=DynamicMax()
    ),
    "auxiliary_output": Call(numerics=AUXILIARY_OUTPUT),
    "auxiliary_output, head 128": Call(
        rows=640, head_size=128, numerics=AUXILIARY_OUTPUT, kv_block=64
    ),
    "normalized_delta": Call(numerics=NORMALIZED_DELTA),
    "normalized_delta, head 128": Call(rows=640, head_size=128, numerics=NORMALIZED_DELTA),
    "corrected_after_cast": Call(numerics=CORRECTED_AFTER_CAST),
    "corrected_after_cast, head 128": Call(
        rows=640, head_size=128, kv_heads=2, numerics=CORRECTED_AFTER_CAST
    ),
    "corrected_after_cast, head 256": Call(
        rows=640, head_size=256, kv_block=64, numerics=CORRECTED_AFTER_CAST
    ),
    "corrected_after_cast, many tiles per program": Call(
        batch=16, heads=12, kv_heads=12, numerics=CORRECTED_AFTER_CAST
    ),
    "corrected_after_cast, packed": Call(packed=True, numerics=CORRECTED_AFTER_CAST),
    "normalized_delta, lse": Call(numerics=NORMALIZED_DELTA.replace(statistics="lse")),
    "corrected_after_cast, lse, many tiles per program": Call(
        batch=16, heads=12, kv_heads=12, numerics=CORRECTED_AFTER_CAST.replace(statistics="lse")
    ),
    "matched": Call(numerics=MATCHED),
    "matched, head 128": Call(rows=640, keys=640, head_size=128, kv_heads=2, numerics=MATCHED),
    "matched, head 256": Call(rows=640, head_size=256, kv_block=64, numerics=MATCHED),
    "matched, not causal": Call(rows=192, keys=320, is_causal=False, numerics=MATCHED),
    "matched, half of the last tile": Call(rows=1088, keys=1088, far_below=True, numerics=MATCHED),
    "matched, dynamic_max": Call(numerics=MATCHED, row_max=DynamicMax()),
    "matched, many tiles per program": Call(batch=16, heads=12, kv_heads=12, numerics=MATCHED),
    "matched, packed": Call(packed=True, numerics=MATCHED),
    "matched_float32_output": Call(numerics=MATCHED_FLOAT32_OUTPUT),
    "matched_float32_output, head 128": Call(head_size=128, numerics=MATCHED_FLOAT32_OUTPUT),
    "matched, corrected as well": Call(numerics=MATCHED.replace(delta="after_cast")),
    "published": Call(numerics=PUBLISHED, kv_block=512),
    "published, dynamic_max": Call(numerics=PUBLISHED, kv_block=512, row_max=DynamicMax()),
    "published, grouped heads, an odd number of tiles": Call(
        rows=640, keys=640, kv_heads=2, numerics=PUBLISHED, kv_block=384
    ),
    "published, not causal": Call(
        rows=192, keys=320, is_causal=False, numerics=PUBLISHED, kv_block=256
    ),
    "published, more rows": Call(rows=512, keys=192, numerics=PUBLISHED, kv_block=128),
    "published, packed": Call(numerics=PUBLISHED, kv_block=512, packed=True),
    "published, many tiles per program": Call(
        batch=16, heads=12, kv_heads=12, numerics=PUBLISHED, kv_block=512
    ),
    "window": Call(window=(200, 0)),
    "window, head 128": Call(rows=640, keys=640, kv_heads=2, head_size=128, window=(100, 0)),
    "window, head 256": Call(rows=640, keys=640, head_size=256, kv_block=64, window=(100, 0)),
    "window, not causal": Call(rows=640, keys=448, is_causal=False, window=(70, 30)),
    "window, keys that no row sees": Call(rows=192, keys=640, is_causal=False, window=(70, 30)),
    "window, dynamic_max": Call(window=(200, 0), row_max=DynamicMax()),
    "window, normalized_delta": Call(window=(200, 0), numerics=NORMALIZED_DELTA),
    "window, matched": Call(window=(200, 0), numerics=MATCHED),
    "window, many tiles per program": Call(batch=16, heads=12, kv_heads=12, window=(200, 0)),
    "window, long": Call(batch=1, rows=8192, keys=8192, heads=2, kv_heads=2, window=(1000, 0)),
    "segments": Call(has_segments=True),
    "segments, head 128": Call(rows=640, keys=640, kv_heads=2, head_size=128, has_segments=True),
    "segments, head 256, corrected_after_cast": Call(
        rows=640,
        keys=640,
        head_size=256,
        kv_block=64,
        has_segments=True,
        numerics=CORRECTED_AFTER_CAST,
    ),
    "segments, not causal, more keys": Call(rows=192, keys=640, is_causal=False, has_segments=True),
    "segments, packed": Call(has_segments=True, packed=True),
    "segments, many tiles per program": Call(batch=16, heads=12, kv_heads=12, has_segments=True),
    "lengths": Call(batch=4, has_lengths=True),
    "lengths, not causal, head 128": Call(
        batch=4, rows=320, keys=640, head_size=128, is_causal=False, has_lengths=True
    ),
    "segments, lengths, window, dynamic_max": Call(
        has_segments=True, has_lengths=True, window=(300, 0), row_max=DynamicMax()
    ),
    "segments, matched": Call(has_segments=True, numerics=MATCHED),
    "soft cap": Call(soft_cap=2.0),
    "soft cap of 50, head 128": Call(rows=640, head_size=128, kv_heads=2, soft_cap=50.0),
    "soft cap, window, dynamic_max": Call(soft_cap=3.0, window=(200, 0), row_max=DynamicMax()),
    "soft cap, matched, half of the last tile": Call(
        rows=1088, keys=1088, soft_cap=2.0, numerics=MATCHED
    ),
    "soft cap, many tiles per program": Call(batch=16, heads=12, kv_heads=12, soft_cap=30.0),
    "sinks": Call(has_sinks=True),
    "sinks, head 128": Call(rows=640, head_size=128, kv_heads=2, has_sinks=True),
    "sinks, head 256": Call(rows=640, head_size=256, kv_block=64, has_sinks=True),
    "sinks, matched": Call(has_sinks=True, numerics=MATCHED),
    "sinks, dynamic_max, window, lengths": Call(
        has_sinks=True, window=(200, 0), has_lengths=True, row_max=DynamicMax()
    ),
    "all of them": Call(
        has_segments=True, has_lengths=True, window=(300, 0), soft_cap=5.0, has_sinks=True
    ),
    "packed": Call(packed=True),
    "head 256": Call(head_size=256, kv_block=64),
    "grouped heads, an odd number of tiles, head 256": Call(
        rows=640, keys=640, kv_heads=2, head_size=256, kv_block=64
    ),
    "half of the last tile, head 256": Call(rows=1088, keys=1088, head_size=256, kv_block=64),
    "half of the last tile, the next head's scores far below 0, head 256": Call(
        rows=192, keys=192, head_size=256, kv_block=64, far_below=True
    ),
    "not causal, head 256": Call(rows=192, keys=320, head_size=256, kv_block=64, is_causal=False),
    "more rows, head 256": Call(rows=512, keys=192, head_size=256, kv_block=64),
    "float32_output, head 256": Call(
        rows=320,
        keys=320,
        head_size=256,
        kv_block=64,
        numerics=FLOAT32_OUTPUT,
        row_max=DynamicMax(),
    ),
    "normalized_delta, head 256": Call(
        rows=640, head_size=256, kv_block=64, numerics=NORMALIZED_DELTA
    ),
    "packed, head 256": Call(head_size=256, kv_block=64, packed=True),
    "many tiles per program, head 256": Call(
        batch=16, heads=6, kv_heads=6, head_size=256, kv_block=64
    ),
    "many tiles per program": Call(batch=16, heads=12, kv_heads=12),
    "long": Call(batch=1, rows=8192, keys=8192, heads=2, kv_heads=2),
    "head 192, values of 128": Call(head_size=192, value_size=128),
    "head 192, values of 128, grouped heads, half of the last tile": Call(
        rows=1088, keys=1088, kv_heads=2, head_size=192, value_size=128
    ),
    "head 192, values of 128, not causal, steps of 64": Call(
        rows=192, keys=320, head_size=192, value_size=128, is_causal=False, kv_block=64
    ),
    "head 192, values of 128, normalized_delta": Call(
        rows=640, head_size=192, value_size=128, numerics=NORMALIZED_DELTA
    ),
    "head 192, values of 128, matched_float32_output, segments": Call(
        rows=640,
        keys=640,
        head_size=192,
        value_size=128,
        has_segments=True,
        numerics=MATCHED_FLOAT32_OUTPUT,
    ),
    "head 192, values of 128, sinks, window, lengths": Call(
        head_size=192, value_size=128, has_sinks=True, window=(200, 0), has_lengths=True
    ),
    "head 192, values of 128, many tiles per program": Call(
        batch=16, heads=8, kv_heads=8, head_size=192, value_size=128
    ),
    "head 128, values of 64": Call(head_size=128, value_size=64),
    "head 128, values of 64, grouped heads, half of the last tile": Call(
        rows=1088, keys=1088, kv_heads=2, head_size=128, value_size=64
    ),
    "head 128, values of 64, normalized_delta": Call(
        rows=640, head_size=128, value_size=64, numerics=NORMALIZED_DELTA
    ),
    "head 128, values of 64, matched, lengths": Call(
        batch=4, head_size=128, value_size=64, has_lengths=True, numerics=MATCHED
    ),
    "head 128, values of 64, many tiles per program": Call(
        batch=16, heads=12, kv_heads=12, head_size=128, value_size=64
    ),
}


def sizes_of(call: Call, *, long: bool = False, unordered: bool = False) -> BlockSizes:
    """The table's tiles for the call, those of long calls if `long`, whatever its length."""
    n = call.numerics
    return default_block_sizes(
        call.head_size,
        value_size=call.value_size,
        kv_block=call.kv_block,
        saves_float32=n.saved_dtype == jnp.float32,
        saves_halves=n.saved_output == "halves",
        keeps_auxiliary=keeps_auxiliary(n),
        sums_keys=n.delta in SUMS_ROWS,
        corrects_after_cast=n.delta == "after_cast",
        long=long,
        unordered=unordered,
        rounds_products=rounds_products(n),
        counts_ties=isinstance(call.row_max, DynamicMax),
        has_segments=call.has_segments or call.has_lengths,
        has_sinks=call.has_sinks,
        soft_cap=call.soft_cap is not None,
    )


def changed(sizes: BlockSizes, **tile: Any) -> BlockSizes:
    """A copy with other fields in those tiles that have them."""
    tiles = {}
    for name in ("forward", "query_gradients", "key_gradients"):
        own = getattr(sizes, name)
        fields = {field.name for field in dataclasses.fields(own)}
        changes = {field: value for field, value in tile.items() if field in fields}
        tiles[name] = dataclasses.replace(own, **changes)
    return dataclasses.replace(sizes, **tiles)


BOTH_TABLES = pytest.mark.parametrize("long", [False, True], ids=["short", "long"])


@BOTH_TABLES
@pytest.mark.parametrize("name", CALLS)
def test_as_accurate_as_the_general_kernels(name: str, long: bool) -> None:
    call = CALLS[name]
    exact = call.run(gpu, numerics=EXACT, dtype=jnp.float32)
    result, general = call.run(hopper, block_sizes=sizes_of(call, long=long)), call.run(gpu)
    for what, x in exact.items():
        error, of_general = (np.sqrt(np.mean((y[what] - x) ** 2)) for y in (result, general))
        # The gradient of a sink is one sum over the errors of all rows, whose noise does not
        # average out.
        factor = 1.1 if what == "dsinks" else 1.02
        assert error <= factor * of_general + 1e-6 * np.sqrt(np.mean(x**2)), what
        if what not in ("lse", "dsinks"):  # the same roundings, of almost equal numbers
            assert np.mean(result[what] == general[what]) > 0.98, what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level(Call):
    """A problem with all scores of some rows near −2²⁰, and the unit matrix as dO.

    All keys are in one step. `scale_first` loses more at such scores if the maximum moves from step
    to step, in either statistics.
    """

    batch: int = 1
    rows: int = 64
    keys: int = 64
    is_causal: bool = False
    large: int = 40  # rows; neither all of a tile nor those of whole warps

    def arrays(self) -> tuple[jax.Array, ...]:
        r = np.random.default_rng(3)
        q, k = (np.asarray(x, np.float64) for x in super().arrays()[:2])
        q[..., 2:], k[..., 2:] = (r.integers(-1, 2, x[..., 2:].shape) for x in (q, k))
        q[..., :2], k[..., 0], k[..., 1] = 0, 0, 2**10 * self.head_size**0.5
        q[:, : self.large, :, 1] = -(2**10)
        do = np.broadcast_to(np.eye(self.rows)[None, :, None], q.shape)
        return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, np.ones(k.shape), do))


@pytest.mark.parametrize("chosen", [NORMALIZED_DELTA, CORRECTED_AFTER_CAST, MATCHED], ids=str)
def test_rows_of_p_sum_to_one_at_any_level(chosen: Numerics) -> None:
    """With the unit matrix as dO, a row of dVᵀ sums to a row of P."""
    call = Level()
    assert call.rows == call.head_size
    sums = {
        statistics: call.run(hopper, numerics=chosen.replace(statistics=statistics, kv_block=64))[
            "dv"
        ].sum(axis=(0, 1)).T
        for statistics in (["m_and_l"] if chosen == MATCHED else ["m_and_l", "lse"])
    }  # fmt: skip
    assert np.abs(sums["m_and_l"] - 1).max() <= 2.0**-7  # P and dV are rounded to bfloat16
    if "lse" in sums:
        assert np.abs(sums["lse"][: call.large] - 1).max() > 0.02
        assert np.abs(sums["lse"][call.large :] - 1).max() <= 2.0**-7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden(Call):
    """A problem with one value in all rows that see no key, and in all keys that no row sees."""

    batch: int = 4
    has_lengths: bool = True
    value: float = 0

    def arrays(self) -> tuple[jax.Array, ...]:
        rows, keys = (is_seen[..., None, None] for is_seen in self.seen())
        sides = (rows, keys, keys, rows)
        return tuple(
            jnp.where(seen, x, jnp.asarray(self.value, x.dtype))
            for seen, x in zip(sides, super().arrays(), strict=True)
        )

    def seen(self) -> tuple[np.ndarray, ...]:
        """Which rows see a key, and which keys a row sees: [B, T] and [B, S]."""
        spec, sizes = self.spec(self.numerics, None), (self.rows, self.keys)
        ends = ends_by_position(self.extras(), spec, *sizes)
        return tuple(
            np.arange(size) < np.asarray(end)[:, None]
            for end, size in zip(ends, sizes, strict=True)
        )


HIDDEN = {
    "causal": Hidden(),
    "head 128": Hidden(rows=640, keys=640, kv_heads=2, head_size=128),
    "head 256": Hidden(rows=640, keys=640, head_size=256, kv_block=64),
    "not causal": Hidden(rows=320, keys=640, is_causal=False),
    "packed": Hidden(packed=True),
    "window": Hidden(rows=640, keys=448, is_causal=False, window=(70, 30)),
    "soft cap": Hidden(soft_cap=2.0),
    "sinks": Hidden(has_sinks=True),
    "matched": Hidden(numerics=MATCHED),
    "normalized_delta, head 128": Hidden(head_size=128, numerics=NORMALIZED_DELTA),
    "corrected_after_cast, head 256": Hidden(
        rows=640, head_size=256, kv_block=64, numerics=CORRECTED_AFTER_CAST
    ),
    "head 192, values of 128": Hidden(rows=640, keys=640, head_size=192, value_size=128),
    "head 128, values of 64": Hidden(rows=640, keys=640, head_size=128, value_size=64),
    "many tiles per program": Hidden(batch=16, heads=12, kv_heads=12),
    "long": Hidden(rows=8192, keys=8192, heads=2, kv_heads=2),
}


@BOTH_TABLES
@pytest.mark.parametrize("name", HIDDEN)
def test_what_lengths_hide_counts_as_zeros(name: str, long: bool) -> None:
    clean, sizes = HIDDEN[name], sizes_of(HIDDEN[name], long=long)
    spoiled = dataclasses.replace(clean, value=np.nan)
    expected, result = (x.run(hopper, block_sizes=sizes) for x in (clean, spoiled))
    for what, x in expected.items():
        assert np.isfinite(x).all(), what
        np.testing.assert_array_equal(result[what], x, err_msg=what)
    rows, keys = clean.seen()
    assert not rows.all() and not keys.all()
    for what, is_seen in {"dq": rows, "dk": keys, "dv": keys}.items():
        assert not result[what][~is_seen].any(), what


@BOTH_TABLES
@pytest.mark.parametrize("name", CALLS)
def test_the_largest_scores_are_those_of_float32_and_change_no_bit(name: str, long: bool) -> None:
    call = CALLS[name]
    sizes = sizes_of(call, long=long)
    *results, found = call.forward(hopper, sizes, max_logit=True)
    for x, without in zip(results, call.forward(hopper, sizes, max_logit=False), strict=True):
        np.testing.assert_array_equal(x, without)
    *_, expected = call.forward(tiled, max_logit=True)
    sees = np.isfinite(expected)
    np.testing.assert_array_equal(np.isneginf(found), ~sees)
    # Sums in another order, the rounding of S at `scores`, and an error of 2^-21 of tanh.
    ulp = 2**-23 * np.abs(expected[sees]).max()
    within = 64 * ulp + 2**-20 * (call.soft_cap or 0)
    within += 0 if call.numerics.scores.is_identity else 2**16 * ulp
    np.testing.assert_allclose(found[sees], expected[sees], rtol=0, atol=within)


def _reports(call: Call) -> bool:
    """Whether the kernel of dQ reports row sums."""
    plain = not (call.has_lengths or call.soft_cap or call.packed)
    return plain and call.head_size <= 128 and not rounds_products(call.numerics)


@BOTH_TABLES
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if _reports(call)])
def test_row_sums_are_those_of_dq_and_change_no_bit(name: str, long: bool) -> None:
    call = CALLS[name]
    spec = call.spec(call.numerics.replace(kv_block=call.kv_block), sizes_of(call, long=long))
    q, k, v, do = call.arrays()
    # Where k has a column of ones, dQ is Σ_j dS_ij · scale.
    q, k = q.at[..., -1].set(0), k.at[..., -1].set(1)

    def step(sums: BackwardSums | None) -> Any:
        def attend(sums: BackwardSums | None, *qkv: jax.Array) -> Any:
            given = call.extras()._replace(backward_sums=sums)
            return hopper.attention(*qkv, given, spec)

        (out, lse), pullback = jax.vjp(attend, sums, q, k, v)
        return pullback((do.astype(out.dtype), jnp.cos(jnp.where(lse == -jnp.inf, 0, lse))))

    found, *gradients = jax.jit(step)(BackwardSums.zeros(q))
    _, *without = jax.jit(step)(None)
    for x, y in zip(gradients, without, strict=True):
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (x, y)))
    dq = np.asarray(gradients[0][..., -1], np.float32)
    # dQ is rounded to bfloat16, and its sum has another order.
    np.testing.assert_allclose(
        found.ds, dq, rtol=2.0**-8, atol=2.0**-16 * np.abs(gradients[0]).max()
    )
    sees = np.asarray(found.p) > 0
    if not call.has_sinks:
        rounded = call.numerics.recomputed_probs == "rounded"
        np.testing.assert_allclose(np.asarray(found.p)[sees], 1, rtol=2**-8 if rounded else 1e-4)


@BOTH_TABLES
@pytest.mark.parametrize(
    "name",
    [
        *("causal", "head 128", "head 256"),
        *("many tiles per program", "many tiles per program, head 256"),
        "published, many tiles per program",
        *("matched, many tiles per program", "matched, head 128", "matched, head 256"),
        "corrected_after_cast, many tiles per program",
        *("corrected_after_cast, head 128", "corrected_after_cast, head 256"),
        *("window, many tiles per program", "segments, many tiles per program"),
        *("soft cap, many tiles per program", "all of them", "sinks"),
        "head 192, values of 128, many tiles per program",
        "head 192, values of 128, normalized_delta",
        "head 128, values of 64, many tiles per program",
    ],
)
def test_the_same_bits_on_every_run(name: str, long: bool) -> None:
    call = CALLS[name]
    sizes = sizes_of(call, long=long)
    first = call.run(hopper, block_sizes=sizes)
    for _ in range(3):
        again = call.run(hopper, block_sizes=sizes)
        for what, x in first.items():
            np.testing.assert_array_equal(again[what], x, err_msg=what)


@BOTH_TABLES
@pytest.mark.parametrize(
    "name",
    [
        *("causal", "head 128", "head 256", "half of the last tile", "not causal", "published"),
        *("head 192, values of 128", "head 128, values of 64"),
    ],
)
def test_ping_pong_changes_no_bit(name: str, long: bool) -> None:
    call = CALLS[name]
    sizes = sizes_of(call, long=long)
    result = call.run(hopper, block_sizes=changed(sizes, ping_pong=False, held=False))
    for what, x in call.run(hopper, block_sizes=sizes).items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize("name", CALLS)
def test_both_tables_give_the_same_bits(name: str) -> None:
    call = CALLS[name]
    result, expected = (
        call.run(hopper, block_sizes=sizes_of(call, long=long)) for long in (True, False)
    )
    for what, x in expected.items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize("name", CALLS)
def test_an_earlier_wait_changes_no_bit(name: str) -> None:
    """Also in calls for which no table chooses it."""
    call = CALLS[name]
    sizes = sizes_of(call)
    early = dataclasses.replace(sizes, forward=dataclasses.replace(sizes.forward, early_wait=True))
    result = call.run(hopper, block_sizes=early)
    for what, x in call.run(hopper, block_sizes=sizes).items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize("few", [True, False], ids=["few ties", "ties in every step"])
@pytest.mark.parametrize("name", CALLS)
def test_testing_for_ties_changes_no_bit(name: str, few: bool) -> None:
    """With few ties, a warp has ties in half of its steps and counts only there."""
    call = dataclasses.replace(CALLS[name], row_max=DynamicMax(), few_ties=few)
    sizes = sizes_of(call)
    result, expected = (
        call.run(
            hopper,
            block_sizes=dataclasses.replace(
                sizes, forward=dataclasses.replace(sizes.forward, tests_ties=on)
            ),
        )
        for on in (True, False)
    )
    for what, x in expected.items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize("head_size", hopper.HEAD_SIZES)
@pytest.mark.parametrize("row_max", [StandardMax(), DynamicMax()], ids=str)
@pytest.mark.parametrize("tests_ties", [False, True])
@pytest.mark.parametrize("chosen", [FLASH, MATCHED, CORRECTED_AFTER_CAST], ids=str)
def test_rows_of_minus_infinity_alone_are_empty(
    head_size: int, row_max: RowMax, tests_ties: bool, chosen: Numerics
) -> None:
    call = Call(head_size=head_size, numerics=chosen, row_max=row_max, kv_block=64)
    sizes = sizes_of(call)
    tile = dataclasses.replace(sizes.forward, tests_ties=tests_ties)
    sizes = dataclasses.replace(sizes, forward=tile)
    spec = Spec(numerics=chosen, row_max=row_max, scale=0.125, is_causal=True, block_sizes=sizes)
    check_rows_without_a_score(hopper.attention, spec, head_size)


@pytest.mark.parametrize("row_max", [StandardMax(), DynamicMax()], ids=str)
def test_rows_of_minus_infinity_alone_are_empty_in_long_steps(row_max: RowMax) -> None:
    sizes = default_block_sizes(64, rounds_products=True)
    spec = Spec(numerics=PUBLISHED, row_max=row_max, scale=0.125, is_causal=True, block_sizes=sizes)
    check_rows_without_a_score(hopper.attention, spec, 64)


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "head 128", "head 256", "not causal", "many tiles per program", "published"),
        *("head 192, values of 128", "head 128, values of 64"),
    ],
)
def test_the_order_of_tiles_changes_no_bit(name: str) -> None:
    call = CALLS[name]
    result, expected = (
        call.run(hopper, block_sizes=changed(sizes_of(call), longest_first=on))
        for on in (True, False)
    )
    for what, x in expected.items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if rounds_products(call.numerics)]
)
def test_halved_parts_are_the_same_arithmetic(name: str) -> None:
    """Except for the order of the sum l, whose last bits rarely tip a rounding."""
    call = CALLS[name]
    sizes = sizes_of(call)
    result, expected = (
        call.run(hopper, block_sizes=dataclasses.replace(sizes, forward=forward))
        for forward in (dataclasses.replace(sizes.forward, halved=on) for on in (True, False))
    )
    for what, x in expected.items():
        np.testing.assert_allclose(result[what], x, atol=0.02 * np.abs(x).max(), err_msg=what)
        assert np.mean(result[what] == x) > 0.98 or what == "lse", what


def overlaps(call: Call) -> bool:
    """Whether the last product of a tile may run during the softmax of the next tile."""
    tile, n = sizes_of(call).forward, call.numerics
    alike = tile.owned_stages > 1 and tile.step % tile.owned == 0
    return alike and not rounds_products(n) and n.saved_output != "auxiliary"


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if overlaps(call)])
def test_overlapped_tiles_change_no_bit(name: str) -> None:
    call = CALLS[name]
    sizes = sizes_of(call)

    def run(*, overlap_tiles: bool) -> dict[str, np.ndarray]:
        forward = dataclasses.replace(sizes.forward, overlap_tiles=overlap_tiles)
        return call.run(hopper, block_sizes=dataclasses.replace(sizes, forward=forward))

    result, expected = run(overlap_tiles=True), run(overlap_tiles=False)
    for what, x in expected.items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, call in CALLS.items()
        if call.numerics.delta not in SUMS_ROWS and not rounds_products(call.numerics)
    ],
)
def test_products_of_two_steps_in_one_turn_change_no_bit(name: str) -> None:
    """In both kernels of the backward pass, even if no table chooses it."""
    call = CALLS[name]
    sizes = sizes_of(call)

    def run(*, overlap_steps: bool) -> dict[str, np.ndarray]:
        tiles = {
            kernel: dataclasses.replace(
                getattr(sizes, kernel), overlap_steps=overlap_steps, held=False
            )
            for kernel in ("query_gradients", "key_gradients")
            if not getattr(sizes, kernel).cooperative
        }
        return call.run(hopper, block_sizes=dataclasses.replace(sizes, **tiles))

    result = run(overlap_steps=True)
    for what, x in run(overlap_steps=False).items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


UNORDERED = [
    name
    for name, call in CALLS.items()
    if call.numerics.delta == "do_o"
    and call.numerics.statistics == "lse"
    and not rounds_products(call.numerics)
    and call.head_size < 256
    and call.is_plain
]


def unordered(call: Call, **tile: Any) -> BlockSizes:
    """The tiles of the call, with other fields for the kernel of dK and dV."""
    sizes = sizes_of(call, unordered=True)
    gradients = dataclasses.replace(sizes.key_gradients, **tile)
    return dataclasses.replace(sizes, key_gradients=gradients)


@pytest.mark.parametrize("name", UNORDERED)
def test_dq_without_an_order(name: str) -> None:
    """δ and dQ are summed in another order, which tips a few roundings."""
    call = CALLS[name]
    exact = call.run(gpu, numerics=EXACT, dtype=jnp.float32)
    result, ordered = call.run(hopper, block_sizes=unordered(call)), call.run(hopper)
    for what, x in exact.items():
        if what in ("out", "lse", "dv"):
            np.testing.assert_array_equal(result[what], ordered[what], err_msg=what)
        error, of_ordered = (np.sqrt(np.mean((y[what] - x) ** 2)) for y in (result, ordered))
        assert error <= 1.02 * of_ordered + 1e-6 * np.sqrt(np.mean(x**2)), what
        assert np.mean(result[what] != ordered[what]) < 0.02, what


@pytest.mark.parametrize("name", ["causal", "head 128", "many tiles per program"])
def test_dk_and_dv_beside_an_unordered_dq_have_the_same_bits(name: str) -> None:
    """On every run, with and without ping-pong, in steps of 64 and of 128 queries."""
    call = CALLS[name]
    runs: list[dict[str, Any]] = [{}, {}, {"held": False}, {"held": False, "ping_pong": False}]
    if call.head_size == 64:
        runs += [{"step": 64}, {"step": 64, "owned_stages": 1, "stages": 3}]
    first, *others = (call.run(hopper, block_sizes=unordered(call, **run)) for run in runs)
    for other, run in zip(others, runs[1:], strict=True):
        assert np.mean(first["dq"] != other["dq"]) < 0.02
        for what in ("out", "lse", "dk", "dv"):
            if what in ("out", "lse") or "step" not in run:
                np.testing.assert_array_equal(other[what], first[what], err_msg=f"{what} {run}")
            else:  # more products, each of fewer queries
                assert np.mean(other[what] != first[what]) < 0.02, what


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "head 128", "grouped heads, an odd number of tiles"),
        *("normalized_delta", "normalized_delta, head 128"),
        *("corrected_after_cast", "corrected_after_cast, head 128"),
        *("matched", "matched, corrected as well"),
    ],
)
def test_two_warpgroups_of_64_rows_change_no_bit(name: str) -> None:
    call = CALLS[name]
    whole = BackwardTile(step=64, owned_stages=1)
    shared = dataclasses.replace(whole, cooperative=True)
    of_queries = shared if call.numerics.delta in SUMS_ROWS else whole
    sizes = dataclasses.replace(sizes_of(call), query_gradients=whole, key_gradients=whole)
    halves = dataclasses.replace(sizes, query_gradients=of_queries, key_gradients=shared)
    result = call.run(hopper, block_sizes=halves)
    for what, x in call.run(hopper, block_sizes=sizes).items():
        np.testing.assert_array_equal(result[what], x, err_msg=what)


@BOTH_TABLES
@pytest.mark.parametrize(
    "name",
    [
        *("causal", "head 128", "head 256", "grouped heads, an odd number of tiles", "published"),
        *("matched", "matched, head 128", "corrected_after_cast", "corrected_after_cast, head 128"),
        *("head 192, values of 128", "head 128, values of 64"),
    ],
)
def test_operands_from_registers_give_the_bits_of_those_from_memory(name: str, long: bool) -> None:
    """Assemblers before CUDA 13.3 may corrupt a left operand that is kept in registers."""
    call = CALLS[name]
    sizes = sizes_of(call, long=long)
    shallow = BackwardTile(step=64, stages=1, owned_stages=1)
    gradients = dataclasses.replace(shallow, cooperative=call.head_size > 128)
    sizes = dataclasses.replace(sizes, query_gradients=shallow, key_gradients=gradients)
    # P̄ needs memory as well.
    if fewer := {128: {"owned_stages": 1}, 192: {"stages": 1}}.get(call.head_size):
        forward = dataclasses.replace(sizes.forward, **fewer)
        sizes = dataclasses.replace(sizes, forward=forward)
    registers = call.run(hopper, block_sizes=sizes)
    memory = call.run(hopper, block_sizes=dataclasses.replace(sizes, from_memory=True))
    for what, x in memory.items():
        np.testing.assert_array_equal(registers[what], x, err_msg=what)


@pytest.mark.parametrize("name", ["causal", "head 128", "grouped heads, an odd number of tiles"])
def test_the_same_of_an_unordered_dq(name: str) -> None:
    """Except for dQ itself, whose last bits differ anyway."""
    call = CALLS[name]
    sizes = unordered(call, step=64, stages=2, owned_stages=1)
    sizes = dataclasses.replace(sizes, forward=dataclasses.replace(sizes.forward, owned_stages=1))
    registers = call.run(hopper, block_sizes=sizes)
    memory = call.run(hopper, block_sizes=dataclasses.replace(sizes, from_memory=True))
    for what, x in memory.items():
        if what == "dq":
            assert np.mean(registers[what] != x) < 0.02
        else:
            np.testing.assert_array_equal(registers[what], x, err_msg=what)
