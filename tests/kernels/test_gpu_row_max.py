"""Row-max rules as the GPU kernel applies them: in its units of score, with its own tie test."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from lowprec_attn import numerics
from lowprec_attn.numerics import MASKED, DynamicMax, PublishedMax, RowMax, row_max
from pallas_kernels.gpu import instructions

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

ROWS, KEYS = 1024, 64
RULES: dict[str, RowMax] = {
    **{name: rule() for name, rule in numerics.ROW_MAX_RULES.items()},
    "beta 7": PublishedMax(beta=7.0),
    "tolerance 0.5": DynamicMax(tolerance=0.5),
}


def many_ties() -> np.ndarray:
    """Scores that repeat within a step, or lie 1e-3 or an ulp apart, where a tolerance decides."""
    rng = np.random.default_rng(0)
    s = rng.integers(-6, 7, (ROWS, KEYS)) * rng.choice([0.5, 1, 9], (ROWS, 1))
    s = (s + rng.choice([0.0, 0.0, 1e-3, 2e-3], s.shape)).astype(np.float32)
    towards = rng.choice([-np.inf, np.inf], s[1::2].shape).astype(np.float32)
    s[1::2] = np.nextafter(s[1::2], towards)
    s[::5] -= 40
    return s


def masked(s: np.ndarray) -> np.ndarray:
    """A copy of the scores with some rows masked in part and some in full."""
    s = s.copy()
    s[::7, 3:] = MASKED
    s[::11] = MASKED
    return s


def running_max(rule: RowMax, s: np.ndarray, unit: float) -> np.ndarray:
    """The rule's maximum after a running maximum of −3, with scores s in units of `unit`."""
    in_units = masked(s / np.float32(unit))
    r_m, m_prev = in_units.max(-1, keepdims=True), np.full((ROWS, 1), -3 / unit, np.float32)
    m = np.asarray(
        jax.jit(functools.partial(rule.running_max, unit=unit, is_repeated=row_max.is_repeated))(
            r_m, in_units - r_m, m_prev
        )
    )
    return m * np.float32(unit)


def defined(rule: RowMax, s: np.ndarray) -> np.ndarray:
    """The rule by its definition."""
    return np.asarray(jax.jit(rule)(masked(s), np.full((ROWS, 1), -3, np.float32)))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_units_that_are_powers_of_two_do_not_change_a_bit(rule: RowMax) -> None:
    s = many_ties()
    for unit in (0.125, 4.0):
        np.testing.assert_array_equal(running_max(rule, s, unit), defined(rule, s))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_other_units_change_roundings_only(rule: RowMax) -> None:
    unit = float(np.float32(80**-0.5))
    # In that unit scores are integers, so no rounding creates or removes a tie or crosses a
    # tolerance.
    s = np.rint(many_ties()) * np.float32(unit)
    # s / unit, r_m, β·r_m or the shift, their sum and m · unit are each rounded once.
    np.testing.assert_allclose(running_max(rule, s, unit), defined(rule, s), rtol=2.0**-21)


def many_distances() -> np.ndarray:
    """S − r_m for scores of such steps, as kernels form it."""
    s = masked(many_ties())
    s[:4, 1:] = s[:4, :1] - 1  # a single maximum on the left, and on the right
    s[2:4, -1] = s[2:4, 0] + 1
    below = s - s.max(-1, keepdims=True)
    # An S of −inf minus an r_m that is bounded from below. No rule asks for these rows. But a word
    # that counts one of them, in its lower or upper half, also counts the row 8 above or below.
    below[16:20] = below[40:44] = -np.inf
    return below


def check_repeated(repeated: np.ndarray, below: np.ndarray, tolerance: float) -> None:
    """Checks that the rows with repeated maxima are found, among those that a rule asks for."""
    asked = np.isfinite(below).any(-1)
    expected = np.asarray(row_max.is_repeated(jnp.asarray(below), tolerance))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(repeated[asked], expected[asked])


def execute(text: str, constraints: str, *args: jax.Array, dtype: type, pack: int = 1) -> jax.Array:
    """Executes the PTX that counts negative numbers, in NumPy, for every element of the arrays.

    A thread receives `pack` elements of an array at a time: one, or the elements in rows i and i +
    8 of sixteen, as a tensor-core product distributes them.
    """
    assert constraints.split(",") == ["=r"] * pack + ["r"] * pack * len(args)
    shape = args[0].shape
    place = (-1, pack, 8, *shape[1:]) if pack > 1 else (1, 1, *shape)
    given = (x for array in args for x in np.split(np.reshape(array, place), pack, axis=1))
    value = {f"${i}": x.view(np.int32) for i, x in enumerate(given, pack)}
    for line in text.strip("{} \n").split(";")[:-1]:
        name, *operands = re.findall(r"[.$\w]+", line)
        match name, [value.get(x, x) for x in operands[1:]]:
            case ".reg", _:
                continue
            case "mov.b32", [str(number)]:
                value[operands[0]] = np.full_like(value["$2"], int(number, 0), np.uint32)
            case "mov.b32", [register]:
                value[operands[0]] = register
            case "cvt.pack.sat.s2.s32.b32", [*pair, word]:
                high, low = (np.clip(x, -2, 1).astype(np.uint32) & 3 for x in pair)
                value[operands[0]] = word << 4 | high << 2 | low
            case "and.b32", [word, mask]:
                value[operands[0]] = word & np.uint32(int(mask, 0))
            case "popc.b32", [word]:
                value[operands[0]] = np.bitwise_count(word)
            case "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc", [_, _, _, *x]:
                # A row of A is the words of four threads; every column of B is the same, all ones.
                first, second, ones, start, *_ = x
                for name, word in ((operands[0], first), (operands[2], second)):
                    count = np.bitwise_count(word & ones).sum(-1, keepdims=True)
                    value[name] = count + start
            case _:
                pytest.fail(f"the test does not know {line}")
    results = np.concatenate([value[f"${i}"] for i in range(pack)], axis=1)
    return jnp.asarray(results.reshape(shape), dtype)


WAYS = {"exchange": instructions.is_repeated, "warp": instructions.is_repeated_by_warp}


@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("keys", [KEYS, 2 * KEYS])
@pytest.mark.parametrize("way", WAYS)
def test_the_code_of_kernels_finds_the_same_ties(
    way: str, keys: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "_instruction", execute)
    below = many_distances()
    below = np.hstack([below - 1] * (keys // KEYS - 1) + [below])
    repeated = np.asarray(WAYS[way](jnp.asarray(below), tolerance, interpret=False))
    for copy in repeated.T:
        check_repeated(copy[:, None], below, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.5])
def test_kernels_find_the_same_ties(tolerance: float) -> None:
    below = many_distances()

    def kernel(below_ref: jax.Array, out_ref: jax.Array) -> None:
        repeated = instructions.is_repeated(below_ref[...], tolerance, interpret=False)
        out_ref[...] = repeated.astype(jnp.int32)

    out = pl.pallas_call(
        kernel,
        grid=(ROWS // 64,),
        in_specs=[pl.BlockSpec((64, KEYS), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((64, 1), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((ROWS, 1), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(jnp.asarray(below))
    check_repeated(np.asarray(out) != 0, below, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [16, 64, 128])
@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.5])
def test_warps_find_the_same_ties_in_a_product(tolerance: float, keys: int) -> None:
    """As in a kernel of attention, where the product decides which thread holds which scores."""
    rng = np.random.default_rng(0)
    q = rng.integers(-1, 2, (ROWS, 16)) * rng.choice([0.25, 1, 3], (ROWS, 1))
    k = rng.integers(-1, 2, (keys, 16)) + rng.choice([0, 0, 0, 2.0**-9], (keys, 16))

    def kernel(q_ref: jax.Array, k_ref: jax.Array, out_ref: jax.Array) -> None:
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
        by_thread = jnp.max(jnp.max(s.reshape(64, -1, 4, 2), axis=3), axis=1)
        below = s - jnp.max(by_thread, axis=1, keepdims=True)
        repeated = instructions.is_repeated_by_warp(below, tolerance, interpret=False)
        out_ref[...] = repeated.astype(jnp.int32)

    q, k = jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.bfloat16)
    out = pl.pallas_call(
        kernel,
        grid=(ROWS // 64,),
        in_specs=[
            pl.BlockSpec((64, 16), lambda i: (i, 0)),
            pl.BlockSpec((keys, 16), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((64, 4), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((ROWS, 4), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(q, k)
    s = np.float64(q) @ np.float64(k).T  # exact in float32 as well
    below = jnp.asarray(s - s.max(-1, keepdims=True), jnp.float32)
    expected = np.asarray(row_max.is_repeated(below, tolerance))
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.asarray(out) != 0, np.broadcast_to(expected, (ROWS, 4)))
