"""The trainer's kernels (cross-entropy, LayerNorm, GELU), interpreted, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from tiny import tiny_settings
from trainer_oracles import BFLOAT16, exact_cross_entropy, exact_gelu, logits_and_targets

from lowprec_attn import attention
from lowprec_attn.gpt2 import layers
from lowprec_attn.gpt2.layers import gelu
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.devices import compiler_options
from lowprec_attn.training.step import make_steps, root_key
from pallas_kernels.gpu import gelu as kernels
from pallas_kernels.gpu import layer_norm
from pallas_kernels.gpu.cross_entropy import Columns, cross_entropy_rows

COLUMNS = Columns(held=64, tile=32, warps=4)

# Rows shorter than what is held, rows of whole tiles, rows with a remainder, and single columns.
WIDTHS = [1, 50, 64, 128, 257]


@functools.partial(jax.jit, static_argnames=("dtype", "columns", "z_loss"))
def interpreted_cross_entropy(logits, targets, dtype, columns=COLUMNS, z_loss=0.0):
    return cross_entropy_rows(
        logits, targets, dtype, z_loss=z_loss, columns=columns, interpret=True
    )


# Formats of logits and gradient. bfloat16 logits are loaded as words of two columns.
FORMATS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize(
    ("width", "logits_dtype", "dtype"),
    [
        *((width, *of) for of in (FORMATS[0], FORMATS[2]) for width in WIDTHS),
        (WIDTHS[-1], *FORMATS[1]),
    ],
)
def test_cross_entropy_is_that_of_float64(width, logits_dtype, dtype):
    width *= 2 if logits_dtype == "bfloat16" else 1
    logits, targets = logits_and_targets(width, dtype=logits_dtype)
    loss, gradient = interpreted_cross_entropy(logits, targets, dtype)
    exact_loss, exact = exact_cross_entropy(logits, targets)
    assert gradient.dtype == dtype
    # lse is as large as the logits, up to 520, where half an ulp is 2**-15. lse, its logarithm and
    # the difference are each rounded once. The relative error of p is the error of its exponent.
    np.testing.assert_allclose(loss, exact_loss, atol=3 * 2.0**-15)
    relative = BFLOAT16 if dtype == "bfloat16" else 0
    atol = 3 * 2.0**-15 * np.abs(exact).max()
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=relative, atol=atol)


@pytest.mark.parametrize(("logits_dtype", "dtype"), FORMATS)
def test_the_gradient_with_z_loss_is_that_of_float64(logits_dtype, dtype):
    c = 0.01
    logits, targets = logits_and_targets(514, dtype=logits_dtype)
    loss, gradient = interpreted_cross_entropy(logits, targets, dtype, z_loss=c)
    alone, _ = interpreted_cross_entropy(logits, targets, dtype)
    np.testing.assert_array_equal(loss, alone)
    _, exact = exact_cross_entropy(logits, targets)
    onehot = np.eye(514)[np.asarray(targets)]
    lse = np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1)[:, None]
    exact += 2 * c * lse * (exact + onehot)
    # As without z_loss, the error of lse is at most 3 · 2**-15. It is also the relative error of
    # softmax · (1 + 2 c lse).
    relative = BFLOAT16 if dtype == "bfloat16" else 0
    atol = 3 * 2.0**-15 * np.abs(exact).max()
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=relative, atol=atol)


@pytest.mark.parametrize(("logits_dtype", "dtype"), [FORMATS[0], FORMATS[2]])
def test_the_schedule_does_not_change_the_result(logits_dtype, dtype):
    logits, targets = logits_and_targets(514, dtype=logits_dtype)
    first = interpreted_cross_entropy(logits, targets, dtype)
    relative = 2.0**-7 if dtype == "bfloat16" else 1e-5  # an ulp: one rounds up, one down
    for columns in (
        Columns(held=0, tile=16, warps=4),
        Columns(held=256, tile=2, warps=4),
        None,
    ):
        other = interpreted_cross_entropy(logits, targets, dtype, columns)
        for a, b in zip(first, other, strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=relative, atol=3 * 2.0**-15)


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("column", [0, 141, 513], ids=["held", "tile", "remainder"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_row_that_is_not_finite_has_a_loss_that_is_not(bad, column, logits_dtype):
    logits, targets = logits_and_targets(514, dtype=logits_dtype)
    loss, _ = interpreted_cross_entropy(logits.at[2, column].set(bad), targets, "bfloat16")
    np.testing.assert_array_equal(np.isfinite(loss), [True, True, False, True, True])


@pytest.mark.parametrize(("logits_dtype", "dtype"), [FORMATS[0], FORMATS[2]])
def test_logits_of_minus_infinity_have_probability_0(logits_dtype, dtype):
    logits, targets = logits_and_targets(514, dtype=logits_dtype)
    # All that is held, and the first tile after it.
    hidden = 256
    logits, targets = logits.at[1:4, :hidden].set(-jnp.inf), targets.at[1:4].set(400)
    loss, gradient = interpreted_cross_entropy(logits, targets, dtype)
    of_rest = interpreted_cross_entropy(logits[1:4, hidden:], targets[1:4] - hidden, dtype)
    assert (gradient[1:4, :hidden] == 0).all()
    for found, expected in zip((loss[1:4], gradient[1:4, hidden:]), of_rest, strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        relative = 2.0**-7 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(found, expected, rtol=relative, atol=3 * 2.0**-15)


def test_what_words_of_two_logits_cannot_hold_is_refused():
    for width, dtype in ((3, "bfloat16"), (4, "float32")):
        logits, targets = jnp.zeros((1, width), jnp.bfloat16), jnp.zeros(1, jnp.int32)
        with pytest.raises(ValueError, match=f"got {width} columns and {dtype}"):
            cross_entropy_rows(logits, targets, dtype)


def norm_inputs(rows, width, dtype):
    rng = np.random.default_rng(width)
    residual, y, d_residual, d_x = rng.standard_normal((4, rows, width))
    scale = 1 + 0.3 * rng.standard_normal(width)
    residual = 3 * residual + 20  # a mean far from 0
    residual, scale, d_residual = (
        jnp.asarray(x, jnp.float32) for x in (residual, scale, d_residual)
    )
    return residual, jnp.asarray(y, dtype), scale, d_residual, jnp.asarray(d_x, dtype)


def exact_norm(residual, y, scale, d_residual, d_x):
    """Outputs and gradients in float64; the gradients use the full Jacobian of every row."""
    residual, y, scale, d_residual, d_x = (
        np.asarray(x, np.float64) for x in (residual, y, scale, d_residual, d_x)
    )
    total, width = residual + y, residual.shape[-1]
    rho = 1 / np.sqrt(total.var(axis=-1, keepdims=True) + 1e-5)
    x_hat = (total - total.mean(axis=-1, keepdims=True)) * rho
    jacobian = np.eye(width) - 1 / width - x_hat[:, :, None] * x_hat[:, None, :] / width
    gradient = d_residual + np.einsum("ni,nij->nj", d_x * scale, rho[:, :, None] * jacobian)
    return total, x_hat * scale, gradient, (d_x * x_hat).sum(axis=0)


def kernels_with_gradients(residual, y, scale, d_residual, d_x):
    """Outputs and gradients of the kernels; y may be None."""
    out = layer_norm.add_norm(residual, y, scale, d_x.dtype, interpret=True)
    adds = y is not None
    return out, layer_norm.add_norm_gradients(
        out[0], scale, d_residual, d_x, adds=adds, interpret=True
    )


def plain_with_gradients(residual, y, scale, d_residual, d_x):
    """Outputs and gradients of the trainer's function, lowered for this host."""

    def function(residual, y, scale):
        return layers.add_norm(residual, y, scale, d_x.dtype)

    out, pullback = jax.vjp(function, residual, y, scale)
    return out, pullback((d_residual, d_x))


@pytest.mark.parametrize("function", [kernels_with_gradients, plain_with_gradients])
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "adds"),
    [
        (70, 33, "bfloat16", True),  # two full programs and part of a third
        (70, 33, "float32", False),
        (32, 64, "float32", True),
        (32, 64, "bfloat16", False),
        (1, 1, "bfloat16", True),
    ],
)
def test_norm_is_that_of_float64(adds, rows, width, dtype, function):
    residual, y, scale, d_residual, d_x = norm_inputs(rows, width, dtype)
    y = y if adds else None
    (total, x), (d_total, d_y, d_scale) = jax.jit(function)(residual, y, scale, d_residual, d_x)
    exact = exact_norm(residual, 0 if y is None else y, scale, d_residual, d_x)
    # The residual, up to 30 in size, is rounded once, by at most 2**-20. x̂ has that error times ρ.
    rho = 1 if width > 1 else 1e-5**-0.5
    atol = 8 * 2.0**-20 * rho
    rounded = BFLOAT16 if dtype == "bfloat16" else 0
    np.testing.assert_allclose(total, exact[0], atol=2.0**-20)
    np.testing.assert_allclose(x.astype(jnp.float32), exact[1], rtol=rounded, atol=atol)
    np.testing.assert_allclose(d_total, exact[2], atol=4 * atol)
    np.testing.assert_allclose(d_scale, exact[3], atol=rows * 4 * atol)
    assert (total.dtype, x.dtype) == (jnp.float32, dtype)
    if adds:
        np.testing.assert_array_equal(d_y, d_total.astype(dtype))
    else:
        assert d_y is None


@pytest.mark.parametrize("function", [kernels_with_gradients, plain_with_gradients])
def test_a_residual_that_nothing_else_reads_has_no_gradient(function):
    residual, y, scale, d_residual, d_x = norm_inputs(70, 33, "bfloat16")

    def alone(residual, y, scale):
        return layers.add_norm(residual, y, scale, y.dtype)[1]

    expected = function(residual, y, scale, jnp.zeros_like(d_residual), d_x)[1]
    if function is kernels_with_gradients:
        found = function(residual, y, scale, None, d_x)[1]
    else:
        found = jax.vjp(alone, residual, y, scale)[1](d_x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_norm_that_nothing_reads_hands_the_gradient_of_the_residual_on():
    residual, y, scale, d_residual, _ = norm_inputs(4, 8, "float32")
    _, pullback = jax.vjp(lambda *args: layers.add_norm(*args, "float32")[0], residual, y, scale)
    for found, expected in zip(
        pullback(d_residual), (d_residual, d_residual, jnp.zeros_like(scale)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_the_residual_is_not_rounded_before_it_is_normalised():
    """Around 1000, bfloat16 numbers are 4 apart, while the variance of the stream is 1."""
    residual = 1000 + jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
    _, x = layers.add_norm(residual, None, jnp.ones(64), "bfloat16")
    zeros = np.zeros(residual.shape)
    exact = exact_norm(residual, zeros, np.ones(64), zeros, zeros)[1]
    np.testing.assert_allclose(x.astype(jnp.float32), exact, rtol=BFLOAT16, atol=1e-3)


def test_what_is_added_has_the_format_of_the_output():
    with pytest.raises(ValueError, match="y must be bfloat16, got float32"):
        layers.add_norm(jnp.ones((2, 4)), jnp.ones((2, 4)), jnp.ones(4), "bfloat16")


@functools.partial(jax.jit, static_argnames="interpret")
def gelu_and_slope(x, interpret):
    if interpret:
        return kernels.gelu(x, interpret=True), kernels.gelu_gradient(
            x, jnp.ones_like(x), interpret=True
        )
    y, pullback = jax.vjp(gelu, x)
    return y, pullback(jnp.ones_like(x))[0]


@pytest.mark.parametrize("interpret", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize(("size", "dtype"), [(4096, "float32"), (4097, "bfloat16")])
def test_gelu_is_that_of_float64(size, dtype, interpret):
    x = jnp.asarray(np.r_[np.linspace(-12, 12, size - 3), -1e4, 0, 1e4], dtype)
    found, expected = gelu_and_slope(x, interpret), exact_gelu(np.asarray(x, np.float64))
    # The exponent is up to 100 where σ is not yet 0, and has an error of some ulps. The relative
    # error of σ is 100 times as large.
    relative = (BFLOAT16 if dtype == "bfloat16" else 0) + 300 * 2.0**-24
    for result, exact in zip(found, expected, strict=True):
        assert result.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(result, np.float64), exact, rtol=relative, atol=64 * 2.0**-24
        )


@pytest.mark.parametrize("size", [2**31 - 8, 2**31 + 8, 2**32])
def test_gelu_of_more_numbers_than_int32_counts_takes_no_kernel(size):
    def both(x):
        y, pullback = jax.vjp(gelu, x)
        return y, pullback(y)

    traced = str(jax.make_jaxpr(both)(jax.ShapeDtypeStruct((size,), jnp.float32)))
    assert ("pallas_call" in traced) == (size < 2**31)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("activation_dtype", ["bfloat16", "float32"])
def test_a_step_lowered_for_cuda_calls_the_kernels_and_no_other_does(activation_dtype):
    abstract_device = pytest.importorskip("jax.sharding").AbstractDevice
    settings = tiny_settings(model__layers=1, model__activation_dtype=activation_dtype)
    steps = make_steps(settings, Attend(attention.dot_product_attention, packed=True))
    inputs = jax.ShapeDtypeStruct((1, 8, 32), jnp.int32)
    root = root_key(settings)
    device = abstract_device(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    names = ("cross_entropy_rows", "layer_norm_forward", "layer_norm_backward")
    names += ("gelu_gradient",)
    with jax.sharding.use_abstract_mesh(mesh):  # lowering asks for the kind of the GPU
        traced = jax.jit(steps.train).trace(jax.eval_shape(steps.init, root), inputs, inputs, root)
        for_gpu = traced.lower(lowering_platforms=("cuda",)).as_text()
        for_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert all(name in for_gpu for name in names)
    # GELU of a bfloat16 product is fused into the product.
    assert ("gelu_value" in for_gpu) == (activation_dtype == "float32")
    assert "triton" not in for_cpu


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_compiled_kernels_are_those_of_float64_and_give_the_same_bits_twice():
    rows = jax.jit(functools.partial(cross_entropy_rows, dtype=jnp.bfloat16))
    for logits_dtype in ("float32", "bfloat16"):
        logits, targets = logits_and_targets(50304, dtype=logits_dtype)
        loss, gradient = rows(logits, targets)
        exact_loss, exact = exact_cross_entropy(logits, targets)
        np.testing.assert_allclose(loss, exact_loss, atol=4 * 2.0**-15)
        np.testing.assert_allclose(
            gradient.astype(jnp.float32), exact, rtol=BFLOAT16, atol=4 * 2.0**-15
        )
        for a, b in zip((loss, gradient), rows(logits, targets), strict=True):
            np.testing.assert_array_equal(a, b)
    inputs = norm_inputs(70, 768, "bfloat16")
    (_, x), (d_total, _, d_scale) = jax.jit(plain_with_gradients)(*inputs)
    _, exact_x, exact_d_total, exact_d_scale = exact_norm(*inputs)
    np.testing.assert_allclose(x.astype(jnp.float32), exact_x, rtol=BFLOAT16, atol=2.0**-17)
    np.testing.assert_allclose(d_total, exact_d_total, atol=2.0**-15)
    np.testing.assert_allclose(d_scale, exact_d_scale, atol=70 * 2.0**-15)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("rows", [1, 2, 70, 4096])
def test_gelu_of_a_compiled_product_is_that_of_float64(rows):
    """With more than one row it is GELU of the float32 sums, not of the bfloat16 product.

    The product of a single row is XLA's own, which rounds every term of its sums.
    """
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 768)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((768, 3072)) * 4 / 768**0.5, jnp.bfloat16)

    @functools.partial(jax.jit, compiler_options=compiler_options("gpu"))
    def product_and_gelu(x, kernel):
        h = jnp.dot(x, kernel)
        return h, gelu(h)

    h, y = product_and_gelu(x, kernel)
    before = np.asarray(h, np.float64)
    # float32 sums of 768 terms, each up to 2 in size.
    if rows > 1:
        before = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
        np.testing.assert_allclose(np.asarray(h, np.float64), before, rtol=BFLOAT16, atol=2.0**-16)
    exact, _ = exact_gelu(before)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=BFLOAT16, atol=2.0**-16)
    for first, second in zip((h, y), product_and_gelu(x, kernel), strict=True):
        np.testing.assert_array_equal(first, second)
