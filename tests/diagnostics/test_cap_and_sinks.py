"""Diagnostics with a soft cap, sinks and another value size, against float64 written out here.

The reference is NumPy where a point rounds, and `jax.grad` of plain attention where none does.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lowprec_attn import attention, diagnostics, numerics
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.diagnostics import comparison
from lowprec_attn.numerics import StandardMax

ROWS, HEADS, HEAD_SIZE, VALUE_SIZE = 48, 2, 16, 8
SCALE = HEAD_SIZE**-0.5
HIDDEN = ~np.tri(ROWS, dtype=bool)
PARTS = ("scores", "lse", "exponent", "dp", "delta", "ds")
# (soft cap, sinks). A sink of 12 takes nearly all weight of most rows; a sink of −inf is no sink.
VARIANTS = {
    "cap": (6.0, None),
    "cap nearly reached": (1.5, None),
    "sinks": (None, (1.0, 12.0)),
    "no sink beside one": (None, (-np.inf, 3.0)),
    "cap and sinks": (4.0, (2.0, -1.0)),
}
ARITHMETIC = {
    "flash": numerics.FLASH,
    "published": numerics.PUBLISHED.replace(kv_block="all", tile_grads="float32"),
    "delta_dp_p": numerics.DELTA_DP_P.replace(dp="bfloat16"),
    "normalized_delta": numerics.NORMALIZED_DELTA.replace(dp="bfloat16"),
    "normalized_delta, lse": numerics.NORMALIZED_DELTA.replace(dp="bfloat16", statistics="lse"),
}
norm = np.linalg.norm


def bf16(x):
    return np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


@functools.cache
def arrays():
    """q, k, v, dO [T, N, H]: float64 arrays of bfloat16 values; two query heads share k and v."""
    r = np.random.default_rng(0)
    directions = r.standard_normal((4, HEAD_SIZE))

    def near(heads):
        spread = 0.1 * r.standard_normal((ROWS, heads, HEAD_SIZE))
        # The values lie on a grid, so that q kᵀ is exact in float32.
        return np.round((directions[r.integers(4, size=(ROWS, heads))] + spread) * 32) / 32

    q, k = near(HEADS), near(1)
    v = r.standard_normal((ROWS, 1, VALUE_SIZE)) + r.standard_normal(VALUE_SIZE)
    return tuple(bf16(x) for x in (2 * q, k, v, r.standard_normal((ROWS, HEADS, VALUE_SIZE))))


def of_head(head):
    q, k, v, do = arrays()
    return q[:, head], k[:, 0], v[:, 0], do[:, head]


def scores_of(head, cap):
    """Scores before the cap, scores after it (−inf for hidden keys) and the slope, each [T, S]."""
    q, k, _, _ = of_head(head)
    x = q @ k.T * SCALE
    if cap is None:
        return x, np.where(HIDDEN, -np.inf, x), np.ones_like(x)
    return x, np.where(HIDDEN, -np.inf, cap * np.tanh(x / cap)), 1 / np.cosh(x / cap) ** 2


def lse_of(s, sink):
    return np.log(np.exp(s).sum(1) + np.exp(sink))


def returned_of(variant, num):
    """O [T, N, V] in bfloat16, and lse [T, N] with errors of some 1e-3."""
    cap, sinks = VARIANTS[variant]
    outs = []
    for head in range(HEADS):
        _, s, _ = scores_of(head, cap)
        s = s if num.scores.is_identity else bf16(s)
        lse = lse_of(s, -np.inf if sinks is None else sinks[head])
        o = bf16(np.exp(s - lse[:, None]) @ of_head(head)[2])
        off = 1e-3 * np.random.default_rng(head).standard_normal(ROWS)
        outs.append((o, (lse + off).astype(np.float32).astype(np.float64)))
    return tuple(np.stack(x, axis=1) for x in zip(*outs, strict=True))


def expected(variant, num, head, o, lse):
    """The parts of dQ, row sums and sizes of one head, in float64."""
    cap, sinks = VARIANTS[variant]
    sink = -np.inf if sinks is None else sinks[head]
    _, k, v, do = of_head(head)
    x, s_exact, slope = scores_of(head, cap)
    s = s_exact if num.scores.is_identity else bf16(s_exact)
    dp_exact = do @ v.T
    dp = dp_exact if num.dp.is_identity else bf16(dp_exact)
    if num.statistics == "m_and_l":  # P is formed from them, whatever lse was returned
        lse = lse_of(s, sink)
    p = np.exp((s - lse[:, None]).astype(np.float32).astype(np.float64))
    p_sink = np.exp(sink - lse)[:, None]

    def row_sum(a):
        return a.sum(1, keepdims=True)

    def ds_of(scores):
        of_scores = np.exp(scores - lse_of(scores, sink)[:, None])
        return of_scores * (dp_exact - row_sum(of_scores * dp_exact))

    exact, of_scores = ds_of(s_exact), ds_of(s)
    of_exact_s = np.exp(s - lse_of(s, sink)[:, None])
    factor = np.exp(lse_of(s, sink) - lse)[:, None]
    total = row_sum(p) + p_sink
    first = row_sum(do * o)
    delta = {
        "do_o": first,
        "dp_p": row_sum(dp * p),
        "normalized": row_sum(dp * p) / total,
    }[num.delta]
    after_p = after_dp = row_sum(of_exact_s * dp_exact)
    if num.delta != "do_o":
        after_p, after_dp = row_sum(p * dp_exact) / total, row_sum(p * dp) / total
    if num.delta == "normalized":
        rounded = bf16(slope * p * (dp - first) * SCALE) / SCALE
        rounded = rounded - (delta - first) * bf16(slope * p)
    else:
        rounded = bf16(slope * p * (dp - delta) * SCALE) / SCALE
    stages = {
        "scores": slope * of_scores,
        "lse": slope * factor * of_scores,
        "exponent": slope * p * (dp_exact - after_p),
        "dp": slope * p * (dp - after_dp),
        "delta": slope * p * (dp - delta),
        "ds": rounded,
    }
    found, before = {"exact": slope * exact}, slope * exact
    for name, after in stages.items():
        found[name], before = after - before, after
    found["total"] = rounded - found["exact"]
    seen_sum = row_sum(slope * of_scores)[:, 0] if cap else (p_sink * delta)[:, 0]
    return {n: SCALE * ds @ k for n, ds in found.items()} | {
        "delta_error": (delta - after_dp)[:, 0],
        "p_row_sum": total[:, 0] - 1,
        "ds_row_sum": (row_sum(p * (dp - delta)) - p_sink * delta)[:, 0],
        "rounded_ds_row_sum": row_sum(rounded)[:, 0] - seen_sum,
        "size": 1e-7 * np.abs(dp_exact).max(),
        "flip": 2.0**-8 * SCALE * np.abs(found["exact"]).max() * norm(k, axis=1).max(),
        "largest": (np.abs(np.where(HIDDEN, 0, x)).max(), np.abs(np.where(HIDDEN, 0, s)).max()),
        "dominated": np.mean(of_exact_s.max(1)[1:] >= 1 - 2**-9),
    }


def inputs(dtype=jnp.bfloat16):
    return tuple(jnp.asarray(x, dtype)[None] for x in arrays())


def sinks_of(variant):
    sinks = VARIANTS[variant][1]
    return None if sinks is None else jnp.asarray(sinks, jnp.float32)


@functools.partial(jax.jit, static_argnames=("num", "cap"))
def compared(q, k, v, do, sinks, returned, *, num, cap):
    spec = Spec(numerics=num, row_max=StandardMax(), scale=SCALE, soft_cap=cap, is_causal=True)
    return comparison.compare(q, k, v, do, Extras(sinks=sinks), spec, returned)


# Every arithmetic with cap and sinks, and every other variant with an arithmetic of its own.
PARTS_OF = [
    *(("cap and sinks", name) for name in ARITHMETIC),
    ("cap", "published"),
    ("cap nearly reached", "normalized_delta"),
    ("sinks", "flash"),
    ("no sink beside one", "delta_dp_p"),
]


@pytest.mark.parametrize(("variant", "name"), PARTS_OF)
def test_parts_and_row_sums_are_those_of_float64(variant, name):
    num, (cap, _) = ARITHMETIC[name], VARIANTS[variant]
    o, lse = returned_of(variant, num)
    returned = diagnostics.Returned(
        jnp.asarray(o, jnp.bfloat16)[None], jnp.asarray(lse, jnp.float32)[None]
    )
    result = compared(*inputs(), sinks_of(variant), returned, num=num, cap=cap)
    rows = result.gradients
    for head in range(HEADS):
        wanted = expected(variant, num, head, o[:, head], lse[:, head])
        residue = np.sqrt(ROWS) * SCALE * wanted["size"] * np.abs(arrays()[1]).max()
        for part in ("exact", *PARTS, "total"):
            found = getattr(rows.dq, "error" if part == "total" else part)
            found = np.zeros((ROWS, 1)) if found is None else SCALE * np.asarray(found)[0, :, head]
            bound = 2e-4 * norm(wanted[part]) + residue
            if part in ("scores", "ds", "dp", "total"):
                # Numbers that differ slightly may round differently; the largest one counts here.
                bound += 0.02 * norm(wanted[part]) + wanted["flip"]
            assert norm(found - wanted[part]) <= bound, (head, part)
        for row_sum, is_cast in (
            ("delta_error", 0),
            ("ds_row_sum", 0),
            ("rounded_ds_row_sum", 0.05),
        ):
            found = np.asarray(getattr(rows, row_sum))[0, :, head, 0]
            bound = max(2e-4, is_cast) * norm(wanted[row_sum]) + 4 * np.sqrt(ROWS) * wanted["size"]
            assert norm(found - wanted[row_sum]) <= bound, (head, row_sum)
        found = np.asarray(rows.p_row_sum_error)[0, :, head, 0]
        # A capped score is c tanh(x / c) in float32, with an error of some ulp of c.
        atol = 3e-7 + 2.0**-22 * (cap or 0)
        np.testing.assert_allclose(found, wanted["p_row_sum"], atol=atol, err_msg=str(head))
        before, after = wanted["largest"]
        np.testing.assert_allclose(
            np.max(result.scores.score_maximum[0, :, head]), after, rtol=0 if cap is None else 1e-6
        )
        if cap is not None:
            largest = float(np.max(result.scores.uncapped_maximum[0, :, head]))
            assert largest == before > cap > 0
        share = np.mean(np.asarray(result.scores.dominated)[0, 1:, head])
        assert share == pytest.approx(wanted["dominated"])
        assert name != "flash" or norm(wanted["delta"]) > 3 * residue


@pytest.mark.parametrize("variant", ["cap nearly reached", "no sink beside one", "cap and sinks"])
def test_exact_arithmetic_has_the_gradient_of_plain_attention(variant):
    cap, sinks = VARIANTS[variant]
    q, k, v, do = arrays()

    def loss(q):
        s = jnp.einsum("tnh,sh->nts", q, k[:, 0]) * SCALE
        s = s if cap is None else cap * jnp.tanh(s / cap)
        s = jnp.where(HIDDEN, -jnp.inf, s)
        if sinks is not None:
            column = jnp.broadcast_to(jnp.asarray(sinks)[:, None, None], (HEADS, ROWS, 1))
            s = jnp.concatenate([s, column], axis=-1)
        return jnp.sum(do * jnp.einsum("nts,sh->tnh", jax.nn.softmax(s)[..., :ROWS], v[:, 0]))

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        exact = np.asarray(jax.grad(loss)(jnp.asarray(q, jnp.float64)))
    of_float32 = inputs(jnp.float32)
    rows = compared(*of_float32, sinks_of(variant), None, num=numerics.EXACT, cap=cap).gradients
    size = norm(exact)
    assert size > 0.1
    assert norm(SCALE * np.asarray(rows.dq.exact)[0] - exact) < 1e-5 * size
    assert norm(SCALE * np.asarray(rows.dq.error)[0]) < 1e-5 * size
    for row_sum in (rows.ds_row_sum, rows.rounded_ds_row_sum, rows.p_row_sum_error):
        assert np.max(np.abs(row_sum)) < 1e-5
    # Without a cap or sinks the gradient is another one.
    plain = compared(*of_float32, None, None, num=numerics.EXACT, cap=None).gradients
    assert norm(SCALE * np.asarray(plain.dq.exact)[0] - exact) > 0.02 * size


# `test_sources.py` has δ from dP ∘ P; here is one arithmetic for each exponent and each correction.
RUN = {name: ARITHMETIC[name] for name in ("flash", "published", "normalized_delta")} | {
    "matched": numerics.MATCHED,
    "flash_attention_3": numerics.FLASH_ATTENTION_3,
    "corrected_after_cast": numerics.CORRECTED_AFTER_CAST,
}


# `after_cast` is refused with a cap, because its rows of dS would not sum to zero.
TOTALS_OF = [
    *(("cap and sinks", name) for name in RUN if name != "corrected_after_cast"),
    ("sinks", "corrected_after_cast"),
]


@pytest.mark.parametrize(("variant", "name"), TOTALS_OF)
def test_the_total_is_the_error_of_the_dq_of_the_implementation(variant, name):
    """The emulated O must also equal the implementation's O, bit for bit."""
    cap, _ = VARIANTS[variant]
    num = RUN[name].replace(grads="float32", output="bfloat16", kv_block=16)
    if name == "published":
        num = num.replace(kv_block="all")
    q, k, v, do = inputs(jnp.float32)
    sinks = sinks_of(variant)
    call = functools.partial(
        attention.dot_product_attention,
        numerics=num,
        is_causal=True,
        scale=SCALE,
        logits_soft_cap=cap,
        implementation="tiled",
        return_residual=True,
    )

    @jax.jit
    def run(q):
        (o, lse), pull = jax.vjp(lambda q: call(q, k, v, sinks=sinks), q)
        return o, lse, pull((do.astype(o.dtype), jnp.zeros_like(lse)))[0]

    returned = diagnostics.Returned(*run(q))
    signals = jax.jit(
        lambda: diagnostics.attention_signals(
            q, k, v, do, numerics=num, is_causal=True, scale=SCALE, logits_soft_cap=cap,
            sinks=sinks, x=jnp.eye(ROWS)[None], returned=returned,
        )
    )()  # fmt: skip
    measured = np.asarray(signals["query_weight_gradient_error_measured"])
    total = np.asarray(signals["query_weight_gradient_error_from_total"])
    assert np.all((measured > 5e-4) & (measured < 0.1))
    np.testing.assert_allclose(total, measured, rtol=0.05)
    if name == "flash_attention_3":  # its implementation forms no S, the emulation does
        return
    outputs = compared(q, k, v, do, sinks, None, num=num, cap=cap).outputs
    np.testing.assert_array_equal(outputs.output, returned.o)


def test_what_no_attention_computes_is_refused():
    q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    call = functools.partial(diagnostics.attention_signals, q, q, q, is_causal=True)
    with pytest.raises(ValueError, match=r"after_cast with logits_soft_cap=5.0 \(rows of dS do"):
        call(numerics=numerics.CORRECTED_AFTER_CAST, logits_soft_cap=5.0)
    with pytest.raises(ValueError, match=r"mean_key=subtracted with sinks \(all keys enter the"):
        call(numerics=numerics.FLASH.replace(mean_key="subtracted"), sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match=r"do must have shape \[1, 8, 2, 16\], got \(1, 8, 2, 8\)"):
        call(q[..., :8], numerics="flash")
    with pytest.raises(ValueError, match="logits_soft_cap must be greater than 0, or None"):
        call(numerics="flash", logits_soft_cap=0.0)
    with pytest.raises(ValueError, match="sinks must be 2 numbers"):
        call(numerics="flash", sinks=jnp.zeros(3))
