"""The GPU kernels: in the interpreter on any machine, compiled where there is a GPU (`-m gpu`).

Both run through the common harness, with calls of their own: kernels are asked directly, so that
their tiles can be chosen.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from test_points import ROUNDINGS, closer

from lowprec_attn import numerics, tiled
from lowprec_attn.numerics import EXACT, POINTS, Numerics, RowMax, StandardMax
from lowprec_attn.request import Extras, RandomStream, Request, Spec
from lowprec_attn.steps import Place
from pallas_kernels.block_sizes import BlockSizes, Tile
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.rounding import Rounder

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

TILE = Tile(query=16, kv=16, stages=1)
INTERPRETED = BlockSizes(forward=TILE, key_gradients=TILE, query_gradients=TILE, interpret=True)
COMPILED = BlockSizes(
    forward=Tile(query=64, kv=16),
    key_gradients=Tile(query=64, kv=64),
    query_gradients=Tile(query=64, kv=32),
)
CASES = {name: case for name, case in harness.CASES.items() if not (case.mask or case.bias)}
PRESETS_AND_RULES: list[tuple[str, RowMax]] = [
    ("flash", numerics.StandardMax()),
    ("auxiliary_output", numerics.StandardMax()),
    ("delta_dp_p", numerics.StandardMax()),
    ("stochastic_output", numerics.StandardMax()),
    ("published", numerics.PublishedMax()),
    ("published", numerics.DynamicMax()),
]
REPEATED = harness.CASES["both_lengths_repeated_maxima"]
SEED = jnp.array([3, 7], jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a run; equal calls share one compiled function."""

    spec: Spec
    implementation: Any = gpu
    backward: bool = True

    def __call__(self, arrays: dict[str, Any], extras: Extras) -> dict[str, jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.implementation.attention(q, k, v, extras, self.spec)

        if not self.backward:
            out, lse = attend(*(arrays[x] for x in "qkv"))
            return {"out": out, "lse": lse}
        (out, lse), pullback = jax.vjp(attend, *(arrays[x] for x in "qkv"))
        dq, dk, dv = pullback((arrays["do"].astype(out.dtype), arrays["dlse"]))
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@functools.cache
def compiled(call: Call) -> Callable[..., dict[str, jax.Array]]:
    # Unoptimised code: the kernels of these small cases take longer to compile than to run.
    on_cpu = jax.default_backend() == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    # `jit` would find the trace of an equal call, and a mutant's would be that of the original.
    return jax.jit(lambda *operands: call(*operands), compiler_options=options)


def call_of(
    case: harness.Case,
    chosen: Numerics,
    rule: RowMax = StandardMax(),  # noqa: B008 (frozen)
    sizes: Any = INTERPRETED,
    **options: Any,
) -> Call:
    spec = Spec(
        numerics=chosen.replace(kv_block=16),
        row_max=rule,
        scale=case.scale or case.head_size**-0.5,
        is_causal=case.is_causal,
        block_sizes=sizes,
    )
    return Call(spec, **options)


def extras_of(case: harness.Case) -> Extras:
    lengths = [
        None if x is None else jnp.array(x, jnp.int32)
        for x in (case.query_lengths, case.key_lengths)
    ]
    indices = [jnp.arange(n, dtype=jnp.int32) for n in (case.batch, case.heads)]
    return Extras(None, None, *lengths, RandomStream(SEED, *indices))


def run(case: harness.Case, call: Call) -> harness.Arrays:
    arrays = {name: jnp.asarray(x) for name, x in harness.inputs(case).items()}
    return harness.as_float32(compiled(call)(arrays, extras_of(case)))


def check_exact(case: harness.Case, sizes: BlockSizes) -> None:
    call, arrays = call_of(case, EXACT, sizes=sizes), harness.inputs(case)
    plain = harness.run_plain(case, arrays, call.spec.numerics)
    harness.check(run(case, call), plain, harness.oracle(case, arrays))


def check_preset(preset: str, rule: RowMax, sizes: BlockSizes) -> None:
    call = call_of(REPEATED, numerics.PRESETS[preset], rule, sizes)
    arrays, chosen = harness.inputs(REPEATED), call.spec.numerics
    # The plain implementation rounds to nearest; stochastic rounding moves up to twice as far.
    factor = 4 if chosen.needs_bits else 2
    plain = harness.run_plain(REPEATED, arrays, chosen.replace(output="bfloat16"), rule)
    harness.check(run(REPEATED, call), plain, harness.oracle(REPEATED, arrays), factor)


# Compilation takes the time here; the device runs every case.
SLOW = {"gqa_head_32", "one_row", "more_rows", "more_keys_head_64"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_exact_arithmetic_is_as_accurate_as_plain_float32(case: str) -> None:
    check_exact(CASES[case], INTERPRETED)


@pytest.mark.parametrize(("preset", "rule"), PRESETS_AND_RULES)
def test_presets_and_rules_are_as_accurate_as_plain(preset: str, rule: RowMax) -> None:
    check_preset(preset, rule, INTERPRETED)


# Points that the forward kernel alone rounds at; the backward kernels are slow to compile.
FORWARD = ("probs", "pv", "rescale", "accumulator", "stats", "output")
CAUSAL = harness.CASES["causal"]


def of_point(point: str, fmt: str = "bfloat16") -> Call:
    return call_of(CAUSAL, EXACT.replace(**{point: fmt}), backward=point not in FORWARD)


@functools.cache
def plain_of_point(point: str, fmt: str) -> harness.Arrays:
    call = of_point(point, fmt)
    result = harness.run_plain(CAUSAL, harness.inputs(CAUSAL), call.spec.numerics)
    return result if call.backward else {name: result[name] for name in ("out", "lse")}


def skip_point(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    rounded = Rounder.__call__

    def skipping(self: Rounder, x: jax.Array, name: str, *rest: Any) -> jax.Array:
        return x if name == point else rounded(self, x, name, *rest)

    monkeypatch.setattr(Rounder, "__call__", skipping)
    # A product casts its operand to the point's format once more, as the compiled code needs it.
    unrounded = property(lambda self: numerics.get_format("float32"))
    monkeypatch.setattr(numerics.Rounding, "result_format", unrounded)


@pytest.mark.parametrize("point", POINTS)
def test_rounding_is_there_and_a_mutant_without_it_is_noticed(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, off = plain_of_point(point, "bfloat16"), plain_of_point(point, "float32")
    expected = ROUNDINGS[point] & on.keys()
    assert closer(run(CAUSAL, of_point(point)), on, off) == expected
    skip_point(monkeypatch, point)
    compiled.cache_clear()
    mutant = run(CAUSAL, of_point(point))
    compiled.cache_clear()
    assert closer(mutant, off, on) == expected
    with pytest.raises(AssertionError, match="between on and off"):
        closer(mutant, on, off)


STOCHASTIC = EXACT.replace(**dict.fromkeys(POINTS, "bfloat16:stochastic"))


def check_random_bits(sizes: BlockSizes) -> None:
    case = dataclasses.replace(CAUSAL, heads=4, kv_heads=2)
    ours = run(case, call_of(case, STOCHASTIC, sizes=sizes))
    tiles = tiled.BlockSizes(query=5, kv_bwd=9)
    theirs = run(case, call_of(case, STOCHASTIC, sizes=tiles, implementation=tiled))
    for name, x in theirs.items():
        # Other bits would move about half of all entries by 2^-8 of their size and more; sums
        # in another order tip few roundings.
        assert np.mean(np.abs(ours[name] - x) > 2.0**-9 * np.abs(x)) < 0.05, name


def test_random_bits_are_those_of_tiled() -> None:
    check_random_bits(INTERPRETED)


def test_tiles_do_not_change_the_arithmetic() -> None:
    tall = dataclasses.replace(
        INTERPRETED,
        forward=Tile(query=32, kv=64),
        key_gradients=Tile(query=32, kv=16),
        query_gradients=Tile(query=16, kv=32),
    )
    a, b = (
        run(REPEATED, call_of(REPEATED, numerics.PUBLISHED, numerics.PublishedMax(), sizes))
        for sizes in (INTERPRETED, tall)
    )
    harness.check_same(b, a, max(REPEATED.rows, REPEATED.keys))


def test_vmap_with_its_own_lengths_and_a_head_size_between_powers_of_two() -> None:
    case = harness.Case(batch=3, heads=1, kv_heads=1, head_size=24, key_lengths=(20, 0, 7))
    call = call_of(case, EXACT, backward=False)
    arrays = {name: jnp.asarray(x)[:, None] for name, x in harness.inputs(case).items()}
    mapped = jax.vmap(lambda x, lengths: call(x, Extras(key_lengths=lengths)), in_axes=(0, 0))(
        arrays, jnp.array(case.key_lengths, jnp.int32)[:, None]
    )
    expected = harness.oracle(case, harness.inputs(case))
    for name, x in mapped.items():
        assert harness.error(np.asarray(x)[:, 0], expected[name]) < 1e-5, name


def request(chosen: Numerics = numerics.FLASH, **options: Any) -> Request:
    sizes = options.pop("sizes", INTERPRETED)
    spec = Spec(numerics=chosen, row_max=StandardMax(), scale=1.0, block_sizes=sizes)
    shape = (1, 8, 2, options.pop("head_size", 64))
    return Request(spec=spec, q_shape=shape, kv_shape=shape, dtype=np.dtype("float32"), **options)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(), None),
        (request(sizes=None), "CUDA GPU"),
        (request(sizes=tiled.BlockSizes()), "block_sizes"),
        (request(numerics.STANDARD), "normalize_probs"),
        (request(EXACT.replace(pv="float8_e4m3fn")), "pv=float8_e4m3fn"),
        (request(EXACT.replace(output="bf16_m5")), "output=bf16_m5"),
        (request(EXACT.replace(ds="bfloat16:error_positive")), "ds=bfloat16:error_positive"),
        (request(EXACT.replace(kv_block=48)), "kv_block=48"),
        (request(has_bias=True), "bias"),
        (request(has_mask=True), "mask"),
        (request(head_size=8), "head size 8"),
        (request(head_size=320), "head size 320"),
    ],
)
def test_what_is_declined_is_named(asked: Request, reason: str | None) -> None:
    answer = gpu.unsupported(dataclasses.replace(asked, platform="cpu"))
    assert answer is None if reason is None else reason in str(answer)
    assert gpu.unsupported(request(sizes=None, platform="cuda")) is None


def test_block_sizes_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"query must be one of .* got 48"):
        Tile(query=48, kv=64)
    with pytest.raises(ValueError, match=r"warps .* got 3"):
        Tile(query=64, kv=64, warps=3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_exact_arithmetic_on_the_device(case: str) -> None:
    check_exact(CASES[case], COMPILED)


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "rule"), PRESETS_AND_RULES)
def test_presets_and_rules_on_the_device(preset: str, rule: RowMax) -> None:
    check_preset(preset, rule, COMPILED)


@pytest.mark.gpu
def test_random_bits_on_the_device_are_those_of_tiled() -> None:
    check_random_bits(COMPILED)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128])
def test_two_runs_on_the_device_give_the_same_bits(head_size: int) -> None:
    case = harness.Case(
        rows=777, keys=777, heads=4, head_size=head_size, dtype="bfloat16", is_causal=True
    )
    call = dataclasses.replace(
        call_of(case, numerics.PUBLISHED),
        spec=Spec(numerics=numerics.PUBLISHED, row_max=StandardMax(), scale=0.1, is_causal=True),
    )
    first, second = run(case, call), run(case, call)
    for name, x in first.items():
        assert np.all(np.isfinite(x)), name
        np.testing.assert_array_equal(second[name], x, err_msg=name)


def near_codes(fmt: str) -> np.ndarray:
    """Every value of a 16-bit format, every midpoint, and both float32 neighbours of each."""
    codes = np.arange(2**16, dtype=np.uint16).view(getattr(ml_dtypes, fmt, fmt))
    values = codes.astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    overflow = values[-1] + (values[-1].astype(np.float64) - values[-2]) / 2
    between = (values[1:].astype(np.float64) + values[:-1]) / 2
    centres = np.concatenate([values, between, [overflow, -overflow]]).astype(np.float32)
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    around = [np.nextafter(centres, np.float32(x)) for x in (-np.inf, np.inf)]
    return np.concatenate([centres, *around, special])


def rounded_on_device(x: np.ndarray, point: str, fmt: str) -> np.ndarray:
    """`Rounder` in a compiled kernel of its own."""
    size = 1024
    padded = np.resize(x, (-(-x.size // size), size))
    place = Place(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        rounding = numerics.get_rounding(fmt)
        out_ref[...] = Rounder(None, interpret=False)(x_ref[...], point, rounding, place)

    block = pl.BlockSpec((1, size), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel,
        grid=(padded.shape[0],),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(jnp.asarray(padded))
    return np.asarray(out).reshape(-1)[: x.size]


@pytest.mark.gpu
@pytest.mark.parametrize("point", ["scores", "probs"])  # as an instruction, as a pair of casts
@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_rounding_on_the_device_is_exact_for_every_code(fmt: str, point: str) -> None:
    x = near_codes(fmt)
    with np.errstate(over="ignore"):
        expected = x.astype(getattr(ml_dtypes, fmt, fmt)).astype(np.float32)
    np.testing.assert_array_equal(rounded_on_device(x, point, fmt), expected)
