"""The checks of the compiled kernels on a device, in one table for the tests and the record.

Every check is a frozen record. Its `outcome()` measures and returns a JSON object with `passed`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import numpy as np
from boundaries import NARROW, bits_of, boundaries, expected
from harness import Case
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from kernel_calls import (
    CASES,
    CAUSAL,
    COMPILED,
    PRESETS,
    RULES,
    Call,
    call_of,
    compiled,
    factor_of,
    operands_of,
    run,
    run_plain,
)
from points import KERNEL_POINTS, ROUNDINGS, distances

from gpu.problems import (
    CROSSED,
    LARGE,
    LONG_STEPS,
    PACKED,
    PROBLEMS,
    TIES,
    describe,
    device_call,
    noise,
    oracle,
)
from lowprec_attn import numerics
from lowprec_attn.arithmetic.backward import delta_from_output
from lowprec_attn.arithmetic.places import Place
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import EXACT, FLASH, KvBlock, Numerics
from pallas_kernels.gpu.instructions import whole_exp2
from pallas_kernels.gpu.problem import Problem
from pallas_kernels.gpu.products import Rounder

Record = dict[str, Any]


class Check(Protocol):
    """One row of the table."""

    @property
    def case(self) -> str:
        """The name of the problem; checks of one case share its oracle."""
        ...

    def outcome(self) -> Record:
        """The measurements, their limits, and whether the check `passed`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors are at most twice those of the same numerics in NumPy; two runs give equal bits.

    The errors are measured against float64. Stochastic rounding may err four times as much, and
    every result may err by `noise`.
    """

    case: str
    preset: str
    rule: str = "standard"
    delta: str | None = None  # None: the choice of the preset
    kv_block: KvBlock | None = None  # None: a step is one tile

    def outcome(self) -> Record:
        problem, exact = PROBLEMS[self.case], oracle(self.case)
        chosen = PRESETS[self.preset]
        if self.delta is not None:
            chosen = chosen.replace(delta=self.delta)
        call = device_call(self.case, chosen, self.rule, self.kv_block)
        first, second = (run(problem, call) for _ in range(2))
        factor = factor_of(call.spec.numerics)
        bounds = harness.bounds(run_plain(problem, call), exact, factor, noise(self.case))
        errors = {name: harness.error(first[name], x) for name, x in exact.items()}
        zeros = {name: harness.error_of_zeros(x) for name, x in exact.items()}
        same_bits = all(np.array_equal(first[name], second[name]) for name in first)
        sees_zeros = all(
            zeros[name] > 2 * bounds[name] for name, x in exact.items() if harness.largest(x) > 1e-3
        )
        ratio = max(errors[name] / bounds[name] for name in errors)
        return {
            "shape": describe(problem),
            "error": errors,
            "bound": bounds,
            "error_of_zeros": zeros,
            "largest_error_over_bound": ratio,
            "two_runs_equal": same_bits,
            "passed": bool(ratio <= 1 and same_bits and sees_zeros),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """q, k and v in one array give the same bits as three arrays."""

    case: str
    preset: str

    def outcome(self) -> Record:
        problem = PACKED[self.case]
        apart = call_of(problem, PRESETS[self.preset], sizes=None, kv_block=64)
        results = [run(problem, dataclasses.replace(apart, packed=x)) for x in (False, True)]
        equal = {name: np.array_equal(x, results[1][name]) for name, x in results[0].items()}
        return {"shape": describe(problem), "equal": equal, "passed": all(equal.values())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ties:
    """Counting ties within a warp gives the same bits of O as exchanging counts between warps.

    A row-max rule moves m where it finds a tie, and P̄ is then rounded against another m. Only the
    last bits of O show it. The standard rule gives other bits.
    """

    case: str
    preset: str
    rule: str

    def outcome(self) -> Record:
        result, standard = (self._out(rule) for rule in (self.rule, "standard"))
        with mock.patch.object(Problem, "counts_ties_by_warp", False):
            exchanged = self._out(self.rule)
        differing = {
            "exchanged": float(np.mean(result != exchanged)),
            "standard": float(np.mean(result != standard)),
        }
        return {
            "shape": describe(PROBLEMS[self.case]),
            "differing": differing,
            "passed": differing["exchanged"] == 0 < differing["standard"],
        }

    def _out(self, rule: str) -> np.ndarray:
        call = device_call(self.case, PRESETS[self.preset], rule)
        forward = compiled.__wrapped__(dataclasses.replace(call, backward=False))
        return harness.as_float32(forward(*operands_of(PROBLEMS[self.case])))["out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points:
    """Each given bfloat16 point is there: the result lies nearer to the run with it than without.

    The distance is measured in units of the distance between these two runs, as in
    `test_points.closer`. If the point were missing, it would be 1.
    """

    points: tuple[str, ...]
    case: str = "causal"

    def outcome(self) -> Record:
        result = run(CAUSAL, self._call(*self.points))
        away = {}
        for point in self.points:
            others = tuple(x for x in self.points if x != point)
            on, off = (run_plain(CAUSAL, self._call(*x)) for x in ((*others, point), others))
            away[point] = distances(result, on, off)
        reached = all(away[point].keys() == self._reaches(point) for point in self.points)
        largest = max(x for by_result in away.values() for x in by_result.values())
        return {
            "distance": away,
            "largest_distance": largest,
            "bound": 0.25,
            "passed": bool(reached and largest < 0.25),
        }

    def _reaches(self, point: str) -> set[str]:
        # `stats` has already rounded the l that `normalizer` rounds, so a second rounding changes
        # nothing.
        again = point == "normalizer" and "stats" in self.points
        return set() if again else ROUNDINGS[point]

    def _call(self, *points: str) -> Call:
        return call_of(CAUSAL, EXACT.replace(**dict.fromkeys(points, "bfloat16")), sizes=COMPILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignedError:
    """The errors of `exact` that add up with one sign are 100 times below those of `flash`.

    Measured per head as ‖Σ e‖ / √(Σ ‖x‖²) over the rows, where e is the error of x. This is the
    relative RMS error where signs are random, and up to √T times as much where they agree. q, k and
    v hold bfloat16 values. With float32 arrays, whose gradients are stored without another
    rounding, all results are compared. With bfloat16 arrays, O before its rounding and the δ formed
    from it are.
    """

    case: str
    dtype: str

    def outcome(self) -> Record:
        exact = self._errors(EXACT.replace(output="float32"))
        flash = self._errors(FLASH)
        ratio = min(flash[name] / exact[name] for name in exact)
        return {
            "shape": describe(self._problem),
            "exact": exact,
            "flash": flash,
            "smallest_ratio": ratio,
            "bound": 100,
            "passed": bool(ratio >= 100),
        }

    @property
    def _problem(self) -> Case:
        return dataclasses.replace(PROBLEMS[self.case], dtype=self.dtype)

    def _errors(self, chosen: Numerics) -> dict[str, float]:
        """The signed error of every result, the largest over the heads."""
        problem = PROBLEMS[self.case]
        arrays, extras = operands_of(problem)
        arrays = {name: x if name == "dlse" else x.astype(self.dtype) for name, x in arrays.items()}
        spec = device_call(self.case, chosen, "standard").spec
        device = compiled(Call(spec))(arrays, extras)
        delta = jax.jit(lambda do, o: delta_from_output(do, o, chosen, jnp.dtype(self.dtype)))(
            arrays["do"], device["out"]
        )
        result = harness.as_float32(device | {"delta": delta})
        right = dict(oracle(self.case))
        do = harness.inputs(problem)["do"].astype(np.float64)
        right["delta"] = (do * right["out"]).sum(-1, keepdims=True)
        gradients = ("dq", "dk", "dv") if self.dtype == "float32" else ()
        return {
            name: signed_error(result[name], right[name]) for name in ("out", "delta", *gradients)
        }


def signed_error(x: np.ndarray, exact: np.ndarray) -> float:
    """The largest ‖Σ e‖ / √(Σ ‖x‖²) of a head, over batch and rows of [B, T, N, H]."""
    total = np.linalg.norm((x - exact).sum((0, 1)), axis=-1)
    return float(np.max(total / np.sqrt((exact**2).sum((0, 1, 3)))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBits:
    """Stochastic rounding at every point draws the same bits as `tiled`."""

    case: str = "causal"

    def outcome(self) -> Record:
        problem = dataclasses.replace(CAUSAL, heads=4, kv_heads=2)
        chosen = EXACT.replace(**dict.fromkeys(KERNEL_POINTS, "bfloat16:stochastic"))
        tiles = tiled.BlockSizes(query=5, kv_bwd=9)
        ours = run(problem, call_of(problem, chosen, sizes=COMPILED))
        theirs = run(problem, call_of(problem, chosen, sizes=tiles, implementation=tiled))
        differing = {
            name: harness.share_of_other_roundings(ours[name], x) for name, x in theirs.items()
        }
        return {
            "differing": differing,
            "bound": 0.05,
            "passed": max(differing.values()) < 0.05,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundTo:
    """Rounding of all codes, midpoints and their neighbours has the same bits as `ml_dtypes`."""

    fmt: str
    how: str
    case: str = "round_to"

    def outcome(self) -> Record:
        x = boundaries(self.fmt)
        rounded = np.asarray(ROUNDINGS_ON_DEVICE[self.how](x, self.fmt))
        right = expected(x, self.fmt)
        both_nan = np.isnan(rounded) & np.isnan(right)
        wrong = (bits_of(rounded) != bits_of(right)) & ~both_nan
        return {"values": x.size, "wrong": int(wrong.sum()), "passed": not wrong.any()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholePowers:
    """2^(x − n) is 2^-n times 2^x bit for bit, for all x ≤ 0 that `arithmetic.powers` forms.

    It also holds for all x that `hopper.powers` forms, which are lower by 64 and more and whose
    powers are normal numbers.

    The instruction is an approximation. `matched` has the same P̄ in both passes if the instruction
    errs alike for every whole part of its operand, S₂ − M. Above 0, where no operand of P̄ lies, it
    errs differently.
    """

    case: str = "powers"

    def outcome(self) -> Record:
        part = np.arange(2**17 + 1, dtype=np.float32) * np.float32(2.0**-17) - 1
        power = in_kernel(lambda x: whole_exp2(x, interpret=False))
        of_part = np.asarray(power(part))
        shifts = (*range(1, 32), *range(64, 126))
        wrong = {
            n: int((np.ldexp(np.asarray(power(part - np.float32(n))), n) != of_part).sum())
            for n in shifts
        }
        error = np.abs(of_part / np.exp2(part.astype(np.float64)) - 1).max()
        return {
            "values": (1 + len(shifts)) * part.size,
            "wrong": sum(wrong.values()),
            "error": float(error),
            "passed": not any(wrong.values()) and error < 2.0**-21,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryFloat32:
    """For all 2³² float32 numbers, `round_to` is monotone and kernels give the same bits.

    Together with `RoundTo` this is a full check. `RoundTo` shows that a code and the last number
    that rounds to it are right, and between the two a monotone rounding has no other value to give.
    """

    fmt: str
    how: str
    case: str = "round_to"

    def outcome(self) -> Record:
        chunk = 2**26
        wrong_of = jax.jit(functools.partial(wrong_roundings, fmt=self.fmt, how=self.how, n=chunk))
        wrong = sum(int(wrong_of(np.uint32(i))) for i in range(0, 2**32, chunk))
        return {"values": 2**32, "wrong": wrong, "passed": wrong == 0}


def wrong_roundings(first: jax.Array, *, fmt: str, how: str, n: int) -> jax.Array:
    """How many of the float32 with the bits first, first + 1, ... first + n − 1 are rounded wrong.

    Apart from the sign, bits ascend with the numbers. ∞ is the last number before NaN, so NaN
    stands for overflow in formats without ∞.
    """
    words = first + jnp.arange(n, dtype=jnp.uint32)
    x = float32_of(words)
    y = ROUNDINGS_ON_DEVICE[how](x, fmt)
    if how != "xla":
        by_xla = round_by_xla(x, fmt)
        equal = words_of(y) == words_of(by_xla)
        return jnp.sum(~equal & ~(jnp.isnan(y) & jnp.isnan(by_xla)))
    sign, infinity = jnp.uint32(1 << 31), jnp.uint32(0x7F800000)
    following = round_by_xla(float32_of(words + 1), fmt)
    ascends = (words_of(y) & ~sign) <= (words_of(following) & ~sign)
    keeps_sign = ((words_of(y) ^ words) & sign == 0) | jnp.isnan(y)
    is_last = words & ~sign >= infinity
    return jnp.sum(jnp.where(jnp.isnan(x), ~jnp.isnan(y), ~((ascends | is_last) & keeps_sign)))


def float32_of(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def words_of(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def round_by_xla(x: Any, fmt: str) -> jax.Array:
    return jax.jit(lambda x: numerics.round_to(x, fmt))(jnp.asarray(x))


def round_in_kernel(x: Any, fmt: str, *, point: str) -> jax.Array:
    """Rounds an array with `Rounder` in a compiled kernel of its own."""
    place = Place(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))

    def rounded(x: jax.Array) -> jax.Array:
        rounder = Rounder(
            EXACT.replace(**{point: fmt}), np.dtype(np.float32), None, interpret=False
        )
        return rounder(x, point, place)

    return in_kernel(rounded)(x)


def in_kernel(function: Callable[[jax.Array], jax.Array]) -> Callable[[Any], jax.Array]:
    """Returns `function`, elementwise on float32, computed by a compiled kernel."""
    return functools.partial(_in_kernel, function)


def _in_kernel(function: Callable[[jax.Array], jax.Array], x: Any) -> jax.Array:
    size = 1024
    padded = jnp.resize(jnp.asarray(x), (-(-x.size // size), size))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = function(x_ref[...])

    block = pl.BlockSpec((1, size), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel,
        grid=(padded.shape[0],),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(padded)
    return out.reshape(-1)[: x.size]


ROUNDINGS_ON_DEVICE: dict[str, Callable[[Any, str], jax.Array]] = {
    "xla": round_by_xla,
    "kernel_value": functools.partial(round_in_kernel, point="scores"),  # stays float32
    "kernel_operand": functools.partial(round_in_kernel, point="probs"),  # becomes an operand
}


ARITHMETIC = [("exact", "standard"), ("flash", "standard"), ("published", "dynamic_max")]
IN_KERNEL = ("kernel_value", "kernel_operand")

CHECKS: list[Check] = [
    *(
        Accuracy(case=case, preset=preset, rule=rule)
        for case in LARGE | CASES
        for preset, rule in ARITHMETIC
    ),
    *(
        Accuracy(case=case, preset=preset, rule=rule)
        for case, preset, rule in itertools.product(CROSSED, PRESETS, RULES)
        if not (case in CASES and (preset, rule) in ARITHMETIC)
    ),
    *(
        Accuracy(case=case, preset=preset, rule=rule, kv_block=kv_block)
        for (case, kv_block), preset, rule in itertools.product(
            LONG_STEPS.items(), ("flash", "published", "published_eager"), RULES
        )
    ),
    *(
        Accuracy(case=case, preset="normalized_delta", kv_block=kv_block)
        for case, kv_block in LONG_STEPS.items()
    ),
    *(Accuracy(case=case, preset="flash", delta="do_o_storage") for case in CROSSED),  # no preset's
    *(Packed(case=case, preset="flash") for case in PACKED if case != "off_tile_1000"),
    *(Packed(case="off_tile_1000", preset=preset) for preset in PRESETS),
    *(
        Ties(case=case, preset=preset, rule=rule)
        for case in TIES
        for preset in ("flash", "published")
        for rule in RULES
        if rule != "standard"
    ),
    *(Points(points=(point,)) for point in KERNEL_POINTS),
    *(Points(points=pair) for pair in itertools.combinations(KERNEL_POINTS, 2)),
    *(
        SignedError(case=case, dtype=dtype)
        for case in ("grouped_1024", "one_sign_values_2048", "repeated_maxima_2048")
        for dtype in ("float32", "bfloat16")
    ),
    RandomBits(),
    WholePowers(),
    *(RoundTo(fmt=fmt, how="xla") for fmt in NARROW),
    *(RoundTo(fmt=fmt, how=how) for fmt in ("bfloat16", "float16") for how in IN_KERNEL),
    *(EveryFloat32(fmt=fmt, how="xla") for fmt in NARROW),
    *(EveryFloat32(fmt=fmt, how=how) for fmt in ("bfloat16", "float16") for how in IN_KERNEL),
]


def record_of(check: Check) -> Record:
    """The outcome of a check, with its name and fields; a disagreement on lse = −inf fails it."""
    assert dataclasses.is_dataclass(check)
    record = {"check": type(check).__name__, **dataclasses.asdict(check)}
    try:
        return record | check.outcome()
    except AssertionError as error:
        return record | {"passed": False, "message": str(error)}
