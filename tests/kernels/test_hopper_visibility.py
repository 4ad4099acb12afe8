"""Masks in the interpreted Hopper kernels: which steps of keys and queries they visit."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.product_races import check_products
from harness import Case
from kernel_calls import call_of, check_accuracy, compiled, operands_of, run

from lowprec_attn.arithmetic import hidden
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import dot_product_attention
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
    pytest.mark.skipif(not hopper.is_available(), reason="needs JAX 0.11.2"),
]

SIZES = harness.HOPPER_TILES
# Three warpgroups of 64 rows each, whose steps of 64 keys begin and end one after the other.
TALL = dataclasses.replace(
    SIZES,
    forward=ForwardTile(warpgroups=3, step=64, owned_stages=1),
    query_gradients=BackwardTile(warpgroups=3, step=64, owned_stages=1),
    key_gradients=BackwardTile(warpgroups=3, step=64, owned_stages=1),
)
LARGE = dataclasses.replace(
    SIZES,
    forward=ForwardTile(),
    query_gradients=BackwardTile(),
    key_gradients=BackwardTile(),
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


# The ends of what is seen lie within a block, on its edge and one beyond, before and after all.
ENDS = {
    "causal": dataclasses.replace(
        CASE, batch=4, rows=192, keys=128, heads=2, query_lengths=(65, 64, 0, 192),
        key_lengths=(128, 63, 9, 1),
    ),
    "window": dataclasses.replace(
        FULL, batch=2, rows=192, keys=128, window=(40, 30), query_lengths=(100, 192),
        key_lengths=(77, 128),
    ),
    "steps that only hidden rows see": dataclasses.replace(
        CASE, batch=2, rows=192, keys=192, query_lengths=(30, 10)
    ),
    "values of another head size": dataclasses.replace(
        FULL, batch=2, rows=64, keys=128, head_size=128, value_size=64, query_lengths=(50, 64),
        key_lengths=(77, 128),
    ),
}  # fmt: skip


def ends_of(case: Case) -> dict[str, np.ndarray]:
    """How many rows see a key, or how many keys a row sees, for each array of rows or keys."""
    seen = harness.visible(case, harness.inputs(case))[:, 0]
    rows, keys = (seen.any(axis).sum(1) for axis in (2, 1))
    return dict.fromkeys(("q", "do", "dlse", "dq"), rows) | dict.fromkeys(
        ("k", "v", "dk", "dv"), keys
    )


def with_hidden(case: Case, arrays: dict[str, Any], values: tuple[float, ...]) -> dict[str, Any]:
    """The arrays with these values in rows that see no key, and in keys that no row sees."""
    found = {}
    for name in ("q", "k", "v", "do", "dlse"):
        x = np.array(arrays[name])
        for element, end in zip(x, ends_of(case)[name], strict=True):
            element[end:] = np.resize(np.array(values, x.dtype), element[end:].shape)
        found[name] = jnp.asarray(x)
    return found


@pytest.mark.parametrize(
    ("name", "chosen", "sizes", "soft_cap", "packed"),
    [
        ("causal", FLASH, SIZES, None, False),
        ("window", CORRECTED_AFTER_CAST, cooperative(), None, False),
        ("steps that only hidden rows see", MATCHED, LARGE, 5.0, True),
        ("values of another head size", FLASH, SIZES, None, False),
    ],
)
def test_what_lengths_hide_counts_as_zeros(
    name: str, chosen: Numerics, sizes: BlockSizes, soft_cap: float | None, packed: bool
) -> None:
    """Results have the bits that they have with zeros there. The gradients there are 0."""
    case = dataclasses.replace(ENDS[name], soft_cap=soft_cap)
    of = dataclasses.replace(call(case, chosen, sizes=sizes), packed=packed)
    arrays, extras = operands_of(case)
    clean = with_hidden(case, arrays, (0.0,))
    # The caller drops the gradient of lse, which is no operand of a product.
    spoiled = with_hidden(case, arrays, harness.GARBAGE) | {"dlse": clean["dlse"]}
    # The first element also has NaN in what is seen. Hidden gradients are 0 even then.
    for x in ("q", "v", "do"):
        spoiled[x] = spoiled[x].at[0, 5].set(jnp.nan)
    expected, result = (compiled(of)(x, extras) for x in (clean, spoiled))
    for x, y in expected.items():
        np.testing.assert_array_equal(bits(result[x])[1:], bits(y)[1:], err_msg=x)
    for x in ("dq", "dk", "dv"):
        assert np.isnan(result[x][0]).any()
        for element, end in zip(bits(result[x]), ends_of(case)[x], strict=True):
            np.testing.assert_array_equal(element[end:], 0, err_msg=x)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_alone_copy_no_array(packed: bool) -> None:
    case = dataclasses.replace(ENDS["causal"], rows=256, keys=256, kv_heads=2)
    arrays, extras = operands_of(case)
    qkv = dataclasses.replace(call(case), packed=packed).qkv(arrays)
    options: dict[str, Any] = {
        "query_seq_lengths": extras.query_lengths,
        "key_value_seq_lengths": extras.key_lengths,
        "numerics": FLASH,
        "implementation": "hopper",
        "block_sizes": SIZES,
    }

    def largest_choice(**more: Any) -> int:
        """The size of the largest array that is chosen from two, outside of the kernels."""

        def both(do: Any, *qkv: Any) -> Any:
            attend = functools.partial(dot_product_attention, **options, **more)
            out, pullback = jax.vjp(attend, *qkv)
            return out, pullback(do)

        do = arrays["do"].astype(jnp.bfloat16)
        return max(sizes_of_choices(jax.make_jaxpr(both)(do, *qkv).jaxpr))

    assert largest_choice() == arrays["q"].size // 2  # a block of 128 of the 256 rows
    ids = jnp.zeros((case.batch, case.rows), jnp.int32)
    assert largest_choice(query_segment_ids=ids) == qkv[0].size


def sizes_of_choices(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "select_n":
            yield equation.outvars[0].aval.size
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes_of_choices(inner)


def test_what_positions_hide_comes_last() -> None:
    """What `ends_by_position` finds is what a search of all pairs finds."""
    q, k = jnp.zeros((6, 5, 1, 16)), jnp.zeros((6, 7, 1, 16))
    lengths = {
        "query_lengths": jnp.array([0, 1, 2, 5, 3, 4], jnp.int32),
        "key_lengths": jnp.array([7, 1, 4, 0, 2, 6], jnp.int32),
    }
    everywhere = jnp.ones((6, 1, 5, 7), bool)
    for is_causal, window, names in itertools.product(
        (False, True),
        (None, (0, 0), (2, 0), (0, 3), (1, 1)),
        ((), *itertools.combinations(lengths, 1), tuple(lengths)),
    ):
        extras = Extras(**{name: lengths[name] for name in names})
        spec = dataclasses.replace(call(CASE).spec, is_causal=is_causal, window=window)
        ends = hidden.ends_by_position(extras, spec, 5, 7)
        pairs = hidden.seen_by_any(
            extras._replace(mask=everywhere), spec, q, k, ends_at_lengths=False
        )
        assert pairs is not None
        for end, seen, size in zip(ends, (pairs.rows, pairs.keys), (5, 7), strict=True):
            found = np.arange(size) < np.broadcast_to(end, 6)[:, None]
            np.testing.assert_array_equal(found, np.broadcast_to(seen[..., 0], found.shape))


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
