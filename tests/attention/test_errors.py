"""Bad calls of attention raise an exception whose text names the bad value."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import numerics
from lowprec_attn.arithmetic.heads import HeadGroup, group_heads
from lowprec_attn.attention import (
    UnsupportedError,
    attention_fn,
    dot_product_attention,
    entry,
    sharded,
    tiled,
)
from lowprec_attn.numerics import EXACT, FLASH, STANDARD, STOCHASTIC_OUTPUT, DynamicMax, StandardMax

pytestmark = pytest.mark.usefixtures("strict_promotion")


def x(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def attend(q: Any = None, k: Any = None, v: Any = None, *rest: Any, **options: Any) -> Any:
    """A call that is valid except for what a case changes: B = 2, T = 6, S = 5, N = 4, K = 2."""
    q = x(2, 6, 4, 8) if q is None else q
    k = x(2, 5, 2, 8) if k is None else k
    return dot_product_attention(
        q, k, x(*k.shape, dtype=k.dtype) if v is None else v, *rest, **options
    )


def group(*heads: int) -> HeadGroup:
    return HeadGroup(heads=heads, numerics=FLASH, row_max=StandardMax())


def sharded_over_heads(**options: Any) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    q = k = v = x(2, 4, 4, 8)
    return sharded(mesh, batch_axis="data", head_axis="model")(q, k, v, **options)


VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "rank of q": (lambda: attend(x(6, 4)), r"query must be \[batch.*\(6, 4\)"),
    "rank of k": (lambda: attend(k=x(5, 2, 8)), r"key must be.*\(5, 2, 8\)"),
    "neither k nor v, of three axes": (
        lambda: dot_product_attention(x(3, 4, 8)),
        r"without key and value, query must be \[batch, length, 3, .*\(3, 4, 8\)",
    ),
    "neither k nor v, q alone": (
        lambda: dot_product_attention(x(2, 6, 4, 8)),
        r"without key and value, query must be .*\(2, 6, 4, 8\)",
    ),
    "k alone": (
        lambda: dot_product_attention(x(2, 6, 4, 8), x(2, 6, 4, 8)),
        "value is missing beside key; pass both, or neither",
    ),
    "empty axis": (lambda: attend(x(2, 0, 4, 8)), r"query has an empty axis.*\(2, 0, 4, 8\)"),
    "integer q": (lambda: attend(x(2, 6, 4, 8, dtype=jnp.int32)), "query must be one of.*int32"),
    "mixed dtypes": (
        lambda: attend(x(2, 6, 4, 8, dtype=jnp.bfloat16)),
        "share a dtype.*bfloat16, float32, float32",
    ),
    "k unlike v": (lambda: attend(v=x(2, 4, 2, 8)), r"\(2, 5, 2, 8\) and \(2, 4, 2, 8\)"),
    "lengths of k and v": (
        lambda: attend(v=x(2, 4, 2, 16)),
        r"must have the same batch, length and heads, got \(2, 5, 2, 8\) and \(2, 4, 2, 16\)",
    ),
    "batch": (lambda: attend(k=x(3, 5, 2, 8)), r"\(2, 6, 4, 8\) and \(3, 5, 2, 8\)"),
    "head size": (lambda: attend(k=x(2, 5, 2, 16)), r"\(2, 6, 4, 8\) and \(2, 5, 2, 16\)"),
    "head counts": (
        lambda: attend(k=x(2, 5, 3, 8)),
        "4 query heads do not divide.*3 key heads; .* are read as .batch, length",
    ),
    "mask dtype": (lambda: attend(mask=x(2, 4, 6, 5)), "mask must be boolean.*float32"),
    "mask shape": (
        lambda: attend(mask=jnp.ones((2, 4, 5, 6), bool)),
        r"mask of shape \(2, 4, 5, 6\).*\(2, 4, 6, 5\)",
    ),
    "mask rank": (lambda: attend(mask=jnp.ones((6, 5), bool)), r"mask of shape \(6, 5\)"),
    "bias dtype": (
        lambda: attend(bias=jnp.ones((1, 1, 6, 5), jnp.int32)),
        "bias must be a float array, got int32",
    ),
    "bias shape": (lambda: attend(bias=x(2, 3, 6, 5)), r"bias of shape \(2, 3, 6, 5\)"),
    "lengths shape": (
        lambda: attend(key_value_seq_lengths=jnp.array([5])),
        r"key_value_seq_lengths must hold one integer .*shape \(2,\), got .*\(1,\)",
    ),
    "negative length": (
        lambda: attend(key_value_seq_lengths=np.array([5, -1])),
        "key_value_seq_lengths must be from 0 to 5, got -1",
    ),
    "length beyond the keys": (
        lambda: jax.jit(lambda: attend(key_value_seq_lengths=[6, 5]))(),
        "key_value_seq_lengths must be from 0 to 5, got 6",
    ),
    "length beyond the queries": (
        lambda: attend(query_seq_lengths=jnp.array([0, 7])),
        "query_seq_lengths must be from 0 to 6, got 7",
    ),
    "causal text": (lambda: attend(is_causal="x"), "is_causal must be True or False, got 'x'"),
    "normalize_probs": (
        lambda: numerics.FLASH.replace(normalize_probs="x"),
        "normalize_probs must be True or False, got 'x'",
    ),
    "lengths dtype": (
        lambda: attend(query_seq_lengths=x(2)),
        r"query_seq_lengths must hold one integer .*shape \(2,\), got float32",
    ),
    "negative window": (
        lambda: attend(local_window_size=(3, -1)),
        r"local_window_size must be an int or \(left, right\), each 0 or more.*got \(3, -1\)",
    ),
    "window of three": (lambda: attend(local_window_size=(3, 1, 0)), r"got \(3, 1, 0\)"),
    "traced window": (
        lambda: jax.jit(lambda w: attend(local_window_size=w))(3),
        "local_window_size.* not traced, got .*int32",
    ),
    "segments of the queries alone": (
        lambda: attend(query_segment_ids=jnp.zeros((2, 6), jnp.int32)),
        "key_value_segment_ids is missing beside query_segment_ids, with 6 queries and 5 keys",
    ),
    "segments of the keys alone": (
        lambda: attend(key_value_segment_ids=jnp.zeros((2, 5), jnp.int32)),
        "query_segment_ids is missing beside key_value_segment_ids",
    ),
    "segments of another shape": (
        lambda: attend(
            query_segment_ids=jnp.zeros((2, 6), jnp.int32),
            key_value_segment_ids=jnp.zeros((5,), jnp.int32),
        ),
        r"key_value_segment_ids must be integers \[batch, length\] = \(2, 5\), got int32\(5,\)",
    ),
    "float segments": (
        lambda: attend(query_segment_ids=x(2, 6), key_value_segment_ids=x(2, 5)),
        "query_segment_ids must be integers.* got float32",
    ),
    **{
        f"scale={scale!r}": (functools.partial(attend, scale=scale), f"scale must be .* got {text}")
        for scale, text in {
            float("nan"): "nan",
            float("inf"): "inf",
            1e300: r"1e\+300",
            1e-300: "1e-300",
            "x": "'x'",
            1j: "1j",
            (1.0, 2.0): r"\(1\.0, 2\.0\)",
            True: "True",
        }.items()
    },
    **{
        f"logits_soft_cap={cap!r}": (
            functools.partial(attend, logits_soft_cap=cap),
            f"logits_soft_cap must be {text}",
        )
        for cap, text in (
            (0.0, "greater than 0, or None for no cap, got 0.0"),
            (-50.0, "greater than 0, .* got -50.0"),
            (float("nan"), "a finite number .* got nan"),
            (float("inf"), "a finite number .* got inf"),
            (1e-300, "a finite number .* got 1e-300"),
            ("50", "one real number, got '50'"),
            (True, "one real number, got True"),
            ((50.0,), r"one real number, got \(50.0,\)"),
        )
    },
    **{
        f"sinks={given!r}": (functools.partial(attend, sinks=given), f"sinks must be {text}")
        for given, text in (
            (np.zeros(2, np.float32), r"4 numbers \(one per query head\) .* got float32\(2,\)"),
            (np.zeros((1, 4), np.float32), r"4 numbers .* got float32\(1, 4\)"),
            (np.zeros(4, np.int32), r"4 numbers .* of float32, .* got int32\(4,\)"),
            (1.0, r"4 numbers .* got float32\(\)"),
            (np.array([0, 1, np.nan, 0], np.float32), "finite, or -inf for no sink, got nan"),
            (np.array([0, 1, np.inf, 0], np.float32), "finite, or -inf for no sink, got inf"),
        )
    },
    "a cap far below the scale": (
        lambda: attend(logits_soft_cap=1e-30, scale=1e30),
        r"scale / logits_soft_cap.* must fit float32, got 1e-30 with scale=1e\+30",
    ),
    "a cap that hides all scores": (
        lambda: attend(logits_soft_cap=1e37),
        r"scale / logits_soft_cap.* must fit float32, got 1e\+37 with scale=.*; the least is 1e-31",
    ),
    "traced cap": (
        lambda: jax.jit(lambda cap: attend(logits_soft_cap=cap))(50.0),
        r"logits_soft_cap must be a Python number or None, got the traced .*float32\[\]",
    ),
    "scale of two numbers": (
        lambda: attend(scale=np.ones(2)),
        r"scale must be one real number, got array\(\[1\., 1\.\]\)",
    ),
    "traced scale of two numbers": (
        lambda: jax.jit(lambda scale: attend(scale=scale))(np.ones(2, np.float32)),
        r"scale must be one real number, got float32\(2,\)",
    ),
    **{
        f"{where} is_causal={value!r}": (
            functools.partial(call, is_causal=value),
            f"is_causal must be True or False, got {value!r}",
        )
        for value in (float("nan"), 1, 0, None)
        for where, call in {
            "attention": attend,
            "attention_fn": attention_fn,
            "a call of attention_fn": lambda is_causal: attention_fn()(
                *[x(2, 4, 4, 8)] * 3, is_causal=is_causal
            ),
        }.items()
    },
    **{
        f"made with {name}": (functools.partial(attention_fn, **{name: value}), text)
        for name, value, text in (
            ("numerics", "flash2", r"unknown numerics 'flash2' \(did you mean flash\?\); presets"),
            ("row_max", ["standard", "dyn"], "unknown row-max rule 'dyn'; rules are standard, "),
            ("local_window_size", (1, -1), r"local_window_size must be .* got \(1, -1\)"),
            ("logits_soft_cap", -1.0, "logits_soft_cap must be greater than 0"),
            ("implementation", "cuda", "unknown implementation 'cuda'; there are hopper, gpu, "),
            ("numerics", STOCHASTIC_OUTPUT, "draws random bits; pass rng_key"),
        )
    },
    "window of a truth value": (
        lambda: attend(local_window_size=True),
        "local_window_size must be .* got True",
    ),
    "segments of 64 bits beside traced ones": (
        lambda: jax.jit(
            lambda ids: attend(
                query_segment_ids=ids, key_value_segment_ids=np.array([[0, 0, 2**32, 0, 0]] * 2)
            )
        )(np.zeros((2, 6), np.int32)),
        "segment id 4294967296 needs 64 bits; set jax_enable_x64",
    ),
    "signed segments beside unsigned ones": (
        lambda: attend(
            query_segment_ids=np.zeros((2, 6), np.int64),
            key_value_segment_ids=np.zeros((2, 5), np.uint64),
        ),
        "both signed or both unsigned, got int64 and uint64",
    ),
    "name for numerics": (
        lambda: attend(numerics="flesh"),
        r"unknown numerics 'flesh' \(did you mean flash\?\); presets are exact, flash, ",
    ),
    "name of one head": (
        lambda: attend(numerics=["flash", "flash", "flash", "Exact"]),
        r"unknown numerics 'Exact' \(did you mean exact\?\); presets are exact, flash, ",
    ),
    "neither numerics nor name": (
        lambda: attend(numerics=16),
        "numerics.* the name of one, got 16",
    ),
    "name for row_max": (
        lambda: attend(row_max="dynamic"),
        r"unknown row-max rule 'dynamic' \(did you mean dynamic_max\?\); rules are standard, ",
    ),
    "rule without parentheses": (lambda: attend(row_max=StandardMax), "row_max.*StandardMax"),
    "too few numerics": (lambda: attend(numerics=[FLASH] * 3), "3 entries for 4 query heads"),
    "numerics within a group": (
        lambda: attend(numerics=[FLASH, EXACT, FLASH, FLASH]),
        "query heads 0 to 1 share a key head",
    ),
    "row_max within a group": (
        lambda: attend(row_max=[StandardMax(), StandardMax(), StandardMax(), DynamicMax()]),
        "query heads 2 to 3 share a key head",
    ),
    "groups within a group": (
        lambda: attend(numerics=group_heads([(FLASH, StandardMax()), (EXACT, StandardMax())] * 2)),
        "query heads 0 to 1 share a key head",
    ),
    "groups of fewer heads": (
        lambda: attend(numerics=group_heads([(FLASH, StandardMax())] * 3)),
        r"groups must hold each of 4 query heads once, got \(0, 1, 2\)",
    ),
    "heads of a group in disorder": (
        lambda: attend(numerics=[group(2, 3, 1, 0)]),
        r"heads of a group must be an ascending tuple, got \(2, 3, 1, 0\)",
    ),
    "heads of a group as a list": (
        lambda: dataclasses.replace(group(0), heads=[0, 1, 2, 3]),  # type: ignore[arg-type]
        r"heads of a group must be an ascending tuple, got \[0, 1, 2, 3\]",
    ),
    "a group without heads": (
        lambda: attend(numerics=[group(0, 1, 2, 3), group()]),
        r"heads of a group must be an ascending tuple, got \(\)",
    ),
    "row_max beside groups": (
        lambda: attend(
            numerics=group_heads([(FLASH, StandardMax())] * 4), row_max=DynamicMax(beta=3.0)
        ),
        r"head groups have row-max rules; leave out row_max=DynamicMax\(beta=3.0",
    ),
    "missing key": (
        lambda: attend(numerics=STOCHASTIC_OUTPUT),
        r"output=bfloat16:stochastic.*pass rng_key=jax.random.key",
    ),
    "missing key of a control": (
        lambda: attend(numerics=EXACT.replace(ds="float16:error_random_sign")),
        "ds=float16:error_random_sign.*pass rng_key",
    ),
    "implementation": (
        lambda: attend(implementation="cuda"),
        "unknown implementation 'cuda'; there are hopper, gpu, tpu, tiled, dense",
    ),
    "block size": (lambda: tiled.BlockSizes(query=0), "block size query must be positive, got 0"),
    "mesh axis": (
        lambda: sharded(jax.make_mesh((8,), ("data",)), batch_axis="batch"),
        "no axis 'batch'.*'data'",
    ),
    "batch over devices": (
        lambda: sharded(jax.make_mesh((8,), ("data",)), batch_axis="data")(*[x(2, 4, 4, 8)] * 3),
        "batch 2 does not divide over 8 devices of mesh axis 'data'; take a multiple of 8",
    ),
    "heads over devices": (
        lambda: sharded(jax.make_mesh((8,), ("model",)), head_axis="model")(*[x(2, 4, 4, 8)] * 3),
        "4 key heads do not divide over 8 devices of mesh axis 'model'; leave head_axis out",
    ),
    "mixed heads over devices": (
        lambda: sharded_over_heads(numerics=[FLASH, EXACT, FLASH, EXACT]),
        "heads of different arithmetic.*'model'",
    ),
    "sharded without batch axis": (
        lambda: sharded(jax.make_mesh((4,), ("model",)), head_axis="model")(*[x(4, 4, 8)] * 3),
        r"query must be \[batch.*\(4, 4, 8\)",
    ),
}

UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "standard on tiled": (
        lambda: attend(numerics=STANDARD, implementation="tiled"),
        "'tiled' does not support normalize_probs.*use dense",
    ),
    "kv_block on dense": (
        lambda: attend(numerics=FLASH.replace(kv_block=3), implementation="dense"),
        "'dense' does not support kv_block=3.*use tiled",
    ),
    "block sizes of another kind": (
        lambda: attend(block_sizes=(64, 64), implementation="tiled"),
        "'tiled' does not support block_sizes of type tuple.*BlockSizes",
    ),
    "block sizes that nobody knows": (
        lambda: attend(block_sizes=(64, 64)),
        "no implementation.*tiled: block_sizes of type tuple.*dense: block_sizes",
    ),
    "no implementation left": (
        lambda: attend(numerics=STANDARD.replace(kv_block=2)),
        "no implementation.* serves this call. hopper: .*gpu: .*tiled: normalize_probs"
        ".*dense: kv_block=2",
    ),
    "no alternative": (
        lambda: attend(numerics=STANDARD.replace(kv_block=2), implementation="dense"),
        "'dense' does not support kv_block=2.*no other implementation",
    ),
    "dropout": (
        lambda: attention_fn()(*[x(2, 4, 4, 8)] * 3, dropout_rate=0.25),
        "dropout_rate=0.25",
    ),
    "sown weights": (
        lambda: attention_fn()(*[x(2, 4, 4, 8)] * 3, module=object()),
        "sown attention weights",
    ),
    "precision": (
        lambda: attention_fn()(*[x(2, 4, 4, 8)] * 3, precision=jax.lax.Precision.HIGH),
        "precision=HIGH.*set numerics instead",
    ),
    "einsum override": (
        lambda: attention_fn()(*[x(2, 4, 4, 8)] * 3, qk_attn_weights_einsum=jnp.einsum),
        "qk_attn_weights_einsum",
    ),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_wrong_input_is_a_value_error_that_names_the_value(case: str) -> None:
    call, text = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_is_not_implemented_and_names_the_alternatives(case: str) -> None:
    call, text = UNSUPPORTED[case]
    with pytest.raises(NotImplementedError, match=text) as caught:
        call()
    assert type(caught.value) in (NotImplementedError, UnsupportedError)


def test_errors_are_raised_at_trace_time_under_jit() -> None:
    with pytest.raises(ValueError, match="4 query heads"):
        jax.jit(lambda q, k: dot_product_attention(q, k, k))(x(2, 6, 4, 8), x(2, 5, 3, 8))


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_forward_mode_is_refused_clearly(implementation: str) -> None:
    q = x(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
        jax.jvp(lambda q: dot_product_attention(q, q, q, implementation=implementation), (q,), (q,))


def test_presets_that_one_implementation_declines_go_to_the_other() -> None:
    out = attend(numerics=STANDARD)
    assert out.shape == (2, 6, 4, 8)
    assert numerics.STANDARD.normalize_probs


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_query_with_exchanged_axes_is_noticed(kv_heads: int) -> None:
    """If the lengths and heads of k reveal it; a q in the right order gives no warning."""
    q, k = x(2, 4, 8, 16), x(2, 8, kv_heads, 16)
    with pytest.warns(UserWarning, match=r"\(2, 4, 8, 16\) is read as 4 queries of 8 heads"):
        dot_product_attention(q, k, k)
    dot_product_attention(x(2, 8, 4, 16), k, k)


@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 1), (1, 2), (3, 2), (4, 1), (8, 2)])
def test_as_many_heads_as_keys_are_no_exchanged_axes(rows: int, kv_heads: int) -> None:
    k = x(2, 8, kv_heads, 16)
    dot_product_attention(x(2, rows, 8, 16), k, k)


def test_the_default_in_float32_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    entry._log_default_in_float32.cache_clear()
    q = x(1, 4, 1, 8)
    dot_product_attention(q.astype(jnp.bfloat16), *[q.astype(jnp.bfloat16)] * 2)
    dot_product_attention(q, q, q, numerics="exact")
    assert not caplog.records
    dot_product_attention(q, q, q)
    dot_product_attention(q, q, q)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "numerics 'flash', the default" in caplog.text


WIDE_IDS = {
    "int64": np.array([0, 2**32, 2**32, -1, 2**32 - 1, 2**40]),
    "uint64": np.array([0, 2**32, 2**32, 2**63, 2**63 + 2**32, 1], np.uint64),
    "uint32": np.array([0, 2**31, 2**31, 2**32 - 1, 1, 2**31 - 1], np.uint32),
    "int8": np.array([0, -128, -128, 127, 1, 2], np.int8),
}


@pytest.mark.parametrize("form", ["known", "traced"])
@pytest.mark.parametrize("dtype", WIDE_IDS)
def test_segment_ids_of_any_width_are_compared_as_they_are(dtype: str, form: str) -> None:
    ids = WIDE_IDS[dtype][None]
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3))
    mask = ids[0][:, None] == ids[0]
    expected = dot_product_attention(q, k, v, mask=mask[None, None], numerics="exact")

    def attend(ids: Any) -> jax.Array:
        return dot_product_attention(q, k, v, query_segment_ids=ids, numerics="exact")

    if form == "traced":
        with jax.enable_x64(True):
            out = jax.jit(attend)(jnp.asarray(ids))
    else:
        out = attend(ids)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtypes", [(np.int32, np.uint32), (np.uint32, np.int8)])
def test_an_unsigned_segment_id_is_no_negative_one(dtypes: tuple[type, type]) -> None:
    """2³² − 1 and −1 have the same 32 bits."""
    given = {np.uint32: [2**32 - 1, 2**31, 1, 0], np.int32: [-1, -(2**31), 1, 0]}
    given[np.int8] = [-1, -128, 1, 0]
    rows, keys = (np.array([given[dtype]], dtype) for dtype in dtypes)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 1, 8)) for i in range(3))
    out = dot_product_attention(
        q, k, v, query_segment_ids=rows, key_value_segment_ids=keys, numerics="exact"
    )
    np.testing.assert_array_equal(out[:, :2], 0)  # these rows see no key
    np.testing.assert_allclose(out[:, 2:], v[:, 2:], rtol=1e-6)
