"""Second derivatives, your own `jax.shard_map`, traced options: right, or refused by name."""

import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic import softmax
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.attention import reference, tiled
from lowprec_attn.numerics import MODES, Numerics, RowMax, round_to
from pallas_kernels.gpu.hopper import attention as hopper

pytestmark = pytest.mark.usefixtures("strict_promotion")

Inputs = dict[str, jax.Array]
KEY = jax.random.key(5)
# Most of the time of these tests is compilation.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
INTERPRETED = {
    "gpu": harness.GPU_TILES,
    "tpu": harness.TPU_TILES,
} | ({"hopper": harness.HOPPER_TILES} if hopper.is_available() else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", ["bfloat16", "float8_e4m3fn"])
def test_rounding_passes_tangents_and_cotangents_unchanged(fmt: str, mode: Any) -> None:
    x, t = jax.random.normal(KEY, (2, 3, 5))
    bits = jax.random.bits(KEY, (3, 5), jnp.uint32)

    def rounded(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, bits: round_to(x, fmt, mode, bits))(x, bits)

    y, tangent = jax.jit(lambda: jax.jvp(rounded, (x,), (t,)))()
    np.testing.assert_array_equal(y, rounded(x))
    np.testing.assert_array_equal(tangent, t)
    np.testing.assert_array_equal(jax.jit(lambda: jax.vjp(rounded, x)[1](t)[0])(), t)


@pytest.mark.parametrize("rule", [rule() for rule in numerics.ROW_MAX_RULES.values()], ids=str)
def test_the_row_maximum_has_no_derivative(rule: RowMax) -> None:
    spec = Spec(numerics=numerics.PUBLISHED, row_max=rule, scale=1.0)
    q, v = jnp.ones((1, 1, 1, 2, 4)), jnp.ones((1, 1, 3, 4))
    s = jax.random.normal(KEY, (1, 1, 1, 2, 3))
    place = Place(span(0, 2)[:, None], span(0, 3)[None])

    def maximum(s: jax.Array) -> jax.Array:
        start = softmax.initial_state(q, v, spec, Extras())
        return softmax.softmax_step(start, s, v, spec, Extras(), place).m

    assert np.all(quick_jit(lambda: jax.jvp(maximum, (s,), (jnp.ones_like(s),)))()[1] == 0)


B, T, S, N, K, H = 2, 7, 9, 4, 2, 8
# Tiles that divide neither length. A tile of queries divides a block of keys, so a loop over every
# block reaches blocks that some row of a tile does not see.
ODD = {"kv_block": 4, "block_sizes": tiled.BlockSizes(query=2, kv_bwd=5)}
LENGTHS = np.array([S, 4], np.int32)


def inputs(seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, H), "bias": (1, N, T, S)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["k"][:, 1] = arrays["k"][:, 0]  # some rows have two equal maxima
    arrays["bias"][..., 1] = arrays["bias"][..., 0]
    arrays["scale"] = np.array(0.4)
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def loss_of(out: jax.Array, lse: jax.Array) -> jax.Array:
    """A loss whose gradients by O and lse depend on both, so second derivatives go through both."""
    return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))


def loss(
    implementation: str | None,
    chosen: Numerics,
    row_max: RowMax,
    x: Inputs,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
) -> jax.Array:
    odd = dict(ODD) if implementation == "tiled" else {}
    if "kv_block" in odd:
        chosen = chosen.replace(kv_block=odd.pop("kv_block"))
    out, lse = attention.dot_product_attention(
        **harness.by_argument(x),
        is_causal=is_causal,
        local_window_size=window,
        key_value_seq_lengths=LENGTHS,
        numerics=chosen,
        row_max=row_max,
        rng_key=KEY,
        implementation=implementation,
        return_residual=True,
        **odd,
    )
    return loss_of(out, lse)


def plain_loss(x: Inputs, is_causal: bool = True) -> jax.Array:
    """The same loss, differentiated by JAX itself."""
    k, v = (jnp.repeat(x[name], N // K, axis=2) for name in "kv")
    s = jnp.einsum("btnh,bsnh->bnts", x["q"], k, precision="highest") * x["scale"] + x["bias"]
    rows, cols = (
        jnp.arange(size).reshape(shape) for size, shape in ((T, (1, 1, T, 1)), (S, (1, 1, 1, S)))
    )
    seen = cols < LENGTHS.reshape(B, 1, 1, 1)
    seen = seen & (cols <= rows) if is_causal else seen
    s = jnp.where(seen, s, -1e30)
    lse = jax.nn.logsumexp(s, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), v, precision="highest")
    return loss_of(out, lse.transpose(0, 2, 1))


def second_derivatives(function: Callable[[Inputs], jax.Array]) -> tuple[Inputs, Inputs, Inputs]:
    """The gradient, and the Hessian times a direction, forward over reverse and reverse over it."""
    x, t = inputs(), inputs(seed=1)

    def slope(x: Inputs) -> jax.Array:
        gradient = jax.grad(function)(x)
        return sum((jnp.vdot(gradient[name], t[name]) for name in t), jnp.float32(0))

    return *jax.jvp(jax.grad(function), (x,), (t,)), jax.grad(slope)(x)


@functools.cache
def plain_second_derivatives(is_causal: bool) -> Inputs:
    function = functools.partial(plain_loss, is_causal=is_causal)
    return jax.jit(lambda: second_derivatives(function))()[1]


# `dense` and `tiled` share what rounds; only `tiled` has loops.
KINDS = [
    ("dense", "exact", "standard", True),
    ("dense", "stochastic_output", "standard", True),
    ("dense", "standard", "standard", False),
    ("dense", "matched", "dynamic_max", True),
    ("tiled", "published", "published", True),
]


@pytest.mark.parametrize(("implementation", "preset", "rule", "is_causal"), KINDS)
def test_second_derivatives_are_near_those_of_plain_attention(
    implementation: str, preset: str, rule: str, is_causal: bool
) -> None:
    chosen, row_max = numerics.PRESETS[preset], numerics.ROW_MAX_RULES[rule]()
    function = functools.partial(loss, implementation, chosen, row_max, is_causal=is_causal)
    _, *results = quick_jit(lambda: second_derivatives(function))()
    # Up to 16 rounded factors, each off by at most 2^-9 (twice that if stochastic), or by 2^-24. If
    # one rounding lacked its derivative, the error would be of the order of the result.
    bound = 16 * (2.0**-24 if preset == "exact" else 2.0**-9)
    for result in results:
        for name, exact in plain_second_derivatives(is_causal).items():
            difference = np.linalg.norm(result[name] - exact)
            assert difference <= bound * np.linalg.norm(exact), name


@pytest.mark.parametrize("seen", [{"is_causal": True}, {"is_causal": False, "window": (2, 1)}])
def test_what_tiled_differentiates_rounds_the_same_values(seen: dict[str, Any]) -> None:
    """Blocks that a row does not see are fully masked; the published rule would move m there."""
    row_max = numerics.PublishedMax()
    function = functools.partial(loss, "tiled", numerics.PUBLISHED, row_max, **seen)
    x = inputs()
    first = jax.jit(jax.grad(function))(x)
    beside_second, _ = jax.jit(lambda: jax.jvp(jax.grad(function), (x,), (x,)))()
    for name, x in first.items():
        np.testing.assert_array_equal(beside_second[name], x, err_msg=name)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_refuse_second_derivatives_and_forward_mode(implementation: str) -> None:
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)

    def attend(q: jax.Array) -> jax.Array:
        sizes = INTERPRETED[implementation]
        return attention.dot_product_attention(
            q, q, q, implementation=implementation, block_sizes=sizes
        )

    def gradient(q: jax.Array, factor: jax.Array) -> jax.Array:
        return jax.grad(lambda q: jnp.sum(attend(q) * factor))(q)

    def by_query(q: jax.Array) -> jax.Array:
        return gradient(q, jnp.ones_like(q))

    def by_cotangent(q: jax.Array) -> jax.Array:
        return gradient(jnp.ones_like(q), q)

    def in_layers(q: jax.Array) -> jax.Array:
        layer = jax.checkpoint(attend)
        return jnp.sum(jax.lax.scan(lambda x, _: (layer(x), None), q, length=2)[0])

    if implementation != "hopper":  # `checkpoint` refuses the effects of its interpreter
        assert jax.eval_shape(jax.grad(in_layers), q).shape == q.shape
    for function in (by_query, by_cotangent):
        assert jax.eval_shape(function, q).shape == q.shape  # first derivatives are served
        for second in (
            lambda q, function=function: jax.jvp(function, (q,), (q,)),
            lambda q, function=function: jax.grad(lambda q: jnp.sum(function(q)))(q),
        ):
            text = f"second derivatives of implementation '{implementation}'.*'tiled' or 'dense'"
            with pytest.raises(NotImplementedError, match=text):
                jax.eval_shape(second, q)
    with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
        jax.jit(lambda q: jax.jvp(attend, (q,), (q,))).lower(q)


SHARDED = harness.Case(batch=4, heads=4, is_causal=True, key_lengths=(20, 3, 11, 7))
STOCHASTIC = numerics.FLASH.replace(
    scores="bfloat16:stochastic", output="bfloat16:stochastic", ds="bfloat16:stochastic"
)


def over_batch(function: Callable[..., Any], out_specs: Any, **options: Any) -> Callable[..., Any]:
    """Maps a function of q, k, v, lengths, bias and scale over two devices; the last two whole."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = PartitionSpec("data")
    in_specs = (split,) * 4 + (PartitionSpec(),) * 2
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return quick_jit(mapped)


def shard_arguments() -> tuple[jax.Array, ...]:
    arrays = harness.inputs(SHARDED)
    bias = np.random.default_rng(1).standard_normal((1, 4, 20, 20)).astype(np.float32)
    lengths = np.array(SHARDED.key_lengths, np.int32)
    return tuple(jnp.asarray(x) for x in (*(arrays[n] for n in "qkv"), lengths, bias, 0.3))


def value_and_gradients(
    attend: Callable[..., Any], q: Any, k: Any, v: Any, lengths: Any, bias: Any, scale: Any
) -> tuple[Any, tuple[Any, ...]]:
    def loss(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
        out, lse = attend(
            *(q, k, v, bias),
            scale=scale,
            key_value_seq_lengths=lengths,
            is_causal=True,
            rng_key=KEY,
        )
        return loss_of(out, lse), out

    (_, out), gradients = jax.value_and_grad(loss, range(5), has_aux=True)(q, k, v, bias, scale)
    return out, gradients


@pytest.mark.parametrize("implementation", ["dense", None])
def test_your_own_shard_map_with_its_default_check(implementation: str | None) -> None:
    """Random bits follow the whole batch. Gradients of unsplit arrays are sums over devices."""
    chosen = STOCHASTIC if implementation == "dense" else STOCHASTIC.replace(kv_block=8)
    options = {"implementation": implementation, "numerics": chosen, "return_residual": True}
    whole = functools.partial(attention.dot_product_attention, **options)
    within = functools.partial(attention.within_shard(batch_axis="data"), **options)
    split = PartitionSpec("data")
    specs = (split, ((split,) * 3 + (PartitionSpec(),) * 2))
    args = shard_arguments()
    shards = over_batch(functools.partial(value_and_gradients, within), specs)(*args)
    expected = quick_jit(functools.partial(value_and_gradients, whole))(*args)
    for x, y in zip(jax.tree.leaves(shards), jax.tree.leaves(expected), strict=True):
        # Another order of sums tips a rounding in 2^14; other random bits would change every second
        # entry.
        error = np.linalg.norm(np.asarray(x - y)) / np.linalg.norm(y)
        assert error < 2.0**-12, (x.shape, error)


def test_second_derivatives_within_shard_map() -> None:
    def slope(q: jax.Array, *rest: jax.Array) -> jax.Array:
        def gradient(q: jax.Array) -> jax.Array:
            attend = functools.partial(
                attention.dot_product_attention, return_residual=True, implementation="tiled"
            )
            return value_and_gradients(attend, q, *rest)[1][0]

        return jax.jvp(gradient, (q,), (q,))[1]

    args = shard_arguments()
    result = over_batch(slope, PartitionSpec("data"))(*args)
    expected = jax.jit(slope)(*args)
    assert np.linalg.norm(result - expected) <= 2.0**-12 * np.linalg.norm(expected)


def test_shard_map_where_nothing_varies() -> None:
    q = shard_arguments()[0]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    attend = functools.partial(attention.dot_product_attention, is_causal=True)
    whole = PartitionSpec()
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(whole,) * 3, out_specs=whole)
    np.testing.assert_array_equal(jax.jit(mapped)(q, q, q), jax.jit(attend)(q, q, q))


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_refuse_the_check_of_shard_map(implementation: str) -> None:
    def attend(q: jax.Array, *_: jax.Array) -> jax.Array:
        return attention.within_shard(batch_axis="data")(
            q, q, q, implementation=implementation, block_sizes=INTERPRETED[implementation]
        )

    args, split = shard_arguments(), PartitionSpec("data")
    args = (jnp.ones((4, 64, 2, 64), jnp.bfloat16), *args[1:])
    text = "jax.shard_map with check_vma=True.*check_vma=False.*attention.within_shard"
    with pytest.raises(NotImplementedError, match=text):
        jax.eval_shape(over_batch(attend, split), *args)
    unchecked = over_batch(attend, split, check_vma=False)
    assert jax.eval_shape(unchecked, *args).shape == args[0].shape


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_a_traced_scale_is_multiplied_where_a_number_is(implementation: str) -> None:
    def gradients(x: Inputs, scale: Any) -> tuple[jax.Array, Inputs]:
        def value(x: Inputs) -> jax.Array:
            y = x | {"scale": scale}
            return loss(implementation, numerics.PUBLISHED, numerics.StandardMax(), y)

        return jax.value_and_grad(value)(x)

    x = {name: y for name, y in inputs().items() if name != "scale"}
    number = jax.jit(functools.partial(gradients, scale=0.37))(x)
    traced = jax.jit(gradients)(x, 0.37)
    for a, b in zip(jax.tree.leaves(traced), jax.tree.leaves(number), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("implementation", "delta"), [("dense", "dp_p"), ("tiled", "after_cast")])
def test_the_gradient_of_a_scale_is_that_of_the_reference(implementation: str, delta: str) -> None:
    x = {name: y for name, y in inputs().items() if name != "scale"}
    q, k, v, bias = (np.asarray(x[name], np.float64) for name in ("q", "k", "v", "bias"))
    masking = reference.Masking(is_causal=True, bias=bias, key_lengths=LENGTHS)

    def exact(scale: float) -> float:
        result = reference.attention(q, k, v, scale=scale, masking=masking)
        return np.sum(np.sin(3 * result.o)) + np.sum(np.cos(result.lse))

    half = N // 2  # two arithmetics, whose calls both contribute
    chosen = [numerics.EXACT] * half + [numerics.EXACT.replace(delta=delta)] * half

    def value(scale: jax.Array) -> jax.Array:
        out, lse = attention.dot_product_attention(
            **harness.by_argument(x),
            scale=scale,
            is_causal=True,
            key_value_seq_lengths=LENGTHS,
            numerics=chosen,
            implementation=implementation,
            return_residual=True,
        )
        return loss_of(out, lse)

    gradient = quick_jit(jax.grad(value))
    step = 1e-4  # the error of a central difference is of the order of its square
    for scale in (0.37, 0.0):
        expected = (exact(scale + step) - exact(scale - step)) / (2 * step)
        np.testing.assert_allclose(gradient(scale), expected, rtol=1e-4)


def test_a_traced_scale_of_sharded_attention() -> None:
    q, k, v, *_ = shard_arguments()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = attention.sharded(mesh, batch_axis="data", head_axis="model")

    def gradient(attend: Callable[..., jax.Array]) -> jax.Array:
        def value(scale: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attend(q, k, v, scale=scale, numerics=numerics.EXACT)))

        return jax.jit(jax.grad(value))(jnp.bfloat16(0.3)).astype(jnp.float32)

    whole = gradient(attention.dot_product_attention)
    np.testing.assert_allclose(gradient(split), whole, rtol=2.0**-8)  # one ulp of bfloat16


def jitted(**options: Any) -> Callable[..., Any]:
    q = jnp.ones((1, 16, 2, 16))
    return jax.jit(functools.partial(attention.dot_product_attention, q, q, q, **options))


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_refuse_a_traced_scale(implementation: str) -> None:
    sizes = INTERPRETED[implementation]
    attend = jitted(implementation=implementation, block_sizes=sizes)
    with pytest.raises(NotImplementedError, match=f"'{implementation}' .* a traced scale"):
        attend(scale=0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"is_causal": True}, r"is_causal must be a Python bool, got.*bool\[\].*static_argnames"),
        ({"scale": np.ones(2, np.float32)}, r"scale must be one real number, got float32\(2,\)"),
        ({"scale": True}, r"scale must be one real number, got bool\(\)"),
    ],
)
def test_other_traced_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        jitted()(**options)
