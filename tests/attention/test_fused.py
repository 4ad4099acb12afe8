"""The fused multiply-add, compared with exact fractions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import UNOPTIMIZED, optimized

from lowprec_attn.arithmetic.fused import multiply_add

FACTORS = (np.log2(np.e), 0.125 * np.log2(np.e), 80**-0.5 * np.log2(np.e), 1.0, 2.0**-8)
CANCELLING = np.arange(-20, 21)


def samples(factor: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """x of all sizes; y of all sizes, or near −x·factor, as for the maximum of a row."""
    r = np.random.default_rng(0)
    x = (r.standard_normal(30000) * 10.0 ** r.uniform(-3, 7, 30000)).astype(np.float32)
    x[:3] = (0, -0.0, 2**24 - 1)
    ulps = np.spacing(np.abs(x * factor)) * r.choice(CANCELLING, x.size)
    y = np.where(r.random(x.size) < 0.7, ulps - x * factor, x[::-1]).astype(np.float32)
    return x, y


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even, found among two neighbours."""
    near = np.float32(float(exact))
    sides = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    return min(
        (near, *sides),
        key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1),
    )


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("compiled", ["optimized", "quick", "eager"])
def test_it_rounds_once(factor: float, compiled: str) -> None:
    factor = np.float32(factor)
    x, y = samples(factor)
    function = lambda x, y: multiply_add(x, float(factor), y)  # noqa: E731
    if compiled != "eager":
        options = UNOPTIMIZED if compiled == "quick" else None
        function = optimized(function) if options is None else jax.jit(function)
    found = np.asarray(function(jnp.asarray(x), jnp.asarray(y)))
    # The product of two float32 numbers is exact in float64, and most sums are too.
    in_float64 = x.astype(np.float64) * float(factor) + y
    np.testing.assert_allclose(found, in_float64, rtol=2.0**-24 * 1.001, atol=1e-38)
    for i in range(0, x.size, 15):
        exact = Fraction(float(x[i])) * Fraction(float(factor)) + Fraction(float(y[i]))
        assert found[i] == rounded(exact), (x[i], factor, y[i])
    twice = (x * factor).astype(np.float32) + y
    assert np.mean(found != twice) > (0.3 if factor not in (1, 2.0**-8) else -1)


def test_what_is_not_finite_or_huge_is_the_sum_of_the_product() -> None:
    x = jnp.asarray([-jnp.inf, jnp.inf, jnp.nan, 3e38, -3e38, 1.0, 1.0], jnp.float32)
    y = jnp.asarray([1.0, 1.0, 1.0, 0.0, 3e38, -jnp.inf, jnp.inf], jnp.float32)
    np.testing.assert_array_equal(multiply_add(x, 0.5, y), x * np.float32(0.5) + y)


def test_its_derivative_is_that_of_the_exact_one() -> None:
    x, y = jnp.float32([1.5, 3.0]), jnp.float32([0.25])
    dx, dy = jax.grad(lambda x, y: multiply_add(x, 0.7, y).sum(), (0, 1))(x, y)
    np.testing.assert_allclose(dx, [0.7, 0.7], rtol=1e-6)
    np.testing.assert_allclose(dy, [2.0], rtol=1e-6)
