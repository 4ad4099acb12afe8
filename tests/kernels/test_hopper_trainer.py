"""The trainer's Hopper kernels (cross-entropy, products with GELU) against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.product_races import check_products
from gpu.targets import A100, B200, H200, mesh_of
from trainer_oracles import BFLOAT16, exact_cross_entropy, exact_gelu, logits_and_targets

from lowprec_attn.gpt2 import kernels
from lowprec_attn.gpt2.layers import gelu, mlp
from pallas_kernels.gpu.block_sizes import is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper.attention import is_available

if not is_available():
    pytest.skip(f"JAX {jax.__version__} (the kernels need 0.11.2)", allow_module_level=True)

from pallas_kernels.gpu.hopper import cross_entropy, gelu_products
from pallas_kernels.gpu.hopper.gelu_products import Tile

pytestmark = pytest.mark.usefixtures("no_races", "products_are_checked")

DEPTH, COLUMNS = 192, 512


@pytest.fixture
def products_are_checked(monkeypatch):
    check_products(monkeypatch)


def operands(rows, depth=DEPTH, columns=COLUMNS, scale=2.0):
    """x or d_y [rows, depth] and w [depth, columns], bfloat16; their product has size `scale`."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, depth))
    w = scale * rng.standard_normal((depth, columns)) / depth**0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


def check_value(x, w, h, y):
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    # The float32 sum of these terms, each up to 16 in size, before it is rounded.
    np.testing.assert_allclose(np.asarray(h, np.float64), exact, rtol=BFLOAT16, atol=2.0**-16)
    expected, _ = exact_gelu(np.asarray(h, np.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=BFLOAT16, atol=2.0**-18)


def check_gradient(d_y, w, h, d_h):
    """d_y wᵀ is rounded before the multiplication; next to a tie, either rounding is right."""
    exact = np.asarray(d_y, np.float64) @ np.asarray(w, np.float64)
    _, slope = exact_gelu(np.asarray(h, np.float64))
    near, far = (
        np.asarray(jnp.asarray(exact + error, jnp.bfloat16), np.float64) * slope
        for error in (-(2.0**-16), 2.0**-16)  # the error of a sum, as above
    )
    found = np.asarray(d_h, np.float64)
    margin = BFLOAT16 * np.maximum(abs(near), abs(far)) + 2.0**-16
    assert np.all(found >= np.minimum(near, far) - margin)
    assert np.all(found <= np.maximum(near, far) + margin)


# Rows of one tile, of a tile and a half, and of clusters whose last has rows for one program only.
@pytest.mark.parametrize("rows", [64, 328, 712])
@pytest.mark.parametrize("tile", [Tile(programs=4), Tile(programs=3, together=1)], ids=str)
def test_a_product_and_its_gelu_are_those_of_float64(rows, tile):
    x, w = operands(rows)
    check_value(x, w, *gelu_products.product_and_gelu(x, w, tile=tile, interpret=True))


@pytest.mark.parametrize("rows", [64, 328, 712])
@pytest.mark.parametrize("tile", [Tile(programs=4), Tile(programs=3, together=1)], ids=str)
def test_the_gradient_of_gelu_is_that_of_float64(rows, tile):
    (d_y, w), (h, _) = operands(rows), operands(rows, COLUMNS, COLUMNS)
    d_h = gelu_products.gelu_gradient_of_product(d_y, w.T, h, tile=tile, interpret=True)
    check_gradient(d_y, w, h, d_h)


def test_tiles_change_no_bit():
    x, w = operands(328)
    h = operands(328, COLUMNS, COLUMNS)[0]
    tiles = [Tile(), Tile(programs=3, together=1), Tile(programs=4, stages=2)]
    first, *others = (
        (
            *gelu_products.product_and_gelu(x, w, tile=tile, interpret=True),
            gelu_products.gelu_gradient_of_product(x, w.T, h, tile=tile, interpret=True),
        )
        for tile in tiles
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_gelu_of_extreme_numbers_is_finite():
    x, w = operands(64, scale=1e4)
    h, y = gelu_products.product_and_gelu(x, w, interpret=True)
    exact, _ = exact_gelu(np.asarray(h, np.float64))
    # In float64, 1 + tanh cancels; the kernel uses one exponential instead.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=BFLOAT16, atol=2.0**-50)
    d_h = gelu_products.gelu_gradient_of_product(x, w.T / 1e4, h, interpret=True)
    assert np.all(np.isfinite(np.asarray(d_h, np.float32)))
    np.testing.assert_array_equal(np.asarray(d_h)[np.asarray(h) < -20], 0)


@pytest.mark.parametrize(
    ("shape", "bad"),
    [
        ((0, 192, 512), "0 rows"),
        ((300, 192, 512), "300 rows"),
        ((64, 200, 512), "a depth of 200"),
        ((64, 192, 320), "320 columns"),
    ],
)
def test_products_off_the_tiles_are_refused(shape, bad):
    x, w = operands(*shape)
    with pytest.raises(ValueError, match=f"product_and_gelu does not support {bad} .multiples of"):
        gelu_products.product_and_gelu(x, w)


# Less than a step; steps in one piece and in several, with and without a remainder; GPT-2's width.
@pytest.mark.parametrize("width", [128, 2048, 128 * 37, 128 * 96, 50304])
@pytest.mark.parametrize("programs", [2, 264])
def test_cross_entropy_is_that_of_float64(width, programs):
    logits, targets = logits_and_targets(width, dtype="bfloat16")
    loss, gradient = cross_entropy.cross_entropy_rows(
        logits, targets, programs=programs, interpret=True
    )
    exact_loss, exact = exact_cross_entropy(logits, targets)
    np.testing.assert_allclose(loss, exact_loss, atol=3 * 2.0**-15)
    atol = 3 * 2.0**-15 * np.abs(exact).max()
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=BFLOAT16, atol=atol)


def test_the_gradient_with_z_loss_is_that_of_float64():
    c, width = 0.01, 128 * 37
    logits, targets = logits_and_targets(width, dtype="bfloat16")
    loss, gradient = cross_entropy.cross_entropy_rows(logits, targets, z_loss=c, interpret=True)
    alone, _ = cross_entropy.cross_entropy_rows(logits, targets, interpret=True)
    np.testing.assert_array_equal(loss, alone)
    _, exact = exact_cross_entropy(logits, targets)
    onehot = np.eye(width)[np.asarray(targets)]
    lse = np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1)[:, None]
    exact += 2 * c * lse * (exact + onehot)
    atol = 3 * 2.0**-15 * np.abs(exact).max()
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=BFLOAT16, atol=atol)


@pytest.mark.parametrize("column", [0, 128 * 37 - 1], ids=["piece", "remainder"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_row_that_is_not_finite_has_a_loss_that_is_not(bad, column):
    logits, targets = logits_and_targets(128 * 37, dtype="bfloat16")
    loss, _ = cross_entropy.cross_entropy_rows(
        logits.at[2, column].set(bad), targets, interpret=True
    )
    np.testing.assert_array_equal(np.isfinite(loss), [True, True, False, True, True])


@pytest.mark.parametrize(
    ("width", "reason"),
    [
        (1000, "multiples of 128"),
        (128 * 1000, "at most"),
        (16 * 128 * 37, "they do not divide into 32 pieces"),
    ],
)
def test_rows_off_the_lanes_are_refused(width, reason):
    with pytest.raises(ValueError, match=f"{width} columns .{reason}"):
        cross_entropy.cross_entropy_rows(
            jnp.zeros((1, width), jnp.bfloat16), jnp.zeros(1, jnp.int32)
        )


def test_the_kernels_serve_bfloat16_on_hopper_and_nothing_else():
    x, w = operands(64)
    for target, expected in ((H200, True), (A100, False), (B200, False)):
        with jax.sharding.use_abstract_mesh(mesh_of(target.kind)):
            assert kernels.multiplies_with_gelu(x, w, w.T) is expected
            single = (array.astype(jnp.float32) for array in (x, w, w.T))
            assert not kernels.multiplies_with_gelu(*single)
            assert not kernels.multiplies_with_gelu(x, w[:, :320], w.T[:320])
            assert not kernels.multiplies_with_gelu(x, w, w.T[:, :100])
            assert not kernels.multiplies_with_gelu(x[:60], w, w.T)
    assert kernels.multiplies_with_gelu(x, w, w.T) is is_hopper(device_kind())


def test_the_mlp_is_that_of_its_layers_bit_by_bit():
    """Plain JAX on a CPU computes the layers, so this tests how gradients are put together."""
    rngs = nnx.Rngs(0)
    options = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
    layers = nnx.Linear(128, 512, **options), nnx.Linear(512, 128, **options)
    x = operands(64, 128)[0]

    graph, weights = nnx.split(layers)

    def both(x, weights):
        def loss(x, weights):
            y = mlp(x, *nnx.merge(graph, weights))
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        return y, gradients

    def run():
        # Otherwise XLA omits roundings, and different ones from time to time.
        options = {"xla_allow_excess_precision": False}
        return jax.jit(lambda *x: both(*x), compiler_options=options)(x, weights)

    expected = run()
    with jax.sharding.use_abstract_mesh(mesh_of(H200.kind)):
        assert "gelu_gradient_of_product" in str(jax.make_jaxpr(both)(x, weights))
        found = run()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_compiled_kernels_are_those_of_float64_and_give_the_same_bits_twice():
    if not is_hopper(kind := device_kind()):
        pytest.skip(f"{kind} is no Hopper GPU")
    x, w = operands(20_000, 768, 3072)  # more tiles than programs, and a partial last tile
    h, y = value = gelu_products.product_and_gelu(x, w)
    check_value(x, w, h, y)
    d_y = operands(20_000, 768)[0][::-1]
    d_h = gelu_products.gelu_gradient_of_product(d_y, w.T, h)
    check_gradient(d_y, w, h, d_h)
    logits, targets = logits_and_targets(50304, dtype="bfloat16")
    losses = cross_entropy.cross_entropy_rows(logits, targets, programs=2)  # some rows per program
    exact_loss, exact = exact_cross_entropy(logits, targets)
    np.testing.assert_allclose(losses[0], exact_loss, atol=4 * 2.0**-15)
    np.testing.assert_allclose(
        losses[1].astype(jnp.float32), exact, rtol=BFLOAT16, atol=4 * 2.0**-15
    )
    again = (
        *gelu_products.product_and_gelu(x, w),
        gelu_products.gelu_gradient_of_product(d_y, w.T, h),
        *cross_entropy.cross_entropy_rows(logits, targets, programs=2),
    )
    for a, b in zip((*value, d_h, *losses), again, strict=True):
        np.testing.assert_array_equal(a, b)
    # Tiles of one cluster or of single programs, and the products that are left to XLA.
    for a, b in zip(
        (h, y, d_h),
        (
            *gelu_products.product_and_gelu(x, w, tile=Tile(together=1)),
            gelu_products.gelu_gradient_of_product(d_y, w.T, h, tile=Tile(together=1)),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(y, jax.jit(lambda h: gelu(h, False))(h))
