"""NaN and infinities in what a row does not see never reach its results; what it sees does."""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import hidden
from lowprec_attn.attention import entry
from lowprec_attn.numerics import Numerics

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# Grouped heads and several tiles, with each way to hide rows and keys from everything.
BASE = harness.Case(rows=20, keys=22, heads=4, kv_heads=2)
CASES = {
    "lengths": dataclasses.replace(BASE, query_lengths=(20, 7), key_lengths=(13, 22)),
    "mask rows": dataclasses.replace(BASE, mask="empty"),
    "mask of heads": dataclasses.replace(BASE, mask="random"),
    "segments": dataclasses.replace(BASE, segments=True, key_lengths=(22, 17)),
    "causal": dataclasses.replace(BASE, is_causal=True),
    "window": dataclasses.replace(BASE, rows=30, window=(4, 1)),
    "offset": dataclasses.replace(BASE, is_causal=True, query_offset=(-3, 1)),
}
# A mask that hides keys beyond the diagonal, keys of one key head, and rows.
MASKS = {"masks": dataclasses.replace(BASE, rows=16, is_causal=True, mask="random")}
PLAIN = ("dense", "tiled_odd")


# Every path from v, k, q and dO to a result.
CHOICES: dict[str, Numerics] = {
    "exact": numerics.EXACT,
    "flash": numerics.FLASH,
    "dp_p": numerics.DELTA_DP_P,
    "normalized": numerics.NORMALIZED_DELTA,
    "published": numerics.PUBLISHED,
}


# In exact arithmetic, `test_attention.py` tries garbage in every case of the table.
@pytest.mark.parametrize(
    ("implementation", "case", "choice"),
    [
        *((name, "masks", "flash") for name in (*PLAIN, *harness.KERNELS)),
        *((name, "lengths", "normalized") for name in (*PLAIN, *harness.KERNELS)),
        *((name, "lengths", "dp_p") for name in PLAIN),
    ],
)
def test_what_nothing_sees_changes_no_result(implementation: str, case: str, choice: str) -> None:
    how, problem = harness.IMPLEMENTATIONS[implementation], (CASES | MASKS)[case]
    arrays, chosen = harness.inputs(problem), CHOICES[choice]
    if case == "masks":
        arrays["mask"][:, :2, :, 9] = False  # hidden from all rows of key head 0
        arrays["mask"][:, 0, :, 12] = False  # hidden from one of its query heads only
        arrays["mask"][:, 1, :, 3] = False
        arrays["mask"][:, :, [5, 15]] = False  # hides all keys from these rows
    expected = harness.run(how, problem, arrays, chosen)
    assert harness.check_hidden(how, problem, arrays, expected, chosen)
    if implementation in harness.KERNELS:  # no visible key was taken for hidden either
        dense = harness.run(harness.IMPLEMENTATIONS["dense"], problem, arrays, chosen)
        for name, x in dense.items():  # with other steps, some roundings of order 1 differ
            np.testing.assert_allclose(expected[name], x, rtol=0, atol=0.05, err_msg=name)


# In tiles: every way to hide and every path to a result. `dense` masks the same S in one step.
EACH_WAY = ("lengths", "mask rows", "mask of heads", "segments", "causal", "window", "offset")
WAYS = [
    *(("tiled_odd", case, "exact") for case in EACH_WAY),
    *(("tiled_odd", "causal", choice) for choice in ("dp_p", "normalized", "published")),
    *(("dense", case, "exact") for case in ("mask of heads", "offset")),
    *(("dense", "causal", choice) for choice in ("dp_p", "normalized")),
]


def changed_by(
    how: harness.Implementation, problem: harness.Case, chosen: Numerics, name: str, at: Any
) -> tuple[harness.Arrays, harness.Arrays]:
    """The results with each kind of garbage at one place of an array, and the results without."""
    arrays = harness.inputs(problem)
    spoiled = arrays | {name: arrays[name].copy()}
    spoiled[name][at] = np.resize(harness.GARBAGE, spoiled[name][at].shape)
    return tuple(harness.run(how, problem, x, chosen) for x in (spoiled, arrays))


@pytest.mark.parametrize(("implementation", "case", "choice"), WAYS)
def test_a_key_reaches_the_rows_that_see_it_and_no_other(
    implementation: str, case: str, choice: str
) -> None:
    """Garbage in v of one key, then in its k; a row that sees the key must not be finite."""
    how, problem = harness.IMPLEMENTATIONS[implementation], CASES[case]
    seen, key = harness.visible(problem, harness.inputs(problem)), 9
    group = problem.heads // problem.kv_heads
    sees = seen[:, :group, :, key].swapaxes(1, 2)  # by row and query head of key head 0
    for name in ("v", "k"):
        result, expected = changed_by(how, problem, CHOICES[choice], name, np.s_[:, key, 0])
        others = ~sees
        for of_rows in ("out", "dq"):
            x, y = result[of_rows][:, :, :group], expected[of_rows][:, :, :group]
            np.testing.assert_array_equal(x[others], y[others], err_msg=of_rows)
            assert not np.isfinite(x[sees]).all(-1).any(), of_rows
        np.testing.assert_array_equal(result["out"][:, :, group:], expected["out"][:, :, group:])
        # Keys that no affected row sees keep their gradients.
        met = (seen[:, :group] & sees.swapaxes(1, 2)[..., None]).any((1, 2))
        for of_keys in ("dk", "dv"):
            x, y = result[of_keys][:, :, 0], expected[of_keys][:, :, 0]
            np.testing.assert_array_equal(x[~met], y[~met], err_msg=of_keys)


@pytest.mark.parametrize(("implementation", "case", "choice"), WAYS)
def test_a_row_reaches_the_keys_that_it_sees_and_no_other(
    implementation: str, case: str, choice: str
) -> None:
    """Garbage in dO of one row, then in its q."""
    how, problem = harness.IMPLEMENTATIONS[implementation], CASES[case]
    row, group = 6, problem.heads // problem.kv_heads
    seen = harness.visible(problem, harness.inputs(problem))[:, 0, row]  # for query head 0
    for name in ("do", "q"):
        result, expected = changed_by(how, problem, CHOICES[choice], name, np.s_[:, row, 0])
        for of_keys in ("dk", "dv"):
            x, y = result[of_keys][:, :, 0], expected[of_keys][:, :, 0]
            np.testing.assert_array_equal(x[~seen], y[~seen], err_msg=of_keys)
            assert not np.isfinite(x[seen]).all(-1).any(), of_keys
        for of_rows in ("out", "dq"):
            x, y = (r[of_rows].copy() for r in (result, expected))
            x[:, row, 0] = y[:, row, 0] = 0
            np.testing.assert_array_equal(x, y, err_msg=of_rows)
        np.testing.assert_array_equal(result["dk"][:, :, 1:], expected["dk"][:, :, 1:])
    assert group > 1


@pytest.mark.parametrize("implementation", PLAIN)
def test_values_that_are_seen_arrive_as_they_are(implementation: str) -> None:
    """An infinity in a feature of v is the same in O. Two with opposite signs, or NaN, give NaN."""
    how, problem = harness.IMPLEMENTATIONS[implementation], CASES["causal"]
    arrays = harness.inputs(problem)
    arrays["v"][:, 3, :, :5] = (np.inf, -np.inf, np.nan, np.inf, -np.inf)
    arrays["v"][:, 8, :, 3] = -np.inf
    out = harness.run(how, problem, arrays, numerics.EXACT)["out"]
    assert np.isfinite(out[:, :3]).all()
    assert np.isfinite(out[..., 5:]).all()
    np.testing.assert_array_equal(
        out[:, 3:8, :, :5], np.broadcast_to(arrays["v"][:, 3:4, :1, :5], out[:, 3:8, :, :5].shape)
    )
    assert np.isnan(out[:, 8:, :, 2:4]).all()


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [("dense", "standard"), ("tiled", "lazy_max"), ("gpu", "lazy_max"), ("tpu", "lazy_max")],
)
def test_a_row_of_nan_has_an_lse_of_nan(implementation: str, rule: str) -> None:
    """On a CPU XLA's maximum of so long a row is not NaN."""
    q = np.ones((1, 130, 1, 16), np.float32)
    q[0, 3] = np.nan
    _, lse = attention.dot_product_attention(
        *(q, q[:, 4:], q[:, 4:]),
        numerics="exact",
        row_max=rule,
        implementation=implementation,
        block_sizes=harness.IMPLEMENTATIONS[implementation].block_sizes,
        return_residual=True,
    )
    np.testing.assert_array_equal(np.isnan(lse[0, :, 0]), np.arange(130) == 3)


@pytest.mark.parametrize("implementation", PLAIN)
def test_under_vmap(implementation: str) -> None:
    how, problem = harness.IMPLEMENTATIONS[implementation], CASES["causal"]
    arrays = harness.inputs(problem)
    arrays["v"][0, 9] = np.nan

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return attention.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            numerics=how.numerics(numerics.EXACT),
            implementation=how.name,
            block_sizes=how.block_sizes,
        )

    q, k, v = (jnp.asarray(arrays[name]) for name in ("q", "k", "v"))
    out = jax.vmap(attend)(q, k, v)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(attend(q, k, v)))
    assert np.isnan(out[0, 9:]).all()
    assert np.isfinite(out[0, :9]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize(
    ("implementation", "delta"),
    [("dense", "normalized"), ("tiled", "after_cast"), ("gpu", "normalized")],
)
def test_nan_in_the_gradient_of_lse_of_an_element_without_keys(
    implementation: str, delta: Any
) -> None:
    sizes = harness.IMPLEMENTATIONS[implementation].block_sizes
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, 2, 16)) for i in range(3))

    def both(q: Any) -> Any:
        return attention.dot_product_attention(
            q,
            k,
            v,
            key_value_seq_lengths=jnp.array([0, 16]),
            numerics=numerics.FLASH.replace(delta=delta),
            implementation=implementation,
            block_sizes=sizes,
            return_residual=True,
        )

    (o, lse), pullback = jax.vjp(both, q)
    (dq,) = pullback((jnp.ones_like(o), jnp.ones_like(lse).at[0].set(jnp.nan)))
    assert not np.any(dq[0])
    assert np.all(np.isfinite(dq[1]))
    assert np.any(dq[1])


HIDING: dict[str, dict[str, Any]] = {
    "a mask": {"mask": jnp.ones((1, 1, 16, 16), bool)},
    "lengths": {"key_value_seq_lengths": jnp.array([16, 9])},
    "segments": {
        "query_segment_ids": jnp.zeros((2, 16), jnp.int32),
        "key_value_segment_ids": jnp.zeros((2, 16), jnp.int32),
    },
    "a local window": {"local_window_size": 3},
    "causality of unequal lengths": {"is_causal": True},
}


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("implementation", ["dense", "tiled", "gpu"])
def test_a_mean_of_keys_that_may_be_hidden_is_refused(implementation: str, hiding: str) -> None:
    sizes = harness.IMPLEMENTATIONS[implementation].block_sizes
    rows = 8 if hiding.startswith("causality") else 16
    q, k = jnp.ones((2, rows, 2, 16)), jnp.ones((2, 16, 2, 16))
    with pytest.raises(attention.UnsupportedError, match=f"mean_key=subtracted with {hiding}"):
        attention.dot_product_attention(
            q,
            k,
            k,
            numerics=numerics.FLASH.replace(mean_key="subtracted"),
            implementation=implementation,
            block_sizes=sizes,
            **HIDING[hiding],
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (0, 2)])
def test_with_shared_segments_nothing_is_hidden(
    is_causal: bool, window: tuple[int, int] | None
) -> None:
    """No array is then copied to put zeros where nothing sees it."""
    x = jnp.zeros((2, 24, 2, 16))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 24)), jnp.int32)
    shared: dict[str, Any] = {"is_causal": is_causal, "local_window_size": window}

    def seen(**given: Any) -> hidden.Seen | None:
        options = entry.Options(numerics=numerics.EXACT, **shared, **given)
        call, _ = entry.prepare((x, x, x, None, None), options)
        spec = call.parts[0].spec
        return hidden.seen_by_any(call.extras, spec, x, x, ends_at_lengths=False)

    apart = seen(query_segment_ids=ids, key_value_segment_ids=ids + 0)
    assert apart is not None and apart.rows.all() and apart.keys.all()
    assert seen(query_segment_ids=ids) is None
    assert seen(query_segment_ids=ids, key_value_segment_ids=ids) is None
    others = seen(query_segment_ids=ids, key_value_segment_ids=ids + 3)
    assert others is not None and not others.rows.all()
    ended = seen(query_segment_ids=ids, key_value_seq_lengths=jnp.array([24, 9]))
    assert ended is not None and not ended.keys.all()
