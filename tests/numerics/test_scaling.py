"""Scales of 8-bit formats: the same rounding as in NumPy, the ends of their range, and names."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scales

from lowprec_attn.numerics import (
    Rounding,
    Scaling,
    get_rounding,
    get_scaling,
    largest,
    round_scaled,
)

pytestmark = pytest.mark.usefixtures("strict_promotion")

SCALES = ("x448", "x256", "x0.5", "tensor", "head", "block16", "block5", "mx", "nvfp4")
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16")
SHAPE = (2, 2, 3, 37, 70)  # no length is a multiple of a block


def array(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Values whose sizes vary by row and column, so that blocks have different scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x *= np.exp2(rng.uniform(-12, 12, (*shape[:-1], 1))) * np.exp2(rng.uniform(-6, 6, shape[-1]))
    return x.astype(np.float32)


# One program for each rounding and shape compiles faster than each of its operations.
_compiled = jax.jit(round_scaled, static_argnums=(1, 2))


def rounded(x: np.ndarray, text: str, axis: int = -1) -> np.ndarray:
    return np.array(_compiled(x, get_rounding(text), axis))


@functools.cache
def in_numpy(fmt: str, scale: str, axis: int = -1) -> np.ndarray:
    """`array()`, rounded without code of the library."""
    x = array()
    b, k, g, *rest = x.shape
    of_heads = scales.round_scaled(x.reshape(b, k * g, *rest), fmt, scale, axis, group=g)
    return of_heads.reshape(x.shape)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_is_that_of_numpy(fmt: str, scale: str, axis: int) -> None:
    x = array()
    result, expected = rounded(x, f"{fmt}/{scale}", axis), in_numpy(fmt, scale, axis)
    # Division by a scale that is no power of two may be compiled to a product with its inverse.
    np.testing.assert_allclose(result, expected, rtol=3e-7, atol=0)
    others = [in_numpy(fmt, other, axis) for other in SCALES if other != scale]
    if axis == -2 and scale in ("mx", "nvfp4"):
        others.append(in_numpy(fmt, scale, -1))
    if fmt != "float16":  # float16 is too fine to tell some scales apart
        assert all(
            np.abs(result - other).max() > 1e-3 * np.abs(result).max() * 2**-9 for other in others
        )


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2"])
def test_a_microscaling_block_is_that_of_the_specification(fmt: str) -> None:
    """As OCP MX 1.0, section 6.3, defines it: the scale 2^(⌊log2 amax⌋ − emax), and saturation."""
    dtype, emax = getattr(ml_dtypes, fmt), {"float8_e4m3fn": 8, "float8_e5m2": 15}[fmt]
    x = array(1, (1, 1, 1, 50, 32)).astype(np.float64)
    result = rounded(x.astype(np.float32), f"{fmt}/mx")[0, 0, 0]
    for row, found in zip(x[0, 0, 0], result, strict=True):
        shared = 2.0 ** (np.floor(np.log2(np.abs(row).max())) - emax)
        most = float(ml_dtypes.finfo(dtype).max)
        codes = np.clip(row / shared, -most, most).astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(found, codes * shared)
        assert np.log2(shared) == np.rint(np.log2(shared))  # an e8m0 number


def test_numbers_that_a_power_of_two_scales_into_the_format_stay() -> None:
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = every[np.isfinite(every)].reshape(1, 1, 1, 1, -1)
    for power in (-20, 0, 20):
        x = every * np.float32(2.0**power)
        # The largest is 448 · 2^power, so the subnormals of e4m3 are kept too.
        for scale in ("tensor", "head", "block1"):
            np.testing.assert_array_equal(rounded(x, f"float8_e4m3fn/{scale}"), x)
    np.testing.assert_array_equal(rounded(every, "float8_e4m3fn/x1"), every)
    # The largest number of a microscaling block is scaled to 256 up to 512, but e4m3 ends at 448.
    blocks = np.repeat(every.reshape(-1, 1), 32, axis=1).reshape(1, 1, 1, -1, 32)
    ends_at = np.where(np.abs(np.frexp(blocks)[0]) == 15 / 16, blocks * np.float32(14 / 15), blocks)
    assert (ends_at != blocks).any()
    np.testing.assert_array_equal(rounded(blocks, "float8_e4m3fn/mx"), ends_at)


@pytest.mark.parametrize("scale", SCALES)
def test_a_scaled_array_rounds_as_before_its_power_of_two(scale: str) -> None:
    x = array(2)
    if not scale.startswith("x"):
        once = rounded(x, f"float8_e4m3fn/{scale}")
        np.testing.assert_array_equal(rounded(x * 16, f"float8_e4m3fn/{scale}"), once * 16)


@pytest.mark.parametrize("scale", SCALES)
def test_zeros_stay_and_one_number_is_kept_to_the_bits_of_the_format(scale: str) -> None:
    zeros = np.zeros((1, 1, 1, 4, 40), np.float32)
    np.testing.assert_array_equal(rounded(zeros, f"float8_e4m3fn/{scale}"), zeros)
    for size in (1e-30, 1.0, 3e30):
        x = zeros.copy()
        x[..., 1, 3] = size
        found = rounded(x, f"float8_e4m3fn/{scale}")
        assert (found[x == 0] == 0).all()
        if not scale.startswith("x"):
            np.testing.assert_allclose(found[..., 1, 3], size, rtol=2**-4)


@pytest.mark.parametrize("scale", SCALES)
def test_nan_stays_and_reaches_no_other(scale: str) -> None:
    x = array(3, (1, 1, 1, 3, 6))  # on a CPU, XLA's maximum of a long row may lose a NaN by itself
    without = x.copy()
    x[0, 0, 0, 2, 5], without[0, 0, 0, 2, 5] = np.nan, 0
    found, expected = (rounded(a, f"float8_e5m2/{scale}") for a in (x, without))
    assert np.isnan(found[0, 0, 0, 2, 5])
    expected[0, 0, 0, 2, 5] = np.nan
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scale", ["x1", "tensor", "head", "block5", "mx"])
def test_infinities_saturate_at_a_scale_of_one(scale: str) -> None:
    """As cvt.satfinite does, and as TransformerEngine computes amax."""
    x = np.zeros((1, 1, 1, 1, 8), np.float32)
    x[..., :4] = np.inf, -np.inf, 3.0, 1e9
    found = rounded(x, f"float8_e4m3fn/{scale}")[0, 0, 0, 0, :4]
    np.testing.assert_array_equal(found, [448, -448, 3, 448])


def test_beyond_the_largest_number_of_a_constant_scale_is_that_number() -> None:
    x = np.array([1.0, 1.03, 1.2, 7.0, -9.0], np.float32).reshape(1, 1, 1, 1, 5)
    np.testing.assert_array_equal(
        rounded(x, "float8_e4m3fn/x256")[0, 0, 0, 0], [1, 1, 1.25, 1.75, -1.75]
    )
    np.testing.assert_allclose(rounded(x, "float8_e4m3fn/x448")[0, 0, 0, 0], [1, 1, 1, 1, -1])


def test_what_a_scale_of_probabilities_keeps() -> None:
    """Alone, e4m3 keeps no P̄ below 2^-10; times 2^8 it keeps all above 2^-18."""
    p = np.exp2(-np.arange(0, 24.0, dtype=np.float32)).reshape(1, 1, 1, 1, -1)
    kept = {
        scale: int((rounded(p, f"float8_e4m3fn/{scale}") > 0).sum()) for scale in ("x1", "x256")
    }
    assert kept == {"x1": 10, "x256": 18}
    assert (rounded(p, "float8_e4m3fn/x448") > 0).sum() >= 19


@pytest.mark.parametrize("scale", ["tensor", "head", "nvfp4"])
def test_a_tile_with_the_amax_of_its_array_rounds_as_the_array_does(scale: str) -> None:
    x = jnp.asarray(array(4, (2, 2, 3, 32, 64)))
    rounding = get_rounding(f"float8_e4m3fn/{scale}")
    assert rounding.scaling is not None
    amax, whole = largest(x, rounding.scaling), round_scaled(x, rounding, -1)
    tile = (slice(None),) * 3 + (slice(16, 32), slice(32, 64))
    np.testing.assert_array_equal(round_scaled(x[tile], rounding, -1, amax), whole[tile])
    assert (round_scaled(x[tile], rounding, -1) != whole[tile]).any()


def test_the_derivative_is_that_of_the_array() -> None:
    x = jnp.asarray(array(5))
    for scale in SCALES:
        rounding = get_rounding(f"float8_e4m3fn/{scale}")
        _, tangent = jax.jvp(lambda x, r=rounding: round_scaled(x, r, -1), (x,), (2 * x,))
        np.testing.assert_array_equal(tangent, 2 * x)


def test_stochastic_codes_are_neighbours_and_right_on_average() -> None:
    x = jnp.full((1, 1, 1, 64, 512), 0.3, jnp.float32)
    bits = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32)
    found = round_scaled(x, get_rounding("float8_e4m3fn/x256:stochastic"), -1, None, bits)
    assert set(np.unique(found * 256)) == {72.0, 80.0}  # 76.8 lies between them
    assert abs(float(found.mean()) - 0.3) < 2e-4


@pytest.mark.parametrize(
    "text",
    [
        "float8_e4m3fn/tensor",
        "float8_e5m2/block128:stochastic",
        "float8_e5m2/x1048576",
        "float8_e5m2/x0.00006103515625",
    ],
)
def test_text_gives_the_rounding_again(text: str) -> None:
    rounding = get_rounding(text)
    assert str(rounding) == text and hash(rounding) == hash(get_rounding(text))
    assert rounding != Rounding(rounding.format, rounding.mode)
    assert rounding.result_format.name == "float32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("float8_e4m3fn/row", "unknown scale 'row'; there are x<factor>, tensor"),
        ("float8_e4m3fn/", "unknown scale ''"),
        ("float8_e4m3fn/block", "unknown scale 'block'"),
        ("float8_e4m3fn/x1.2.3", "unknown scale 'x1.2.3'"),
        ("float8_e4m3fn/x.", "unknown scale 'x.'"),
        (f"float8_e4m3fn/x0.{'0' * 39}1", "scale x1e-40 must have a factor from 1.18e-38 to"),
        (f"float8_e4m3fn/x1{'0' * 39}", r"scale x1e\+39 must have a factor from 1.18e-38 to"),
        ("float8_e4m3fn/x0", "scale x must have a positive number"),
        ("float8_e4m3fn/block0", "scale block must have a positive number"),
        ("bfloat16/tensor", "bfloat16 has the exponents of float32 and needs no scale"),
        ("float8_e4m3fn/mx:up", "unknown rounding mode 'up'"),
    ],
)
def test_what_is_no_scale_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_rounding(text)


def test_part_of_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block2\.5 must have a whole number of rows"):
        Scaling("block", 2.5)


def test_names_of_scales() -> None:
    assert [str(get_scaling(name)) for name in SCALES] == list(SCALES)
