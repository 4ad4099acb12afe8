"""Our implementations: every preset, every row-max rule and two steps with two of them."""

import functools
from collections.abc import Callable, Hashable, Iterator
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Attention, JaxCandidate
from benchmarks.shapes import Shape
from lowprec_attn.arithmetic.request import Extras, RandomStream, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import (
    EXACT,
    FLASH,
    PLAIN_POINTS,
    POINTS,
    PRESETS,
    PUBLISHED,
    ROW_MAX_RULES,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import BlockSizes, default_block_sizes, is_long
from pallas_kernels.tpu import attention as tpu

# What serves every preset on a platform, as JAX names it; `tiled` on any other.
GENERAL: dict[str, tuple[str, ModuleType]] = {"gpu": ("gpu", gpu), "tpu": ("tpu", tpu)}

_HOPPER = ("hopper", hopper)  # serves some


def implementation(platform: str) -> tuple[str, ModuleType]:
    """Name and module of the general implementation that is timed on a platform."""
    return GENERAL.get(platform, ("tiled", tiled))


def presets(platform: str) -> Iterator[JaxCandidate]:
    """`gpu flash`, `gpu flash dynamic_max`, ...; a preset's own rule is the standard one."""
    if platform == "gpu":
        for preset in (
            *("flash", "float32_output", "normalized_delta"),
            *("corrected_after_cast", "matched", "matched_float32_output"),
        ):
            yield _candidate(_HOPPER, preset, PRESETS[preset], StandardMax())
        yield _candidate(_HOPPER, "flash dynamic_max", FLASH, ROW_MAX_RULES["dynamic_max"]())
        yield _candidate(_HOPPER, "flash unordered", FLASH, StandardMax(), sizes=unordered)
        yield _candidate(_HOPPER, "published", PUBLISHED, StandardMax())
        yield _candidate(_HOPPER, "published dynamic_max", PUBLISHED, DynamicMax())
    for preset, numerics in PRESETS.items():
        yield _candidate(implementation(platform), preset, numerics, StandardMax())
    for preset in ("flash", "published"):
        for rule, row_max in ROW_MAX_RULES.items():
            if row_max is not StandardMax:
                name = f"{preset} {rule.removesuffix('_max')}_max"
                yield _candidate(implementation(platform), name, PRESETS[preset], row_max())


def steps(platform: str) -> Iterator[JaxCandidate]:
    """Presets in steps of another length, to show the cost of a step of several tiles."""
    for preset, kv_block in (("flash", 512), ("published", 64)):
        numerics = PRESETS[preset].replace(kv_block=kv_block)
        yield _candidate(
            implementation(platform), f"{preset} kv_block={kv_block}", numerics, StandardMax()
        )


def points(platform: str) -> Iterator[JaxCandidate]:
    """`flash` with one more point rounded, for each that it leaves in float32."""
    for point in POINTS:
        if point not in PLAIN_POINTS and getattr(FLASH, point) == getattr(EXACT, point):
            numerics = FLASH.replace(**{point: "bfloat16"})
            yield _candidate(implementation(platform), f"flash + {point}", numerics, StandardMax())


def _candidate(
    implementation: tuple[str, ModuleType],
    name: str,
    numerics: Numerics,
    row_max: RowMax,
    sizes: Callable[[Shape], Hashable] = lambda _: None,
) -> JaxCandidate:
    """`sizes`: the tiles of a shape; None, its implementation's own."""
    prefix, module = implementation
    attention = functools.partial(_attention, module, numerics, row_max, sizes)
    return JaxCandidate(f"{prefix} {name}", attention)


def unordered(shape: Shape) -> BlockSizes:
    """The Hopper kernels' tiles of a causal call whose dQ has no order."""
    long = is_long(shape.length, is_causal=True)
    return default_block_sizes(shape.head_size, long=long, unordered=True)


def _attention(
    module: ModuleType,
    numerics: Numerics,
    row_max: RowMax,
    sizes: Callable[[Shape], Hashable],
    problem: Problem,
) -> Attention:
    """Raises NotImplementedError for what the implementation declines."""
    shape = problem.shape
    spec = Spec(
        numerics=numerics,
        row_max=row_max,
        scale=problem.scale,
        is_causal=True,
        block_sizes=sizes(shape),
    )
    request = Request(
        spec=spec, q_shape=shape.qkv, kv_shape=shape.qkv, dtype=jnp.dtype(problem.dtype)
    )
    if (reason := module.unsupported(request)) is not None:
        raise NotImplementedError(reason)

    def attend(q: Array, k: Array, v: Array) -> Array:
        stream = RandomStream(
            jnp.zeros(2, jnp.uint32),
            jnp.arange(shape.batch, dtype=jnp.int32),
            jnp.arange(shape.heads, dtype=jnp.int32),
        )
        return module.attention(q, k, v, Extras(stream=stream), spec)[0]

    return attend
