"""Masks in the interpreted Hopper kernels: which steps of keys and queries they visit."""

import dataclasses
import itertools
from typing import Any

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.product_races import check_products
from harness import Case
from kernel_calls import call_of, check_accuracy, compiled, operands_of, run

from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import (
    CORRECTED_AFTER_CAST,
    FLASH,
    MATCHED,
    NORMALIZED_DELTA,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import (
    ROWS,
    BackwardTile,
    BlockSizes,
    ForwardTile,
)

pytestmark = [
    pytest.mark.usefixtures("no_races", "products_are_checked"),
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11"),
]

SIZES = harness.HOPPER_TILES
# Three warpgroups of 64 rows each, whose steps of 64 keys begin and end one after the other.
TALL = dataclasses.replace(
    SIZES,
    forward=ForwardTile(warpgroups=3, step=64, owned_stages=1),
    query_gradients=BackwardTile(warpgroups=3, step=64, owned_stages=1),
    key_gradients=BackwardTile(warpgroups=3, step=64, owned_stages=1),
)
# One head with two and a half query tiles.
CASE = Case(
    batch=1, rows=320, keys=320, heads=1, kv_heads=1, head_size=64, dtype="bfloat16", is_causal=True
)
BATCH = jnp.int32(0)
FULL = dataclasses.replace(CASE, is_causal=False)


@pytest.fixture
def products_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_products(monkeypatch)


def call(
    case: Case, chosen: Numerics = FLASH, rule: RowMax | None = None, sizes: BlockSizes = SIZES
) -> Any:
    step = sizes.forward.step
    return call_of(case, chosen, rule or StandardMax(), sizes, kv_block=step, implementation=hopper)


def cooperative(sizes: BlockSizes = SIZES) -> BlockSizes:
    """Tiles for which two warpgroups share 64 rows in both backward kernels."""
    tile = BackwardTile(step=64, owned_stages=1, cooperative=True)
    return dataclasses.replace(sizes, query_gradients=tile, key_gradients=tile)


WINDOWS = {
    "causal": dataclasses.replace(CASE, window=(70, 0)),
    "both sides": dataclasses.replace(FULL, window=(40, 90)),
    "rows that see none": dataclasses.replace(FULL, keys=128, window=(40, 30)),
    "keys that none sees": dataclasses.replace(FULL, rows=64, keys=320, window=(40, 30)),
    "ties": dataclasses.replace(
        CASE, rows=192, keys=192, window=(100, 0), values="repeated_maxima"
    ),
    "a scale that makes MASKED infinite": dataclasses.replace(
        CASE, rows=192, keys=192, window=(0, 0), scale=4.0
    ),
}


@pytest.mark.parametrize(
    ("name", "chosen", "rule", "sizes"),
    [
        *((name, FLASH, StandardMax(), SIZES) for name in WINDOWS),
        ("both sides", FLASH, StandardMax(), TALL),
        ("causal", CORRECTED_AFTER_CAST, StandardMax(), TALL),
        ("ties", MATCHED, DynamicMax(), SIZES),
        ("both sides", NORMALIZED_DELTA, StandardMax(), cooperative()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_windows(name: str, chosen: Numerics, rule: RowMax, sizes: BlockSizes) -> None:
    check_accuracy(WINDOWS[name], call(WINDOWS[name], chosen, rule, sizes))


HIDDEN = {
    "segments": dataclasses.replace(CASE, batch=2, rows=192, keys=192, segments=True),
    "not causal, lengths": dataclasses.replace(
        FULL, keys=256, segments=True, query_lengths=(300,), key_lengths=(170,)
    ),
    "lengths": dataclasses.replace(
        CASE, batch=2, rows=192, keys=192, query_lengths=(150, 0), key_lengths=(70, 192)
    ),
    "no key at all": dataclasses.replace(FULL, rows=128, keys=64, key_lengths=(0,)),
    "window": dataclasses.replace(CASE, segments=True, window=(50, 0), values="repeated_maxima"),
    "head 128": dataclasses.replace(CASE, rows=192, keys=192, head_size=128, segments=True),
}


@pytest.mark.parametrize(
    ("name", "chosen", "rule", "sizes"),
    [
        *((name, FLASH, StandardMax(), SIZES) for name in list(HIDDEN)[:-2]),
        ("not causal, lengths", MATCHED, StandardMax(), TALL),
        ("window", FLASH, DynamicMax(), TALL),
        ("head 128", NORMALIZED_DELTA, StandardMax(), cooperative()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_segments_and_lengths(name: str, chosen: Numerics, rule: RowMax, sizes: BlockSizes) -> None:
    check_accuracy(HIDDEN[name], call(HIDDEN[name], chosen, rule, sizes))


def test_packed_arrays_with_segments_give_the_same_bits() -> None:
    case = dataclasses.replace(CASE, rows=128, keys=128, segments=True)
    result, expected = (run(case, dataclasses.replace(call(case), packed=p)) for p in (True, False))
    for name, x in expected.items():
        np.testing.assert_array_equal(result[name], x)


def test_tiles_of_other_segments_are_not_read() -> None:
    """They hold NaN, which reaches no sum; nor is a mask of ids applied within one segment."""
    case = dataclasses.replace(FULL, rows=384, keys=384, segments=True)
    of = call(case)
    arrays, extras = operands_of(case)
    ids = jnp.arange(384, dtype=jnp.int32)[None] // 128
    extras = extras._replace(query_segments=ids, key_segments=ids)
    clean = harness.as_float32(compiled(of)(arrays, extras))
    poisoned = {
        name: x.at[:, 128:256].set(jnp.nan) if x.shape[1] == 384 else x
        for name, x in arrays.items()
        if name in ("q", "k", "v", "do", "dlse")
    }
    result = harness.as_float32(compiled(of)(poisoned, extras))
    for name, x in clean.items():
        assert np.isnan(result[name][:, 128:256]).all()
        for others in (slice(0, 128), slice(256, None)):
            np.testing.assert_array_equal(result[name][:, others], x[:, others])


@pytest.mark.parametrize("is_causal", [True, False])
def test_tiles_beyond_a_window_are_not_read(is_causal: bool) -> None:
    """They hold NaN, which reaches no sum."""
    case = dataclasses.replace(CASE, rows=448, keys=448, is_causal=is_causal, window=(10, 10))
    of = call(case)
    arrays, extras = operands_of(case)
    clean = run(case, of)
    # dK reads δ of rows that also see other keys, so the NaN must be two windows away, plus their
    # tiles.
    for ends, others in ((slice(0, 64), slice(-128, None)), (slice(-64, None), slice(0, 128))):
        poisoned = dict(arrays)
        for name in ("q", "k", "v", "do"):
            poisoned[name] = arrays[name].at[:, ends].set(jnp.nan)
        result = harness.as_float32(compiled(of)(poisoned, extras))
        for name, x in clean.items():
            np.testing.assert_array_equal(result[name][:, others], x[:, others])
            assert np.isnan(result[name][:, ends]).any()


def seen_in_window(rows: int, keys: int, spec: Spec) -> np.ndarray:
    """Which row sees which key, [rows, keys]."""
    row, key = np.arange(rows)[:, None], np.arange(keys)
    assert spec.window is not None
    left, right = spec.window
    return (key >= row - left) & (key <= (row if spec.is_causal else row + right))


@pytest.mark.parametrize("order", ["sorted", "shuffled", "few", "extreme"])
@pytest.mark.parametrize("lengths", [False, True])
def test_steps_of_segments(order: str, lengths: bool) -> None:
    """Every step that some row of a tile sees is visited; if ids are sorted, no other step is."""
    from pallas_kernels.gpu.hopper.segments import Segments

    rng = np.random.default_rng(0)
    rows, keys, batch = 512, 640, 6
    ids = [np.sort(rng.integers(0, 5, (batch, size))) for size in (rows, keys)]
    if order == "shuffled":
        ids = [rng.permuted(x, axis=1) for x in ids]
    elif order == "few":  # most rows see no key
        ids[1] = ids[1] + 4
    elif order == "extreme":
        largest = np.iinfo(np.int32).max
        ids = [np.array([-largest - 1, -1, 0, 1, largest])[x] for x in ids]
    seen = ids[0][:, :, None] == ids[1][:, None]
    extras = Extras(
        query_segments=jnp.asarray(ids[0], jnp.int32), key_segments=jnp.asarray(ids[1], jnp.int32)
    )
    if lengths:
        of_rows, of_keys = ([size, 0, size - 1, 129, 64, 200] for size in (rows, keys))
        extras = extras._replace(query_lengths=jnp.array(of_rows), key_lengths=jnp.array(of_keys))
        for x, row, key in zip(seen, of_rows, of_keys, strict=True):
            x[row:] = x[:, key:] = False
    segments = Segments.of(extras, rows, keys)
    assert segments is not None
    found = np.asarray(segments.rows)[:, :rows, None] == np.asarray(segments.keys)[:, None, :keys]
    np.testing.assert_array_equal(found, seen)
    for tile in (ForwardTile(), ForwardTile(warpgroups=3, step=64)):
        by_query = segments.by_query(tile, -(-rows // tile.owned)).bounds
        by_key = segments.by_key(tile, -(-keys // tile.owned)).bounds
        tight = order in ("sorted", "extreme") and not lengths
        for i in range(batch):
            check_bounds(np.asarray(by_query)[:, i], seen[i], tile, tight=tight)
            check_bounds(np.asarray(by_key)[:, i], seen[i].T, tile, tight=tight)


def check_bounds(bounds: np.ndarray, seen: np.ndarray, tile: ForwardTile, *, tight: bool) -> None:
    steps = by_blocks(seen, 1, tile.step)
    visited = by_blocks(steps.any(axis=2), 0, tile.owned).any(axis=1)
    for i in range(-(-len(seen) // ROWS)):
        begin, end, clear, full = bounds[:, i]
        needed = np.flatnonzero(visited[i * ROWS // tile.owned])
        assert not needed.size or (begin <= needed[0] and needed[-1] < end)
        if tight:
            assert end - begin <= (needed[-1] + 1 - needed[0] if needed.size else 0)
        of_block = seen[i * ROWS : (i + 1) * ROWS]
        for t in range(clear, full):
            assert of_block[:, t * tile.step : (t + 1) * tile.step].all()
        if tight:  # every step in the range except the last, which the end of the arrays may cut
            whole = [
                t
                for t in range(begin, end)
                if of_block[:, t * tile.step : (t + 1) * tile.step].all()
            ]
            assert not whole or (clear <= whole[0] and whole[-1] < full)


def by_blocks(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Splits an axis of x [rows, keys] into blocks of `size`, the last one padded with False."""
    missing = -x.shape[axis] % size
    widths = [(0, missing if i == axis else 0) for i in range(2)]
    shape = list(x.shape)
    shape[axis : axis + 1] = [-1, size]
    return np.pad(x, widths).reshape(shape)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("step", [64, 128])
def test_steps_of_a_window(is_causal: bool, warpgroups: int, step: int) -> None:
    """Visits steps that some row of a tile sees and no others, with masks unless all rows see."""
    forward, backward = (of(warpgroups=warpgroups, step=step) for of in (ForwardTile, BackwardTile))
    sizes = dataclasses.replace(SIZES, forward=forward)
    for (rows, keys), left, right in itertools.product(
        ((64, 320), (320, 64), (448, 448)), (0, 63, 130, 2000), (0, 65, 2000)
    ):
        case = dataclasses.replace(
            CASE, rows=rows, keys=keys, window=(left, right), is_causal=is_causal
        )
        spec = call(case, sizes=sizes).spec
        problem = problem_of(rows, keys, spec)
        # The last tile contains rows, or keys, that do not exist but count like the others.
        whole = (-(-length // forward.owned) * forward.owned for length in (rows, keys))
        check_key_steps(problem, seen_in_window(next(whole), keys, spec), forward)
        check_query_steps(problem, seen_in_window(rows, next(whole), spec), backward)


def problem_of(rows: int, keys: int, spec: Spec) -> Any:
    from pallas_kernels.gpu.hopper.problem import Problem

    q, k = (jnp.zeros((1, length, 1, 64), jnp.bfloat16) for length in (rows, keys))
    return Problem.of(q, k, spec, spec.block_sizes)


def check_key_steps(problem: Any, seen: np.ndarray, tile: ForwardTile) -> None:
    start = jnp.arange(0, problem.rows, tile.owned, dtype=jnp.int32)
    begin, length = problem.program_steps(start, BATCH, tile, None)
    begin, end = np.asarray(begin), np.asarray(begin + length)
    by_step = by_blocks(seen, 1, tile.step)
    by_tile = by_blocks(by_step.any(axis=2), 0, tile.owned).any(axis=1)
    assert (begin < end).all()
    for visited, first, last in zip(by_tile, begin, end, strict=True):
        steps = np.flatnonzero(visited)
        if steps.size:
            assert (first, last) == (steps[0], steps[-1] + 1)
    row = jnp.arange(0, len(seen), ROWS, dtype=jnp.int32)
    own = np.asarray(row) // tile.owned
    program = jnp.asarray(begin[own]), jnp.asarray(length)[own]
    keys = problem.consumer_steps(row, BATCH, tile, None, program)
    for t in range(int(length.max())):
        step, visits = np.asarray(keys.of(jnp.int32(t))), t < np.asarray(keys.end)
        mask = np.asarray(keys.takes_mask(jnp.int32(t)))
        for i in np.flatnonzero(visits):
            part = seen[i * ROWS : (i + 1) * ROWS, step[i] * tile.step : (step[i] + 1) * tile.step]
            # A step that ends beyond the keys is masked, too.
            assert mask[i] == (not part.all() or part.shape[1] < tile.step)
    seen_by = by_blocks(by_step.any(axis=2), 0, ROWS).any(axis=1)
    for i, visited in enumerate(seen_by):
        steps = np.flatnonzero(visited)
        assert not steps.size or steps[-1] < begin[own[i]] + np.asarray(keys.end)[i]


def check_query_steps(problem: Any, seen: np.ndarray, tile: BackwardTile) -> None:
    first = jnp.arange(0, problem.keys, tile.owned, dtype=jnp.int32)
    begin, end = (np.asarray(x) for x in problem.query_steps(first, BATCH, tile, None))
    by_step = by_blocks(seen, 0, tile.step).any(axis=1)
    by_tile = by_blocks(by_step, 1, tile.owned).any(axis=2).T
    for visited, i, j in zip(by_tile, begin, end, strict=True):
        steps = np.flatnonzero(visited)
        assert (i, j) == (steps[0], steps[-1] + 1) if steps.size else i <= j
    key = jnp.arange(0, seen.shape[1], ROWS, dtype=jnp.int32)[:, None]
    row = jnp.arange(0, problem.rows, tile.step, dtype=jnp.int32)[None]
    hides = np.asarray(problem.hides_from_queries(key, row, tile.step))
    for i, j in np.ndindex(hides.shape):
        part = seen[j * tile.step : (j + 1) * tile.step, i * ROWS : (i + 1) * ROWS]
        visited = begin[i * ROWS // tile.owned] <= j < end[i * ROWS // tile.owned]
        if visited and part.shape[0] == tile.step:  # beyond the last row there is nothing to hide
            assert hides[i, j] == (not part.all())
