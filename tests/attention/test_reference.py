"""The oracle against autodiff of the plain formula in float64, and against jax.nn."""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest

from lowprec_attn.attention import reference

CASES = {
    "full": harness.Case(),
    "gqa_causal": harness.Case(heads=4, is_causal=True, rows=9, keys=13, scale=0.4),
    "bias_mask": harness.Case(bias=(False, True, True), mask="random"),
    "lengths": harness.Case(key_lengths=(13, 7), is_causal=True),
    "large": harness.Case(values="large_positive_scores"),
}


def formula(
    case: harness.Case, seen: np.ndarray, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """softmax(q kᵀ · scale + bias) v and lse, written as the plain formula."""
    group = case.heads // case.kv_heads
    k, v = (jnp.repeat(arrays[name], group, axis=2) for name in ("k", "v"))
    scale = case.scale or case.head_size**-0.5
    s = jnp.einsum("btnh,bsnh->bnts", arrays["q"], k) * scale
    if "bias" in arrays:
        s = s + arrays["bias"]
    s = jnp.where(seen, s, -jnp.inf)
    o = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)
    return o, jax.scipy.special.logsumexp(s, axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_agree_with_autodiff_in_float64(name: str) -> None:
    case = CASES[name]
    arrays = {
        k: x if x.dtype == bool else x.astype(np.float64) for k, x in harness.inputs(case).items()
    }
    seen = np.broadcast_to(
        harness.plain_options(case, arrays, None, None).seen,  # type: ignore[arg-type]
        (case.batch, case.heads, case.rows, case.keys),
    )
    with jax.enable_x64(True):
        leaves = {n: jnp.asarray(arrays[n]) for n in ("q", "k", "v", "bias") if n in arrays}

        @jax.jit
        def autodiff(leaves: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, Any]:
            (o, lse), pullback = jax.vjp(functools.partial(formula, case, seen), leaves)
            return o, lse, *pullback((jnp.asarray(arrays["do"]), jnp.asarray(arrays["dlse"])))

        o, lse, grads = autodiff(leaves)
        assert o.dtype == jnp.float64
        expected = {"out": o, "lse": lse} | {f"d{n}": g for n, g in grads.items()}
        expected = {n: np.asarray(x) for n, x in expected.items()}
    ours = harness.oracle(case, arrays)
    assert ours.keys() == expected.keys()
    for n, x in expected.items():
        # Float64 sums of tens of terms, on scores up to a few hundred.
        bound = 1e-12 * max(1.0, harness.largest(x))
        assert harness.error(ours[n], x) < bound, n


@pytest.mark.parametrize("name", CASES)
def test_forward_agrees_with_jax_nn(name: str) -> None:
    case = CASES[name]
    arrays = harness.inputs(case)
    lengths = None if case.key_lengths is None else jnp.array(case.key_lengths, jnp.int32)
    theirs = jax.nn.dot_product_attention(
        *(jnp.asarray(arrays[n]) for n in ("q", "k", "v")),
        bias=arrays.get("bias"),
        mask=arrays.get("mask"),
        scale=case.scale,
        is_causal=case.is_causal,
        key_value_seq_lengths=lengths,
        query_seq_lengths=None if lengths is None else jnp.full(2, case.rows, jnp.int32),
    )
    ours = harness.oracle(case, arrays)["out"]
    # An error of H ulps in float32 scores up to max |s| changes P by that relative amount.
    s = np.abs(reference.attention(arrays["q"], arrays["k"], arrays["v"], scale=case.scale).s).max()
    bound = 2 * case.head_size * plain.EPS32 * max(1.0, s) * harness.largest(ours)
    assert harness.error(np.asarray(theirs), ours) < bound


def test_a_row_without_keys_has_no_output_and_no_gradient() -> None:
    case = harness.Case(mask="empty")
    arrays = harness.inputs(case)
    result = harness.oracle(case, arrays)
    np.testing.assert_array_equal(result["out"][:, [0, 3]], 0.0)
    np.testing.assert_array_equal(result["lse"][:, [0, 3]], -np.inf)
    np.testing.assert_array_equal(result["dq"][:, [0, 3]], 0.0)


def test_delta_is_the_same_from_output_and_from_probabilities() -> None:
    case = harness.Case(heads=4)
    a = harness.inputs(case)
    fwd = reference.attention(a["q"], a["k"], a["v"])
    bwd = reference.backward(a["q"], a["k"], a["v"], a["do"])
    from_output = np.sum(a["do"].astype(np.float64) * fwd.o, axis=-1)
    np.testing.assert_allclose(bwd.delta, from_output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(bwd.ds.sum(-1), 0.0, atol=1e-13)  # softmax ignores a common shift
