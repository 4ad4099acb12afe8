"""`check` of windows, soft caps, sinks, biases and the gradient of lse, in JAX."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import check
from lowprec_attn.check import candidates, measure, problems, training
from lowprec_attn.check.target import Setting, aligned
from lowprec_attn.commands.main import main
from lowprec_attn.numerics import EXACT, PRESETS
from lowprec_attn.testing import assert_attention

SMALL = {"tokens": 48, "head_size": 16}
KEYWORDS = {
    name: name for name in ("causal", "scale", "mask", "window", "soft_cap", "sinks", "bias")
}


pytestmark = pytest.mark.usefixtures("few_candidates")


def plain(q, k, v, *, causal, scale, mask=None, window=None, soft_cap=None, sinks=None, bias=None):
    """Returns O and lse, operation by operation in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    s = s if bias is None else s + bias.astype(jnp.float32)
    at, cols = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])[None]
    seen = cols <= at if causal else cols >= 0
    if window is not None:
        seen = seen & (at - window[0] <= cols) & (cols <= at + window[1])
    seen = seen[None, None] if mask is None else seen[None, None] & mask
    s = jnp.where(seen, s, -jnp.inf)
    column = jnp.full(s.shape[1], -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    column = column[None, :, None, None]
    m = jnp.maximum(s.max(-1, keepdims=True), column)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0.0, m))
    l = jnp.exp(s - m).sum(-1, keepdims=True) + jnp.exp(column - m)
    p = jnp.exp(s - m) / jnp.where(l == 0, 1.0, l)
    o = jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest")
    return o, (m + jnp.log(jnp.where(l == 0, 1.0, l)))[..., 0].swapaxes(1, 2)


def of(function, dtype="float32", **options):
    given = {"framework": "jax", "keywords": KEYWORDS} | SMALL | options
    return check.check(check.of_function(function, check.Options(**given)), dtype)


def test_a_function_with_all_of_it_has_no_bug():
    report = of(plain)
    assert (report.state, report.not_tried, report.refused) == ("right", (), {})
    tried = report.errors
    assert set(tried["attention sinks"]) == {*measure.RESULTS, "lse", "dsinks"}
    assert set(tried["additive bias"]) == {*measure.RESULTS, "lse", "dbias"}
    assert {"local window", "soft cap", "gradient of lse", "gradient of lse, sinks"} <= set(tried)


def longer(q, k, v, *, window=None, **rest):
    return plain(q, k, v, window=window and (window[0] + 1, window[1]), **rest)


@jax.custom_vjp
def capped(s, cap):
    """A soft cap whose derivative is forgotten."""
    return cap * jnp.tanh(s / cap)


capped.defvjp(lambda s, cap: (capped(s, cap), None), lambda _, ds: (ds, None))


def without_derivative(q, k, v, *, soft_cap=None, **rest):
    if soft_cap is None:
        return plain(q, k, v, **rest)
    # The capped scores are passed as a bias, so that `plain` applies no cap of its own.
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * rest["scale"]
    bias = capped(scores, soft_cap)
    return plain(q * 0, k, v, **rest | {"bias": bias})


@jax.custom_vjp
def negated(x):
    """Returns x; its gradient has the wrong sign."""
    return x


negated.defvjp(lambda x: (x, None), lambda _, dx: (-dx,))


def wrong_sign(q, k, v, *, sinks=None, **rest):
    return plain(q, k, v, sinks=None if sinks is None else negated(sinks), **rest)


def without_sinks(q, k, v, *, sinks=None, **rest):
    o, lse = plain(q, k, v, **rest)
    return o + 0 * (0 if sinks is None else sinks.sum()), lse


def scaled_bias(q, k, v, *, bias=None, **rest):
    return plain(q, k, v, bias=None if bias is None else bias * rest["scale"], **rest)


def stopped_lse(q, k, v, **rest):
    o, lse = plain(q, k, v, **rest)
    return o, jax.lax.stop_gradient(lse)


def lse_in_base_2(q, k, v, **rest):
    o, lse = plain(q, k, v, **rest)
    return o, lse * np.log2(np.e)


MUTANTS = {
    longer: ("the window is off by one: a row sees one key too many before it", {"o", "dq", "dk"}),
    without_derivative: ("the derivative of the soft cap is left out of dS", {"dq", "dk"}),
    wrong_sign: ("dsinks has the wrong sign", {"dsinks"}),
    without_sinks: ("the sinks are missing from l", {"o", "dv", "dsinks", "lse"}),
    scaled_bias: ("the bias is added before the scale, and so multiplied by it", {"o", "dbias"}),
    stopped_lse: ("the gradient of lse is ignored", {"dq", "dk"}),
    lse_in_base_2: ("lse is in base 2", {"lse"}),
}


@pytest.mark.usefixtures("few_features")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_mutant_is_named(mutant):
    name, results = MUTANTS[mutant]
    report = of(mutant)
    assert report.state == "bug"
    assert report.bugs[0].name == name
    assert results <= set(report.bugs[0].results)


@pytest.mark.usefixtures("few_features")
def test_what_every_problem_has_is_asked_for_and_shown(capsys):
    options = ["--soft-cap=5", "--sinks", "--window=20,3", "--bias", "--numerics=exact"]
    code = main(["check", "lowprec_attn:dense", "--tokens=48", "--head-size=16", *options])
    printed = capsys.readouterr().out
    assert code == 0, printed
    first, *_ = printed.split(": right")
    assert first.replace("\n", " ") == (
        "lowprec_attn:dense, bfloat16, a window of 20 and 3, a soft cap of 5, sinks, a bias"
    )
    assert max(map(len, printed.splitlines())) <= 100
    assert "not tried" not in printed and "refused" not in printed


def fixed(q, k, v, sinks):
    """Attention with its own window and soft cap, which takes sinks by the default keyword."""
    return plain(q, k, v, causal=True, scale=q.shape[-1] ** -0.5, window=(12, 0), soft_cap=3.0,
                 sinks=sinks)  # fmt: skip


@pytest.mark.usefixtures("few_features")
def test_a_function_has_its_window_and_cap_by_itself():
    report = of(fixed, causal=True, keywords={}, window=12, soft_cap=3.0, sinks=True)
    assert report.state == "right"
    assert report.setting == Setting(window=(12, 12), soft_cap=3.0, sinks=True)
    with pytest.raises(AssertionError, match="a row sees one key too many before it"):
        assert_attention(fixed, dtype="float32", framework="jax", causal=True, window=11,
                         soft_cap=3.0, sinks=True, **SMALL)  # fmt: skip


def with_lse(q, k, v, *, causal, scale, mask=None, window=None, bias=None):
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, is_causal=causal, scale=scale, local_window_size=window,
        return_residual=True,
    )  # fmt: skip


@pytest.mark.usefixtures("few_features")
def test_the_lse_of_jax_nn_is_rounded_and_has_no_gradient():
    keywords = {n: n for n in ("causal", "scale", "mask", "window", "bias")}
    report = of(with_lse, "bfloat16", keywords=keywords)
    assert [bug.name for bug in report.bugs] == ["the gradient of lse is ignored"]
    assert report.risks == ("lse is rounded to bfloat16: P = exp(S − lse) of it errs by as much",)
    report = of(with_lse, "bfloat16", keywords=keywords, lse_gradient=False)
    assert report.bugs == () and "gradient of lse" in report.not_tried


def test_a_script_shows_what_an_lse_and_a_bias_do(tmp_path, shown):
    """The script covers results beside O, dQ, dK and dV, in a layout with heads first."""

    target = check.of_function(
        heads_first, check.Options(framework="jax", layout="BNTH", causal=True, bias=True, **SMALL)
    )
    report = check.check(target, "float32", seed=1, out=tmp_path)
    (bug,) = report.bugs
    assert bug.name == "lse is in base 2"
    assert np.load(bug.files[0])["q"].shape[1] == 1, "in the function's layout, one head first"
    text = Path(bug.files[1]).read_text()
    assert "lowprec_attn" not in text and len(text.splitlines()) <= 25
    errors = shown(bug.files[1])
    assert set(errors) == {"o", "dq", "dk", "dv", "dbias", "lse"}
    assert min(errors[n] for n in ("lse", "dbias", "dq")) > 0.1
    assert max(errors["o"], errors["dv"]) < 1e-5


def heads_first(q, k, v, bias):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o, lse = lse_in_base_2(q, k, v, causal=True, scale=q.shape[-1] ** -0.5, bias=bias)
    return o.swapaxes(1, 2), lse.swapaxes(1, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jax.nn", "--sinks"], "jax.nn has no sinks; leave out --sinks"),
        (["jax.nn", "--soft-cap=5"], "jax.nn has no soft cap; leave out --soft-cap"),
        (["tokamax", "--soft-cap=5", "--bias"], "tokamax adds the bias before the soft cap"),
        (["lowprec_attn", "--soft-cap=0"], "--soft-cap must be a number of float32 greater than 0"),
        (["lowprec_attn", "--soft-cap=1e300"], "of float32 greater than 0, got 1e+300"),
        (["lowprec_attn", "--window=3,-1"], "each 0 or more, got (3, -1)"),
        (["lowprec_attn", "--window=1,2,3"], "LEFT,RIGHT, or one number for both"),
    ],
)
def test_what_cannot_be_asked_for_is_one_clear_line(arguments, says, capsys):
    assert main(["check", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_window_beyond_every_length_is_none():
    setting = Setting.of(check.Options(window=10**20))
    (problem, *_) = problems.core("float32", causal=True, **SMALL)
    windowed = setting.applied(problem, 0)
    assert windowed.masking.window is not None
    for n, x in measure.exact(windowed).found.items():
        np.testing.assert_array_equal(x, measure.exact(problem).found[n])


def test_new_problems_are_what_their_names_say():
    made = {p.name: p for p in problems.features("float32", causal=True, head_size=16)}
    exact = {name: measure.exact(p) for name, p in made.items()}
    weight = 1 - exact["attention sinks"].p.sum(-1)
    assert 0.3 < np.median(weight) < 0.7
    assert (exact["local window"].p > 0).sum(-1).max() == 21
    assert 1.8 < np.abs(problems.scores(made["soft cap"])).max() <= 2
    without = functools.partial(measure.exact, made["gradient of lse"].replace(dlse=None))
    assert np.linalg.norm(without().found["dq"] - exact["gradient of lse"].found["dq"]) > 1


def test_the_emulation_computes_the_problems_that_it_is_given():
    """Checks several core problems at once, and one with all that they lack, against float64."""
    everything = Setting(window=(12, 3), soft_cap=5.0, sinks=True, bias=True)
    core = problems.core("float32", causal=False, **SMALL)[:2]
    features = {p.name: p for p in problems.features("float32", causal=True, head_size=16)}
    grouped = everything.applied(features["grouped heads"], 0)
    mask = np.broadcast_to(np.arange(130) >= 20, (1, 1, 130, 130))  # the first rows see no key
    dlse = np.ones(grouped.q.shape[:3], np.float32)
    masked = problems.seeing(grouped.masked(mask=mask).replace(dlse=dlse))
    groups = [[everything.applied(p, 0) for p in core], [aligned(masked, "end")]]
    for group in groups:
        found = candidates.Emulation(group, "float32").run(EXACT)
        for i, problem in enumerate(group):
            exact = measure.exact(problem)
            of = {n: x[i : i + 1] if len(group) > 1 else x for n, x in found.items()}
            assert set(of) == set(exact.found)
            # The bound covers float32 sums over up to 150 keys. A missing mask or bias would err by
            # about 1.
            for name, errors in measure.row_errors(of, exact).items():
                assert errors.max() < 1e-4, (problem.name, name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (12, 0)},
        {"soft_cap": 5.0},
        {"sinks": True},
        {"bias": True},
        {"window": (24, 3), "soft_cap": 50.0, "sinks": True, "bias": True},
    ],
    ids=lambda options: " ".join(options) or "none",
)
def test_casts_explain_the_row_sums_of_a_cure_and_no_others(options):
    """The row sum that casts explain follows from float64 alone.

    `normalized_delta`, whose rows of dS sum to zero before the cast, has that row sum; `flash` has
    more than is allowed.
    """
    made = problems.core("bfloat16", causal=True, tokens=64, head_size=32, seed=1)
    made = [Setting(**options).applied(p, 1) for p in made if p.name in training._NAMES[:2]]
    exact = [measure.exact(problem) for problem in made]
    emulation = candidates.Emulation(made, "bfloat16")

    def row_sum(name):
        found = emulation.run(PRESETS[name].replace(kv_block="all"))["dq"]
        of = [{"dq": found[i : i + 1]} for i in range(2)]
        return training.row_sum(training.effects(made, exact, of))

    casts = max(map(training.row_sum_of_casts, made, exact))
    # From some 128 rows, whose errors differ in size, a mean square is known to about a third.
    assert 0.7 < row_sum("normalized_delta") / casts < 1.3
    assert row_sum("normalized_delta") < training.allowed(made, exact) < row_sum("flash")
