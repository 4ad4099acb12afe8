"""Calls of the kernels on the cases of the harness, with tiles that the test chooses."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import UNOPTIMIZED

from lowprec_attn import numerics
from lowprec_attn.arithmetic import points
from lowprec_attn.arithmetic.request import Extras, RandomStream, Spec, planes
from lowprec_attn.numerics import KvBlock, Numerics, RowMax, StandardMax
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.block_sizes import BlockSizes, Tile
from pallas_kernels.rounder import Rounder
from pallas_kernels.tpu import attention as tpu

MODULES = {"gpu": gpu, "tpu": tpu}
COMPILED = BlockSizes(
    forward=Tile(query=64, kv=16),
    key_gradients=Tile(query=64, kv=64),
    query_gradients=Tile(query=64, kv=32),
)

CASES = harness.cases_of("gpu")
CAUSAL = harness.CASES["causal"]
# Cases of several tiles and steps, cut by lengths and the diagonal.
REPEATED = {
    "gpu": harness.CASES["both_lengths_repeated_maxima"],
    "tpu": dataclasses.replace(
        harness.LONG,
        rows=200,
        keys=256,
        query_lengths=(170,),
        key_lengths=(250,),
        values="repeated_maxima",
    ),
}

# Presets that name another exponent are left out: they are `flash` with choices that
# test_kernel_points.py tries.
PRESETS = {
    name: n
    for name, n in numerics.PRESETS.items()
    if not n.normalize_probs and n.exponent in (None, "whole_max") and n.query.is_identity
}
RULES: dict[str, RowMax] = {name: rule() for name, rule in numerics.ROW_MAX_RULES.items()}

# Points at which only the forward kernel rounds. Tests of these points skip the backward kernels,
# which are slow to compile.
FORWARD = (
    "shift",
    "probs",
    "pv",
    "rescale",
    "accumulator",
    "stats",
    "normalizer",
    "output",
)

_SEED = (3, 7)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a run; equal calls share one compiled function.

    With `packed`, q, k and v are one array, and so are their gradients.
    """

    spec: Spec
    implementation: Any = gpu
    backward: bool = True
    packed: bool = False

    def __call__(self, arrays: dict[str, Any], extras: Extras) -> dict[str, jax.Array]:
        """out, lse and, with `backward`, dq, dk, dv."""
        qkv = self.qkv(arrays)
        if not self.backward:
            out, lse = self.attend(extras, *qkv)
            return {"out": out, "lse": lse}

        def attend(column: Any, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.attend(extras._replace(sinks=column), *qkv)

        (out, lse), pullback = jax.vjp(attend, extras.sinks, *qkv)
        dsinks, *gradients = pullback((arrays["do"].astype(out.dtype), arrays["dlse"]))
        dq, dk, dv = planes(*gradients)
        result = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        return result if dsinks is None else result | {"dsinks": dsinks}

    def qkv(self, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        """The arguments of `attend`: q, k and v, or one array that holds them."""
        qkv = tuple(arrays[x] for x in "qkv")
        return (jnp.stack(qkv, axis=2),) if self.packed else qkv

    def attend(self, extras: Extras, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """O and lse."""
        module = self.implementation
        attention = module.packed_attention if self.packed else module.attention
        return attention(*qkv, extras, self.spec)


@functools.cache
def compiled(call: Call) -> Callable[..., dict[str, jax.Array]]:
    # Optimization is off on a CPU: the kernels of these small cases take longer to compile than to
    # run.
    on_cpu = jax.default_backend() == "cpu"
    options = UNOPTIMIZED if on_cpu else None
    # A fresh lambda, because `jit` would reuse the trace of an equal call: a mutant would run the
    # original's program.
    return jax.jit(lambda *operands: call(*operands), compiler_options=options)


def call_of(
    case: harness.Case,
    chosen: Numerics,
    rule: RowMax = StandardMax(),  # noqa: B008 (frozen)
    sizes: Any = harness.GPU_TILES,
    *,
    kv_block: KvBlock | None = 16,
    **options: Any,
) -> Call:
    """The call of the GPU kernels for a case; `options` are passed to `Call`."""
    spec = Spec(
        numerics=chosen.replace(kv_block=kv_block),
        row_max=rule,
        scale=case.scale or case.head_size**-0.5,
        soft_cap=case.soft_cap,
        is_causal=case.is_causal,
        window=harness.sides(case.window),
        block_sizes=sizes,
    )
    return Call(spec, **options)


def kernel_call(
    kernels: str, case: harness.Case, chosen: Numerics, *rule: RowMax, **options: Any
) -> Call:
    """The call of the `gpu` or `tpu` kernels, with the tiles and steps of the harness or others."""
    row = harness.IMPLEMENTATIONS[kernels]
    how = {
        "sizes": row.block_sizes,
        "kv_block": row.kv_block,
        "implementation": MODULES[kernels],
    }
    return call_of(case, chosen, *rule, **(how | options))


def extras_of(case: harness.Case) -> Extras:
    """The lengths, segment ids, mask and random bits of a case."""
    lengths = [
        None if x is None else jnp.array(x, jnp.int32)
        for x in (case.query_lengths, case.key_lengths)
    ]
    indices = [jnp.arange(n, dtype=jnp.int32) for n in (case.batch, case.heads)]
    arrays = harness.inputs(case)
    segments = (
        jnp.asarray(arrays[name]) if case.segments else None
        for name in ("query_segments", "key_segments")
    )
    mask = jnp.asarray(arrays["mask"]) if case.mask is not None else None
    stream = RandomStream(jnp.array(_SEED, jnp.uint32), *indices)
    column = jnp.asarray(arrays["sinks"]) if case.sinks else None
    return Extras(None, mask, *lengths, stream, None, *segments, sinks=column)


def operands_of(case: harness.Case) -> tuple[dict[str, jax.Array], Extras]:
    """The arguments of a `Call`."""
    return {name: jnp.asarray(x) for name, x in harness.inputs(case).items()}, extras_of(case)


def run(case: harness.Case, call: Call) -> harness.Arrays:
    """The results of a call as float32 NumPy arrays."""
    return harness.as_float32(compiled(call)(*operands_of(case)))


def run_plain(case: harness.Case, call: Call) -> harness.Arrays:
    """The same arithmetic in NumPy, with nearest rounding in place of stochastic rounding."""
    spec = call.spec
    nearest = {
        point: str(rounding.format.name)
        for point in numerics.POINTS
        if (rounding := getattr(spec.numerics, point)) is not None and rounding.needs_bits
    }
    chosen = spec.numerics.replace(**nearest)
    return harness.run_plain(case, harness.inputs(case), chosen, spec.row_max)


def check_accuracy(case: harness.Case, call: Call) -> harness.Arrays:
    """Checks that a call is as accurate as the same arithmetic in NumPy; returns its result."""
    result, arrays = run(case, call), harness.inputs(case)
    # On their small cases the GPU kernels stay within the bounds without added noise.
    noise = harness.score_noise(case, arrays) if call.implementation is tpu else None
    plain, oracle = (
        {name: x[name] for name in result}
        for x in (run_plain(case, call), harness.oracle(case, arrays))
    )
    harness.check(result, plain, oracle, factor_of(call.spec.numerics), noise)
    return result


def factor_of(chosen: Numerics) -> int:
    """The allowed multiple of the error of `run_plain`; stochastic rounding moves twice as far."""
    return 4 if chosen.needs_bits else 2


def skip_point(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Makes kernels that are traced from now on skip the rounding at the point."""
    # The TPU implementation rounds some points outside its kernels.
    for rounder in (Rounder, points.Rounder):
        rounded = rounder.__call__

        def skipping(
            self: Any, x: Any, name: str, *rest: Any, rounded: Any = rounded, **options: Any
        ) -> Any:
            return x if name == point else rounded(self, x, name, *rest, **options)

        monkeypatch.setattr(rounder, "__call__", skipping)
    # A product casts its operand to the format of the point again, because compiled code needs it.
    unrounded = property(lambda self: numerics.get_format("float32"))
    monkeypatch.setattr(numerics.Rounding, "result_format", unrounded)


def check_rows_without_a_score(attention: Callable[..., Any], spec: Spec, head_size: int) -> None:
    """Checks that rows whose scores are all below the value of a masked score have no result.

    Their O and dQ must be 0 and their lse −inf. Of the 128 causal rows four are such rows, among
    them the first row, which sees one key, and the last, which sees all.
    """
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 128, 1, head_size)) for _ in range(4))
    empty = [0, 3, 20, 127]
    q[0, empty], k[..., 0] = 0, 2.0**63
    q[..., 0], q[0, empty, :, 0] = 0, -1.5 * 2.0**64  # S = −1.5 · 2**127: NumPy's −inf would warn
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    (out, lse), pullback = jax.vjp(lambda *qkv: attention(*qkv, Extras(), spec), *arrays)
    dq, dk, dv = pullback((jnp.asarray(do, jnp.bfloat16), jnp.ones_like(lse)))
    is_empty = np.isin(np.arange(128), empty)
    np.testing.assert_array_equal(np.isneginf(lse[0, :, 0]), is_empty)
    for x in (out, dq):
        found = np.asarray(x, np.float32)[0, :, 0]
        np.testing.assert_array_equal((found == 0).all(axis=-1), is_empty)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (dq, dk, dv))
