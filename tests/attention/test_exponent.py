"""How exponents are formed, shown by large scores and compared with the NumPy emulation.

At scores of 3e4, float32 numbers are 2^-9 apart. Rounding c m loses that much, and the largest P̄
is 2 to that power. The factor is common to a row in a step. While m stays, it cancels in Ō / l
except for the rounding of P̄. It remains in P = exp(S − lse). What is lost where m moves is in
`test_large_scores.py`.
"""

import dataclasses
import itertools
import logging

import harness
import jax
import numpy as np
import pytest
from jax import lax
from kernel_calls import kernel_call, run, run_plain
from points import closer

from lowprec_attn import numerics
from lowprec_attn.arithmetic import products
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention import dispatch
from lowprec_attn.numerics import EXACT, FLASH, Numerics, StandardMax

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# Products of q and k are exact. S is too if the scale is a power of two.
CASE = harness.Case(
    batch=1, rows=20, keys=20, is_causal=True, scale=0.0625, values="exact_large_scores"
)
ONE_LSE = EXACT.replace(statistics="lse")
NUMERICS = {
    "exact": ONE_LSE,
    "scores": ONE_LSE.replace(scores="bfloat16"),
    "m_and_l, P̄ in bfloat16": EXACT.replace(probs="bfloat16", probs_bwd="bfloat16"),
}
REACHED = {
    "exact": {"dq", "dk", "dv"},
    "scores": {"dq", "dk", "dv"},
    "m_and_l, P̄ in bfloat16": {"out", "dq", "dk"},
}


def by_exponent(num: Numerics, *exponents: str) -> list[Numerics]:
    return [num.replace(exponent=x) for x in exponents or ("scale_first", "shift_first")]


PAIRS = list(itertools.combinations(("scale_first", "shift_first", "unfused"), 2))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", NUMERICS)
def test_each_exponent_is_there(name: str, pair: tuple[str, str]) -> None:
    how, arrays = harness.IMPLEMENTATIONS["tiled_odd"], harness.inputs(CASE)
    chosen = by_exponent(NUMERICS[name], *pair)
    first, second = (harness.run_plain(CASE, arrays, how.numerics(n)) for n in chosen)
    results = [harness.run(how, CASE, arrays, n) for n in chosen]
    assert REACHED[name] <= closer(results[0], first, second)
    assert REACHED[name] <= closer(results[1], second, first)


@pytest.mark.parametrize(
    ("name", "exponents"),
    [
        ("exact", ("scale_first", "shift_first")),
        ("m_and_l, P̄ in bfloat16", ("shift_first", "scale_first")),
    ],
)
def test_either_exponent_is_there_in_the_gpu_kernels(name: str, exponents: tuple[str, str]) -> None:
    """In P of the backward pass, and in P̄ of the forward pass, where the next test has another."""
    calls = [
        kernel_call("gpu", CASE, n, sizes=harness.GPU_TALL)
        for n in by_exponent(NUMERICS[name], *exponents)
    ]
    on, off = (run_plain(CASE, call) for call in calls)
    assert REACHED[name] <= closer(run(CASE, calls[0]), on, off)


@pytest.mark.parametrize("implementation", ["tiled_odd", "gpu"])
def test_products_are_multiplied_once_where_the_scale_is_no_power_of_two(
    implementation: str,
) -> None:
    """Multiplying by the scale first, and then S by log2 e, would round c m differently."""
    case = dataclasses.replace(CASE, scale=0.0883883)
    how, arrays = harness.IMPLEMENTATIONS[implementation], harness.inputs(case)
    num = NUMERICS["m_and_l, P̄ in bfloat16"].replace(exponent="scale_first")
    once = harness.run_plain(case, arrays, how.numerics(num))
    twice = harness.run_plain(case, arrays, how.numerics(num.replace(scores="f32_m22")))
    assert "out" in closer(harness.run(how, case, arrays, num), once, twice)


def test_a_product_that_is_rounded_by_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant has c S − c m = 0 for the largest S, as if S − m were formed first."""

    def twice(x: jax.Array, factor: float, y: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x * np.float32(factor)) + y

    monkeypatch.setattr(products, "multiply_add", twice)
    how, arrays = harness.IMPLEMENTATIONS["dense"], harness.inputs(CASE)
    scale, shift = (harness.run_plain(CASE, arrays, n) for n in by_exponent(ONE_LSE))
    harness.trace_anew()
    mutant = harness.run(how, CASE, arrays, ONE_LSE.replace(exponent="scale_first"))
    harness.trace_anew()
    with pytest.raises(AssertionError, match="between on and off"):
        closer(mutant, scale, shift)


def asked(num: Numerics, **options: object) -> Request:
    """A bfloat16 request that a GPU or TPU may serve."""
    spec = Spec(numerics=num, row_max=StandardMax(), scale=0.125, is_causal=True)
    shape = (1, 256, 2, 64)
    request = Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=np.dtype("bfloat16"))
    return dataclasses.replace(request, **options)


BOTH = "shift_first, backward scale_first"


@pytest.mark.parametrize(
    ("implementation", "num", "told"),
    [
        ("tiled", FLASH, "shift_first"),
        ("dense", FLASH.replace(exponent="scale_first"), "scale_first"),
        ("tiled", numerics.TORCH_FLASH, "unfused"),
        ("gpu", FLASH, BOTH),
        ("gpu", EXACT, "shift_first"),
        ("gpu", numerics.PUBLISHED, BOTH),
        ("gpu", FLASH.replace(statistics="m_and_l"), "shift_first"),
        ("gpu", FLASH.replace(exponent="shift_first"), "shift_first"),
        ("hopper", FLASH, "scale_first"),
        ("hopper", numerics.MATCHED, "whole_max"),
        ("tpu", FLASH, "shift_first"),
    ],
)
def test_implementations_tell_which(implementation: str, num: Numerics, told: str) -> None:
    assert dispatch.IMPLEMENTATIONS[implementation].exponent_of(asked(num)) == told


def test_kernels_refuse_the_other_by_name() -> None:
    for name, exponent in (("hopper", "shift_first"), ("tpu", "scale_first")):
        module = dispatch.IMPLEMENTATIONS[name]
        reason = module._unsupported_numerics
        argument = asked(FLASH.replace(exponent=exponent))
        found = reason(argument.spec.numerics if name == "hopper" else argument)
        other = {"hopper": "scale_first or whole_max", "tpu": "shift_first"}[name]
        assert found == f"exponent={exponent} (it takes {other})"


def test_the_log_tells_it_once(caplog: pytest.LogCaptureFixture) -> None:
    num = FLASH.replace(kv_block=9999, exponent="scale_first")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            dispatch.resolve_by_platform(asked(num, dtype=np.dtype("float32")), None)
    (message,) = [r.message for r in caplog.records]
    assert "(scale_first)" in message


def test_a_rounded_shift_needs_the_difference() -> None:
    with pytest.raises(
        ValueError, match=r"shift=bfloat16 rounds S − m.*use exponent='shift_first'"
    ):
        FLASH.replace(shift="bfloat16", exponent="scale_first")
