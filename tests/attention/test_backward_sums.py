"""The row sums of P and dS in a backward pass, as the gradients of `backward_sums`."""

import dataclasses
import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from compiling import UNOPTIMIZED
from jax import lax
from jax.sharding import AxisType

from lowprec_attn import attention, numerics
from lowprec_attn.attention import BackwardSums, reference
from lowprec_attn.numerics import Numerics

# A float32 dQ holds the sum that a column of ones in k produces.
UNROUNDED = {"grads": "float32", "tile_grads": "float32"}
CHOICES: dict[str, Numerics] = {
    "exact": numerics.EXACT,
    "flash": numerics.FLASH,
    "normalized": numerics.NORMALIZED_DELTA,
    "after_cast": numerics.CORRECTED_AFTER_CAST,
    "dp_p": numerics.DELTA_DP_P,
    "matched": numerics.MATCHED,
    "probe": numerics.PROBE,
    "rounded lse": numerics.FLASH.replace(lse="bfloat16"),
}
CASE = harness.CASES["both_lengths_repeated_maxima"]
CASES = {
    "lengths": CASE,
    "segments": harness.CASES["segments"],
    "cap": harness.CASES["soft_cap_window"],
    "sinks": harness.CASES["sinks_lengths"],
    "values": harness.CASES["small_values_cap_large_scores"],
}
# In tiles: every arithmetic, with a case whose sums it affects. Each implementation has its own
# code to form terms with dP and δ and to add them up, so each is tried with every way to form δ.
PARAMETERS = [
    *(("tiled_odd", "lengths", choice) for choice in ("dp_p", "matched", "probe", "rounded lse")),
    ("tiled_odd", "segments", "flash"),
    ("tiled_odd", "values", "exact"),
    ("dense", "lengths", "matched"),
    ("gpu", "lengths", "dp_p"),
    ("gpu", "lengths", "matched"),
    *((name, "cap", "normalized") for name in ("tiled_odd", "dense", "gpu")),
    *((name, "sinks", "after_cast") for name in ("tiled_odd", "dense", "gpu")),
]
# Each implementation has one branch for whether sums are asked for.
BESIDE = [("tiled_odd", "matched"), ("dense", "matched"), ("gpu", "after_cast")]
Results = tuple[Any, Any, BackwardSums]


def gradients(
    implementation: str,
    case: harness.Case,
    arrays: harness.Arrays,
    chosen: Numerics,
    *,
    beside: bool = False,
) -> Results:
    """(O, lse), the gradients by q, k, v and the rest, and the sums.

    With `beside`, checks that a call without sums returns the same bits.
    """
    how = harness.strict(implementation)
    differentiated, rest, cotangents = harness.call_arrays(case, arrays)

    def attend(x: dict[str, Any], sums: BackwardSums | None) -> Any:
        return attention.dot_product_attention(
            **harness.by_argument(x),
            **rest,
            scale=case.scale,
            is_causal=case.is_causal,
            local_window_size=case.window,
            logits_soft_cap=case.soft_cap,
            numerics=how.numerics(chosen.replace(**UNROUNDED)),
            implementation=how.name,
            block_sizes=how.block_sizes,
            return_residual=True,
            backward_sums=sums,
        )

    def run(x: dict[str, Any], sums: BackwardSums | None) -> Results:
        results, pullback = jax.vjp(attend, x, sums)
        do, dlse = cotangents
        return results, *pullback((jnp.asarray(do).astype(results[0].dtype), jnp.asarray(dlse)))

    options = UNOPTIMIZED if how.name in harness.KERNELS else None
    run = jax.jit(run, compiler_options=options)
    with_sums = run(differentiated, BackwardSums.zeros(arrays["q"]))
    if beside:
        without = run(differentiated, None)
        for x, y in zip(*map(jax.tree.leaves, (with_sums[:2], without[:2])), strict=True):
            np.testing.assert_array_equal(x, y)
    return with_sums


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(("implementation", "case", "choice"), PARAMETERS)
def test_they_are_what_the_backward_pass_sums(implementation: str, case: str, choice: str) -> None:
    problem, chosen = CASES[case], CHOICES[choice]
    arrays = harness.inputs(problem)
    # Where k has a column of ones, dQ is Σ_j dS_ij · scale. A zero in q keeps the scores as they
    # are.
    arrays["q"][..., -1], arrays["k"][..., -1] = 0, 1
    beside = (implementation, choice) in BESIDE
    (_, lse), grads, sums = gradients(implementation, problem, arrays, chosen, beside=beside)
    qkv = (arrays["q"], arrays["k"], arrays["v"])
    options = harness.reference_options(problem, arrays)
    exact = reference.backward(*qkv, arrays["do"], dlse=arrays["dlse"], **options)
    scale = problem.scale or problem.head_size**-0.5
    terms = np.abs(exact.ds).sum(axis=-1).max() * scale
    noise = 8 * plain.EPS32 * terms * problem.keys**0.5
    np.testing.assert_allclose(sums.ds, grads["q"][..., -1], rtol=0, atol=noise)
    # P = exp(S − lse) uses the rounded lse, so the exact lse tells what P sums to.
    forward = reference.attention(*qkv, **options)
    expected = forward.p.sum(axis=-1).transpose(0, 2, 1)
    if chosen.statistics == "lse":
        sees = np.isfinite(forward.lse) & (expected > 0)
        away = np.where(sees, forward.lse, 0) - np.where(sees, lse, 0)
        expected = expected * np.exp(away)
    # The error of S: scores rounded to bfloat16, or the order of float32 sums.
    score = np.abs(forward.s[np.isfinite(forward.s)]).max()
    within = 16 * plain.EPS32 * (1 + score)
    within += 0.0 if chosen.scores.is_identity else 2**-7 * score
    within += 0.0 if chosen.recomputed_probs == "unrounded" else 2**-8
    np.testing.assert_allclose(sums.p, expected, rtol=within, atol=0)
    if choice == "rounded lse":  # some sums must differ from 1
        assert np.abs(sums.p - 1)[np.asarray(sums.p) > 0].max() > 1e-3


def test_rows_of_ds_sum_to_zero_where_that_is_promised() -> None:
    arrays = harness.inputs(CASE)
    arrays["dlse"][:] = 0
    arrays["k"][..., 0] += 8  # otherwise P and dS round alike
    sizes = {}
    for choice in ("flash", "after_cast"):
        *_, sums = gradients("tiled", CASE, arrays, CHOICES[choice])
        sizes[choice] = np.sqrt(np.mean(np.square(sums.ds)))
    assert sizes["after_cast"] < 1e-3 * sizes["flash"]


def loss(sums: BackwardSums, *qkv: jax.Array, attend: Any, **options: Any) -> jax.Array:
    out = attend(
        *qkv,
        is_causal=True,
        numerics="flash",
        implementation="tiled",
        backward_sums=sums,
        **options,
    )
    return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))


PLAIN = harness.Case(batch=4, heads=8, kv_heads=4, is_causal=True)
QKV = tuple(jnp.asarray(x) for name, x in harness.inputs(PLAIN).items() if name in "qkv")
ZEROS = BackwardSums.zeros(QKV[0])


@functools.cache
def whole() -> BackwardSums:
    return jax.jit(jax.grad(functools.partial(loss, attend=attention.dot_product_attention)))(
        ZEROS, *QKV
    )


def assert_same(found: BackwardSums) -> None:
    np.testing.assert_allclose(found.p, whole().p, rtol=1e-6)
    np.testing.assert_allclose(found.ds, whole().ds, atol=1e-6)


def test_remat_and_a_scan_over_layers_leave_them() -> None:
    attend = jax.checkpoint(functools.partial(loss, attend=attention.dot_product_attention))

    def layers(sums: BackwardSums) -> jax.Array:
        return lax.scan(lambda total, of: (total + attend(of, *QKV), None), 0.0, sums)[0]

    stacked = jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), ZEROS)
    found = jax.jit(jax.grad(layers))(stacked)
    for layer in range(3):
        assert_same(jax.tree.map(lambda x, i=layer: x[i], found))


def test_vmap_has_those_of_each_element() -> None:
    cotangent = jnp.sin(jnp.arange(QKV[0].size, dtype=jnp.float32)).reshape(QKV[0].shape)

    def of_one(sums: BackwardSums, cotangent: jax.Array, *qkv: jax.Array) -> jax.Array:
        options = {"is_causal": True, "numerics": "flash", "implementation": "tiled"}
        out = attention.dot_product_attention(*qkv, backward_sums=sums, **options)
        return jnp.sum(out * cotangent)

    assert_same(jax.jit(jax.vmap(jax.grad(of_one)))(ZEROS, cotangent, *QKV))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_have_theirs(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")
    assert_same(jax.jit(jax.grad(functools.partial(loss, attend=split)))(ZEROS, *QKV))


def test_heads_of_different_arithmetic_keep_their_places() -> None:
    kinds = ["flash", "exact"] * 4
    attend = functools.partial(attention.dot_product_attention, is_causal=True)
    heads = [0, 1] * 4

    def of(which: Any) -> BackwardSums:
        def total(sums: BackwardSums) -> jax.Array:
            options = {"numerics": which, "implementation": "tiled"}
            return jnp.sum(attend(QKV[0], *WIDE, **options, backward_sums=sums) ** 2)

        return jax.jit(jax.grad(total))(ZEROS)

    WIDE = tuple(jnp.repeat(x, 2, axis=2) for x in QKV[1:])
    mixed, alike = of(kinds), [of(kind) for kind in ("flash", "exact")]
    for head, which in enumerate(heads):
        # Sums differ in order only. Heads of another arithmetic are off by 1e-3, as asserted below.
        np.testing.assert_allclose(mixed.ds[:, :, head], alike[which].ds[:, :, head], atol=1e-5)
    assert np.abs(alike[0].ds - alike[1].ds).max() > 1e-3


def test_what_is_wrong_is_named() -> None:
    call = functools.partial(attention.dot_product_attention, *QKV)
    with pytest.raises(ValueError, match=r"BackwardSums of float32\(4, 20, 8\), .* got tuple"):
        call(backward_sums=(ZEROS.p, ZEROS.ds))
    wrong = dataclasses.replace(PLAIN, rows=7)
    with pytest.raises(ValueError, match=r"got float32\(4, 7, 8\), float32\(4, 7, 8\)"):
        call(backward_sums=BackwardSums.zeros(harness.inputs(wrong)["q"]))
    with pytest.raises(attention.UnsupportedError, match="'tpu' does not support backward_sums"):
        call(
            backward_sums=ZEROS,
            implementation="tpu",
            block_sizes=harness.TPU_TILES,
        )
