"""`round_to` on every code, midpoint and boundary of each format; stochastic rounding; bits."""

from collections.abc import Callable
from fractions import Fraction

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from boundaries import (
    HARDWARE,
    LONG,
    NARROW,
    SHORTENED,
    bits_of,
    boundaries,
    codes,
    dtype_of,
    expected,
    sampled_boundaries,
)
from compiling import optimized

from lowprec_attn import numerics
from lowprec_attn.numerics import FORMATS, counter_bits, round_to

pytestmark = pytest.mark.usefixtures("strict_promotion")

# One line of code drops bits of the longer significands: the ends, TF32 and one between.
SOME_LONG = ("f32_m8", "f32_m10", "f32_m15", "f32_m22")
assert set(SOME_LONG) < set(LONG)


# One program for each format and shape compiles faster than each of its operations.
compiled = jax.jit(round_to, static_argnums=(1, 2))


def assert_same_bits(result: jax.Array, expected_: np.ndarray) -> None:
    """Checks that bits are equal, including signed zeros; any two NaNs count as equal."""
    result = np.asarray(result)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected_))
    keep = ~np.isnan(expected_)
    np.testing.assert_array_equal(bits_of(result)[keep], bits_of(expected_)[keep])


@pytest.mark.parametrize("fmt", NARROW)
def test_nearest_agrees_with_the_oracle_on_every_boundary_and_random_patterns(fmt: str) -> None:
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    x = np.concatenate([boundaries(fmt), patterns])
    assert_same_bits(optimized(lambda x: round_to(x, fmt))(jnp.asarray(x)), expected(x, fmt))


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", [lambda f: f, jax.vmap], ids=["eager", "vmap"])
def test_nearest_does_not_depend_on_how_it_is_called(fmt: str, how: Callable) -> None:
    x = boundaries(fmt)
    assert_same_bits(how(lambda x: round_to(x, fmt))(jnp.asarray(x)), expected(x, fmt))


@pytest.mark.parametrize("fmt", SOME_LONG)
def test_nearest_agrees_with_the_oracle_beyond_bfloat16(fmt: str) -> None:
    x = sampled_boundaries(fmt)
    result = optimized(lambda x: round_to(x, fmt))(jnp.asarray(x))
    assert_same_bits(result, expected(x, fmt))
    finite = np.isfinite(x)
    kept = bits_of(result)[finite] & np.uint32((1 << (23 - FORMATS[fmt].fraction_bits)) - 1)
    assert not kept.any()


@pytest.mark.parametrize("fmt", SHORTENED)
def test_oracle_of_short_significands_agrees_with_rational_arithmetic(fmt: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(200).astype(np.float32) * np.float32(2) ** rng.integers(-130, 120, 200)
    ties = codes(fmt)[np.isfinite(codes(fmt))].astype(np.float64)
    ties = ((ties[1:] + ties[:-1]) / 2).astype(np.float32)
    x = np.concatenate([x.astype(np.float32), rng.choice(ties, 100)])
    grid = [Fraction(float(c)) for c in codes(fmt) if np.isfinite(c)]
    values = np.array([float(g) for g in grid])
    for value, rounded in zip(x, plain.shorten(x, FORMATS[fmt].fraction_bits), strict=True):
        i = int(np.clip(np.searchsorted(values, value, "right") - 1, 0, len(grid) - 2))
        below, above = Fraction(float(value)) - grid[i], grid[i + 1] - Fraction(float(value))
        if below == above:
            last_bit = 1 << (23 - FORMATS[fmt].fraction_bits)
            nearest = values[i + 1] if bits_of(np.float32(values[i])) & last_bit else values[i]
        else:
            nearest = values[i] if below < above else values[i + 1]
        assert rounded == nearest


def test_float32_passes_unchanged() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    assert_same_bits(round_to(jnp.asarray(x), "float32"), x)


@pytest.mark.parametrize("fmt", NARROW)
def test_formats_describe_their_dtypes(fmt: str) -> None:
    values = codes(fmt)
    finite = values[np.isfinite(values)]
    described = FORMATS[fmt]
    assert finite.max() == described.max_finite
    assert finite[finite > 0].min() == np.ldexp(1, described.min_exponent - described.fraction_bits)
    assert (described.overflow == "inf") == np.isinf(values).any()
    assert_same_bits(finite.astype(described.dtype).astype(np.float32), finite)  # type: ignore[arg-type]
    for other in FORMATS:
        if other in HARDWARE or other == "float32":
            with np.errstate(over="ignore", invalid="ignore"):
                fits = np.array_equal(finite.astype(dtype_of(other)).astype(np.float32), finite)
            assert described.is_exact_in(dtype_of(other)) == fits, other


@pytest.mark.parametrize("fmt", HARDWARE)
def test_stochastic_agrees_with_gfloat_given_the_same_bits(fmt: str) -> None:
    rng = np.random.default_rng(3)
    # Normal numbers of the format, all of which drop the same number of bits.
    low, high = FORMATS[fmt].min_exponent, min(FORMATS[fmt].min_exponent * -1, 30) - 1
    x = np.ldexp(rng.uniform(1, 2, 4096), rng.integers(max(low, -30), high, 4096))
    x = (x * rng.choice([-1, 1], x.shape)).astype(np.float32)
    drop = 23 - FORMATS[fmt].fraction_bits
    bits = rng.integers(0, 1 << 32, x.shape, np.uint32)
    names = {"float16": "binary16", "float8_e4m3fn": "ocp_e4m3", "float8_e5m2": "ocp_e5m2"}
    oracle = gfloat.round_ndarray(
        getattr(gfloat.formats, f"format_info_{names.get(fmt, fmt)}"),
        x.astype(np.float64),
        gfloat.RoundMode.StochasticFastest,
        srbits=(bits & ((1 << drop) - 1)).astype(np.int64),
        srnumbits=drop,
    )
    result = compiled(x, fmt, "stochastic", bits)
    assert_same_bits(result, oracle.astype(np.float32))


@pytest.mark.parametrize("fmt", NARROW)
def test_stochastic_never_moves_a_value_of_the_format(fmt: str) -> None:
    x = codes(fmt)
    rounded = optimized(lambda x, bits: round_to(x, fmt, "stochastic", bits))
    for bits in (_bits(np.arange(x.size)), np.full(x.shape, 0xFFFF_FFFF, np.uint32)):
        assert_same_bits(rounded(x, bits), x)


@pytest.mark.parametrize("fmt", NARROW)
def test_stochastic_hits_the_two_neighbours_without_bias(fmt: str) -> None:
    rng = np.random.default_rng(4)
    values = codes(fmt)
    values = values[np.isfinite(values)].astype(np.float64)
    # Fifty gaps anywhere in the format, including subnormals, with a point inside each.
    i = np.concatenate([rng.integers(0, len(values) - 1, 48), [len(values) // 2, len(values) - 2]])
    low, high = values[i], values[i + 1]
    share = rng.uniform(0.05, 0.95, i.shape)
    x = (low + share * (high - low)).astype(np.float32)
    share = (x - low) / (high - low)
    draws = 20_000
    bits = counter_bits(
        jnp.array([3, 4], jnp.uint32), np.arange(draws)[:, None], np.arange(i.size)[None]
    )
    wide = jnp.broadcast_to(jnp.asarray(x)[None], bits.shape)
    result = np.asarray(compiled(wide, fmt, "stochastic", bits)).astype(np.float64)
    assert np.all((result == low) | (result == high))
    up = (result == high).mean(0)
    # For a mean of independent draws, five standard deviations fail in one of 30,000 seeds. The
    # seed is fixed.
    assert np.all(np.abs(up - share) < 5 * np.sqrt(share * (1 - share) / draws))


@pytest.mark.parametrize("fmt", NARROW)
def test_toward_zero_is_the_largest_value_of_the_format_that_is_no_larger(fmt: str) -> None:
    patterns = np.random.default_rng(6).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    x = np.concatenate([boundaries(fmt), patterns])
    finite = np.isfinite(x)
    values = codes(fmt)
    values = values[np.isfinite(values) & (values >= 0)]
    below = values[np.searchsorted(values, np.abs(x[finite]), "right") - 1]
    oracle = expected(x, fmt)  # infinity and NaN round as to nearest
    oracle[finite] = np.copysign(below, x[finite])
    result = optimized(lambda x: round_to(x, fmt, "toward_zero"))(jnp.asarray(x))
    assert_same_bits(result, oracle)


@pytest.mark.parametrize("fmt", SOME_LONG)
def test_toward_zero_drops_bits_beyond_bfloat16(fmt: str) -> None:
    x = sampled_boundaries(fmt)
    x = x[~np.isnan(x)]
    mask = np.uint32((1 << (23 - FORMATS[fmt].fraction_bits)) - 1)
    result = optimized(lambda x: round_to(x, fmt, "toward_zero"))(jnp.asarray(x))
    np.testing.assert_array_equal(bits_of(result), bits_of(x) & ~mask)


@pytest.mark.parametrize("mode", ["error_random_sign", "error_positive", "error_negative"])
@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float8_e4m3fn", "bf16_m3"])
def test_injected_error_has_the_size_of_nearest_and_the_sign_told(fmt: str, mode: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(4096) * 3).astype(np.float32)
    bits = rng.integers(0, 1 << 32, x.shape, np.uint32)
    size = np.abs(expected(x, fmt).astype(np.float64) - x)
    result = np.asarray(compiled(x, fmt, mode, bits))
    moved = result.astype(np.float64) - x
    # x ± size is computed in float32, with an error of half an ulp of the result.
    assert np.all(np.abs(np.abs(moved) - size) <= np.spacing(np.abs(result)) / 2)
    large = size > 1e-6
    assert large.mean() > 0.9
    if mode == "error_random_sign":
        np.testing.assert_array_equal(moved[large] < 0, (bits >> 31 == 1)[large])
        assert abs(np.sign(moved[large]).mean()) < 5 / np.sqrt(large.sum())
    else:
        assert np.all(np.sign(moved[large]) == (1 if mode == "error_positive" else -1))
    exact = codes(fmt)
    # The sum x ± 0 is float32 arithmetic, in which XLA flushes subnormals.
    exact = exact[np.isfinite(exact) & ((np.abs(exact) >= 2.0**-126) | (exact == 0))]
    unmoved = compiled(exact, fmt, mode, np.zeros(exact.shape, np.uint32))
    np.testing.assert_array_equal(unmoved, exact)


def test_injection_beyond_the_finite_numbers_follows_nearest() -> None:
    x = jnp.array([1e6, -1e6, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(
        round_to(x, "float16", "error_positive"),
        np.array([np.inf, -np.inf, np.inf, -np.inf, np.nan]),
    )


def _bits(*counters: object, seed: tuple[int, int] = (0, 0)) -> np.ndarray:
    return np.asarray(counter_bits(jnp.array(seed, jnp.uint32), *counters))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [(0, 0), (0, 1), (1, 0), (0xFFFF_FFFF, 0xFFFF_FFFF), (17, 4)])
def test_counter_bits_are_uniform_and_independent(seed: tuple[int, int]) -> None:
    # Batch 0, head 0; rows and columns are counted as in a score matrix.
    rows, cols = np.arange(512)[:, None], np.arange(512)[None]
    bits = _bits(0, 0, 0, rows, cols, 0, seed=seed)
    n = bits.size
    for shift in (0, 8, 16, 24):
        counts = np.bincount(((bits >> shift) & 0xFF).ravel(), minlength=256)
        chi2 = np.sum((counts - n / 256) ** 2 / (n / 256))
        # 255 degrees of freedom have mean 255 and standard deviation √510.
        assert abs(chi2 - 255) < 5 * np.sqrt(510)
    others = {
        "next row": np.roll(bits, 1, 0),
        "next column": np.roll(bits, 1, 1),
        "transposed": bits.T,
        "next point": _bits(1, 0, 0, rows, cols, 0, seed=seed),
        "next batch": _bits(0, 1, 0, rows, cols, 0, seed=seed),
        "next head": _bits(0, 0, 1, rows, cols, 0, seed=seed),
        "next step": _bits(0, 0, 0, rows, cols, 256, seed=seed),
        "next seed": _bits(0, 0, 0, rows, cols, 0, seed=(seed[0], seed[1] ^ 1)),
    }
    for what, other in others.items():
        # Off the diagonal, each of the 32 bits agrees with its counterpart half of the time.
        same = ~(bits ^ other)
        off_diagonal = rows != cols if what == "transposed" else np.ones_like(bits, bool)
        for position in (0, 7, 15, 23, 31):
            agree = ((same >> position) & 1)[off_diagonal]
            assert abs(agree.mean() - 0.5) < 5 * 0.5 / np.sqrt(agree.size), (what, position)


def test_counter_bits_repeat_no_more_than_chance() -> None:
    rows, cols = np.arange(1024)[:, None], np.arange(1024)[None]
    bits = _bits(0, 0, 0, rows, cols, 0)
    # Among n draws from 2^32 values, the number of colliding pairs is Poisson with mean n² / 2^33.
    n = bits.size
    collisions, expectation = n - np.unique(bits).size, n**2 / 2**33
    assert collisions < expectation + 5 * np.sqrt(expectation)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: round_to(jnp.ones(2, jnp.bfloat16), "float16"), "bfloat16"),
        (lambda: round_to(jnp.ones(2), "bfloat15"), "'bfloat15'"),
        (lambda: round_to(jnp.ones(2), "bfloat16", "stochastic"), "'stochastic'"),
        (lambda: round_to(jnp.ones(2), "bfloat16", "error_random_sign"), "'error_random_sign'"),
        (lambda: round_to(jnp.ones(2), "bfloat16", "upwards"), "'upwards'"),  # type: ignore[arg-type]
        (lambda: numerics.Rounding(FORMATS["float16"], "upwards"), "'upwards'"),  # type: ignore[arg-type]
        (lambda: numerics.get_rounding("bfloat16:upwards"), "'upwards'"),
        (lambda: numerics.get_rounding("float17"), "'float17'"),
        (lambda: numerics.get_rounding(8), "8"),  # type: ignore[arg-type]
    ],
)
def test_bad_roundings_say_what_is_wrong(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
