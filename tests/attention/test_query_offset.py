"""`query_offset`: a sequence in pieces, with a cache of its keys, equals the whole sequence."""

from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention
from lowprec_attn.arithmetic.grid import Grid
from lowprec_attn.attention import UnsupportedError, reference, tiled

pytestmark = pytest.mark.usefixtures("strict_promotion")

B, LENGTH, N, K, H = 2, 29, 4, 2, 8
SMALL = tiled.BlockSizes(query=4, kv_bwd=5)
HOW: dict[str, dict[str, Any]] = {
    "dense": {"implementation": "dense"},
    "tiled": {"implementation": "tiled", "block_sizes": SMALL},
}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (6, 0)},
    "causal window": {"is_causal": True, "local_window_size": 3},
    "wide window": {"local_window_size": (LENGTH + 5, 0)},
}
MASKING = {
    "causal": reference.Masking(is_causal=True),
    "window": reference.Masking(window=(6, 0)),
    "causal window": reference.Masking(is_causal=True, window=(3, 3)),
    "wide window": reference.Masking(is_causal=True),
}
# The tolerance of float32 sums of LENGTH and H terms, whose entries are of order 1.
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (N, K, K)
    return tuple(rng.standard_normal((B, LENGTH, n, H)).astype(np.float32) for n in sizes)


def attend(*args: Any, **options: Any) -> Any:
    return attention.dot_product_attention(*args, numerics="exact", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", HOW)
def test_pieces_beside_a_cache_equal_the_whole(implementation: str, kind: str) -> None:
    """Pieces of any length, the last ones single steps. Unwritten keys of the cache are NaN."""
    q, k, v = arrays()
    whole = reference.attention(q, k, v, masking=MASKING[kind]).o
    options = HOW[implementation] | KINDS[kind]

    @jax.jit
    def piece(q: Any, k: Any, v: Any, start: Any) -> Any:
        lengths = jnp.full((B,), start + q.shape[1])
        return attend(q, k, v, query_offset=start, key_value_seq_lengths=lengths, **options)

    cache = [np.zeros_like(x) for x in (k, v)]
    for start, end in ((0, 5), (5, 13), (13, 26), (26, 27), (27, 28), (28, 29)):
        for filled, x in zip(cache, (k, v), strict=True):
            filled[:, start:end] = x[:, start:end]
        out = piece(q[:, start:end], *cache, np.int32(start))
        np.testing.assert_allclose(out, whole[:, start:end], **TOLERANCE)


@pytest.mark.parametrize("implementation", HOW)
def test_end_aligns_the_last_query_with_the_last_key(implementation: str) -> None:
    q, k, v = arrays()
    options = HOW[implementation] | KINDS["causal"]
    whole = reference.attention(q, k, v, masking=MASKING["causal"]).o
    out = attend(q[:, -7:], k, v, query_offset="end", **options)
    np.testing.assert_allclose(out, whole[:, -7:], **TOLERANCE)
    # The caches are filled to 20 and 11, the queries to 7 and 2.
    filled, queries = np.array([20, 11]), np.array([7, 2])
    starts = filled - queries
    rows = np.stack([q[b, start : start + 7] for b, start in enumerate(starts)])
    out = attend(
        rows,
        k,
        v,
        query_offset="end",
        key_value_seq_lengths=filled,
        query_seq_lengths=queries,
        **options,
    )
    np.testing.assert_allclose(out[0], whole[0, 13:20], **TOLERANCE)
    np.testing.assert_allclose(out[1, :2], whole[1, 9:11], **TOLERANCE)
    np.testing.assert_array_equal(out[1, 2:], 0)


@pytest.mark.parametrize("window", [None, (6, 0), (4, 3)])
@pytest.mark.parametrize("offset", [-9, -3, 0, 2, 7, 16, 40])
def test_a_tile_visits_the_blocks_that_its_rows_see(
    offset: int, window: tuple[int, int] | None
) -> None:
    rows, cols = np.arange(12)[:, None] + offset, np.arange(LENGTH)
    for is_causal in (True, False) if window else (True,):
        grid = Grid(
            rows=12,
            keys=LENGTH,
            block_q=4,
            block_kv=5,
            is_causal=is_causal,
            window=window,
            least_offset=jnp.int32(offset),
            largest_offset=jnp.int32(offset),
        )
        seen = (cols <= rows) if is_causal else np.ones((12, LENGTH), bool)
        if window:
            seen = seen & (cols >= rows - window[0]) & (cols <= rows + window[1])
        for i in range(3):
            of_tile = np.flatnonzero(seen[4 * i : 4 * i + 4].any(0)) // 5
            visited = range(int(grid.kv_begin(i)), int(grid.kv_end(i)))
            if of_tile.size:
                expected = range(0 if window is None else of_tile[0], of_tile[-1] + 1)
                assert visited == expected, (is_causal, i)
            else:
                assert not visited


def test_without_positions_an_offset_changes_nothing_and_the_kernels_stay() -> None:
    q, k, v = (jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16) for _ in range(3))

    def text(**options: Any) -> str:
        call = jax.jit(lambda *x: attention.dot_product_attention(*x, **options))
        return call.trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()

    assert "attention_forward" in text(query_offset=5)
    assert "attention_forward" in text(is_causal=True, query_offset="end")  # as many keys: 0
    assert "attention_forward" not in text(is_causal=True, query_offset=5)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
def test_kernels_refuse_it_by_name(implementation: str) -> None:
    sizes = harness.IMPLEMENTATIONS[implementation].block_sizes
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    options = {"implementation": implementation, "block_sizes": sizes, "is_causal": True}
    with pytest.raises(UnsupportedError, match="query_offset other than 0"):
        attention.dot_product_attention(x, x, x, query_offset=1, **options)


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        ("start", "query_offset must be an integer, one per batch element or 'end', got 'start'"),
        (None, "query_offset must be .* got None"),
        (True, "query_offset must be .* got True"),
        (1.5, r"query_offset must be .* got 1\.5"),
        (np.array([1, 2, 3]), r"query_offset must be .* got int\d+\(3,\) for a batch of 2"),
        (np.array([1.0, 2.0]), r"query_offset must be .* got float32\(2,\)"),
        (2**29 + 1, "query_offset must be from -2.29 to 2.29, got 536870913"),
        (np.array([0, -(2**30)]), "query_offset must be from -2.29 to 2.29, got -1073741824"),
    ],
)
def test_wrong_offsets_are_refused(offset: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        attend(*arrays(), is_causal=True, query_offset=offset)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_offsets_of_any_integer_dtype_are_what_they_say(make: Any, dtype: str) -> None:
    if make is jnp.asarray and dtype == "int64":
        pytest.skip("JAX holds it in 32 bits")
    q, k, v = arrays()
    queries = q[:, 1:4]
    expected = attend(queries, k, v, is_causal=True, query_offset=[1, 25])
    found = attend(queries, k, v, is_causal=True, query_offset=make(np.array([1, 25], dtype)))
    np.testing.assert_array_equal(found, expected)
