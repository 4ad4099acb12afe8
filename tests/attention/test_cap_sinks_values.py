"""Sinks, a soft cap and values of another head size: the tests that all three share, in one call.

Bounds come from the same arithmetic in NumPy, which has all three as well, so a defect in any of
them shows. The harness's table has cases in exact arithmetic, `test_fuzz.py` has random calls, and
`test_sinks.py` and `test_soft_cap.py` test each by itself.
"""

import dataclasses
import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import check_accuracy, kernel_call, run_plain

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.numerics import EXACT, FLASH
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.tpu import attention as tpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

ALL = harness.Case(
    heads=4,
    head_size=48,
    value_size=20,
    sinks=True,
    soft_cap=1.5,
    is_causal=True,
    key_lengths=(20, 6),
    query_lengths=(4, 17),
    values="repeated_maxima",
)
# With a cap the unit of scores is the cap; without one it is the scale, as here.
SINKS = dataclasses.replace(ALL, soft_cap=None, head_size=16, value_size=None, scale=0.3)
WIDE = dataclasses.replace(ALL, head_size=20, value_size=48)
CASES = {"all": ALL, "sinks": SINKS, "wide": WIDE}

# Every way to form exponents and δ, to save O and to sum, and what rounds m and l. A rule depends
# on the scores of a step, so rules are tried where a maximum repeats.
PRESETS_AND_RULES = [
    *(("all", "tiled_odd", name, "standard") for name in ("published_eager", "jax_pallas")),
    *(("all", "tiled_odd", name, "standard") for name in ("normalized_delta", "delta_dp_p")),
    *(("all", "tiled_odd", name, "standard") for name in ("matched", "auxiliary_output")),
    ("all", "tiled_odd", "published_as_compiled", "standard"),
    ("all", "tiled_odd", "flash", "dynamic_max"),
    ("all", "tiled_odd", "flash_attention_3", "lazy_max"),
    ("wide", "tiled_odd", "published", "published"),
    ("all", "dense", "published", "standard"),
    # A cap refuses `after_cast`.
    ("sinks", "tiled_odd", "corrected_after_cast", "standard"),
    ("sinks", "tiled_odd", "flash_attention_3", "standard"),
    ("sinks", "dense", "standard", "standard"),  # P is normalised before it is rounded
]
RULES = {name: rule() for name, rule in numerics.ROW_MAX_RULES.items()}
RULES["lazy_max"] = numerics.LazyMax(threshold=0.5)  # for scores that vary little


@pytest.mark.parametrize(("name", "implementation", "preset", "rule"), PRESETS_AND_RULES)
def test_presets_are_as_accurate_as_plain(
    name: str, implementation: str, preset: str, rule: str
) -> None:
    case, chosen = CASES[name], numerics.PRESETS[preset]
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(case)
    nearest = how.numerics(chosen.replace(output="bfloat16"))
    same = harness.run_plain(case, arrays, nearest, RULES[rule])
    result = harness.run(how, case, arrays, chosen, RULES[rule], jax.random.key(7))
    harness.check(result, same, harness.oracle(case, arrays), 4 if chosen.needs_bits else 2)


# Every way of the kernels to form exponents and δ, to save O and to sum.
OF_KERNELS = {
    "scale_first, normalized": ("all", numerics.NORMALIZED_DELTA.replace(exponent="scale_first")),
    "matched": ("all", numerics.MATCHED),
    "scale_first, after_cast": (
        "sinks",
        numerics.CORRECTED_AFTER_CAST.replace(exponent="scale_first"),
    ),
    "published, auxiliary": ("wide", numerics.PUBLISHED.replace(saved_output="auxiliary")),
}


@pytest.mark.parametrize("name", OF_KERNELS)
def test_presets_of_kernels_are_as_accurate_as_plain(name: str) -> None:
    case, chosen = OF_KERNELS[name]
    check_accuracy(CASES[case], kernel_call("gpu", CASES[case], chosen))


@pytest.mark.parametrize("without", ["soft_cap", "sinks"])
def test_plain_has_them_too(without: str) -> None:
    """Otherwise the emulation would bound errors of another problem."""
    fewer = dataclasses.replace(ALL, **{without: False if without == "sinks" else None})
    on, off = (run_plain(case, kernel_call("gpu", case, EXACT)) for case in (ALL, fewer))
    assert np.abs(on["dq"] - off["dq"]).max() > 0.01


CAP, SCALE = 0.7, 0.4


def plain_attention(
    x: dict[str, Any], *, seen: np.ndarray, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """O and lse by the formula, for JAX to differentiate; the sink is one more key."""
    k, v = (jnp.repeat(x[name], x["q"].shape[2] // x["k"].shape[2], axis=2) for name in "kv")
    s = jnp.einsum("btnh,bsnh->bnts", x["q"], k) * x.get("scale", SCALE)
    s = s if cap is None else cap * jnp.tanh(s / cap)
    s = jnp.where(seen, s + x.get("bias", 0.0), -jnp.inf)
    column = jnp.broadcast_to(x["sinks"][None, :, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, column], axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1)[..., :-1], v)
    return out, jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


def ours(
    x: dict[str, Any], *, seen: np.ndarray, cap: float | None, **how: Any
) -> tuple[jax.Array, jax.Array]:
    options = {"scale": SCALE, "mask": seen[None, None], "logits_soft_cap": cap} | how
    options["return_residual"] = True
    return attention.dot_product_attention(**harness.by_argument(options | x))


@pytest.mark.parametrize(
    ("implementation", "delta"),
    [
        # The reference, against which every implementation is tested with every way to form δ.
        ("reference", "do_o"),
        # The implementations also have a traced scale, which the reference lacks.
        ("dense", "dp_p"),
        ("tiled", "normalized"),
        ("tiled", "after_cast"),
    ],
)
def test_gradients_are_those_that_jax_derives(implementation: str, delta: Any) -> None:
    """For q, k, v, sinks, a bias and a traced scale. Row 2 sees no key; its sink gets its dlse."""
    cap = None if delta == "after_cast" else CAP
    case = harness.Case(
        heads=4, rows=9, keys=13, sinks=True, soft_cap=cap, value_size=24, bias=(True, True, True)
    )
    arrays = harness.inputs(case)
    seen = np.tri(9, 13, dtype=bool)
    seen[2] = False
    of_call = {name: x for name, x in arrays.items() if name not in ("do", "dlse")}
    if implementation != "reference":
        of_call["scale"] = np.float32(SCALE)
    of_float64 = {name: x.astype(np.float64) for name, x in of_call.items()}
    cotangents = [arrays[name] for name in ("do", "dlse")]
    with jax.enable_x64(True):
        attend = functools.partial(plain_attention, seen=seen, cap=cap)

        @jax.jit
        def derived(x: dict[str, Any]) -> Any:
            results, pullback = jax.vjp(attend, x)
            return results, *pullback(tuple(jnp.asarray(x, np.float64) for x in cotangents))

        (out, lse), exact = derived(of_float64)
        exact = {"out": out, "lse": lse} | {f"d{name}": x for name, x in exact.items()}
        exact = {name: np.asarray(x) for name, x in exact.items()}
    if implementation == "reference":
        masking = harness.reference.Masking(
            mask=seen[None, None], sinks=of_float64["sinks"], bias=of_float64["bias"]
        )
        options = {"masking": masking, "scale": SCALE, "soft_cap": cap}
        qkv = [of_float64[name] for name in "qkv"]
        fwd = harness.reference.attention(*qkv, **options)
        do, dlse = (x.astype(np.float64) for x in cotangents)
        bwd = harness.reference.backward(*qkv, do, dlse=dlse, **options)
        found = {"out": fwd.o, "lse": fwd.lse, "dq": bwd.dq, "dk": bwd.dk, "dv": bwd.dv}
        found |= {"dbias": bwd.ds, "dsinks": bwd.dsinks}
        assert found.keys() == exact.keys()
        for name, x in found.items():
            np.testing.assert_allclose(x, exact[name], atol=1e-12, err_msg=name)
        return

    how = {"numerics": EXACT.replace(delta=delta), "implementation": implementation}

    @jax.jit
    def both(x: dict[str, Any]) -> dict[str, jax.Array]:
        (out, lse), pullback = jax.vjp(functools.partial(ours, seen=seen, cap=cap, **how), x)
        (gradients,) = pullback(tuple(map(jnp.asarray, cotangents)))
        return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}

    result = both(of_call)
    assert result.keys() == exact.keys()
    for name, x in exact.items():
        # Sums of up to 13 · 9 · 24 terms of order 1: the bound is far above noise, far below a bug.
        np.testing.assert_allclose(result[name], x, atol=2e-5, err_msg=name)


def test_second_derivatives_are_those_of_the_formula() -> None:
    """In tiles; `dense` differentiates the same functions without loops."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 2, 4)) for i in range(3))
    seen = np.tri(4, dtype=bool)
    how = {"numerics": EXACT, "implementation": "tiled"}

    def second(attend: Any) -> tuple[jax.Array, ...]:
        def loss(column: jax.Array, q: jax.Array) -> jax.Array:
            out, lse = attend({"q": q, "k": k, "v": v, "sinks": column}, seen=seen, cap=0.9)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        def rows(column: jax.Array, q: jax.Array) -> tuple[Any, Any]:
            return (
                jax.jacrev(jax.grad(loss, 0), (0, 1))(column, q),
                jax.jacrev(jax.grad(loss, 1), 1)(column, q),
            )

        return jax.tree.leaves(jax.jit(rows)(jnp.array([0.3, -1.0], jnp.float32), q))

    for a, b in zip(second(functools.partial(ours, **how)), second(plain_attention), strict=True):
        assert np.abs(b).max() > 0.01
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_heads_of_different_arithmetic_shards_and_attention_fn_have_them() -> None:
    case = harness.Case(heads=4, kv_heads=4, value_size=24, sinks=True)
    arrays = {name: jnp.asarray(harness.inputs(case)[name]) for name in ("q", "k", "v", "sinks")}
    options = {"is_causal": True, "implementation": "tiled", "logits_soft_cap": 1.0}

    def results(attend: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """O and the gradient of the sinks."""

        def loss(column: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(*(arrays[name] for name in "qkv"), sinks=column, **options)
            return jnp.sum(jnp.sin(out)), out

        dsinks, out = jax.jit(jax.grad(loss, has_aux=True))(arrays["sinks"])
        return np.asarray(out), np.asarray(dsinks)

    attend = attention.dot_product_attention
    exact, flash = (results(attend, numerics=name, **options) for name in ("exact", "flash"))
    mixed = results(attend, numerics=["exact", "flash"] * 2, **options)
    for head in range(4):
        of_head = (exact, flash)[head % 2]
        np.testing.assert_array_equal(mixed[0][:, :, head], of_head[0][:, :, head])
        np.testing.assert_allclose(mixed[1][head], of_head[1][head], rtol=1e-6)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")
    for x, y in zip(results(split, numerics="exact", **options), exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    flax = attention.attention_fn(numerics="exact", **options)
    np.testing.assert_array_equal(results(flax)[0], exact[0])
    q, k, v, column = arrays.values()
    one = attend(q[0], k[0], v[0], sinks=column, numerics="exact", **options)
    np.testing.assert_allclose(one, exact[0][0], atol=1e-6)
    for fewer in (
        flax(q, k, v),
        attend(q, k, v, sinks=column, is_causal=True, numerics="exact", implementation="tiled"),
    ):
        assert np.abs(fewer - exact[0]).max() > 0.01


@pytest.mark.parametrize("module", [hopper, tpu], ids=["hopper", "tpu"])
def test_kernels_without_values_of_this_size_say_so(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "_unsupported_machine", lambda request: None)
    q, v = (jax.ShapeDtypeStruct((1, 256, 1, size), jnp.bfloat16) for size in (64, 128))
    sizes = {hopper: harness.HOPPER_TILES, tpu: harness.TPU_TILES}[module]
    spec = Spec(
        numerics=FLASH, row_max=numerics.StandardMax(), scale=0.1, is_causal=True, block_sizes=sizes
    )
    assert module.unsupported(Request.of(q, q, Extras(), spec, q)) is None
    told = "values of head size 128 with queries of 64"
    assert (module.unsupported(Request.of(q, q, Extras(), spec, v)) or "").startswith(told)


def test_tiles_are_those_of_the_larger_head_size_and_both_have_bounds() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    spec = Spec(numerics=FLASH, row_max=numerics.StandardMax(), scale=0.1)
    assert gpu.block_sizes(q, spec, 192) == gpu.block_sizes(q.update(shape=(1, 256, 1, 192)), spec)
    assert gpu.block_sizes(q, spec, 192) != gpu.block_sizes(q, spec)
    request = Request.of(q, q, Extras(), spec, q.update(shape=(1, 256, 1, 8)))
    request = dataclasses.replace(request, platform="cuda")
    assert str(gpu.unsupported(request)).startswith("head size 8 (it takes 16 to 256)")
